"""Text and files without what differs from run to run."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST = 2_000_000  # letters of a text that is kept; of a longer one, the digest


@dataclass
class Plain:
    """Text and files without what differs from run to run.

    A digest that is printed may be that of a file with the version in it; it is shown as the
    digest of that file without.
    """

    folder: Path
    versions: Mapping[str, str]
    known: dict[str, str] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)  # digest -> text

    def __post_init__(self) -> None:
        package = importlib.util.find_spec("atlas_cli")
        assert package is not None
        assert package.origin is not None
        self._paths = {str(self.folder): "TMP", str(Path(package.origin).parent): "PACKAGE"}
        for path in sorted(Path(package.origin).parent.rglob("*.safetensors")):
            self.digest(path.read_bytes())
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
        for digest in _digests(content):
            self.known |= {digest: plain, digest[:12]: plain[:12]}
        return plain

    def parts(self, name: str, content: bytes) -> dict[str, str]:
        """A file under its name, and what is said about weights under a name of its own."""
        found = {name: self.digest(content)}
        if (header := _safetensors_header(content)) is not None:
            found[f"{name}#metadata"] = self.keep(self.text(_metadata(header)))
        else:
            with suppress(UnicodeDecodeError):
                self.keep(self.text(content.decode()))
        return found

    def keep(self, text: str) -> str:
        """The digest of a text, which is kept by it."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) <= LONGEST:
            self.contents[digest] = text
        return digest

    def _left(self, content: bytes) -> bytes:
        """Of weights, names, types, shapes and numbers, in the order of names."""
        if (header := _safetensors_header(content)) is not None:
            return b"".join(_tensors(header, content))
        try:
            return self.text(content.decode()).encode()
        except UnicodeDecodeError:
            return content


def _digests(content: bytes) -> Iterator[str]:
    """The names that a file may have in what is printed."""
    yield hashlib.sha256(content).hexdigest()
    if importlib.util.find_spec("blake3"):
        yield importlib.import_module("blake3").blake3(content).hexdigest()


def _tensors(header: Mapping[str, Any], content: bytes) -> Iterator[bytes]:
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for name in sorted(header.keys() - {"__metadata__"}):
        entry = header[name]
        first, last = entry["data_offsets"]
        yield json.dumps([name, entry["dtype"], entry["shape"], last - first]).encode()
        yield content[start + first : start + last]


def _metadata(header: Mapping[str, Any]) -> str:
    """What is said about weights, and the order in which they are stored."""
    said = {}
    for key, value in header.get("__metadata__", {}).items():
        try:
            said[key] = json.loads(value)
        except ValueError:
            said[key] = value
    stored = header.keys() - {"__metadata__"}
    order = sorted(stored, key=lambda name: (header[name]["data_offsets"], name))
    return json.dumps({**said, "order": order}, indent=1, sort_keys=True)


def _safetensors_header(content: bytes) -> dict[str, Any] | None:
    length = struct.unpack("<Q", content[:8])[0] if len(content) > 8 else 0
    if not 0 < length <= len(content) - 8:
        return None
    try:
        found = json.loads(content[8 : 8 + length])
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    tensors = [entry for key, entry in found.items() if key != "__metadata__"]
    whole = all(isinstance(entry, dict) and "data_offsets" in entry for entry in tensors)
    return found if whole else None
