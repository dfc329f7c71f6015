"""Mutated files for every reader: `python -m tests.faults.fuzz --minutes 6 --seed 0`.

A reader gives a value or raises an AtlasError. Anything else is a finding: another exception, more
than ten seconds, a gigabyte of memory, a program, a socket, a write. Inputs that were found are
kept in tests/faults/corpus/TARGET/ and read again by tests/test_corpus.py.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
LONGEST, MOST = 10, 1 << 30  # seconds of the processor for an input, bytes of growth
WAITING = 300  # seconds in all: a reader that waits takes no time of the processor
TARGETS: dict[str, tuple[Callable[[bytes, Path], Any], Callable[[], list[bytes]]]] = {}
_events: list[str] = []


def target(seeds: Callable[[], list[bytes]]):
    def register(read: Callable[[bytes, Path], Any]):
        TARGETS[read.__name__] = (read, seeds)
        return read

    return register


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


# Readers --------------------------------------------------------------------------------------

MERGE = """merge_method: ties
base_model: builtin:tiny
models:
  - {model: builtin:tiny, parameters: {weight: [0.1, 1e3], density: 0.5}}
  - &m {model: ./other, parameters: {weight: {filter: attn, value: 2}}}
parameters: {lambda: 1.0, normalize: true}
dtype: float32
"""
LOCK = """merge_method: linear
models: [{model: a/b@0123456789, parameters: {weight: 1}}]
locked:
  a/b@0123456789: {sha256: {model.safetensors: "00"}, commit: "0123"}
