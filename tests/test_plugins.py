"""Plugins: what an installed distribution registers is used as what comes with atlas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
import yaml
from conftest import write_images
from safetensors.torch import load_file, save_file

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.registry import Registry, late
from atlas_cli.sources.locate import builtin_model

ROOT = Path(__file__).parent.parent
WEIGHTS = "open_clip_model.safetensors"
Environment = dict[str, str]

MIDWAY = '''
    import atlas_cli as atlas

    SHARE = {"share": atlas.Parameter(0.5, 0.0, 1.0)}

    @atlas.merge_method("midway", models=(1, 1), per_merge=SHARE)
    def midway(tile, values, statistics):
        """theta_0 + share * (theta_1 - theta_0)"""
        return tile.base + values.merge["share"] * (tile.models[0] - tile.base)
'''
STRIPES = """
    import atlas_cli as atlas
    from atlas_cli.core.compose import by_group

    @atlas.granularity("tower")
    def by_tower(shapes):
        return by_group(shapes, {name: name.partition(".")[0] for name in shapes})

    @atlas.granularity("stripes", parameter="N")
    def by_stripe(shapes, text, seed):
        names = {name: f"stripe {n % int(text)}" for n, name in enumerate(shapes)}
        return by_group(shapes, names)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., Environment]:
    """Installs a distribution whose module is announced as a plugin of atlas.

    Gives the environment in which `atlas` finds it. `value` is what the entry point names.
    """

    def install(source: str, value: str = "", name: str = "acme_plugin") -> Environment:
        site = tmp_path / "site"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(textwrap.dedent(source), "utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[atlas.plugins]\n{name} = {value or name}\n")
        paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    return install


