"""The process of a command, how errors become exit codes, the list of commands, and their words.

Commands and typer are imported when commands are listed, not with this module: by then an interrupt
is handled. Annotations are evaluated as usual here, since typer reads those of a local function.
"""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer
    from typer.core import TyperGroup

_EPILOG = (
    "Exit codes: 0 done, 1 the work failed, 2 bad usage, 3 unreachable, 130 interrupted, 143 ended."
)
_INTERRUPTED, _TERMINATED = 130, 143
_NO_MEMORY = "memory ran out; smaller batches, fewer workers or a smaller --memory take less"
_SOON, _AGAIN = 0.05, 2.0  # seconds
_OBJECTS = 100_000  # before garbage is looked for: imports make many objects and little garbage
_IMPORT = "<frozen importlib._bootstrap>"
_interrupts: list[int] = []
_HELP = ["-h", "--help"]


def run() -> None:
    """Run the command line and leave with its exit code.

    An interrupt may surface as another exception when it hits the import of a C extension; it
    is an interrupt all the same.
    """
    code: list[int] = []
    atexit.register(_leave, code)  # the first handler that is registered runs last
    gc.set_threshold(_OBJECTS)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads have nothing to do here
    _open_streams()
    sys.unraisablehook = lambda problem: None  # of a finalizer, on which no result depends
    try:
        signal.signal(signal.SIGINT, _interrupt)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _interrupt)
        several = int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ
        code.append(_as_rank() if several else main())
    except BaseException as problem:
        if not _interrupts:
            if (text := _of_system(problem)) is None:
                raise
            _say(f"error: {text}")
            code.append(1)
    if _interrupts and (not code or code[-1] == _INTERRUPTED):
        # Leave at once: an interpreter that was interrupted within exec() ends by a signal instead.
        ended = signal.SIGTERM in _interrupts
        if "RANK" not in os.environ:  # else the launcher says so, once
            _say("terminated" if ended else "interrupted")
        os._exit(_TERMINATED if ended else _INTERRUPTED)
    sys.exit(code[-1])


def _as_rank() -> int:
    """Run as one of the processes that torchrun started."""
    from atlas_cli.cli.launch import as_rank

    return as_rank(sys.argv[1:], main)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"atlas: {text}\n")
            sys.stderr.flush()


def _open_streams() -> None:
    """Give what is closed of stdin, stdout and stderr to the null device.

    Otherwise the next file that is opened takes its number, and messages of libraries land in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # names of files may be no UTF-8
            stream.reconfigure(errors="surrogateescape")


def _leave(code: Sequence[int]) -> None:
    """End the process where the interpreter would begin to take modules apart: torch has many.

    By then threads have ended and all other exit handlers have run. Without a code there was an
    exception, and without a reader of stdout there is a message: both are left to the interpreter.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    if code:
        os._exit(code[-1])


# Interrupts -----------------------------------------------------------------------------------


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but neither within an import nor within a finalizer.

    Extensions abort on an exception in an import, and one in a finalizer is printed and forgotten.
    A timer calls this again soon after, and later in case the exception was swallowed.
    """
    _interrupts.append(number)
    delicate = _is_delicate(frame)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _SOON if delicate else _AGAIN)
        if delicate:
            return
    raise KeyboardInterrupt


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether an import or a finalizer is running."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


# Commands -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and give its exit code. A user's mistake is one line on stderr."""
    import typer

    from atlas_cli.cli import completion, console
    from atlas_cli.errors import AtlasError

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if os.environ.get(completion.ASKED):
            group = typer.main.get_command(list_commands())
            console.write(completion.answer(group, os.environ))
            return 0
        if any(word.partition("=")[0] == "--launch" for word in given):
            from atlas_cli.cli.launch import launch

            return launch(given)
        program = typer.main.get_group(list_commands(given))
        words = _spelt_out(program, given) or ["--help"]
        code: int | None = program(words, prog_name="atlas", standalone_mode=False)
    except AtlasError as problem:
        for line in problem.args:
            console.note(f"error: {line}")
        return problem.exit_code
    except (MemoryError, OSError, RuntimeError, ImportError) as problem:
        if (text := _of_system(problem)) is None:
            raise
        console.note(f"error: {text}")
        return 1
    except typer.TyperException as problem:
        console.note(f"error: {_in_one_line(problem)}")
        return problem.exit_code
    except SystemExit:  # typer's answer to a reader that went away while help was printed
        console.note(f"error: {console.CLOSED}")
        return 1
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":  # of a library in Rust; no Exception
            raise
        console.note(f"error: a library gave up: {(str(problem).splitlines() or [''])[0]}")
        return 1
    if code == _INTERRUPTED and not _interrupts and "RANK" not in os.environ:
        # else run() says which signal it was, or the launcher does
        console.note("interrupted")
    return code or 0


