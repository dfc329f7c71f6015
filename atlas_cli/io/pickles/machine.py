"""A pickle machine that builds descriptions: it imports nothing, calls nothing, sets nothing.

The unpickler of the standard library makes room for whatever length or memo index a file
declares, and runs REDUCE and BUILD on live objects. Here every name stays a word, every call
stays a note of who was to be called with what, and only the tensors of a model are understood.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

from atlas_cli.io.pickles.policy import (
    ByteStream,
    FlawError,
    Global,
    GlobalsPolicy,
    Object,
    entries_of,
)

Call = Callable[[tuple[Any, ...]], Any]

_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list}
_NUMBERS = "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT"
_TEXTS = "BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8"
_LITERALS = frozenset([*_NUMBERS.split(), *_TEXTS.split()])
_LENGTHS = {"SHORT_BINBYTES": "<B", "BINBYTES": "<I", "BINBYTES8": "<Q", "BYTEARRAY8": "<Q"}
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_WITH_ARGUMENT = _LITERALS | _PUTS | _GETS | {"PROTO", "FRAME"}
_MALFORMED = (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error)


class Machine:
    """One run of a pickle. Values are scalars, text, spans, containers and descriptions."""

    def __init__(
        self,
        stream: ByteStream,
        policy: GlobalsPolicy,
        calls: Mapping[str, Call],
        persistent: Call,
    ) -> None:
        self._stream = stream
        self._policy = policy
        self._calls = calls
        self._persistent = persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The value that the pickle describes; raises FlawError if it cannot be read."""
        try:
            return self._run()
        except _MALFORMED as error:
            place = self._stream.position
            raise FlawError(f"is not a pickle that can be read (at byte {place})") from error

    def _run(self) -> Any:
        while True:
            opcode = _OPCODES[self._stream.read_opcode()]
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode)

    def _step(self, opcode: pickletools.OpcodeInfo) -> None:
        name = opcode.name
        if name in _LENGTHS:
            self._stack.append(self._bytes(_LENGTHS[name]))
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            self._stack.append(_CONTAINERS[name]())
        elif name in _TUPLES:
            self._stack.append(tuple(self._take(_TUPLES[name])))
        elif name in _STEPS:
            _STEPS[name](self)
        elif opcode.arg is not None and name in _WITH_ARGUMENT:
            self._step_with(name, opcode.arg.reader(self._stream))  # type: ignore[arg-type]
        else:
            raise FlawError(f"uses the pickle instruction {name}, which no checkpoint needs")

    def _step_with(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _PUTS:
            self._remember(argument)
        elif name in _GETS:
            self._stack.append(self._memo[argument])

    def _bytes(self, layout: str) -> Any:
        (length,) = struct.unpack(layout, self._stream.read(struct.calcsize(layout)))
        return self._stream.skip(length)

    def _remember(self, index: int) -> None:
        if not 0 <= index < 2**32:
            raise ValueError(index)
        self._memo[index] = self._stack[-1]

    def _memoize(self) -> None:
        self._remember(len(self._memo))

    def _take(self, count: int) -> list[Any]:
        """The last `count` values, removed from the stack."""
        if count > len(self._stack):
            raise IndexError(count)
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _unmark(self) -> list[Any]:
        """The values since the last mark, removed from the stack."""
        taken, self._stack = self._stack, self._outer.pop()
        return taken

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._unmark()

    def _duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def _tuple(self) -> None:
        items = self._unmark()
        self._stack.append(tuple(items))

    def _list(self) -> None:
        items = self._unmark()
        self._stack.append(items)

    def _dict(self) -> None:
        items = self._unmark()
        self._stack.append({})
        self._store(items)

    def _append(self) -> None:
        self._extend(self._take(1))

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Object):
            raise TypeError(type(target))

    def _store(self, items: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, Object) else target
        if not isinstance(entries, dict) or len(items) % 2:
            raise TypeError(type(target))
        entries.update(entries_of(zip(items[::2], items[1::2], strict=True)))

    def _global(self) -> None:
        self._stack.append(self._name())

    def _name(self) -> Global:
        module, qualname = self._stream.readline(), self._stream.readline()
        if not (module.endswith(b"\n") and qualname.endswith(b"\n")):
            raise ValueError("no newline")
        return self._policy.admit(module[:-1].decode(), qualname[:-1].decode())

    def _stack_global(self) -> None:
        module, qualname = self._take(2)
        if not (isinstance(module, str) and isinstance(qualname, str)):
            raise TypeError("a name is text")
        self._stack.append(self._policy.admit(module, qualname))

    def _reduce(self) -> None:
        self._stack.append(self._make(*self._take(2)))

    def _new_with_keywords(self) -> None:
        made_by, args, _ = self._take(3)
        self._stack.append(self._make(made_by, args))

    def _object(self) -> None:
        made_by, *args = self._unmark()
        self._stack.append(self._make(made_by, tuple(args)))

    def _instance(self) -> None:
        made_by = self._name()
        args = self._unmark()
        self._stack.append(self._make(made_by, tuple(args)))

    def _make(self, made_by: Any, args: Any) -> Any:
        """A description of `made_by(*args)`; nothing but the given calls is worked out."""
        if not isinstance(args, tuple):
            raise TypeError(type(args))
        if not isinstance(made_by, Global):
            return Object(None, args)
        call = self._calls.get(str(made_by))
        return Object(made_by, args) if call is None else call(args)

    def _build(self) -> None:
        (state,) = self._take(1)
        target = self._stack[-1]
        if isinstance(target, Object):
            target.state = state[0] if isinstance(state, tuple) and state else state

    def _persist(self) -> None:
        (key,) = self._take(1)
        self._stack.append(self._persistent(key if isinstance(key, tuple) else (key,)))


_STEPS: dict[str, Callable[[Machine], object]] = {
    "MARK": Machine._mark,
    "POP": Machine._pop,
    "POP_MARK": Machine._unmark,
    "DUP": Machine._duplicate,
    "TUPLE": Machine._tuple,
    "LIST": Machine._list,
    "FROZENSET": Machine._list,
    "DICT": Machine._dict,
    "APPEND": Machine._append,
    "APPENDS": lambda machine: machine._extend(machine._unmark()),
    "ADDITEMS": lambda machine: machine._extend(machine._unmark()),
    "SETITEM": lambda machine: machine._store(machine._take(2)),
    "SETITEMS": lambda machine: machine._store(machine._unmark()),
    "MEMOIZE": Machine._memoize,
    "GLOBAL": Machine._global,
    "STACK_GLOBAL": Machine._stack_global,
    "REDUCE": Machine._reduce,
    "NEWOBJ": Machine._reduce,
    "NEWOBJ_EX": Machine._new_with_keywords,
    "OBJ": Machine._object,
    "INST": Machine._instance,
    "BUILD": Machine._build,
    "BINPERSID": Machine._persist,
}
