"""Every kind of checkpoint gives the vector that direct subtraction gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY_CONFIG, write_open_clip
from extracting import read, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_cli.core.storage import Form, decode
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.models.clip import build
from atlas_cli.models.folders import Blueprint
from atlas_cli.models.linearised import parameter_order
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.describe import describe_vector
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.extract import Options, extract_to
from atlas_cli.vectors.format import base_fingerprint, check_same_base, open_vector

WEIGHTS = "open_clip_model.safetensors"
Tensors = dict[str, torch.Tensor]
ENCODER = """
import torch

class ImageEncoder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        del self.model.transformer
"""


def moved(tensors: Tensors, seed: int = 1) -> Tensors:
    """The same model after some training."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=random)
        for name, tensor in tensors.items()
    }


def vectors_of(tensors: Tensors, base: Tensors, prefix: str = "visual.") -> Tensors:
    return {n: tensors[n].float() - base[n].float() for n in base if n.startswith(prefix)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_open_clip(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def base(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS)


@pytest.fixture(scope="module")
def tuned(base: Tensors) -> Tensors:
    return moved(base)


def assert_exact(path: Path, expected: Tensors) -> None:
    found = read(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# Checkpoints as their producers write them ----------------------------------------------------


def open_clip_model(tensors: Tensors) -> torch.nn.Module:
    module, _ = build(Blueprint(TINY_CONFIG, {}))
    module.load_state_dict(tensors)
    return module


def as_folder(tensors: Tensors, folder: Path) -> Path:
    save_file(tensors, folder / WEIGHTS)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY_CONFIG}))
    return folder


def as_file(tensors: Tensors, folder: Path) -> Path:
    save_file(tensors, folder / "epoch.safetensors")
    return folder / "epoch.safetensors"


def as_shards(tensors: Tensors, folder: Path) -> Path:
    places = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_training_checkpoint(tensors: Tensors, folder: Path, **options: bool) -> Path:
    module = open_clip_model(tensors)
    optimizer = torch.optim.AdamW(module.parameters())
    sum(parameter.sum() for parameter in module.parameters()).backward()
    with torch.no_grad():
        optimizer.step()
        module.load_state_dict(tensors)
    state = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    checkpoint = {"epoch": 3, "name": "run", "state_dict": state}
    path = folder / "epoch_3.pt"
    torch.save(checkpoint | {"optimizer": optimizer.state_dict()}, path, **options)
    return path


def as_old_training_checkpoint(tensors: Tensors, folder: Path) -> Path:
    return as_training_checkpoint(tensors, folder, _use_new_zipfile_serialization=False)


def as_state_dict(tensors: Tensors, folder: Path) -> Path:
    visual = {f"model.{n}": t for n, t in tensors.items() if n.startswith("visual.")}
    torch.save(visual, folder / "nonlinear_finetuned.pt")
    return folder / "nonlinear_finetuned.pt"


def as_image_tower(tensors: Tensors, folder: Path) -> Path:
    visual = {n.removeprefix("visual."): t for n, t in tensors.items() if n.startswith("visual.")}
    torch.save(visual, folder / "visual.bin")
    return folder / "visual.bin"


def as_pickled_module(tensors: Tensors, folder: Path, **options: bool) -> Path:
    """An ImageEncoder pickled whole, of a class that is gone when the file is read."""
    package = folder / "packages" / "src"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "modeling.py").write_text(ENCODER)
    sys.path.insert(0, str(package.parent))
    try:
        from src.modeling import ImageEncoder

        torch.save(ImageEncoder(open_clip_model(tensors)), folder / "finetuned.pt", **options)
    finally:
        sys.path.remove(str(package.parent))
        for name in [name for name in sys.modules if name.split(".")[0] == "src"]:
            del sys.modules[name]
    return folder / "finetuned.pt"


def as_old_pickled_module(tensors: Tensors, folder: Path) -> Path:
    return as_pickled_module(tensors, folder, _use_new_zipfile_serialization=False)