def _of_system(problem: BaseException) -> str | None:
    """One line for an error of the system that no closer place explains; None for our bugs."""
    from atlas_cli.errors import is_out_of_memory

    said = str(problem)
    if isinstance(problem, MemoryError):
        return _NO_MEMORY
    if isinstance(problem, ImportError) and not (problem.name or "").startswith("atlas_cli"):
        return f"a library cannot be loaded: {said}"
    if isinstance(problem, OSError):
        named = problem.filename if isinstance(problem.filename, str) else "the system"
        return f"{named[:200]}: {problem.strerror or said}"
    if not isinstance(problem, RuntimeError):
        return None
    if "Symlink loop" in said:
        return said
    if "home directory" in said:  # of a user that is not there
        return "a path begins with ~, but the home folder is not known; write it out"
    if "Too many open files" in said:  # as torch says it of worker processes
        return "the system: Too many open files; ulimit -n says how many may be open"
    no_thread = "can't start new thread" in said
    return _NO_MEMORY if no_thread or is_out_of_memory(problem) else None


_COMMANDS = {  # name: the module in this package, and the function in it; in the order of help
    "demo": ("demo", "demo"),
    "eval": ("eval", "evaluate"),
    **{name: (name, name) for name in ("data", "draw", "finetune", "extract", "fit", "negate")},
    **{name: (name, name) for name in ("add", "tta", "inspect", "merge", "export", "push")},
    "zoo": ("zoo", "zoo"),
    "report": ("report", "report"),
}


def list_commands(given: Sequence[str] | None = None) -> "typer.Typer":
    """Every command under its name, in the order in which help lists them.

    With the words of a command line, only the command that is the first of them, since typer takes
    its time over the options of all; if that is none, all commands as help lists them, without
    options.
    """
    import typer

    from atlas_cli.cli.help import Command, CommandGroup
    from atlas_cli.cli.options import InstallCompletion, ShowCompletion, Version

    app = typer.Typer(
        name="atlas",
        cls=CommandGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": _HELP, "max_content_width": 120},
        epilog=_EPILOG,
    )

    @app.callback()
    def atlas(
        version: Version = False,
        show_completion: ShowCompletion = None,
        install_completion: InstallCompletion = None,
    ) -> None:
        """Learn, merge and evaluate task vectors of CLIP models."""

    number = _find_command(given or ())
    first = None if given is None or number is None else given[number]
    named = [name for name in _COMMANDS if given is None or name == first]
    for name in named or _COMMANDS:
        module, attribute = _COMMANDS[name]
        function = getattr(import_module(f"atlas_cli.cli.{module}"), attribute)
        app.command(name, cls=Command)(function if named else _without_options(function))
    return app


def _without_options(command: Callable[..., None]) -> Callable[[], None]:
    """What help lists of a command: its name and its docstring."""

    def listed() -> None:
        raise AssertionError("a command that is named has its options")

    listed.__doc__ = command.__doc__
    return listed


def _in_one_line(problem: "typer.TyperException") -> str:
    """What typer says of a bad command line, with the nearest right word."""
    from atlas_cli.errors import nearest

    option = getattr(problem, "option_name", None)
    if option and hasattr(problem, "possibilities"):
        command = getattr(problem, "cmd", None)
        names = [name for param in getattr(command, "params", []) for name in param.opts]
        close = nearest(option.strip("-"), [name.strip("-") for name in names])
        return f"no such option: {option}" + close.replace(" '", " '--")
    text = " ".join(problem.format_message().split()).removesuffix(".")
    text = (text[:1].lower() + text[1:]).replace(". Did you mean", "; did you mean")
    context = getattr(problem, "ctx", None)
    if context and text.startswith(("missing", "got unexpected")):
        text += f"; {context.command_path} -h shows what it takes"
    return text


