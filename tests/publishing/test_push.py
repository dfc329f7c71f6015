"""What is pushed to a server on loopback is pulled and used by somebody with an empty cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TIMEOUT, Result
from hub import Hub
from safetensors import safe_open
from safetensors.torch import load_file
from uploads import UploadHub

from atlas_cli.sources.locate import builtin_model

FIT = ("builtin:house_numbers", "--shots", 1, "--epochs", 1, "--batch-size", 10)
EVAL = ("--data", "builtin:digits", "--shots", 5, "--json")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.add("owner/base", builtin_model("tiny"))
        yield server


@pytest.fixture
def user(run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Somebody with a folder and empty caches of their own, who reads from the loopback Hub."""

    def arrive(name: str) -> Callable[..., Result]:
        home = tmp_path / name
        home.mkdir()

        def run_there(*arguments: object, **environment: str) -> Result:
            monkeypatch.chdir(home)
            caches = {"HF_HOME": f"{home}/hf", "ATLAS_CACHE": f"{home}/cache"}
            online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"} | caches
            return run(*map(str, arguments), **(online | environment))

        return run_there

    return arrive


def front(card: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return found


def commands(card: bytes) -> list[str]:
    return re.findall(r"^(?:atlas|hf) .*$", card.decode(), re.MULTILINE)


def done(result: Result) -> Result:
    assert result.code == 0, result.err
    return result


def finetuned(user: Callable[..., Result], folder: Path) -> None:
    """A fine-tuned model: the base with a built-in task vector added."""
    header = {"merge_method": "atlas", "base_model": "builtin:tiny"}
    vectors = [{"name": "digits", "file": "builtin:digits"}]
    shape = safe_open(Path(builtin_model("vectors")) / "digits.safetensors", "pt").keys()
    blocks = sorted({name.partition("#")[0] for name in shape})
    recipe = {**header, "vectors": vectors, "coefficients": {"digits": dict.fromkeys(blocks, 1.0)}}
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done(user("merge", folder / "recipe.yaml", "-o", folder / "digits"))


def test_a_vector_a_run_and_a_model_are_pushed_and_used_by_somebody_else(
    user, hub: Hub, tmp_path: Path
):
    first, second = user("first"), user("second")
    home, there = tmp_path / "first", tmp_path / "second"
    finetuned(first, home)
    with UploadHub() as uploads:
        to = {"HF_ENDPOINT": uploads.endpoint, "HF_TOKEN": "hf_x"}
        done(first("extract", "owner/base", "digits", "-o", "digits.safetensors"))
        done(first("push", "digits.safetensors", "me/digits", "--license", "mit", **to))
        done(
            first(
                "fit", *FIT, "--model", "owner/base", "--vectors", "digits.safetensors", "-o", "run"
            )
        )
        pushed = done(first("push", "run", "me/run", **to))
        assert pushed.out == f"{uploads.endpoint}/me/run\n"
        done(first("merge", "run", "-o", "mine"))
        scores = done(first("eval", "owner/base", "mine", *EVAL)).out
        (home / "scores.json").write_text(scores)
        done(first("push", "mine", "me/mine", "--evaluation", "scores.json", **to))
        for name, files in uploads.files.items():
            hub.add(name, files)
        pushed_files = uploads.files

    vector = pushed_files["me/digits"]
    assert sorted(vector) == ["README.md", "digits.safetensors"]
    said = front(vector["README.md"])
    assert (said["base_model"], said["base_model_relation"]) == (["owner/base"], "adapter")
    assert (said["library_name"], said["license"]) == ("atlas", "mit")
    assert said["pipeline_tag"] == "zero-shot-image-classification"
    assert "task-vector" in said["tags"]
    assert b"| `digits.safetensors` | `digits` sha256 `" in vector["README.md"]

    learned = pushed_files["me/run"]
    assert {"README.md", "recipe.yaml", "coefficients.png", "vectors/digits.safetensors"} <= set(
        learned
    )
    assert "state.safetensors" not in learned
    said = front(learned["README.md"])
    assert (said["base_model"], said["license"]) == (["owner/base"], "unknown")
    (result,) = said["model-index"][0]["results"]
    assert result["dataset"]["name"] == "builtin:house_numbers"
    assert "learned from" in result["dataset"]["split"]
    assert b"![learned coefficients](coefficients.png)" in learned["README.md"]

    model = pushed_files["me/mine"]
    said = front(model["README.md"])
    assert (said["library_name"], said["base_model_relation"]) == ("open_clip", "merge")
    (result,) = said["model-index"][0]["results"]
    top1 = json.loads(scores)["results"][1]["top1"]
    assert result["metrics"][0]["value"] == pytest.approx(top1, abs=1e-6)

    # Somebody else uses them as the cards say, from empty caches.
    merging, *_ = commands(learned["README.md"])
    assert merging == "atlas merge hf://me/run -o mine"
    done(second(*merging.split()[1:]))
    weights = "open_clip_model.safetensors"
    ours, theirs = (load_file(place / "mine" / weights) for place in (home, there))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    evaluating = commands(model["README.md"])[0]
    assert evaluating == "atlas eval me/mine --data photos/"
    (score,) = json.loads(done(second("eval", "me/mine", *EVAL)).out)["results"]
    assert score["top1"] == top1
    _, fitting, _ = commands(vector["README.md"])
    assert fitting == "atlas fit photos/ --model owner/base --vectors hf://me/digits -o run"
    done(second("fit", *FIT, *fitting.split()[3:]))
    one, other = (
        yaml.safe_load((place / "run/recipe.yaml").read_text()) for place in (home, there)
    )
    assert one["coefficients"] == other["coefficients"]


def test_links_out_of_a_folder_and_what_is_not_there_are_refused(user, tmp_path: Path):
    first = user("first")
    home = tmp_path / "first"
    finetuned(first, home)
    (tmp_path / "secret.txt").write_text("secret")
    (home / "digits" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (home / "empty").mkdir()
    for arguments, code, said in (
        (("digits", "me/x"), 1, "digits/notes.txt: is a link out of digits"),
        (("digits", "x"), 2, "x: expected OWNER/NAME"),
        (("nothing", "me/x"), 2, "no such file or folder: nothing"),
        (("empty", "me/x"), 1, "empty: expected one weight file, found none"),
        (("recipe.yaml", "me/x"), 1, "recipe.yaml"),
    ):
        result = first("push", *arguments)
        assert (result.code, len(result.error_lines)) == (code, 1), result.err
        assert said in result.err
    (home / "digits" / "notes.txt").unlink()
    shown = done(first("push", "digits", "me/x", "--license", "mit", "--dry-run"))
    assert front(shown.out.encode())["license"] == "mit"
    assert "atlas: open_clip_model.safetensors (" in shown.err
    result = first("merge", "hf://owner/base", "-o", "out")
    assert (result.code, result.err) == (
        2,
        "atlas: error: hf://owner/base: holds no run: there is no recipe.yaml in it\n",
    )


def test_the_licence_is_that_of_the_base_where_its_card_names_one(user, hub: Hub, tmp_path: Path):
    base = {p.name: p.read_bytes() for p in builtin_model("tiny").iterdir() if p.is_file()}
    hub.add("owner/licensed", base | {"README.md": b"---\nlicense: apache-2.0\n---\n# Base\n"})
    first, home = user("first"), tmp_path / "first"
    finetuned(first, home)
    done(first("extract", "owner/licensed", "digits", "-o", "digits.safetensors"))
    shown = done(first("push", "digits.safetensors", "me/x", "--dry-run"))
    assert front(shown.out.encode())["license"] == "apache-2.0"
    assert "licence apache-2.0, as owner/licensed has it; --license names another" in shown.err
    given = done(first("push", "digits.safetensors", "me/x", "--dry-run", "--license", "mit"))
    assert front(given.out.encode())["license"] == "mit"
    offline = done(first("push", "digits.safetensors", "me/x", "--dry-run", HF_HUB_OFFLINE="1"))
    assert front(offline.out.encode())["license"] == "unknown"
    assert "the licence is not known, and the card says so" in offline.err
    # A base beside us: its card is the one in its folder.
    local = home / "base"
    local.mkdir()
    for name, content in base.items():
        (local / name).write_bytes(content)
    (local / "README.md").write_text("---\nlicense: cc0-1.0\n---\n# Base\n")
    done(first("extract", "base", "digits", "-o", "local.safetensors"))
    shown = done(first("push", "local.safetensors", "me/x", "--dry-run"))
    assert front(shown.out.encode())["license"] == "cc0-1.0"


def test_python_pushes_as_the_command_does(user, tmp_path: Path):
    first, home = user("first"), tmp_path / "first"
    finetuned(first, home)
    with UploadHub() as uploads:
        code = "import atlas_cli as atlas; print(atlas.push('digits', 'me/digits', license='mit'))"
        to = {"HF_ENDPOINT": uploads.endpoint, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
        shown = subprocess.run(
            [sys.executable, "-c", code],
            cwd=home,
            env=os.environ | to,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert shown.stdout == f"{uploads.endpoint}/me/digits\n", shown.stderr
        pushed = uploads.files["me/digits"]
    assert front(pushed["README.md"])["license"] == "mit"
    assert "open_clip_model.safetensors" in pushed
