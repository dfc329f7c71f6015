"""Pickled checkpoints: what their real producers write is read exactly, and nothing is run."""

from __future__ import annotations

import ast
import io
import json
import pickle
import random
import socket
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import hostile
import pytest
import torch
from hostile import HOSTILE, MARKER

import atlas_cli
from atlas_cli.errors import CheckpointError
from atlas_cli.io.pickles import open_pickle

Tensors = dict[str, torch.Tensor]
Write = Callable[[object, Path], None]

# What the authors of published task vectors pickled whole: classes that are not to be had here.
MODELING = """
from enum import Enum
import torch


def convert(image):
    return image


class Mode(Enum):
    BICUBIC = "bicubic"


class Block(torch.nn.Module):
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(3))

    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(4, 2)
        self.inner = Block.Inner()
        self.register_parameter("none", None)
        self.register_buffer("mask", torch.randn(2, 2), persistent=False)


class ImageEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.ModuleDict({"visual": torch.nn.Sequential(Block(), Block())})
        self.norm = torch.nn.BatchNorm2d(3)
        self.class_embedding = torch.nn.Parameter(torch.randn(4))
        self.preprocess = [convert, Mode.BICUBIC, torch.float32, torch.Size([2, 3])]
        self.tied = self.norm


class ClassificationHead(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.normalize = True
"""


def save_zip(value: object, path: Path) -> None:
    torch.save(value, path)


