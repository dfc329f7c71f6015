"""Recipes of learning and scoring that are wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lines import as_yaml
from running import Case, case, words

LEARNING = (
    *words("model vectors shots split templates method select granularity groups epochs lr"),
    *words("schedule weight_decay batch_size accumulate min_steps clip penalty augment"),
    *words("linearised memory arch text seed data"),
)
KEYS: dict[str, Sequence[str]] = {
    "eval": words("models data split templates shots arch text seed"),
    "fit": (*LEARNING, "allow_target"),
    "negate": (*LEARNING, "control", "keep", "forget"),
    "add": (*LEARNING, "objective", "init", "clamp", "ties", "individual"),
    "tta": (
        *LEARNING,
        *words("classes objective tune trusted_per_class power threshold prior"),
    ),
    "finetune": (
        *words("data model shots split templates tune lora linearised select epochs steps lr"),
        *words("schedule warmup weight_decay batch_size accumulate checkpoint_activations"),
        *words("clip augment arch text seed"),
    ),
    "merge": (
        *words("merge_method base_model models slices parameters dtype out_dtype"),
        *words("tokenizer_source vectors coefficients granularity groups linearised scope"),
        *words("seed locked"),
    ),
}
KINDS: dict[str, Any] = {
    "text": "x",
    "a number": 7,
    "a fraction": 1.5,
    "true": True,
    "null": None,
    "a list of numbers": [1],
    "a list of text": ["x"],
    "a list of nothing": [None],
    "an empty list": [],
    "a list of lists": [["x"]],
    "a table": {"a": 1},
    "a list of tables": [{"a": 1}],
    "an empty table": {},
    "a table of tables": {"a": {"b": 1}},
    "less than zero": -1,
    "zero": 0,
    "infinite": math.inf,
    "not a number": math.nan,
}
GOOD: dict[str, dict[str, Any]] = {
    "eval": {"models": ["builtin:tiny"], "data": ["builtin:digits"], "shots": 1},
    "fit": {"data": "in/shots", "model": "builtin:tiny", "vectors": ["vectors"]},
    "negate": {
        "data": ["in/shots"],
        "control": "in/control",
        "model": "builtin:tiny",
        "vectors": ["vectors"],
    },
    "add": {"data": ["in/shots"], "model": "builtin:tiny", "vectors": ["vectors"]},
    "tta": {"data": "in/shots", "model": "builtin:tiny", "vectors": ["vectors"]},
    "finetune": {"data": ["in/pets"], "model": "builtin:tiny"},
    "merge": {"merge_method": "linear", "models": [{"model": "./in/m1"}]},
}
TEXTS = {
    "nothing": "",
    "a comment": "# nothing\n",
    "a list": "- a\n",
    "text": "models",
    "a number": "3",
    "open": "models: [a\n",
    "twice": "model: a\nmodel: b\ndata: c\n",
    "twice deeper": "data: [a]\nmodel: {a: 1, a: 2}\n",
    "an object": "model: !!python/object/apply:os.getcwd []\n",
    "a strange tag": "model: !thing a\n",
    "a list as key": "? [a]\n: b\n",
    "a null byte": "model: \x00\n",
    "a tab": "model:\n\t- a\n",
    "a bad alias": "model: *nowhere\n",
    "an indent": "model: a\n  data: b\n",
    "two documents": "model: a\n---\nmodel: b\n",
    "number keys": "3: a\ntrue: b\nnull: c\n1.5: d\n2024-01-01: e\n",
    "misspelt keys": "modle: a\ndat: b\nvector: c\nsed: 1\nepoch: 3\nmerge_methd: x\n",
    "merged keys": "a: &a {model: x}\nb:\n  <<: *a\n",
    "a date": "seed: 2024-01-01\nmodel: 2024-01-01 10:00:00\ndata: 0x1F\n",
    "odd numbers": "lr: 1e-3\nseed: 1_000\nepochs: 0o17\nclip: .inf\nshots: 1:30\nsplit: on\n",
    "deep nesting": "model: " + "[" * 3000,
}
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)


def wrong_types() -> Iterator[Case]:
    """Every key of every recipe with a value of every kind, and texts that are no recipe."""
    for command, keys in KEYS.items():
        more = " -o out/x" if command in ("merge", "finetune") else ""
        for kind, value in KINDS.items():
            text = json.dumps(dict.fromkeys(keys, value))
            text = text.replace("NaN", ".nan").replace("Infinity", ".inf")
            yield case(f"recipe {command} of {kind}", f"{command} -{more}", stdin=text)
        for name, text in {**TEXTS, "a bomb": BOMB}.items():
            yield case(f"recipe {command} is {name}", f"{command} -{more}", stdin=text)
        yield case(f"recipe {command} is unknown", f"{command} -", stdin="unknown: 1\n")
    Path("bad/recipe.yaml").write_text("modls: [x]\ndata: builtin:digits\nseed: many\n")
    for command in KEYS:
        more = " -o out/x" if command in ("merge", "finetune") else ""
        yield case(f"recipe {command} by name", f"{command} bad/recipe.yaml{more}")


WRONG: dict[str, Any] = {
    "vectors": [],
    "shots": "many",
    "method": "guess",
    "select": "best",
    "granularity": "layer",
    "schedule": "steps",
    "augment": "mirror",
    "groups": ["("],
    "penalty": "l3:1",
    "memory": "lots",
    "epochs": 0,
    "batch_size": -1,
    "accumulate": 0,
    "min_steps": 0,
    "lr": 0.0,
    "clip": -1.0,
    "weight_decay": -0.1,
    "seed": -1,
    "split": "tset",
    "templates": ["x"],
    "arch": "ViT-B-33",
    "text": "./missing",
    "model": "builtin:tny",
}
OWN_WRONG: dict[str, dict[str, Any]] = {
    "eval": {
        "models": ["builtin:tny"],
        "data": ["nowhere"],
        "split": "tset",
        "templates": ["x"],
        "shots": 0,
        "arch": "ViT-B-33",
        "text": "./missing",
        "seed": -1,
    },
    "fit": {**WRONG, "data": "nowhere"},
    "negate": {**WRONG, "data": [], "control": "nowhere", "keep": 0.0, "forget": "all"},
    "add": {
        **WRONG,
        "data": [],
        "objective": "loss",
        "init": 1e999,
        "clamp": "1:0",
        "ties": 2.0,
        "individual": ["a"],
    },
    "tta": {
        **WRONG,
        "data": "nowhere",
        "classes": ["a", "a"],
        "objective": "tent",
        "tune": "head",
        "trusted_per_class": 0,
        "power": 0,
        "threshold": "2",
        "prior": "cats",
    },
    "finetune": {
        **{key: value for key, value in WRONG.items() if key in KEYS["finetune"]},
        "data": [],
        "select": "val",
        "tune": "head",
        "lora": 0,
        "steps": 0,
        "warmup": -1,
    },
}


def wrong_values() -> Iterator[Case]:
    """Values of the right type that make no sense: one by one, and all at once."""
    for command, wrong in OWN_WRONG.items():
        good, more = GOOD[command], " -o out/x" if command == "finetune" else ""
        for key, value in {**wrong, "surprise": 1}.items():
            text = as_yaml({**good, key: value})
            yield case(f"recipe {command} with {key}", f"{command} -{more}", stdin=text)
        for key in good:
            text = as_yaml({name: value for name, value in good.items() if name != key})
            yield case(f"recipe {command} without {key}", f"{command} -{more}", stdin=text)
        text = as_yaml({**good, **wrong})
        yield case(f"recipe {command} all wrong", f"{command} -{more}", stdin=text)
    text = as_yaml({**GOOD["fit"], "epochs": 0, "select": "x"})
    yield case("recipe fit beside flags", "fit - --shots 0 --memory x", stdin=text)
    text = as_yaml({**GOOD["eval"], "split": 3})
    yield case("recipe eval beside flags", "eval - --split val", stdin=text)
