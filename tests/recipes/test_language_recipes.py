"""Wrong recipes for slices, modules, tokenizers and documents: every problem at once, no torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from imports import outcomes

from atlas_cli.errors import UsageError
from atlas_cli.recipes.merge import read_merge
from atlas_cli.sources.locate import source_problems

STACK = "merge_method: passthrough\nslices:\n"
PLAIN = "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: ./m}, {model: ./n}]\n"
TOKENS = PLAIN + "tokenizer:\n  source: base\n  tokens:\n"
# Recipes, and a part of every line that they give.
WRONG: dict[str, tuple[str, list[str]]] = {
    "range without an end": (
        STACK + "- sources: [{model: ./m, layer_range: [3]}]",
        ["slices[0].sources[0].layer_range: expected [FIRST, END]"],
    ),
    "range that goes backwards": (
        STACK + "- sources: [{model: ./m, layer_range: [4, 2]}]",
        ["0 <= FIRST < END (the layer END is not taken any more), found [4, 2]"],
    ),
    "negative range": (
        STACK + "- sources: [{model: ./m, layer_range: [-1, 2]}]",
        ["layer_range: expected [FIRST, END]"],
    ),
    "range of words": (
        STACK + "- sources: [{model: ./m, layer_range: [a, 2]}]",
        ["sources[0].layer_range[0]: expected int, found str"],
    ),
    "ranges of other lengths": (
        "merge_method: linear\nparameters: {weight: 1}\nslices:\n- sources:\n"
        "  - {model: ./m, layer_range: [0, 2]}\n  - {model: ./n, layer_range: [0, 3]}",
        ["slices[0].sources: layer_range must be of the same length for all, found 2 and 3"],
    ),
    "source without a range": (
        STACK + "- sources: [{model: ./m}]",
        ["slices[0].sources[0]: key 'layer_range' is missing"],
    ),
    "slice without sources": (
        STACK + "- {source: [{model: ./m, layer_range: [0, 2]}]}",
        ["slices[0]: unknown key 'source'; did you mean 'sources'?", "key 'sources' is missing"],
    ),
    "a slice that is a number": (
        "merge_method: passthrough\nslices: [1]",
        ["slices[0]: expected keys and values, found int"],
    ),
    "no slices": ("merge_method: passthrough\nslices: []", ["slices: is empty"]),
    "several models to pass through": (
        STACK + "- sources: [{model: ./m, layer_range: [0, 2]}, {model: ./n, layer_range: [0, 2]}]",
        ["slices[0].sources: expected 1 model, found 2"],
    ),
    "unknown method of a slice": (
        STACK + "- {sources: [{model: ./m, layer_range: [0, 2]}], merge_method: linaer}",
        ["slices[0].merge_method: unknown method 'linaer'; did you mean 'linear'?"],
    ),
    "model of a slice that is not there": (
        STACK + "- {sources: [{model: ./x, layer_range: [0, 2]}], base_model: ./y}",
        ["slices[0].base_model: no such file", "slices[0].sources[0].model: no such file"],
    ),
    "misspelt parameter of a source": (
        STACK + "- sources: [{model: ./m, layer_range: [0, 2], parameters: {scael: 1}}]",
        ["sources[0].parameters: unknown parameter 'scael'; did you mean 'scale'?"],
    ),
    "slices and models": (
        PLAIN + "slices: [{sources: [{model: ./m, layer_range: [0, 2]}]}]",
        ["expected either 'models', 'slices' or 'modules'"],
    ),
    "module with both": (
        "merge_method: linear\nparameters: {weight: 1}\nmodules:\n  encoder:\n"
        "    models: [{model: ./m}]\n    slices: [{sources: [{model: ./m, layer_range: [0, 1]}]}]",
        ["modules.encoder: expected either 'models' or 'slices'"],
    ),
    "module with neither": (
        "merge_method: linear\nmodules: {encoder: {parameters: {weight: 1}}, decoder: {}}",
        ["modules.encoder: expected either", "modules.decoder: expected either"],
    ),
    "no modules": ("merge_method: linear\nmodules: {}", ["modules: is empty"]),
    "misspelt key of a module": (
        "merge_method: linear\nparameters: {weight: 1}\n"
        "modules: {encoder: {model: [{model: ./m}]}}",
        [
            "modules.encoder: unknown key 'model'; did you mean 'models'?",
            "modules.encoder: expected either",
        ],
    ),
    "two tokenizers": (
        PLAIN + "tokenizer_source: base\ntokenizer: {source: union}",
        ["give either 'tokenizer_source' or 'tokenizer'"],
    ),
    "tokenizer of nobody": (
        PLAIN + "tokenizer_source: uniom",
        ["tokenizer_source: unknown model 'uniom'"],
    ),
    "tokenizer with wrong keys": (
        PLAIN + "tokenizer: {sorce: base, pad_to_multiple_of: many}",
        [
            "tokenizer: unknown key 'sorce'; did you mean 'source'?",
            "tokenizer.pad_to_multiple_of: expected int, found str",
        ],
    ),
    "rows of no multiple": (
        PLAIN + "tokenizer: {source: base, pad_to_multiple_of: 0}",
        ["tokenizer.pad_to_multiple_of: expected more than 0, found 0"],
    ),
    "token without a source": (
        TOKENS + "    <a>: {force: true}",
        ["tokenizer.tokens.<a>: key 'source' is missing"],
    ),
    "token of a model that is not merged": (
        TOKENS + "    <a>: {source: ./o}",
        ["tokenizer.tokens.<a>.source: ./o is none of the models"],
    ),
    "token of an unknown kind": (
        TOKENS + "    <a>: {source: {kind: model_tokn, model: ./m}}",
        ["source.kind: expected model_token or zero, found 'model_tokn'; did you mean"],
    ),
    "token by its text and by its id": (
        TOKENS + "    <a>: {source: {kind: model_token, model: ./m, token: x, token_id: 3}}\n"
        "    <b>: {source: {kind: model_token, token: x}}\n"
        "    <c>: {source: {kind: zero, model: ./m}}",
        [
            "tokens.<a>.source: expected either 'token' or 'token_id'",
            "tokens.<b>.source: key 'model' is missing",
            "tokens.<c>.source: zeros need no model",
        ],
    ),
    "chat template that is none": (
        PLAIN + "chat_template: chatlm",
        ["chat_template: expected auto, chatml", "did you mean 'chatml'?"],
    ),
    "documents in a circle": (
        "name: a\nmerge_method: passthrough\nmodels: [{model: b}]\n---\n"
        "name: b\nmerge_method: passthrough\nmodels: [{model: a}]",
        ["merges need each other in a circle: b -> a -> b"],
    ),
    "documents with problems each": (
        "name: a\nmerge_method: passthrough\nmodels: [{model: ./x}]\n---\n"
        "merge_method: passthroug\nmodels: [{model: a}]",
        ["#1.models[0].model: no such file", "#2.merge_method: unknown method 'passthroug'"],
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("m", "n"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_every_problem_of_a_wrong_recipe_is_told_at_once():
    assert len(WRONG) >= 25
    for name, (text, parts) in WRONG.items():
        with pytest.raises(UsageError) as caught:
            read_merge(text, "recipe", source_problems)
        for part in parts:
            assert part in str(caught.value), (name, part, str(caught.value))


def test_wrong_recipes_end_with_code_2_without_torch(folder: Path):
    commands = []
    for number, (text, _) in enumerate(WRONG.values()):
        (folder / f"{number}.yaml").write_text(text)
        commands.append(["merge", f"{number}.yaml", "-o", "out"])
    for name, outcome in zip(WRONG, outcomes(commands), strict=True):
        assert (outcome.code, outcome.heavy) == (2, []), (name, outcome)
        assert all(line.startswith("atlas: error: ") for line in outcome.err.splitlines()), name
