"""What is asked of `extract`, and where its vectors go: checked before torch is imported."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.errors import AtlasError, UsageError, nearest, pattern_problem
from atlas_cli.sources.locate import Source, check_architecture, locate, name_of, parse_reference
from atlas_cli.sources.model_files import WEIGHT_SUFFIXES
from atlas_cli.sources.reference import Reference


@dataclass(frozen=True)
class ExtractRequest:
    """Which models, where their vectors go, and in which form they are kept."""

    base: str
    finetuned: Sequence[str]
    path: str
    scope: str = "visual"
    dtype: str = "fp32"
    rank: int | None = None
    energy: float | None = None
    scale: float = 1.0
    ignore: Sequence[str] = ()
    name: str | None = None
    allow: Sequence[str] = ()
    arch: str | None = None
    force: bool = False
    lora: float | None = None  # a rank from 1 on, or a share of the energy

    def check(self) -> None:
        """Raise UsageError for what cannot be done, whatever the models are."""
        _one_of(SCOPES, "--scope", self.scope)
        self._check_rtvq() if self.dtype == RTVQ else check_dtype(self.dtype)
        if self.lora is not None:
            self._check_lora(self.lora)
        if self.rank is not None and self.energy is not None:
            raise UsageError("--rank and --energy both set the rank; give one of them")
        if self.energy is not None and not 0 < self.energy < 1:
            share = f"--energy {self.energy}"
            raise UsageError(f"{share}: expected a share between 0 and 1, such as 0.99")
        if is_integer(self.dtype) and (self.rank or self.energy):
            said = f"--dtype {self.dtype} is for whole matrices"
            raise UsageError(f"{said}; use fp16 with --rank or --energy")
        if self.scale == 0 or not math.isfinite(self.scale):
            raise UsageError(f"--scale {self.scale}: expected a number other than 0")
        for pattern in self.ignore:
            if wrong := pattern_problem(pattern):
                raise UsageError(f"--ignore {pattern}: not a regular expression: {wrong}")
        check_architecture(self.arch)

    def _check_rtvq(self) -> None:
        if len(self.finetuned) < 2:
            raise UsageError("--dtype rtvq is for several models: it keeps their mean once")
        if self.path == "-" or self.path.endswith(".safetensors"):
            raise UsageError(f"-o {self.path}: --dtype rtvq writes several files; name a folder")

    def _check_lora(self, lora: float) -> None:
        if not (0 < lora < 1 or (lora >= 1 and lora == int(lora))):
            raise UsageError(
                f"--lora {lora:g}: expected a rank such as 16, or a share such as 0.99"
            )
        if self.rank is not None or (self.energy is not None and lora < 1):
            raise UsageError("--lora sets the rank itself; with --energy it is the largest one")
        if is_integer(self.dtype):
            said = f"--dtype {self.dtype} is for task vectors"
            raise UsageError(f"{said}; an adapter has fp32, fp16 or bf16")
        if self.path == "-" or self.path.endswith(".safetensors"):
            raise UsageError(f"-o {self.path}: an adapter is a folder; name one")
        if self.scale != 1:
            raise UsageError("--scale is for task vectors; scale an adapter when it is loaded")


SCOPES = ("visual", "text", "all")
DTYPES = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "int2")
RTVQ = "rtvq"  # of several vectors together: three bits of their mean, two of what is left


_SPELLINGS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def plain_dtype(name: str) -> str:
    """The short spelling of a dtype: fp16 for float16 or torch.float16."""
    plain = name.removeprefix("torch.")
    return _SPELLINGS.get(plain, plain)


def is_integer(dtype: str) -> bool:
    """Whether values are kept as integers with scales, rather than as floating-point numbers."""
    return dtype.startswith("int") or dtype == RTVQ


def check_dtype(name: str, option: str = "--dtype") -> None:
    """Raise UsageError unless blocks can be kept in a dtype of that name."""
    _one_of(DTYPES, option, name)


def _one_of(choices: Sequence[str], option: str, value: str) -> None:
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(f"{option} {value}: expected {listed}{nearest(value, choices)}")


@dataclass(frozen=True)
class VectorTarget:
    """A vector to write: its name, and its file unless it goes to stdout."""

    name: str
    path: Path | None

    @contextlib.contextmanager
    def folder(self) -> Iterator[None]:
        """Create the folder of the file, and remove it again if nothing is written."""
        folder = self.path.parent if self.path else Path()
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                if made:
                    folder.rmdir()
            raise


def resolve(request: ExtractRequest) -> tuple[list[VectorTarget], Source, list[Source]]:
    """The targets, the base and the fine-tuned models of a request, with every name resolved."""
    request.check()
    base = parse_reference(request.base)
    references = [parse_reference(text) for text in request.finetuned]
    targets = choose_targets(request.path, references, request.name)
    check_targets(targets, force=request.force)
    source, *finetuned = [locate(reference) for reference in (base, *references)]
    check_inputs(targets, [source, *finetuned])
    return targets, source, finetuned


def adapter_targets(request: ExtractRequest) -> list[tuple[str, Path]]:
    """The name and the folder of every adapter: the output itself, or one in it for each."""
    references = [parse_reference(text) for text in request.finetuned]
    if request.name and len(references) > 1:
        raise UsageError("--name is for one fine-tuned model")
    names = [request.name or name_of(reference) for reference in references]
    folder = Path(request.path)
    if len(names) == 1:
        return [(names[0], folder)]
    if len({_as_file(name) for name in names}) < len(names):
        raise UsageError("two adapters would be written to one folder; extract them one by one")
    return [(name, folder / _as_file(name)) for name in names]


def choose_targets(
    path: str, references: Sequence[Reference], name: str | None
) -> list[VectorTarget]:
    """One target for each model: a file, files in a folder, or stdout for -."""
    if name and len(references) > 1:
        raise UsageError("--name is for one fine-tuned model")
    names = [name or name_of(reference) for reference in references]
    if path == "-":
        if len(references) > 1:
            raise UsageError("-o - takes one fine-tuned model")
        return [VectorTarget(names[0], None)]
    if (suffix := Path(path).suffix) in WEIGHT_SUFFIXES and suffix != ".safetensors":
        raise UsageError(f"-o {path}: vectors are written as .safetensors, not as {suffix}")
    if suffix != ".safetensors":
        return [VectorTarget(n, Path(path) / f"{_as_file(n)}.safetensors") for n in names]
    if len(references) > 1:
        raise UsageError(f"{path}: is one file for {len(references)} models; give a folder")
    if not Path(path).absolute().parent.is_dir():
        raise AtlasError(f"{Path(path).parent}: no such folder")
    return [VectorTarget(names[0], Path(path))]


def check_targets(targets: Sequence[VectorTarget], *, force: bool) -> None:
    """Raise if a file would be lost, or could not be written."""
    paths = [target.path for target in targets if target.path]
    for number, path in enumerate(paths):
        folder = path.absolute().parent
        if path in paths[:number]:
            raise UsageError(f"two vectors would be written to {path}; extract them one by one")
        if path.is_dir() or (folder.exists() and not folder.is_dir()):
            kind = "folder" if path.is_dir() else "file"
            raise AtlasError(f"{path if path.is_dir() else path.parent}: is a {kind}")
        if path.exists() and not force:
            raise AtlasError(f"{path}: exists already; use --force to replace it")
        if not folder.exists() and not folder.parent.is_dir():
            raise AtlasError(f"{path.parent.parent}: no such folder")


def check_inputs(targets: Sequence[VectorTarget], sources: Sequence[Source]) -> None:
    """Raise if a target is one of the files that are read."""
    inputs = {path.resolve() for source in sources for path in source.files.values()}
    for target in targets:
        if target.path is not None and target.path.resolve() in inputs:
            raise UsageError(f"{target.path}: is one of the inputs; write to another file")


def _as_file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "vector"
