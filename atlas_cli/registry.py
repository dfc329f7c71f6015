"""Names that recipes use, and what they stand for; plugins add names of their own.

There is a registry for each kind of thing: merge methods, objectives, granularities, adapters and
kinds of datasets. A registry imports the modules that fill it on the first lookup. Only if the name
is not among theirs, or if all names are wanted, are plugins loaded: a distribution announces one by
an entry point of the group `atlas.plugins`, which names a module that registers things when it is
imported, or a function that registers them when it is called.

Nothing here imports torch, and neither may a module that a registry names.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from atlas_cli.errors import AtlasError, UsageError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from atlas_cli.core.adapters import Adapter
    from atlas_cli.core.compose import Layout
    from atlas_cli.merge_methods.method import MergeMethod, PostStep

GROUP = "atlas.plugins"
Entry = TypeVar("Entry")
Function = TypeVar("Function", bound=Callable[..., Any])
AdapterKind = TypeVar("AdapterKind", bound="Adapter")
_LOCK = threading.RLock()  # reentrant: a module that is being loaded may look names up


class Registry(Mapping[str, Entry]):
    """Entries of one kind by their names: those of `modules` in that order, then of plugins."""

    def __init__(self, kind: str, *modules: str) -> None:
        self.kind = kind
        self._order = modules
        self._modules = modules  # that are still to be imported
        self._entries: dict[str, Entry] = {}
        self._origins: dict[str, str] = {}

    def add(self, name: str, entry: Entry, origin: object) -> None:
        """Register an entry. `origin` is the function or class that an error message names.

        Raises AtlasError if the name is taken or is not a word. The same origin may register
        again, as it does when a cell of a notebook is run twice.
        """
        place = _place(origin)
        if not re.fullmatch(r"[A-Za-z][\w-]*", name):
            raise AtlasError(f"{self.kind} '{name}' of {place}: expected a word for a name")
        if self._origins.get(name, place) != place:
            both = f"by {self._origins[name]} and by {place}"
            raise AtlasError(f"{self.kind} '{name}' is registered twice: {both}")
        self._entries[name], self._origins[name] = entry, place

    def find(self, name: str) -> Entry:
        """The entry of a name. Raises UsageError with the nearest name if there is none."""
        if name in self:
            return self[name]
        listed = f"(there are: {', '.join(self)})"
        raise UsageError(f"unknown {self.kind} '{name}'{nearest(name, self)} {listed}")

    def __getitem__(self, name: str) -> Entry:
        self._import_modules()
        if name not in self._entries:
            load_plugins()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._import_modules()
        load_plugins()
        return iter(sorted(self._entries, key=self._rank))

    def _rank(self, name: str) -> int:
        """The place of a name's module: whoever imported one first does not change the order."""
        module = self._origins[name].rpartition(".")[0]
        found = [n for n, one in enumerate(self._order) if f"{module}.".startswith(f"{one}.")]
        return found[0] if found else len(self._order)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _import_modules(self) -> None:
        with _LOCK:
            modules, self._modules = self._modules, ()
            for module in modules:
                import_module(module)


def _place(origin: object) -> str:
    named = origin if hasattr(origin, "__qualname__") else type(origin)
    return f"{named.__module__}.{named.__qualname__}"


# Plugins --------------------------------------------------------------------------------------

_loaded: set[tuple[str, str]] = set()


def load_plugins() -> None:
    """Load every plugin that is installed, once. Raises AtlasError if one cannot be loaded."""
    with _LOCK:
        for point in _entry_points():
            key = (point.name, point.value)
            if key not in _loaded:
                _loaded.add(key)
                try:
                    _load(point)
                except AtlasError:
                    _loaded.remove(key)
                    raise


@cache
def _entry_points() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # 20 ms, which most commands can do without

    return tuple(entry_points(group=GROUP))


def _load(point: EntryPoint) -> None:
    """Run a plugin. Whatever it raises becomes one line that says whose plugin it is."""
    try:
        found = point.load()
        if callable(found):
            found()
    except Exception as problem:
        owner = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown distribution"
        said = str(problem).strip().splitlines() or [""]
        ours = isinstance(problem, AtlasError)
        reason = said[0] if ours else f"{type(problem).__name__}: {said[0]}"
        raise AtlasError(
            f"plugin '{point.name}' ({point.value}, of {owner}) cannot be loaded: {reason}; "
            f"repair or uninstall {point.dist.name if point.dist else 'it'}"
        ) from problem


