"""Models with different tokenizers: their embeddings and heads meet token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import write_tokenizer
from merge_runs import CONFIG, ROOMY, linear, llama, read_model, write_model

from atlas_cli.errors import CheckpointError
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.merging.vocabulary import Vocabulary, align
from atlas_cli.models.tokenizers import Tokenizer, read_template, read_tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
START, END = "<|im_start|>", "<|im_end|>"


def model(folder: Path, seed: int, added: list[str], rows: int = 0) -> dict[str, torch.Tensor]:
    """A model with 20 words and some more tokens; `rows` beyond these belong to no token."""
    tensors = llama(seed)
    draw = torch.Generator().manual_seed(100 + seed)
    for name in (EMBEDDING, HEAD):
        tensors[name] = torch.randn((20 + len(added) + rows, 8), generator=draw)
    write_model(folder, tensors)
    config = CONFIG | {"vocab_size": 20 + len(added) + rows, "eos_token_id": 20}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, added, size=20)
    return tensors


def ids(folder: Path) -> dict[str, int]:
    return dict(read_tokenizer(folder, "it").vocabulary)


def test_tokens_in_another_order_meet_their_own_rows(merge, tmp_path: Path):
    one = model(tmp_path / "m1", 1, [START, END])
    two = model(tmp_path / "m2", 2, [END, START])
    out = merge(linear(1, 1, tokenizer_source="base"))
    found = read_model(out)
    for name in (EMBEDDING, HEAD):
        torch.testing.assert_close(found[name][20], (one[name][20] + two[name][21]) / 2)
        torch.testing.assert_close(found[name][:20], (one[name][:20] + two[name][:20]) / 2)
    assert ids(out) == ids(tmp_path / "m1")


def test_other_ids_are_told_if_a_recipe_does_not_align_them(call, merge, tmp_path: Path):
    for number, added in enumerate([[START, END], [END, START]], start=1):
        model(tmp_path / f"m{number}", number, added)
    (tmp_path / "r.yaml").write_text(json.dumps(linear(1, 1)))
    said = call("merge", "r.yaml", "out", "--memory", "8GB").err
    assert "./m2: its tokenizer has other ids than that of ./m1 for 2 tokens" in said
    assert "tokenizer_source: base or union aligns them" in said


def test_rows_that_belong_to_no_token_are_left_out(merge, tmp_path: Path):
    one = model(tmp_path / "m1", 1, [])
    two = model(tmp_path / "m2", 2, [], rows=12)
    out = merge(linear(1, 1, tokenizer_source="base"))
    torch.testing.assert_close(read_model(out)[HEAD], (one[HEAD] + two[HEAD][:20]) / 2)
    padded = merge(linear(1, 1, tokenizer={"source": "base", "pad_to_multiple_of": 8}), to="padded")
    rows = read_model(padded)[HEAD]
    torch.testing.assert_close(rows[:20], read_model(out)[HEAD])
    torch.testing.assert_close(rows[20:], rows[:20].mean(0).expand(4, 8))
    assert json.loads((padded / "config.json").read_text())["vocab_size"] == 24


def test_a_union_takes_what_a_model_lacks_from_those_that_have_it(merge, tmp_path: Path):
    one = model(tmp_path / "m1", 1, [])
    two = model(tmp_path / "m2", 2, [START])
    three = model(tmp_path / "m3", 3, [END, START])
    out = merge(linear(1, 1, 2, tokenizer_source="union"))
    found, places = read_model(out)[EMBEDDING], ids(out)
    two, three = two[EMBEDDING], three[EMBEDDING]
    assert (len(found), len(places)) == (22, 22)
    start = (two[20] + three[21]) / 2  # what the first model gets
    torch.testing.assert_close(found[places[START]], (start + two[20] + 2 * three[21]) / 4)
    torch.testing.assert_close(found[places[END]], three[20])
    torch.testing.assert_close(found[5], (one[EMBEDDING][5] + two[5] + 2 * three[5]) / 4)


def test_the_tokenizer_of_a_model_brings_its_files_and_its_ids(merge, tmp_path: Path):
    model(tmp_path / "m1", 1, [START, END])
    model(tmp_path / "m2", 2, [END, START])
    (tmp_path / "m2" / "chat_template.jinja").write_text("of m2")
    out = merge(linear(1, 1, tokenizer_source="./m2"))
    assert ids(out) == ids(tmp_path / "m2")
    assert (out / "chat_template.jinja").read_text() == "of m2"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 21  # START, as before
    lock = (out / "atlas_recipe.lock.yaml").read_text()
    assert "./m1/tokenizer.json:" in lock
    write_tokenizer(tmp_path / "m1", [END, START], size=20)
    with pytest.raises(AssertionError, match="is not what the recipe was locked with"):
        merge(json.loads(json.dumps(_mapping(lock))), to="again")


def _mapping(text: str) -> dict[str, Any]:
    from atlas_cli.recipes.text import parse_mapping

    return parse_mapping(text, "lock")


def test_rows_of_single_tokens_are_chosen(merge, tmp_path: Path):
    one = model(tmp_path / "m1", 1, [])
    two = model(tmp_path / "m2", 2, [START])
    tokens = {
        "_tok_4": {"source": "./m2", "force": True},
        "_tok_5": {"source": {"kind": "model_token", "model": "./m2", "token": START}},
        "<new>": {"source": {"kind": "zero"}},
        "<like>": {"source": {"kind": "model_token", "model": "./m1", "token_id": 3}},
    }
    out = merge(linear(1, 1, tokenizer={"source": "base", "tokens": tokens}))
    found, places = read_model(out)[EMBEDDING], ids(out)
    assert torch.equal(found[4], two[EMBEDDING][4])
    torch.testing.assert_close(found[5], (one[EMBEDDING][5] + two[EMBEDDING][5]) / 2)
    assert not found[places["<new>"]].any()
    assert torch.equal(found[places["<like>"]], one[EMBEDDING][3])


def test_chat_templates_come_by_name_from_files_or_by_majority(merge, tmp_path: Path):
    for number, text in enumerate(["a {{ x }}", "b {{ x }}", "b {{ x }}"], start=1):
        model(tmp_path / f"m{number}", number, [])
        (tmp_path / f"m{number}" / "chat_template.jinja").write_text(text)
    (tmp_path / "mine.jinja").write_text("mine {{ x }}")
    recipe = linear(1, 1, 1)
    for given, wanted in (
        *(("auto", "b {{ x }}"), ("mine.jinja", "mine {{ x }}"), ("{{ y }}", "{{ y }}")),
        ("chatml", "<|im_start|>"),
    ):
        out = merge(recipe | {"chat_template": given}, "--force")
        text = (out / "chat_template.jinja").read_text()
        assert wanted in text
        assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == text


def test_what_cannot_be_aligned_is_refused(refused, tmp_path: Path):
    model(tmp_path / "m1", 1, [])
    model(tmp_path / "m2", 2, [START])
    assert "(tokenizer_source: base or union aligns vocabularies)" in refused(linear(1, 1))
    tokens = {"_tok_4": {"source": {"kind": "model_token", "model": "./m2", "token": "nowhere"}}}
    tokens["_tok_4"]["force"] = True
    said = refused(linear(1, 1, tokenizer={"source": "base", "tokens": tokens}))
    assert "tokenizer.tokens._tok_4: ./m2 has no token 'nowhere'" in said
    settings = tmp_path / "m2" / "tokenizer_config.json"
    settings.write_text('{"added_tokens_decoder": {"4": ["<x>"]}}')
    assert "lists tokens as no tokenizer does" in refused(linear(1, 1, tokenizer_source="union"))
    settings.unlink()
    path = tmp_path / "m2" / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    raw["model"]["continuing_subword_prefix"] = "##"  # the library panics
    path.write_text(json.dumps(raw))
    assert "lists tokens as no tokenizer does" in refused(linear(1, 1, tokenizer_source="union"))
    (tmp_path / "m1" / "tokenizer.json").unlink()
    assert "./m1: has no tokenizer.json" in refused(linear(1, 1, tokenizer_source="base"))


def test_chat_templates_that_are_none_are_named_or_left_out(tmp_path: Path):
    settings = {"chat_template": [3, {"name": "other", "template": "x"}, {"name": "default"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_template(tmp_path) == ""
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is no UTF-8 text"):
        read_template(tmp_path)


def test_a_large_table_is_read_in_parts_that_are_the_whole():
    draw = torch.Generator().manual_seed(0)
    stored = torch.randn((50, 3), generator=draw)
    lazy = LazyTensor((50, 3), stored.dtype, lambda: stored)
    words = {f"w{n}": n for n in torch.randperm(50, generator=draw).tolist()}
    mine = {word: n for n, word in enumerate(sorted(words))}
    vocabulary = Vocabulary(Tokenizer(Path(), words, {}, {}), {"m": mine}, 53, {})
    (found,) = align({"m": lazy}, vocabulary).values()
    whole = found.read()
    assert found.shape == whole.shape == (53, 3)
    for word, number in words.items():
        assert torch.equal(whole[number], stored[mine[word]])
    torch.testing.assert_close(whole[50:], stored.mean(0).expand(3, 3))
    parts = [found.span(start, min(start + 7, 159)) for start in range(0, 159, 7)]
    assert torch.equal(torch.cat(parts), whole.reshape(-1))


@pytest.mark.parametrize("name", ["stack", "tokenizers"])
def test_a_recipe_for_language_models_runs_on_tiny_ones(call, tmp_path: Path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for number, (model, added) in enumerate({"chat": ["<|im_end|>"], "code": ["<fim>"]}.items()):
        tensors = llama(number, layers=8)
        for key in ("model.embed_tokens.weight", "lm_head.weight"):  # a row for the further token
            tensors[key] = torch.cat([tensors[key], torch.ones(1, 8)])
        write_tokenizer(write_model(tmp_path / model, tensors), added, size=20)
    recipe = Path(__file__).parents[2] / "recipes" / "language" / f"{name}.yaml"
    assert f"#     atlas merge recipes/language/{name}.yaml -o merged\n" in recipe.read_text()
    result = call("merge", recipe, "-o", "merged", *ROOMY)
    assert result.code == 0, result.err
    found = read_model(tmp_path / "merged")
    assert len([key for key in found if key.endswith("q_proj.weight")]) == (
        12 if name == "stack" else 8
    )
    assert len(found["lm_head.weight"]) == (21 if name == "stack" else 24)
