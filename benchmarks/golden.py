"""Everything the command line does, written down, to see what a change of the code changes.

    python benchmarks/golden.py make before.json
    python benchmarks/golden.py make after.json
    python benchmarks/golden.py compare before.json after.json --allowed allowed.yaml

`make` runs hundreds of command lines of the atlas that Python finds (PYTHONPATH decides) in a fresh
folder: every recipe, every command, and many mistakes. Of each it keeps the exit code, what was
printed, and a digest of every file that was written. Each command line is a fork of one process
that has imported what is slow to import; those that show how a process starts are processes of
their own. Inputs are made here by the standard library alone, so they do not depend on the code
under test. What differs from run to run is taken out: the folder, the version, the memory in use.

`compare` prints every difference and exits with 1 if there is one that is not allowed. A file of
allowed differences, in JSON or YAML, gives a reason for each pattern of CASE/FIELD, as in
`{"help*/stdout": "options are sorted"}`.
"""

from __future__ import annotations

import argparse
import array
import difflib
import fcntl
import fnmatch
import gc
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import pickle
import pkgutil
import platform
import pty
import random
import re
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
MAINS = ("atlas_cli.cli.app", "atlas_cli.commands.app")  # where `main` may be
LIMIT = 600  # seconds for one command line
MANY = 100  # files of one case, which are told together
SLOWEST = 5  # cases that are told
LONGEST = 20_000  # letters of stdout that are kept as they are
COMMANDS = (
    *("demo", "eval", "draw", "finetune", "extract", "fit", "negate", "add", "tta"),
    *("inspect", "merge", "report"),
)
WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
Main = Callable[[Sequence[str]], int]
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """A command line. `sink` is what stands behind stdout: a file, a terminal, closed or full."""

    name: str
    words: tuple[str, ...]
    stdin: str | bytes | Path = b""
    sink: str = "file"
    process: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def case(name: str, line: str, **more: Any) -> Case:
    """A case from a line as one types it."""
    return Case(name.replace("/", "|"), tuple(shlex.split(line)), **more)


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


# Running --------------------------------------------------------------------------------------


def find_main() -> Main:
    """The function that runs a command line."""
    for name in MAINS:
        try:
            main: Main = importlib.import_module(name).main
        except ModuleNotFoundError as problem:
            if not problem.name or not name.startswith(problem.name):
                raise
        else:
            return main
    raise SystemExit(f"no module of atlas has main: {', '.join(MAINS)}")


def warm_up() -> None:
    """Import all of atlas and what it imports late, so that a fork has it already."""
    package = importlib.import_module("atlas_cli")
    for found in pkgutil.walk_packages(package.__path__, "atlas_cli."):
        if not found.name.endswith(("__main__", "_kernels")):
            importlib.import_module(found.name)
    for module in list(sys.modules.values()):
        importer = getattr(module, "import_open_clip", None)
        if callable(importer):
            importer()
            break
    for name in ("open_clip", "PIL.Image", "safetensors.torch", "rich.console"):
        importlib.import_module(name)


@dataclass(frozen=True)
class Outcome:
    """What came of a case, and the seconds of a core that it took."""

    code: int
    out: bytes
    err: bytes
    seconds: float


def run(one: Case, main: Main, folder: Path) -> Outcome:
    """Run a case. `folder` is for files in between."""
    (folder / "in").write_bytes(_stdin_of(one))
    sink, reader = _open_sink(one.sink, folder / "out")
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _become(one, main, sink, folder)
    os.close(sink)
    shown = _read_terminal(reader) if one.sink == "terminal" else b""
    _, status, used = os.wait4(child, 0)
    if reader is not None:
        os.close(reader)
    if one.sink == "file":
        shown = (folder / "out").read_bytes()
    code, err = os.waitstatus_to_exitcode(status), (folder / "err").read_bytes()
    return Outcome(code, shown, err, used.ru_utime + used.ru_stime)


def _stdin_of(one: Case) -> bytes:
    if isinstance(one.stdin, Path):
        return one.stdin.read_bytes() if one.stdin.exists() else b""
    return one.stdin.encode() if isinstance(one.stdin, str) else one.stdin


def _open_sink(kind: str, path: Path) -> tuple[int, int | None]:
    """What is written to, and what the terminal's other end is."""
    if kind == "terminal":
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        return writer, reader
    if kind == "closed":
        reader, writer = os.pipe()
        os.close(reader)
        return writer, None
    name = "/dev/full" if kind == "full" else path
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), None


def _read_terminal(reader: int | None) -> bytes:
    assert reader is not None
    shown = b""
    try:
        while piece := os.read(reader, 1 << 16):
            shown += piece
    except OSError:  # how the end of a terminal is told
        pass
    return shown


