"""What is remembered of files saves work and changes no result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from conftest import Result, write_open_clip
from safetensors.torch import load_file, save_file

from atlas_cli.io import files as cache
from atlas_cli.io.files import CachedDigest, cache_folder, load_digests, save_digests, stat_files
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors import bases
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.extract import Options, extract_to

WEIGHTS = "open_clip_model.safetensors"
ONE, TWO = CachedDigest("1" * 64), CachedDigest("2" * 64, 0.125)


def aged(path: Path, seconds: float = 100) -> Path:
    """A file that was last changed some time ago."""
    stamp = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(stamp, stamp))
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let some time pass for the cache: the time of a change to an inode cannot be set."""
    real = cache.time.time_ns

    def pass_by(seconds: float) -> None:
        monkeypatch.setattr(cache.time, "time_ns", lambda: real() + int(seconds * 1e9))

    return pass_by


@pytest.fixture
def weights(tmp_path: Path, later: Callable[[float], None]) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"0" * 1000)
    later(100)
    return path


def entries() -> list[Path]:
    return sorted((cache_folder() / "digests").glob("*"))


def test_a_file_of_the_hubs_cache_is_not_read_for_its_sha256(tmp_path: Path):
    """Blobs of large files are named by it, those of small ones by another digest."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("a" * 64, "b" * 40)):
        (blobs / name).write_bytes(b"not what the name says")
        (snapshot / f"{number}.bin").symlink_to(blobs / name)
    large, small = snapshot / "0.bin", snapshot / "1.bin"
    assert cache.digest_kind(large) == "sha256"
    assert cache.digest_of(large, "sha256") == "a" * 64
    assert cache.digest_kind(small) == cache.digest_kind(blobs / ("a" * 64)) == "blake3"
    assert cache.digest_of(small, "sha256") == cache.sha256_of(small)
    assert cache.digest_of(large, "blake3") == cache.blake3_of(large)


def test_each_kind_of_digest_is_remembered_on_its_own(
    weights: Path, monkeypatch: pytest.MonkeyPatch
):
    taken = {kind: cache.digest_of(weights, kind) for kind in cache.DIGESTS}
    assert taken["sha256"] == hashlib.sha256(b"0" * 1000).hexdigest()
    assert taken["blake3"] == blake3(b"0" * 1000).hexdigest()
    monkeypatch.setattr(cache, "DIGESTS", {})
    assert {kind: cache.digest_of(weights, kind) for kind in taken} == taken


def test_what_is_remembered_of_a_file_is_known_the_next_time(weights: Path):
    known = {"a": ONE, "b": TWO}
    save_digests("blocks", stat_files([weights]), known)
    assert load_digests("blocks", stat_files([weights]), ["a", "b"]) == known
    assert load_digests("blocks", stat_files([weights]), ["a", "c"]) == {}
    assert load_digests("files", stat_files([weights]), ["a", "b"]) == {}


def test_a_pipe_in_the_place_of_an_entry_is_no_entry_and_nobody_waits_for_it(weights: Path):
    save_digests("files", stat_files([weights]), {"a": ONE})
    (entry,) = (cache_folder() / "digests").glob("*.json")
    entry.unlink()
    os.mkfifo(entry)
    assert load_digests("files", stat_files([weights]), ["a"]) == {}


def test_a_link_to_a_file_is_that_file(weights: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(weights)
    save_digests("files", stat_files([weights]), {"a": ONE})
    assert load_digests("files", stat_files([tmp_path / "link"]), ["a"]) == {"a": ONE}


def overwritten(path: Path) -> None:
    path.write_bytes(b"1" * 1000)


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(b"1" * 1000)
    other.replace(path)


@pytest.mark.parametrize("change", [overwritten, replaced])
def test_a_file_of_the_same_size_and_time_is_still_another(weights: Path, change: Callable):
    before = weights.stat()
    save_digests("files", stat_files([weights]), {"a": ONE})
    change(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert weights.stat().st_size == before.st_size
    assert load_digests("files", stat_files([weights]), ["a"]) == {}


def test_a_file_that_changed_while_it_was_hashed_is_not_remembered(weights: Path):
    seen = stat_files([weights])
    overwritten(weights)
    save_digests("files", seen, {"a": ONE})
    assert entries() == []


@pytest.mark.parametrize(("age", "kept"), [(-5, 0), (0, 0), (1.5, 0), (2.5, 1)])
def test_a_file_that_may_change_again_within_one_tick_is_not_remembered(
    tmp_path: Path, later: Callable[[float], None], age: float, kept: int
):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"0")
    later(age)
    save_digests("files", stat_files([aged(path)]), {"a": ONE})  # its inode changed just now
    assert len(entries()) == kept


def test_a_file_that_is_not_there_is_not_remembered(tmp_path: Path):
    seen = stat_files([tmp_path / "nothing"])
    save_digests("files", seen, {"a": ONE})
    assert (entries(), load_digests("files", seen, ["a"])) == ([], {})


DAMAGE = {
    "nothing": lambda found: "",
    "no JSON": lambda found: "{",
    "no text": lambda found: b"\xff\xfe",
    "deep": lambda found: "[" * 100_000,
    "a list": lambda found: "[]",
    "no digests": lambda found: json.dumps({"files": found["files"]}),
    "a list of digests": lambda found: json.dumps(found | {"known": [1]}),
    "a short digest": lambda found: json.dumps(found | {"known": {"a": ["12", 0.0]}}),
    "a number": lambda found: json.dumps(found | {"known": {"a": [12, 0.0]}}),
    "capitals": lambda found: json.dumps(found | {"known": {"a": ["A" * 64, 0.0]}}),
    "a line more": lambda found: json.dumps(found | {"known": {"a": ["1" * 64 + "\n", 0.0]}}),
    "a bad norm": lambda found: json.dumps(found | {"known": {"a": ["1" * 64, float("nan")]}}),
    "a negative norm": lambda found: json.dumps(found | {"known": {"a": ["1" * 64, -1.0]}}),
    "a norm in words": lambda found: json.dumps(found | {"known": {"a": ["1" * 64, "1"]}}),
    "too much": lambda found: json.dumps(found | {"known": {"a": ["1" * 64, 0.0, 0.0]}}),
    "other files": lambda found: json.dumps(found | {"files": []}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_not_used_and_is_replaced(weights: Path, name: str):
    save_digests("files", stat_files([weights]), {"a": ONE})
    [entry] = entries()
    text = DAMAGE[name](json.loads(entry.read_text()))
    entry.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert load_digests("files", stat_files([weights]), ["a"]) == {}
    save_digests("files", stat_files([weights]), {"a": ONE})
    assert load_digests("files", stat_files([weights]), ["a"]) == {"a": ONE}


def test_a_digest_is_recalled_only_as_one_of_its_own_length(weights: Path):
    block = {"a": CachedDigest("1" * 32, 0.5)}
    save_digests("blocks", stat_files([weights]), block)
    assert load_digests("blocks", stat_files([weights]), ["a"], cache.XXH3) == block
    assert load_digests("blocks", stat_files([weights]), ["a"]) == {}


def test_many_at_once_leave_one_whole_entry(weights: Path):
    seen = stat_files([weights])

    def use(number: int) -> dict[str, CachedDigest]:
        save_digests("files", seen, {"a": ONE})
        return load_digests("files", seen, ["a"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(200))) == [{"a": ONE}] * 200
    assert len(entries()) == 1


def test_a_cache_that_is_no_folder_is_harmless(weights: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATLAS_CACHE", str(weights))
    save_digests("files", stat_files([weights]), {"a": ONE})
    assert load_digests("files", stat_files([weights]), ["a"]) == {}


def test_a_read_only_cache_costs_nothing_but_time(as_ordinary_user, tmp_path: Path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    model = write_open_clip(tmp_path / "model")
    save_file(
        {name: 1.001 * tensor for name, tensor in load_file(model / WEIGHTS).items()},
        tmp_path / "tuned.safetensors",
    )
    result = as_ordinary_user(
        *("extract", model, tmp_path / "tuned.safetensors", "-o", tmp_path / "v.safetensors"),
        *("--quiet",),
        ATLAS_CACHE=str(locked),
    )
    assert result == Result(0, f"{tmp_path}/v.safetensors\n", "")
    assert list(locked.iterdir()) == []


# In an extraction -----------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and blocks that are hashed while a test runs."""
    found: list[str] = []
    of_file, of_block = cache.sha256_of, bases.digest
    monkeypatch.setitem(
        cache.DIGESTS, "sha256", lambda path: found.append(path.parent.name) or of_file(path)
    )
    monkeypatch.setattr(
        bases, "digest", lambda name, values: found.append(name) or of_block(name, values)
    )
    return found


