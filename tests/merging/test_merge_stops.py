"""Merges that are killed, interrupted, or run out of disk: all or nothing, and no byte differs."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
import xxhash
from merge_runs import digests, linear, llama, write_model, write_recipe

from atlas_cli.errors import AtlasError
from atlas_cli.io.journal import Written, intact, read_pieces
from atlas_cli.io.staging import StagingFolder, check_space
from atlas_cli.merging.merge import check_place, check_target

ROOMY = ("--memory", "8GB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of 40 MB, with enough tensors to be caught in the middle of a merge."""
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / f"m{n}", llama(n, layers=24, width=370)) for n in (1, 2)]


@pytest.fixture
def recipe(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A merge of both."""
    monkeypatch.chdir(tmp_path)
    for model in models:
        shutil.copytree(model, tmp_path / model.name, copy_function=os.link)
    return write_recipe(tmp_path / "r.yaml", linear(1, 2, dtype="float32", out_dtype="bfloat16"))


def start(recipe: Path) -> subprocess.Popen[bytes]:
    return warm.start("merge", recipe, "-o", "out", "-q", *ROOMY, text=False)


def pieces_in(journal: Path) -> int:
    """How many pieces a journal has; -1 if there is no journal."""
    try:
        return journal.read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return -1


def kill_somewhere(recipe: Path, chance: random.Random, number: int) -> int | None:
    """Kill a merge after some more pieces; how many there are then, or None if it was done."""
    journal = recipe.parent / ".out.part" / "journal"
    wanted = max(pieces_in(journal), 0) + chance.randint(1, 40)
    process = start(recipe)
    while process.poll() is None and pieces_in(journal) < wanted:
        time.sleep(0.0005)
    time.sleep(chance.choice((0, 0, 0.002, 0.01)))
    process.send_signal(number)
    process.communicate()
    return pieces_in(journal) if process.returncode else None


def check_kills(recipe: Path, kills: int, number: int) -> None:
    out = recipe.parent / "out"
    process = start(recipe)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    wanted = digests(out)
    chance = random.Random(kills)
    caught: list[int] = []
    while len(caught) < kills:
        if out.exists():
            assert digests(out) == wanted  # whole, whenever it is there
            shutil.rmtree(out)
        if (pieces := kill_somewhere(recipe, chance, number)) is not None:
            caught.append(pieces)
    if not out.exists():
        process = start(recipe)
        process.communicate()
        assert process.returncode == 0
    assert digests(out) == wanted
    assert not (recipe.parent / ".out.part").exists()
    assert len(set(caught)) > 2  # they were stopped at different moments, in the middle


@pytest.mark.slow
def test_several_merges_that_are_killed_go_on_where_they_were(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        write_model(tmp_path / f"m{number}", llama(number, layers=24, width=370))
    recipe, steps = tmp_path / "r.yaml", tmp_path / ".out.steps"
    documents = [
        linear(1, 2, name="first"),
        {"merge_method": "linear", "models": _half("first", "./m3"), "name": "second"},
        {"merge_method": "linear", "models": _half("second", "./m1"), "out_dtype": "bfloat16"},
    ]
    recipe.write_text("---\n".join(json.dumps(one) + "\n" for one in documents))
    process = start(recipe)
    assert process.communicate() == (b"out\n", b"")
    wanted = digests(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    made: dict[Path, int] = {}
    # Killed within each of the three merges; what was complete before is not made again.
    for part in (steps / ".first.part", steps / ".second.part", tmp_path / ".out.part"):
        while not _killed_in(recipe, part / "journal"):
            shutil.rmtree(tmp_path / "out")  # it was quicker: from the beginning
            made = {}
        whole = {path: path.stat().st_mtime_ns for path in steps.glob("*/model.safetensors")}
        assert made.items() <= whole.items()
        made = whole
    assert len(made) == 2
    process = start(recipe)
    assert process.communicate() == (b"out\n", b"")
    assert digests(tmp_path / "out") == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m1", "m2", "m3", "out", "r.yaml"]


def _killed_in(recipe: Path, journal: Path) -> bool:
    """Kill a merge once it has written some pieces of one of its models; False if it was done."""
    process = start(recipe)
    while process.poll() is None and pieces_in(journal) < 3:
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def _half(*names: str) -> list[dict[str, object]]:
    return [{"model": name, "parameters": {"weight": 0.5}} for name in names]


def test_five_kills_and_the_same_command_again_give_the_same_bytes(recipe: Path):
    check_kills(recipe, 5, signal.SIGKILL)


@pytest.mark.campaign
def test_thirty_kills_and_the_same_command_again_give_the_same_bytes(recipe: Path):
    check_kills(recipe, 30, signal.SIGKILL)


def test_an_interrupt_ends_with_130_and_leaves_what_is_needed_to_go_on(recipe: Path):
    out, part = recipe.parent / "out", recipe.parent / ".out.part"
    for _ in range(20):  # a merge that was whole before it heard of the interrupt shows nothing
        shutil.rmtree(out, ignore_errors=True)
        process = start(recipe)
        while process.poll() is None and pieces_in(part / "journal") < 1:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
        if not out.exists():
            break
    assert (process.returncode, said.decode().splitlines()[-1]) == (130, "atlas: interrupted")
    assert (part / "journal").is_file()
    left = pieces_in(part / "journal")
    assert left >= 1
    weights = part / "model" / "model.safetensors"
    pieces, _, _ = read_pieces(part / "journal", skipped=1)
    assert len(pieces) == left
    assert intact(weights.parent, pieces, [weights.name]) == pieces.keys()
    with weights.open("r+b") as file:  # a bit changes in one of the pieces that are there
        file.seek(next(iter(pieces.values())).offset)
        bits = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([bits ^ 1]))
    stamp = weights.stat().st_ino
    process = start(recipe)
    process.communicate()
    assert process.returncode == 0
    assert (out / "model.safetensors").stat().st_ino == stamp  # the file that was begun
    found = digests(out)
    shutil.rmtree(out)
    process = start(recipe)
    process.communicate()
    assert found == digests(out)


# The folder -----------------------------------------------------------------------------------

FILES = {"w.safetensors": 64}


def piece_at(offset: int, content: bytes) -> Written:
    return Written("w.safetensors", offset, len(content), xxhash.xxh3_64_hexdigest(content))


def test_the_same_work_goes_on_where_it_stopped(tmp_path: Path):
    first = StagingFolder(tmp_path / "out", "same", FILES)
    content = bytes([0, 0, 1, 0, 2, 0, 3, 0])
    first.write("w.safetensors", 8, content)
    first.note((0, 0), piece_at(8, content))
    first.note((3, 1), piece_at(10, content[2:4]))
    first.close()
    journal = tmp_path / ".out.part" / "journal"
    journal.write_text(journal.read_text() + "4 ")  # killed within a line
    (journal.parent / "model" / "README.md").touch()  # or while it wrote what is beside the weights
    again = StagingFolder(tmp_path / "out", "same", FILES)
    assert again.done == {(0, 0), (3, 1)}
    written = tmp_path / ".out.part" / "model" / "w.safetensors"
    assert written.read_bytes()[8:16] == bytes([0, 0, 1, 0, 2, 0, 3, 0])
    again.finish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(("identity", "files"), [("other", FILES), ("same", {"w.safetensors": 65})])
def test_other_work_starts_anew(tmp_path: Path, identity: str, files: dict[str, int]):
    first = StagingFolder(tmp_path / "out", "same", FILES)
    first.note((0, 0), piece_at(8, bytes(4)))
    first.close()
    assert StagingFolder(tmp_path / "out", identity, files).done == set()


@pytest.mark.parametrize("place", [10, 12])
def test_a_piece_that_changed_since_it_was_written_is_made_again(tmp_path: Path, place: int):
    first = StagingFolder(tmp_path / "out", "same", FILES)
    for start in (8, 10, 12):
        first.write("w.safetensors", start, b"ab")
        first.note((0, start), piece_at(start, b"ab"))
    first.note((1, 0), piece_at(63, b"ab"))  # beyond the end
    first.close()
    weights = tmp_path / ".out.part" / "model" / "w.safetensors"
    content = bytearray(weights.read_bytes())
    content[place] ^= 1
    weights.write_bytes(content)
    wanted = {(0, start) for start in (8, 10, 12)} - {(0, place)}
    assert StagingFolder(tmp_path / "out", "same", FILES).done == wanted


def test_a_system_without_file_locks_and_positioned_writes_merges_too(run_python, tmp_path: Path):
    """As on Windows, which has no fcntl, no os.pread and no os.pwrite."""
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number))
    recipe = write_recipe(tmp_path / "r.yaml", linear(1, 2))
    code = (
        "import os, sys; sys.modules['fcntl'] = None; del os.pread, os.pwrite, os.posix_fallocate\n"
        "from atlas_cli.cli.app import main\n"
        "os.chdir(sys.argv[1]); sys.exit(main(['merge', 'r.yaml', '-o', sys.argv[2]]))"
    )
    assert run_python(code, str(tmp_path), "bare") == "bare\n"
    process = subprocess.run([*warm.atlas(), "merge", str(recipe), "-o", "usual"], cwd=tmp_path)
    assert process.returncode == 0
    assert digests(tmp_path / "bare") == digests(tmp_path / "usual")


def test_two_merges_do_not_write_one_folder(tmp_path: Path):
    first = StagingFolder(tmp_path / "out", "same", FILES)
    with pytest.raises(AtlasError, match="another atlas merge is writing it"):
        StagingFolder(tmp_path / "out", "same", FILES)
    first.abandon()
    assert list(tmp_path.iterdir()) == []


def test_only_what_atlas_merge_wrote_is_replaced_and_only_by_force(tmp_path: Path):
    target = tmp_path / "out"
    check_target(target, force=False)
    target.mkdir()
    check_target(target, force=False)  # an empty folder is nothing to lose
    (target / "thesis.tex").touch()
    with pytest.raises(AtlasError, match="exists already; use --force"):
        check_target(target, force=False)
    with pytest.raises(AtlasError, match="was not written by atlas merge"):
        check_target(target, force=True)
    (target / "atlas_recipe.lock.yaml").touch()
    check_target(target, force=True)
    with pytest.raises(AtlasError, match="is a file"):
        check_target(target / "thesis.tex", force=True)


def test_a_planted_link_is_neither_followed_nor_emptied(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    (tmp_path / ".out.part").symlink_to(precious)
    with pytest.raises(AtlasError, match="is in the way, and was not left by atlas merge"):
        StagingFolder(tmp_path / "out", "same", FILES)
    (tmp_path / ".out.part").unlink()
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "journal").symlink_to(precious / "thesis.tex")
    with pytest.raises(AtlasError, match="is in the way"):
        StagingFolder(tmp_path / "out", "same", FILES)
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]
    assert (precious / "thesis.tex").read_text() == "years"


def test_a_folder_of_the_user_with_the_name_of_ours_stays(tmp_path: Path):
    for name in (".out.part", ".out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years")
    with pytest.raises(AtlasError, match=r"\.out\.part: is in the way"):
        StagingFolder(tmp_path / "out", "same", FILES)
    with pytest.raises(AtlasError, match=r"\.out\.part: is in the way"):
        check_target(tmp_path / "out", force=True)
    shutil.rmtree(tmp_path / ".out.part")
    (tmp_path / "out").mkdir()
    StagingFolder(tmp_path / "out", "same", FILES).finish()
    assert (tmp_path / ".out.old" / "thesis.tex").read_text() == "years"
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.old"}


def test_garbage_in_the_journal_starts_anew(tmp_path: Path):
    for garbage in (b"\xff\xfe", b"1 2 3\n", b"x y\n", b"9" * 5000 + b" 1\n"):
        StagingFolder(tmp_path / "out", "same", FILES).close()
        with (tmp_path / ".out.part" / "journal").open("ab") as journal:
            journal.write(garbage + b"\n")
        again = StagingFolder(tmp_path / "out", "same", FILES)
        assert again.done == set()
        again.abandon()


def test_a_kill_between_two_renames_loses_neither_the_old_model_nor_the_new(tmp_path: Path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "atlas_recipe.lock.yaml").write_text("old")
    StagingFolder(target, "same", FILES).close()
    target.rename(tmp_path / ".out.part" / "replaced")  # and here the process was killed
    with pytest.raises(AtlasError, match="exists already"):
        check_target(target, force=False)
    assert (target / "atlas_recipe.lock.yaml").read_text() == "old"
    staging = StagingFolder(target, "same", FILES)
    staging.close()
    target.rename(tmp_path / ".out.part" / "replaced")
    staging.folder.rename(target)  # or here
    check_target(tmp_path / "other", force=False)
    with pytest.raises(AtlasError, match="exists already"):
        check_target(target, force=False)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert [path.name for path in target.iterdir()] == ["w.safetensors"]


# The disk -------------------------------------------------------------------------------------


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path: Path):
    with pytest.raises(AtlasError, match="of disk, and"):
        check_space(tmp_path / "out", 1 << 60)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB, where we may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("noticed", ["before", "while writing"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    call, recipe: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, noticed: str
):
    if noticed == "while writing":  # as if another program had taken the room meanwhile
        monkeypatch.setattr("atlas_cli.merging.execute.check_space", lambda target, wanted: None)
    result = call("merge", recipe, "-o", small_disk / "out", *ROOMY)
    wanted = "of disk, and" if noticed == "before" else os.strerror(errno.ENOSPC)
    assert (result.code, result.out, len(result.error_lines)) == (1, "", 1), result.err
    assert wanted in result.err
    assert list(small_disk.iterdir()) == []


def test_a_file_that_may_not_grow_is_one_line_and_leaves_nothing(run, recipe: Path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    result = run("merge", recipe, "-o", "out", before=limit)
    assert (result.code, result.out, len(result.error_lines)) == (1, "", 1), result.err
    assert os.strerror(errno.EFBIG) in result.err
    assert not [path for path in recipe.parent.iterdir() if "out" in path.name]


def test_few_descriptors_are_one_line_and_leave_nothing(tmp_path: Path, monkeypatch):
    """Nothing but that line: torch's first operation needs a descriptor, too."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number, layers=1, width=16), shards=2)
    write_recipe(tmp_path / "r.yaml", linear(1, 2))
    warm.atlas()  # whose own folder is elsewhere
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    tune = ("finetune", "builtin:digits", "--shots", "1", "--model", "builtin:tiny", "--steps", "1")
    codes = set()
    for most, given in itertools.product((4, 5, 6), (("merge", "r.yaml"), tune)):

        def limit(most: int = most) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

        process = warm.start(*given, "-o", "out", "-q", preexec_fn=limit)
        out, err = process.communicate()
        codes.add(process.returncode)
        if process.returncode:
            assert (process.returncode, out, len(err.splitlines())) == (1, "", 1), err
            assert err.startswith("atlas: error: "), err
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == names, (most, given)
    assert 1 in codes


def test_a_kill_while_the_rest_of_a_merge_is_removed_is_in_nobodys_way(tmp_path: Path, monkeypatch):
    target = tmp_path / "out"
    staging = StagingFolder(target, "work", {"a": 8})
    with monkeypatch.context() as patched:
        patched.setattr("atlas_cli.io.staging.remove", lambda folder: None)  # as if killed before
        staging.abandon()
    (left,) = tmp_path.iterdir()
    os.utime(left, (time.time() - 3600,) * 2)
    check_place(target, force=False)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_ends_is_one_line_and_leaves_nothing(call, recipe: Path, monkeypatch):
    def exhausted(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr("atlas_cli.merging.execute.complete", exhausted)
    result = call("merge", recipe, "-o", "out", *ROOMY)
    assert (result.code, result.out, len(result.error_lines)) == (1, "", 1), result.err
    assert "memory ran out" in result.err
    assert not [path for path in recipe.parent.iterdir() if "out" in path.name]
