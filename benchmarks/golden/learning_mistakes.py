"""Mistakes of commands that learn."""

from __future__ import annotations

from lines import TINY

FIT = f"fit in/shots --vectors vectors --epochs 1 --min-steps 1 --augment none {TINY}"
NEGATE = f"negate in/shots --control in/control --vectors vectors --epochs 1 --min-steps 1 {TINY}"
ADD = f"add in/shots in/control --vectors vectors --epochs 1 --min-steps 1 {TINY}"
TTA = f"tta in/shots --vectors vectors --epochs 1 --batch-size 8 {TINY}"
TUNE = f"finetune in/pets --epochs 1 --batch-size 9 --augment none {TINY}"

OF_LEARNING = """
--shots few
--shots 0
--shots 9
--shots 1.5
--vectors nowhere.safetensors
--vectors builtin:digit
--vectors in/shots
--vectors recipes/README.md
--vectors vectors vectors/cars.safetensors
--vectors bad/vectors/nan.safetensors
--vectors bad/vectors/base.safetensors
--vectors bad/vectors/norm.safetensors
--vectors bad/vectors/lacks.safetensors
--vectors bad/vectors/scope.safetensors
--vectors bad/pickles/empty.safetensors
--lr 1e30 --epochs 4
--lr 0
--lr nan
--lr inf
--lr fast
--select best
--select same
--select val
--select val:x
--select val:nowhere
--select val:out/terrain
--select holdout --shots 1
--select kfold --shots 1
--method guess
--method isotropic
--granularity layer
--granularity partition:0
--group (
--memory much
--penalty l3:1
--augment mirror
--augment mild
--schedule steps
--epochs 0
--epochs 2.5
--batch-size -1
--accumulate 0
--min-steps 0
--clip -1
--weight-decay -0.1
--weight-decay inf
--resume
--resume -o out/nowhere/x
--model builtin:tny
--model cars
--model me/clip
--model bad/shape
--text ./missing
--arch ViT
--split tset
--split val
--template x
--device gpu
--threads 0
--seed -1
-o recipes
-o recipes/README.md
-o nowhere/at/all
-o bad/runs/json --resume
-o bad/runs/whole --resume
--granularity partition:700
--epochs 0 --select x --shots 0 --memory y --clip 0
--epoch 3
"""

DATA_OF_LEARNING = ("nowhere", "in/flat", "bad/one", "bad/broken", "bad/onlytrain", "bad/names")

OF_NEGATE = """
--control nowhere
--control in/flat
--control in/shots
--keep 0
--keep inf
--forget it
--compare tis
--compare ties:densty=1
--compare passthrough
"""

OF_ADD = """
--objective loss
--init inf
--clamp 1
--clamp 1:0
--ties 2
--ties 0.2
--individual in/shots
--individual cars=90
--individual in/shots=190
--compare tis
--compare ties:densty=1
--compare ties:density=x
--compare slerp
--disentanglement
in/shots
"""

OF_TTA = """
--classes cat
--classes cat,dog,cat
--classes nowhere.txt
--classes in/shots.csv
--trusted-per-class 0
--trusted-per-class x
--objective tent
--tune head
--tune layernorm
--tune layernorm --method search -o out/x
--tune layernorm --linearised -o out/x
--threshold 2
--threshold a:b
--power 0
--augment none
--prior 1,2
--prior cats
--prior 0.5,0.5,0
--shots 4
--select kfold
--predictions -
--predictions out/no/p.jsonl
--online
--lr 1e30 --epochs 4 --select last
--vectors nowhere
--epochs 0 --power -1 --prior x
"""

OF_FINETUNE = """
--resume
--tune head
--tune head -o out/x
--lora 2 --tune layernorm -o out/x
--lora 0 -o out/x
--lora 2 --linearised -o out/x
--select val -o out/x
--steps 3 -o out/x
--warmup -1 -o out/x
--lr 1e30 -o out/x
--lr 0 -o out/x
--model builtin:tny -o out/x
--model cars/open_clip_model.safetensors -o out/x
in/pets -o out/x
in/shots --vector out/x.safetensors
--vector out/x.pt
--vector out/x.safetensors --vectors-dir out/x
--vector nowhere/x.safetensors
--vectors-dir nowhere/at/all
--augment mild -o out/x
--shots few -o out/x
--batch-size 0 -o out/x
-o recipes
-o out/fit-block
-o out/x --epoch 3
"""

SHARED = ("--shots", "--vectors", "--lr", "--select", "--method", "--epochs", "--model", "-o")


def laid_over(base: str, line: str) -> str:
    """A command line with some of its options given otherwise."""
    option = line.split()[0]
    if option == "--vectors":
        return f"{base.replace(' --vectors vectors', '')} {line}"
    return f"{base} {line}"