# Modules that are slow to import --------------------------------------------------------------


class _LateModule(ModuleType):
    """A module that is imported when an attribute of it is first asked for."""

    def __getattr__(self, attribute: str) -> Any:
        # Formulas of small tensors ask often enough for import_module to be noticed.
        module = self.__dict__.get("_module")
        if module is None:
            module = self.__dict__["_module"] = import_module(self.__name__)
        return getattr(module, attribute)


def late(module: str) -> Any:
    """A stand-in for a module that is slow to import, such as torch.

    A module that a registry names is imported by every command that checks a name, and `late`
    lets it mention torch in its functions all the same.
    """
    return _LateModule(module)


# Granularities, whose names may have a parameter -----------------------------------------------


@dataclass(frozen=True)
class Granularity:
    """What shares a coefficient. `layout` takes the shapes of the blocks by their names.

    With a `parameter`, such as the K of partition:K, it also takes the text that a recipe has in
    its place, which `pattern` matches, and the seed of the run.
    """

    name: str
    layout: Callable[..., Layout]
    parameter: str
    pattern: str

    @property
    def label(self) -> str:
        """The name as messages show it."""
        return f"{self.name}:{self.parameter}" if self.parameter else self.name

    @property
    def expression(self) -> str:
        """A regular expression for what a recipe may say."""
        return f"{self.name}:{self.pattern}" if self.parameter else self.name


def granularity(
    name: str, *, parameter: str = "", pattern: str = "[1-9][0-9]{0,4}"
) -> Callable[[Function], Function]:
    """Register a function as a granularity: layout(shapes), or layout(shapes, text, seed).

    The second form is for one with a `parameter`, whose text the recipe has after a colon.
    """

    def register(function: Function) -> Function:
        GRANULARITIES.add(name, Granularity(name, function, parameter, pattern), function)
        return function

    return register


def find_granularity(text: str) -> Granularity | None:
    """The granularity that a recipe names, with its parameter if it has one."""
    found = GRANULARITIES.get(text.partition(":")[0])
    return found if found and re.fullmatch(found.expression, text) else None


def granularity_labels() -> str:
    """All granularities in words: block, vector, qkv or partition:K."""
    *some, last = (one.label for one in GRANULARITIES.values())
    return f"{', '.join(some)} or {last}"


def granularity_pattern() -> str:
    """A regular expression for all granularities, as JSON Schema takes it."""
    return f"^({'|'.join(one.expression for one in GRANULARITIES.values())})$"


# The registries -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Basis:
    """A basis for coefficients; with a `parameter`, a whole number follows its name."""

    name: str
    function: Callable[..., Any]
    parameter: str

    @property
    def label(self) -> str:
        """The name as messages show it."""
        return f"{self.name}:{self.parameter}" if self.parameter else self.name

    @property
    def expression(self) -> str:
        """A regular expression for what a recipe may say."""
        return f"{self.name}:[1-9][0-9]{{0,3}}" if self.parameter else self.name


