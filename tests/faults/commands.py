"""The commands that faults happen to: inputs, command lines, and what they must give."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TINY = ("--model", "builtin:tiny", "--vectors", "builtin:letters", "builtin:signs")
FEW = ("--split", "train", "--shots", "2")
SHORT = ("--epochs", "2", "--min-steps", "2", "--batch-size", "4", "--threads", "1")


@dataclass(frozen=True)
class Command:
    """A command line in a folder with `inputs`; `output` is what it writes there, if anything.

    `again` goes on with what a stopped run left.
    """

    name: str
    arguments: Sequence[str]
    output: str | None = None
    again: Sequence[str] = ()
    inputs: Sequence[str] = ()

    @property
    def resumable(self) -> bool:
        return bool(self.again) or self.name == "merge"


COMMANDS = (
    Command(
        "merge",
        ("merge", "r.yaml", "-o", "out", "--threads", "2"),
        "out",
        (),
        ("m1", "m2", "r.yaml"),
    ),
    Command(
        "extract",
        ("extract", "m1c", "m2c", "-o", "out.safetensors"),
        "out.safetensors",
        (),
        ("m1c", "m2c"),
    ),
    Command("inspect", ("inspect", "v.safetensors", "--json"), None, (), ("v.safetensors",)),
    Command(
        "eval",
        ("eval", "builtin:tiny", "--data", "photos", "--workers", "0"),
        None,
        (),
        ("photos",),
    ),
    Command(
        "eval with workers",
        ("eval", "builtin:tiny", "--data", "photos", "--workers", "2"),
        None,
        (),
        ("photos",),
    ),
    Command(
        "fit", ("fit", "photos", *TINY, *SHORT, "-o", "out"), "out", ("--resume",), ("photos",)
    ),
    Command(
        "add",
        ("add", "photos", "more", *TINY, *SHORT, "-o", "out"),
        "out",
        ("--resume",),
        ("photos", "more"),
    ),
    Command(
        "negate",
        (
            *(
                "negate",
                "letters",
                "--control",
                "digits",
                "--shots",
                "1",
                "--model",
                "builtin:tiny",
            ),
            *("--vectors", "builtin:letters", "--epochs", "1", "--min-steps", "3"),
            *("--keep", "0.1", "--select", "last", "--threads", "1", "-o", "out"),
        ),
        "out",
        ("--resume",),
        ("letters", "digits"),
    ),
    Command(
        "tta", ("tta", "photos", *TINY, *SHORT, "-o", "out"), "out", ("--resume",), ("photos",)
    ),
    Command(
        "finetune",
        (
            "finetune",
            "photos",
            "--model",
            "builtin:tiny",
            "--steps",
            "4",
            "--batch-size",
            "4",
            "-o",
            "out",
        ),
        "out",
        ("--resume",),
        ("photos",),
    ),
    Command("draw", ("draw", "builtin:digits", "-o", "out", *FEW), "out"),
    Command(
        "export",
        ("export", "run", "--classifier", "--format", "torch", "--data", "photos", "-o", "out"),
        "out",
        (),
        ("run", "photos"),
    ),
    Command(
        "push", ("push", "run", "owner/name", "--license", "mit", "--dry-run"), inputs=("run",)
    ),
    Command("data", ("data", "photos", "--json"), inputs=("photos",)),
    Command("zoo", ("zoo", "--json")),
    Command("report", ("report", "run", "-o", "out.html"), "out.html", (), ("run",)),
)


def write_inputs(folder: Path) -> None:
    """Everything that any of the commands reads."""
    import subprocess

    import warm
    from conftest import write_images, write_open_clip
    from merge_runs import linear, llama, write_model, write_recipe

    for number in (1, 2):
        write_model(folder / f"m{number}", llama(number, layers=4, width=64), shards=2)
        write_open_clip(folder / f"m{number}c", seed=number)
    write_recipe(folder / "r.yaml", linear(1, 2, dtype="float32"))
    recipe = (folder / "r.yaml").read_text().replace(str(folder) + "/", "")
    (folder / "r.yaml").write_text(recipe)
    write_images(folder / "photos", count=4)
    write_images(folder / "more", ("owl", "fox"), count=4, seed=1)
    for given in (
        *(("draw", f"builtin:{one}", "-o", one, *FEW) for one in ("letters", "digits")),
        ("extract", "builtin:tiny", "builtin:tiny", "-o", "v.safetensors", "--scale", "1"),
        ("fit", "photos", *TINY, *SHORT, "-o", "run"),
    ):
        done = subprocess.run([*warm.atlas(), *given], cwd=folder, capture_output=True, text=True)
        if done.returncode and given[0] == "extract":
            shutil.copy(
                Path(warm.__file__).parent.parent
                / "atlas_cli/sources/builtin/vectors/digits.safetensors",
                folder / "v.safetensors",
            )
        elif done.returncode:
            raise SystemExit(f"{' '.join(given)}: {done.stderr}")


def digests(path: Path) -> dict[str, str]:
    """The sha256 of every file of a result; hidden ones are not part of it."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {
        str(file.relative_to(path.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if not file.name.startswith(".")
    }
