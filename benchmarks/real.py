"""Few-shot learning on photographs: every method of `atlas fit`, beside its baselines.

    python benchmarks/real.py --data FOLDER --model MODEL [--work DIR] [--pool TASK...] [--quick]

FOLDER has a folder per task with train/CLASS, test/CLASS and info.json: the class names by folder
and a prompt template. MODEL is an open_clip folder; it is run at --size pixels. A task vector is
made of every task by `atlas finetune`; every target is then learned with the vectors of all
others. Nothing is selected on the test split. Fine-tuned vectors are kept in DIR and finished rows
in a file, benchmarks/rows/real.jsonl unless --rows names another, so that a run that was stopped
goes on. Prints one markdown table per number of shots. --quick takes three targets, four shots, one
seed and the main ways.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from contenders import ROWS, USUAL, WAYS, measure_all, tables

QUICK = ("zero-shot", "tip-f", "lpp", "probe", "block", "fast", "best")
STEPS, BATCH, RATE = 60, 32, 5e-4  # of fine-tuning


# Stages that are kept ---------------------------------------------------------------------------


def lay_out(source: Path, work: Path) -> Path:
    """A task as atlas reads it: links to its splits, class names and a template."""
    target = work / "data" / source.name
    if not target.exists():
        info = json.loads((source / "info.json").read_text("utf-8"))
        target.mkdir(parents=True)
        for split in ("train", "test"):
            (target / split).symlink_to((source / split).resolve())
        names = [info["classes"][name] for name in sorted(info["classes"])]
        (target / "classnames.txt").write_text("\n".join(names) + "\n", "utf-8")
        (target / "templates.txt").write_text(info["template"] + "\n", "utf-8")
    return target


def resized(model: Path, size: int, work: Path) -> Path:
    """The model with another image size in its configuration; all else is copied."""
    target = work / f"model{size}"
    if not target.exists():
        target.mkdir(parents=True)
        shutil.copytree(model, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
        target.chmod(0o755)
        config = json.loads((model / "open_clip_config.json").read_text("utf-8"))
        config["model_cfg"]["vision_cfg"]["image_size"] = size
        config["preprocess_cfg"]["size"] = size
        (target / "open_clip_config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return target


def make_vector(task: Path, model: Path, work: Path) -> Path:
    """The task vector of a task, by `atlas finetune`, unless it is there."""
    path = work / "vectors" / f"{task.name}.safetensors"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        run = work / "runs" / task.name
        run.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "atlas_cli", "finetune", str(task), "--model", str(model)]
        command += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--lr", str(RATE)]
        command += ["-o", str(run), "--vector", str(path), "--quiet", "--threads", "1"]
        command += ["--resume"] if run.exists() else []
        subprocess.run(command, check=True)
        shutil.rmtree(run / "model", ignore_errors=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of tasks")
    parser.add_argument("--model", type=Path, required=True, help="an open_clip folder")
    parser.add_argument("--work", type=Path, default=Path("real_work"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--pool", nargs="+", help="tasks to make vectors of; default all")
    parser.add_argument("--targets", nargs="+", help="tasks to learn; default all of the pool")
    parser.add_argument("--rows", type=Path, default=ROWS / "real.jsonl", metavar="FILE")
    parser.add_argument("--ways", nargs="+", default=USUAL, choices=WAYS, metavar="WAY")
    parser.add_argument("--quick", action="store_true", help="four shots of one seed, few ways")
    options = parser.parse_args()
    found = sorted(path for path in options.data.iterdir() if (path / "info.json").exists())
    pool = options.pool or [path.name for path in found]
    paths = {path.name: lay_out(path, options.work) for path in found if path.name in pool}
    model = resized(options.model, options.size, options.work)
    vectors = {name: make_vector(path, model, options.work) for name, path in paths.items()}
    targets, shots, seeds, ways = (
        options.targets or pool,
        options.shots,
        options.seeds,
        options.ways,
    )
    if options.quick:
        targets, shots, seeds, ways = targets[:3], [4], [0], QUICK

    def target(task: str, k: int, seed: int) -> dict[str, Any]:
        others = [str(path) for name, path in vectors.items() if name != task]
        given = {"data": str(paths[task]), "model": str(model), "vectors": others}
        return {**given, "shots": k, "seed": seed}

    about = {"model": options.model.name, "size": options.size, "pool": sorted(pool)}
    about |= {"steps": STEPS, "batch": BATCH, "rate": RATE}
    rows = measure_all(options.rows, target, targets, shots, seeds, ways, about)
    print("\n".join(tables(rows, targets, shots, seeds)))


if __name__ == "__main__":
    main()
