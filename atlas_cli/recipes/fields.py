"""Parts of which recipes are made: checks beyond types, numbers, and keys that several have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from atlas_cli.errors import nearest
from atlas_cli.recipes.text import parse_shots
from atlas_cli.registry import (
    OBJECTIVES,
    find_granularity,
    granularity_labels,
    granularity_pattern,
    objectives_of,
)

# Kinds of errors beside pydantic's own: of the type, of the value, and of a number that is inf.
KIND, VALUE, FINITE = "kind", "value", "finite"


@dataclass(frozen=True, eq=False)
class Check:
    """A check beyond the type, for `Annotated`: gives what is wrong with a value, or None.

    `schema` says the same in JSON Schema, as far as that is possible; it is called when a schema is
    asked for, since plugins may add names.
    """

    problem: Callable[[Any], str | None] = lambda value: None
    schema: Callable[[], Mapping[str, Any]] = dict
    kind: str = VALUE

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), **self.schema()}

    def _checked(self, value: Any) -> Any:
        if text := self.problem(value):
            raise error_of(self.kind, text)
        return value


def expect(holds: Callable[[Any], bool], expected: str, **schema: Any) -> Check:
    """A check whose message is what is expected, and the value that was found."""
    return Check(
        lambda value: None if holds(value) else f"{expected}, found {value!r}", lambda: schema
    )


def one_of(*words: str, last: str = " or ") -> Check:
    """A check for one of some words, which the message lists. `last` goes before the last."""
    listed = f"{', '.join(words[:-1])}{last}{words[-1]}"
    return expect(lambda value: value in words, f"expected {listed}", enum=[*words])


def in_schema(**schema: Any) -> Check:
    """No check, but a part of the JSON Schema: what depends on other keys is checked elsewhere."""
    return Check(schema=lambda: schema)


def about(meaning: str) -> FieldInfo:
    """What a key means, for the JSON Schema and recipes/README.md."""
    return Field(description=meaning)  # type: ignore[no-any-return]


def wrong_kind(expected: str) -> PydanticCustomError:
    """The error for a value of the wrong type where several types are right."""
    return error_of(KIND, expected)


def error_of(kind: str, text: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{text}", {"text": text})


class _AsGiven:
    """A number stays as it is written: 1 is not 1.0, in messages, in YAML and in config.json."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, check: (check(value), value)[1],
            handler(source),
            serialization=core_schema.simple_ser_schema("any"),
        )


def _check_scalar(value: Any) -> Any:
    if type(value) not in (str, int, float):
        raise wrong_kind("str or int or float")
    return value


def _tag(value: Any) -> str:
    return TABLE.tag if isinstance(value, dict) else TEXT.tag if isinstance(value, str) else ""


AS_GIVEN = _AsGiven()
Number = Annotated[float, AS_GIVEN]
Scalar = Annotated[str | int | float, BeforeValidator(_check_scalar)]
ABOVE_0, AT_LEAST_0 = Field(gt=0), Field(ge=0)
IS_FINITE = Check(
    lambda value: "expected a finite number, found inf" if value == math.inf else None, kind=FINITE
)
Positive = Annotated[int, ABOVE_0]
Seed = Annotated[int, AT_LEAST_0]
Rate = Annotated[float, ABOVE_0, AS_GIVEN, IS_FINITE]
Decay = Annotated[float, AT_LEAST_0, AS_GIVEN, IS_FINITE]
TABLE, TEXT = Tag("\0table"), Tag("\0text")  # no key of a recipe has a NUL in it
TABLE_OR_TEXT = Discriminator(
    _tag, custom_error_type=KIND, custom_error_message="keys and values or str"
)


# Keys that several recipes have ---------------------------------------------------------------

Templates = Annotated[
    list[str], about("Prompts with `{}` for the class name, instead of the data's own.")
]
Architecture = Annotated[
    str | None, about("open_clip architecture of weight files that come without a configuration.")
]
TextModel = Annotated[
    str | None, about("Model whose text tower goes with models that have an image tower only.")
]
RandomSeed = Annotated[Seed, about("Decides everything that is random; 0 if it is not given.")]
GRANULARITY = Check(
    lambda text: (
        None if find_granularity(text) else f"expected {granularity_labels()}, found {text!r}"
    ),
    lambda: {"pattern": granularity_pattern()},
)
ModelName = Annotated[str, about("The base model.")]
Shots = Annotated[
    Scalar,
    expect(lambda value: parse_shots(value) != 0, "expected a number of images, a fraction or all"),
    about("Images per class, a fraction of every class, or `all`."),
]
Schedule = Annotated[
    str,
    one_of("cosine", "constant"),
    about("`cosine`, where the rate falls to zero, or `constant`."),
]
WeightDecay = Annotated[Decay, about("AdamW's weight decay; 0.1.")]
Accumulate = Annotated[Positive, about("Parts that a batch is computed in, to save memory; 1.")]
Clip = Annotated[float, ABOVE_0, AS_GIVEN, about("Largest norm of a gradient; 1.")]


def objective_of(command: str) -> Check:
    """A check for the name of an objective that a command takes."""

    def problem(word: str) -> str | None:
        entry = OBJECTIVES.get(word)
        if entry and command in entry.commands:
            return None
        names = objectives_of(command)
        listed = " or ".join(names) if len(names) == 2 else ", ".join(names)
        return f"expected {listed}, found {word!r}{nearest(word, names)}"

    return Check(problem, lambda: {"enum": objectives_of(command)})
