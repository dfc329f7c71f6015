"""Which names a pickle may mention. A name that passes is still never imported or called."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from atlas_cli.pickles.spans import FlawError

PACKAGES = ("torch.", "torchvision.", "open_clip.", "clip.", "src.", "__torch__.")

_BUILTINS = "bool complex dict float frozenset int list object range set slice str tuple"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_SCALARS = "bool_ float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
NAMES = frozenset(
    [f"builtins.{name}" for name in _BUILTINS.split()]
    + [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS.split()]
    + [f"numpy.{name}" for name in ("dtype", "ndarray", *_SCALARS.split())]
    + [
        f"numpy.{core}.multiarray.{name}"
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ]
    + ["argparse.Namespace", "collections.OrderedDict", "collections.defaultdict"]
    + ["_codecs.encode", "copyreg._reconstructor"]
)
GETATTR = "builtins.getattr"
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_LONGEST = 300
_MOST_REFUSED = 100
_SHOWN = 5


@dataclass(frozen=True)
class Global:
    """A name that a pickle mentions; a word, not the thing that it stands for."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


def printable(text: str, longest: int = 200) -> str:
    """`text` on one line, with anything that could upset a terminal escaped."""
    shown = text if len(text) <= longest else text[:longest] + "..."
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode()


@dataclass(frozen=True)
class Policy:
    """The names that are accepted, and those met in this file that are not."""

    allow: Collection[str] = ()
    refused: dict[str, None] = field(default_factory=dict)

    def admit(self, module: str, qualname: str) -> Global:
        """The name as a word, noted as refused if it is not accepted."""
        if len(module) + len(qualname) > _LONGEST:
            raise FlawError(f"mentions a name of more than {_LONGEST} letters")
        name = Global(_PYTHON_2.get(module, module), qualname)
        if not self._accepts(name):
            self.refuse(name)
        return name

    def refuse(self, name: Global) -> None:
        """Note a name that this file must not mention."""
        if str(name) not in self.allow:
            self.refused[str(name)] = None
        if len(self.refused) > _MOST_REFUSED:
            raise FlawError("mentions too many names")

    def complaint(self) -> str:
        """A clause that names what was refused and the way out, or nothing."""
        names = [printable(name) for name in self.refused]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        options = " ".join(f"--allow-global {name}" for name in names[:_SHOWN])
        them, are = ("it", "it is") if len(names) == 1 else ("them", "they are")
        return (
            f"refuses to load {', '.join(names[:_SHOWN])}{more}; if you trust the file allow "
            f"{them} by name with {options} ({are} still never called)"
        )

    def _accepts(self, name: Global) -> bool:
        if "." in name.qualname and not _in_a_class(name.qualname):
            return False
        full = str(name)
        return full in NAMES or full == GETATTR or full.startswith(PACKAGES)


def _in_a_class(qualname: str) -> bool:
    """Whether a dotted name can be that of a class inside a class, as `Outer.Inner` is."""
    return qualname[:1].isupper() and all(part.isidentifier() for part in qualname.split("."))
