"""A timm image tower beside a text tower of transformers, whose files lie in a folder `text/`."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import write_images
from hub import Hub
from safetensors.torch import load_file, save_file

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
    result = run("eval", model, "--data", data, "-q", cold=True, PYTHONPATH=str(blocked))
    assert (result.code, len(result.error_lines)) == (1, 1), result.err
    assert re.search(r"pip install .*'transformers>=", result.err)


# SigLIP ---------------------------------------------------------------------------------------

SIGLIP = {
    "embed_dim": 96,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 160,
        "timm_model_name": "test_vit3",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 8,
        "vocab_size": len(WORDS),
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "width": 96,
        "heads": 2,
        "layers": 1,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}


def write_siglip(folder: Path, change: float = 0.0) -> Path:
    """A folder as timm/ViT-B-16-SigLIP is: a sigmoid's bias, a tokenizer beside the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from atlas_cli.models.clip import build
    from atlas_cli.models.folders import Blueprint

    folder.mkdir()
    words = Tokenizer(
        models.Unigram([("</s>", 0.0), ("<unk>", 0.0)] + [(w, -1.0) for w in WORDS], 1)
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    half = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    preprocess = {"size": [160, 160], "mode": "RGB", "resize_mode": "squash", **half}
    model = json.loads(json.dumps(SIGLIP))
    model["text_cfg"]["vocab_size"] = len(WORDS) + 2
    config = {"model_cfg": model, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    module, _ = build(Blueprint(model, preprocess, folder))
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    assert "logit_bias" in weights
    moved = (name for name, tensor in weights.items() if name.startswith("visual."))
    weights |= {name: weights[name] + change * torch.randn(weights[name].shape) for name in moved}
    save_file(weights, folder / "open_clip_model.safetensors", {"format": "pt"})
    return folder


def test_a_siglip_is_scored_extracted_from_fitted_and_merged(run, tmp_path: Path):
    """By the name that people type, from a Hub; what is merged needs neither Hub nor cache."""
    base, tuned = (write_siglip(tmp_path / n, c) for n, c in (("base", 0.0), ("tuned", 0.01)))
    photos = write_images(tmp_path / "photos")
    name = "hf-hub:timm/ViT-B-16-SigLIP"
    with Hub() as hub:
        hub.add("timm/ViT-B-16-SigLIP", base)
        hub.add("me/tuned", tuned)
        home = {"HF_HOME": f"{tmp_path}/hf", "ATLAS_CACHE": f"{tmp_path}/cache"}
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", **home}
        scored = run("eval", name, "--data", photos, "--json", **online)
        assert scored.code == 0, scored.err
        vector = tmp_path / "one.safetensors"
        made = run("extract", name, "me/tuned", "-o", vector, **online)
        assert made.code == 0, made.err
        fitted = run(
            *("fit", photos, "--model", name, "--vectors", vector, "--epochs", "1"),
            *("--min-steps", "1", "--augment", "none", "-o", tmp_path / "run"),
            **online,
        )
        assert fitted.code == 0, fitted.err
        merged = run("merge", tmp_path / "run", "-o", tmp_path / "merged", **online)
        assert merged.code == 0, merged.err
    again = run("eval", base, tmp_path / "merged", "--data", photos, "--json")
    assert again.code == 0, again.err
    local = json.loads(again.out)["results"][0]
    assert local["top1"] == json.loads(scored.out)["results"][0]["top1"]
    weights = load_file(tmp_path / "merged" / "open_clip_model.safetensors")
    assert weights["logit_bias"].item() == -10


def test_a_tower_of_another_size_than_its_configuration_says_is_one_line(call, tmp_path: Path):
    folder = write_siglip(tmp_path / "model")
    path = folder / "open_clip_config.json"
    path.write_text(path.read_text().replace("160", "32"))
    done = call("eval", folder, "--data", write_images(tmp_path / "photos"), "-q")
    assert (done.code, len(done.error_lines)) == (1, 1), done.err
    assert "takes 160 pixels, its configuration says 32" in done.err


def test_a_siglip_of_transformers_is_one_line(call, photos: Path, tmp_path: Path):
    folder = tmp_path / "siglip"
    transformers.SiglipConfig().save_pretrained(folder)
    names = {"vision_model.encoder.layers.0.x": torch.zeros(1), "text_model.x": torch.zeros(1)}
    save_file(names, folder / "model.safetensors")
    done = call("eval", folder, "--data", photos, "-q")
    assert (done.code, len(done.error_lines)) == (1, 1), done.err
