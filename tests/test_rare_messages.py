"""Mistakes that are rare: what each of them says, by the part of the package that says it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
from conftest import write_images
from makers import random_values, write_vector
from merge_runs import ROOMY, linear, llama, write_model, write_recipe
from refusals import Act, check
from safetensors.torch import save_file
from shards import server, write_tar

from atlas_cli.cli.stdin import read_stdin, spooled_stdin
from atlas_cli.core.adapters import check_count
from atlas_cli.datasets import from_hub, from_tars, from_torchvision
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.known import named_templates
from atlas_cli.io.staging import check_space
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.learning import run_folder
from atlas_cli.learning.classifier import check_formats
from atlas_cli.learning.evaluate import classify
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.weights import WeightTrainer
from atlas_cli.merging.adapters import _mean
from atlas_cli.merging.learned import coefficient_table
from atlas_cli.merging.model_card import read_evaluation
from atlas_cli.merging.segments import check_outputs
from atlas_cli.merging.vocabulary import rows_of
from atlas_cli.models import module_kinds, tokenizers, trainable
from atlas_cli.models.headed import projection_name
from atlas_cli.models.linearised import open_linearised, parameter_order
from atlas_cli.models.lora import _place, _Settings
from atlas_cli.publishing import publication
from atlas_cli.registry import ADAPTERS
from atlas_cli.reports import plots, runs
from atlas_cli.sources import hub, listings, locate, open_clip_table, zoo
from atlas_cli.sources.locate import parse_reference
from atlas_cli.sources.reference import Reference, hub_address
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.describe import _products
from atlas_cli.vectors.gather import gather_by_name
from atlas_cli.vectors.pool import Gathering, wanted
from atlas_cli.vectors.targets import VectorTarget, check_targets

TINY = ("--model", "builtin:tiny", "--vectors", "builtin:letters")


def lazy(*shape: int) -> LazyTensor:
    return LazyTensor(shape, torch.float32, lambda: torch.zeros(shape))


def entered(context: object) -> Act:
    def enter() -> None:
        with context:  # type: ignore[attr-defined]
            pass

    return enter


def raising(context: object, problem: Exception) -> Act:
    def act() -> None:
        with context:  # type: ignore[attr-defined]
            raise problem

    return act


# Commands -------------------------------------------------------------------------------------


def test_command_lines(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    photos = write_images(tmp_path / "photos", count=2)
    others = write_images(tmp_path / "others", ("owl", "fox"), count=2)
    write_images(tmp_path / "loose", ("",), count=2)
    (tmp_path / "loose" / "cat").mkdir(exist_ok=True)
    (tmp_path / "loose" / "cat").rmdir()
    write_model(tmp_path / "m1", llama(1))
    write_model(tmp_path / "m2", llama(2))
    (tmp_path / "run").mkdir()
    for place in ("r.yaml", "run/recipe.yaml"):
        write_recipe(tmp_path / place, linear(1, 1))
    cases = {
        "no such recipe: none.yaml": ("merge", "none.yaml", "-o", "out"),
        "loose: has no labels to name folders by": ("draw", "loose", "-o", "out"),
        "run: is no learned recipe; merge it first": ("export", "run", "--classifier", "-o", "out"),
        "--launch is for eval, fit": ("merge", "r.yaml", "-o", "out", "--launch", "2"),
        "--unsafe-truncate-embeddings: cuts rows by their number": (
            *("merge", "r.yaml", "out", "--unsafe-truncate-embeddings"),
        ),
        "others: its classes are not those of photos": (
            *("fit", "photos", *TINY, "--select", "val:others"),
        ),
        "--select val judges by the val split; learn from another --split": (
            *("add", "photos", "others", *TINY, "--select", "val", "--split", "val"),
        ),
    }
    for message, words in cases.items():
        result = call(*words)
        assert result.code in (1, 2), (words, result)
        assert result.out == ""
        assert message in result.err
        assert len(result.error_lines) == 1, result.err
    assert photos != others
    assert not (tmp_path / "out").exists()


def test_streams(call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"12345")))
    check({"stdin: is longer than 0 MB of text": lambda: read_stdin(4)})
    monkeypatch.setattr("sys.stdin", None)
    check({"- reads stdin, which is no pipe and no file": entered(spooled_stdin(".pt"))})
    result = call("tta", *TINY, "--online")
    assert "--online reads paths from stdin, which is no pipe and no file" in result.err


# Images ---------------------------------------------------------------------------------------


def test_folders_and_names(tmp_path: Path):
    write_images(tmp_path / "photos", count=2)
    write_images(tmp_path / "split" / "train", count=2)
    (tmp_path / "file").touch()
    prolip = next(name for name, one in ADAPTERS.items() if one.needs == 2)
    check(
        {
            "file: expected a folder, found a file": lambda: open_dataset(str(tmp_path / "file")),
            "has no split folders (": lambda: open_dataset(str(tmp_path / "photos"), split="val"),
            "no val folder (it has train; use --split)": (
                lambda: open_dataset(str(tmp_path / "split"), split="val")
            ),
            "unknown data 'builtin:digit'": lambda: open_dataset("builtin:digit"),
            "'cifar11' is no well-known dataset": lambda: named_templates("cifar11", "here"),
            "is fitted on images left out and needs 2 of every class, but a class has 1": (
                lambda: check_count(prolip, ADAPTERS[prolip], 1, "photos")
            ),
        }
    )


def test_shards(tmp_path: Path):
    alone = write_tar(tmp_path / "alone.tar", {"a.png": b"x"})
    word = write_tar(tmp_path / "word.tar", {"a.png": b"x", "a.cls": b"cat"})
    empty = write_tar(tmp_path / "empty.tar", {"a.txt": b"x"})
    whole = alone.read_bytes()
    answers = {
        "/500.tar": (500, b"", 0),
        "/alone.tar": (200, whole, len(whole)),
        "/cut.tar": (200, whole[:600], len(whole)),
    }
    with server(answers) as address:
        check(
            {
                "a.png has no a.cls beside it": lambda: open_dataset(f"wds:{alone}"),
                "a.cls: expected the number of a class": lambda: open_dataset(f"wds:{word}"),
                "has no images with a .cls file beside them": (
                    lambda: open_dataset(f"wds:{empty}")
                ),
                "/500.tar: the server answered 500": (lambda: from_tars._get(f"{address}/500.tar")),
                "/alone.tar: a has no .cls file beside it": (
                    lambda: list(from_tars._streamed_members(f"{address}/alone.tar"))
                ),
                "/cut.tar: the connection was cut": (
                    lambda: list(from_tars._streamed_members(f"{address}/cut.tar"))
                ),
            }
        )


def test_datasets_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    address = from_hub._parse("owner/name")

    class DatasetNotFoundError(FileNotFoundError):
        pass

    def hub_says(problem: Exception) -> Act:
        return raising(from_hub._explained(address), problem)

    def torchvision_says(problem: Exception) -> Act:
        return raising(from_torchvision._explained("torchvision:x", "x"), problem)

    check(
        {
            "hf:owner/name: access has to be asked for": hub_says(FileNotFoundError("is gated")),
            "hf:owner/name: no such dataset on the Hub": hub_says(DatasetNotFoundError("x")),
            "hf:owner/name: Config name is missing; name one as hf:owner/name:CONFIG": (
                hub_says(ValueError("Config name is missing."))
            ),
            "hf:owner/name: could not be reached (OSError: x)": hub_says(OSError("x")),
            "file/x: cannot be made: Not a directory": (
                lambda: from_torchvision._make_folder(tmp_path / "file" / "x")
            ),
            "torchvision:x: could not be downloaded": torchvision_says(URLError("none")),
            "torchvision:x: torchvision cannot read it: broken": (
                torchvision_says(ValueError("broken"))
            ),
        }
    )
    import datasets

    pictures, words = datasets.Image(), datasets.Value("string")
    for features, lacking in (({"a": words}, "images (it has a)"), ({"a": pictures}, "labels")):
        check(
            {
                f"hf:owner/name: has no column of {lacking}": (
                    lambda features=features: from_hub._columns(address, features)
                )
            }
        )
    monkeypatch.setitem(sys.modules, "datasets", None)
    check({"hf:owner/name: reading datasets of the Hub": lambda: from_hub._builder(address)})


# Learning -------------------------------------------------------------------------------------


def test_what_learning_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_file({"a": torch.zeros(2)}, tmp_path / "state.safetensors")
    saved = run_folder.SavedRun({}, {}, tmp_path / "state.safetensors")

    def no_memory(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    module = SimpleNamespace(encode_image=no_memory)
    clip = SimpleNamespace(name="m", device="cpu", module=module)
    weights = WeightTrainer.__new__(WeightTrainer)
    check(
        {
            "m: not enough memory for a single image": (
                lambda: classify(clip, torch.zeros(2, 2), torch.zeros(2, 3, 4, 4))  # type: ignore[arg-type]
            ),
            "state.safetensors: is not the state of a run": (
                lambda: run_folder._read_facts(tmp_path / "state.safetensors")
            ),
            "state.safetensors: is not the state of a run: KeyError": (
                lambda: CoefficientTrainer.from_saved(saved)
            ),
            "state.safetensors: is not": lambda: weights.from_saved(saved),
        }
    )
    monkeypatch.setattr("atlas_cli.learning.classifier.find_spec", lambda name: None)
    check({"--format onnx needs onnxscript; run: pip install": lambda: check_formats(["onnx"])})


# Models ---------------------------------------------------------------------------------------


def test_towers_of_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = torch.nn.Linear(2, 2)
    settings = _Settings("here", 2, 2.0, {}, {}, by_root=False, transposed=False)
    factors = {"A": lazy(2, 3), "B": lazy(4, 2)}
    block = "visual.transformer.resblocks.0.mlp.c_fc"
    (tmp_path / "tokenizer.json").write_text('{"x": 1}')
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    source = SimpleNamespace(folder=tmp_path, reference=SimpleNamespace(text="m"))
    check(
        {
            "prolip tunes the last projection": lambda: projection_name(other),
            "--tune projection: this image tower has no projection": (
                lambda: trainable.names_of(other, "projection")
            ),
            "--checkpoint-activations: open_clip does it for transformers only": (
                lambda: trainable.checkpoint_activations(other)
            ),
            "--lora: this image tower has no layers that peft adapts": (
                lambda: trainable.targets_of(other)
            ),
            "here: x has no place in a linearised model": (
                lambda: open_linearised({"x": lazy(1)}, {}, "here")
            ),
            "visual.x: only linearised vision transformers are read": (
                lambda: parameter_order(["visual.x"])
            ),
            "changes (4, 3), but visual.transformer.resblocks.0.mlp.c_fc.weight has (8, 8)": (
                lambda: _place(block, factors, {f"{block}.weight": lazy(8, 8)}, settings)
            ),
            "here: has no tokenizer.json; make it with transformers": (
                lambda: tokenizers.read_tokenizer(tmp_path / "none", "here")
            ),
            "tokenizer.json: is no tokenizer: ": (
                lambda: tokenizers.read_tokenizer(tmp_path, "here")
            ),
            "m: transformers cannot build NoSuchModel": (
                lambda: module_kinds._of_transformers(source, {}, "NoSuchModel")  # type: ignore[arg-type]
            ),
        }
    )
    for name in ("tokenizers", "transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    check(
        {
            "needs the package tokenizers; run: pip install": tokenizers._library,
            "--lora needs transformers; pip install": (
                lambda: module_kinds._of_transformers(source, {}, "X")  # type: ignore[arg-type]
            ),
            "--lora needs peft; pip install": trainable._import_peft,
        }
    )


# Vectors --------------------------------------------------------------------------------------


def test_vectors(tmp_path: Path):
    one = write_vector(tmp_path / "one.safetensors", random_values())
    save_file({"a.b": torch.zeros(2)}, tmp_path / "other.safetensors")
    plain = locate.locate(parse_reference(str(tmp_path / "other.safetensors")))
    blocks = [SimpleNamespace(name="a", shape=shape) for shape in ((2,), (3,))]
    pair = {
        str(number): SimpleNamespace(names=["a"], header=SimpleNamespace(blocks=[block]))
        for number, block in enumerate(blocks)
    }
    named = SimpleNamespace(name="a", group="zoo")
    check(
        {
            "other.safetensors: is no CLIP model with tensors of scope visual": (
                lambda: open_base(plain, "visual")
            ),
            "a has different shapes: (2,) in 0, (3,) in 1": (
                lambda: _products("a", pair)  # type: ignore[arg-type]
            ),
            "name the model that the vectors are of with --base MODEL": (
                lambda: gather_by_name([str(one)])
            ),
            "every task vector was left out": (
                lambda: wanted([named], Gathering(exclude=("a",)))  # type: ignore[list-item]
            ),
            f"{tmp_path}: is a folder": (
                lambda: check_targets([VectorTarget("a", tmp_path)], force=False)
            ),
            "one.safetensors: is a file": (
                lambda: check_targets([VectorTarget("a", one / "x.safetensors")], force=False)
            ),
            "two task vectors are called": (
                lambda: publication._vectors([one, one], "o/n", publication.PublishOptions())
            ),
        }
    )


# Merging --------------------------------------------------------------------------------------


def test_merging(tmp_path: Path):
    save_file({"other": torch.zeros(2)}, tmp_path / "table.safetensors")
    part = SimpleNamespace(place="slices[1]")
    segment = SimpleNamespace(part=part, layout=SimpleNamespace(tensors={"a": lazy(1)}))
    pool, columns = SimpleNamespace(members=["v"]), SimpleNamespace(labels=["a", "b"])
    nothing = {"atlas": "1", "results": [], "models": []}
    check(
        {
            "needs 100,000,000,000 MB of disk, and": (
                lambda: check_space(tmp_path / "out", 10**17)
            ),
            "the adapters hold whole tensors of several shapes: [(2,), (3,)]": (
                lambda: _mean([(lazy(2), 0.5), (lazy(3), 0.5)])
            ),
            "holds no coefficients, expected a table of (1, 2)": (
                lambda: coefficient_table(str(tmp_path / "table.safetensors"), pool, columns)  # type: ignore[arg-type]
            ),
            "here: is not what `atlas eval --json` prints": lambda: read_evaluation("[]", "here"),
            "here: holds no results": lambda: read_evaluation(json.dumps(nothing), "here"),
            "slices[1]: a is made twice": (
                lambda: check_outputs([segment, segment])  # type: ignore[list-item]
            ),
            "here: has no embedding of tokens": lambda: rows_of({"a": lazy(2)}, "here"),
        }
    )


def write_adapter(folder: Path, rows: int) -> Path:
    """A LoRA of one layer."""
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {f"{name}A.weight": torch.ones(2, 8), f"{name}B.weight": torch.ones(rows, 2)}
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def test_recipes_that_fit_no_models(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        write_model(tmp_path / f"m{number}", llama(number))
    for name, rows in (("a1", 8), ("a2", 8), ("a3", 4)):
        write_adapter(tmp_path / name, rows)

    def of(*weighted: tuple[str, float], **more: object) -> dict[str, object]:
        models = [{"model": f"./{name}", "parameters": {"weight": w}} for name, w in weighted]
        return {"merge_method": "linear", "models": models, **more}

    halves = [
        {
            "sources": [
                {"model": f"./m{n}", "layer_range": [first, first + 1], "parameters": {"weight": 1}}
                for n in (1, 2, 3)
            ],
            "base_model": f"./m{base}",
        }
        for first, base in ((0, 1), (1, 3))
    ]
    ties = {"merge_method": "ties", "base_model": "./m1", "slices": halves}
    cases = {
        "the weights add up to 0; set normalize: false": of(("a1", 1), ("a2", -1)),
        "the adapters differ in the shape of": of(("a1", 1), ("a3", 1)),
        "scope: model needs one list of models": ties | {"parameters": {"scope": "model"}},
        "post: slices[1] has another base than base_model": ties | {"post": {"svc": {}}},
    }
    for message, recipe in cases.items():
        result = call("merge", write_recipe(tmp_path / "r.yaml", recipe), "-o", "out", *ROOMY)
        assert message in result.err, result.err
        assert len(result.error_lines) == 1
    assert not (tmp_path / "out").exists()


# Reports and publishing -----------------------------------------------------------------------


def test_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "eval.json").write_text('{"results": [{}]}')
    (tmp_path / "images.jsonl").write_text("[]\n")
    check(
        {
            "run: holds a fine-tuned model; publish": (
                lambda: publication._run(tmp_path / "run", "o/n", publication.PublishOptions())
            ),
            "--plot: no block has a norm relative to the base": (
                lambda: plots.plot_vectors(tmp_path / "p.png", [], None)
            ),
            "here: holds no coefficients: numbers by vector": (
                lambda: runs.read_coefficients('{"a": 1}', "here")
            ),
            "here.a.b: inf is not a finite number": (
                lambda: runs.read_coefficients('{"a": {"b": 1e999}}', "here")
            ),
            "eval.json: is not what `atlas eval --json` prints": (
                lambda: runs.read_evaluations(tmp_path / "eval.json")
            ),
            "images.jsonl: line 1 is not a row of images": (
                lambda: list(runs._read_images(tmp_path / "images.jsonl"))
            ),
        }
    )
    monkeypatch.setattr(plots, "_LIBRARIES", ("no_such_library",))
    check({"--plot needs no_such_library; run: pip": lambda: plots.check_libraries("--plot")})


# Sources --------------------------------------------------------------------------------------


def test_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    listed = SimpleNamespace(files=["model.safetensors.index.json"], fetch=lambda names: tmp_path)
    monkeypatch.setattr(listings, "ask_collection", lambda slug: [("dataset", "o/d")])
    check(
        {
            "open_clip has no weights 'openia' for ViT-B-32; did you mean 'openai'?": (
                lambda: parse_reference("ViT-B-32/openia")
            ),
            "'hf:a/b@' ends with @ but names no revision": lambda: parse_reference("hf:a/b@"),
            "x: open_clip lists no weights for it on the Hub": (
                lambda: hub_address(Reference("x", "open_clip", "ViT-B-32", tag="none"))
            ),
            "m: lists b.safetensors but does not hold it": (
                lambda: locate.from_snapshot(Reference("m", "hub", "o/m"), listed, None)  # type: ignore[arg-type]
            ),
            "a/b: holds no models": lambda: listings.collected_models("a/b", "a/b", print),
        }
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "file"))
    said = "file/hub: cannot be written: Not a directory; set ATLAS_CACHE to a folder that can be"
    check({said: lambda: listings.collected_models("a/b", "a/b", print)})
    assert "o/n: not a name the Hub accepts" in str(hub._explained(ValueError("x"), "o/n", None))
    assert "answers as no Hub does (KeyError: 'x')" in str(hub._strange(KeyError("x"), "o/n"))
    monkeypatch.setattr(open_clip_table.importlib.util, "find_spec", lambda name: None)
    check({"open_clip is not installed; run: pip install": open_clip_table._open_clip_folder})


SET = "{base: b, repository: r, format: f, tasks: %s}"


def test_lists_of_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "zoo.yaml"
    monkeypatch.setattr(zoo, "user_file", lambda: path)

    def reading(text: str) -> Act:
        def act() -> None:
            path.write_text(text)
            zoo.read_zoo()

        return act

    check(
        {
            "zoo.yaml: expected the key 'sets' with keys and values": reading("sets: 3\n"),
            "mine: tasks: expected a list of names": reading(f"sets: {{mine: {SET % '3'}}}\n"),
            "mine: tasks: a task is listed twice": (reading(f"sets: {{mine: {SET % '[a, a]'}}}\n")),
            "mine: key 'base' is missing": reading("sets: {mine: {repository: r, tasks: [a]}}\n"),
            "mine: megabytes: expected a number": (
                reading(f"sets: {{mine: {SET[:-1] % '[a]'}, megabytes: much}}}}\n")
            ),
            "mine: of: there is no other set 'none'": reading("sets: {mine: {of: none}}\n"),
        }
    )
    path.write_bytes(b"caf\xe9")
    check({"zoo.yaml: cannot be read as UTF-8 text": zoo.read_zoo})
