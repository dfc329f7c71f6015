"""Makers of files that attack whoever opens them, each with what atlas must say about it.

A file that would run something writes `ran` into its own folder, so a test can look for it.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

MARKER = "ran"
LEGACY_HEAD = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]


@dataclass(frozen=True)
class Hostile:
    """A maker of one file, what atlas says of it, and whether plain unpickling would run it."""

    make: Callable[[Path], Path]
    says: str
    live: bool = False


HOSTILE: dict[str, Hostile] = {}


def hostile(says: str, *, live: bool = False):
    """Register a maker under its own name."""

    def register(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        HOSTILE[make.__name__] = Hostile(make, says, live)
        return make

    return register


# Pieces of pickles, written by hand because no pickler would write them.


def text(value: str) -> bytes:
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def number(value: int) -> bytes:
    content = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def name(module: str, qualname: str) -> bytes:
    return f"c{module}\n{qualname}\n".encode()


def call(module: str, qualname: str, *args: bytes) -> bytes:
    return name(module, qualname) + b"(" + b"".join(args) + b"tR"


def dictionary(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + item for key, item in items.items()) + b"u"


def storage(length: int, key: str = "0") -> bytes:
    parts = text("storage") + name("torch", "FloatStorage") + text(key) + text("cpu")
    return b"(" + parts + number(length) + b"tQ"


def tensor(length: int, shape: bytes, stride: bytes, offset: int = 0) -> bytes:
    hooks = call("collections", "OrderedDict")
    parts = (storage(length), number(offset), shape, stride, b"\x89", hooks)
    return call("torch._utils", "_rebuild_tensor_v2", *parts)


def good_tensor() -> bytes:
    return tensor(4, numbers(4), numbers(1))


def touch(folder: Path) -> bytes:
    return text(f"touch {folder / MARKER}")


def plain(folder: Path, body: bytes) -> Path:
    path = folder / "plain.pt"
    path.write_bytes(b"\x80\x02" + body + b".")
    return path


def archive(folder: Path, body: bytes, **members: bytes) -> Path:
    """A zip as torch.save writes it, with four numbers in storage 0."""
    path = folder / "archive.pt"
    everything = {"data.pkl": b"\x80\x02" + body + b".", "byteorder": b"little"}
    everything |= {"data/0": torch.arange(4.0).numpy().tobytes(), **members}
    with zipfile.ZipFile(path, "w") as file:
        for key, content in everything.items():
            file.writestr(f"archive/{key}", content)
    return path


def legacy(body: bytes, *, numbers_of: bytes = b"") -> bytes:
    head = b"".join(pickle.dumps(part, protocol=2) for part in LEGACY_HEAD)
    keys = pickle.dumps(["0"] if numbers_of else [], protocol=2)
    return head + b"\x80\x02" + body + b"." + keys + numbers_of


def raw(folder: Path, content: bytes) -> Path:
    path = folder / "raw.pt"
    path.write_bytes(content)
    return path


def good_archive(folder: Path) -> Path:
    path = folder / "good.pt"
    torch.save({"weight": torch.arange(4.0), "bias": torch.ones(2)}, path)
    return path


class Calls:
    """An object that pickles as a call."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.made = function, args

    def __reduce__(self):
        return self.made


# Files that would run something.


@hostile("refuses to load posix.system;", live=True)
def plain_system(folder: Path) -> Path:
    return plain(folder, call("posix", "system", touch(folder)))


@hostile("refuses to load posix.system;")
def archived_system(folder: Path) -> Path:
    return archive(folder, dictionary(w=good_tensor(), x=call("posix", "system", touch(folder))))


@hostile("refuses to load posix.system;")
def legacy_system(folder: Path) -> Path:
    return raw(folder, legacy(call("posix", "system", touch(folder))))


@hostile("refuses to load posix.system;", live=True)
def system_by_inst(folder: Path) -> Path:
    return plain(folder, b"(" + touch(folder) + b"iposix\nsystem\n")


@hostile("refuses to load posix.system;", live=True)
def system_by_obj(folder: Path) -> Path:
    return plain(folder, b"(" + name("posix", "system") + touch(folder) + b"o")


@hostile("refuses to load posix.system;", live=True)
def setstate_by_build(folder: Path) -> Path:
    innocent = name("argparse", "Namespace") + b")\x81"
    first = dictionary(__setstate__=name("posix", "system")) + b"b"
    return plain(folder, innocent + first + touch(folder) + b"b")


@hostile("refuses to load posix.system;")
def hook_inside_a_module(folder: Path) -> Path:
    path, module = folder / "module.pt", torch.nn.Sequential(torch.nn.Linear(2, 2))
    module[0].surprise = Calls(os.system, f"touch {folder / MARKER}")
    torch.save({"state_dict": module}, path)
    return path


