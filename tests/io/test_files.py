"""Names that files of others hold: they stay in their folder, and lead to regular files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from conftest import TINY_CONFIG, write_open_clip

from atlas_cli.errors import CheckpointError
from atlas_cli.io.files import inside, open_regular, whole_file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True)
    (folder / "config").write_text("precious")
    return folder


NAMES = ("../x", "/etc/passwd", "a/../../x", "..", "", "a\\b", "a\0b", "\udcff", None, 3, "a\nb")


def test_a_name_never_leads_out_of_its_folder(tmp_path: Path):
    for name in NAMES:
        with pytest.raises(CheckpointError, match="names a file outside its folder"):
            inside(tmp_path, name, "index")
    assert inside(tmp_path, "a/b.json", "index") == tmp_path / "a" / "b.json"


def test_links_are_followed_within_the_folder_and_to_the_blobs_of_a_snapshot(
    tmp_path: Path, secret: Path
):
    (tmp_path / "in").symlink_to(tmp_path / "x")
    assert inside(tmp_path, "in", "index").name == "in"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(inside(tmp_path, "loop", "index"))
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/123")
    assert inside(snapshot, "config.json", "index")
    (snapshot / "out").symlink_to(secret)
    with pytest.raises(CheckpointError, match="out is a link out of its folder"):
        inside(snapshot, "out", "index")


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        open_regular(tmp_path / "pipe")


def test_what_a_killed_run_left_of_a_file_is_swept_by_the_next(tmp_path: Path):
    left, fresh, own = (
        tmp_path / name
        for name in (".a.json.atlas-00000000.part", ".a.json.atlas-1.part", ".a.json.part")
    )
    for path in (left, fresh, own):
        path.touch()
    for path in (left, own):
        os.utime(path, (time.time() - 3600,) * 2)
    with whole_file(tmp_path / "a.json") as temporary:
        temporary.write_text("{}")
        os.utime(temporary, (time.time() - 3600,) * 2)
        with whole_file(tmp_path / "a.json"):  # another writer: the first one is still there
            assert temporary.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", fresh.name, own.name}


# A hostile model ------------------------------------------------------------------------------


def with_text(folder: Path, **text: object) -> Path:
    write_open_clip(folder)
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"] = TINY_CONFIG | {"text_cfg": TINY_CONFIG["text_cfg"] | text}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def test_finetuning_does_not_copy_a_tokenizer_to_where_its_name_leads(
    call, tmp_path: Path, secret: Path
):
    model = with_text(tmp_path / "models" / "hostile", hf_tokenizer_name="../../.ssh")
    source = tmp_path / ".ssh"
    source.mkdir()
    (source / "config").write_text("hostile")
    target = secret.parent / "a" / "run"
    target.parent.mkdir()
    result = call("finetune", "builtin:digits", "--model", model, "-o", target, "--steps", "1")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "text_cfg.hf_tokenizer_name cannot be '../../.ssh'" in result.err
    assert (secret / "config").read_text() == "precious"
    assert not target.exists()


def test_links_beside_a_model_are_not_copied(call, tmp_path: Path, secret: Path):
    for number in (1, 2):
        write_open_clip(tmp_path / f"m{number}", seed=number)
    (tmp_path / "m1" / "tokenizer.json").symlink_to(secret / "config")
    recipe = tmp_path / "r.yaml"
    models = [{"model": str(tmp_path / f"m{number}")} for number in (1, 2)]
    recipe.write_text(
        json.dumps({"merge_method": "linear", "models": models, "parameters": {"weight": 1.0}})
    )
    result = call("merge", recipe, "-o", tmp_path / "out", "--memory", "8GB")
    assert (result.code, len(result.error_lines)) == (1, 1), result.err
    assert "tokenizer.json is a link out of its folder; put a copy" in result.err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.part").exists()
