"""The configurations of mergekit 0.1.5's own tests, for models that live_runs.py writes.

test_basic_merges, test_tokenizer, test_chat_template, test_io and test_merge_dtypes: methods,
parameters and shapes are theirs. Those of its examples and docs are in live_recipes.yaml.
"""

from __future__ import annotations

from itertools import product
from typing import Any

Recipe = dict[str, Any]
MESSAGES = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
LONG = f"{MESSAGES}{{% endfor %}}{{# {'x' * 300} #}}"
# What mergekit's own tests expect it to refuse; atlas refuses them too.
REFUSED = ("basic_della_epsilon", "token_unaligned")


def two(method: str, a: str, b: str, base: str | None = None, **parameters: Any) -> Recipe:
    """Two models of weights 0.6 and 0.4 in bfloat16."""
    weights = ((a, 0.6), (b, 0.4))
    found: Recipe = {
        "merge_method": method,
        "models": [{"model": who, "parameters": {"weight": weight}} for who, weight in weights],
        "dtype": "bfloat16",
    }
    found |= {"base_model": base} if base else {}
    return found | ({"parameters": parameters} if parameters else {})


def nuslerps(prefix: str, a: str, b: str, c: str) -> dict[str, Recipe]:
    """By rows, by columns and of whole tensors, with a base and without; weights of sum zero."""
    found = {}
    for base, rows, flat in product((None, c), (False, True), (False, True)):
        kind = "flat" if flat else "parts"
        name = (
            f"{prefix}_nuslerp_{'based' if base else 'plain'}_{'rows' if rows else 'cols'}_{kind}"
        )
        settings = {"nuslerp_row_wise": rows, "nuslerp_flatten": flat}
        found[name] = two("nuslerp", a, b, base, **settings)
    zero = two("nuslerp", a, b, c, nuslerp_row_wise=False, nuslerp_flatten=False)
    for model, weight in zip(zero["models"], (-0.5, 0.5), strict=True):
        model["parameters"] = {"weight": weight}
    return found | {f"{prefix}_nuslerp_zero": zero}


def common(prefix: str, a: str, b: str, c: str) -> dict[str, Recipe]:
    """What is tried with language models and with those of images and language."""
    return {
        f"{prefix}_linear": two("linear", a, b),
        f"{prefix}_slerp": two("slerp", a, b, a, t=0.35),
        **nuslerps(prefix, a, b, c),
        f"{prefix}_task_arithmetic": two("task_arithmetic", a, b, c),
        f"{prefix}_breadcrumbs": two("breadcrumbs", a, b, c),
        f"{prefix}_ties": two("ties", a, b, c, density=0.3),
        f"{prefix}_dare_ties": two("dare_ties", a, b, c, density=0.66),
        f"{prefix}_model_stock": two("model_stock", b, c, a),
        f"{prefix}_model_stock_filters": two("model_stock", b, c, a, filter_wise=True),
    }


def basic() -> dict[str, Recipe]:
    """test_basic_merges."""
    a, b, c, gpt2 = "./a", "./b", "./c", {"model": "./gpt2", "layer_range": [0, 4]}
    scale = [{"filter": "o_proj", "value": 0}, {"value": 1}]
    della = {"density": 0.66, "lambda": 0.5}
    copies = {"merge_method": "passthrough", "dtype": "bfloat16"}
    granite = two("slerp", "./granite0", "./granite1", "./granite0", t=0.5)
    granite["models"] = [{"model": "./granite0"}, {"model": "./granite1"}]
    return {
        "basic_granite_copy": {**copies, "models": [{"model": "./granite0"}]},
        "basic_granite_linear": two("linear", "./granite0", "./granite1"),
        "basic_granite_slerp": granite,
        "basic_gpt2_copy": {**copies, "models": [{"model": "./gpt2"}]},
        "basic_gpt2_stack": {**copies, "slices": [{"sources": [gpt2]}, {"sources": [gpt2]}]},
        "basic_scale": {
            "merge_method": "passthrough",
            "models": [{"model": a, "parameters": {"scale": scale}}],
        },
        **common("basic", a, b, c),
        "basic_sce": two("sce", a, b, c, select_topk=0.5),
        "basic_ram": two("ram", a, b, c),
        "basic_ramplus_tl": two("ramplus_tl", a, b, c, r=0.05, alpha=1.0),
        "basic_multislerp": two("multislerp", a, b, c),
        "basic_arcee_fusion": two("arcee_fusion", a, b, a),
        "basic_nearswap": two("nearswap", a, b, a, t=0.0001),
        "basic_della": two("della", a, b, c, epsilon=0.05, **della),
        "basic_della_epsilon": two("della", a, b, c, epsilon=1.35, **della),
        "basic_karcher": two("karcher", a, b, c, max_iter=5, tol=1e-5),
        **common("vlm", "./llava0", "./llava1", "./llava2"),
    }


