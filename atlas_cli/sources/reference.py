"""References: what users write for a model, and what the published kinds of them mean.

A published model is one of the weights that open_clip lists, or a repository on the Hub. Built-in
models and paths are for `sources.locate`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atlas_cli.errors import UsageError, nearest
from atlas_cli.sources.open_clip_table import open_clip_repository, open_clip_tags

Kind = Literal["builtin", "path", "open_clip", "hub"]
GRAMMAR = (
    "builtin:tiny, ARCHITECTURE/TAG or ARCHITECTURE,TAG of open_clip, "
    "OWNER/NAME[/FILE][@REVISION] on the Hub, a folder or a weight file, each with +ADAPTER or not"
)
# File names that say nothing of the task; their folder does.
PLAIN_STEM = re.compile(
    r"(open_clip_)?(pytorch_)?(adapter_)?model|(linear_|nonlinear_)?finetuned|weights|checkpoint"
    r"|full"
)


@dataclass(frozen=True)
class Reference:
    """What a user wrote, understood but not yet opened."""

    text: str
    kind: Kind
    name: str  # builtin name, path, architecture, or owner/name
    file: str | None = None
    tag: str | None = None
    revision: str | None = None
    adapter: Reference | None = None  # added to the weights, for MODEL+ADAPTER


def parse_published(text: str) -> Reference:
    """A model that open_clip lists, or else one on the Hub. Raises UsageError for neither."""
    left, slash, right = text.partition("/")
    if (pair := text.partition(","))[0] in open_clip_tags() and pair[1]:
        left, slash, right = pair  # as open_clip itself writes it
    if left in open_clip_tags():
        return _parse_open_clip(text, left, right)
    if not slash or (close := nearest(left, open_clip_tags())):
        close = close if slash else nearest(left, [*open_clip_tags(), "builtin:tiny"])
        raise UsageError(f"unknown model '{text}'{close} (a model is {GRAMMAR})")
    return parse_hub(text, text)


def _parse_open_clip(text: str, architecture: str, tag: str) -> Reference:
    tags = open_clip_tags()[architecture]
    if not tag and tags:
        example = f"{architecture}/{'openai' if 'openai' in tags else tags[0]}"
        listed = ", ".join(tags)
        raise UsageError(f"{architecture}: which weights? for example {example} (it has: {listed})")
    if tag not in tags:
        listed = ", ".join(tags) or "none"
        raise UsageError(
            f"open_clip has no weights '{tag}' for {architecture}{nearest(tag, tags)} "
            f"(it has: {listed})"
        )
    return Reference(text, "open_clip", architecture, tag=tag)


def parse_hub(text: str, address: str) -> Reference:
    """A repository on the Hub, or a file of one: OWNER/NAME[/FILE][@REVISION]."""
    path, _, revision = address.partition("@")
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    if not all(re.fullmatch(r"[\w.-]+", part) for part in (owner, name)):
        raise UsageError(f"'{text}' is no model reference (a model is {GRAMMAR})")
    if "@" in address and not revision:
        raise UsageError(f"'{text}' ends with @ but names no revision")
    return Reference(text, "hub", f"{owner}/{name}", file=file or None, revision=revision or None)


def hub_address(reference: Reference) -> tuple[str, str | None]:
    """The Hub repository, and the file in it; of an open_clip tag, those that open_clip lists."""
    if reference.kind == "hub":
        return reference.name, reference.file
    address = open_clip_repository(reference.name, reference.tag or "")
    if address is None:
        raise UsageError(f"{reference.text}: open_clip lists no weights for it on the Hub")
    owner, name, file = (*address.split("/"), "")[:3]
    return f"{owner}/{name}", file or None


def published_name(reference: Reference) -> str:
    """A name for a published model, from what it is called."""
    if reference.kind == "open_clip":
        return f"{reference.name}-{reference.tag}"
    name = reference.name.partition("/")[2] or reference.name
    if not reference.file:
        return name
    file = Path(reference.file)
    return file.parent.name or name if PLAIN_STEM.fullmatch(file.stem) else file.stem
