"""The way of a command through the code is short: how many files a plain run passes through."""

from __future__ import annotations

import json

VECTORS = ["--model", "builtin:tiny", "--vectors", "builtin:letters", "builtin:signs"]
VECTORS += ["--epochs", "1", "--min-steps", "1"]
COMMANDS = {
    "fit": ["fit", "builtin:digits", "--shots", "1", *VECTORS, "-o", "run"],
    "merge": ["merge", "run/recipe.yaml", "-o", "merged"],
    "eval": ["eval", "builtin:tiny", "--data", "builtin:digits", "--shots", "1"],
    "tta": ["tta", "builtin:digits", *VECTORS, "-o", "adapted"],
}
FEW = {"fit": 30, "merge": 23, "eval": 17, "tta": 32}

# Each command is a fork of one process, so that none finds what another has cached. Functions that
# are entered count, not the bodies of modules, nor what is called while a module is imported.
WALK = """
import json, os, sys
import torch
import atlas_cli
from atlas_cli.cli.app import main
root = os.path.dirname(atlas_cli.__file__) + os.sep

def walked(arguments):
    files, known = set(), set()  # known: ids of code that tells no more
    def entered(frame, event, argument):
        code = frame.f_code
        if event != "call" or id(code) in known:
            return
        if code.co_name.startswith("<") or not code.co_filename.startswith(root):
            known.add(id(code))
            return
        while (frame := frame.f_back) is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(root):
                return
        files.add(code.co_filename.removeprefix(root))
        known.add(id(code))
    sys.stdout = open(os.devnull, "w")
    sys.setprofile(entered)
    code = main(arguments)
    sys.setprofile(None)
    return sorted(files), code

found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    reader, writer = os.pipe()
    if not os.fork():
        with open(writer, "w") as stream:
            json.dump(walked(arguments), stream)
        os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        found[name] = json.load(stream)
    os.wait()
print(json.dumps(found))
"""


def test_a_plain_run_passes_few_files(run_python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(run_python(WALK, json.dumps(COMMANDS)))
    assert {name: code for name, (_, code) in found.items()} == dict.fromkeys(COMMANDS, 0)
    long = {name: files for name, (files, _) in found.items() if len(files) > FEW[name]}
    assert long == {}
