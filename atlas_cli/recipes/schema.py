"""JSON Schemas of recipes, for editors: from their models, and from the table of merge methods."""

from __future__ import annotations

from typing import Any

from atlas_cli.recipes.merge import MergeRecipe
from atlas_cli.recipes.model import Recipe
from atlas_cli.registry import MERGE_METHODS

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_KEYS = (
    *("type", "enum", "const", "anyOf", "items", "minItems", "maxItems", "minimum"),
    *("exclusiveMinimum", "maximum", "pattern", "properties", "required"),
    *("additionalProperties", "description", "default", "examples"),
)

# A parameter of a method: a scalar, a gradient over the layers, or values by name of tensor.
_SCALAR = {"type": ["number", "boolean", "string"]}
_GRADIENT = {"type": "array", "items": {"type": ["number", "string"]}, "minItems": 2}
_CONDITION = {
    "type": "object",
    "properties": {
        "filter": {"type": ["string", "null"]},
        "value": {"anyOf": [_SCALAR, _GRADIENT]},
    },
    "required": ["value"],
    "additionalProperties": False,
}
_SETTING = {"anyOf": [_SCALAR, _GRADIENT, _CONDITION, {"type": "array", "items": _CONDITION}]}
_PARAMETERS = {"$ref": "#/$defs/parameters"}


def json_schema(schema: type[Recipe]) -> dict[str, Any]:
    """The JSON Schema of a recipe."""
    found = schema.model_json_schema()
    command = schema.__name__.removesuffix("Recipe").lower()
    body = _tidy(found, found.get("$defs", {}))
    del body["description"]
    return {"$schema": _DRAFT, "title": f"A recipe of atlas {command}", **body}


def merge_schema() -> dict[str, Any]:
    """The JSON Schema of a merge recipe, with the methods and their parameters."""
    found = json_schema(MergeRecipe)
    for value in found["properties"].values():
        value.pop("default", None)
    return {**found, "$defs": {"parameters": _parameters()}}


def _tidy(node: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """What pydantic writes, with entries in place, and without titles and null."""
    if "$ref" in node:
        entry = {**entries[node["$ref"].rpartition("/")[2]], "description": None}
        return _tidy({**entry, **{k: v for k, v in node.items() if k != "$ref"}}, entries)
    choices = [c for c in node.get("anyOf") or node.get("oneOf") or [] if c != {"type": "null"}]
    if len(choices) == 1:
        return _tidy({**choices[0], **{k: v for k, v in node.items() if k != "anyOf"}}, entries)
    if choices:
        node = {**node, "anyOf": [_tidy(choice, entries) for choice in choices]}
    tidy = {key: node[key] for key in _KEYS if node.get(key) is not None}
    if "enum" in tidy or "const" in tidy:  # which say it all
        tidy = {key: value for key, value in tidy.items() if key not in ("type", "anyOf")}
    if "properties" in tidy:
        tidy["properties"] = {k: _tidy(v, entries) for k, v in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(tidy.get(key), dict):
            tidy[key] = _tidy(tidy[key], entries)
    if tidy.get("additionalProperties") is True:
        del tidy["type"], tidy["additionalProperties"]
        return {**_PARAMETERS, **tidy}
    return tidy


def _parameters() -> dict[str, Any]:
    """Every parameter of every method, with the methods that have it."""
    users: dict[str, list[str]] = {}
    for method, row in MERGE_METHODS.items():
        for name in (*row.per_model, *row.per_merge):
            users.setdefault(name, []).append(method)
    known = {
        name: {**_SETTING, "description": f"Of {', '.join(of)}."} for name, of in users.items()
    }
    return {"type": "object", "properties": known, "additionalProperties": False}


# Tables of recipes/README.md ------------------------------------------------------------------

_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "table",
    "array": "list",
}


def key_table(schema: type[Recipe]) -> dict[str, tuple[str, str]]:
    """The type of every key in words, and what it means."""
    found = json_schema(schema)["properties"]
    return {key: (_type_in_words(value), value["description"]) for key, value in found.items()}


def _type_in_words(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return "table"
    if "anyOf" in value:
        words = [_type_in_words(choice) for choice in value["anyOf"]]
        return " or ".join(dict.fromkeys(w.removeprefix("whole ") for w in words))
    if value.get("items") == {"type": "string"}:
        return "list of text"
    return _WORDS[value.get("type", "string")]
