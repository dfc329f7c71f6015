"""A model's configuration may name a tokenizer, but it cannot have code of it run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from atlas_cli.errors import AtlasError
from atlas_cli.models.clip import open_model
from atlas_cli.sources.locate import builtin_model, locate, parse_reference


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer comes with code that leaves a mark."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(builtin_model("tiny"), tmp_path / "model")
    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    names = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(names))
    (tokenizer / "config.json").write_text("{}")
    (tokenizer / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import PreTrainedTokenizer\n"
        "class Mine(PreTrainedTokenizer): pass\n"
    )
    return tmp_path / "model"


def configure(model: Path, **text: object) -> None:
    path = model / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"]["text_cfg"] |= text
    path.write_text(json.dumps(config))


def test_options_that_could_run_code_are_refused_by_name(hostile: Path) -> None:
    configure(hostile, hf_tokenizer_name="tok", tokenizer_kwargs={"trust_remote_code": True})
    with pytest.raises(AtlasError, match=r"tokenizer_kwargs trust_remote_code.*does not hand on"):
        open_model(locate(parse_reference(str(hostile))))
    assert not (hostile.parent / "ran").exists()


def test_code_of_a_tokenizer_is_not_run_though_nobody_forbids_it(hostile: Path) -> None:
    configure(hostile, hf_tokenizer_name="tok")
    with pytest.raises(AtlasError, match="tokenizer tok: cannot be opened"):
        open_model(locate(parse_reference(str(hostile))))
    assert not (hostile.parent / "ran").exists()