def as_linearised(tensors: Tensors, folder: Path, origin: Tensors) -> Path:
    """The state dict of the authors' LinearizedImageEncoder, around `origin`."""
    names = parameter_order([name for name in tensors if name.startswith("visual.")])
    state: dict[str, object] = {"model_name": "ViT-B-32"}
    for number, name in enumerate(names):
        state[f"model.params.{number}"] = tensors[name]
        state[f"model.params0.{number}"] = origin[name]
    torch.save(state, folder / "linear_finetuned.pt")
    return folder / "linear_finetuned.pt"


class Branch(torch.nn.Module):
    """A module with the given tensors at the given places, that can be scripted."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        inner: dict[str, Tensors] = {}
        for name, tensor in tensors.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = tensor
            else:
                self.register_parameter(first, torch.nn.Parameter(tensor))
        for name, below in inner.items():
            self.add_module(name, Branch(below))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def as_script(tensors: Tensors, folder: Path, size: int = 32) -> Path:
    module = Branch(tensors)
    for name, value in {
        "input_resolution": size,
        "context_length": 16,
        "vocab_size": 49408,
    }.items():
        module.register_buffer(name, torch.tensor(value))
    torch.jit.save(torch.jit.script(module), folder / "ViT.pt")
    return folder / "ViT.pt"


PRODUCERS: list[Callable[[Tensors, Path], Path]] = [
    *(as_folder, as_file, as_shards, as_training_checkpoint, as_old_training_checkpoint),
    *(as_state_dict, as_image_tower, as_pickled_module, as_old_pickled_module),
]


@pytest.mark.parametrize("produce", PRODUCERS)
def test_every_checkpoint_gives_the_same_vector_exactly(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path, produce
):
    (tmp_path / "made").mkdir()
    made = run(folder, produce(tuned, tmp_path / "made"), tmp_path / "v.safetensors")
    assert_exact(tmp_path / "v.safetensors", vectors_of(tuned, base))
    assert (made.worst_error, made.mean_error) == (0, 0)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, but OpenAI's files are of it
def test_an_archive_of_openai_gives_its_vector_and_declares_its_activation(
    base: Tensors, tuned: Tensors, tmp_path: Path
):
    half = {name: tensor.half() for name, tensor in tuned.items()}
    path = as_script(half, tmp_path)
    quick = write_open_clip(tmp_path / "quick", TINY_CONFIG | {"quick_gelu": True})
    run(quick, path, tmp_path / "v.safetensors", Choice("all"))
    found = read(tmp_path / "v.safetensors")
    assert found.keys() == base.keys()
    for name, tensor in load_file(quick / WEIGHTS).items():
        assert torch.equal(found[name], half[name].float() - tensor)
    assert open_vector(tmp_path / "v.safetensors").header.activation == "quick_gelu"
    plain = write_open_clip(tmp_path / "plain")
    with pytest.raises(MismatchError, match=r"OpenAI's archive ViT.pt says .* use QuickGELU, but"):
        run(plain, path, tmp_path / "w.safetensors")


def test_a_linearised_model_gives_its_vector_by_position(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    run(folder, as_linearised(tuned, tmp_path, base), tmp_path / "v.safetensors")
    assert_exact(tmp_path / "v.safetensors", vectors_of(tuned, base))
    assert open_vector(tmp_path / "v.safetensors").header.linearised


def test_positions_are_those_of_the_parameters_of_the_published_encoder(base: Tensors):
    module = open_clip_model(base)
    del module.transformer
    names = [name for name, _ in module.named_parameters()]
    assert parameter_order(sorted(n for n in names if n.startswith("visual."))) == names


def test_a_linearised_model_around_other_weights_is_refused(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    path = as_linearised(tuned, tmp_path, base | {"visual.proj": tuned["visual.proj"]})
    with pytest.raises(MismatchError, match=r"around other weights .* \(visual\.proj differs\)"):
        run(folder, path, tmp_path / "v.safetensors")
    small = {n: t for n, t in tuned.items() if "resblocks.1" not in n}
    path = as_linearised(small, tmp_path, base)
    with pytest.raises(MismatchError, match=r"has 26 parameters, expected 38 for this base"):
        run(folder, path, tmp_path / "v.safetensors")


def test_a_classification_head_is_no_model(folder: Path, tmp_path: Path):
    torch.save(torch.nn.Linear(32, 10), tmp_path / "head_CarsVal.pt")
    with pytest.raises(CheckpointError, match="is a classification head"):
        run(folder, tmp_path / "head_CarsVal.pt", tmp_path / "v.safetensors")
    with pytest.raises(AtlasError, match="is no CLIP model"):
        run(tmp_path / "head_CarsVal.pt", folder, tmp_path / "v.safetensors")


# Scopes, and what does not fit ----------------------------------------------------------------


@pytest.mark.parametrize("scope", ["visual", "text", "all"])
def test_a_scope_decides_what_is_taken(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path, scope: str
):
    path = as_folder(tuned, tmp_path)
    run(folder, path, tmp_path / "v.safetensors", Choice(scope))
    visual = {"visual": (True,), "text": (False,), "all": (True, False)}[scope]
    names = {name for name in base if name.startswith("visual.") in visual}
    found = read(tmp_path / "v.safetensors")
    assert found.keys() == names
    assert all(torch.equal(found[name], tuned[name] - base[name]) for name in names)


def test_integers_and_unchanged_tensors_are_dropped_and_listed(
    base: Tensors, tuned: Tensors, tmp_path: Path
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    count = {"visual.norm.num_batches_tracked": torch.tensor(7)}
    first = as_folder(base | count, tmp_path / "a")
    same = {"visual.proj": base["visual.proj"]}
    second = as_folder(tuned | same | {n: t + 1 for n, t in count.items()}, tmp_path / "b")
    made = run(first, second, tmp_path / "v.safetensors")
    header = open_vector(tmp_path / "v.safetensors").header
    assert header.dropped == ("visual.norm.num_batches_tracked", "visual.proj")
    assert made.dropped == 2
    expected = vectors_of(tuned, base)
    del expected["visual.proj"]
    assert_exact(tmp_path / "v.safetensors", expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("visual.proj"), r"visual\.proj is missing"),
        (lambda t: t.update({"visual.more": torch.zeros(1)}), r"visual\.more is not in the base"),
        (
            lambda t: t.update({"visual.positional_embedding": torch.zeros(10, 64)}),
            r"visual\.positional_embedding has shape \(10, 64\), expected \(5, 64\)",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_unless_it_is_ignored(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path, change, message: str
):
    other = dict(tuned)
    change(other)
    path = as_file(other, tmp_path)
    with pytest.raises(MismatchError, match=message):
        run(folder, path, tmp_path / "v.safetensors")
    assert not (tmp_path / "v.safetensors").exists()
    said: list[str] = []
    choice = Choice(ignore=(r"\.more$", "^visual.proj$", "positional"))
    run(folder, path, tmp_path / "v.safetensors", choice, warn=said.append)
    expected = {
        name: other[name] - base[name]
        for name in base.keys() & other.keys()
        if name.startswith("visual.") and other[name].shape == base[name].shape
    }
    assert_exact(tmp_path / "v.safetensors", expected)
    (left,) = open_vector(tmp_path / "v.safetensors").header.dropped
    assert said == [f"{path}: left out, so as in the base: {left}"]


def test_two_names_that_become_one_are_refused(folder: Path, tuned: Tensors, tmp_path: Path):
    path = as_file(tuned | {"module.visual.proj": tuned["visual.proj"] + 1}, tmp_path)
    with pytest.raises(CheckpointError, match=r"two tensors would both be visual\.proj; one is"):
        run(folder, path, tmp_path / "v.safetensors")


def test_only_the_first_misfits_are_listed(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    path = as_file({n: t for n, t in tuned.items() if "ln_" not in n}, tmp_path)
    with pytest.raises(
        MismatchError, match=r"is missing; .* is missing; .* is missing \(and \d+ m"
    ):
        run(folder, path, tmp_path / "v.safetensors")


def test_a_model_without_the_tower_is_an_error(folder: Path, tuned: Tensors, tmp_path: Path):
    text = {n: t for n, t in tuned.items() if not n.startswith("visual.")}
    with pytest.raises(MismatchError, match="has no tensors of scope visual"):
        run(folder, as_file(text, tmp_path), tmp_path / "v.safetensors")


def test_identical_models_are_an_error(folder: Path, base: Tensors, tmp_path: Path):
    half = as_file({n: t.clone() for n, t in base.items()}, tmp_path)
    with pytest.raises(MismatchError, match=r"is identical to .* in scope visual"):
        run(folder, half, tmp_path / "v.safetensors")
    assert not (tmp_path / "v.safetensors").exists()


def test_another_activation_is_an_error(folder: Path, tuned: Tensors, tmp_path: Path):
    save_file(tuned, tmp_path / "a.safetensors", {"activation": "quick_gelu"})
    with pytest.raises(MismatchError, match=r"weights use QuickGELU, but .* uses GELU"):
        run(folder, tmp_path / "a.safetensors", tmp_path / "v.safetensors")


def test_a_wrong_base_is_a_warning_with_the_number(folder: Path, base: Tensors, tmp_path: Path):
    said: list[str] = []
    other = write_open_clip(tmp_path / "other", seed=5)
    made = run(folder, other, tmp_path / "v.safetensors", warn=said.append)
    assert len(said) == 1
    assert f"|tau|/|theta0| is {made.relative_norm:.2f}, more than fine-tuning gives" in said[0]
    run(folder, other, tmp_path / "w.safetensors", warn=said.append, scale=0.01)
    assert said[1] == said[0]


def test_numbers_that_are_none_are_refused(folder: Path, tuned: Tensors, tmp_path: Path):
    broken = tuned | {"visual.proj": torch.full((64, 32), torch.nan)}
    with pytest.raises(CheckpointError, match=r"visual\.proj: holds values that are not finite"):
        run(folder, as_file(broken, tmp_path), tmp_path / "v.safetensors")
    large = tuned | {"visual.proj": torch.full((64, 32), 1e6)}
    path = as_file(large, tmp_path)
    with pytest.raises(
        AtlasError, match=r"visual\.proj: changes too much for fp16; use --dtype bf"
    ):
        run(folder, path, tmp_path / "v.safetensors", form=Form("fp16"))


# What is kept ---------------------------------------------------------------------------------


FORMS = {
    "fp16": (Form("fp16"), 4e-4),
    "bf16": (Form("bf16"), 4e-3),
    "int8": (Form("int8"), 2e-2),
    "rank": (Form("fp32", rank=4), 1.0),
    "energy": (Form("fp16", energy=0.9), 0.3163),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_are_within_the_error_that_is_stored(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path, name: str
):
    form, bound = FORMS[name]
    made = run(folder, as_file(tuned, tmp_path), tmp_path / "v.safetensors", form=form)
    vector, exact = open_vector(tmp_path / "v.safetensors"), vectors_of(tuned, base)
    for info in vector.header.blocks:
        stored = decode(vector.read(info.name))
        error = (stored - exact[info.name]).norm() / exact[info.name].norm()
        assert error.item() == pytest.approx(info.error, rel=1e-3, abs=1e-7)
        assert info.error <= bound
        assert info.norm == pytest.approx(exact[info.name].norm().item(), rel=1e-5)
        assert info.base_norm == pytest.approx(base[info.name].norm().item(), rel=1e-5)
    errors = [info.error for info in vector.header.blocks]
    assert made.worst_error == max(errors)
    assert made.mean_error == pytest.approx(sum(errors) / len(errors))
    assert made.bytes == (tmp_path / "v.safetensors").stat().st_size
    if name in ("rank", "energy"):
        matrices = [b for b in vector.header.blocks if b.storage == "factors"]
        assert matrices
        assert all(len(info.shape) > 1 for info in matrices)


def test_the_header_tells_where_everything_came_from(folder: Path, tuned: Tensors, tmp_path: Path):
    from atlas_cli import __version__
    from atlas_cli.io.files import sha256_of

    path = as_file(tuned, tmp_path)
    run(folder, path, tmp_path / "v.safetensors", scale=-0.5)
    header = open_vector(tmp_path / "v.safetensors").header
    hashes = {"base": sha256_of(folder / WEIGHTS), "tuned": sha256_of(path)}
    assert header.base == {
        "reference": str(folder),
        "commit": None,
        "sha256": {WEIGHTS: hashes["base"]},
    }
    assert header.finetuned["sha256"] == {path.name: hashes["tuned"]}
    assert header.architecture == TINY_CONFIG
    assert (header.activation, header.scope, header.scale) == ("gelu", "visual", -0.5)
    assert (header.name, header.atlas, header.linearised) == ("test", __version__, False)
    assert len(header.fingerprint) == 64


def test_extract_and_inspect_tell_the_same_relative_norm(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    half = {n: t if "resblocks.0" in n else base[n] for n, t in tuned.items()}
    made = run(folder, as_file(half, tmp_path), tmp_path / "v.safetensors")
    source = locate(parse_reference(str(tmp_path / "v.safetensors")))
    facts = describe_vector("v", source, open_vector(source.weights[0]), lambda count: None)
    visual = [name for name in base if name.startswith("visual.")]
    size = torch.cat([base[name].flatten() for name in visual]).norm().item()
    moved = torch.cat([(half[name] - base[name]).flatten() for name in visual]).norm().item()
    assert made.blocks < len(visual)
    assert made.relative_norm == pytest.approx(moved / size, rel=1e-5)
    assert facts.relative_norm == pytest.approx(made.relative_norm, rel=1e-6)


def test_the_file_opens_with_safetensors_itself(folder: Path, tuned: Tensors, tmp_path: Path):
    run(folder, as_file(tuned, tmp_path), tmp_path / "v.safetensors", form=Form("int8"))
    with safe_open(tmp_path / "v.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["atlas"])["format"] == "atlas.task_vector"
        names = set(file.keys())
    assert {"visual.proj", "visual.proj#scale"} <= names
    content = (tmp_path / "v.safetensors").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0


def test_blocks_are_in_the_order_in_which_people_count(
    folder: Path, tuned: Tensors, tmp_path: Path
):
    from atlas_cli.vectors.format import natural

    run(folder, as_file(tuned, tmp_path), tmp_path / "v.safetensors", Choice("all"))
    names = open_vector(tmp_path / "v.safetensors").names
    assert names == sorted(names, key=natural)
    assert natural("a.9.b") < natural("a.10.b")


@pytest.mark.parametrize("form", [Form(), Form("int8"), Form("fp16", rank=3)])
def test_the_same_inputs_give_the_same_bytes(
    folder: Path, tuned: Tensors, tmp_path: Path, form: Form
):
    path = as_file(tuned, tmp_path)
    for name in ("v", "w"):
        run(folder, path, tmp_path / f"{name}.safetensors", form=form)
    first, second = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("v", "w"))
    assert first == second


def test_an_interrupt_in_the_middle_leaves_nothing(folder: Path, tuned: Tensors, tmp_path: Path):
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    path = as_file(tuned, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(folder, path, tmp_path / "v.safetensors", advance=interrupt)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_changes_meanwhile_is_noticed(folder: Path, tuned: Tensors, tmp_path: Path):
    path = as_file(tuned, tmp_path)

    def replace(count: int) -> None:
        as_file({name: tensor + 1 for name, tensor in tuned.items()}, tmp_path)

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        run(folder, path, tmp_path / "v.safetensors", advance=replace)


# Arithmetic -----------------------------------------------------------------------------------


def test_a_vector_scaled_by_minus_one_undoes_itself(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    path = as_file(tuned, tmp_path)
    run(folder, path, tmp_path / "v.safetensors")
    run(folder, path, tmp_path / "n.safetensors", scale=-1.0)
    forth, back = read(tmp_path / "v.safetensors"), read(tmp_path / "n.safetensors")
    assert all(torch.equal(forth[name], -back[name]) for name in forth)


# Fingerprints ---------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_values_and_not_of_the_file(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    path = as_file(tuned, tmp_path)
    torch.save(
        {"state_dict": {f"module.{n}": t.double() for n, t in base.items()}}, tmp_path / "b.pt"
    )
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY_CONFIG}))
    prints = {}
    for name, source in {"folder": folder, "pickle": tmp_path / "b.pt"}.items():
        run(source, path, tmp_path / f"{name}.safetensors")
        prints[name] = open_vector(tmp_path / f"{name}.safetensors").header
    check_same_base(prints)
    opened = open_base(locate(parse_reference(str(folder))), "visual")
    assert base_fingerprint(opened.tensors, "visual") == prints["folder"].fingerprint
    assert base_fingerprint(opened.tensors, "all") != prints["folder"].fingerprint


def test_vectors_of_different_bases_are_refused_together(
    folder: Path, tuned: Tensors, tmp_path: Path
):
    path = as_file(tuned, tmp_path)
    other = write_open_clip(tmp_path / "other", seed=5)
    headers = {}
    for name, source in {"a": folder, "b": other}.items():
        run(source, path, tmp_path / f"{name}.safetensors")
        headers[name] = open_vector(tmp_path / f"{name}.safetensors").header
    with pytest.raises(MismatchError, match="b and a were taken from different base models"):
        check_same_base(headers)


def test_several_vectors_from_one_base_hash_it_once_and_agree(
    folder: Path, base: Tensors, tmp_path: Path
):
    opened = open_base(locate(parse_reference(str(folder))), "visual")
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        source = locate(parse_reference(str(as_file(moved(base, seed), tmp_path / str(seed)))))
        extract_to(tmp_path / f"{seed}.safetensors", "x", opened, source, Options())
        assert_exact(tmp_path / f"{seed}.safetensors", vectors_of(moved(base, seed), base))
    assert len(opened.provenance) == 1
    check_same_base({str(s): open_vector(tmp_path / f"{s}.safetensors").header for s in (1, 2)})


# Vectors as inputs ----------------------------------------------------------------------------


def test_a_vector_can_be_scaled_and_kept_in_another_form(
    folder: Path, base: Tensors, tuned: Tensors, tmp_path: Path
):
    run(folder, as_file(tuned, tmp_path), tmp_path / "v.safetensors", scale=2.0)
    run(folder, tmp_path / "v.safetensors", tmp_path / "w.safetensors", scale=-0.5)
    expected = {name: -tensor for name, tensor in vectors_of(tuned, base).items()}
    assert_exact(tmp_path / "w.safetensors", expected)
    header = open_vector(tmp_path / "w.safetensors").header
    assert header.scale == -1.0
    assert header.finetuned["vector_of"]["reference"] == str(tmp_path / "epoch.safetensors")


def test_a_vector_of_another_base_or_scope_is_refused(folder: Path, tuned: Tensors, tmp_path: Path):
    run(folder, as_file(tuned, tmp_path), tmp_path / "v.safetensors")
    other = write_open_clip(tmp_path / "other", seed=5)
    with pytest.raises(MismatchError, match="is a task vector of another base model than"):
        run(other, tmp_path / "v.safetensors", tmp_path / "w.safetensors")
    with pytest.raises(MismatchError, match="is a task vector of scope visual; use --scope visual"):
        run(folder, tmp_path / "v.safetensors", tmp_path / "w.safetensors", Choice("text"))
    run(folder, tmp_path / "v.safetensors", tmp_path / "r.safetensors", form=Form(rank=2))
    with pytest.raises(UsageError, match="is low-rank already and stays so"):
        run(folder, tmp_path / "r.safetensors", tmp_path / "w.safetensors", form=Form("int8"))