@dataclass(frozen=True)
class Registered:
    """A function, and what was said about it when it was registered."""

    function: Callable[..., Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ObjectiveEntry:
    """An objective: what computes it, which commands take it, and what it needs.

    `function` gives the loss of a batch from its logits and from what it `needs`, by name: the
    `labels`, the `prior` of the classes, or, if its logits are to be of strong views, the logits of
    the `weak` views, or the `targets` that these give and the `total` weight of a batch. If it
    needs `reliable` images, it gives the loss of every image, and only theirs count. With
    `two_gradients`, as these always have, steps are sharpness-aware.
    """

    function: Callable[..., Any]
    commands: tuple[str, ...]
    needs: tuple[str, ...]
    two_gradients: bool


MERGE_METHODS: Registry[MergeMethod] = Registry(
    "merge method",
    "atlas_cli.merge_methods.means",
    "atlas_cli.merge_methods.arithmetic",
    "atlas_cli.merge_methods.model_stock",
    "atlas_cli.merge_methods.sce",
    "atlas_cli.merge_methods.scaling",
    "atlas_cli.merge_methods.importance",
    "atlas_cli.merge_methods.spectral",
    "atlas_cli.merge_methods.learned",
)
POST_STEPS: Registry[PostStep] = Registry("post step", "atlas_cli.merge_methods.spectral")
GRANULARITIES: Registry[Granularity] = Registry("granularity", "atlas_cli.core.compose")
BASES: Registry[Basis] = Registry("basis", "atlas_cli.vectors.basis")
ADAPTERS: Registry[Adapter] = Registry("adapter", "atlas_cli.core.adapters")
NEEDS = ("labels", "prior", "weak", "targets", "reliable")
OBJECTIVES: Registry[ObjectiveEntry] = Registry("objective", "atlas_cli.core.losses")
DATASET_KINDS: Registry[Registered] = Registry(
    "kind of dataset",
    "atlas_cli.datasets.folders",
    "atlas_cli.datasets.builtin",
    "atlas_cli.datasets.from_torchvision",
    "atlas_cli.datasets.from_hub",
    "atlas_cli.datasets.from_tars",
)


def basis(name: str, *, parameter: str = "") -> Callable[[Function], Function]:
    """Register a function as a basis: directions(vectors, parameter, seed) -> blocks of vectors."""

    def register(function: Function) -> Function:
        BASES.add(name, Basis(name, function, parameter), function)
        return function

    return register


def find_basis(text: str) -> Basis:
    """The basis that a recipe names. Raises UsageError with the names that there are."""
    found = BASES.get(text.partition(":")[0])
    if found is None or not re.fullmatch(found.expression, text):
        listed = " or ".join(one.label for one in BASES.values())
        raise UsageError(f"basis: expected {listed}, found {text!r}")
    return found


def adapter(name: str) -> Callable[[type[AdapterKind]], type[AdapterKind]]:
    """Register a subclass of `core.adapters.Adapter` as a kind of head that `fit` learns."""

    def register(kind: type[AdapterKind]) -> type[AdapterKind]:
        ADAPTERS.add(name, kind(), kind)
        return kind

    return register


def objective(
    name: str,
    *,
    commands: tuple[str, ...] = ("tta",),
    needs: tuple[str, ...] = (),
    two_gradients: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as an objective of some commands: `tta`, `add`, `negate`.

    Raises AtlasError if it needs something that there is not.
    """
    for need in needs:
        if need not in NEEDS:
            hint = nearest(need, NEEDS)
            raise AtlasError(f"objective '{name}' needs '{need}', which there is not{hint}")

    def register(function: Function) -> Function:
        entry = ObjectiveEntry(function, commands, needs, two_gradients or "reliable" in needs)
        OBJECTIVES.add(name, entry, function)
        return function

    return register


def objectives_of(command: str) -> list[str]:
    """The names of the objectives that a command takes, plugins' own among them."""
    return [name for name, entry in OBJECTIVES.items() if command in entry.commands]


def find_objective(name: str, command: str) -> ObjectiveEntry:
    """The objective of a name. Raises UsageError with the nearest name if a command has none."""
    entry = OBJECTIVES.get(name)
    if entry is None or command not in entry.commands:
        names = objectives_of(command)
        listed = f"(there are: {', '.join(names)})"
        raise UsageError(f"unknown objective '{name}' of {command}{nearest(name, names)} {listed}")
    return entry


def dataset_kind(
    name: str,
    *,
    splits: Collection[str] | Callable[[str], Collection[str]] = (),
    expand: Callable[[str], list[str]] | None = None,
    chooses_split: bool = False,
    streams: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as a kind of dataset: of NAME:ADDRESS in recipes and on command lines.

    The function takes an address and a split, or None without splits, and gives a `Dataset`.
    `splits` are the splits that there are, or a function of the address that names them. `expand`
    checks an address and gives the references that it stands for. With `chooses_split`, the
    function is given the split that was asked for, if any, and the preferred ones, and chooses.
    If it also `streams`, it is given `shots` and `seed` as well, and gives at least so many images
    of every class without reading more than it needs.
    """
    facts = {"splits": splits, "expand": expand, "chooses_split": chooses_split, "streams": streams}
    return _decorator(DATASET_KINDS, name, facts)


def _decorator(
    registry: Registry[Registered], name: str, facts: Mapping[str, Any]
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        registry.add(name, Registered(function, facts), function)
        return function

    return register
