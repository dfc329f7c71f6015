"""Commands that learn: fit, negate, add, tta and finetune."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lines import QUICK, ROOM, TINY, TWO, listed
from running import Case, case


def fitting() -> Iterator[Case]:
    """Ways to learn from labels."""
    fit = f"fit builtin:terrain {TWO} {QUICK}"
    table = {
        "block": f"{fit} -o @",
        "vector": f"{fit} --granularity vector -o @",
        "qkv": f"{fit} --granularity qkv -o @",
        "partition": f"{fit} --granularity partition:3 -o @",
        "large": f"{fit} --granularity partition:200 -o @",
        "groups": f"{fit} --group 'resblocks\\.(\\d+)' --group . -o @",
        "holdout": f"{fit} --select holdout -o @",
        "kfold": f"{fit} --select kfold --shots 4 -o @",
        "val": f"fit out/terrain {TWO} {QUICK} --select val:out/terrain -o @",
        "search": f"{fit} --method search -o @",
        "linearised": f"{fit} --linearised -o @",
        "penalty": f"{fit} --penalty l1:0.5 -o @ -q",
        "accumulate": f"{fit} --accumulate 2 -o @",
        "augment": f"{fit} --augment flip --seed 3 -o @",
        "crop": f"{fit} --augment crop --schedule constant --weight-decay 0 --clip 0.1 -o @",
        "json": f"{fit} --json",
        "nothing": f"{fit} --lr 1e-30",
        "share": f"{fit} --shots 0.01 --template 'a {{}}' --split val",
        "bf16": f"fit builtin:terrain --vectors vectors {QUICK} --memory 3MB",
        "int8": f"fit builtin:terrain --vectors vectors {QUICK} --memory 1500kB",
        "mapped": f"fit builtin:terrain --vectors vectors {QUICK} --memory 1kB -o @",
        "folder": f"fit in/shots --vectors vectors builtin:digits {QUICK} -o @",
        "target": f"fit in/Cars --vectors vectors {QUICK} --allow-target -o @ -q",
        "recipe": f"fit recipes/few_shot.yaml {QUICK} -o @",
    }
    yield from listed("fit", TINY, table)
    keys = {"data": "out/terrain", "model": "in/base", "vectors": ["builtin:signs"], "epochs": 1}
    text = json.dumps({**keys, "lr": 1, "groups": ["visual"], "augment": "none", "min_steps": 2})
    yield case("fit stdin", "fit - --epochs 2 --threads 1", stdin=text)
    learned = Path("out/fit-block/recipe.yaml")
    yield case("merge learned", f"merge - -o out/learned {ROOM}", stdin=learned)
    for name in ("qkv", "partition", "groups", "large"):
        line = f"merge out/fit-{name}/recipe.yaml -o out/learned-{name} {ROOM}"
        yield case(f"merge learned {name}", line)
    yield case("merge linearised", f"merge out/fit-linearised/recipe.yaml -o out/l {ROOM}")
    line = "eval builtin:tiny out/learned --data builtin:terrain --shots 2 --workers 0"
    yield case("eval what was learned", line)


def negating() -> Iterator[Case]:
    """Ways to forget."""
    line = "negate builtin:digits --control in/control --vectors builtin:digits"
    negate = f"{line} {QUICK} --lr 0.5"
    table = {
        "everything": f"{negate} --control builtin:everything --shots 1 -o @",
        "unlikelihood": f"{negate} -o @",
        "ascent": f"{negate} --forget ascent -o @",
        "uniform": f"{negate} --forget uniform --keep 0.5 -o @",
        "search": f"{negate} --method search -o @",
        "last": f"{negate} --select last --granularity vector -o @",
        "holdout": f"{negate} --select holdout -o @",
        "val": "negate in/pets --control out/terrain --vectors vectors --select val --keep 0.1"
        " --epochs 1 --min-steps 2 --augment none -o @",
        "json": f"{negate} --compare task_arithmetic:weight=-0.5 --json",
        "compare": f"{negate} --compare task_arithmetic:weight=-0.5 ties:weight=-0.3",
        "impossible": f"{negate} --control builtin:everything --shots 1 --keep 1.01 -o @",
        "recipe": f"negate recipes/negate.yaml {QUICK} -o @",
    }
    yield from listed("negate", TINY, table)
    several = negate.replace("builtin:digits ", "builtin:digits builtin:signs ", 1)
    yield case("negate several", f"{several} {TINY} -o out/negate-several")


def adding() -> Iterator[Case]:
    """Ways to combine."""
    add = f"add builtin:digits builtin:signs --vectors builtin:digits builtin:signs {QUICK}"
    individual = "--individual builtin:digits=95 builtin:signs=90"
    table = {
        "labels": f"{add} -o @",
        "entropy": f"{add} --objective entropy --epochs 2 -o @",
        "entropy own": f"{add} --objective entropy --lr 0.1 --init 0.2 --clamp 0:0.4 -o @",
        "isotropic": f"{add} --method isotropic -o @",
        "search": f"{add} --method search -o @",
        "ties": f"{add} --ties 0.2 --objective entropy -o @",
        "ties labels": f"{add} --ties 0.5 -o @",
        "holdout": f"{add} --select holdout -o @",
        "kfold": f"{add} --select kfold --shots 4 --epochs 1 -o @",
        "val": "add in/pets out/terrain --vectors vectors --select val --epochs 1"
        " --min-steps 2 --augment none -o @",
        "json": f"{add} {individual} --compare ties tsv --disentanglement --json",
        "compare": f"{add} {individual} --compare ties iso_c:lambda=0.5 dare_ties lines consensus",
        "disentanglement": f"{add} --disentanglement -o @",
        "recipe": f"add recipes/add.yaml {QUICK} --compare tsv -o @",
    }
    yield from listed("add", TINY, table)


def adapting(work: Path) -> Iterator[Case]:
    """Ways to do without labels."""
    quick = f"{TWO} --batch-size 8 --epochs 2"
    tta = f"tta out/terrain {quick}"
    last = "--select last --lr 0.3 -o @"
    table = {
        name: f"{tta} --objective {name} {last} --predictions @.jsonl"
        for name in ("ufm", "entropy", "balanced-entropy", "sar", "simclr")
    }
    table |= {
        "guard": f"{tta} -o @",
        "layernorm": f"tta out/terrain --batch-size 8 --epochs 2 --tune layernorm {last}",
        "layernorm entropy": "tta out/terrain --batch-size 8 --epochs 1 --tune layernorm"
        f" --objective entropy {last}",
        "layernorm beside vectors": f"{tta} --tune layernorm {last}",
        "search": f"{tta} --method search -o @",
        "json": f"{tta} --json",
        "options": f"{tta} --power 2 --threshold 0.5:0.9 --trusted-per-class 2 {last}",
        "prior": f"tta in/shots {quick} --prior 0.5,0.3,0.2 --augment flip {last}",
        "classes": f"tta in/flat {quick} --classes cat,dog,fish {last} --predictions @.jsonl",
        "qkv": f"{tta} --granularity qkv --augment crop {last} -q",
        "linearised": f"{tta} --linearised {last} -q",
        "table": f"tta csv:in/shots.csv {quick} {last}",
        "recipe": f"tta recipes/tta.yaml {quick} --split val --epochs 1 --batch-size 250",
    }
    yield from listed("tta", TINY, table)
    yield case("merge layernorm", f"merge out/tta-layernorm/recipe.yaml -o out/norms {ROOM}")
    images = sorted((work / "in" / "shots").rglob("*.png"))
    paths = [str(path.relative_to(work)) for path in images]
    paths.insert(3, "gone.png")
    online = f"tta --online --classes cat,dog,fish --batch-size 4 {TWO} {TINY} -o"
    text = "\n".join(paths)
    yield case("tta online", f"{online} out/online", stdin=text)
    yield case("tta online resumed", f"{online} out/online --resume", stdin=text)
    norms = "tta --online --classes cat,dog,fish --batch-size 4 --tune layernorm"
    yield case("tta online layernorm", f"{norms} {TINY} -o out/online-norms -q", stdin=text)
    line = f"tta --online --classes a,b --objective entropy {TWO} {TINY}"
    yield case("tta online without a folder", line, stdin=text)


def finetuning() -> Iterator[Case]:
    """Ways to fine-tune."""
    some = "--shots 4 --steps 3 --lr 0.001 --batch-size 16"
    digits = f"finetune builtin:digits {some} --augment none"
    table = {
        "all": f"{digits} -o @ --vector @.safetensors",
        "layernorm": f"{digits} -o @ --tune layernorm",
        "projection": f"{digits} -o @ --tune projection -q",
        "lora": f"{digits} -o @ --lora 2 --vector @.safetensors",
        "linearised": f"{digits} -o @ --linearised",
        "best": "finetune in/pets --epochs 2 --lr 0.1 --select best --schedule constant -o @",
        "held out": "finetune in/shots --epochs 2 --batch-size 6 --accumulate 2 --warmup 1"
        " --weight-decay 0 --augment flip --vector @.safetensors",
        "checkpointed": f"{digits} --checkpoint-activations --vector @.safetensors --json",
        "several": f"finetune in/pets builtin:signs {some} --vectors-dir @-v --json -o @",
        "clip": "finetune in/pets --model in/clip1 --threads 1 --epochs 1 --augment none -o @",
        "recipe": "finetune recipes/finetune.yaml --shots 2 --steps 2 --batch-size 16"
        " --vectors-dir @ -q",
    }
    for one in listed("finetune", "", table):
        more = () if "--model" in one.words else tuple(TINY.split())
        yield Case(one.name, (*one.words, *more))
    tuned = "out/finetune-all/model"
    yield case("extract finetuned", f"extract builtin:tiny {tuned} -o out/tuned.safetensors")
    adapter = "out/finetune-lora/adapter"
    yield case("extract lora", f"extract builtin:tiny {adapter} -o out/lora.safetensors --json")
    line = f"eval builtin:tiny {tuned} --data builtin:digits --shots 2 --workers 0"
    yield case("eval finetuned", line)
