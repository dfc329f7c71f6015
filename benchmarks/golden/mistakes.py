"""Command lines that are wrong, or whose inputs are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inputs import WEIGHTS, tiny_folder
from learning_mistakes import (
    ADD,
    DATA_OF_LEARNING,
    FIT,
    NEGATE,
    OF_ADD,
    OF_FINETUNE,
    OF_LEARNING,
    OF_NEGATE,
    OF_TTA,
    SHARED,
    TTA,
    TUNE,
    laid_over,
)
from lines import ROOM, TINY, TWO, lines_of
from running import Case, case

SOME = "--data builtin:digits --shots 1 --workers 0"

EXTRACT = "extract builtin:tiny cars -o out/x.safetensors"
MERGE = f"merge recipes/merge/linear.yaml {ROOM}"

GENERAL = """
evall
merg
--jsn
eval
eval builtin:tiny
eval builtin:tiny --dat x
eval builtin:tiny --data
eval builtin:tiny --data missing/
eval builtin:tiny --data nowhere
eval builtin:tiny --data builtin:digit
eval builtin:tiny --data builtin:
eval builtin:tiny --data recipes/README.md
eval builtin:tiny --data csv:nowhere.csv
eval nowhere.yaml
eval recipes/add.yaml
eval recipes/merge/ties.yaml
eval recipes/README.md --data builtin:digits
draw digits -o out/x
draw builtin:digit -o out/x
draw builtin:digits
draw builtin:digits -o in/shots
draw builtin:digits -o nowhere/at/all
draw builtin:digits -o out/x --shots 0
draw builtin:digits -o out/x --shots 100000
demo --jsn
demo -o nowhere/at/all/x --force --keep more
report
report out/fit-block
report nowhere -o out/x.html
report in/shots -o out/x.html
report bad/runs/json -o out/x.html
report bad/runs/list -o out/x.html
report bad/runs/config -o out/x.html
report bad/runs/metrics -o out/x.html
report bad/runs/row -o out/x.html
report bad/runs/result -o out/x.html
report bad/runs/classes -o out/x.html
report bad/runs/recipe -o out/x.html
report bad/runs/linear -o out/x.html
report bad/runs/whole -o nowhere/x.html
inspect
inspect missing.safetensors
inspect vectors/missing.safetensors
inspect ./missing
inspect builtin:tyni
inspect - -
inspect -
inspect builtin:tiny --arch ViT-B-3
inspect builtin:tiny --plot x.gif
inspect builtin:tiny --plot nowhere/x.png
inspect builtin:tiny --plot out/x.png
inspect builtin:tiny --jsn
inspect builtin:tiny in/m1 --json
inspect vectors/cars.safetensors builtin:tiny
inspect out/fit-block out/tta-ufm
inspect out/fit-block --plot out/x.pdf
inspect bad/runs/begun
inspect bad/runs/json
inspect bad/runs/recipe
inspect bad/runs/linear/recipe.yaml
inspect recipes/fit.yaml
inspect recipes/add.yaml
inspect bad/tables/none.json
inspect bad/tables/number.json
inspect bad/tables/text.json
inspect bad/tables/nothing.json
inspect bad/tables/nonsense.json
inspect bad/tables/infinite.json
inspect bad/vectors/damaged.safetensors
inspect bad/vectors/format.safetensors
inspect bad/vectors/lacks.safetensors
inspect bad/vectors/empty.safetensors
inspect bad/vectors/nan.safetensors
inspect bad/vectors/base.safetensors vectors/cars.safetensors
inspect bad/vectors/base.safetensors out/extract-rank.safetensors vectors/cars.safetensors --json
inspect bad/empty
inspect bad/cut
inspect bad/two
inspect bad/index-gone
inspect bad/pickles/hostile.pt
"""

OF_EVAL = """
./missing
nonsense
builtin:tyni
builtin:
ViT-B-33/openai
ViT-B-32/opennai
ViT-B-32
vit-b-32/openai
ViTB32
owner/name@
owner//x
me/clip
me/clip@v1
hf://me/clip
ViT-B-32/openai
recipes
recipes/README.md
in/tuned/cars.safetensors
in/m1
bad/shape
bad/lacks
bad/more
bad/activation
bad/textonly
bad/empty
bad/short
bad/ones
bad/cut
bad/config-json
bad/config-list
bad/config-nocfg
bad/config-huge
bad/two
bad/notclip
bad/index-outside
bad/index-absolute
bad/index-gone
bad/index-empty
bad/pickles/hostile.pt
vectors/cars.safetensors
out/extract-fp16.safetensors
builtin:tiny --device gpu
builtin:tiny --device cuda
builtin:tiny --device mps
builtin:tiny --split tset
builtin:tiny --template a
builtin:tiny --template '{} {}'
builtin:tiny --arch ViT-B-3
builtin:tiny --batch-size 0
builtin:tiny --batch-size x
builtin:tiny --workers -1
builtin:tiny --shots 0
builtin:tiny --shots 9999
builtin:tiny --seed -1
builtin:tiny --text ./missing
builtin:tiny --predictions out/no/p.jsonl
builtin:tiny --predictions out
in/tuned/cars.safetensors --arch ViT-B-32
"""

OF_DATA = """
in/flat
bad/nothing
bad/names
bad/utf8
bad/templates
bad/broken
bad/broken --skip-broken
bad/truncated
bad/notes
bad/loose
bad/emu
bad/onlytrain
bad/missing
bad/one
bad/onlytrain --split val
in/shots --split train
in/shots --shots 9
csv:bad/column.csv
csv:bad/rows.csv
csv:bad/short.csv
csv:bad/long.csv
csv:bad/blank.csv
csv:bad/quote.csv
csv:bad/split.csv
csv:bad/gone.csv
in/shots.csv
builtin:digits --split vall
"""

OF_EXTRACT = """
--dtype fp61
--scope visaul
--rank 0
--rank x
--rank 4 --energy 0.9
--energy 1.5
--energy nan
--rank 4 --dtype int8
--scale 0
--scale nan
--scale x
--ignore (
--arch ViT-B-33
--json -o -
signs
signs --name x
signs -o -
cars -o out/new
builtin:tyni
./missing.pt
-o vectors/cars.safetensors
-o cars/open_clip_model.safetensors --force
-o nowhere/at/all/x.safetensors
-o recipes/README.md
-o out/x.pt
--allow-global os.system
--forc
"""

FROM_TINY = """
in/base
in/m1
bad/nan
bad/lacks
bad/lacks --ignore ln_pre ln_post
bad/more
bad/shape
bad/activation
bad/textonly
bad/ones
bad/cut
bad/two
bad/index-outside
bad/index-gone
bad/adapter-dora
bad/adapter-bias
bad/adapter-rank
bad/adapter-surprise
bad/adapter-alpha
bad/adapter-pattern
bad/adapter-kind
bad/adapter-shape
bad/adapter-place
bad/adapter-alone
in/adapter --rank 2
in/adapter --dtype int8
in/adapter --scope text
vectors/cars.safetensors --scope text
out/extract-rank.safetensors --dtype int8
bad/vectors/base.safetensors
bad/vectors/damaged.safetensors
bad/vectors/nan.safetensors
in/pickled/when.pt
in/pickled/head.pt
in/pickled/h.pt
bad/pickles/hostile.pt
bad/pickles/numbers.pt
bad/pickles/cut.pt
bad/pickles/garbage.pt
bad/pickles/page.pt
bad/pickles/pointer.pt
bad/pickles/empty.pt
bad/pickles/empty.safetensors
me/clip
in/clip1
"""

OF_MERGE = """
merge
merge nowhere.yaml -o out/x
merge recipes/README.md -o out/x
merge recipes/eval.yaml -o out/x
merge recipes/add.yaml -o out/x
merge bad/utf8/classnames.txt -o out/x
merge in/shots/cat/0.png -o out/x
merge recipes/merge/linear.yaml
merge recipes/merge/linear.yaml -o out/x --explain x
merge recipes/merge/linear.yaml --dry-run --explain (
merge recipes/merge/linear.yaml -o out/x --max-shard-size big
merge recipes/merge/linear.yaml -o out/x --memory 0
merge recipes/merge/linear.yaml -o out/x --memory much
merge recipes/merge/linear.yaml -o out/x --threads 0
merge recipes/merge/linear.yaml -o out/x --push name
merge recipes/merge/linear.yaml -o out/x --device gpu
merge recipes/merge/linear.yaml -o out/x --device cuda
merge recipes/merge/linear.yaml -o cars --force
merge recipes/merge/linear.yaml -o recipes
merge recipes/merge/linear.yaml -o recipes --force --memory 8GB
merge recipes/merge/linear.yaml -o recipes/README.md --memory 8GB
merge recipes/merge/linear.yaml -o nowhere/at/all
merge recipes/merge/linear.yaml -o out/x --evaluation nowhere.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/words.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/list.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/row.json
merge recipes/merge/linear.yaml -o out/x --evaluation bad/scores/none.json
merge recipes/merge/linear.yaml -o out/x --dryrun
merge bad/runs/whole/recipe.yaml -o out/x --memory 8GB
merge bad/runs/recipe/recipe.yaml -o out/x --memory 8GB
merge bad/runs/linear/recipe.yaml -o out/x --memory 8GB
"""


def mistakes() -> Iterator[Case]:
    """Command lines that are wrong, or whose inputs are."""
    lines = lines_of(GENERAL)
    for line in lines_of(OF_EVAL):
        model, _, more = line.partition(" ")
        lines.append(f"eval {model} {SOME} {more}".strip())
    lines += [f"eval builtin:tiny --workers 0 --data {line}" for line in lines_of(OF_DATA)]
    lines += [f"{EXTRACT} {line}" for line in lines_of(OF_EXTRACT)]
    tiny = "extract builtin:tiny -o out/x.safetensors -q"
    lines += [f"{tiny} {line}" for line in lines_of(FROM_TINY)]
    lines += [
        "extract builtin:tiny",
        "extract in/tuned/cars.safetensors builtin:tiny -o out/x.safetensors",
        "extract in/m1 in/m2 -o out/x.safetensors",
        "extract bad/pickles/hostile.pt builtin:tiny -o out/x.safetensors --arch ViT-B-32",
        "extract bad/nan cars -o out/x.safetensors",
        "extract in/pickled/head.pt cars -o out/x.safetensors --arch ViT-B-32",
    ]
    lines += [laid_over(FIT, line) for line in lines_of(OF_LEARNING)]
    shared = [line for line in lines_of(OF_LEARNING) if line.split()[0] in SHARED]
    lines += [laid_over(base, line) for base in (NEGATE, ADD) for line in shared]
    for base in (FIT, NEGATE, ADD, TTA, TUNE.replace("in/pets", "in/shots") + " -o out/x"):
        lines += [base.replace("in/shots", data, 1) for data in DATA_OF_LEARNING]
    lines += [f"{NEGATE} {line}" for line in lines_of(OF_NEGATE)]
    lines += [f"{ADD} {line}" for line in lines_of(OF_ADD)]
    lines += [laid_over(TTA, line) for line in lines_of(OF_TTA)]
    lines += [f"{TUNE} {line}" for line in lines_of(OF_FINETUNE)]
    lines += ["fit", "fit in/shots", f"fit in/shots {TINY}", "fit in/shots --vectors vectors"]
    lines += [f"fit in/Cars --vectors vectors --epochs 1 {TINY}", "negate in/shots", "add"]
    lines += [f"negate in/shots --vectors vectors {TINY}", "tta", "tta --classes a,b"]
    lines += [f"tta in/shots {TINY}", "finetune", "finetune in/pets", TUNE, "finetune x y"]
    lines += [f"finetune bad/classes --epochs 1 {TINY} -o out/x", "fit nowhere.yaml"]
    lines += [f"tta --online {TWO} {TINY}", f"tta --online --classes a,b {TINY}"]
    lines += ["fit recipes/add.yaml", "add recipes/few_shot.yaml", "negate recipes/add.yaml"]
    lines += ["tta recipes/negate.yaml", "finetune recipes/tta.yaml", "fit recipes/README.md"]
    lines += [f"fit recipes/few_shot_clip.yaml {TINY}", "tta recipes/tta_clip.yaml"]
    lines += ["finetune recipes/finetune_clip.yaml -o out/x", "eval recipes/eval_clip.yaml"]
    lines += lines_of(OF_MERGE)
    for line in dict.fromkeys(lines):
        yield case(f"mistake {line}", line.replace("(", "'('"))
    table = (b"", b"nonsense", bytes(100))
    for number, content in enumerate(table):
        yield case(f"mistake inspect stdin {number}", "inspect -", stdin=content)
    yield case("mistake inspect cut", "inspect -", stdin=Path("bad/cut") / WEIGHTS)
    yield case("mistake inspect model", "inspect -", stdin=tiny_folder() / WEIGHTS)
    yield case("mistake utf8", "merge - -o out/x", stdin=b"\xff\xfe")
