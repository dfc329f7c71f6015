"""Class names and prompts of well-known datasets, by the names of the datasets.

The facts are in known.toml; those of ImageNet are read from the text of open_clip, since importing
open_clip imports torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atlas_cli.errors import UsageError, nearest

_FACTS = Path(__file__).with_name("known.toml")


@dataclass(frozen=True)
class KnownDataset:
    """What is known of a dataset; `classes` is empty where only the data themselves name them.

    `labels` are distributors' names of the same classes. With `by_position`, the numbers of the
    classes are the same wherever the dataset comes from.
    """

    name: str
    templates: tuple[str, ...]
    classes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    torchvision: str | None = None
    hub: str | None = None
    also: tuple[str, ...] = ()
    by_position: bool = True

    def prompt_names(self, labels: Sequence[str], *, ordered: bool = False) -> tuple[str, ...]:
        """What prompts call classes that a distributor calls `labels`, in that order.

        Names decide; numbers do only if the labels are nothing but numbers, or with `ordered`,
        which says that the distributor numbers the classes as this table does. Classes that are not
        found keep their names, with spaces for underscores.
        """
        known = {_plain(one): name for name, one in zip(self.classes, self._labels, strict=True)}
        known |= {_plain(name): name for name in self.classes}
        found = [known.get(_plain(label)) for label in labels]
        if len(set(found)) == len(self.classes) == len(labels) and None not in found:
            return tuple(name for name in found if name)
        numbers = list(labels) == [str(number) for number in range(len(labels))]
        if len(labels) == len(self.classes) and (ordered or (numbers and self.by_position)):
            return self.classes
        return spelt(labels)

    @property
    def _labels(self) -> tuple[str, ...]:
        return self.labels or self.classes


def spelt(labels: Sequence[str]) -> tuple[str, ...]:
    """Labels as prompts spell them: with spaces for underscores."""
    return tuple(label.replace("_", " ") for label in labels)


@cache
def known_datasets() -> Mapping[str, KnownDataset]:
    """Every well-known dataset by its name."""
    found = {}
    for name, row in tomllib.loads(_FACTS.read_text("utf-8")).items():
        facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        found[name] = KnownDataset(name, **facts)
    return found | {"imagenet": _imagenet()}


def find_known(name: str) -> KnownDataset | None:
    """The well-known dataset of a name, however it is spelt: `owner/wds_cifar10`, `CIFAR-10`."""
    wanted = re.sub(r"^(wds|vtab)+", "", _plain(name.rpartition("/")[2]))
    for one in known_datasets().values():
        if wanted in {_plain(word) for word in (one.name, one.torchvision or "", *one.also)}:
            return one
    return None


def named_templates(text: str, where: str) -> Sequence[str]:
    """The prompts of the dataset of a name, or a text that is none. Raises UsageError."""
    found = find_known(text)
    if found is None and re.fullmatch(r"[\w-]+", text):
        hint = nearest(text, known_datasets())
        raise UsageError(
            f"{where}: '{text}' is no well-known dataset{hint} (`atlas data` lists them), and "
            "as a prompt it needs one {} where the class name goes"
        )
    return found.templates if found else [text]


def named_classes(texts: Sequence[str]) -> list[str]:
    """Class names, or those of the well-known dataset that is the only name given."""
    found = find_known(texts[0]) if len(texts) == 1 else None
    return list(found.classes) if found and found.classes else list(texts)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


# ImageNet, from the text of open_clip ---------------------------------------------------------


def _imagenet() -> KnownDataset:
    spec = importlib.util.find_spec("open_clip")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "zero_shot_metadata.py"
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            texts = tuple(_text(element) for element in node.value.elts)
            found[ast.unparse(node.targets[0])] = texts
    templates, classes = found["OPENAI_IMAGENET_TEMPLATES"], found["IMAGENET_CLASSNAMES"]
    return KnownDataset(
        "imagenet", templates, classes, torchvision="ImageNet", also=("imagenet1k", "ilsvrc2012")
    )


def _text(element: ast.expr) -> str:
    """A string, or what `lambda c: f"a photo of a {c}."` makes of {}."""
    if isinstance(element, ast.Lambda) and isinstance(element.body, ast.JoinedStr):
        parts = element.body.values
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
    return str(ast.literal_eval(element))
