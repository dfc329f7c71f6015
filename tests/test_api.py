"""The Python API: its page runs and prints what it shows, and its laws hold."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import atlas_cli as atlas
from atlas_cli.registry import DATASET_KINDS

PAGE = (Path(__file__).parent.parent / "docs/api.md").read_text("utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+")
TINY = "builtin:tiny"


def weights(model: atlas.Clip) -> dict[str, torch.Tensor]:
    return model.module.state_dict()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def test_the_page_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == PAGE.count("```python")
    try:
        for code, shown in blocks:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "docs/api.md", "exec"), names)
            # Numbers with a point may differ a little from machine to machine.
            assert NUMBER.sub("#", out.getvalue()) == NUMBER.sub("#", shown), code
            found, wanted = (
                [float(number) for number in NUMBER.findall(text)]
                for text in (out.getvalue(), shown)
            )
            assert found == pytest.approx(wanted, abs=3), code
    finally:
        DATASET_KINDS._entries.pop("plain", None)
        DATASET_KINDS._origins.pop("plain", None)


def test_importing_atlas_imports_nothing_heavy_and_every_name_is_there():
    code = (
        "import sys, atlas_cli as atlas; listed = dir(atlas); "
        "atlas.UsageError, atlas.fit, atlas.Dataset, atlas.dataset_kind; "
        "heavy = {'torch', 'numpy', 'open_clip', 'PIL', 'pydantic', 'typer'} & set(sys.modules); "
        "print(sorted(heavy), set(atlas.__all__) <= set(listed))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"
    assert sorted(atlas._EXPORTS) == sorted(atlas.__all__) == list(atlas.__all__)
    assert all(callable(getattr(atlas, name)) for name in atlas.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        _ = atlas.fitt


def test_adding_a_vector_and_its_negation_changes_nothing():
    digits = atlas.TaskVector.open("builtin:digits")
    untouched = weights(atlas.compose(TINY, [digits], 0.0))
    assert same(weights(atlas.compose(TINY, [digits + -digits])), untouched)
    changed = weights(atlas.compose(TINY, [digits]))
    assert not same(changed, untouched)
    assert same(weights(atlas.compose(TINY, [digits, digits * 0.5 - digits / 2])), changed)


def test_composed_weights_are_those_of_the_merged_model(tmp_path: Path):
    vectors = ["builtin:digits", "builtin:signs"]
    block = "visual.ln_post.weight"
    for number, (given, table, granularity) in enumerate(
        (
            (0.3, {"digits": {"all": 0.3}, "signs": {"all": 0.3}}, "vector"),
            ([0.7, -0.2], {"digits": {"all": 0.7}, "signs": {"all": -0.2}}, "vector"),
            ({"signs": 0.4}, {"signs": {"all": 0.4}}, "vector"),
            ({"digits": {block: 1.5}}, {"digits": {block: 1.5}}, "block"),
        )
    ):
        recipe = {
            "merge_method": "atlas",
            "base_model": TINY,
            "vectors": [{"file": vector} for vector in vectors],
            "coefficients": table,
            "granularity": granularity,
        }
        folder = tmp_path / str(number)
        merged = atlas.merge(recipe, folder)
        assert (str(merged), merged.method) == (str(folder), "atlas")
        written = load_file(folder / "open_clip_model.safetensors")
        composed = [
            atlas.compose(TINY, vectors, given),
            atlas.compose(TINY, vectors, recipe),
            atlas.compose(TINY, coefficients=recipe),
        ]
        assert all(same(weights(model), written) for model in composed), given


def test_a_result_of_learning_is_merged_composed_and_scored(tmp_path: Path, call):
    run = atlas.fit(
        "builtin:digits",
        model=TINY,
        vectors=["builtin:letters"],
        shots=1,
        epochs=1,
        batch_size=10,
        augment="none",
        output=tmp_path / "run",
    )
    assert (run.folder, run.stopped) == (tmp_path / "run", False)
    written = load_file(
        Path(str(atlas.merge(run, tmp_path / "one"))) / "open_clip_model.safetensors"
    )
    for given in (run, run.recipe, run.text, tmp_path / "run" / "recipe.yaml"):
        assert same(weights(atlas.compose(TINY, coefficients=given)), written)
    scores = atlas.evaluate([TINY, tmp_path / "one"], ["builtin:digits"], shots=3)
    data = ("--data", "builtin:digits", "--shots", "3")
    rows = json.loads(call("eval", TINY, tmp_path / "one", *data, "--json").out)["results"]
    assert [score.top1 for score in scores] == [row["top1"] for row in rows]


def test_a_vector_is_extracted_and_opened(tmp_path: Path):
    made = atlas.extract(TINY, "builtin:digits", tmp_path / "x.safetensors", scale=-1, name="less")
    assert (made.name, made.header.scale) == ("less", -1.0)
    with pytest.raises(atlas.UsageError, match="unknown keyword 'dtpye'; did you mean 'dtype'"):
        atlas.extract(TINY, "builtin:digits", tmp_path / "y.safetensors", dtpye="fp16")
    with pytest.raises(atlas.UsageError, match="expected the name of a"):
        atlas.extract(TINY, "builtin:digits", tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: atlas.compose(TINY), "no task vectors given"),
        (lambda v: atlas.compose(TINY, []), "no task vectors given"),
        (lambda v: atlas.compose(TINY, [v], [1, 2]), "expected a number, 1 numbers, a table"),
        (lambda v: atlas.compose(TINY, [v], {"digit": 1}), "no vector is called 'digit'; did you"),
        (lambda v: atlas.compose(TINY, [v, v]), "are both called digits"),
        (lambda v: atlas.compose("builtin:tinny", [v]), "did you mean 'tiny'"),
        (lambda v: atlas.compose(TINY, [v], "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (lambda v: atlas.merge({"merge_method": "lienar"}, "out"), "did you mean 'linear'"),
        (lambda v: atlas.evaluate(TINY, "builtin:digts"), "did you mean 'digits'"),
        (lambda v: atlas.fit("builtin:digits", model=TINY, vectors=[v]), "is in no file yet"),
        (lambda v: atlas.tta("builtin:digits", model=TINY), "vectors: names no task vector"),
        (lambda v: atlas.finetune("builtin:digits", model=TINY), "nothing would be kept"),
        (lambda v: atlas.negate("builtin:digits", model=TINY, vectors=[]), "control"),
    ],
)
def test_mistakes_are_atlas_errors(call, message: str):
    with pytest.raises(atlas.AtlasError, match=re.escape(message)):
        call(atlas.TaskVector.open("builtin:digits"))
