"""Several merges in one recipe, and mergekit's habits on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from language_models import write_tokenizer
from merge_runs import ROOMY, linear, llama, read_model

from atlas_cli.cli.mergekit_flags import FLAGS, translated
from atlas_cli.errors import UsageError
from atlas_cli.recipes.merge import read_merge

HEAD = "lm_head.weight"


def both(*names: str, **more: Any) -> dict[str, Any]:
    models = [{"model": name, "parameters": {"weight": 1}} for name in names]
    return {"merge_method": "linear", "models": models, **more}


LAST = both("second", "./m3")
SECOND = both("first", "./m2", name="second")
FIRST = both("./base", "./m1", name="first")


def write(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump_all(documents))
    return path


def test_documents_are_merged_in_the_order_of_their_needs(call, merge, tmp_path: Path):
    recipe = write(tmp_path / "r.yaml", LAST, SECOND, FIRST)
    assert call("merge", recipe, "-o", "out", *ROOMY).code == 0
    base, one, two, three = (llama(n)[HEAD] for n in range(4))
    wanted = (((base + one) / 2 + two) / 2 + three) / 2
    torch.testing.assert_close(read_model(tmp_path / "out")[HEAD], wanted)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    lock = tmp_path / "out" / "atlas_recipe.lock.yaml"
    first, second, last = yaml.safe_load_all(lock.read_text())
    assert (first["name"], second["name"]) == ("first", "second")
    assert [*last["locked"]] == ["second", "./m3"]
    assert call("merge", lock, "again", *ROOMY).code == 0
    digest = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert digest == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_plan_has_all_steps_and_writes_nothing(call, merge, tmp_path: Path):
    recipe = write(tmp_path / "r.yaml", LAST, SECOND, FIRST)
    before = sorted(tmp_path.iterdir())
    plan = json.loads(call("merge", recipe, "--dry-run", "--json", *ROOMY).out)
    assert [step["name"] for step in plan["steps"]] == ["first", "second"]
    assert plan["tensors"] == len(llama(1))
    assert sorted(tmp_path.iterdir()) == before


def test_results_between_are_kept_and_not_made_again(call, merge, tmp_path: Path):
    recipe = write(tmp_path / "r.yaml", FIRST, SECOND, LAST)
    for target in ("out", "out2"):
        assert call("merge", recipe, target, "-I", "kept", *ROOMY).code == 0
    stamp = (tmp_path / "kept" / "first" / "model.safetensors").stat().st_mtime_ns
    changed = write(tmp_path / "r.yaml", FIRST, SECOND | {"dtype": "float64"}, LAST)
    old = (tmp_path / "kept" / "second" / "model.safetensors").stat().st_mtime_ns
    assert call("merge", changed, "out3", "--keep-intermediate", "kept", *ROOMY).code == 0
    assert (tmp_path / "kept" / "first" / "model.safetensors").stat().st_mtime_ns == stamp
    assert (tmp_path / "kept" / "second" / "model.safetensors").stat().st_mtime_ns != old
    assert read_model(tmp_path / "out3")[HEAD].dtype == torch.float64


def test_a_failing_step_leaves_nothing(call, merge, tmp_path: Path):
    recipe = write(tmp_path / "r.yaml", FIRST, both("first", "./m2", dtype="float32"))
    (tmp_path / "m2" / "model.safetensors").write_bytes(b"broken")
    before = sorted(tmp_path.iterdir())
    result = call("merge", recipe, "out", *ROOMY)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([FIRST, FIRST, LAST], "the name 'first' is given twice"),
        ([LAST, both("./m1"), SECOND], "2 documents have no name"),
        ([both("b", "./m1", name="a"), both("a", "./m1", name="b")], "circle: b -> a -> b"),
        ([FIRST, SECOND, both("secnd", "./m1")], "r#3.models[0].model: unknown model 'secnd'"),
        ([FIRST | {"dtyp": "x"}, both("first", bad=1)], "r#1: unknown key 'dtyp'"),
    ],
)
def test_what_is_wrong_with_documents_is_told(merge, documents: list[Any], said: str):
    from atlas_cli.sources.locate import source_problems

    with pytest.raises(UsageError) as caught:
        read_merge(yaml.safe_dump_all(documents), "r", source_problems)
    assert said in str(caught.value)


# mergekit's habits ----------------------------------------------------------------------------


def test_flags_of_mergekit_are_translated_or_named():
    given = [
        "r.yml",
        "out",
        "--cuda",
        "--lazy-unpickle",
        "--allow-crimes",
        "--out-shard-size",
        "2B",
        "-j",
        "4",
    ]
    arguments, ignored = translated([*given, "--trust-remote-code", "--lora-merge-cache", "x"])
    wanted = ["r.yml", "out", "--device", "cuda", "--max-shard-size", "2GB", "--threads", "4"]
    assert arguments == wanted
    assert ignored == ["--trust-remote-code", "--lora-merge-cache"]
    with pytest.raises(UsageError, match="tokenizer_source"):
        translated(["--unsafe-truncate-embeddings"])


@pytest.mark.parametrize("flag", sorted(FLAGS - {"--unsafe-truncate-embeddings"}))
def test_every_flag_that_is_looked_for_is_translated_or_left_out(flag: str):
    for spelling in (flag, f"{flag}=1"):
        assert spelling not in translated([spelling])[0]


def test_a_merge_reads_as_one_of_mergekit(call, merge, tmp_path: Path):
    write_tokenizer(tmp_path / "m1", size=20)
    (tmp_path / "r.yml").write_text(json.dumps(linear(1, 1)))
    flags = ("--lazy-unpickle", "--no-copy-tokenizer", "--no-write-model-card", "--random-seed=3")
    result = call("merge", "r.yml", "out", *flags, "--clone-tensors", *ROOMY)
    assert (result.code, result.out) == (0, "out\n")
    assert result.err == ("atlas: warning: has no meaning here, and is ignored: --clone-tensors\n")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "atlas_recipe.lock.yaml"}
    lock = yaml.safe_load((tmp_path / "out" / "atlas_recipe.lock.yaml").read_text())
    assert lock["seed"] == 3
    twice = call("merge", "r.yml", "out2", "-o", "out3")
    assert (twice.code, twice.err) == (2, "atlas: error: two folders given: out2 and -o out3\n")