@hostile("refuses to load posix.system;")
def system_inside_storage_bytes(folder: Path) -> Path:
    inner = legacy(call("posix", "system", touch(folder)))
    content = b"B" + struct.pack("<I", len(inner)) + inner
    return plain(folder, dictionary(w=call("torch.storage", "_load_from_bytes", content)))


@hostile("storages within storages")
def storage_bytes_within_storage_bytes(folder: Path) -> Path:
    inner = legacy(storage(1))
    for _ in range(10):
        content = b"B" + struct.pack("<I", len(inner)) + inner
        inner = legacy(call("torch.storage", "_load_from_bytes", content))
    return raw(folder, inner)


@hostile("refuses to load socket.create_connection;")
def connection(folder: Path, port: int = 9) -> Path:
    address = b"(" + text("127.0.0.1") + number(port) + b"t"
    return plain(folder, call("socket", "create_connection", address))


@hostile("refuses to load builtins.open;", live=True)
def file_writer(folder: Path) -> Path:
    return plain(folder, call("builtins", "open", text(str(folder / MARKER)), text("w")))


@hostile("refuses to load builtins.eval;", live=True)
def evaluation(folder: Path) -> Path:
    code = f"open({str(folder / MARKER)!r}, 'w').close()"
    return plain(folder, call("builtins", "eval", text(code)))


@hostile("refuses to load torch.os.system;")
def dotted_name(folder: Path) -> Path:
    dotted = text("torch") + text("os.system") + b"\x93"
    return plain(folder, b"\x80\x04" + dotted + b"(" + touch(folder) + b"tR")


@hostile("refuses to load torch.serialization.os", live=True)
def getattr_chain(folder: Path) -> Path:
    os_module = call("builtins", "getattr", name("torch", "serialization"), text("os"))
    system = call("builtins", "getattr", os_module, text("system"))
    return plain(folder, system + b"(" + touch(folder) + b"tR")


@hostile("refuses to load builtins.getattr;", live=True)
def getattr_of_an_object(folder: Path) -> Path:
    path = call("pathlib", "PosixPath", text(str(folder / MARKER)))
    return plain(folder, call("builtins", "getattr", path, text("touch")) + b")R")


@hostile("refuses to load functools.partial, posix.system;", live=True)
def partial_application(folder: Path) -> Path:
    partial = call("functools", "partial", name("posix", "system"), touch(folder))
    return plain(folder, partial + b")R")


@hostile("refuses to load operator.methodcaller;", live=True)
def method_caller(folder: Path) -> Path:
    path = call("pathlib", "PosixPath", text(str(folder / MARKER)))
    return plain(folder, call("operator", "methodcaller", text("touch")) + b"(" + path + b"tR")


@hostile("holds no tensors by name")
def torch_load_of_another_file(folder: Path) -> Path:
    other = plain_system(folder).rename(folder / "other.pt")
    return plain(folder, dictionary(x=call("torch", "load", text(str(other)))))


@hostile("uses the pickle instruction EXT1")
def extension_registry(folder: Path) -> Path:
    return plain(folder, b"\x82\x01")


@hostile("has a persistent id that is not that of a storage")
def persistent_name(folder: Path) -> Path:
    return archive(folder, dictionary(w=text("../../etc/passwd") + b"Q"))


@hostile(r"refuses to load posix.sys\x1b[2J\ntem;")
def name_that_upsets_a_terminal(folder: Path) -> Path:
    return plain(folder, b"\x80\x04" + text("posix") + text("sys\x1b[2J\ntem") + b"\x93)R")


# Files that would use up memory or time.


def laughs(first: bytes, double: bytes, times: int) -> bytes:
    """`first`, doubled: each step keeps the last value in the memo and uses it twice."""
    return first + b"".join(b"q\x00" + double for _ in range(times))


@hostile("holds no tensors by name")
def billion_laughs(folder: Path) -> Path:
    return plain(folder, dictionary(w=laughs(b"]", b"0](h\x00h\x00e", 64)))


@hostile("refers to more than 1000000 things by name")
def billion_named_laughs(folder: Path) -> Path:
    double = b"0" + dictionary(a=b"h\x00", b=b"h\x00")
    return archive(folder, laughs(dictionary(w=good_tensor()), double, 48))


@hostile("holds no tensors by name")
def billion_laughs_as_a_key(folder: Path) -> Path:
    return plain(folder, b"}" + laughs(b")", b"0h\x00h\x00\x86", 64) + b"Ns")


