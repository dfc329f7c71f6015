"""Recipes as pydantic models, and what pydantic finds wrong with one in our own sentences.

A model declares types, checks (`Check`), defaults and meanings; its JSON Schema follows from these.
All that is wrong is reported at once, one line for each problem. Importing pydantic takes a tenth
of a second, so a command imports recipes when it reads one, not to show its help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from atlas_cli.errors import UsageError, nearest
from atlas_cli.recipes.problems import CONFLICT, FINITE, KIND, VALUE, Problems, sentences
from atlas_cli.recipes.text import parse_mapping
from atlas_cli.registry import (
    GRANULARITIES,
    MERGE_METHODS,
    OBJECTIVES,
    find_granularity,
    granularity_labels,
    granularity_pattern,
    objectives_of,
)


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
LARGEST = expect(lambda value: value <= 1e30, "expected at most 1e+30", maximum=1e30)
Rate = Annotated[float, ABOVE_0, AS_GIVEN, IS_FINITE, LARGEST]  # more overflows float32
Decay = Annotated[float, AT_LEAST_0, AS_GIVEN, IS_FINITE]
TABLE, TEXT = Tag("\0table"), Tag("\0text")  # no key of a recipe has a NUL in it
TABLE_OR_TEXT = Discriminator(
    _tag, custom_error_type=KIND, custom_error_message="keys and values or str"
)
STORAGES = (
    "int8",
    "int4",
    "int3",
    "int2",
    "fp16",
    "bf16",
    "fp32",
)  # of vectors that are extracted on the way


# Values with a unit ---------------------------------------------------------------------------

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int | None:
    """A size in bytes from text such as 2GiB, 500MB or 1000; None if the text is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.lower())
    if not found or found[2] not in _UNITS or len(found[1]) > 30:
        return None
    return int(float(found[1]) * _UNITS[found[2]])


def parse_shots(text: str | int | float) -> int | float | None:
    """Images per class, a fraction of each class, or None for all; 0 if it is none of these."""
    if text == "all":
        return None
    try:
        number = float(text)
    except (ValueError, OverflowError):
        return 0
    if 0 < number < 1:
        return number
    return int(number) if number >= 1 and number.is_integer() else 0


# Accuracies are shares between 0 and 1 while they are computed with, and percent wherever they are
# written or returned: in tables, CSV, JSON, recipes, run folders and results of the Python API.
UNIT = "percent"
_ACCURACIES = ("accuracy", "normalised", "target", "control", "agreement")


def as_percent(share: float) -> float:
    """A share in percent, without the digits that only come from binary fractions."""
    return round(100 * share, 6)


def in_percent(values: Mapping[str, float]) -> dict[str, float]:
    """Measures by name, with those that are accuracies in percent."""
    return {k: as_percent(value) if k in _ACCURACIES else value for k, value in values.items()}


def default_keys(schema: type[BaseModel]) -> dict[str, Any]:
    """What the keys of a recipe are unless they are given; without those that must be."""
    fields = schema.model_fields.items()
    return {
        key: field.get_default(call_default_factory=True)
        for key, field in fields
        if not field.is_required()
    }


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
    lambda: {
        "pattern": granularity_pattern(),
        "examples": [one.label for one in GRANULARITIES.values()],
    },
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


def method_problem(method: str) -> str | None:
    """What is wrong with the name of a merge method."""
    if method in MERGE_METHODS:
        return None
    listed = f"(there are: {', '.join(MERGE_METHODS)})"
    return f"unknown method '{method}'{nearest(method, MERGE_METHODS)} {listed}"


class Entry(BaseModel):
    """A part of a recipe: strict types, no other keys, and no changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class SparseEntry(Entry):
    """A part of a recipe that is written without the keys that have no value."""

    @model_serializer(mode="wrap")
    def _without_blanks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class EntryOrText(Entry):
    """A part of a recipe for which a text may stand: the value of one key, beside `text_means`."""

    text_is: ClassVar[str]
    text_means: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, found: Any) -> Any:
        if not isinstance(found, str | dict | cls):
            raise wrong_kind("keys and values or str")
        return {**cls.text_means, cls.text_is: found} if isinstance(found, str) else found

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        entry = handler.resolve_ref_schema(handler(schema))
        del entry["description"]
        return {"anyOf": [{"type": "string"}, entry]}


class Recipe(Entry):
    """What a command is told."""

    # Keys in the order in which problems with their values are reported; else as declared. For a
    # key that is listed twice, the second place is that of a number out of range.
    order: ClassVar[Sequence[str]] = ()

    @classmethod
    def completed(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys, and those that other keys bring with them. Values may be of any type."""
        return found

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        """What is wrong with values together: a key and a message. Values may be of any type.

        A conflict takes the place of what is wrong with the same value alone. Without a key, the
        message begins with the path of the value, such as `.models[0]: `.
        """
        return iter(())

    @model_validator(mode="wrap")
    @classmethod
    def _check_together(
        cls, found: Any, handler: ModelWrapValidatorHandler[Recipe], info: ValidationInfo
    ) -> Recipe:
        if not isinstance(found, dict):
            return handler(found)
        found = cls.completed(found)
        lines = [
            InitErrorDetails(
                type=error_of(CONFLICT, text), loc=(key,) if key else (), input=found.get(key)
            )
            for key, text in cls.conflicts(found, info.context)
        ]
        try:
            recipe = handler(found)
        except ValidationError as problem:
            lines = [*map(_again, problem.errors(include_url=False)), *lines]
        if lines:
            raise ValidationError.from_exception_data(cls.__name__, lines)
        return recipe


def _again(error: ErrorDetails) -> InitErrorDetails:
    """An error as it is given to pydantic."""
    kind, context = error["type"], error.get("ctx", {})
    own = kind in (KIND, VALUE, FINITE)
    given = error_of(kind, context.get("text") or error["msg"]) if own else kind
    return InitErrorDetails(type=given, loc=error["loc"], input=error["input"], ctx=context)


# Reading --------------------------------------------------------------------------------------

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def read_recipe(
    schema: type[AnyRecipe],
    text: str,
    where: str = "recipe",
    flags: Mapping[str, Any] | None = None,
) -> AnyRecipe:
    """Read a recipe, and lay flags over its keys.

    Raises UsageError with one line for every key that is unknown or missing and every value of the
    wrong type; if there are none, for every other problem.
    """
    found = parse_mapping(text, where)
    if lines := problems_of(schema, found, where).structure:
        raise UsageError(*lines)
    return check_recipe(schema, {**found, **(flags or {})})


def check_recipe(schema: type[AnyRecipe], found: Mapping[str, Any], prefix: str = "") -> AnyRecipe:
    """A recipe of keys. Raises UsageError with every problem; `prefix` goes before their names."""
    try:
        return schema.model_validate(dict(found))
    except ValidationError as problem:
        lines = sentences(
            problem.errors(include_url=False), schema, found, "recipe", prefix, schema.order
        )
        raise UsageError(*(lines.structure or lines.values)) from None


def problems_of(
    schema: type[Recipe], found: Mapping[Any, Any], where: str, context: Any = None
) -> Problems:
    """All that is wrong with the keys of a recipe."""
    try:
        schema.model_validate(dict(found), context=context)
    except ValidationError as problem:
        return sentences(
            problem.errors(include_url=False), schema, found, where, f"{where}.", schema.order
        )
    return Problems([], [])