def _become(one: Case, main: Main, sink: int, folder: Path) -> NoReturn:
    """What a child does: it is the command line, and nothing else any more."""
    code = 99  # no exit code of atlas
    try:
        opened = os.open(folder / "in", os.O_RDONLY), sink
        said = os.open(folder / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, descriptor in enumerate((*opened, said)):
            os.dup2(descriptor, number)
        signal.alarm(LIMIT)
        os.environ.update(one.environment)
        if one.process:
            command = [sys.executable, "-m", "atlas_cli", *one.words]
            os.execv(sys.executable, command)
        code = main(list(one.words))
        sys.stdout.flush()
    except BaseException as problem:  # the way to it is not what is compared
        print("Traceback:", *traceback.format_exception_only(problem), file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


# What differs from run to run -----------------------------------------------------------------


@dataclass
class Plain:
    """Text and files without what differs from run to run.

    A digest that is printed may be that of a file with the version in it; it is shown as the
    digest of that file without.
    """

    folder: Path
    versions: Mapping[str, str]
    known: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        package = importlib.util.find_spec("atlas_cli")
        assert package is not None
        assert package.origin is not None
        self._paths = {str(self.folder): "TMP", str(Path(package.origin).parent): "PACKAGE"}
        between = r"(?:\W|&quot;|t[dh]\b|data-value)"
        self._rules = [
            (re.compile(rf"(\b{name}\b{between}{{1,40}}){re.escape(text)}(?![\w.])"), r"\1VERSION")
            for name, text in self.versions.items()
        ]
        self._rules += [
            (re.compile(r'("(?:seconds|peak_memory)": )[\d.]+'), r"\g<1>0"),
            (re.compile(r"needs [\d,]+ MB of memory at once; use --memory \d+MB"), "needs memory"),
            (re.compile(r"/atlas-\w{8}\b"), "/atlas-XXXXXXXX"),  # a temporary folder
            (re.compile(r"^(memory   )[\d.,]+( MB at most)", re.MULTILINE), r"\g<1>0\2"),
        ]

    def text(self, found: str) -> str:
        """A text without paths, versions, sizes of memory."""
        for path, word in self._paths.items():
            found = found.replace(path, word)
        for rule, instead in self._rules:
            found = rule.sub(instead, found)
        return re.sub(r"\b(?:[0-9a-f]{64}|[0-9a-f]{12})\b", self._known, found)

    def _known(self, found: re.Match[str]) -> str:
        return self.known.get(found[0], found[0])

    def digest(self, content: bytes, instead: bytes | None = None) -> str:
        """The sha256 of what is left of a file: weights, text, or anything else."""
        left = instead or self._left(content)
        plain = hashlib.sha256(left).hexdigest()
        raw = hashlib.sha256(content).hexdigest()
        self.known |= {raw: plain, raw[:12]: plain[:12]}
        return plain

    def _left(self, content: bytes) -> bytes:
        if header := _safetensors_header(content):
            start = 8 + struct.unpack("<Q", content[:8])[0]
            return self.text(json.dumps(header)).encode() + content[start:]
        try:
            return self.text(content.decode()).encode()
        except UnicodeDecodeError:
            return content


def _safetensors_header(content: bytes) -> dict[str, Any] | None:
    length = struct.unpack("<Q", content[:8])[0] if len(content) > 8 else 0
    if not 0 < length <= len(content) - 8:
        return None
    try:
        found = json.loads(content[8 : 8 + length])
    except ValueError:
        return None
    if isinstance(found.get("__metadata__"), dict):  # safetensors has no order for these
        found["__metadata__"] = dict(sorted(found["__metadata__"].items()))
    return found  # type: ignore[no-any-return]


def stamps(folder: Path) -> dict[str, Stamp]:
    """Every file below a folder, and what tells whether it was changed."""
    found: dict[str, Stamp] = {}
    waiting = [(str(folder), "")]
    while waiting:
        place, prefix = waiting.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{prefix}{entry.name}/"))
                    continue
                status = entry.stat(follow_symlinks=False)
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                found[f"{prefix}{entry.name}"] = stamp
    return dict(sorted(found.items()))


# Making ---------------------------------------------------------------------------------------


def make(target: Path, keep: Path | None, only: str) -> None:
    """Run every case, or those whose names match, and write down what they did."""
    target = target.resolve()
    folder = keep.resolve() if keep else Path(tempfile.mkdtemp(prefix="golden-")).resolve()
    began = time.monotonic()
    try:
        found = _make(folder, only)
    finally:
        if not keep:
            os.chdir("/")
            shutil.rmtree(folder)
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{len(found['cases'])} cases in {time.monotonic() - began:.0f} s -> {target}")


def _make(folder: Path, only: str) -> dict[str, Any]:
    work, between = folder / "work", folder / "between"
    for place in (work, between, folder / "home", folder / "tmp"):
        place.mkdir(parents=True)
    _surround(folder)
    os.chdir(work)
    warm_up()
    main = find_main()
    facts, versions = _facts()
    print(f"atlas of {importlib.import_module('atlas_cli').__path__[0]}", flush=True)
    plain = Plain(folder, versions)
    gc.set_threshold(100_000)
    gc.collect()
    gc.freeze()  # a fork that looks for garbage would copy everything
    cases: dict[str, Any] = {}
    took: dict[str, float] = {}
    before: dict[str, Stamp] = {}
    for one in every_case(work):
        if not fnmatch.fnmatchcase(one.name, only):
            continue
        assert one.name not in cases, f"two cases are called {one.name}"
        before = _learn_files(plain, work, before)
        found = run(one, main, between)
        took[one.name] = found.seconds
        after = stamps(work)
        files = _written(plain, work, before, after)  # first: others tell their digests
        cases[one.name] = {
            "line": plain.text(shlex.join(one.words)),
            "exit": found.code,
            "stdout": _shown(plain, found.out),
            "stderr": plain.text(found.err.decode("utf-8", "replace")),
            "files": files,
        }
        before = after
    for name in sorted(took, key=lambda name: -took[name])[:SLOWEST]:
        print(f"{took[name]:6.1f} s  {name}")
    return {"metadata": facts, "cases": cases}


def _surround(folder: Path) -> None:
    """Caches of its own, no network, one thread, plain text."""
    given = {
        "HOME": folder / "home",
        "ATLAS_CACHE": folder / "home" / "atlas",
        "HF_HOME": folder / "home" / "hf",
        "MPLCONFIGDIR": folder / "home" / "matplotlib",
        "TMPDIR": folder / "tmp",
        "HF_HUB_OFFLINE": 1,
        "COLUMNS": 200,
        "NO_COLOR": 1,
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": 1,
        "OPENBLAS_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in given.items()})
    for name in ("HF_TOKEN", "HF_ENDPOINT", "PYTHONWARNINGS"):
        os.environ.pop(name, None)
    tempfile.tempdir = None
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    if PathFinder.find_spec("atlas_cli"):  # an editable installation would fill its gaps
        sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in _module_of(one)]


def _module_of(finder: object) -> str:
    return str(getattr(finder, "__module__", ""))


def _facts() -> tuple[dict[str, Any], dict[str, str]]:
    """What results may depend on beside the code, and versions that are printed."""
    torch = importlib.import_module("torch")
    package = importlib.import_module("atlas_cli")
    kernels = [path for folder in package.__path__ for path in Path(folder).rglob("_kernels*.so")]
    facts = {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "kernels": bool(kernels),
    }
    versions = {name: facts[name] for name in ("torch", "python")}
    return facts, {**versions, "atlas": package.__version__}


def _learn_files(plain: Plain, work: Path, before: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """Take the digests of inputs that were made since the last case.

    What torch.save has written is known by its name: the older layout has addresses in it.
    """
    now = stamps(work)
    for name in now:
        if before.get(name) != now[name]:
            content = (work / name).read_bytes()
            plain.digest(content, name.encode() if name.endswith(".pt") else None)
    return now


def _shown(plain: Plain, out: bytes) -> str:
    """What went to stdout: as it is, or its beginning and its digest."""
    try:
        text = plain.text(out.decode())
    except UnicodeDecodeError:
        return f"{len(out)} bytes, sha256 {plain.digest(out)}"
    if len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[:500]}... ({len(text)} letters, sha256 {digest})"


def _written(
    plain: Plain, work: Path, before: Mapping[str, Stamp], after: Mapping[str, Stamp]
) -> dict[str, str]:
    changed = [name for name in after if before.get(name) != after[name]]
    # Those first that others tell the digest of.
    changed.sort(key=lambda name: (not name.endswith(".safetensors"), name))
    found = {name: plain.digest((work / name).read_bytes()) for name in changed}
    found |= {name: "removed" for name in before if name not in after}
    return _in_short(dict(sorted(found.items())))


def _in_short(found: dict[str, str]) -> dict[str, str]:
    """Digests of files, with one for all if there are very many."""
    if len(found) <= MANY:
        return found
    text = json.dumps(found)
    return {f"{len(found)} files": hashlib.sha256(text.encode()).hexdigest()}


# Comparing ------------------------------------------------------------------------------------


def compare(first: Path, second: Path, allowed: Path | None) -> int:
    """Print every difference; 1 if there is one that is not allowed."""
    reasons = _read_allowed(allowed) if allowed else {}
    known, unknown = 0, 0
    before, after = (_flat(json.loads(path.read_text("utf-8"))) for path in (first, second))
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        reason = next((why for glob, why in reasons.items() if _fits(name, glob)), None)
        known, unknown = known + (reason is not None), unknown + (reason is None)
        print(f"{name}" + ("" if reason is None else f"  (allowed: {reason})"))
        for line in _both(old, new):
            print(f"    {line}")
    print(f"{unknown} differences" + (f", and {known} that are allowed" if known else ""))
    return int(unknown > 0)


def _fits(name: str, glob: str) -> bool:
    return name == glob or fnmatch.fnmatchcase(name, glob)


def _read_allowed(path: Path) -> dict[str, str]:
    text = path.read_text("utf-8")
    try:
        found = json.loads(text)
    except ValueError:
        found = importlib.import_module("yaml").safe_load(text)
    return dict(found or {})


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """CASE/FIELD -> value, and CASE/files/NAME -> digest."""
    flat = {f"metadata/{key}": value for key, value in found["metadata"].items()}
    for name, entry in found["cases"].items():
        for key, value in entry.items():
            if key == "files":
                flat |= {f"{name}/files/{file}": digest for file, digest in value.items()}
            else:
                flat[f"{name}/{key}"] = value
    return flat


def _both(old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        yield from itertools.islice(lines, 2, None)
    else:
        yield f"- {old!r}"
        yield f"+ {new!r}"


# Inputs ---------------------------------------------------------------------------------------

Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
_CODES = {"F16": "e", "F32": "f"}
_NOISE = 8191  # numbers that repeat in large tensors


def read_tensors(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), content[start:stop])
    return tensors, metadata


def write_tensors(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    place = 0
    for name, (dtype, shape, content) in tensors.items():
        offsets = [place, place := place + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    return path


def unpacked(stored: Stored) -> tuple[float, ...]:
    """The numbers of a tensor."""
    dtype, shape, content = stored
    return struct.unpack(f"<{math.prod(shape)}{_CODES[dtype]}", content)


def packed(dtype: str, shape: tuple[int, ...], values: Sequence[float]) -> Stored:
    """Numbers as a tensor; bfloat16 is cut off, not rounded."""
    if dtype == "BF16":
        halves = array.array("H", struct.pack(f"<{len(values)}f", *values))
        return dtype, shape, halves[1::2].tobytes()
    return dtype, shape, struct.pack(f"<{len(values)}{_CODES[dtype]}", *values)


def noise(seed: object, count: int) -> Iterator[float]:
    """Normal numbers, which repeat if there are very many."""
    dice = random.Random(str(seed))
    few = [dice.gauss(0, 1) for _ in range(min(count, _NOISE))]
    return itertools.islice(itertools.cycle(few), count)


def moved(
    tensors: Mapping[str, Stored], seed: int, size: float, prefix: str = "", dtype: str = ""
) -> dict[str, Stored]:
    """The tensors after a random step of that relative size."""
    found = dict(tensors)
    for name, (kind, shape, content) in tensors.items():
        if name.startswith(prefix):
            values = unpacked((kind, shape, content))
            steps = noise((seed, name), len(values))
            after = [value * (1 + size * step) for value, step in zip(values, steps, strict=True)]
            found[name] = packed(dtype or kind, shape, after)
    return found


def with_numbers(tensors: Mapping[str, Stored], name: str, *start: float) -> dict[str, Stored]:
    """The tensors with other numbers at the start of one."""
    dtype, shape, _ = tensors[name]
    values = [*start, *unpacked(tensors[name])[len(start) :]]
    return {**tensors, name: packed(dtype, shape, values)}


def write_png(path: Path, pixels: bytes, size: int) -> None:
    """A square image in colour."""
    rows = b"".join(b"\0" + pixels[n * size * 3 : (n + 1) * size * 3] for n in range(size))
    parts = (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)), (b"IDAT", rows)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in (*parts, (b"IEND", b"")):
        body = kind + (zlib.compress(data) if kind == b"IDAT" else data)
        content += struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_photos(
    folder: Path, count: int = 3, classes: Sequence[str] = ("cat", "dog", "fish"), turn: int = 0
) -> Path:
    """Noise that is brighter in another channel for each class."""
    for channel, name in enumerate(classes):
        for number in range(count):
            dice = random.Random(f"{turn} {name} {number}")
            pixels = bytearray(value * 5 // 8 for value in dice.randbytes(36 * 36 * 3))
            for place in range((channel + turn) % 3, len(pixels), 3):
                pixels[place] += 90
            write_png(folder / name / f"{number}.png", bytes(pixels), 36)
    return folder


def write_files(folder: Path, texts: Mapping[str, str | bytes]) -> Path:
    """Files by their names."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def llama(seed: int, dtype: str = "F32", width: int = 8, layers: int = 3) -> dict[str, Stored]:
    """Small random tensors under Llama's names; those of other seeds are near those of seed 0."""
    shapes = {"model.embed_tokens.weight": (20, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}self_attn.q_proj.weight"] = (width, width)
        shapes[f"{prefix}mlp.up_proj.weight"] = (2 * width, width)
        shapes[f"{prefix}input_layernorm.weight"] = (width,)
    shapes["lm_head.weight"] = (20, width)
    found = {}
    for name, shape in shapes.items():
        first, step = (noise((number, name), math.prod(shape)) for number in (0, seed))
        size = 0.1 * bool(seed)
        values = [a + size * b for a, b in zip(first, step, strict=True)]
        found[name] = packed(dtype, shape, values)
    return found


def write_llama(folder: Path, tensors: Mapping[str, Stored]) -> Path:
    """A folder as transformers writes it."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    write_files(folder, {"config.json": json.dumps({**config, "torch_dtype": "float32"})})
    write_files(folder, {"tokenizer.json": "{}"})
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def clip_shapes(width: int = 32, layers: int = 2) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a small CLIP model of transformers."""
    yield from {"logit_scale": (), "visual_projection.weight": (24, width)}.items()
    yield "text_projection.weight", (24, width)
    yield "text_model.embeddings.token_embedding.weight", (49408, width)
    yield "text_model.embeddings.position_embedding.weight", (16, width)
    yield "vision_model.embeddings.class_embedding", (width,)
    yield "vision_model.embeddings.patch_embedding.weight", (width, 3, 16, 16)
    yield "vision_model.embeddings.position_embedding.weight", (5, width)
    norms = ["text_model.final_layer_norm"]
    norms += [f"vision_model.{name}" for name in ("pre_layrnorm", "post_layernorm")]
    for tower, layer in itertools.product(("text", "vision"), range(layers)):
        prefix = f"{tower}_model.encoder.layers.{layer}."
        norms += [f"{prefix}layer_norm{number}" for number in (1, 2)]
        for module in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{prefix}self_attn.{module}.weight", (width, width)
            yield f"{prefix}self_attn.{module}.bias", (width,)
        yield from {f"{prefix}mlp.fc1.weight": (2 * width, width)}.items()
        yield from {f"{prefix}mlp.fc1.bias": (2 * width,)}.items()
        yield from {f"{prefix}mlp.fc2.weight": (width, 2 * width)}.items()
        yield from {f"{prefix}mlp.fc2.bias": (width,)}.items()
    for norm in norms:
        yield from ((f"{norm}.{part}", (width,)) for part in ("weight", "bias"))


CLIP_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CLIP_TOWER |= {"num_attention_heads": 2, "hidden_act": "gelu"}  # type: ignore[dict-item]
CLIP_CONFIG = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 24,
    "vision_config": {**CLIP_TOWER, "image_size": 32, "patch_size": 16},
    "text_config": {**CLIP_TOWER, "max_position_embeddings": 16, "vocab_size": 49408},
}


def write_clip(folder: Path, seed: int) -> Path:
    """A folder of a CLIP model as transformers writes it."""
    tensors = {}
    for name, shape in clip_shapes():
        one = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        first, step = (noise((number, name), math.prod(shape)) for number in ("clip", seed))
        values = [one + 0.05 * a + 0.004 * b for a, b in zip(first, step, strict=True)]
        tensors[name] = packed("F32", shape, values)
    half = {"size": 32, "crop_size": 32, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    texts = {"config.json": CLIP_CONFIG, "preprocessor_config.json": half}
    write_files(folder, {name: json.dumps(text) for name, text in texts.items()})
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def tiny_folder() -> Path:
    """Where the built-in model is."""
    package = importlib.import_module("atlas_cli")
    for place in package.__path__:
        for path in sorted(Path(place).rglob(f"tiny/{WEIGHTS}")):
            return path.parent
    raise SystemExit("atlas has no built-in model")


@dataclass(frozen=True)
class World:
    """The built-in model's tensors, and the folder that every case runs in."""

    work: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    config: str

    def folder(self, name: str, tensors: Mapping[str, Stored], **metadata: str) -> Path:
        """A model as open_clip keeps it."""
        write_files(self.work / name, {CONFIG: self.config})
        write_tensors(self.work / name / WEIGHTS, tensors, {**self.metadata, **metadata})
        return self.work / name


def write_world(work: Path) -> World:
    """The inputs of cases that are meant to succeed."""
    tensors, metadata = read_tensors(tiny_folder() / WEIGHTS)
    world = World(work, tensors, metadata, (tiny_folder() / CONFIG).read_text())
    only = shutil.ignore_patterns("*.md")
    shutil.copytree(ROOT / "recipes", work / "recipes", ignore=only)
    write_files(work / "recipes", {"README.md": "# Recipes\n\n| key | type |\n| --- | - |\n"})
    (work / "out").mkdir()
    world.folder("in/base", tensors)
    world.folder("in/far", moved(tensors, 9, 1.5))
    for seed, name in enumerate(("cars", "signs"), start=1):
        world.folder(name, moved(tensors, seed, 0.05))
        tuned = moved(tensors, seed, 0.02, "visual.", "F32")
        write_tensors(work / "in" / "tuned" / f"{name}.safetensors", tuned)
    for seed in range(4):
        write_llama(work / "in" / f"m{seed}", llama(seed))
        write_llama(work / "in" / f"b{seed}", llama(seed, "BF16", 24))
    for seed in (1, 2):
        write_clip(work / "in" / f"clip{seed}", seed)
    write_photos(work / "in" / "shots", 4)
    write_photos(work / "in" / "control", 2, turn=1)
    write_photos(work / "in" / "pets" / "train", 4)
    write_photos(work / "in" / "pets" / "val", 2, turn=3)
    write_photos(work / "in" / "flat", 6, (".",))
    write_photos(work / "in" / "Cars", 4)
    _write_table(work / "in" / "shots.csv", work / "in" / "shots")
    _write_adapter(work / "in" / "adapter", "visual.transformer.resblocks.1.mlp.c_fc", 384, 96)
    _write_adapter(work / "in" / "lora", "model.layers.1.mlp.up_proj", 16, 8)
    write_pickles(world)
    return world


def _write_table(path: Path, folder: Path) -> None:
    images = sorted(folder.rglob("*.png"))
    rows = [f"{image.relative_to(path.parent)},{image.parent.name}" for image in images]
    path.write_text("path,label\n" + "\n".join(rows) + "\n")


def _write_adapter(folder: Path, module: str, rows: int, columns: int, **changes: object) -> Path:
    """A LoRA adapter of one module, as peft writes it."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **changes}
    write_files(folder, {"adapter_config.json": json.dumps(settings)})
    shapes = {"lora_A": (2, columns), "lora_B": (rows, 2)}
    factors = {
        f"base_model.model.{module}.{part}.weight": packed(
            "F32", shape, [0.05 * value for value in noise(part, math.prod(shape))]
        )
        for part, shape in shapes.items()
    }
    write_tensors(folder / "adapter_model.safetensors", factors)
    return folder


def write_pickles(world: World) -> None:
    """Checkpoints by torch.save, made by a child so that this process stays as it is."""
    child = os.fork()
    if not child:
        try:
            _save_pickles(world)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the checkpoints could not be written"


def _save_pickles(world: World) -> None:
    torch = importlib.import_module("torch")
    tuned, _ = read_tensors(world.work / "in" / "tuned" / "cars.safetensors")
    visual = {
        name: torch.tensor(unpacked(stored)).reshape(stored[1])
        for name, stored in tuned.items()
        if name.startswith("visual.")
    }
    folder = world.work / "in" / "pickled"
    folder.mkdir()
    torch.save({f"model.{name}": t for name, t in visual.items()}, folder / "state.pt")
    training = {"epoch": 3, "state_dict": {f"module.{name}": t for name, t in visual.items()}}
    torch.save(training, folder / "epoch.pt", _use_new_zipfile_serialization=False)
    when = {"state_dict": visual, "when": time.strptime("2024", "%Y")}
    torch.save(when, folder / "when.pt")
    torch.save(torch.nn.Linear(4, 2).state_dict() | {"weight": torch.ones(2, 4)}, folder / "h.pt")
    torch.save({"bias": torch.ones(2), "weight": torch.ones(2, 4)}, folder / "head.pt")


# Cases ----------------------------------------------------------------------------------------

ROOM = "--memory 8GB --threads 1"  # this process is in the budget
TINY = "--model builtin:tiny --threads 1"
QUICK = "--shots 2 --epochs 2 --min-steps 2 --batch-size 20 --augment none"
TWO = "--vectors builtin:textures builtin:signs"


def every_case(work: Path) -> Iterator[Case]:
    """All of them, in order: some need what those before them have written."""
    world = write_world(work)
    yield from helping()
    yield from starting()
    yield from drawing()
    yield from extracting()
    yield from merging(work)
    yield from merging_options(work)
    yield from evaluating()
    yield from fitting()
    yield from negating()
    yield from adding()
    yield from adapting(work)
    yield from finetuning()
    yield from inspecting()
    yield from going_on()
    write_bad(world)
    yield from alone(mistakes())
    yield from alone(wrong_types())
    yield from alone(wrong_values())
    yield from alone(wrong_merges())
    yield from alone(wrong_parameters(work))


def listed(group: str, common: str, table: Mapping[str, str], **more: Any) -> Iterator[Case]:
    """A case for each line of a table, with what is common to all and a folder to write."""
    for name, line in table.items():
        filled = line.replace("@", f"out/{group}-{name.replace(' ', '-')}")
        yield case(f"{group} {name}", f"{filled} {common}", **more)


def helping() -> Iterator[Case]:
    """What is printed about the commands."""
    yield case("help", "--help")
    yield case("help without arguments", "")
    yield case("version", "--version")
    for command in COMMANDS:
        yield case(f"help {command}", f"{command} --help")
    yield case("help in a narrow window", "eval --help", environment={"COLUMNS": "60"})


def starting() -> Iterator[Case]:
    """Processes of their own."""
    line = "eval builtin:tiny --data builtin:digits --shots 1 --workers 0"
    yield case("process version", "--version", process=True)
    yield case("process help", "--help", process=True)
    yield case("process eval", line, process=True)
    yield case("process mistake", "evall", process=True)
    yield case("process recipe", "merge -", stdin="merge_method: tise\n", process=True)
    yield case("process closed stdout", line, sink="closed", process=True)
    yield case("process full disk", line, sink="full", process=True)
    away = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    data = "--data builtin:digits --shots 1"
    yield case("process unreachable", f"eval me/clip {data}", process=True, environment=away)
    cache = {"ATLAS_CACHE": "recipes/README.md"}
    yield case("process no cache", line, process=True, environment=cache)
    yield case("closed stdout", line, sink="closed")
    yield case("full disk behind stdout", line, sink="full")
    yield case("closed stdout of help", "--help", sink="closed")


def drawing() -> Iterator[Case]:
    """Images of every built-in task."""
    tasks = "digits letters house_numbers signs textures terrain counts silhouettes everything"
    for name in tasks.split():
        yield case(f"draw {name}", f"draw builtin:{name} -o out/drawn --shots 1")
        shutil.rmtree("out/drawn", ignore_errors=True)
    yield case("draw seed", "draw builtin:digits -o out/drawn --shots 1 --seed 3 --json -q")
    shutil.rmtree("out/drawn", ignore_errors=True)
    yield case("draw terrain two", "draw builtin:terrain -o out/terrain --shots 2")
    for place in Path("out/terrain").glob("*/*"):  # two images of a class are enough
        for path in sorted(place.iterdir())[2:] if place.is_dir() else ():
            path.unlink()


def extracting() -> Iterator[Case]:
    """Task vectors of many kinds of checkpoints, in every form."""
    files = "in/tuned/cars.safetensors in/tuned/signs.safetensors"
    yield case("extract several", f"extract builtin:tiny {files} -o vectors")
    car = "extract builtin:tiny in/tuned/cars.safetensors -o @.safetensors"
    forms = {
        "fp16": "--dtype fp16",
        "bf16": "--dtype bf16 --json",
        "int8": "--dtype int8 --json -q",
        "rank": "--rank 4",
        "rank fp16": "--rank 3 --dtype fp16",
        "energy": "--energy 0.9",
        "scale": "--scale -0.5",
        "name": "--name my-cars",
        "ignore": "--ignore ln_pre positional",
    }
    yield from listed("extract", "", {name: f"{car} {more}" for name, more in forms.items()})
    pickled = "extract builtin:tiny in/pickled"
    table = {
        "folder": "extract in/base cars -o @.safetensors",
        "text": "extract in/base cars -o @.safetensors --scope text",
        "all": "extract in/base cars signs -o @ --scope all --dtype fp16 --json",
        "state": f"{pickled}/state.pt -o @.safetensors",
        "epoch": f"{pickled}/epoch.pt -o @.safetensors --dtype int8",
        "when": f"{pickled}/when.pt -o @.safetensors --allow-global time.struct_time",
        "adapter": "extract builtin:tiny in/adapter -o @.safetensors",
        "adapter fp16": "extract builtin:tiny in/adapter -o @.safetensors --dtype fp16 --scale 2",
        "vector": "extract builtin:tiny vectors/cars.safetensors -o @.safetensors --scale -1",
        "vector int8": "extract builtin:tiny vectors/cars.safetensors -o @.safetensors"
        " --dtype int8 --name again",
        "clip": "extract in/clip1 in/clip2 -o @.safetensors --scope all",
        "stdout": "extract builtin:tiny in/tuned/cars.safetensors -o -",
        "stdout fp16": "extract in/base cars -o - --dtype fp16 -q",
        "named": "extract builtin:tiny in/tuned/cars.safetensors -o @ --name 'my cars' -q",
        "force": "extract builtin:tiny cars -o out/extract-fp16.safetensors --force",
        "wrong base": "extract in/base in/far -o @.safetensors -q",
    }
    yield from listed("extract", "", table)
    yield case(
        "extract to a terminal", "extract builtin:tiny cars -o - --dtype fp16", sink="terminal"
    )


def merging(work: Path) -> Iterator[Case]:
    """Every recipe, and what is told of it."""
    for path in sorted((work / "recipes" / "merge").glob("*.yaml")):
        name = path.stem
        yield case(f"merge {name}", f"merge recipes/merge/{path.name} -o out/merge-{name} {ROOM}")
        line = f"merge recipes/merge/{path.name} --dry-run --json {ROOM}"
        yield case(f"merge plan {name}", line)
    ties, slerp = "recipes/merge/ties.yaml", "recipes/merge/slerp.yaml"
    table = {
        "text plan": f"merge {ties} --dry-run",
        "explain": f"merge {slerp} --dry-run --explain 'resblocks.1.*(attn|mlp)'",
        "explain json": f"merge {slerp} --dry-run --json --explain ln_1",
        "json": f"merge {ties} -o @ --json",
        "shards": f"merge {ties} -o @ --max-shard-size 1MB",
        "quiet force": f"merge {ties} -o out/merge-linear --force -q",
        "lock": "merge out/merge-dare_ties/atlas_recipe.lock.yaml -o @",
        "lock of vectors": "merge out/merge-atlas/atlas_recipe.lock.yaml -o @",
    }
    yield from listed("merge", ROOM, table)
    yield case("merge schema", "merge --schema")
    text = (work / ties).read_text()
    yield case("merge stdin", f"merge - -o out/merge-stdin {ROOM}", stdin=text)


def _recipe(method: str, own: Mapping[str, Any], together: Mapping[str, Any], **more: Any) -> str:
    """A merge of small models: two of them, or as many as `count`, beside a base if `base`."""
    kind, count, base = more.pop("kind", "m"), more.pop("count", 2), more.pop("base", True)
    models = [{"model": f"./in/{kind}{n}", "parameters": dict(own)} for n in range(1, count + 1)]
    found = {"merge_method": method, "models": models, "parameters": dict(together), **more}
    return json.dumps(found | ({"base_model": f"./in/{kind}0"} if base else {}))


HALF = {"weight": 0.6, "density": 0.5}
ELECTION = {"elect": "count", "zero_sign": "majority", "weigh": "after", "divisor": "count"}
BY_LAYER: dict[str, Any] = {
    "weight": [{"filter": "mlp", "value": [0, 1]}, {"value": [0.2, 0.4, 0.9]}]
}
OPTIONS: dict[str, str] = {
    "linear sum": _recipe("linear", {"weight": 0.5}, {"normalize": False}, base=False),
    "linear by layer": _recipe("linear", BY_LAYER, {"normalize": False}, base=False),
    "linear of a base": _recipe("linear", {}, {"weight": 1}),
    "linear float64": _recipe("linear", {"weight": 1}, {}, base=False, dtype="float64"),
    "linear bfloat16": _recipe("linear", {"weight": 1}, {}, base=False, out_dtype="bfloat16"),
    "linear up": _recipe("linear", {}, {"weight": 1}, kind="b", dtype="torch.float32"),
    "linear tokenizer": _recipe("linear", {}, {"weight": 1}, tokenizer_source="base"),
    "unknown filter": _recipe(
        "linear", {"weight": [{"filter": "mpl", "value": 1}, {"value": 2}]}, {}, base=False
    ),
    "nuslerp rows": _recipe(
        "nuslerp", {"weight": 0.7}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}
    ),
    "nuslerp columns": _recipe("nuslerp", {"weight": 0.7}, {"nuslerp_flatten": False}, base=False),
    "multislerp": _recipe(
        "multislerp", {"weight": 0.7}, {"normalize_weights": False, "eps": 0.001}, count=3
    ),
    "karcher": _recipe("karcher", {}, {"max_iter": 3, "tol": 0.001}, count=3, base=False),
    "task arithmetic": _recipe(
        "task_arithmetic", HALF, {"normalize": True, "rescale": True, "lambda": 0.7}, count=3
    ),
    "task arithmetic by layer": _recipe("task_arithmetic", BY_LAYER, {}),
    "ties": _recipe("ties", HALF, {**ELECTION, "rounding": "ceil"}, count=3),
    "ties above": _recipe("ties", HALF, {"rounding": "above", "normalize": False}, count=3),
    "ties model": _recipe("ties", HALF, {"scope": "model", **ELECTION}, kind="b", count=3),
    "ties bfloat16": _recipe("ties", HALF, {"int8_mask": True, "rescale": True}, kind="b"),
    "dare_linear": _recipe("dare_linear", HALF, {"rescale_by": "density"}, seed=7),
    "dare_ties": _recipe("dare_ties", HALF, {**ELECTION, "rescale": False}, kind="b", seed=7),
    "della": _recipe("della", {**HALF, "epsilon": 0.3}, {**ELECTION, "lambda": 1.5}, count=3),
    "della_linear": _recipe("della_linear", {**HALF, "epsilon": 0.2}, {"rescale": False}, kind="b"),
    "breadcrumbs": _recipe("breadcrumbs", {**HALF, "gamma": 0.1}, {"scope": "model"}, kind="b"),
    "breadcrumbs_ties": _recipe("breadcrumbs_ties", {**HALF, "gamma": 0.1}, ELECTION, count=3),
    "model_stock": _recipe("model_stock", {}, {"filter_wise": True}, count=3),
    "sce": _recipe("sce", {}, {"select_topk": 0.3, "int8_mask": True}, count=3),
    "wise_ft": _recipe("wise_ft", {}, {"alpha": 0.3}, count=1),
    "lines": _recipe("lines", {"weight": 0.5}, {"alpha": 0.1, "beta": 0.8}, count=3),
    "metagpt": _recipe("metagpt", {}, {"lambda": 0.5}, count=3),
    "consensus": _recipe("consensus", {"threshold": 0.7}, {"agreement": 1}, count=3),
    "tsv": _recipe("tsv", {"weight": 0.5}, {"lambda": 2}, count=3),
    "iso_c": _recipe("iso_c", {"weight": 0.5}, {"lambda": 2}, count=3),
    "iso_cts": _recipe("iso_cts", {"weight": 0.5}, {"common_space_fraction": 0.3}, count=3),
    "slices": json.dumps(
        {
            "merge_method": "slerp",
            "base_model": "./in/m0",
            "parameters": {"t": 0.3},
            "slices": [
                {"sources": [{"model": f"./in/m{n}", "layer_range": [0, 3]} for n in (0, 1)]}
            ],
        }
    ),
    "adapter": '{"merge_method": "passthrough", "models": [{"model": "./in/m1+./in/lora"}]}',
    "clip": '{"merge_method": "linear", "parameters": {"weight": 1}, '
    '"models": [{"model": "./in/clip1"}, {"model": "./in/clip2"}]}',
    "vectors by name": json.dumps(
        {
            "merge_method": "atlas",
            "base_model": "builtin:tiny",
            "vectors": [{"file": "builtin:digits", "name": "digits"}, "vectors/cars.safetensors"],
            "granularity": "vector",
            "coefficients": {"digits": {"all": 0.4}, "cars": {"all": -0.25}},
            "out_dtype": "float32",
        }
    ),
    "vectors by file": json.dumps(
        {
            "merge_method": "atlas",
            "base_model": "builtin:tiny",
            "vectors": ["builtin:digits", "builtin:signs"],
            "granularity": "vector",
            "coefficients": "in/table.json",
            "scope": "visual",
        }
    ),
    "vectors in factors": json.dumps(
        {
            "merge_method": "atlas",
            "base_model": "builtin:tiny",
            "vectors": ["out/extract-adapter.safetensors"],
            "coefficients": {"adapter": {"visual.transformer.resblocks.1.mlp.c_fc.weight": 0.5}},
        }
    ),
}


def merging_options(work: Path) -> Iterator[Case]:
    """Parameters of methods, dtypes, slices, adapters, vectors."""
    table = {"digits": {"all": 0.5}, "signs": {"all": 0.25}}
    (work / "in" / "table.json").write_text(json.dumps(table))
    for number, (name, text) in enumerate(OPTIONS.items()):
        line = f"merge - -o out/options-{number} {ROOM}"
        yield case(f"merge with {name}", line, stdin=text)


def evaluating() -> Iterator[Case]:
    """Scores and predictions."""
    some = "--data builtin:digits builtin:signs --shots 2"
    many = "eval builtin:tiny cars out/merge-ties"
    table = {
        "json": f"eval builtin:tiny {some} --json",
        "csv": f"eval builtin:tiny {some}",
        "several": f"{many} {some}",
        "several json": f"{many} {some} --json",
        "predictions": f"{many} {some} --predictions out/predictions.jsonl",
        "predictions to stdout": f"eval builtin:tiny {some} --predictions -",
        "folder": "eval builtin:tiny --data in/shots out/terrain --json",
        "split": "eval builtin:tiny --data out/terrain in/pets --split val",
        "table": "eval builtin:tiny --data csv:in/shots.csv",
        "templates": f"eval builtin:tiny {some} --template 'a {{}}' 'the {{}}.' --predictions -",
        "seed": f"eval builtin:tiny {some} --seed 4 --batch-size 7 --json",
        "clip": "eval in/clip1 --data in/shots --json",
        "recipe": "eval recipes/eval.yaml --shots 2",
        "recipe json": "eval recipes/eval.yaml --shots 1 --seed 2 --json --split val",
        "learned": "eval out/merge-atlas --data builtin:digits --shots 2 --device cpu",
    }
    yield from listed("eval", "--workers 0", table)
    yield case("eval workers", f"eval builtin:tiny {some} --workers 1")
    recipe = "models: [builtin:tiny]\ndata: [builtin:digits]\nshots: 1\nsplit: val\n"
    yield case("eval recipe from stdin", "eval - --workers 0", stdin=recipe)
    terminal = f"{many} {some} --workers 0 -q"
    yield case("eval on a terminal", terminal, sink="terminal")
    scores = "out/scores.json"
    line = f"merge recipes/merge/ties.yaml -o out/card --evaluation {scores} {ROOM}"
    yield case("merge evaluation missing", line)
    yield case("merge for a card", f"merge recipes/merge/ties.yaml -o out/card {ROOM}")
    told = '{"atlas": "0", "models": [{"reference": "m|1", "commit": null, "sha256": {"m": "00"}}],'
    told += '"results": [{"model": "m|1", "data": "d", "split": "test", "images": 8, "top1": 0.5,'
    Path(scores).write_text(f'{told} "low": 0.2, "high": 0.8}}]}}')
    yield case("merge evaluation", f"{line} --force")


def fitting() -> Iterator[Case]:
    """Ways to learn from labels."""
    fit = f"fit builtin:terrain {TWO} {QUICK}"
    table = {
        "block": f"{fit} -o @",
        "vector": f"{fit} --granularity vector -o @",
        "qkv": f"{fit} --granularity qkv -o @",
        "partition": f"{fit} --granularity partition:3 -o @",
        "large": f"{fit} --granularity partition:200 -o @",
        "groups": f"{fit} --group 'resblocks\\.(\\d+)' --group . -o @",
        "holdout": f"{fit} --select holdout -o @",
        "kfold": f"{fit} --select kfold --shots 4 -o @",
        "val": f"fit out/terrain {TWO} {QUICK} --select val:out/terrain -o @",
        "search": f"{fit} --method search -o @",
        "linearised": f"{fit} --linearised -o @",
        "penalty": f"{fit} --penalty l1:0.5 -o @ -q",
        "accumulate": f"{fit} --accumulate 2 -o @",
        "augment": f"{fit} --augment flip --seed 3 -o @",
        "crop": f"{fit} --augment crop --schedule constant --weight-decay 0 --clip 0.1 -o @",
        "json": f"{fit} --json",
        "nothing": f"{fit} --lr 1e-30",
        "share": f"{fit} --shots 0.01 --template 'a {{}}' --split val",
        "bf16": f"fit builtin:terrain --vectors vectors {QUICK} --memory 3MB",
        "int8": f"fit builtin:terrain --vectors vectors {QUICK} --memory 1500kB",
        "mapped": f"fit builtin:terrain --vectors vectors {QUICK} --memory 1kB -o @",
        "folder": f"fit in/shots --vectors vectors builtin:digits {QUICK} -o @",
        "target": f"fit in/Cars --vectors vectors {QUICK} --allow-target -o @ -q",
        "recipe": f"fit recipes/few_shot.yaml {QUICK} -o @",
    }
    yield from listed("fit", TINY, table)
    keys = {"data": "out/terrain", "model": "in/base", "vectors": ["builtin:signs"], "epochs": 1}
    text = json.dumps({**keys, "lr": 1, "groups": ["visual"], "augment": "none", "min_steps": 2})
    yield case("fit stdin", "fit - --epochs 2 --threads 1", stdin=text)
    learned = Path("out/fit-block/recipe.yaml")
    yield case("merge learned", f"merge - -o out/learned {ROOM}", stdin=learned)
    for name in ("qkv", "partition", "groups", "large"):
        line = f"merge out/fit-{name}/recipe.yaml -o out/learned-{name} {ROOM}"
        yield case(f"merge learned {name}", line)
    yield case("merge linearised", f"merge out/fit-linearised/recipe.yaml -o out/l {ROOM}")
    line = "eval builtin:tiny out/learned --data builtin:terrain --shots 2 --workers 0"
    yield case("eval what was learned", line)


def negating() -> Iterator[Case]:
    """Ways to forget."""
    line = "negate builtin:digits --control in/control --vectors builtin:digits"
    negate = f"{line} {QUICK} --lr 0.5"
    table = {
        "everything": f"{negate} --control builtin:everything --shots 1 -o @",
        "unlikelihood": f"{negate} -o @",
        "ascent": f"{negate} --forget ascent -o @",
        "uniform": f"{negate} --forget uniform --keep 0.5 -o @",
        "search": f"{negate} --method search -o @",
        "last": f"{negate} --select last --granularity vector -o @",
        "holdout": f"{negate} --select holdout -o @",
        "val": "negate in/pets --control out/terrain --vectors vectors --select val --keep 0.1"
        " --epochs 1 --min-steps 2 --augment none -o @",
        "json": f"{negate} --compare task_arithmetic:weight=-0.5 --json",
        "compare": f"{negate} --compare task_arithmetic:weight=-0.5 ties:weight=-0.3",
        "impossible": f"{negate} --control builtin:everything --shots 1 --keep 1.01 -o @",
        "recipe": f"negate recipes/negate.yaml {QUICK} -o @",
    }
    yield from listed("negate", TINY, table)
    several = negate.replace("builtin:digits ", "builtin:digits builtin:signs ", 1)
    yield case("negate several", f"{several} {TINY} -o out/negate-several")


def adding() -> Iterator[Case]:
    """Ways to combine."""
    add = f"add builtin:digits builtin:signs --vectors builtin:digits builtin:signs {QUICK}"
    individual = "--individual builtin:digits=95 builtin:signs=90"
    table = {
        "labels": f"{add} -o @",
        "entropy": f"{add} --objective entropy --epochs 2 -o @",
        "entropy own": f"{add} --objective entropy --lr 0.1 --init 0.2 --clamp 0:0.4 -o @",
        "isotropic": f"{add} --method isotropic -o @",
        "search": f"{add} --method search -o @",
        "ties": f"{add} --ties 0.2 --objective entropy -o @",
        "ties labels": f"{add} --ties 0.5 -o @",
        "holdout": f"{add} --select holdout -o @",
        "kfold": f"{add} --select kfold --shots 4 --epochs 1 -o @",
        "val": "add in/pets out/terrain --vectors vectors --select val --epochs 1"
        " --min-steps 2 --augment none -o @",
        "json": f"{add} {individual} --compare ties tsv --disentanglement --json",
        "compare": f"{add} {individual} --compare ties iso_c:lambda=0.5 dare_ties lines consensus",
        "disentanglement": f"{add} --disentanglement -o @",
        "recipe": f"add recipes/add.yaml {QUICK} --compare tsv -o @",
    }
    yield from listed("add", TINY, table)


def adapting(work: Path) -> Iterator[Case]:
    """Ways to do without labels."""
    quick = f"{TWO} --batch-size 8 --epochs 2"
    tta = f"tta out/terrain {quick}"
    last = "--select last --lr 0.3 -o @"
    table = {
        name: f"{tta} --objective {name} {last} --predictions @.jsonl"
        for name in ("ufm", "entropy", "balanced-entropy", "sar", "simclr")
    }
    table |= {
        "guard": f"{tta} -o @",
        "layernorm": f"tta out/terrain --batch-size 8 --epochs 2 --tune layernorm {last}",
        "layernorm entropy": "tta out/terrain --batch-size 8 --epochs 1 --tune layernorm"
        f" --objective entropy {last}",
        "search": f"{tta} --method search -o @",
        "json": f"{tta} --json",
        "options": f"{tta} --power 2 --threshold 0.5:0.9 --trusted-per-class 2 {last}",
        "prior": f"tta in/shots {quick} --prior 0.5,0.3,0.2 --augment flip {last}",
        "classes": f"tta in/flat {quick} --classes cat,dog,fish {last} --predictions @.jsonl",
        "qkv": f"{tta} --granularity qkv --augment crop {last} -q",
        "linearised": f"{tta} --linearised {last} -q",
        "table": f"tta csv:in/shots.csv {quick} {last}",
        "recipe": f"tta recipes/tta.yaml {quick} --split val --epochs 1 --batch-size 250",
    }
    yield from listed("tta", TINY, table)
    yield case("merge layernorm", f"merge out/tta-layernorm/recipe.yaml -o out/norms {ROOM}")
    images = sorted((work / "in" / "shots").rglob("*.png"))
    paths = [str(path.relative_to(work)) for path in images]
    paths.insert(3, "gone.png")
    online = f"tta --online --classes cat,dog,fish --batch-size 4 {TWO} {TINY} -o"
    text = "\n".join(paths)
    yield case("tta online", f"{online} out/online", stdin=text)
    yield case("tta online resumed", f"{online} out/online --resume", stdin=text)
    norms = "tta --online --classes cat,dog,fish --batch-size 4 --tune layernorm"
    yield case("tta online layernorm", f"{norms} {TINY} -o out/online-norms -q", stdin=text)
    line = f"tta --online --classes a,b --objective entropy {TWO} {TINY}"
    yield case("tta online without a folder", line, stdin=text)


def finetuning() -> Iterator[Case]:
    """Ways to fine-tune."""
    some = "--shots 4 --steps 3 --lr 0.001 --batch-size 16"
    digits = f"finetune builtin:digits {some} --augment none"
    table = {
        "all": f"{digits} -o @ --vector @.safetensors",
        "layernorm": f"{digits} -o @ --tune layernorm",
        "projection": f"{digits} -o @ --tune projection -q",
        "lora": f"{digits} -o @ --lora 2 --vector @.safetensors",
        "linearised": f"{digits} -o @ --linearised",
        "best": "finetune in/pets --epochs 2 --lr 0.1 --select best --schedule constant -o @",
        "held out": "finetune in/shots --epochs 2 --batch-size 6 --accumulate 2 --warmup 1"
        " --weight-decay 0 --augment flip --vector @.safetensors",
        "checkpointed": f"{digits} --checkpoint-activations --vector @.safetensors --json",
        "several": f"finetune in/pets builtin:signs {some} --vectors-dir @-v --json -o @",
        "clip": "finetune in/pets --model in/clip1 --threads 1 --epochs 1 --augment none -o @",
        "recipe": "finetune recipes/finetune.yaml --shots 2 --steps 2 --batch-size 16"
        " --vectors-dir @ -q",
    }
    for one in listed("finetune", "", table):
        more = () if "--model" in one.words else tuple(TINY.split())
        yield Case(one.name, (*one.words, *more))
    tuned = "out/finetune-all/model"
    yield case("extract finetuned", f"extract builtin:tiny {tuned} -o out/tuned.safetensors")
    adapter = "out/finetune-lora/adapter"
    yield case("extract lora", f"extract builtin:tiny {adapter} -o out/lora.safetensors --json")
    line = f"eval builtin:tiny {tuned} --data builtin:digits --shots 2 --workers 0"
    yield case("eval finetuned", line)


def inspecting() -> Iterator[Case]:
    """What vectors, models and runs hold, as text, tables, pictures and pages."""
    vectors = "vectors/cars.safetensors vectors/signs.safetensors"
    table = {
        "vector": "inspect vectors/cars.safetensors",
        "vector json": "inspect vectors/cars.safetensors --json",
        "int8": "inspect out/extract-int8.safetensors --blocks",
        "factors": "inspect out/extract-rank.safetensors out/extract-adapter.safetensors --json",
        "vectors": f"inspect {vectors} out/extract-fp16.safetensors",
        "vectors by block": f"inspect {vectors} --blocks",
        "vectors json": f"inspect {vectors} builtin:tiny --json",
        "model": "inspect builtin:tiny",
        "model json": "inspect builtin:tiny in/clip2 --json",
        "merged": "inspect out/merge-shards",
        "clip": "inspect in/clip1 --json",
        "pickle": "inspect in/pickled/state.pt",
        "run": "inspect out/fit-block",
        "run json": "inspect out/fit-block --json",
        "run of add": "inspect out/add-labels --json",
        "run of tta": "inspect out/tta-ufm --json",
        "large run": "inspect out/fit-large --json",
        "learned recipe": "inspect out/fit-qkv/recipe.yaml",
        "learned recipe json": "inspect out/fit-qkv/recipe.yaml --json",
        "coefficients": "inspect out/fit-vector/coefficients.json --json",
        "large table": "inspect out/fit-large/coefficients.safetensors",
        "plot png": "inspect out/fit-block --plot @.png",
        "plot svg": f"inspect {vectors} --plot @.svg -q",
        "plot html": "inspect out/tta-ufm/recipe.yaml --plot @.html",
        "plot vectors": f"inspect {vectors} --plot @.png",
    }
    yield from listed("inspect", "", table)
    vector = Path("vectors/cars.safetensors")
    yield case("inspect stdin", "inspect - --json", stdin=vector)
    yield case("inspect recipe stdin", "inspect -", stdin=Path("out/fit-block/recipe.yaml"))
    for name in ("vector", "vectors", "model", "run", "learned recipe"):
        yield case(f"inspect {name} on a terminal", f"{table[name]} -q", sink="terminal")
    report = "report out/fit-block out/negate-ascent out/add-labels out/tta-ufm"
    yield case("report", f"{report} -o out/report.html")
    yield case("report search", "report out/fit-search out/online -o -")


def going_on() -> Iterator[Case]:
    """Runs that are there already."""
    fit = f"fit builtin:terrain {TWO} {QUICK} {TINY} -o out/fit-block"
    yield case("fit again", fit)
    yield case("fit resumed", f"{fit} --resume")
    yield case("fit resumed otherwise", f"{fit} --resume --lr 0.2")
    yield case("fit resumed elsewhere", f"{fit} --resume --vectors builtin:digits")
    yield case("fit forced", f"{fit} --force --lr 0.2")
    some = "--shots 4 --steps 3 --lr 0.001 --batch-size 16 --augment none"
    tune = f"finetune builtin:digits {some} {TINY} -o out/finetune-all"
    yield case("finetune again", tune)
    yield case("finetune resumed", f"{tune} --resume")
    yield case("finetune resumed otherwise", f"{tune} --resume --clip 3")
    extract = "extract builtin:tiny in/tuned/cars.safetensors -o vectors/cars.safetensors"
    yield case("extract again", extract)
    yield case("merge again", f"merge recipes/merge/ties.yaml -o out/merge-ties {ROOM}")
    yield case("report again", "report out/fit-block -o out/report.html")
    yield case("draw again", "draw builtin:digits -o out/terrain")
    yield case("demo elsewhere", "demo -o in/shots")


# Mistakes -------------------------------------------------------------------------------------


def write_bad(world: World) -> None:
    """Everything that is wrong in its own way."""
    bad = world.work / "bad"
    _write_bad_images(bad)
    _write_bad_models(world, bad)
    _write_bad_vectors(world, bad)
    _write_bad_runs(bad)
    _write_bad_pickles(world, bad)


def _write_bad_images(bad: Path) -> None:
    extra: dict[str, dict[str, str | bytes]] = {
        "names": {"classnames.txt": "cat\ndog\n"},
        "utf8": {"classnames.txt": b"\xff"},
        "templates": {"templates.txt": "a\n"},
        "broken": {"cat/0.png": b"no image"},
        "truncated": {"cat/a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"},
        "notes": {"cat/notes.txt": "x"},
    }
    for name, files in extra.items():
        write_files(write_photos(bad / name), files)
    write_photos(write_photos(bad / "loose"), 1, (".",))
    (write_photos(bad / "emu") / "emu").mkdir()
    (bad / "nothing").mkdir()
    write_photos(bad / "onlytrain" / "train")
    write_photos(bad / "classes" / "train")
    write_photos(bad / "classes" / "val", 2, ("cat", "dog", "bird"))
    write_photos(bad / "missing" / "train", 2)
    write_photos(bad / "missing" / "test", 2, ("cat",))
    write_photos(bad / "one", 3, ("cat",))
    whole = (bad / "one" / "cat" / "0.png").read_bytes()
    (bad / "truncated" / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    tables = {
        "column": "file,label\na,b\n",
        "rows": "path,label\n",
        "short": "path,label\na.png\n",
        "long": "path,label\na.png,cat,more\n",
        "blank": "path,label\n,cat\n",
        "quote": 'path,label\n"a',
        "split": "path,label,split\na.png,cat,train\nb.png,dog,train\n",
        "gone": "path,label\na.png,cat\nb.png,dog\n",
    }
    write_files(bad, {f"{name}.csv": text for name, text in tables.items()})


def _write_bad_models(world: World, bad: Path) -> None:
    tensors, proj = world.tensors, "visual.proj"
    short = {n: t for n, t in tensors.items() if not n.startswith("visual.ln_p")}
    world.folder("bad/shape", {**tensors, "visual.ln_post.weight": packed("F32", (9,), [1.0] * 9)})
    world.folder("bad/nan", with_numbers(tensors, proj, math.nan))
    world.folder("bad/lacks", short)
    world.folder("bad/more", {**tensors, "visual.more": packed("F32", (1,), [1.0])})
    world.folder("bad/activation", tensors, activation="quick_gelu")
    world.folder("bad/textonly", {n: t for n, t in tensors.items() if "visual" not in n})
    for name, content in {"empty": b"", "short": b"12345678", "ones": b"\xff" * 64}.items():
        write_files(bad / name, {CONFIG: world.config, WEIGHTS: content})
    cut = (tiny_folder() / WEIGHTS).read_bytes()[:-9]
    write_files(bad / "cut", {CONFIG: world.config, WEIGHTS: cut})
    configs = {"json": "{", "list": "[]", "nocfg": "{}", "huge": world.config}
    for name, text in configs.items():
        changed = text.replace('"size": 32', '"size": 64')
        write_files(bad / f"config-{name}", {CONFIG: changed})
        shutil.copy(tiny_folder() / WEIGHTS, bad / f"config-{name}" / WEIGHTS)
    write_files(bad / "two", {"a.safetensors": b"", "b.safetensors": b""})
    write_files(bad / "notclip", {"config.json": '{"model_type": "bert"}', "m.safetensors": b""})
    indexes = {"outside": "../x.safetensors", "absolute": "/etc/passwd", "gone": "gone.safetensors"}
    for name, shard in indexes.items():
        text = json.dumps({"weight_map": {"visual.a": shard}})
        write_files(bad / f"index-{name}", {"model.safetensors.index.json": text})
    write_files(bad / "index-empty", {"model.safetensors.index.json": '{"weight_map": {}}'})
    for seed in (1, 2):
        tensors = llama(seed)
        lacking = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
        more = {"extra.weight": packed("F32", (2,), [1.0, 2.0])}
        more["model.norm.weight"] = packed("F32", (9,), [1.0] * 9)
        write_llama(bad / f"misfit{seed}", {**lacking, **more})
        write_llama(bad / f"nan{seed}", with_numbers(tensors, "lm_head.weight", math.nan))
        write_llama(bad / f"inf{seed}", with_numbers(tensors, "lm_head.weight", math.inf))
        write_llama(bad / f"half{seed}", llama(seed, "F16"))
    module = "visual.transformer.resblocks.1.mlp.c_fc"
    adapters: dict[str, dict[str, object]] = {
        "dora": {"use_dora": True},
        "bias": {"bias": "all"},
        "rank": {"r": 5},
        "surprise": {"surprise": True},
        "alpha": {"lora_alpha": None},
        "pattern": {"rank_pattern": {"(": 3}},
        "kind": {"peft_type": "LOKR"},
    }
    for name, changes in adapters.items():
        _write_adapter(bad / f"adapter-{name}", module, 384, 96, **changes)
    _write_adapter(bad / "adapter-shape", module, 383, 96)
    _write_adapter(bad / "adapter-place", "visual.nowhere", 384, 96)
    (_write_adapter(bad / "adapter-alone", module, 384, 96) / "adapter_config.json").unlink()


def _write_bad_vectors(world: World, bad: Path) -> None:
    path = world.work / "vectors" / "cars.safetensors"
    if not path.exists():
        return
    tensors, metadata = read_tensors(path)
    ill = with_numbers(tensors, "visual.proj", math.nan)
    write_tensors(bad / "vectors" / "nan.safetensors", ill, metadata)
    other = with_numbers(tensors, "visual.proj", 99.0)
    write_tensors(bad / "vectors" / "norm.safetensors", other, metadata)
    lacking = {name: tensor for name, tensor in tensors.items() if name != "visual.proj"}
    write_tensors(bad / "vectors" / "lacks.safetensors", lacking, metadata)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "base": lambda header: header.update(fingerprint="0f" * 32),
        "damaged": lambda header: header["blocks"][0].update(norm=math.nan),
        "format": lambda header: header.update(version=99),
        "scope": lambda header: header.update(scope="text"),
        "empty": lambda header: header.clear(),
    }
    for name, change in changes.items():
        header = json.loads(metadata["atlas"])
        change(header)
        path = bad / "vectors" / f"{name}.safetensors"
        write_tensors(path, tensors, {"format": "pt", "atlas": json.dumps(header)})


def _write_bad_runs(bad: Path) -> None:
    config = '{"command": "fit", "recipe": {"seed": 0}, "data": [{"name": "photos"}]}'
    row = {"stage": "all", "number": 1, "epoch": 1, "loss": 0.25, "accuracy": 0.5, "rate": 0.1}
    recipe = "merge_method: atlas\nbase_model: m\nvectors: [{name: cars, file: f, sha256: a}]\n"
    whole = {
        "config.json": config,
        "metrics.jsonl": json.dumps(row) + "\n",
        "recipe.yaml": f"# Learned.\n{recipe}coefficients: {{cars: {{visual.proj: 0.5}}}}\n",
        "result.json": '{"zero_shot": 0.5, "learned": 1.0}',
    }
    changes = {
        "whole": {},
        "json": {"config.json": "{"},
        "list": {"config.json": "[]"},
        "config": {"config.json": '{"command": "fit", "recipe": {}}'},
        "metrics": {"metrics.jsonl": "nonsense\n"},
        "row": {"metrics.jsonl": '{"loss": 1}\n'},
        "result": {"result.json": '{"accuracy": 3, "tasks": []}'},
        "classes": {"result.json": '{"classes": [1]}'},
        "recipe": {"recipe.yaml": f"{recipe}coefficients: {{cars: {{visual.proj: big}}}}\n"},
        "linear": {"recipe.yaml": "merge_method: linear\nmodels: []\n"},
    }
    for name, files in changes.items():
        write_files(bad / "runs" / name, {**whole, **files})
    begun = {name: whole[name] for name in ("config.json", "metrics.jsonl")}
    write_files(bad / "runs" / "begun", begun)
    tables = {
        "none": "{}",
        "number": '{"a": 1}',
        "text": '{"a": {"b": "c"}}',
        "nothing": '{"a": {}}',
        "nonsense": "{nonsense",
        "infinite": '{"a": {"b": Infinity}}',
    }
    write_files(bad / "tables", {f"{name}.json": text for name, text in tables.items()})
    scores = {
        "words": "top-1: 90 %",
        "list": "[]",
        "row": '{"atlas": "0", "models": [], "results": [{"model": "m"}]}',
        "none": '{"atlas": "0", "models": [], "results": []}',
    }
    write_files(bad / "scores", {f"{name}.json": text for name, text in scores.items()})


class _Hostile:
    """What would run a program if it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch marker",)


def _write_bad_pickles(world: World, bad: Path) -> None:
    whole = (world.work / "in" / "pickled" / "state.pt").read_bytes()
    write_files(
        bad / "pickles",
        {
            "hostile.pt": pickle.dumps({"state_dict": _Hostile()}),
            "numbers.pt": pickle.dumps({"a": 1}),
            "cut.pt": whole[: len(whole) // 2],
            "garbage.pt": bytes(range(256)),
            "page.pt": "<!doctype html><html></html>",
            "pointer.pt": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "empty.pt": b"",
            "empty.safetensors": b"",
        },
    )


SOME = "--data builtin:digits --shots 1 --workers 0"
FIT = f"fit in/shots --vectors vectors --epochs 1 --min-steps 1 --augment none {TINY}"
NEGATE = f"negate in/shots --control in/control --vectors vectors --epochs 1 --min-steps 1 {TINY}"
ADD = f"add in/shots in/control --vectors vectors --epochs 1 --min-steps 1 {TINY}"
TTA = f"tta in/shots --vectors vectors --epochs 1 --batch-size 8 {TINY}"
TUNE = f"finetune in/pets --epochs 1 --batch-size 9 --augment none {TINY}"
EXTRACT = "extract builtin:tiny cars -o out/x.safetensors"
MERGE = f"merge recipes/merge/linear.yaml {ROOM}"

GENERAL = """
evall
merg
--jsn
eval
eval builtin:tiny
eval builtin:tiny --dat x
eval builtin:tiny --data
eval builtin:tiny --data missing/
eval builtin:tiny --data nowhere
eval builtin:tiny --data builtin:digit
eval builtin:tiny --data builtin:
eval builtin:tiny --data recipes/README.md
eval builtin:tiny --data csv:nowhere.csv
eval nowhere.yaml
eval recipes/add.yaml
eval recipes/merge/ties.yaml
eval recipes/README.md --data builtin:digits
draw digits -o out/x
draw builtin:digit -o out/x
draw builtin:digits
draw builtin:digits -o in/shots
draw builtin:digits -o nowhere/at/all
draw builtin:digits -o out/x --shots 0
draw builtin:digits -o out/x --shots 100000
demo --jsn
demo -o nowhere/at/all/x --force --keep more
report
report out/fit-block
report nowhere -o out/x.html
report in/shots -o out/x.html
report bad/runs/json -o out/x.html
report bad/runs/list -o out/x.html
report bad/runs/config -o out/x.html
report bad/runs/metrics -o out/x.html
report bad/runs/row -o out/x.html
report bad/runs/result -o out/x.html
report bad/runs/classes -o out/x.html
report bad/runs/recipe -o out/x.html
report bad/runs/linear -o out/x.html
report bad/runs/whole -o nowhere/x.html
inspect
inspect missing.safetensors
inspect vectors/missing.safetensors
inspect ./missing
inspect builtin:tyni
inspect - -
inspect -
inspect builtin:tiny --arch ViT-B-3
inspect builtin:tiny --plot x.gif
inspect builtin:tiny --plot nowhere/x.png
inspect builtin:tiny --plot out/x.png
inspect builtin:tiny --jsn
inspect builtin:tiny in/m1 --json
inspect vectors/cars.safetensors builtin:tiny
inspect out/fit-block out/tta-ufm
inspect out/fit-block --plot out/x.pdf
inspect bad/runs/begun
inspect bad/runs/json
inspect bad/runs/recipe
inspect bad/runs/linear/recipe.yaml
inspect recipes/fit.yaml
inspect recipes/add.yaml
inspect bad/tables/none.json
inspect bad/tables/number.json
inspect bad/tables/text.json
inspect bad/tables/nothing.json
inspect bad/tables/nonsense.json
inspect bad/tables/infinite.json
inspect bad/vectors/damaged.safetensors
inspect bad/vectors/format.safetensors
inspect bad/vectors/lacks.safetensors
inspect bad/vectors/empty.safetensors
inspect bad/vectors/nan.safetensors
inspect bad/vectors/base.safetensors vectors/cars.safetensors
inspect bad/vectors/base.safetensors out/extract-rank.safetensors vectors/cars.safetensors --json
inspect bad/empty
inspect bad/cut
inspect bad/two
inspect bad/index-gone
inspect bad/pickles/hostile.pt
"""

OF_EVAL = """
./missing
nonsense
builtin:tyni
builtin:
ViT-B-33/openai
ViT-B-32/opennai
ViT-B-32
vit-b-32/openai
ViTB32
owner/name@
owner//x
me/clip
me/clip@v1
hf://me/clip
ViT-B-32/openai
recipes
recipes/README.md
in/tuned/cars.safetensors
in/m1
bad/shape
bad/lacks
bad/more
bad/activation
bad/textonly
bad/empty
bad/short
bad/ones
bad/cut
bad/config-json
bad/config-list
bad/config-nocfg
bad/config-huge
bad/two
bad/notclip
bad/index-outside
bad/index-absolute
bad/index-gone
bad/index-empty
bad/pickles/hostile.pt
vectors/cars.safetensors
out/extract-fp16.safetensors
builtin:tiny --device gpu
builtin:tiny --device cuda
builtin:tiny --device mps
builtin:tiny --split tset
builtin:tiny --template a
builtin:tiny --template '{} {}'
builtin:tiny --arch ViT-B-3
builtin:tiny --batch-size 0
builtin:tiny --batch-size x
builtin:tiny --workers -1
builtin:tiny --shots 0
builtin:tiny --shots 9999
builtin:tiny --seed -1
builtin:tiny --text ./missing
builtin:tiny --predictions out/no/p.jsonl
builtin:tiny --predictions out
in/tuned/cars.safetensors --arch ViT-B-32
"""

OF_DATA = """
in/flat
bad/nothing
bad/names
bad/utf8
bad/templates
bad/broken
bad/broken --skip-broken
bad/truncated
bad/notes
bad/loose
bad/emu
bad/onlytrain
bad/missing
bad/one
bad/onlytrain --split val
in/shots --split train
in/shots --shots 9
csv:bad/column.csv
csv:bad/rows.csv
csv:bad/short.csv
csv:bad/long.csv
csv:bad/blank.csv
csv:bad/quote.csv
csv:bad/split.csv
csv:bad/gone.csv
in/shots.csv
builtin:digits --split vall
"""

OF_EXTRACT = """
--dtype fp61
--scope visaul
--rank 0
--rank x
--rank 4 --energy 0.9
--energy 1.5
--energy nan
--rank 4 --dtype int8
--scale 0
--scale nan
--scale x
--ignore (
--arch ViT-B-33
--json -o -
signs
signs --name x
signs -o -
cars -o out/new
builtin:tyni
./missing.pt
-o vectors/cars.safetensors
-o cars/open_clip_model.safetensors --force
-o nowhere/at/all/x.safetensors
-o recipes/README.md
-o out/x.pt
--allow-global os.system
--forc
"""

FROM_TINY = """
in/base
in/m1
bad/nan
bad/lacks
bad/lacks --ignore ln_pre ln_post
bad/more
bad/shape
bad/activation
bad/textonly
bad/ones
bad/cut
bad/two
bad/index-outside
bad/index-gone
bad/adapter-dora
bad/adapter-bias
bad/adapter-rank
bad/adapter-surprise
bad/adapter-alpha
bad/adapter-pattern
bad/adapter-kind
bad/adapter-shape
bad/adapter-place
bad/adapter-alone
in/adapter --rank 2
in/adapter --dtype int8
in/adapter --scope text
vectors/cars.safetensors --scope text
out/extract-rank.safetensors --dtype int8
bad/vectors/base.safetensors
bad/vectors/damaged.safetensors
bad/vectors/nan.safetensors
in/pickled/when.pt
in/pickled/head.pt
in/pickled/h.pt
bad/pickles/hostile.pt
bad/pickles/numbers.pt
bad/pickles/cut.pt
bad/pickles/garbage.pt
bad/pickles/page.pt
bad/pickles/pointer.pt
bad/pickles/empty.pt
bad/pickles/empty.safetensors
me/clip
in/clip1
"""

OF_LEARNING = """
--shots few
--shots 0
--shots 9
--shots 1.5
--vectors nowhere.safetensors
--vectors builtin:digit
--vectors in/shots
--vectors recipes/README.md
--vectors vectors vectors/cars.safetensors
--vectors bad/vectors/nan.safetensors
--vectors bad/vectors/base.safetensors
--vectors bad/vectors/norm.safetensors
--vectors bad/vectors/lacks.safetensors
--vectors bad/vectors/scope.safetensors
--vectors bad/pickles/empty.safetensors
--lr 1e30 --epochs 4
--lr 0
--lr nan
--lr inf
--lr fast
--select best
--select same
--select val
--select val:x
--select val:nowhere
--select val:out/terrain
--select holdout --shots 1
--select kfold --shots 1
--method guess
--method isotropic
--granularity layer
--granularity partition:0
--group (
--memory much
--penalty l3:1
--augment mirror
--augment mild
--schedule steps
--epochs 0
--epochs 2.5
--batch-size -1
--accumulate 0
--min-steps 0
--clip -1
--weight-decay -0.1
--weight-decay inf
--resume
--resume -o out/nowhere/x
--model builtin:tny
--model cars
--model me/clip
--model bad/shape
--text ./missing
--arch ViT
--split tset
--split val
--template x
--device gpu
--threads 0
--seed -1
-o recipes
-o recipes/README.md
-o nowhere/at/all
-o bad/runs/json --resume
-o bad/runs/whole --resume
--granularity partition:700
--epochs 0 --select x --shots 0 --memory y --clip 0
--epoch 3
"""

DATA_OF_LEARNING = ("nowhere", "in/flat", "bad/one", "bad/broken", "bad/onlytrain", "bad/names")

OF_NEGATE = """
--control nowhere
--control in/flat
--control in/shots
--keep 0
--keep inf
--forget it
--compare tis
--compare ties:densty=1
--compare passthrough
"""

OF_ADD = """
--objective loss
--init inf
--clamp 1
--clamp 1:0
--ties 2
--ties 0.2
--individual in/shots
--individual cars=90
--individual in/shots=190
--compare tis
--compare ties:densty=1
--compare ties:density=x
--compare slerp
--disentanglement
in/shots
"""

OF_TTA = """
--classes cat
--classes cat,dog,cat
--classes nowhere.txt
--classes in/shots.csv
--trusted-per-class 0
--trusted-per-class x
--objective tent
--tune head
--tune layernorm
--tune layernorm --method search -o out/x
--tune layernorm --linearised -o out/x
--threshold 2
--threshold a:b
--power 0
--augment none
--prior 1,2
--prior cats
--prior 0.5,0.5,0
--shots 4
--select kfold
--predictions -
--predictions out/no/p.jsonl
--online
--lr 1e30 --epochs 4 --select last
--vectors nowhere
--epochs 0 --power -1 --prior x
"""

OF_FINETUNE = """
--resume
--tune head
--tune head -o out/x
--lora 2 --tune layernorm -o out/x
--lora 0 -o out/x
--lora 2 --linearised -o out/x
--select val -o out/x
--steps 3 -o out/x
--warmup -1 -o out/x
--lr 1e30 -o out/x
--lr 0 -o out/x
--model builtin:tny -o out/x
--model cars/open_clip_model.safetensors -o out/x
in/pets -o out/x
in/shots --vector out/x.safetensors
--vector out/x.pt
--vector out/x.safetensors --vectors-dir out/x
--vector nowhere/x.safetensors
--vectors-dir nowhere/at/all
--augment mild -o out/x
--shots few -o out/x
--batch-size 0 -o out/x
-o recipes
-o out/fit-block
-o out/x --epoch 3
"""

OF_MERGE = """
merge
merge nowhere.yaml -o out/x
merge recipes/README.md -o out/x
merge recipes/eval.yaml -o out/x
merge recipes/add.yaml -o out/x
merge bad/utf8/classnames.txt -o out/x
merge in/shots/cat/0.png -o out/x
merge recipes/merge/linear.yaml
merge recipes/merge/linear.yaml -o out/x --explain x
merge recipes/merge/linear.yaml --dry-run --explain (
merge recipes/merge/linear.yaml -o out/x --max-shard-size big
merge recipes/merge/linear.yaml -o out/x --memory 0
merge recipes/merge/linear.yaml -o out/x --memory much
merge recipes/merge/linear.yaml -o out/x --threads 0
merge recipes/merge/linear.yaml -o out/x --push name
merge recipes/merge/linear.yaml -o out/x --device gpu
merge recipes/merge/linear.yaml -o out/x --device cuda
merge recipes/merge/linear.yaml -o cars --force
merge recipes/merge/linear.yaml -o recipes
merge recipes/merge/linear.yaml -o recipes --force --memory 8GB
merge recipes/merge/linear.yaml -o recipes/README.md --memory 8GB
merge recipes/merge/linear.yaml -o nowhere/at/all
merge recipes/merge/linear.yaml -o out/x --evaluation nowhere.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/words.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/list.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/row.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/none.json
merge recipes/merge/linear.yaml -o out/x --dryrun
merge bad/runs/whole/recipe.yaml -o out/x --memory 8GB
merge bad/runs/recipe/recipe.yaml -o out/x --memory 8GB
merge bad/runs/linear/recipe.yaml -o out/x --memory 8GB
"""


def mistakes() -> Iterator[Case]:
    """Command lines that are wrong, or whose inputs are."""
    lines = _lines(GENERAL)
    for line in _lines(OF_EVAL):
        model, _, more = line.partition(" ")
        lines.append(f"eval {model} {SOME} {more}".strip())
    lines += [f"eval builtin:tiny --workers 0 --data {line}" for line in _lines(OF_DATA)]
    lines += [f"{EXTRACT} {line}" for line in _lines(OF_EXTRACT)]
    tiny = "extract builtin:tiny -o out/x.safetensors -q"
    lines += [f"{tiny} {line}" for line in _lines(FROM_TINY)]
    lines += [
        "extract builtin:tiny",
        "extract in/tuned/cars.safetensors builtin:tiny -o out/x.safetensors",
        "extract in/m1 in/m2 -o out/x.safetensors",
        "extract bad/pickles/hostile.pt builtin:tiny -o out/x.safetensors --arch ViT-B-32",
        "extract bad/nan cars -o out/x.safetensors",
        "extract in/pickled/head.pt cars -o out/x.safetensors --arch ViT-B-32",
    ]
    lines += [_laid_over(FIT, line) for line in _lines(OF_LEARNING)]
    shared = [line for line in _lines(OF_LEARNING) if line.split()[0] in _SHARED]
    lines += [_laid_over(base, line) for base in (NEGATE, ADD) for line in shared]
    for base in (FIT, NEGATE, ADD, TTA, TUNE.replace("in/pets", "in/shots") + " -o out/x"):
        lines += [base.replace("in/shots", data, 1) for data in DATA_OF_LEARNING]
    lines += [f"{NEGATE} {line}" for line in _lines(OF_NEGATE)]
    lines += [f"{ADD} {line}" for line in _lines(OF_ADD)]
    lines += [_laid_over(TTA, line) for line in _lines(OF_TTA)]
    lines += [f"{TUNE} {line}" for line in _lines(OF_FINETUNE)]
    lines += ["fit", "fit in/shots", f"fit in/shots {TINY}", "fit in/shots --vectors vectors"]
    lines += [f"fit in/Cars --vectors vectors --epochs 1 {TINY}", "negate in/shots", "add"]
    lines += [f"negate in/shots --vectors vectors {TINY}", "tta", "tta --classes a,b"]
    lines += [f"tta in/shots {TINY}", "finetune", "finetune in/pets", TUNE, "finetune x y"]
    lines += [f"finetune bad/classes --epochs 1 {TINY} -o out/x", "fit nowhere.yaml"]
    lines += [f"tta --online {TWO} {TINY}", f"tta --online --classes a,b {TINY}"]
    lines += ["fit recipes/add.yaml", "add recipes/few_shot.yaml", "negate recipes/add.yaml"]
    lines += ["tta recipes/negate.yaml", "finetune recipes/tta.yaml", "fit recipes/README.md"]
    lines += [f"fit recipes/few_shot_clip.yaml {TINY}", "tta recipes/tta_clip.yaml"]
    lines += ["finetune recipes/finetune_clip.yaml -o out/x", "eval recipes/eval_clip.yaml"]
    lines += _lines(OF_MERGE)
    for line in dict.fromkeys(lines):
        yield case(f"mistake {line}", line.replace("(", "'('"))
    table = (b"", b"nonsense", bytes(100))
    for number, content in enumerate(table):
        yield case(f"mistake inspect stdin {number}", "inspect -", stdin=content)
    yield case("mistake inspect cut", "inspect -", stdin=Path("bad/cut") / WEIGHTS)
    yield case("mistake inspect model", "inspect -", stdin=tiny_folder() / WEIGHTS)
    yield case("mistake utf8", "merge - -o out/x", stdin=b"\xff\xfe")


_SHARED = ("--shots", "--vectors", "--lr", "--select", "--method", "--epochs", "--model", "-o")


def alone(cases: Iterable[Case]) -> Iterator[Case]:
    """Cases that meet nothing that others have written by mistake."""
    for one in cases:
        for path in (*Path("out").glob("x*"), Path("nowhere")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield one


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def _laid_over(base: str, line: str) -> str:
    """A command line with some of its options given otherwise."""
    option = line.split()[0]
    if option == "--vectors":
        return f"{base.replace(' --vectors vectors', '')} {line}"
    return f"{base} {line}"


# Recipes that are wrong -----------------------------------------------------------------------

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
            text = _as_yaml({**good, key: value})
            yield case(f"recipe {command} with {key}", f"{command} -{more}", stdin=text)
        for key in good:
            text = _as_yaml({name: value for name, value in good.items() if name != key})
            yield case(f"recipe {command} without {key}", f"{command} -{more}", stdin=text)
        text = _as_yaml({**good, **wrong})
        yield case(f"recipe {command} all wrong", f"{command} -{more}", stdin=text)
    text = _as_yaml({**GOOD["fit"], "epochs": 0, "select": "x"})
    yield case("recipe fit beside flags", "fit - --shots 0 --memory x", stdin=text)
    text = _as_yaml({**GOOD["eval"], "split": 3})
    yield case("recipe eval beside flags", "eval - --split val", stdin=text)


def _as_yaml(found: Mapping[str, Any]) -> str:
    return json.dumps(found).replace("Infinity", ".inf")


ONE = "parameters: {weight: 1}"
PAIR = f"models: [{{model: builtin:tiny, {ONE}}}, {{model: ./in/m1, {ONE}}}]"
TIES = "merge_method: ties\nbase_model: ./in/m0\nmodels:\n  - {model: ./in/m1, parameters: "
ATLAS = "merge_method: atlas\nbase_model: builtin:tiny\nvectors: [vectors/cars.safetensors]\n"
PASS = "merge_method: passthrough\nslices: "
SUMS = "merge_method: linear\nparameters: {weight: 1}\nmodels: "
BROKEN = {
    "unknown method": f"merge_method: tise\n{PAIR}",
    "method of one model": f"merge_method: nearswap\n{PAIR}",
    "misspelt keys": f"merge_method: linear\n{PAIR}\ndtyp: float32\noutdtype: float32",
    "wrong type": f"merge_method: linear\n{PAIR}\nseed: one",
    "negative seed": f"merge_method: linear\n{PAIR}\nseed: -1",
    "key twice": f"merge_method: linear\nmerge_method: ties\n{PAIR}",
    "missing base": "merge_method: slerp\nmodels: [{model: ./in/m1}]\nparameters: {t: 0.5}",
    "short gradient": "merge_method: slerp\nbase_model: ./in/m0\nmodels: [{model: ./in/m1}]\n"
    "parameters: {t: [0.5]}",
    "no models": "merge_method: linear\nmodels: []",
    "models and slices": f"merge_method: linear\n{PAIR}\nslices: []",
    "too many models": "merge_method: slerp\nbase_model: ./in/m0\nparameters: {t: 0.5}\n"
    "models: [{model: ./in/m1}, {model: ./in/m2}]",
    "too few models": "merge_method: nuslerp\nmodels: [{model: ./in/m1, parameters: {weight: 1}}]",
    "negative density": f"{TIES}{{weight: 1, density: -0.5}}}}",
    "density in a filter": f"{TIES}{{weight: 1, density: [{{filter: mlp, value: [0, 7]}}]}}}}",
    "key of a filter": f"{TIES}{{weight: 1, density: [{{fitler: mlp, value: 1}}]}}}}",
    "filter without value": f"{TIES}{{weight: 1, density: [{{filter: mlp}}]}}}}",
    "filter of a number": f"{TIES}{{weight: 1, density: [{{filter: 3, value: 1}}, 2]}}}}",
    "value of a table": f"{TIES}{{weight: 1, density: {{value: {{a: 1}}}}}}}}",
    "not a table": f"{TIES}7}}",
    "no parameters": f"{TIES}{{}}}}",
    "unreadable references": f"{SUMS}[{{model: ./nowhere}}, {{model: builtin:tny}},"
    " {model: a b/c}, {model: ./in/m1+./nowhere}, {model: owner/name@}]",
    "entries of other types": f"{SUMS}[x, 7, {{}}, {{model: 7}}, {{model: ./in/m1, parameters: 7}},"
    " {model: ./in/m2, weight: 1}, null]",
    "parameter in the wrong place": "merge_method: linear\n"
    "models: [{model: ./in/m1, parameters: {weight: 1, normalize: false}}]",
    "missing and unknown parameters": "merge_method: linear\n"
    "models: [{model: ./in/m1, parameters: {wieght: 1}}, {model: ./in/m2}]",
    "base without weight": "merge_method: linear\nbase_model: ./in/m0\n"
    "models: [{model: ./in/m1, parameters: {weight: 1}}]",
    "two slices": f"{PASS}\n  - sources: [{{model: ./in/m1, layer_range: [0, 8]}}]\n"
    "  - sources: [{model: ./in/m2, layer_range: [4, 12]}]",
    "slice of some layers": f"{PASS}[{{sources: [{{model: ./in/m1, layer_range: [2, 8]}}]}}]",
    "slice of too many layers": f"{PASS}[{{sources: [{{model: ./in/m1, layer_range: [0, 8]}}]}}]",
    "slice without sources": f"{PASS}[{{sources: []}}]",
    "slices of nothing": f"{PASS}[]",
    "slices of other types": f"{PASS}[{{sources: x, base_model: 7, parameters: [], more: 1}}]",
    "sources of other types": f"{PASS}[{{sources: [x, {{model: 1, layer_range: [a]}},"
    " {layer_range: 3}]}]",
    "residual weight": f"{PASS}[{{sources: [{{model: ./in/m1, layer_range: [0, 3]}}],"
    " residual_weight: 1}]",
    "what mergekit has": f"merge_method: linear\n{PAIR}\ntokenizer_source: union\n"
    "chat_template: auto\nmodules: {}\nexperts: []\ntokenizer: {source: union}\ngate_mode: x\n",
    "wrong words": f"merge_method: linear\n{PAIR}\ndtype: bfloat61\nout_dtype: int8\n"
    "parameters: {normalize: maybe}",
    "a model twice": f"{SUMS}[{{model: ./in/m1}}, {{model: ./in/m1}}]",
    "coefficients elsewhere": f"merge_method: linear\n{PAIR}\ncoefficients: {{}}\nscope: all",
    "vectors without coefficients": "merge_method: atlas\nbase_model: builtin:tiny\n"
    "vectors: [none.safetensors]\nmodels: []",
    "linearised": "merge_method: atlas\nbase_model: ./in/m0\nvectors: []\ncoefficients: {}\n"
    "linearised: true",
    "atlas alone": "merge_method: atlas",
    "unknown vector": f"{ATLAS}coefficients: {{three: {{}}}}",
    "unknown block": f"{ATLAS}granularity: vector\ncoefficients: {{cars: {{al: 1.0}}}}",
    "unknown granularity": f"{ATLAS}granularity: layer\nscope: x\ncoefficients: {{}}",
    "infinite coefficients": f"{ATLAS}coefficients: {{cars: {{a: .inf, b: .nan}}}}",
    "coefficients of text": f"{ATLAS}coefficients: {{cars: {{a: big, b: null}}, 3: 4, x: 0.5}}",
    "coefficients of numbers": f"{ATLAS}coefficients: {{cars: {{3: 1.0, true: 2.0}}}}",
    "no such coefficients": f"{ATLAS}coefficients: nowhere.json",
    "coefficients of nothing": f"{ATLAS}coefficients: bad/tables/none.json",
    "coefficients of nonsense": f"{ATLAS}coefficients: bad/tables/nonsense.json",
    "coefficients of other shape": f"{ATLAS}coefficients: vectors/signs.safetensors",
    "another scope": f"{ATLAS}scope: text\ngranularity: vector\ncoefficients: {{cars: {{all: 1}}}}",
    "another base": "merge_method: atlas\nbase_model: ./cars\nvectors: [vectors/cars.safetensors]\n"
    "granularity: vector\ncoefficients: {cars: {all: 0.5}}",
    "another file": "merge_method: atlas\nbase_model: builtin:tiny\ngranularity: vector\n"
    f"vectors: [{{file: vectors/cars.safetensors, name: cars, sha256: '{'00' * 32}'}}]\n"
    "coefficients: {cars: {all: 0.5}}",
    "another name": "merge_method: atlas\nbase_model: builtin:tiny\ngranularity: vector\n"
    "vectors: [{file: vectors/cars.safetensors, name: bars}]\ncoefficients: {bars: {all: 0.5}}",
    "vectors of other types": "merge_method: atlas\nbase_model: 7\ncoefficients: [1]\n"
    "vectors: [7, {name: a}, {file: 1, name: 2, sha256: 3}, {fiel: x}]\ngroups: x\nlinearised: 1",
    "bad vector": "merge_method: atlas\nbase_model: builtin:tiny\ngranularity: vector\n"
    "vectors: [bad/vectors/nan.safetensors]\ncoefficients: {cars: {all: 0.5}}",
    "bad group": f"{ATLAS}groups: ['(']\ncoefficients: {{cars: {{}}}}",
    "locks of other types": f"merge_method: linear\n{PAIR}\n"
    "locked: {a: 1, b: {sha256: x}, c: {commit: 3}, d: {sha256: {e: 1}, more: 2}}",
    "another lock": f"{SUMS}[{{model: ./in/m1}}]\n"
    f"locked: {{./in/m1: {{sha256: {{model.safetensors: '{'00' * 32}'}}}}}}",
    "lock of what is gone": f"{SUMS}[{{model: ./in/m1}}]\n"
    f"locked: {{./in/m7: {{sha256: {{model.safetensors: '{'00' * 32}'}}}}}}",
    "models that do not fit": f"{SUMS}[{{model: ./in/m1}}, {{model: ./bad/misfit2}}]",
    "models of two kinds": f"{SUMS}[{{model: ./in/m1}}, {{model: builtin:tiny}}]",
    "two dtypes": f"{SUMS}[{{model: ./in/m1}}, {{model: ./bad/half2}}]",
    "nan": f"{SUMS}[{{model: ./in/m1}}, {{model: ./bad/nan2}}]",
    "nan in ties": "merge_method: ties\nbase_model: ./bad/nan1\nparameters: {weight: 1}\n"
    "models: [{model: ./in/m2}]",
    "infinite": f"{SUMS}[{{model: ./bad/inf1}}, {{model: ./in/m2}}]",
    "overflow": "merge_method: linear\nparameters: {weight: 1.0e+6, normalize: false}\n"
    "out_dtype: float16\nmodels: [{model: ./in/m1}, {model: ./in/m2}]",
    "a filter for few": "merge_method: linear\nmodels: [{model: ./in/m1, parameters: "
    "{weight: [{filter: mlp, value: 1}]}}]",
    "a whole model by layer": "merge_method: ties\nbase_model: ./in/b0\nmodels: [{model: ./in/b1}]"
    "\nparameters: {scope: model, weight: [0.1, 0.9], density: 0.3}",
    "density and epsilon": "merge_method: della\nbase_model: ./in/m0\nmodels: [{model: ./in/m1}]\n"
    "parameters: {weight: 1, density: 0.9, epsilon: 0.3}",
    "models that cancel out": "merge_method: multislerp\nmodels:\n"
    "- {model: ./in/m1, parameters: {weight: 1}}\n- {model: ./in/m2, parameters: {weight: -1}}",
    "offline": f"{SUMS}[{{model: me/one}}, {{model: me/two@main}}]",
    "an adapter that is none": "merge_method: passthrough\nmodels: [{model: ./in/m1+./in/m2}]",
    "an adapter of another": "merge_method: passthrough\nmodels: [{model: ./in/m1+./in/adapter}]",
}


def wrong_merges() -> Iterator[Case]:
    """Recipes of merges that are wrong, or whose models are."""
    for name, text in BROKEN.items():
        yield case(f"recipe merge: {name}", f"merge - -o out/x {ROOM}", stdin=text)
    for name in ("nan", "overflow"):
        line = f"merge - -o out/nonfinite-{name} --allow-nonfinite {ROOM}"
        yield case(f"merge allowing {name}", line, stdin=BROKEN[name])
    line = "merge recipes/merge/linear.yaml -o out/x --memory 100MB"
    yield case("merge in too little memory", f"{line} --threads 1")


PARAMETERS = (
    *words("weight density epsilon gamma scale threshold normalize rescale lambda int8_mask"),
    *words("scope rounding rescale_by elect zero_sign weigh divisor t nuslerp_flatten"),
    *words("nuslerp_row_wise normalize_weights eps max_iter tol filter_wise select_topk"),
    *words("alpha beta agreement common_space_fraction wieght"),
)


def wrong_parameters(work: Path) -> Iterator[Case]:
    """Every parameter of every method with a value of many kinds, for a model and for the merge."""
    values = {name: KINDS[name] for name in ("text", "less than zero", "a list of numbers", "null")}
    values |= {"a table": {"value": "x"}, "seven": 7, "infinite": math.inf, "true": True}
    values |= {"a gradient": [0, "x", 7], "filters": [{"filter": "a", "value": -1}, {"value": [2]}]}
    for path in sorted((work / "recipes" / "merge").glob("*.yaml")):
        for kind, value in values.items():
            table = dict.fromkeys(PARAMETERS, value)
            models = [{"model": "./in/m1", "parameters": table}, {"model": "./in/m2"}]
            keys = {"merge_method": path.stem, "base_model": "./in/m0", "models": models}
            text = _as_yaml({**keys, "parameters": table})
            yield case(f"parameters {path.stem} of {kind}", "merge - -o out/x", stdin=text)


# The command line -----------------------------------------------------------------------------


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """What is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="run every case and write what it did")
    maker.add_argument("file", type=Path)
    maker.add_argument("--keep", type=Path, metavar="DIR", help="work there and leave every file")
    maker.add_argument("--only", default="*", metavar="GLOB", help="cases with such names alone")
    comparer = commands.add_parser("compare", help="print what two files differ in")
    comparer.add_argument("first", type=Path)
    comparer.add_argument("second", type=Path)
    comparer.add_argument("--allowed", type=Path, metavar="FILE", help="CASE/FIELD -> reason")
    return parser.parse_args(None if arguments is None else list(arguments))


if __name__ == "__main__":
    given = parse()
    if given.command == "make":
        make(given.file, given.keep, given.only)
    else:
        sys.exit(compare(given.first, given.second, given.allowed))