"""
LEARNED = """merge_method: atlas
base_model: builtin:tiny
vectors: [{name: a, file: builtin:digits, sha256: "00"}]
coefficients: {a: {visual.proj: 0.5, visual.ln_post.weight: -1e-3}}
granularity: partition:3
"""
FIT = """model: builtin:tiny
vectors: [builtin:all]
data: photos
shots: 0.5
lr: 1e-1
groups: ['a(b)']
"""


@target(_texts(MERGE, LOCK, LEARNED))
def merge_recipe(content: bytes, folder: Path) -> Any:
    from atlas_cli.recipes.merge import read_merge

    return read_merge(content.decode("utf-8", "replace"), "recipe")


@target(_texts(FIT, FIT + "select: 'val:x'\npenalty: l1:0.1\nmemory: 2GiB\n"))
def learning_recipe(content: bytes, folder: Path) -> Any:
    from atlas_cli.recipes.fit import FitRecipe
    from atlas_cli.recipes.model import read_recipe

    return read_recipe(FitRecipe, content.decode("utf-8", "replace"))


def _vectors() -> list[bytes]:
    from atlas_cli.sources.locate import vector_file

    whole = vector_file("builtin:digits").read_bytes()
    small = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return [len(small).to_bytes(8, "little") + small + bytes(8), whole[:30_000]]


@target(_vectors)
def weights(content: bytes, folder: Path) -> Any:
    from atlas_cli.io.checkpoint import open_safetensors

    path = folder / "w.safetensors"
    path.write_bytes(content)
    return [tensor.read().shape for tensor in open_safetensors(path).values()]


@target(lambda: [_vectors()[1], Path(_digits()).read_bytes()])
def task_vector(content: bytes, folder: Path) -> Any:
    from atlas_cli.vectors.format import open_vector

    path = folder / "v.safetensors"
    path.write_bytes(content)
    return open_vector(path)


def _digits() -> str:
    from atlas_cli.sources.locate import vector_file

    return str(vector_file("builtin:digits"))


INDEX = json.dumps({"metadata": {"total_size": 8}, "weight_map": {"a": "w.safetensors"}})


@target(_texts(INDEX))
def index(content: bytes, folder: Path) -> Any:
    from atlas_cli.sources.locate import locate, parse_reference

    (folder / "model.safetensors.index.json").write_bytes(content)
    (folder / "w.safetensors").write_bytes(_vectors()[0])
    return locate(parse_reference(str(folder))).provenance()


def _config() -> list[bytes]:
    from atlas_cli.sources.locate import builtin_model

    return [(builtin_model("tiny") / "open_clip_config.json").read_bytes()]


@target(_config)
def model_config(content: bytes, folder: Path) -> Any:
    from atlas_cli.models.clip import build, read_blueprint
    from atlas_cli.sources.locate import locate, parse_reference

    (folder / "open_clip_config.json").write_bytes(content)
    (folder / "open_clip_model.safetensors").write_bytes(_vectors()[0])
    blueprint = read_blueprint(locate(parse_reference(str(folder))))
    return build(blueprint)


TRANSFORMERS = {
    "model_type": "clip",
    "projection_dim": 32,
    "vision_config": {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "image_size": 32,
        "patch_size": 16,
        "hidden_act": "gelu",
        "num_hidden_layers": 1,
    },
    "text_config": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "hidden_act": "gelu",
        "num_hidden_layers": 1,
    },
}


@target(lambda: [json.dumps(TRANSFORMERS).encode()])
def transformers_config(content: bytes, folder: Path) -> Any:
    from atlas_cli.models.clip import read_blueprint
    from atlas_cli.sources.locate import locate, parse_reference

    (folder / "config.json").write_bytes(content)
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 32, "crop_size": 32}
    (folder / "preprocessor_config.json").write_text(json.dumps(mean))
    (folder / "model.safetensors").write_bytes(_vectors()[0])
    return read_blueprint(locate(parse_reference(str(folder))))


@target(_texts("path,label,split\na.png,cat,test\nb.png,dog,test\n", "path\na.png\n"))
def table(content: bytes, folder: Path) -> Any:
    from atlas_cli.datasets import folders  # noqa: F401
    from atlas_cli.datasets.dataset import open_dataset

    (folder / "t.csv").write_bytes(content)
    return open_dataset(f"csv:{folder}/t.csv")


@target(_texts("a photo of a {}.\n{}\n", "cat\ndog\n"))
def names_and_templates(content: bytes, folder: Path) -> Any:
    from atlas_cli.datasets import folders  # noqa: F401
    from atlas_cli.datasets.dataset import open_dataset
    from atlas_cli.errors import AtlasError

    for name in ("cat", "dog"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "a.png").touch()
    found = []
    for name in ("classnames.txt", "templates.txt"):
        (folder / "classnames.txt").unlink(missing_ok=True)
        (folder / name).write_bytes(content)
        try:
            found.append(open_dataset(str(folder)))
        except AtlasError as problem:
            found.append(problem)
    return found


def _images() -> list[bytes]:
    from PIL import Image

    made = []
    picture = Image.effect_noise((40, 30), 90).convert("RGB")
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        file = io.BytesIO()
        picture.save(file, kind)
        made.append(file.getvalue())
    return made


@target(_images)
def image(content: bytes, folder: Path) -> Any:
    from atlas_cli.datasets.dataset import decode

    path = folder / "x.png"
    path.write_bytes(content)
    return decode(path)


def _pickles() -> list[bytes]:
    import torch

    made = []
    for legacy in (False, True):
        file = io.BytesIO()
        torch.save(
            {"state_dict": {"a": torch.ones(2, 2), "b": torch.zeros(3, dtype=torch.float16)}},
            file,
            _use_new_zipfile_serialization=not legacy,
        )
        made.append(file.getvalue())
    return made


@target(_pickles)
def pickle(content: bytes, folder: Path) -> Any:
    from atlas_cli.io.pickles import open_pickle

    path = folder / "w.pt"
    path.write_bytes(content)
    return [tensor.read().shape for tensor in open_pickle(path, allow=()).values()]


RESULT = json.dumps(
    {
        "atlas": "0.1",
        "unit": "percent",
        "models": [{"reference": "m", "sha256": {"f": "00"}}],
        "results": [
            {
                "model": "m",
                "data": "d",
                "split": "test",
                "images": 3,
                "skipped": 0,
                "top1": 50.0,
                "low": 10.0,
                "high": 90.0,
            }
        ],
    }
)


@target(_texts(RESULT))
def evaluation(content: bytes, folder: Path) -> Any:
    from atlas_cli.merging.model_card import read_evaluation

    return read_evaluation(content.decode("utf-8", "replace"), "result")


WORDS = {
    "version": "1.0",
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "unk_token": None,
    },
    "added_tokens": [{"id": 3, "content": "<s>", "special": True, "lstrip": False}],
}
SETTINGS = {
    "added_tokens_decoder": {"3": {"content": "<s>"}, "4": {"content": "<x>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}


@target(lambda: [json.dumps(one).encode() for one in (WORDS, SETTINGS)])
def tokenizer(content: bytes, folder: Path) -> Any:
    """Either of its files is mutated, and the other one is sound."""
    from atlas_cli.errors import AtlasError
    from atlas_cli.models.tokenizers import read_template, read_tokenizer, with_tokens

    found = []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for other in ("tokenizer.json", "tokenizer_config.json"):
            sound = WORDS if other == "tokenizer.json" else SETTINGS
            (folder / other).write_text(json.dumps(sound))
        (folder / name).write_bytes(content)
        for read in (
            lambda: with_tokens(read_tokenizer(folder, "here"), {"new": {"content": "new"}}),
            lambda: read_template(folder),
        ):
            try:
                found.append(read())
            except AtlasError as problem:
                found.append(problem)
    return found


ANSWER = {
    "id": "a/b",
    "sha": "0" * 40,
    "siblings": [{"rfilename": "config.json"}, {"rfilename": "model.safetensors", "size": 8}],
    "cardData": {"license": "mit", "base_model": "c/d"},
    "tags": ["clip"],
    "private": False,
}
COLLECTION = {
    "slug": "a/b-1",
    "title": "b",
    "owner": {"name": "a"},
    "items": [{"_id": "1", "type": "model", "id": "a/b", "position": 0}],
}


@target(lambda: [json.dumps(one).encode() for one in (ANSWER, COLLECTION)])
def hub_answer(content: bytes, folder: Path) -> Any:
    """What the Hub says of a model or a collection; the client gets it without a network."""
    from unittest.mock import patch

    from huggingface_hub import constants

    from atlas_cli.errors import AtlasError
    from atlas_cli.sources import hub

    found: list[Any] = [hub]
    with patch.object(constants, "HF_HUB_OFFLINE", False), _answered(content):
        for ask in (lambda: hub.ask("a/b", None), lambda: hub.ask_collection("a/b-1")):
            try:
                found.append(ask())
            except AtlasError as problem:
                found.append(problem)
        found.append(hub.ask_licence("a/b"))
    return found


@contextmanager
def _answered(content: bytes) -> Iterator[None]:
    """Whatever the client of the Hub asks for, this is the answer."""
    import huggingface_hub

    if not hasattr(huggingface_hub, "set_client_factory"):  # a client that stands on requests
        import requests

        class Answering(requests.adapters.BaseAdapter):
            def send(self, request: Any, **more: Any) -> requests.Response:
                made = requests.Response()
                made.status_code, made.raw, made.url = 200, io.BytesIO(content), request.url
                made.request = request
                return made

            def close(self) -> None:
                pass

        def session() -> requests.Session:
            made = requests.Session()
            made.mount("https://", Answering())
            return made

        huggingface_hub.configure_http_backend(session)
        try:
            yield
        finally:
            huggingface_hub.configure_http_backend()
        return
    from huggingface_hub.utils import _http

    http = getattr(_http, "httpx2", None) or _http.httpx
    default_client_factory = _http.default_client_factory
    transport = http.MockTransport(lambda request: http.Response(200, content=content))
    huggingface_hub.set_client_factory(lambda: http.Client(transport=transport))
    try:
        yield
    finally:
        huggingface_hub.set_client_factory(default_client_factory)


# Mutations ------------------------------------------------------------------------------------

ODD = [
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"0",
    b"1e309",
    b"NaN",
    b"9" * 400,
    b'""',
    b"\\u0000",
    b"\xff",
    b"../",
    b"/etc/passwd",
    b"\x00",
    b"true",
    b"1.5",
    b"{{",
    b"}}",
    b"*",
    b"&a",
    b"!!int ",
    b"\n",
    b"\x1b[31m",
    b"\xf0\x9f\x90\xb1",
    b"(a|a)*$",
]


VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 2**63, 10**400, -0.0, 1.5, 1e308, float("nan"), float("inf")),
    *("", "a", "../x", "/etc/passwd", "builtin:tiny", "hf:a/b", "1e5", "\x00", "\x1b[2J", "\ud800"),
    *("x" * 5000, "(a|a)*$", "{}", "a{99999999999}", "~nobody/x", "\n- b", "k:v"),
    *([], {}, [[]], [{}], {"a": []}, [None], ["a", "a"], {"": 1}, [1, "a", None]),
]


def mutated(content: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """A few random changes: odd values in a text that stays one, or any change of any bytes."""
    if dice.random() < 0.5 and (tree := _tree(content)) is not None:
        for _ in range(dice.choice((1, 1, 2, 4))):
            tree = _regrown(tree, dice)
        try:
            text = json.dumps(tree).encode()
            start = len(text).to_bytes(8, "little") if _start(content) else b""
            return start + text + _rest(content)
        except (ValueError, RecursionError):
            pass  # an integer of too many digits
    return _scrambled(content, dice, others)


def _start(content: bytes) -> bytes:
    """The length before the header of a weight file."""
    return content[:8] if content[8:9] == b"{" else b""


def _rest(content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    return content[8 + length :] if _start(content) else b""


def _tree(content: bytes) -> Any:
    """What a text of JSON or YAML holds; None if it is neither."""
    import yaml

    start = len(_start(content))
    text = content[start : len(content) - len(_rest(content))]
    try:
        found = json.loads(text) if text[:1] in b"{[" else yaml.load(text, yaml.CSafeLoader)
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return found if isinstance(found, dict | list) and found else None


def _regrown(node: Any, dice: random.Random) -> Any:
    """A copy of a tree in which one value, key or entry is another."""
    if not isinstance(node, dict | list) or not node or dice.random() < 0.15:
        return dice.choice(VALUES)
    if isinstance(node, list):
        place = dice.randrange(len(node))
        how = dice.randrange(6)
        if how == 0:
            return node + node[place : place + 1] * dice.choice((1, 1, 50))
        if how == 1:
            return node[:place] + node[place + 1 :]
        return [*node[:place], _regrown(node[place], dice), *node[place + 1 :]]
    key = dice.choice(list(node))
    how = dice.randrange(8)
    if how == 0:
        return {name: value for name, value in node.items() if name != key}
    if how == 1:
        return {**node, str(dice.choice(VALUES)): node[key]}
    return {**node, key: _regrown(node[key], dice)}


def _scrambled(content: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """A few random changes: bits, cuts, copies, odd values in the place of words."""
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        place = (
            dice.randrange(len(made) + 1)
            if dice.random() < 0.5
            else dice.randrange(min(len(made), 300) + 1)
        )
        length = int(2 ** dice.uniform(0, 6))
        how = dice.randrange(7)
        if how == 0 and made:
            made[place % len(made)] ^= 1 << dice.randrange(8)
        elif how == 1:
            del made[place : place + length]
        elif how == 2:
            made[place:place] = made[place : place + length] * dice.randint(1, 4)
        elif how == 3:
            made[place : place + dice.randint(0, 8)] = dice.choice(ODD)
        elif how == 4:
            made[place : place + length] = dice.randbytes(length)
        elif how == 5:
            other = dice.choice(others)
            start = dice.randrange(len(other) + 1)
            made[place:place] = other[start : start + length]
        else:
            word = _word_at(made, place)
            made[word[0] : word[1]] = dice.choice(ODD)
    return bytes(made)


def _word_at(content: bytearray, place: int) -> tuple[int, int]:
    start = stop = place
    while start > 0 and chr(content[start - 1]).isalnum():
        start -= 1
    while stop < len(content) and chr(content[stop]).isalnum():
        stop += 1
    return start, stop


# Running --------------------------------------------------------------------------------------


def problem_with(name: str, content: bytes, folder: Path) -> str | None:
    """What is wrong with how a reader takes an input; None if all is well."""
    from atlas_cli.errors import AtlasError

    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    _events.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _limit(LONGEST, WAITING)
    try:
        TARGETS[name][0](content, folder)
    except AtlasError:
        pass
    except _Late:
        return f"more than {LONGEST} s"
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:300]
    finally:
        _limit(0, 0)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > MOST:
        return "more than a gigabyte"
    own = (str(folder), tempfile.gettempdir(), os.environ.get("ATLAS_CACHE", str(folder)))
    strange = [event for event in _events if not any(place in event for place in own)]
    return f"did {strange[0]}" if strange else None


class _Late(BaseException):
    pass


def _limit(seconds: int, waiting: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(waiting)


def _late(number: int, frame: object) -> None:
    raise _Late


STARTED = ("subprocess.Popen", "os.system", "socket.connect", "os.exec", "os.fork")
CHANGED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in (*STARTED, "os.posix_spawn", *CHANGED):
        _events.append(f"{event} {arguments}")
    elif (
        (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        and "__pycache__" not in str(arguments[0])
        and str(arguments[0]) != os.devnull
    ):
        _events.append(f"write {arguments[0]}")


def fuzz(name: str, seconds: float, seed: int, folder: Path) -> tuple[int, dict[str, bytes]]:
    """Try mutated inputs for so many seconds of this process; how many, and what was found."""
    dice = random.Random(f"{seed} {name}")
    corpus = [*TARGETS[name][1](), *(p.read_bytes() for p in sorted((CORPUS / name).glob("*")))]
    found: dict[str, bytes] = {}
    tried, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        content = mutated(dice.choice(corpus), dice, corpus)
        tried += 1
        if problem := problem_with(name, content, folder):
            kind = problem[:60]
            if kind not in found or len(content) < len(found[kind]):
                found[kind] = content
                print(f"{name}: {problem}", file=sys.stderr, flush=True)
    return tried, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of the processor, per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--keep", action="store_true", help="keep what is found in the corpus")
    given = parser.parse_args()
    for number in (signal.SIGALRM, signal.SIGPROF):  # nothing is late while libraries load
        signal.signal(number, signal.SIG_IGN)
    with tempfile.TemporaryDirectory() as name:  # and they may do anything
        for one, (_, seeds) in TARGETS.items():
            for content in seeds():
                problem_with(one, content, Path(name))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _late)
    sys.addaudithook(_hook)
    print("| reader | inputs | CPU seconds | findings |\n| --- | ---: | ---: | ---: |")
    worst = 0
    with tempfile.TemporaryDirectory(prefix="atlas-fuzz-") as name:
        os.environ["ATLAS_CACHE"] = str(Path(name) / "cache")
        tempfile.tempdir = str(Path(name) / "temporary")  # no other place may be written to
        folder = Path(name) / "input"
        for own in (folder, Path(tempfile.tempdir)):
            own.mkdir()
        for one in given.target or TARGETS:
            start = time.process_time()
            tried, found = fuzz(one, given.minutes * 60, given.seed, folder)
            print(
                f"| {one} | {tried} | {time.process_time() - start:.0f} | {len(found)} |",
                flush=True,
            )
            worst += len(found)
            for content in found.values() if given.keep else ():
                (CORPUS / one).mkdir(parents=True, exist_ok=True)
                (CORPUS / one / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
