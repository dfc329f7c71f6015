"""One grammar of data references, and an order that no file system can change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import write_images

from atlas_cli.datasets.dataset import Dataset, Sample, expand_references, few_shot, open_dataset
from atlas_cli.errors import DataError, UsageError


def test_a_class_folder_gives_classes_in_order_and_underscores_as_spaces(tmp_path: Path):
    write_images(tmp_path / "data", ["tabby_cat", "Dog", "ape"], count=2)
    dataset = open_dataset(str(tmp_path / "data"))
    assert dataset.classes == ("Dog", "ape", "tabby cat")
    assert [s.key for s in dataset.samples[:2]] == ["Dog/0.png", "Dog/1.png"]
    assert [s.label for s in dataset.samples] == [0, 0, 1, 1, 2, 2]
    assert dataset.templates == ("a photo of a {}.",)


def test_the_order_is_the_same_however_the_files_came_to_be(tmp_path: Path):
    write_images(tmp_path / "one", ["b", "a"], count=12)
    for name in ("b", "a"):
        (tmp_path / "two" / name).mkdir(parents=True)
    for number in (11, 3, 7, 0, 10, 2, 1, 9, 8, 4, 6, 5):
        for name in ("a", "b"):
            file = f"{name}/{number}.png"
            shutil.copy(tmp_path / "one" / file, tmp_path / "two" / file)
    assert open_dataset(f"{tmp_path}/one").samples == open_dataset(f"{tmp_path}/two").samples


def test_splits_are_found_under_their_usual_names(tmp_path: Path):
    for split, count in (("train", 3), ("valid", 2), ("test", 1)):
        write_images(tmp_path / split, count=count)
    sizes = {s: len(open_dataset(str(tmp_path), split=s).samples) for s in ("train", "val", "test")}
    assert sizes == {"train": 6, "val": 4, "test": 2}
    assert open_dataset(str(tmp_path)).split == "test"


def test_without_a_test_folder_val_is_taken_and_train_never(tmp_path: Path):
    write_images(tmp_path / "train")
    with pytest.raises(UsageError, match="no test or val folder"):
        open_dataset(str(tmp_path))
    write_images(tmp_path / "val")
    assert open_dataset(str(tmp_path)).split == "val"


def test_a_flat_folder_has_no_labels(tmp_path: Path):
    write_images(tmp_path, ["."])
    dataset = open_dataset(str(tmp_path))
    assert not dataset.labelled
    assert dataset.classes == ()
    assert len(dataset.samples) == 3


def test_names_and_templates_come_from_text_files(photos: Path):
    (photos / "classnames.txt").write_text("a small cat\n\na large dog\n")
    (photos / "templates.txt").write_text("art of {}.\nmusic of {}!\n")
    dataset = open_dataset(str(photos))
    assert dataset.classes == ("a small cat", "a large dog")
    assert dataset.templates == ("art of {}.", "music of {}!")
    assert open_dataset(str(photos), templates=["my {}"]).templates == ("my {}",)
    assert dataset.ignored == ()


def test_files_that_are_no_images_are_listed_not_hidden(photos: Path):
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / ".DS_Store").write_text("x")
    assert open_dataset(str(photos)).ignored == ("cat/notes.txt",)


def test_a_table_gives_paths_labels_and_splits(photos: Path):
    table = photos / "list.csv"
    table.write_text(
        "path,label,split\ndog/1.png,dog,test\ncat/0.png,tabby_cat,test\ncat/1.png,x,train\n"
    )
    dataset = open_dataset(f"csv:{table}")
    assert dataset.classes == ("dog", "tabby cat")
    assert dataset.samples == (Sample("dog/1.png", 0), Sample("cat/0.png", 1))
    assert len(open_dataset(f"csv:{table}", split="train").samples) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na,b\n", "needs a column 'path'"),
        ("path,label\n", "has no rows"),
        ("path,label\na.png\n", "line 2 does not have a value"),
        ("path,label\na.png,cat,more\n", "line 2 does not have a value"),
        ("path,label\n,cat\n", "line 2 does not have a value"),
        ('path,label\n"a', "cannot be read as a CSV table"),
    ],
)
def test_a_broken_table_is_an_error_that_names_the_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_dataset(f"csv:{tmp_path}/t.csv")


def test_an_empty_class_is_named(photos: Path):
    (photos / "emu").mkdir()
    with pytest.raises(DataError, match="class 'emu' has no images"):
        open_dataset(str(photos))


def test_a_class_missing_from_one_split_is_named(tmp_path: Path):
    write_images(tmp_path / "train", ["a", "b"])
    write_images(tmp_path / "test", ["a"])
    with pytest.raises(DataError, match="class 'b' has no images"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "has no images"),
        (lambda p: (p / "classnames.txt").write_text("a\n"), "has no images"),
        (lambda p: (write_images(p), (p / "classnames.txt").write_text("a\n")), "1 names for 2"),
        (lambda p: (write_images(p), (p / "templates.txt").write_text("a\n")), "needs one {}"),
        (lambda p: (write_images(p), write_images(p, ["."])), "images beside class folders"),
        (lambda p: (write_images(p), (p / "classnames.txt").write_bytes(b"\xff")), "UTF-8"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, make, message: str):
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    with pytest.raises((DataError, UsageError), match=message):
        open_dataset(str(folder))


def test_a_misspelt_task_gets_the_nearest_right_word():
    with pytest.raises(UsageError, match="did you mean 'digits'"):
        expand_references(["builtin:digitz"])
    with pytest.raises(UsageError, match="no such data: nowhere"):
        expand_references(["nowhere"])


def test_all_stands_for_every_builtin_task():
    from atlas_cli.datasets.builtin import TASKS

    assert expand_references(["builtin:all"]) == [f"builtin:{name}" for name in TASKS]


def test_few_shot_subsets_are_pinned_balanced_and_nested():
    dataset = open_dataset("builtin:digits", split="train")
    four, two = few_shot(dataset, 4, seed=1), few_shot(dataset, 2, seed=1)
    assert len(four.samples) == 4 * len(dataset.classes)
    assert set(two.samples) < set(four.samples)
    assert set(four.samples) != set(few_shot(dataset, 4, seed=2).samples)
    assert [s.key for s in two.samples[:4]] == ["00110", "00450", "00921", "00501"]


def test_few_shot_subsets_do_not_depend_on_the_order_of_the_files():
    samples = tuple(Sample(f"a/{n}.png", 0) for n in range(50))
    forward = Dataset("x", "all", ("a",), (), samples)
    backward = Dataset("x", "all", ("a",), (), samples[::-1])
    assert few_shot(forward, 5, 0).samples == few_shot(backward, 5, 0).samples


def test_a_class_with_too_few_images_is_named(photos: Path):
    with pytest.raises(DataError, match="class 'cat' has 3 images, fewer than 4"):
        few_shot(open_dataset(str(photos)), 4, seed=0)


def test_labels_can_be_taken_away(photos: Path):
    dataset = open_dataset(str(photos)).unlabelled()
    assert {sample.label for sample in dataset.samples} == {None}


def test_an_unreadable_folder_is_named(photos: Path, as_ordinary_user):
    (photos / "cat").chmod(0)
    result = as_ordinary_user("eval", "builtin:tiny", "--data", photos)
    assert result.code == 1
    assert result.error_lines == [f"atlas: error: {photos}/cat: cannot be read: Permission denied"]
