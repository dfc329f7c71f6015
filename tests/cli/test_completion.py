"""Completion with Tab, typed into real shells on a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import termios
import time
from pathlib import Path

from conftest import TIMEOUT
from warm import atlas

# Keys up to a Tab, and what stands on the line afterwards.
TYPED = {
    "atlas fine\t": "atlas finetune ",
    "atlas fit --gran\t": "atlas fit --granularity ",
    "atlas fit --granularity v\t": "atlas fit --granularity vector ",
    "atlas tta x --objective balanced\t": "atlas tta x --objective balanced-entropy ",
    "atlas extract a b --dtype bf\t": "atlas extract a b --dtype bf16 ",
    "atlas eval builtin:tiny --data builtin:house\t": "--data builtin:house_numbers ",
    "atlas fit p --vectors builtin:digits builtin:sig\t": "builtin:digits builtin:signs ",
    "atlas merge only_one\t": "atlas merge only_one.yaml ",
}
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
STARTED = {
    "bash": "source <(atlas --show-completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u; source <(atlas --show-completion zsh)",
    "fish": "atlas --show-completion fish | source",
}


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.reader, terminal = pty.openpty()
        path = f"{Path(atlas()[0]).parent}:{os.environ['PATH']}"
        more = {"PATH": path, "TERM": "xterm", "HOME": str(folder), "PS1": "$ ", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            SHELLS[name],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | more,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # fish asks for it
        )
        os.close(terminal)
        self.type(f"{STARTED[name]}; echo re''ady\n", "ready")

    def type(self, keys: str, wanted: str) -> str:
        """Press keys and give what is shown until the wanted text is; fails if it never is."""
        os.write(self.reader, keys.encode())
        shown, end = "", time.monotonic() + TIMEOUT
        while wanted not in plain(shown):
            left = end - time.monotonic()
            assert left > 0, f"{wanted!r} is not in {plain(shown)!r}"
            if select.select([self.reader], [], [], left)[0]:
                shown += os.read(self.reader, 65536).decode("utf-8", "replace")
        return shown

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.reader)


def plain(shown: str) -> str:
    """What a terminal shows, without colours and movements."""
    text = re.sub(
        r"\x1b\[[0-9;?>=]*[a-zA-Z]|\x1b[]P][^\x07\x1b]*(\x07|\x1b\\)|\x1b[()=>].?", "", shown
    )
    return re.sub(r"[\r\x00-\x08\x0e-\x1f]", "", text)


def test_tab_completes_commands_options_values_and_files(tmp_path: Path):
    """In bash, and in zsh and fish where they are."""
    (tmp_path / "only_one.yaml").touch()
    for name in filter(shutil.which, SHELLS):
        shell = Shell(name, tmp_path)
        try:
            for keys, line in TYPED.items():
                assert "error" not in shell.type(keys, line)
                shell.type("\x15", "")  # Ctrl-U: an empty line again
        finally:
            shell.end()


def test_bash_is_given_every_candidate_by_its_function(tmp_path: Path):
    """As `complete -F` calls it, with the words as bash breaks them."""
    script = (
        'source <("$0" --show-completion bash); complete -p atlas\n'
        "COMP_LINE='atlas tta x --objective '; COMP_POINT=${#COMP_LINE}\n"
        "COMP_WORDS=(atlas tta x --objective ''); COMP_CWORD=4\n"
        '_atlas_completion "$0" "" --objective; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script, *atlas()], capture_output=True, text=True)
    first, *words = done.stdout.splitlines()
    assert (first, done.stderr) == ("complete -F _atlas_completion atlas", "")
    assert words == ["ufm", "entropy", "balanced-entropy", "sar", "simclr"]


def test_scripts_go_where_shells_find_them(run, tmp_path: Path):
    for shell in SHELLS:
        done = run("--install-completion", shell, HOME=str(tmp_path))
        assert (done.code, len(done.error_lines)) == (0, 1), done.err
        path = Path(done.out.strip())
        assert path.is_relative_to(tmp_path)
        assert path.read_text() == run("--show-completion", shell).out
    refused = run("--show-completion", "fsih")
    assert (refused.code, len(refused.error_lines)) == (2, 1)
    assert "no completion for 'fsih'; did you mean 'fish'?" in refused.err