def tokens(method: str, *models: str, **more: Any) -> Recipe:
    """Models of weight 1 in float32, the first of them the base."""
    listed = [{"model": who, "parameters": {"weight": 1.0}} for who in models]
    return {
        "merge_method": method,
        "base_model": models[0],
        "models": listed,
        "dtype": "float32",
        **more,
    }


def tokenizers() -> dict[str, Recipe]:
    """test_tokenizer."""
    three, pair, special = ("./base", "./padded", "./chat"), ("./base", "./chat"), "<|special|>"
    forced = {special: {"source": "./special", "force": True}}
    renamed = {"kind": "model_token", "model": "./special", "token": "_tok_10"}
    by_id = {"kind": "model_token", "model": "./chat", "token_id": 64}
    by_name = {"kind": "model_token", "model": "./base", "token": "<s>"}
    numbered = {
        "_tok_20": {"source": by_id, "force": True},
        "_tok_21": {"source": by_name, "force": True},
    }
    either = {
        f"_tok_{n}": {"source": who, "force": True} for n, who in ((10, "./chat"), (11, "./base"))
    }

    def configured(source: str, wanted: dict[str, Any]) -> dict[str, Any]:
        return {"source": source, "tokens": wanted}

    return {
        "token_unaligned": tokens("linear", *three),
        "token_base": tokens("linear", *three, tokenizer_source="base"),
        "token_union": tokens("linear", *three, tokenizer_source="union"),
        "token_model": tokens("linear", *three, tokenizer_source="./chat"),
        "token_arithmetic_base": tokens("task_arithmetic", *pair, tokenizer={"source": "base"}),
        "token_arithmetic_union": tokens("task_arithmetic", *pair, tokenizer={"source": "union"}),
        "token_slerp_union": tokens(
            "slerp", *pair, tokenizer_source="union", parameters={"t": 0.5}
        ),
        "token_force": tokens("linear", *pair, tokenizer=configured("union", either)),
        "token_configured_model": tokens(
            *("linear", "./special"),
            tokenizer=configured(
                "./special", {**forced, "<new>": {"source": renamed, "force": True}}
            ),
        ),
        "token_configured_base": tokens(
            "linear", "./special", tokenizer=configured("base", forced)
        ),
        "token_configured_union": tokens(
            "linear", "./special", tokenizer=configured("union", forced)
        ),
        "token_id": tokens("linear", *pair, tokenizer=configured("base", numbered)),
        "token_pad": tokens(
            "linear", "./chat", tokenizer={"source": "base", "pad_to_multiple_of": 16}
        ),
    }


def others() -> dict[str, Recipe]:
    """test_chat_template; test_io: pickles, several files, a head stored twice; dtypes."""
    half = two("linear", "./base", "./b", "./base")
    for model in half["models"]:
        model["parameters"] = {"weight": 0.5}
    mixed = {
        "merge_method": "linear",
        "models": [{"model": "./mixed"}, {"model": "./b"}],
        "parameters": {"weight": 1.0},
    }
    return {
        "template_chatml": {**half, "chat_template": "chatml"},
        "template_text": {**half, "chat_template": "{{messages[0]['content']}}"},
        "template_long": {**half, "chat_template": LONG},
        "io_pickle": two("linear", "./pickled", "./b"),
        "io_files": two("linear", "./a", "./b"),
        "io_tied": two("linear", "./tied0", "./tied1"),
        "dtypes_mixed": mixed,
        "dtypes_out": {**mixed, "dtype": "bfloat16", "out_dtype": "float32"},
    }


def of_tests() -> dict[str, Recipe]:
    """All of them by name."""
    return {**basic(), **tokenizers(), **others()}