@hostile("repeats its numbers until they fill 8 times its own size")
def many_names_for_one_tensor(folder: Path) -> Path:
    one = tensor(10_000, numbers(10_000), numbers(1)) + b"q\x050"
    body = one + dictionary(**{f"w{index}": b"h\x05" for index in range(1000)})
    return archive(folder, body, **{"data/0": bytes(40_000)})


@hostile("is nested more than 64 deep")
def module_that_contains_itself(folder: Path) -> Path:
    return plain(folder, b"}q\x00" + text("a") + b"h\x00s")


@hostile("is nested more than 64 deep")
def deep_dictionaries(folder: Path) -> Path:
    depth = 50_000
    return plain(folder, (b"}" + text("a")) * depth + b"}" + b"s" * depth)


@hostile("holds no tensors by name")
def deep_tuples(folder: Path) -> Path:
    return plain(folder, dictionary(w=b")" + b"\x85" * 500_000))


@hostile("holds no tensors by name")
def deep_calls(folder: Path) -> Path:
    opening = b"ctorch\nX\nq\x00("
    return plain(folder, opening + b"h\x00(" * 200_000 + b"tR" * 200_000 + b"tR")


@hostile("has more than 1000000 pickle instructions")
def endless_instructions(folder: Path) -> Path:
    return plain(folder, b"}" * 3_000_000)


@hostile("pickled text, which no model needs")
def endless_text(folder: Path) -> Path:
    return plain(folder, dictionary(w=text("x" * (40 * 2**20))))


@hostile("is cut short, or declares more bytes than it has")
def huge_bytes(folder: Path) -> Path:
    return plain(folder, b"\x8e" + struct.pack("<Q", 2**40) + b"x")


@hostile("is cut short, or declares more bytes than it has")
def huge_text(folder: Path) -> Path:
    return plain(folder, b"\x8d" + struct.pack("<Q", 2**40) + b"x")


