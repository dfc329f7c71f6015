"""What accelerators get: channels last, compiled passes. Results stay those of plain passes."""

from __future__ import annotations

import pytest
import torch
from test_composed import PREFIX, coefficients_of, composition_of, loss_of, make_tower, relative

from atlas_cli.models.accelerator import Accelerator, compile_model, prefers_channels_last
from atlas_cli.models.composed import ComposedModel


def test_towers_of_convolutions_have_channels_last_where_devices_want_that():
    resnet, transformer = (make_tower(kind)[0] for kind in ("resnet", "transformer"))
    found = {
        (kind, name)
        for kind in ("cpu", "cuda", "xpu", "hpu", "mps")
        for name, tower in (("resnet", resnet), ("transformer", transformer))
        if prefers_channels_last(tower, torch.device(kind))
    }
    assert found == {("cuda", "resnet"), ("xpu", "resnet")}


def passes(model: ComposedModel, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    model.load(coefficients_of(model.composition))
    loss = model.backward(images, loss_of)
    return model.features(images), loss[None], model.gradient()


def test_channels_last_changes_no_result():
    tower, images = make_tower("resnet")
    plain = ComposedModel(tower, composition_of(tower), prefix=PREFIX)
    other = ComposedModel(tower, composition_of(tower), prefix=PREFIX)
    other.accelerator = Accelerator(torch.device("cpu"), "fp32", channels_last=True)
    assert other.accelerator.arranged(images).is_contiguous(memory_format=torch.channels_last)
    for found, wanted in zip(passes(other, images), passes(plain, images), strict=True):
        assert relative(found, wanted) < 1e-5


class Small(torch.nn.Module):
    """Enough of a tower to be compiled in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 4, 4)
        self.norm, self.proj = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.proj(self.norm(self.conv1(images).flatten(2).mean(2)))
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of compilers
def test_compiled_passes_give_what_plain_ones_do_and_a_failing_compiler_is_one_line(monkeypatch):
    torch.manual_seed(0)
    tower, images = Small().requires_grad_(False), torch.randn(6, 3, 16, 16)
    wanted = passes(ComposedModel(tower, composition_of(tower), prefix=PREFIX), images)
    said: list[str] = []
    for cxx in ("g++", "no-such-compiler"):
        torch.compiler.reset()
        monkeypatch.setenv("CXX", cxx)
        monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, cxx))
        monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
        model = ComposedModel(tower, composition_of(tower), prefix=PREFIX)
        compile_model(model, said.append)
        for found, plain in zip(passes(model, images), wanted, strict=True):
            assert relative(found, plain) < 1e-5
        assert len(said) == (cxx != "g++"), said
    assert said[0].startswith("--compile: torch cannot compile this model here, so it is not: ")
    assert "\n" not in said[0]