def extract(folder: Path, finetuned: str, output: str = "v", scope: str = "visual") -> bytes:
    base, tuned = (locate(parse_reference(str(folder / name))) for name in ("base", finetuned))
    path = folder / f"{output}.safetensors"
    extract_to(path, "x", open_base(base, scope), tuned, Options(Choice(scope)))
    return path.read_bytes()


@pytest.fixture
def models(tmp_path: Path, later: Callable[[float], None]) -> Path:
    for seed, name in enumerate(("base", "one", "two")):
        write_open_clip(tmp_path / name, seed=seed)
    later(100)
    return tmp_path


def test_a_base_that_was_seen_is_not_hashed_again(models: Path, hashed: list[str]):
    first = extract(models, "one")
    assert {"base", "one", "visual.proj"} < set(hashed)
    hashed.clear()
    extract(models, "two")
    assert hashed == ["two"]
    hashed.clear()
    assert extract(models, "one") == first
    assert hashed == []


def test_a_base_that_changed_is_hashed_again(models: Path, hashed: list[str]):
    first = extract(models, "one")
    weights = models / "base" / WEIGHTS
    before = weights.stat()
    tensors = load_file(weights)
    tensors["visual.proj"] = torch.nextafter(tensors["visual.proj"], torch.tensor(1.0))
    save_file(tensors, weights, {"format": "pt"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    hashed.clear()
    second = extract(models, "one")
    assert {"base", "visual.proj"} < set(hashed)
    assert first != second


def test_the_bytes_are_the_same_with_and_without_a_cache(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    extract(models, "two")
    remembered = extract(models, "one")
    monkeypatch.setenv("ATLAS_CACHE", str(models / "elsewhere"))
    assert extract(models, "one") == remembered
    for module in (cache, bases):
        monkeypatch.setattr(module, "load_digests", lambda *asked: {})
    assert extract(models, "one") == remembered


def test_another_scope_of_the_same_base_has_hashes_of_its_own(models: Path, hashed: list[str]):
    extract(models, "one")
    hashed.clear()
    extract(models, "one", scope="text")
    assert "base" not in hashed
    assert "token_embedding.weight" in hashed