def save_legacy(value: object, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def save_plain(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


WRITERS = {"zip": save_zip, "legacy": save_legacy, "plain": save_plain}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS.keys())
def write(request: pytest.FixtureRequest) -> Write:
    return request.param


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module src.modeling, to be forgotten once a file is written."""
    package = tmp_path / "packages" / "src"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "modeling.py").write_text(MODELING)
    monkeypatch.syspath_prepend(package.parent)
    from src import modeling

    yield modeling
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "src"]:
        del sys.modules[name]


def state_dict() -> Tensors:
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    return {
        "float32": whole,
        "transposed": whole.t(),
        "column": whole[:, 1],
        "shared.tail": whole[4:],
        "float64": torch.randn(2, 3, dtype=torch.float64),
        "float16": torch.randn(5).half(),
        "bfloat16": torch.randn(7).bfloat16(),
        "int64": torch.arange(5),
        "int32": torch.arange(3, dtype=torch.int32),
        "int16": torch.arange(3, dtype=torch.int16),
        "int8": torch.arange(3, dtype=torch.int8),
        "uint8": torch.arange(3, dtype=torch.uint8),
        "uint16": torch.arange(3).to(torch.uint16),
        "bool": torch.tensor([True, False, True]),
        "complex64": torch.randn(2, dtype=torch.complex64),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(4.6052),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


def assert_same(path: Path, expected: Tensors) -> None:
    """Names in order, shapes, kinds and every bit."""
    found = open_pickle(path)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        read = found[name].read()
        assert found[name].shape == tuple(tensor.shape) == tuple(read.shape)
        assert found[name].dtype == tensor.dtype == read.dtype
        assert read.is_contiguous()
        assert bits(read) == bits(tensor), name


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def test_a_state_dict_comes_back_bit_for_bit(write: Write, path: Path):
    write(state_dict(), path)
    assert_same(path, state_dict())


def test_an_ordered_dict_with_metadata_is_a_state_dict(write: Write, path: Path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert isinstance(module.state_dict(), OrderedDict)
    write(module.state_dict(), path)
    assert_same(path, dict(module.state_dict()))


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_understood(path: Path, protocol: int):
    path.write_bytes(pickle.dumps(state_dict(), protocol=protocol))
    assert_same(path, state_dict())


@pytest.mark.parametrize("protocol", range(2, 6))
def test_torch_save_with_any_pickle_protocol_is_understood(path: Path, protocol: int):
    torch.save(state_dict(), path, pickle_protocol=protocol)
    assert_same(path, state_dict())


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_training_checkpoint_gives_its_model_and_not_its_optimizer(
    write: Write, path: Path, key: str
):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint = {"epoch": 3, "name": "run", key: module.state_dict()}
    write(checkpoint | {"optimizer": optimizer.state_dict(), "when": (1, 2.5, None)}, path)
    assert_same(path, dict(module.state_dict()))


def test_a_model_may_be_wrapped_twice_or_beside_settings(path: Path):
    torch.save({"model": {"width": 4}, "state_dict": {"model": {"w": torch.ones(2)}}}, path)
    assert_same(path, {"w": torch.ones(2)})


def test_nested_dictionaries_give_dotted_names(write: Write, path: Path):
    layers = defaultdict(dict, {"layer_0": {"q": {"lora_A": torch.ones(2, 1)}}, 7: torch.ones(1)})
    write({"weights": layers, "metadata": {"r": 2}}, path)
    expected = {"weights.layer_0.q.lora_A": torch.ones(2, 1), "weights.7": torch.ones(1)}
    assert_same(path, expected)


def test_a_whole_module_gives_its_state_dict_without_its_classes(
    write: Write, path: Path, elsewhere
):
    torch.manual_seed(0)
    encoder = elsewhere.ImageEncoder()
    write(encoder, path)
    forget()
    expected = dict(encoder.state_dict())
    assert "model.visual.1.attn.in_proj_weight" in expected
    assert "tied.running_mean" in expected
    assert_same(path, expected)
    assert "src" not in sys.modules


def test_a_module_inside_a_checkpoint_is_unwrapped(write: Write, path: Path, elsewhere):
    head = elsewhere.ClassificationHead()
    write({"model": head, "epoch": 1}, path)
    assert_same(path, dict(head.state_dict()))


def test_a_classification_head_gives_weight_and_bias(write: Write, path: Path, elsewhere):
    head = elsewhere.ClassificationHead()
    write(head, path)
    forget()
    assert_same(path, {"weight": head.weight, "bias": head.bias})


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = torch.nn.Parameter(torch.randn(6, 2))
        self.out = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x @ self.in_proj.t()[:, :2])


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Sequential(Attention(), torch.nn.BatchNorm1d(2), Attention())
        self.logit_scale = torch.nn.Parameter(torch.tensor(4.6))
        self.register_buffer("input_resolution", torch.tensor(224))
        self.sizes = [1, 2]
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.visual(x) * self.logit_scale


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scripted_archive_gives_parameters_and_buffers(path: Path, dtype: torch.dtype):
    torch.manual_seed(0)
    module = Scripted().to(dtype).eval()
    torch.jit.save(torch.jit.script(module), path)
    found, expected = open_pickle(path), module.state_dict()
    assert found.keys() == expected.keys()
    assert all(bits(found[name].read()) == bits(expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_archive_gives_its_constants_too(path: Path):
    torch.jit.save(torch.jit.trace(WithConstant(), torch.ones(1, 2)), path)
    found = open_pickle(path)
    assert list(found) == ["weight", "CONSTANTS.c0"]
    assert found["CONSTANTS.c0"].read().tolist() == [1.0, 2.0]


class WithConstant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + torch.tensor([1.0, 2.0])


def test_a_tensor_with_attributes_of_its_own_is_a_tensor(write: Write, path: Path):
    tensor = torch.nn.Parameter(torch.randn(3))
    tensor.origin = "elsewhere"
    write({"w": tensor}, path)
    assert_same(path, {"w": tensor})


def test_what_is_read_belongs_to_the_reader(write: Write, path: Path):
    write({"w": torch.zeros(3)}, path)
    before = path.read_bytes()
    first = open_pickle(path)["w"]
    first.read().add_(1)
    assert first.read().tolist() == [0, 0, 0]
    assert path.read_bytes() == before


def test_opening_a_file_leaves_nothing_beside_it(write: Write, path: Path):
    write(state_dict(), path)
    assert all(tensor.read() is not None for tensor in open_pickle(path).values())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"epoch": 1}, "holds no tensors by name"),
        ([torch.ones(1)], "holds no tensors by name"),
        (torch.ones(1), "holds a tensor without a name"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "names a.b twice"),
        ({(1, 2): torch.ones(1)}, "a tensor with the unusable name"),
        ({"a\nb": torch.ones(1)}, r"a tensor with the unusable name a\nb"),
        ({"x" * 600: torch.ones(1)}, "a name of more than 500 letters"),
        ({"w": torch.ones(1).expand(3)}, "that reaches beyond its storage"),
        ({"w": torch.ones(2, 2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ({"w": torch.empty(3, device="meta")}, "torch._utils._rebuild_meta_tensor_no_storage"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "the conjugate or negative bit set"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else None,
)
def test_what_cannot_be_read_faithfully_is_refused(path: Path, value: object, says: str):
    torch.save(value, path)
    with pytest.raises(CheckpointError) as caught:
        open_pickle(path)
    assert says in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused_in_a_line(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"none\.pt: No such file or directory$"):
        open_pickle(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match=r"is not a file$"):
        open_pickle(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(path: Path):
    save_legacy({"w": torch.ones(1000)}, path)
    tensor = open_pickle(path)["w"]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        tensor.read()


# Names


def test_the_refusal_names_the_global_and_the_way_out(tmp_path: Path):
    path = hostile.plain_system(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_pickle(path)
    assert str(caught.value) == (
        f"{path}: refuses to load posix.system; if you trust the file allow it by name with "
        "--allow-global posix.system (it is still never called)"
    )


def test_an_allowed_name_is_still_never_called(tmp_path: Path):
    path = hostile.archived_system(tmp_path)
    found = open_pickle(path, allow=["posix.system"])
    assert found["w"].read().tolist() == [0, 1, 2, 3]
    assert not (tmp_path / MARKER).exists()


def test_allowing_one_name_allows_no_other(tmp_path: Path):
    path = hostile.partial_application(tmp_path)
    with pytest.raises(CheckpointError, match=r"refuses to load posix\.system; "):
        open_pickle(path, allow=["functools.partial", "posix"])


@pytest.mark.parametrize(
    "body",
    [
        hostile.call("torch.hub", "load", hostile.text("x")),
        hostile.call("torch", "load", hostile.text("x")),
        hostile.call("torch.ops", "load_library", hostile.text("x")),
        hostile.call("torchvision.io", "write_file", hostile.text("x")),
        hostile.call("src.modeling", "run"),
        hostile.call("numpy.core.multiarray", "scalar"),
        hostile.call("pathlib", "PosixPath", hostile.text("x")),
        b"\x80\x04" + hostile.text("src") + hostile.text("Outer.Inner") + b"\x93)\x81",
    ],
)
def test_known_names_stay_words_beside_the_tensors(tmp_path: Path, body: bytes):
    before = set(sys.modules)
    path = hostile.archive(tmp_path, hostile.dictionary(w=hostile.good_tensor(), x=body))
    assert list(open_pickle(path)) == ["w"]
    assert set(sys.modules) == before


def test_only_five_names_are_shown_of_many(tmp_path: Path):
    names = b"".join(hostile.name("evil", f"f{index}") for index in range(9))
    with pytest.raises(CheckpointError, match=r"evil\.f4 and 4 more; .*allow them by name"):
        open_pickle(hostile.plain(tmp_path, b"(" + names + b"t"))


# Hostile files


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_and_does_nothing(tmp_path: Path, name: str):
    path = HOSTILE[name].make(tmp_path)
    before, start = sorted(tmp_path.iterdir()), time.process_time()
    with pytest.raises(CheckpointError) as caught:
        open_pickle(path)
    assert time.process_time() - start < 20
    assert str(caught.value).startswith(f"{path}: ")
    assert HOSTILE[name].says in str(caught.value)
    assert str(caught.value).isprintable()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", [name for name, file in HOSTILE.items() if file.live])
def test_the_trap_is_live_for_a_plain_unpickler(tmp_path: Path, name: str):
    code = f"import pickle; pickle.load(open({str(HOSTILE[name].make(tmp_path))!r}, 'rb'))"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert (tmp_path / MARKER).exists()


def test_no_connection_is_made(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = hostile.connection(tmp_path, server.getsockname()[1])
        with pytest.raises(CheckpointError):
            open_pickle(path, allow=["socket.create_connection"])
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


MEASURE = """
import json, resource, sys, torch
from pathlib import Path
from atlas_cli.errors import CheckpointError
from atlas_cli.io.pickles import open_pickle

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def size():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
"""


def measured(code: str, *arguments: str | Path) -> object:
    """What `code` prints as JSON, in a process of its own so that its memory can be measured."""
    command = [sys.executable, "-c", MEASURE + code, *map(str, arguments)]
    root = Path(atlas_cli.__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux does")


@linux
@pytest.mark.slow
def test_hostile_files_use_little_memory(tmp_path: Path):
    paths = []
    for name, file in HOSTILE.items():
        (tmp_path / name).mkdir()
        paths.append(file.make(tmp_path / name))
    code = """
resource.setrlimit(resource.RLIMIT_AS, (size() + 2**29,) * 2)
start, grown = peak(), {}
for name in sys.argv[1:]:
    try:
        open_pickle(Path(name))
    except CheckpointError:
        grown[name] = peak() - start
print(json.dumps(grown))
"""
    grown = measured(code, *paths)
    assert set(grown) == set(map(str, paths))
    assert max(grown.values()) < 300


@linux
def test_reading_one_tensor_of_a_large_file_leaves_the_others_unread(tmp_path: Path):
    tensors = {f"w{index}": torch.full((5 * 2**20,), float(index)) for index in range(6)}
    for kind, write in WRITERS.items():
        write(tensors, tmp_path / kind)
        assert (tmp_path / kind).stat().st_size > 120 * 2**20
    code = """
import multiprocessing

def reading(name):
    start = peak()
    found = open_pickle(Path(name))
    opened = peak() - start
    values = [found[name].read().sum().item() for name in ("w1", "w4")]
    return opened, peak() - start, values

# A process for each, forked: the peak of one is none of the next.
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
    print(json.dumps(processes.map(reading, sys.argv[1:], 1)))
"""
    for opened, read, values in measured(code, *(tmp_path / kind for kind in WRITERS)):
        assert values == [1.0 * 5 * 2**20, 4.0 * 5 * 2**20]
        assert opened < 20
        assert read < 20 + 2 * 20 + 20


# Damage


def mutated(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.25:
        return content[: chance.randrange(len(content))]
    damaged = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", [*WRITERS, "scripted"])
def test_damage_gives_tensors_or_a_refusal_and_nothing_else(path: Path, kind: str):
    torch.manual_seed(0)
    if kind == "scripted":
        torch.jit.save(torch.jit.script(Attention()), path)
    else:
        WRITERS[kind]({"model": torch.nn.Linear(2, 2), "x": torch.ones(2).half()}, path)
    content, chance, start = path.read_bytes(), random.Random(0), time.process_time()
    refused = 0
    for _ in range(200):
        path.write_bytes(mutated(content, chance))
        try:
            shapes = [(tensor.shape, tensor.read().shape) for tensor in open_pickle(path).values()]
        except CheckpointError:
            refused += 1
        else:
            assert all(promised == tuple(read) for promised, read in shapes)
    assert 50 < refused < 200
    assert time.process_time() - start < 60


def test_noise_is_refused(path: Path):
    chance = random.Random(0)
    for _ in range(300):
        path.write_bytes(chance.choice([b"", b"\x80\x04"]) + chance.randbytes(200))
        with pytest.raises(CheckpointError):
            open_pickle(path)


# The package


def test_nothing_in_the_package_loads_with_torch_or_pickle():
    forbidden = {"torch.load", "torch.jit.load", "pickle.load", "pickle.loads", "pickle.Unpickler"}
    for source in Path(atlas_cli.__file__).parent.rglob("*.py"):
        tree = ast.parse(source.read_text("utf-8"))
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & forbidden, source


def test_a_pickle_without_tensors_is_read_like_the_standard_library_does(tmp_path: Path):
    from atlas_cli.io.pickles.machine import Machine
    from atlas_cli.io.pickles.policy import Allowance, ByteStream, GlobalsPolicy, Span

    value = {"a": [1, -2, 2**80, 1.5, None, True], "b": ("x", ("é", ()), {"c": "\ud800"}), "d": {}}
    value["again"] = value["a"]
    for protocol in range(6):
        content = pickle.dumps(value, protocol=protocol)
        stream = ByteStream(Span(content, 0, len(content)), io.BytesIO(content), Allowance())
        assert Machine(stream, GlobalsPolicy(), {}, lambda key: key).run() == value
