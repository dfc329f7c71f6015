"""A timm image tower beside a text tower of transformers, whose files lie in a folder `text/`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from conftest import write_images
from hub import Hub
from safetensors.torch import save_file

from atlas_cli.models.open_clip_import import import_open_clip

import_open_clip()  # mends torchvision, which transformers imports too
transformers = importlib.import_module("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "cat", "dog", "."]
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {
        "timm_model_name": "test_efficientnet",
        "timm_model_pretrained": False,
        "timm_pool": "",
        "timm_proj": "linear",
        "image_size": 32,
    },
    "text_cfg": {
        "hf_model_name": "text",
        "hf_tokenizer_name": "text",
        "hf_model_pretrained": False,
        "hf_pooler_type": "mean_pooler",
        "hf_proj_type": "linear",
        "context_length": 8,
    },
    "custom_text": True,
}


def write_model(folder: Path) -> Path:
    """open_clip_config.json and weights beside text/, which the configuration names so."""
    from atlas_cli.models.clip import build
    from atlas_cli.models.folders import Blueprint

    text = folder / "text"
    text.mkdir(parents=True)
    bert = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    bert |= {"num_attention_heads": 2, "vocab_size": len(WORDS), "max_position_embeddings": 16}
    transformers.BertConfig(**bert).save_pretrained(text)
    (text / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    settings = {"do_lower_case": True, "tokenizer_class": "BertTokenizer", "model_max_length": 16}
    (text / "tokenizer_config.json").write_text(json.dumps(settings))
    preprocess = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    config = {"model_cfg": CONFIG, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    module, _ = build(Blueprint(CONFIG, preprocess, folder))
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lite") / "clip")


def test_eval_finetune_fit_and_merge_keep_the_text_tower(run, model: Path, tmp_path: Path):
    photos = write_images(tmp_path / "photos")
    runs, vectors = tmp_path / "runs", tmp_path / "vectors"
    evaluate = ["eval", model, "--data", photos]
    assert run(*evaluate).code == 0
    tuned = run(
        *("finetune", photos, "--model", model, "-o", runs, "--steps", "2", "--batch-size", "4"),
        *("--lr", "1e-3", "--vectors-dir", vectors),
    )
    assert tuned.code == 0, tuned.err
    fitted = run(
        *("fit", photos, "--model", model, "--vectors", vectors, "--allow-target"),
        *("--epochs", "1", "--min-steps", "1", "--batch-size", "4"),
    )
    assert fitted.code == 0, fitted.err
    (tmp_path / "learned.yaml").write_text(fitted.out)
    merged = run("merge", tmp_path / "learned.yaml", "-o", tmp_path / "merged")
    assert merged.code == 0, merged.err
    found = {path.name for path in (tmp_path / "merged" / "text").iterdir()}
    assert {"config.json", "vocab.txt", "tokenizer_config.json"} <= found
    again = run("eval", model, tmp_path / "merged", "--data", photos)
    assert again.code == 0, again.err
    config = json.loads((tmp_path / "merged" / "open_clip_config.json").read_text())
    assert config["model_cfg"]["text_cfg"]["hf_model_name"] == "text"  # whoever moves it, too


def test_the_folder_of_the_text_tower_comes_from_the_hub(run, model: Path, tmp_path: Path):
    with Hub() as hub:
        hub.add("me/lite", model)
        photos = write_images(tmp_path / "photos")
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
        local = run("eval", model, "--data", photos, "--json")
        found = run("eval", "me/lite", "--data", photos, "--json", **online)
        assert found.code == 0, found.err
        scores = [json.loads(one.out)["results"][0]["top1"] for one in (local, found)]
        assert scores[0] == scores[1]


def test_without_transformers_the_extra_is_named(run, model: Path, tmp_path: Path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import sys\nclass _No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'transformers':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, _No())\n"
    )
    data = write_images(tmp_path / "photos")
    result = run("eval", model, "--data", data, cold=True, PYTHONPATH=str(blocked))
    assert (result.code, len(result.error_lines)) == (1, 1), result.err
    assert "pip install 'atlas-cli[hf]'" in result.err