# Words of the command line --------------------------------------------------------------------


def _spelt_out(program: "TyperGroup", given: Sequence[str]) -> list[str]:
    """The words as typer understands them: mergekit's flags as ours, `--data A B` as options."""
    _check_only_given(program.params, given)
    number = _find_command(given)
    command = None if number is None else program.commands.get(given[number])
    if number is None or command is None:
        return list(given)
    words = list(given[number + 1 :])
    quiet = bool({"-q", "--quiet"} & set(words))
    if command.name == "merge":
        words = _without_mergekit_flags(words, quiet=quiet)
    _check_only_given(command.params, words)
    return [*given[: number + 1], *_one_value_each(command.params, words, quiet=quiet)]


def _find_command(given: Sequence[str]) -> int | None:
    """Where the name of a command must be: the first word that is no option."""
    return next((n for n, word in enumerate(given) if not word.startswith("-")), None)


def _check_only_given(options: Sequence[Any], words: Sequence[str]) -> None:
    """Leave callbacks to options that are given. Typer calls them for defaults, too."""
    named = {word.partition("=")[0] for word in words}
    for option in options:
        if not named & {*option.opts, *option.secondary_opts}:
            option.callback = None


def _without_mergekit_flags(words: list[str], *, quiet: bool) -> list[str]:
    from atlas_cli.cli import console, mergekit_flags

    if not any(word.partition("=")[0] in mergekit_flags.FLAGS for word in words):
        return words
    translated, ignored = mergekit_flags.translated(words)
    if ignored and not quiet:
        console.warn(f"has no meaning here, and is ignored: {', '.join(ignored)}")
    return translated


def _one_value_each(params: Sequence[Any], words: Sequence[str], *, quiet: bool) -> list[str]:
    """`--data A B` as `--data A --data B`, for every option that can be repeated.

    Where that leaves a required argument without a value, the last value is the argument's.
    """
    from typer.core import TyperArgument

    from atlas_cli.cli import console

    repeatable = {n for p in params if getattr(p, "multiple", False) for n in p.opts}
    spelt = _spread(words, repeatable)
    argument = next((p for p in params if isinstance(p, TyperArgument)), None)
    if argument and not {*_HELP, "--online"} & set(words):
        taking = {n for p in params for n in p.opts if not getattr(p, "is_flag", False)}
        if found := _handed_back(spelt, repeatable, taking):
            spelt, value = found
            name = (argument.metavar or "").rstrip(".")
            if not quiet:
                console.note(f"'{value}' is taken for {name}, which is missing")
    return spelt


def _spread(arguments: Iterable[str], repeatable: set[str]) -> list[str]:
    """Repeat an option before each of its values; another option, or --, ends them."""
    spelt: list[str] = []
    current, taken = "", 0
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            current, taken = (argument if argument in repeatable else ""), 0
            spelt.append(argument)
        else:
            spelt += [current, argument] if current and taken else [argument]
            taken += 1
    return spelt


def _handed_back(
    spelt: Sequence[str], repeatable: set[str], taking: set[str]
) -> tuple[list[str], str] | None:
    """The arguments with the last value of a repeatable option as one of no option, and the value.

    None if there is such an argument already, or no option has two values. A value that is a
    file of weights is not taken for data. `taking` are the options that take a value.
    """
    last = None
    number = 0
    while number < len(spelt):
        one = spelt[number]
        if not one.startswith("-") or one in ("-", "--"):
            return None
        if one in taking:
            before = spelt[number - 2] if number > 1 else ""
            if one in repeatable and before == one:
                last = number
            number += 1
        number += 1
    if last is None or last + 1 >= len(spelt) or spelt[last + 1].endswith(".safetensors"):
        return None
    value = spelt[last + 1]
    return [*spelt[:last], *spelt[last + 2 :], value], value