def atlas(
    *arguments: object, env: Environment | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, which has loaded no plugin yet."""
    return subprocess.run(
        [*warm.atlas(), *map(str, arguments)],
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
    )


def moved(folder: Path, by: float) -> Path:
    """The built-in model with `by` added to all of its weights."""
    shutil.copytree(builtin_model("tiny"), folder)
    tensors = {name: tensor + by for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def merge_recipe(model: Path, method: str = "midway", **parameters: object) -> str:
    return json.dumps(
        {
            "merge_method": method,
            "base_model": "builtin:tiny",
            "models": [{"model": str(model)}],
            "parameters": parameters,
            "dtype": "float32",
        }
    )


# Merge methods --------------------------------------------------------------------------------


def test_a_method_of_a_plugin_merges_models(plugin, tmp_path: Path):
    env, model = plugin(MIDWAY), moved(tmp_path / "model", 0.5)
    recipe = merge_recipe(model, share=0.25)
    done = atlas("merge", "-", "-o", tmp_path / "merged", env=env, stdin=recipe)
    assert done.returncode == 0, done.stderr
    base, one = load_file(builtin_model("tiny") / WEIGHTS), load_file(model / WEIGHTS)
    for name, found in load_file(tmp_path / "merged" / WEIGHTS).items():
        start = base[name].float()
        expected = start + 0.25 * (one[name].float() - start)
        assert found.equal(expected), name


def test_a_recipe_for_a_method_of_a_plugin_is_checked_as_any_other(plugin, tmp_path: Path):
    env, model = plugin(MIDWAY), moved(tmp_path / "model", 0.5)
    output = ("-o", tmp_path / "merged")
    misspelt = atlas("merge", "-", *output, env=env, stdin=merge_recipe(model, "midwya"))
    assert misspelt.returncode == 2
    assert "unknown method 'midwya'; did you mean 'midway'?" in misspelt.stderr
    assert "atlas, midway)" in misspelt.stderr
    wrong = atlas("merge", "-", *output, env=env, stdin=merge_recipe(model, share=2, shaer=1))
    assert wrong.returncode == 2
    assert "parameters.share: expected 1 or less, found 2" in wrong.stderr
    assert "unknown parameter 'shaer'; did you mean 'share'?" in wrong.stderr


def test_a_method_that_gives_too_few_values_is_stopped(plugin, tmp_path: Path):
    for number, whole in enumerate(("", "whole=True, ")):
        source = MIDWAY.replace("models=", f"{whole}models=").replace(
            "return tile.base + ", "return (tile.base + "
        )
        env = plugin(source.rstrip() + ").reshape(-1)[1:]\n", name=f"short_{number}")
        recipe = merge_recipe(moved(tmp_path / f"model {number}", 0.5))
        roomy = ("-o", tmp_path / "merged", "--memory", "1GB")
        done = atlas("merge", "-", *roomy, env=env, stdin=recipe)
        assert done.returncode == 1
        assert re.search(r"the merge method gave (\d+) values for \d+$", done.stderr.strip())
        shutil.rmtree(tmp_path / "site")


def test_the_schema_knows_the_names_of_plugins(plugin):
    with_plugin = json.loads(atlas("merge", "--schema", env=plugin(MIDWAY + STRIPES)).stdout)
    without = json.loads(atlas("merge", "--schema").stdout)
    methods = [found["properties"]["merge_method"]["enum"] for found in (without, with_plugin)]
    assert methods[1] == [*methods[0], "midway"]
    assert with_plugin["$defs"]["parameters"]["properties"]["share"]["description"] == "Of midway."
    pattern = with_plugin["properties"]["granularity"]["pattern"]
    assert re.match(pattern, "stripes:3")
    assert re.match(pattern, "tower")
    assert not re.match(without["properties"]["granularity"]["pattern"], "tower")


def test_the_example_of_the_docs_is_a_plugin(plugin):
    page = (ROOT / "docs/merging.md").read_text("utf-8")
    example = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = json.loads(atlas("merge", "--schema", env=plugin(example[1])).stdout)
    assert found["properties"]["merge_method"]["enum"][-1] == "midway"


# Granularities --------------------------------------------------------------------------------


def fit(granularity: str, env: Environment) -> subprocess.CompletedProcess[str]:
    quick = ("--shots", "1", "--epochs", "1", "--min-steps", "1", "--batch-size", "8", "--quiet")
    models = ("--model", "builtin:tiny", "--vectors", "builtin:letters")
    return atlas("fit", "builtin:digits", *models, *quick, "--granularity", granularity, env=env)


def test_a_granularity_of_a_plugin_is_learned_and_merged(plugin, tmp_path: Path):
    env = plugin(STRIPES)
    done = fit("stripes:3", env)
    assert done.returncode == 0, done.stderr
    learned = yaml.safe_load(done.stdout)
    assert learned["granularity"] == "stripes:3"
    assert [*learned["coefficients"]["letters"]] == ["stripe 0", "stripe 1", "stripe 2"]
    merged = atlas("merge", "-", "-o", tmp_path / "merged", env=env, stdin=done.stdout)
    assert merged.returncode == 0, merged.stderr


def test_help_lists_the_granularities_of_plugins(plugin):
    text = " ".join(atlas("fit", "--help", env=plugin(STRIPES)).stdout.split())
    assert "block, vector, qkv or partition:K; also tower or stripes:N." in text


def test_an_unknown_granularity_is_told_those_of_plugins_too(plugin):
    env = plugin(STRIPES)
    for text in ("stripes", "stripes:0", "stripes:x", "tower:2", "layer"):
        done = fit(text, env)
        assert done.returncode == 2
        expected = "expected block, vector, qkv, partition:K, tower or stripes:N"
        assert f"--granularity: {expected}, found '{text}'" in done.stderr


# Objectives -----------------------------------------------------------------------------------

MARGIN = """
    import atlas_cli as atlas

    @atlas.objective("margin", needs=("prior",))
    def margin(logits, prior):
        likely = (logits.softmax(dim=1) / prior).topk(2, dim=1).values
        return (likely[:, 1] - likely[:, 0]).mean()

    @atlas.objective("margins", commands=("add", "negate"), needs=("labels",))
    def margins(logits, labels):
        return -logits.gather(1, labels[:, None]).mean()
"""


def learn(
    command: str, data: object, *more: str, env: Environment
) -> subprocess.CompletedProcess[str]:
    quick = ("--epochs", "1", "--min-steps", "1", "--batch-size", "8", "--quiet")
    models = ("--model", "builtin:tiny", "--vectors", "builtin:letters")
    return atlas(command, data, *models, *quick, *more, env=env)


def test_an_objective_of_a_plugin_is_trained(plugin, tmp_path: Path):
    env, photos = plugin(MARGIN), write_images(tmp_path / "photos", ("cat", "dog"), 3)
    adapted = learn("tta", photos, "--objective", "margin", "--select", "last", env=env)
    added = learn("add", photos, "--objective", "margins", env=env)
    for done in (adapted, added):
        assert done.returncode == 0, done.stderr
    coefficients = yaml.safe_load(adapted.stdout)["coefficients"]["letters"]
    assert any(coefficients.values())


TARGETS = """
    import atlas_cli as atlas

    @atlas.objective("squares", needs=("targets", "prior"))
    def squares(logits, targets, total, prior):
        return ((logits.softmax(dim=1) - targets) ** 2 / prior).sum() / total

    @atlas.objective("confidence", needs=("reliable",))
    def confidence(logits):
        return 1 - logits.softmax(dim=1).amax(dim=1)

    @atlas.objective("both", needs=("targets", "weak"))
    def both(logits, targets, total, weak):
        raise AssertionError
"""


def test_an_objective_of_a_plugin_has_the_targets_of_ufm_or_the_images_of_sar(
    plugin, tmp_path: Path
):
    env, photos = plugin(TARGETS), write_images(tmp_path / "photos", ("cat", "dog"), 3)
    for name in ("squares", "confidence"):
        more = ("--select", "last", "--epochs", "3", "--batch-size", "4")
        done = learn("tta", photos, "--objective", name, *more, env=env)
        assert done.returncode == 0, done.stderr
        moved = any(yaml.safe_load(done.stdout)["coefficients"]["letters"].values())
        assert moved or name == "confidence"  # training starts again if predictions are too sure
    refused = learn("tta", photos, "--objective", "both", env=env)
    assert refused.returncode == 2
    assert "objective 'both' needs weak and targets; it can have one" in refused.stderr


def test_an_unknown_objective_is_told_the_nearest_word_and_trains_nothing(plugin):
    env = plugin(MARGIN)
    every = "expected ufm, entropy, balanced-entropy, sar, simclr, margin, found"
    for command, flag, word, hint in (
        ("tta", "--objective", "margni", every),
        ("tta", "--objective", "margins", "; did you mean 'margin'?"),
        ("add", "--objective", "labls", "; did you mean 'labels'?"),
        ("negate", "--forget", "asent", "; did you mean 'ascent'?"),
    ):
        control = ("--control", "builtin:digits") if command == "negate" else ()
        done = learn(command, "builtin:digits", flag, word, *control, env=env)
        assert done.returncode == 2
        assert f"{flag}: expected " in done.stderr
        assert hint in done.stderr
        assert f"found '{word}'" in done.stderr


def test_help_lists_the_objectives_of_plugins(plugin):
    env = plugin(MARGIN)
    for command, listed in (("tta", "or simclr; also margin."), ("add", "margins.")):
        assert listed in " ".join(atlas(command, "--help", env=env).stdout.split())


# Kinds of datasets ----------------------------------------------------------------------------

COLOURS = """
    import atlas_cli as atlas


    @atlas.dataset_kind("colours", splits=("train", "test"))
    def colours(address, split):
        import numpy as np

        names = address.split("+")
        rows = [np.full((32, 32, 3), 40 + 80 * n, dtype=np.uint8) for n in range(len(names))]
        samples = [
            atlas.Sample(f"{split}/{name}/{number}", label, rows[label] + number)
            for label, name in enumerate(names)
            for number in range(3)
        ]
        return atlas.Dataset(classes=names, samples=samples, templates=["a {} square."])
"""


def test_a_kind_of_dataset_of_a_plugin_is_scored_and_learned_from(plugin, tmp_path: Path):
    env, data = plugin(COLOURS), "colours:dark+bright"
    scored = atlas("eval", "builtin:tiny", "--data", data, env=env)
    assert (scored.returncode, scored.stderr) == (0, "")
    assert f"builtin:tiny,{data},test,6,0," in scored.stdout
    for command in ("fit", "tta"):
        folder = tmp_path / command
        done = learn(command, data, "-o", str(folder), env=env)
        assert done.returncode == 0, done.stderr
        (told,) = json.loads((folder / "config.json").read_text("utf-8"))["data"]
        assert (told["name"], told["images"], len(told["sha256"])) == (data, 6, 64)


def test_an_unknown_kind_of_dataset_is_told_the_nearest_one(plugin):
    done = atlas("eval", "builtin:tiny", "--data", "colour:red", env=plugin(COLOURS))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "atlas: error: no such data: colour:red; did you mean 'colours'? (data is "
    )


# Plugins that do not work ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "value", "reason"),
    [
        ("import missing_module", "", "ModuleNotFoundError: No module named 'missing_module'"),
        ("def register():\n    raise ValueError('no')", "acme_plugin:register", "ValueError: no"),
        ("", "acme_plugin:register", "AttributeError: module 'acme_plugin' has no attribute"),
        (
            MIDWAY.replace("midway", "ties"),
            "",
            "merge method 'ties' is registered twice: by "
            "atlas_cli.merge_methods.arithmetic.Family.apply and by acme_plugin.ties",
        ),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_one_line(plugin, source: str, value: str, reason: str):
    done = atlas("merge", "--schema", env=plugin(source, value))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    who = f"plugin 'acme_plugin' ({value or 'acme_plugin'}, of acme_plugin 1.0) cannot be loaded"
    assert done.stderr.startswith(f"atlas: error: {who}: {reason}")
    assert done.stderr.endswith("; repair or uninstall acme_plugin\n")


def test_a_function_registers_when_it_is_named_by_the_entry_point(plugin):
    source = "def register():\n" + textwrap.indent(textwrap.dedent(MIDWAY), "    ")
    found = json.loads(
        atlas("merge", "--schema", env=plugin(source, "acme_plugin:register")).stdout
    )
    assert "midway" in found["properties"]["merge_method"]["enum"]


def test_a_command_that_needs_no_plugin_loads_none(plugin, tmp_path: Path):
    env = plugin("raise RuntimeError('loaded')")
    assert atlas("--help", env=env).returncode == 0
    recipe = merge_recipe(moved(tmp_path / "model", 0.5), "wise_ft", alpha=0.5)
    done = atlas("merge", "-", "-o", tmp_path / "merged", env=env, stdin=recipe)
    assert done.returncode == 0, done.stderr


def test_help_looks_for_no_plugins_and_imports_no_torch():
    script = (
        "import sys, importlib.metadata as metadata\n"
        "def scan(**_): raise SystemExit('scanned')\n"
        "metadata.entry_points = scan\n"
        "from atlas_cli.cli.app import main\n"
        "code = main(['--help'])\n"
        "sys.exit(code or ('torch' in sys.modules) or ('numpy' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# The registry itself --------------------------------------------------------------------------


def first() -> None: ...


def second() -> None: ...


def test_a_name_is_found_or_the_nearest_one_is_told():
    registry: Registry[int] = Registry("colour")
    registry.add("green", 1, first)
    registry.add("blue", 2, second)
    assert (registry["green"], registry.find("blue"), [*registry]) == (1, 2, ["green", "blue"])
    assert registry.get("red") is None
    message = "unknown colour 'gren'; did you mean 'green'? (there are: green, blue)"
    with pytest.raises(UsageError, match=re.escape(message)):
        registry.find("gren")


def test_a_name_that_is_registered_twice_names_both_places():
    registry: Registry[int] = Registry("colour")
    registry.add("green", 1, first)
    registry.add("green", 3, first)  # a cell of a notebook that is run again
    assert registry["green"] == 3
    message = "colour 'green' is registered twice: by test_plugins.first and by test_plugins.second"
    with pytest.raises(AtlasError, match=re.escape(message)):
        registry.add("green", 2, second)


def test_a_name_is_a_word():
    for name in ("", "two words", "partition:K", "a|b"):
        with pytest.raises(AtlasError, match="expected a word for a name"):
            Registry("colour").add(name, 1, first)


def test_a_late_module_is_the_module():
    import math

    assert late("math").floor is math.floor
