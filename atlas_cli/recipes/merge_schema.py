"""The keys of a merge recipe explained, and the same as a JSON Schema for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas_cli.recipes.merge_checks import DTYPES
from atlas_cli.recipes.merge_parameters import METHODS

if TYPE_CHECKING:
    from atlas_cli.merge_methods.method import Parameter

_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE = {"type": "integer", "minimum": 0}
_SCALAR = {"type": ["number", "boolean", "string"]}
_GRADIENT = {"type": "array", "items": {"type": ["number", "string"]}, "minItems": 2}
_VALUE = {"anyOf": [_SCALAR, _GRADIENT]}
_CONDITION = {
    "type": "object",
    "properties": {"filter": {"type": ["string", "null"]}, "value": _VALUE},
    "required": ["value"],
    "additionalProperties": False,
}
_SETTING = {"anyOf": [*_VALUE["anyOf"], _CONDITION, {"type": "array", "items": _CONDITION}]}
_PARAMETERS = {"$ref": "#/$defs/parameters"}


def _entry(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_MODEL = _entry(["model"], model=_TEXT, parameters=_PARAMETERS)
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_LAYERS = _entry(["model", "layer_range"], model=_TEXT, layer_range=_RANGE, parameters=_PARAMETERS)
_SLICE = _entry(
    ["sources"],
    sources={"type": "array", "items": _LAYERS},
    base_model=_TEXT,
    parameters=_PARAMETERS,
)
_VECTOR = {"anyOf": [_TEXT, _entry(["file"], file=_TEXT, name=_TEXT, sha256=_TEXT)]}
_TABLE = {"type": "object", "additionalProperties": {"type": "number"}}
_LOCK = _entry(["sha256"], sha256={"type": "object", "additionalProperties": _TEXT}, commit=_TEXT)

# key -> (type in words, schema, meaning)
KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "merge_method": ("text", {"enum": [*METHODS]}, "How models are merged; see the table below."),
    "base_model": (
        "text",
        _TEXT,
        "The model that the others were fine-tuned from. Its files go with the result.",
    ),
    "models": (
        "list",
        {"type": "array", "items": _MODEL},
        "Models to merge: `model`, a reference (`@REVISION`, `+ADAPTER`), and its `parameters`.",
    ),
    "slices": (
        "list",
        {"type": "array", "items": _SLICE, "minItems": 1, "maxItems": 1},
        "The same as mergekit writes it: one slice, of all layers of every model.",
    ),
    "parameters": (
        "table",
        _PARAMETERS,
        "Parameters of the merge, and of models that do not set their own.",
    ),
    "dtype": ("text", {"enum": [*DTYPES]}, "Compute in this dtype; else in that of the tensors."),
    "out_dtype": ("text", {"enum": [*DTYPES]}, "Write in this dtype; else in that of computing."),
    "tokenizer_source": ("text", {"const": "base"}, "`base`: the tokenizer is copied from it."),
    "vectors": (
        "list",
        {"type": "array", "items": _VECTOR, "minItems": 1},
        "For `atlas`: task vectors, as paths or with `name`, `file` and `sha256`.",
    ),
    "coefficients": (
        "table or text",
        {"anyOf": [{"type": "object", "additionalProperties": _TABLE}, _TEXT]},
        "For `atlas`: vector, then block, then number; or a .json or .safetensors file.",
    ),
    "granularity": (
        "text",
        {"type": "string", "pattern": "^(block|vector|qkv|partition:[1-9][0-9]{0,4})$"},
        "For `atlas`: what shares a coefficient: `block`, `vector`, `qkv` or `partition:K`.",
    ),
    "groups": (
        "list of text",
        {"type": "array", "items": _TEXT},
        "For `atlas`: regular expressions; blocks matched by the same one share a coefficient.",
    ),
    "linearised": (
        "true or false",
        {"type": "boolean"},
        "For `atlas`: true is refused, since no merged weights compute a first-order expansion.",
    ),
    "scope": (
        "text",
        {"enum": ["visual", "text", "all"]},
        "For `atlas`: the part of the model that the vectors are of.",
    ),
    "seed": ("whole number", _WHOLE, "Decides everything that is random; 0 if it is not given."),
    "locked": (
        "table",
        {"type": "object", "additionalProperties": _LOCK},
        "Written by `merge`: the commit and the sha256 of every input, which must still hold.",
    ),
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a merge recipe."""
    properties = {
        key: {**schema, "description": meaning} for key, (_, schema, meaning) in KEYS.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of atlas merge",
        **_entry(["merge_method"], **properties),
        "$defs": {"parameters": _parameters()},
    }


def _parameters() -> dict[str, Any]:
    """Every parameter of every method, with the methods that have it."""
    users: dict[str, list[str]] = {}
    for method, row in METHODS.items():
        for name in (*row.per_model, *row.per_merge):
            users.setdefault(name, []).append(method)
    known = {
        name: {**_SETTING, "description": f"Of {', '.join(of)}."} for name, of in users.items()
    }
    return {"type": "object", "properties": known, "additionalProperties": False}


def default_text(parameter: Parameter) -> str:
    """A default as a table shows it."""
    if parameter.default is None:
        return "required"
    return (
        str(parameter.default).lower()
        if isinstance(parameter.default, bool)
        else f"{parameter.default}"
    )
