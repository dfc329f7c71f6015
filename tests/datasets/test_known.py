"""Class names and prompts of well-known datasets, by name."""

from __future__ import annotations

import pytest

from atlas_cli.datasets.dataset import check_templates
from atlas_cli.datasets.known import find_known, known_datasets, named_classes
from atlas_cli.errors import UsageError

CLASSES = {  # as the papers of these datasets count them
    "mnist": 10,
    "svhn": 10,
    "cifar10": 10,
    "cifar100": 100,
    "stl10": 10,
    "gtsrb": 43,
    "eurosat": 10,
    "resisc45": 45,
    "dtd": 47,
    "food101": 101,
    "oxford_flowers102": 102,
    "oxford_iiit_pet": 37,
    "pcam": 2,
    "fer2013": 7,
    "rendered_sst2": 2,
    "kmnist": 10,
    "emnist_letters": 26,
    "fashion_mnist": 10,
    "imagenet": 1000,
}


def test_every_entry_is_whole():
    found = known_datasets()
    assert {name: len(one.classes) for name, one in found.items() if one.classes} == CLASSES
    for one in found.values():
        assert check_templates(one.templates, one.name) == one.templates
        assert len(set(one.templates)) == len(one.templates) > 0
        assert one.labels == () or len(one.labels) == len(one.classes)
        assert one.torchvision or one.hub
        if one.name != "imagenet":  # where two birds are a crane and a crane lifts things
            assert len(set(one.classes)) == len(one.classes)


def test_the_table_agrees_with_libraries_that_name_classes_themselves():
    from atlas_cli.io.torchvision_import import import_torchvision

    datasets = import_torchvision().datasets
    assert find_known("KMNIST").labels == tuple(datasets.KMNIST.classes)
    spelt = {name: name.lower().replace(" - ", "-") for name in find_known("FashionMNIST").classes}
    theirs = [name.lower().replace("/", " / ") for name in datasets.FashionMNIST.classes]
    assert list(spelt.values()) == theirs
    assert list(find_known("flowers").classes) == datasets.Flowers102.classes
    import open_clip

    imagenet = find_known("ImageNet-1k")
    assert imagenet.classes == tuple(open_clip.IMAGENET_CLASSNAMES)
    ours = [template.replace("{}", "newt") for template in imagenet.templates]
    assert ours == [template("newt") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]


def test_names_are_found_however_they_are_spelt():
    for text, name in (
        ("CIFAR-10", "cifar10"),
        ("clip-benchmark/wds_vtab-eurosat", "eurosat"),
        ("tanganke/stanford_cars", "stanford_cars"),
        ("NWPU-RESISC45", "resisc45"),
        ("oxford-iiit-pet", "oxford_iiit_pet"),
    ):
        assert find_known(text).name == name
    assert find_known("my photos") is None


def test_prompt_names_go_by_names_before_numbers():
    food = find_known("food101")
    labels = [name.replace(" ", "_") for name in food.classes]
    swapped = [labels[1], labels[0], *labels[2:]]
    assert food.prompt_names(swapped) == (food.classes[1], food.classes[0], *food.classes[2:])
    numbers = [str(number) for number in range(101)]
    assert food.prompt_names(numbers) == tuple(numbers), "distributors disagree on the order"
    gtsrb = find_known("gtsrb")
    assert gtsrb.prompt_names([str(number) for number in range(43)]) == gtsrb.classes
    assert gtsrb.prompt_names(["stop_sign", "yield"]) == ("stop sign", "yield")


def test_a_name_stands_for_prompts_and_for_classes():
    assert check_templates(["eurosat", "a map of {}."], "x")[1:] == (
        "a centered satellite photo of a {}.",
        "a centered satellite photo of the {}.",
        "a map of {}.",
    )
    assert named_classes(["svhn"]) == [str(number) for number in range(10)]
    assert named_classes(["cat", "svhn"]) == ["cat", "svhn"]
    with pytest.raises(UsageError, match=r"x: 'eurosatt' is no well-known .* mean 'eurosat'"):
        check_templates(["eurosatt"], "x")


def test_class_names_are_printed_for_files(call):
    assert call("data", "dtd").out.splitlines()[:2] == ["banded", "blotchy"]
    assert call("data", "svhn", "--prompts").out == 'a photo of the number: "{}".\n'
    assert '"prompts": [' in call("data", "svhn", "--json").out
    assert call("data", "--prompts").code == 2
