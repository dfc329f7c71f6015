"""mergekit and atlas side by side: recipes of mergekit's own and of public cards, and families.

They are slow because mergekit itself runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml
from language_models import FAMILIES, logits, write_language_model, write_tokenizer
from live_runs import ROOMY, distance, read_both, run_all, run_atlas, run_mergekit, tokens_of
from merge_runs import read_model
from mergekit_repository import REFUSED
from safetensors.torch import save_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_recipes_of_mergekit_and_of_public_cards_run_and_agree(tmp_path: Path, capsys):
    runs = run_all(tmp_path)
    capsys.readouterr()
    assert not [one for one in runs if not one.agrees]
    # Methods that nobody has registered and mixtures of experts are the only recipes of mergekit's
    # repository that do not run, besides those that its own tests expect to fail.
    refused = {one.name for one in runs if one.atlas != "runs"}
    assert refused == {"docs_own_method", "docs_moe", *REFUSED}
    # mergekit's table of Whisper lacks a dot.
    assert {one.name for one in runs if one.mergekit != "runs"} - refused == {"modules_whisper"}
    assert len([one for one in runs if one.group == "cards"]) >= 40


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_what_is_dropped_by_chance_has_the_same_chances_and_the_same_scale(
    method: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    # 4096 rows of the same 16 differences: a column shows how often an element is kept.
    monkeypatch.chdir(tmp_path)
    name, steps = "model.embed_tokens.weight", torch.arange(1, 17) / 16
    for number in (0, 1):
        folder = write_language_model(tmp_path / f"rows{number}", vocab_size=4096)
        tensors = read_model(folder) | {name: number * steps.expand(4096, 16).contiguous()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    chances = torch.full((16,), 0.6)
    own = {"weight": 0.5, "density": 0.6}
    if method.startswith("della"):
        own["epsilon"] = 0.2
        chances = 0.4 + torch.arange(16) / 15 * 0.4
    recipe = {"merge_method": method, "base_model": "./rows0", "dtype": "float32"}
    recipe |= {
        "models": [{"model": "./rows1", "parameters": own}],
        "parameters": {"normalize": False},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert run_mergekit(tmp_path) == {}
    assert run_atlas("r", "r.atlas") == "runs"
    for who in ("atlas", "mergekit"):
        found = read_model(tmp_path / f"r.{who}")[name]
        kept = found != 0
        away = (kept.double().mean(0) - chances) / (chances * (1 - chances) / 4096).sqrt()
        assert away.abs().max() < 4.5, who  # standard deviations; one test in 10,000 has more
        rows = kept.double().sum(1)
        spread = rows.var() / (chances * (1 - chances)).sum()
        assert 0.9 < spread < 1.1, who  # elements of a row are kept independently
        scale = 4096 * steps.double().sum() / (kept * steps.double()).sum()
        wanted = 0.5 * scale * steps.double() * kept
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)


def test_experts_are_merged_by_their_own_angles(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for number in (0, 1):
        write_language_model(tmp_path / f"mixtral{number}", "mixtral", seed=number)
    models = [{"model": f"./mixtral{n}", "parameters": {"weight": 0.5}} for n in (0, 1)]
    shared = {"models": models, "base_model": "./mixtral0", "dtype": "float32"}
    for method, own in (("linear", {}), ("slerp", {"t": 0.3})):
        recipe = {"merge_method": method, **shared, "parameters": own}
        (tmp_path / f"{method}.yaml").write_text(yaml.safe_dump(recipe))
    assert run_mergekit(tmp_path) == {}
    assert [run_atlas(name, f"{name}.atlas") for name in ("linear", "slerp")] == ["runs", "runs"]
    assert distance(Path("linear")) == 0
    # mergekit merges the experts of a layer as the one tensor that transformers makes of them.
    inputs = read_both(
        Path("slerp.mergekit"), Path("mixtral0"), Path("mixtral1"), Path("slerp.atlas")
    )
    theirs, first, second, ours = ({n: t.double() for n, t in one.items()} for one in inputs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(tensor, slerp(first[name], second[name]), rtol=1e-5, atol=1e-6)
        if ".experts." not in name:
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
            continue
        parts = [
            each
            for expert in zip(ours[name], first[name], second[name], strict=True)
            for each in _matrices(name, *expert)
        ]
        for found, one, other in parts:
            torch.testing.assert_close(found, slerp(one, other), rtol=1e-5, atol=1e-6)


def _matrices(name: str, *experts: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The matrices of an expert as files hold them: transformers joins gate and up."""
    halves = 2 if "gate_up" in name else 1
    return list(zip(*(expert.chunk(halves) for expert in experts), strict=True))


def slerp(one: torch.Tensor, other: torch.Tensor, t: float = 0.3) -> torch.Tensor:
    """(sin((1 - t) w) one + sin(t w) other) / sin(w), w the angle between both."""
    cosine = (one * other).sum() / (one.norm() * other.norm())
    if cosine.abs() > 0.9995:
        return (1 - t) * one + t * other
    angle = torch.acos(cosine)
    return (torch.sin((1 - t) * angle) * one + torch.sin(t * angle) * other) / torch.sin(angle)


def family_recipes(family: str) -> dict[str, dict]:
    first, second, more = (f"./{family}{number}" for number in range(3))
    slices = [[{"model": first, "layer_range": [0, 3]}], [{"model": second, "layer_range": [1, 4]}]]
    weighted = [{"model": who, "parameters": {"weight": 1}} for who in (first, more)]
    return {
        f"{family}_slerp": {
            "merge_method": "slerp",
            "base_model": first,
            "models": [{"model": first}, {"model": second}],
            "parameters": {"t": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.4}]},
        },
        f"{family}_stack": {
            "merge_method": "passthrough",
            "base_model": first,
            "slices": [{"sources": one} for one in slices],
        },
        f"{family}_union": {
            "merge_method": "linear",
            "base_model": first,
            "models": weighted,
            "tokenizer_source": "union",
        },
    }


def test_transformers_computes_the_same_with_results_of_18_families(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    from atlas_cli.cli.app import main

    monkeypatch.chdir(tmp_path)
    written = {}
    for family in FAMILIES:
        for number in range(3):
            folder = tmp_path / f"{family}{number}"
            more = {"vocab_size": 66} if number == 2 else {}
            write_language_model(folder, family, seed=number, **more)
            write_tokenizer(folder, ["<|im_start|>", "<|im_end|>"] if more else [])
        written |= family_recipes(family)
    for name, recipe in written.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    failed = run_mergekit(tmp_path)
    tokens, good, bad = [1, 5, 9, 60, 33, 2], set(), {}
    for name in written:
        code = main(["merge", f"{name}.yaml", f"{name}.atlas", *ROOMY, "-q"])
        assert code == 0, (name, capsys.readouterr().err)
        ours = logits(tmp_path / f"{name}.atlas", tokens)  # also where mergekit fails
        if name in failed:
            bad[name] = failed[name]
            continue
        try:
            theirs = logits(tmp_path / f"{name}.mergekit", tokens)
        except Exception as problem:  # transformers refuses what mergekit wrote
            bad[name] = str(problem)[:200]
            continue
        order = tokens_of(tmp_path / name)
        ours = ours[:, order] if order is not None else ours
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m)
        good.add(name)
    if os.environ.get("ATLAS_SHOW"):
        with capsys.disabled():
            print(len(good), bad)
    families = {name.rpartition("_")[0] for name in good}
    assert len(families) >= 18
    # mergekit leaves `layer_types` of a stack too short, and does not know some files of today.
    assert len(bad) <= 0.3 * len(written), bad
