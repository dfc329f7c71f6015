"""Every case, in order: what succeeds first, and then every mistake."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from bad_inputs import write_bad
from inputs import write_world
from learning import adapting, adding, finetuning, fitting, negating
from lines import QUICK, ROOM, TINY, TWO, alone, listed
from merges import merging, merging_options
from mistakes import mistakes
from running import Case, case
from wrong_merges import wrong_merges, wrong_parameters
from wrong_recipes import wrong_types, wrong_values

COMMANDS = (
    *("demo", "eval", "draw", "finetune", "extract", "fit", "negate", "add", "tta"),
    *("inspect", "merge", "report"),
)


def every_case(work: Path) -> Iterator[Case]:
    """All of them, in order: some need what those before them have written."""
    world = write_world(work)
    yield from helping()
    yield from starting()
    yield from drawing()
    yield from extracting()
    yield from merging(work)
    yield from merging_options(work)
    yield from evaluating()
    yield from fitting()
    yield from negating()
    yield from adding()
    yield from adapting(work)
    yield from finetuning()
    yield from inspecting()
    yield from going_on()
    write_bad(world)
    yield from alone(mistakes())
    yield from alone(wrong_types())
    yield from alone(wrong_values())
    yield from alone(wrong_merges())
    yield from alone(wrong_parameters(work))


def helping() -> Iterator[Case]:
    """What is printed about the commands."""
    yield case("help", "--help")
    yield case("help without arguments", "")
    yield case("version", "--version")
    for command in COMMANDS:
        yield case(f"help {command}", f"{command} --help")
    yield case("help in a narrow window", "eval --help", environment={"COLUMNS": "60"})


def starting() -> Iterator[Case]:
    """Processes of their own."""
    line = "eval builtin:tiny --data builtin:digits --shots 1 --workers 0"
    yield case("process version", "--version", process=True)
    yield case("process help", "--help", process=True)
    yield case("process eval", line, process=True)
    yield case("process mistake", "evall", process=True)
    yield case("process recipe", "merge -", stdin="merge_method: tise\n", process=True)
    yield case("process closed stdout", line, sink="closed", process=True)
    yield case("process full disk", line, sink="full", process=True)
    away = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    data = "--data builtin:digits --shots 1"
    yield case("process unreachable", f"eval me/clip {data}", process=True, environment=away)
    cache = {"ATLAS_CACHE": "recipes/README.md"}
    yield case("process no cache", line, process=True, environment=cache)
    yield case("closed stdout", line, sink="closed")
    yield case("full disk behind stdout", line, sink="full")
    yield case("closed stdout of help", "--help", sink="closed")


def drawing() -> Iterator[Case]:
    """Images of every built-in task."""
    tasks = "digits letters house_numbers signs textures terrain counts silhouettes everything"
    for name in tasks.split():
        yield case(f"draw {name}", f"draw builtin:{name} -o out/drawn --shots 1")
        shutil.rmtree("out/drawn", ignore_errors=True)
    yield case("draw seed", "draw builtin:digits -o out/drawn --shots 1 --seed 3 --json -q")
    shutil.rmtree("out/drawn", ignore_errors=True)
    yield case("draw terrain two", "draw builtin:terrain -o out/terrain --shots 2")
    for place in Path("out/terrain").glob("*/*"):  # two images of a class are enough
        for path in sorted(place.iterdir())[2:] if place.is_dir() else ():
            path.unlink()


def extracting() -> Iterator[Case]:
    """Task vectors of many kinds of checkpoints, in every form."""
    files = "in/tuned/cars.safetensors in/tuned/signs.safetensors"
    yield case("extract several", f"extract builtin:tiny {files} -o vectors")
    car = "extract builtin:tiny in/tuned/cars.safetensors -o @.safetensors"
    forms = {
        "fp16": "--dtype fp16",
        "bf16": "--dtype bf16 --json",
        "int8": "--dtype int8 --json -q",
        "rank": "--rank 4",
        "rank fp16": "--rank 3 --dtype fp16",
        "energy": "--energy 0.9",
        "scale": "--scale -0.5",
        "name": "--name my-cars",
        "ignore": "--ignore ln_pre positional",
    }
    yield from listed("extract", "", {name: f"{car} {more}" for name, more in forms.items()})
    pickled = "extract builtin:tiny in/pickled"
    table = {
        "folder": "extract in/base cars -o @.safetensors",
        "text": "extract in/base cars -o @.safetensors --scope text",
        "all": "extract in/base cars signs -o @ --scope all --dtype fp16 --json",
        "state": f"{pickled}/state.pt -o @.safetensors",
        "epoch": f"{pickled}/epoch.pt -o @.safetensors --dtype int8",
        "when": f"{pickled}/when.pt -o @.safetensors --allow-global time.struct_time",
        "adapter": "extract builtin:tiny in/adapter -o @.safetensors",
        "adapter fp16": "extract builtin:tiny in/adapter -o @.safetensors --dtype fp16 --scale 2",
        "vector": "extract builtin:tiny vectors/cars.safetensors -o @.safetensors --scale -1",
        "vector int8": "extract builtin:tiny vectors/cars.safetensors -o @.safetensors"
        " --dtype int8 --name again",
        "clip": "extract in/clip1 in/clip2 -o @.safetensors --scope all",
        "stdout": "extract builtin:tiny in/tuned/cars.safetensors -o -",
        "stdout fp16": "extract in/base cars -o - --dtype fp16 -q",
        "named": "extract builtin:tiny in/tuned/cars.safetensors -o @ --name 'my cars' -q",
        "force": "extract builtin:tiny cars -o out/extract-fp16.safetensors --force",
        "wrong base": "extract in/base in/far -o @.safetensors -q",
    }
    yield from listed("extract", "", table)
    yield case(
        "extract to a terminal", "extract builtin:tiny cars -o - --dtype fp16", sink="terminal"
    )


def evaluating() -> Iterator[Case]:
    """Scores and predictions."""
    some = "--data builtin:digits builtin:signs --shots 2"
    many = "eval builtin:tiny cars out/merge-ties"
    table = {
        "json": f"eval builtin:tiny {some} --json",
        "csv": f"eval builtin:tiny {some}",
        "several": f"{many} {some}",
        "several json": f"{many} {some} --json",
        "predictions": f"{many} {some} --predictions out/predictions.jsonl",
        "predictions to stdout": f"eval builtin:tiny {some} --predictions -",
        "folder": "eval builtin:tiny --data in/shots out/terrain --json",
        "split": "eval builtin:tiny --data out/terrain in/pets --split val",
        "table": "eval builtin:tiny --data csv:in/shots.csv",
        "templates": f"eval builtin:tiny {some} --template 'a {{}}' 'the {{}}.' --predictions -",
        "seed": f"eval builtin:tiny {some} --seed 4 --batch-size 7 --json",
        "clip": "eval in/clip1 --data in/shots --json",
        "recipe": "eval recipes/eval.yaml --shots 2",
        "recipe json": "eval recipes/eval.yaml --shots 1 --seed 2 --json --split val",
        "learned": "eval out/merge-atlas --data builtin:digits --shots 2 --device cpu",
    }
    yield from listed("eval", "--workers 0", table)
    yield case("eval workers", f"eval builtin:tiny {some} --workers 1")
    recipe = "models: [builtin:tiny]\ndata: [builtin:digits]\nshots: 1\nsplit: val\n"
    yield case("eval recipe from stdin", "eval - --workers 0", stdin=recipe)
    terminal = f"{many} {some} --workers 0 -q"
    yield case("eval on a terminal", terminal, sink="terminal")
    scores = "out/scores.json"
    line = f"merge recipes/merge/ties.yaml -o out/card --evaluation {scores} {ROOM}"
    yield case("merge evaluation missing", line)
    yield case("merge for a card", f"merge recipes/merge/ties.yaml -o out/card {ROOM}")
    told = '{"atlas": "0", "models": [{"reference": "m|1", "commit": null, "sha256": {"m": "00"}}],'
    told += '"results": [{"model": "m|1", "data": "d", "split": "test", "images": 8, "top1": 0.5,'
    Path(scores).write_text(f'{told} "low": 0.2, "high": 0.8}}]}}')
    yield case("merge evaluation", f"{line} --force")


def inspecting() -> Iterator[Case]:
    """What vectors, models and runs hold, as text, tables, pictures and pages."""
    vectors = "vectors/cars.safetensors vectors/signs.safetensors"
    table = {
        "vector": "inspect vectors/cars.safetensors",
        "vector json": "inspect vectors/cars.safetensors --json",
        "int8": "inspect out/extract-int8.safetensors --blocks",
        "factors": "inspect out/extract-rank.safetensors out/extract-adapter.safetensors --json",
        "vectors": f"inspect {vectors} out/extract-fp16.safetensors",
        "vectors by block": f"inspect {vectors} --blocks",
        "vectors json": f"inspect {vectors} builtin:tiny --json",
        "model": "inspect builtin:tiny",
        "model json": "inspect builtin:tiny in/clip2 --json",
        "merged": "inspect out/merge-shards",
        "clip": "inspect in/clip1 --json",
        "pickle": "inspect in/pickled/state.pt",
        "run": "inspect out/fit-block",
        "run json": "inspect out/fit-block --json",
        "run of add": "inspect out/add-labels --json",
        "run of tta": "inspect out/tta-ufm --json",
        "large run": "inspect out/fit-large --json",
        "learned recipe": "inspect out/fit-qkv/recipe.yaml",
        "learned recipe json": "inspect out/fit-qkv/recipe.yaml --json",
        "coefficients": "inspect out/fit-vector/coefficients.json --json",
        "large table": "inspect out/fit-large/coefficients.safetensors",
        "plot png": "inspect out/fit-block --plot @.png",
        "plot svg": f"inspect {vectors} --plot @.svg -q",
        "plot html": "inspect out/tta-ufm/recipe.yaml --plot @.html",
        "plot vectors": f"inspect {vectors} --plot @.png",
    }
    yield from listed("inspect", "", table)
    vector = Path("vectors/cars.safetensors")
    yield case("inspect stdin", "inspect - --json", stdin=vector)
    yield case("inspect recipe stdin", "inspect -", stdin=Path("out/fit-block/recipe.yaml"))
    for name in ("vector", "vectors", "model", "run", "learned recipe"):
        yield case(f"inspect {name} on a terminal", f"{table[name]} -q", sink="terminal")
    report = "report out/fit-block out/negate-ascent out/add-labels out/tta-ufm"
    yield case("report", f"{report} -o out/report.html")
    yield case("report search", "report out/fit-search out/online -o -")


def going_on() -> Iterator[Case]:
    """Runs that are there already."""
    fit = f"fit builtin:terrain {TWO} {QUICK} {TINY} -o out/fit-block"
    yield case("fit again", fit)
    yield case("fit resumed", f"{fit} --resume")
    yield case("fit resumed otherwise", f"{fit} --resume --lr 0.2")
    yield case("fit resumed elsewhere", f"{fit} --resume --vectors builtin:digits")
    yield case("fit forced", f"{fit} --force --lr 0.2")
    some = "--shots 4 --steps 3 --lr 0.001 --batch-size 16 --augment none"
    tune = f"finetune builtin:digits {some} {TINY} -o out/finetune-all"
    yield case("finetune again", tune)
    yield case("finetune resumed", f"{tune} --resume")
    yield case("finetune resumed otherwise", f"{tune} --resume --clip 3")
    extract = "extract builtin:tiny in/tuned/cars.safetensors -o vectors/cars.safetensors"
    yield case("extract again", extract)
    yield case("merge again", f"merge recipes/merge/ties.yaml -o out/merge-ties {ROOM}")
    yield case("report again", "report out/fit-block -o out/report.html")
    yield case("draw again", "draw builtin:digits -o out/terrain")
    yield case("demo elsewhere", "demo -o in/shots")
