"""The LoRA files that the paper's own code wrote are (32 / rank) B A, kept as factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import write_open_clip
from extracting import WEIGHTS, read, run
from safetensors.torch import load_file

from atlas_cli.core.storage import Factors, Form
from atlas_cli.errors import CheckpointError, MismatchError, UsageError
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.format import open_vector

PREFIX = "image_encoder.model.visual.transformer.resblocks.{}."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_open_clip(tmp_path_factory.mktemp("base") / "model")


class Adapted(torch.nn.Module):
    """A weight with factors, as LoRA-Torch registers and applies them."""

    def __init__(self, weight: torch.Tensor, name: str, rank: int, alpha: int = 32) -> None:
        super().__init__()
        self.scaling = alpha / rank
        self.name = name
        for letter, shape in {"A": (rank, weight.shape[1]), "B": (len(weight), rank)}.items():
            factor = torch.nn.Parameter(0.02 * torch.randn(shape))
            self.register_parameter(f"{name}_lora_{letter}", factor)

    def change(self) -> torch.Tensor:
        up, down = (getattr(self, f"{self.name}_lora_{letter}") for letter in "BA")
        return (up @ down).detach() * self.scaling


def adapted(base: Tensors, rank: int) -> tuple[Tensors, Tensors]:
    """What the paper's code saves of a model with every matrix of its layers adapted, and tau."""
    torch.manual_seed(rank)
    places = {
        "attn": {"qkv": "in_proj_weight", "o": "out_proj.weight"},
        "mlp.c_fc": {"w": "weight"},
        "mlp.c_proj": {"w": "weight"},
    }
    saved, changes = {}, {}
    for layer in range(2):
        for module, names in places.items():
            for name, weight in names.items():
                block = f"visual.transformer.resblocks.{layer}.{module}.{weight}"
                one = Adapted(base[block], name, rank)
                state = one.state_dict()
                saved |= {f"{PREFIX.format(layer)}{module}.{key}": state[key] for key in state}
                changes[block] = one.change()
    return saved, changes


@pytest.mark.parametrize("rank", [4, 16])
def test_the_vector_is_what_the_factors_add_to_the_weights(folder: Path, tmp_path: Path, rank: int):
    saved, expected = adapted(load_file(folder / WEIGHTS), rank)
    torch.save(saved, tmp_path / f"lora_{rank}.pt")
    run(folder, tmp_path / f"lora_{rank}.pt", tmp_path / "v.safetensors")
    found = read(tmp_path / "v.safetensors")
    assert len(found) == 8
    assert found.keys() == expected.keys()
    for name, change in expected.items():
        torch.testing.assert_close(found[name], change, rtol=1e-5, atol=1e-8)
    vector = open_vector(tmp_path / "v.safetensors")
    for name in vector.names:
        block = vector.read(name)
        assert isinstance(block, Factors)
        assert [part.down.shape[0] for part in block.parts] == [rank]


def test_attention_alone_changes_attention_alone(folder: Path, tmp_path: Path):
    saved, _ = adapted(load_file(folder / WEIGHTS), 4)
    torch.save({n: t for n, t in saved.items() if ".attn." in n}, tmp_path / "lora_4_attn_only.pt")
    run(folder, tmp_path / "lora_4_attn_only.pt", tmp_path / "v.safetensors")
    assert all(".attn." in name for name in open_vector(tmp_path / "v.safetensors").names)


QKV = PREFIX.format(0) + "attn.qkv_lora_"
WRONG = {
    "one factor": ({QKV + "A": (4, 64)}, CheckpointError, "in_proj_weight lacks one of its fac"),
    "another width": ({QKV + "A": (4, 32), QKV + "B": (192, 4)}, MismatchError, "but it has"),
    "another rank": ({QKV + "A": (4, 64), QKV + "B": (192, 3)}, MismatchError, "but it has"),
    "no rank": ({QKV + "A": (0, 64), QKV + "B": (192, 0)}, MismatchError, "but it has"),
    "no matrix": ({QKV + "A": (), QKV + "B": (192, 4)}, MismatchError, "but it has"),
    "another layer": (
        {PREFIX.format(9) + f"attn.o_lora_{letter}": (4, 4) for letter in "AB"},
        MismatchError,
        r"there is no visual\.transformer\.resblocks\.9\.attn\.out_proj\.weight in the base",
    ),
    "something else": (
        {QKV + "A": (4, 64), QKV + "B": (192, 4), "head.weight": (3, 3)},
        CheckpointError,
        r"head\.weight is no factor of LoRA, so it is not applied",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path, name: str):
    shapes, kind, message = WRONG[name]
    torch.save({key: torch.ones(shape) for key, shape in shapes.items()}, tmp_path / "lora_4.pt")
    with pytest.raises(kind, match=message):
        run(folder, tmp_path / "lora_4.pt", tmp_path / "v.safetensors")


def test_what_else_is_in_the_file_can_be_ignored(folder: Path, tmp_path: Path):
    saved, _ = adapted(load_file(folder / WEIGHTS), 4)
    torch.save(saved | {"head.weight": torch.ones(3)}, tmp_path / "lora_4.pt")
    choice = Choice(ignore=("^head",))
    made = run(folder, tmp_path / "lora_4.pt", tmp_path / "v.safetensors", choice)
    header = open_vector(tmp_path / "v.safetensors").header
    assert made.blocks == 8
    assert "head.weight" in header.dropped
    assert header.scale == 1.0


def test_factors_stay_factors(folder: Path, tmp_path: Path):
    saved, _ = adapted(load_file(folder / WEIGHTS), 4)
    torch.save(saved, tmp_path / "lora_4.pt")
    with pytest.raises(UsageError, match="is low-rank already and stays so"):
        run(folder, tmp_path / "lora_4.pt", tmp_path / "v.safetensors", form=Form("int8"))
    with pytest.raises(MismatchError, match="the adapter changes nothing in scope text"):
        run(folder, tmp_path / "lora_4.pt", tmp_path / "v.safetensors", Choice("text"))