@hostile("is cut short, or declares more bytes than it has")
def huge_integer(folder: Path) -> Path:
    return plain(folder, b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x")


@hostile("holds no tensors by name")
def huge_memo_index(folder: Path) -> Path:
    return plain(folder, b"}r" + struct.pack("<I", 2**32 - 1))


def repeated(value: bytes, each: bytes, times: int) -> bytes:
    """`value` in the memo, then a list of what `each` makes of it, many times over."""
    return value + b"q\x000](" + each * times + b"e"


@hostile("has more than 1000000 pickle instructions")
def copies_of_pairs(folder: Path) -> Path:
    pairs = b"](" + (number(1) + b"N\x86") * 100_000 + b"e"
    ordered = name("collections", "OrderedDict") + b"h\x00\x85R"
    return plain(folder, repeated(pairs, ordered, 50_000))


@hostile("holds no tensors by name")
def copies_of_a_set(folder: Path) -> Path:
    items = b"](" + b"N" * 100_000 + b"e"
    return plain(folder, repeated(items, name("builtins", "set") + b"h\x00\x85R", 50_000))


@hostile("pickled text, which no model needs")
def copies_of_a_text(folder: Path) -> Path:
    each = name("_codecs", "encode") + b"h\x00" + text("latin1") + b"\x86R"
    return plain(folder, repeated(text("x" * 2**20), each, 50_000))


@hostile("mentions a name of more than 300 letters")
def endless_name(folder: Path) -> Path:
    grow = b"0" + call("builtins", "getattr", b"h\x00", text("A" * 30))
    return plain(folder, laughs(name("torch", "A"), grow, 10_000))


@hostile("and 96 more; if you trust the file")
def endless_names(folder: Path) -> Path:
    return plain(folder, b"".join(name("evil", f"f{index}") for index in range(1000)))


@hostile("refuses to load builtins.bytearray;")
def huge_bytearray(folder: Path) -> Path:
    return plain(folder, call("builtins", "bytearray", number(10**12)))


@hostile("holds no tensors by name")
def huge_list_of_a_range(folder: Path) -> Path:
    return plain(folder, call("builtins", "list", call("builtins", "range", number(10**12))))


# Tensors that are not what they say.


@hostile("is cut short, or declares more bytes than it has (tensor w)")
def storage_larger_than_the_file(folder: Path) -> Path:
    return archive(folder, dictionary(w=tensor(10**12, numbers(10**12), numbers(1))))


@hostile("that reaches beyond its storage 0")
def strides_beyond_the_storage(folder: Path) -> Path:
    return archive(folder, dictionary(w=tensor(4, numbers(2, 2), numbers(1000, 1))))


@hostile("that reaches beyond its storage 0")
def offset_beyond_the_storage(folder: Path) -> Path:
    return archive(folder, dictionary(w=tensor(4, numbers(4), numbers(1), offset=1)))


@hostile("that reaches beyond its storage 0, or repeats it")
def one_number_expanded(folder: Path) -> Path:
    return archive(folder, dictionary(w=tensor(1, numbers(10**12), numbers(0))))


@hostile("that is not a whole number")
def negative_stride(folder: Path) -> Path:
    return archive(folder, dictionary(w=tensor(4, numbers(4), numbers(-1), offset=3)))


@hostile("that is not a whole number")
def size_of_a_million_digits(folder: Path) -> Path:
    content = b"\xff" * 500_000 + b"\0"
    size = b"(\x8b" + struct.pack("<i", len(content)) + content + b"t"
    return archive(folder, dictionary(w=tensor(4, size, numbers(1))))


@hostile("has a tensor with a shape that cannot be")
def empty_tensor_of_impossible_shape(folder: Path) -> Path:
    return archive(folder, dictionary(w=tensor(4, numbers(0, 2**62, 2**62), numbers(1, 1, 1))))


@hostile("has the storage 0 with another length than declared")
def legacy_storage_of_another_length(folder: Path) -> Path:
    body = dictionary(w=tensor(4, numbers(4), numbers(1)))
    return raw(folder, legacy(body, numbers_of=struct.pack("<q", 2**40) + bytes(16)))


@hostile("big-endian")
def big_endian(folder: Path) -> Path:
    return archive(folder, dictionary(w=good_tensor()), byteorder=b"big")


# Archives that are not what they say.


@hostile("has a member with the unsafe name ../outside")
def member_above_the_folder(folder: Path) -> Path:
    return _with_member(folder, zipfile.ZipInfo("../outside"))


@hostile("has a member with the unsafe name /etc/outside")
def member_at_the_root(folder: Path) -> Path:
    return _with_member(folder, zipfile.ZipInfo("/etc/outside"))


@hostile("has a member archive/link that is a symbolic link")
def member_that_is_a_link(folder: Path) -> Path:
    info = zipfile.ZipInfo("archive/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return _with_member(folder, info)


def _with_member(folder: Path, info: zipfile.ZipInfo) -> Path:
    path = archive(folder, dictionary(w=good_tensor()))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(info, "x")
    return path


@hostile("has 2 members with the name archive/data/0")
def member_twice(folder: Path) -> Path:
    path = archive(folder, dictionary(w=good_tensor()), **{"data/1": bytes(16)})
    path.write_bytes(path.read_bytes().replace(b"archive/data/1", b"archive/data/0"))
    return path


@hostile("that unpacks to")
def zip_bomb(folder: Path) -> Path:
    return _packed(folder, "archive/data/0", 100 * 2**20)


@hostile("has a compressed member data/0")
def small_zip_bomb(folder: Path) -> Path:
    return _packed(folder, "archive/data/0", 2**20)


def _packed(folder: Path, member: str, size: int) -> Path:
    path = folder / "packed.pt"
    body = dictionary(w=tensor(size // 4, numbers(size // 4), numbers(1)))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        file.writestr(member, bytes(size), zipfile.ZIP_DEFLATED)
    return path


@hostile("zip index of more than")
def endless_zip_index(folder: Path) -> Path:
    content = b"PK\3\4" + bytes(20 * 2**20)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(content) - 4, 4, 0)
    return raw(folder, content + end)


@hostile("has members that overlap")
def members_that_overlap(folder: Path) -> Path:
    content = bytearray(archive(folder, dictionary(w=good_tensor())).read_bytes())
    entry = content.rfind(b"PK\1\2")
    content[entry + 20 : entry + 28] = struct.pack("<2I", 10**6, 10**6)
    return raw(folder, bytes(content))


@hostile("is a broken or truncated zip archive")
def truncated_archive(folder: Path) -> Path:
    whole = good_archive(folder).read_bytes()
    return raw(folder, whole[: len(whole) * 2 // 3])


@hostile("is cut short")
def truncated_legacy(folder: Path) -> Path:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(64)}, buffer, _use_new_zipfile_serialization=False)
    return raw(folder, buffer.getvalue()[:-100])


@hostile("is cut short")
def empty_file(folder: Path) -> Path:
    return raw(folder, b"")


@hostile("is a web page, not a checkpoint")
def web_page(folder: Path) -> Path:
    return raw(folder, b"\n<!DOCTYPE html><html>Quota exceeded</html>")


@hostile("is a Git LFS pointer, not a checkpoint")
def pointer(folder: Path) -> Path:
    return raw(folder, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
