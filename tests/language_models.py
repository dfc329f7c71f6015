"""Tiny language models of many families with tokenizers, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SPECIAL = "<|special|>"  # the only one of the further tokens that is special
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ENCODER = {key: SMALL[key] for key in SMALL if key != "num_key_value_heads"}
_GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64, "vocab_size": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
# Families: the configuration's class, the model's class, and settings.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "mistral": ("MistralConfig", "MistralForCausalLM", SMALL),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SMALL),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SMALL | {"head_dim": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", SMALL | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", SMALL | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", SMALL | {"head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", SMALL),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", SMALL),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", SMALL),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", SMALL),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", SMALL),
    "cohere": ("CohereConfig", "CohereForCausalLM", SMALL | {"use_qk_norm": True}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", SMALL),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", SMALL | {"head_dim": 8}),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2),
    "falcon": ("FalconConfig", "FalconForCausalLM", _ENCODER),
    "granite": ("GraniteConfig", "GraniteForCausalLM", SMALL),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _ENCODER),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "bert": ("BertConfig", "BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _ENCODER),
    "qwen2_tied": ("Qwen2Config", "Qwen2ForCausalLM", SMALL | {"tie_word_embeddings": True}),
}

_LLAVA = {
    "text_config": {"model_type": "llama", **SMALL, "num_hidden_layers": 2},
    "vision_config": {
        **{"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 16},
        "projection_dim": 16,
    },
    "image_token_index": 63,
}
_QWEN3_VL = {
    "text_config": {
        **SMALL,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        **{"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
        **{
            "out_hidden_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    },
    **{"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62},
    "vision_end_token_id": 63,
}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2, "vocab_size": 64}
_T5 |= {"feed_forward_proj": "gated-gelu"}
_WHISPER = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"vocab_size": 64, "max_source_positions": 16, "max_target_positions": 16},
    **{"num_mel_bins": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
# Models that are not only a stack of layers of language.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", _LLAVA),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", _QWEN3_VL),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _WHISPER),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SMALL | _EXPERTS),
}


def import_transformers() -> Any:
    """transformers, which imports a torchvision that may not know this torch."""
    from atlas_cli.models.open_clip_import import import_open_clip

    import_open_clip()
    import transformers

    return transformers


def write_language_model(
    folder: Path, family: str = "llama", seed: int = 0, *, dtype: str = "float32", **more: Any
) -> Path:
    """A model with random weights; those of other seeds are small steps from seed 0."""
    transformers = import_transformers()
    config_class, model_class, settings = (FAMILIES | OTHERS)[family]
    config = getattr(transformers, config_class)(**(settings | more))
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, added: list[str] | None = None, size: int = 64) -> Path:
    """A tokenizer of words, with further tokens behind them."""
    tokens = ["<unk>", "<s>", "</s>", *(f"_tok_{number}" for number in range(3, size))]
    model = {"type": "BPE", "vocab": {t: n for n, t in enumerate(tokens)}, "merges": []}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {"id": n, "content": token, "special": n < 3 or token == SPECIAL, **flags}
        for n, token in [*enumerate(tokens[:3]), *enumerate(added or [], start=size)]
    ]
    raw = {"version": "1.0", "model": model, "added_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    settings |= {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """What transformers computes with a model for some tokens."""
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder)
    masked = any("MaskedLM" in name for name in config.architectures)
    kind = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"], told
    assert not told["mismatched_keys"], told
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0]
