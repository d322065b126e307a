"""Reads pickles as data: nothing is imported, and no code of the pickle or of its classes runs.

A pickle is a program for a small stack machine (Python's `pickletools` documents it). This machine
calls only constructors that its caller gives, each known by the name of a class or function in the
pickle. An instance of any other class becomes a `PickledObject`, which keeps what the pickle says
of it. Time and memory are bounded by the size of the pickle.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import CheckpointCorrupt, UnickptError, UnsupportedFormat
from unickpt.extend import quoted

# Larger integers can be chosen so that a dict of them takes quadratic time; in a tuple, whose hash
# mixes those of its items, already smaller ones.
_MOST_KEY = 1 << 60
_MOST_IN_TUPLE = 1 << 32
_MOST_IN_KEY = 100
_MOST_MEMO = 1 << 32
_UINT16, _INT32, _UINT32, _UINT64 = map(struct.Struct, ("<H", "<i", "<I", "<Q"))
# Values that calls may inspect, for each byte of the pickle: arguments can be memoized and reused.
_WORK = 8
_LEAST_WORK = 100_000
Constructors = Mapping[str, Callable[..., Any]]


# --- content of a pickle besides plain values -----------------------------------------------------


class BadPickle(ValueError):
    """The bytes are not a valid pickle, or use a feature that no checkpoint needs."""


class NotSupported(BadPickle):
    """The pickle is sound, but has content that unickpt does not read."""


@dataclass(frozen=True)
class FileBytes:
    """Bytes of a pickle that were left in its file, as they are many.

    Arguments:
        offset: where they are in the file.
        size: how many.
        read: reads them: bytes, or the content of a text of Python 2.
    """

    offset: int
    size: int
    read: Callable[[], bytes | str]

    def __len__(self) -> int:
        return self.size


class OutsideData:
    """Data outside of a pickle that it refers to, such as the memory of a tensor."""


def unread(error: BadPickle, where: str, damaged: str = "") -> UnickptError:
    """The error of a checkpoint with a pickle that cannot be read.

    Arguments:
        error: why it cannot.
        where: the checkpoint or its file.
        damaged: the part that is damaged if the pickle is malformed, such as "its data.pkl".
    """
    if isinstance(error, NotSupported):
        return UnsupportedFormat(f"{where}: {error}")
    part = f"{where}: {damaged}" if damaged else where
    return CheckpointCorrupt(f"{part} is damaged: {error}")


@dataclass(frozen=True)
class Global:
    """A class or function that a pickle names.

    Arguments:
        name: with its module.
        make: makes its objects, or returns NotImplemented for those that it does not know; None if
            nothing of it is known.
        module: the module part of the name; by default all before the last dot.
    """

    name: str
    make: Callable[..., Any] | None = None
    module: str | None = None

    def __call__(self, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise BadPickle(f"{quoted(self.name)} is called with {kind_of(args)}")
        if self.make is None:
            return PickledObject(self, args)
        try:
            made = self.make(*args)
            return PickledObject(self, args) if made is NotImplemented else made
        except BadPickle:
            raise
        except Exception as error:
            raise BadPickle(
                f"{quoted(self.name)} cannot be built from its state: {error}"
            ) from error


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object of a class that is not known, as the pickle makes it; hashed by identity.

    Arguments:
        function: the class or function that is called.
        args: the arguments of the call.
        state: as it was pickled, if any.
        appended: the items that were appended to it, in order.
        items: the keys and values that were set on it, in order.
        is_new: whether the class makes it with `__new__` instead of a call.
        named: arguments with names.
        at: where the pickle has made it, in bytes; no other object of the pickle has this place.
    """

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    appended: list[Any] = field(default_factory=list)
    items: list[tuple[Any, Any]] = field(default_factory=list)
    is_new: bool = False
    named: Any = None
    at: int = -1

    @property
    def name(self) -> str:
        """Of the class or function, with its module."""
        return self.function.name

    def __repr__(self) -> str:
        return f"<{quoted(self.name)}>"


@dataclass(frozen=True, eq=False)
class PersistentId:
    """A placeholder in a pickle for data outside of it.

    Arguments:
        value: identifies the data.
    """

    value: Any


def attributes(obj: PickledObject) -> list[tuple[Any, Any]]:
    """The attributes, items and constructor arguments of an object, with their names."""
    pairs: list[tuple[Any, Any]] = []
    slots = obj.state if isinstance(obj.state, tuple) else (obj.state,)
    if all(state is None or isinstance(state, dict) for state in slots):
        pairs += [pair for state in slots if state for pair in state.items()]
    else:
        pairs.append(("state", obj.state))
    pairs += [*obj.items, *enumerate(obj.appended)]
    pairs += [(key, x) for key, x in (("args", obj.args), ("named", obj.named)) if x]
    return pairs


def kind_of(value: Any) -> str:
    """The kind of a value; its own text could be of any length."""
    is_pickled = isinstance(value, PickledObject)
    return repr(value) if is_pickled else f"an object of {type(value).__name__}"


# --- the machine ----------------------------------------------------------------------------------


def _encoded(text: Any, encoding: Any = None) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise BadPickle("bytes are not encoded as pickles do it")
    return text.encode("latin-1")


def _bytes(text: Any = b"", encoding: Any = "latin-1") -> bytes | FileBytes:
    return text if isinstance(text, bytes | FileBytes) else _encoded(text, encoding)


PLAIN: Constructors = {
    "_codecs.encode": _encoded,
    **{f"{module}.bytes": _bytes for module in ("builtins", "__builtin__")},
    **{f"{module}.bytearray": _bytes for module in ("builtins", "__builtin__")},
}
"""The function that makes bytes in pickles of old protocols."""


def read(
    data: bytes, constructors: Constructors, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The content of a pickle.

    Arguments:
        data: begins with it; untrusted.
        constructors: the constructors of known classes and functions, by name. They get
            values that this function makes, and must check them.
        persistent: called for persistent ids, which stand for data outside of the pickle.

    Raises:
        BadPickle: it is malformed, or nested too deeply.
        NotSupported: a function that is not in `constructors` is called with outside data.
    """
    return _run(_Machine(data, constructors, persistent))


def _run(machine: _Machine) -> Any:
    try:
        return machine.run()
    except BadPickle:
        raise
    except (IndexError, struct.error, ValueError, TypeError, KeyError) as error:
        if machine.at > machine.size:
            raise BadPickle(f"it ends at byte {machine.size}, {machine.at} expected") from error
        reason = "the stack is empty" if isinstance(error, IndexError) else repr(error)
        raise BadPickle(f"malformed at byte {machine.at}: {reason}") from error
    except RecursionError:
        raise BadPickle("nested too deeply") from None


def _has_outside_data(args: Any) -> bool:
    """Whether a call has outside data among its arguments, or in a tuple that is one of them."""
    if not isinstance(args, tuple):
        return False
    inner = (arg if isinstance(arg, tuple) else (arg,) for arg in args)
    return any(isinstance(x, OutsideData) for items in inner for x in items)


def described(
    data: bytes, persistent: Callable[[Any], Any] = PersistentId
) -> dict[int, PickledObject]:
    """All objects that a pickle makes, each as it makes it: no class is known.

    `pickle_writer.dumps` writes them again.

    Arguments:
        data: begins with the pickle; untrusted.
        persistent: as for `read`; by default its persistent ids stay unchanged.

    Returns:
        By the place of each in the pickle, `PickledObject.at`.

    Raises:
        BadPickle: it is malformed.
    """
    machine = _Machine(data, {}, persistent)
    machine.made = {}
    _run(machine)
    return machine.made


_SIZED = (tuple, list, dict, str, bytes, set, frozenset)


class _Machine:
    """The stack machine.

    Arguments: as for `read`.
    """

    def __init__(
        self, data: bytes, constructors: Constructors, persistent: Callable[[Any], Any] | None
    ) -> None:
        self.at, self.size = 0, len(data)
        self._data, self._constructors, self._persistent = data, constructors, persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # a stack for each mark: the stack before it
        self._memo: dict[int, Any] = {}
        self._work = _LEAST_WORK + _WORK * len(data)
        self.made: dict[int, PickledObject] | None = None

    def run(self) -> Any:
        data, operations = self._data, _TABLE
        while True:
            self.at += 1
            code = data[self.at - 1]
            if code == _STOP:
                return self._pop()
            operations[code](self)

    # --- the bytes ------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0:
            raise BadPickle(f"a length is {count}")
        if end > len(self._data):
            raise BadPickle(f"it ends at byte {len(self._data)}, {end} expected")
        data = self._data[self.at : end]
        self.at = end
        return data

    # Where the bytes end too early, `at` is beyond them, which `_run` checks.

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _number(self, format: struct.Struct) -> int:
        self.at += format.size
        number: int = format.unpack_from(self._data, self.at - format.size)[0]
        return number

    def _line(self) -> str:
        return self._line_bytes().decode()

    def _line_bytes(self) -> bytes:
        end = self._data.find(b"\n", self.at)
        if end < 0:
            raise BadPickle("a line does not end")
        line = self._data[self.at : end]
        self.at = end + 1
        return line

    # --- the stack ------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    # Where the stack is empty, or a mark is missing, `_run` makes the error of an IndexError.

    def _to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _top(self) -> Any:
        return self._stack[-1]

    def _pop(self) -> Any:
        return self._stack.pop()

    def _drop(self) -> None:
        """Takes away a value, or a mark."""
        if self._stack:
            self._stack.pop()
        else:
            self._to_mark()

    def _pop_pair(self) -> tuple[Any, Any]:
        last = self._pop()
        return self._pop(), last

    def _global(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise BadPickle("the name of a class is not a text")
        full = f"{module}.{name}"
        return Global(full, self._constructors.get(full), module)

    def _make(self, function: Any, args: Any, is_new: bool = False) -> None:
        if not isinstance(function, Global):
            raise BadPickle(f"{kind_of(function)} is called")
        self._spend(args)
        made = function(args)
        if isinstance(made, PickledObject) and made.at < 0:
            if _has_outside_data(args):
                raise NotSupported(self._unknown_maker(function.name))
            made.is_new, made.at = is_new, self.at
            if self.made is not None:
                self.made[self.at] = made
        self._stack.append(made)

    def _unknown_maker(self, name: str) -> str:
        """The error for a call that makes something unknown of the memory of a tensor."""
        stacks = (self._stack, *reversed(self._below))
        key = next((x for stack in stacks for x in reversed(stack) if type(x) is str), None)
        place = "" if key is None else f"at {quoted(key)}, "
        return (
            f"{place}{quoted(name)} makes an object from the memory of a tensor, and unickpt does "
            "not know which. Load it with the library that saved it, and save plain tensors, such "
            "as tensor.clone()"
        )

    def _spend(self, args: Any) -> None:
        """Counts the work of a call, which takes time for arguments that took no bytes here."""
        self._work -= 1
        if args and isinstance(args, tuple):
            self._work -= len(args)
            for arg in args if self._work >= 0 else ():
                if isinstance(arg, _SIZED):
                    self._work -= len(arg)
        if self._work < 0:
            raise BadPickle("its calls take too much work for its size")

    def _load_persistent(self, persistent_id: Any) -> None:
        if self._persistent is None:
            raise BadPickle("it refers to external data")
        self._push(self._persistent(persistent_id))

    # --- operations that need more than a line --------------------------------------------------

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, PickledObject):
            target.state = state
        # The state of other objects holds additions of their classes, such as `_metadata` of a
        # torch state dict; a checkpoint's values do not depend on it.

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, PickledObject):
            target.appended.extend(values)
        else:
            raise BadPickle(f"something is appended to {kind_of(target)}")

    def _add(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, set):
            raise BadPickle(f"something is added to {kind_of(target)}")
        target.update(key(value) for value in values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if len(values) % 2:
            raise BadPickle("a key has no value")
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, dict):
            for k, value in pairs:
                target[k if type(k) is str else key(k)] = value
        elif isinstance(target, PickledObject):
            target.items.extend(pairs)
        else:
            raise BadPickle(f"an item of {kind_of(target)} is set")

    def _dict(self, values: list[Any]) -> None:
        self._push({})
        self._set_items(values)

    def _quoted_string(self) -> str:
        line = self._line()
        if len(line) < 2 or line[0] != line[-1] or line[0] not in "'\"" or "\\" in line:
            raise BadPickle("a text is not quoted")
        return line[1:-1]

    def _object(self, items: list[Any]) -> None:
        self._make(items[0], tuple(items[1:]))

    def _new_object_with_names(self) -> None:
        names, args, function = self._pop(), self._pop(), self._pop()
        self._spend(args)
        if names and (not isinstance(function, Global) or function.make is not None):
            raise BadPickle("a known class is made with named arguments")
        self._make(function, args, is_new=True)
        if names:
            self._top().named = names

    def _integer(self) -> Any:
        line = self._line()
        return line == "01" if line in ("00", "01") else int(line)


def key(value: Any) -> Any:
    """A key of a dict, or an element of a set.

    Only those whose hashes take little time, and cannot be chosen to be equal for many of them: not
    for many floats, but for many tuples of floats.

    Raises:
        BadPickle: it is another.
    """
    if type(value) is str:
        return value
    most = _MOST_IN_TUPLE if isinstance(value, tuple) else _MOST_KEY
    left, pending = _MOST_IN_KEY, [value]
    while pending:
        item = pending.pop()
        left -= 1
        if isinstance(item, tuple):
            if len(item) + len(pending) > left:
                raise BadPickle("a key is too long")
            pending += item
        bad = isinstance(item, frozenset) or (isinstance(item, float) and item is not value)
        if bad or (isinstance(item, int) and abs(item) >= most):
            raise BadPickle(f"{kind_of(item)} that cannot be a key")
    return value


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _tuple(count: int) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        stack = m._stack
        if len(stack) < count:
            raise BadPickle("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]

    return operation


def _remember(number: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        index = number(m)
        if not 0 <= index < _MOST_MEMO:
            raise BadPickle(f"the memo has no place {quoted(index)}")
        m._memo[index] = m._top()

    return operation


# Most of a pickle consists of these four: without calls of their own they take half the time.


def _memoize(m: _Machine) -> None:
    m._memo[len(m._memo)] = m._stack[-1]


def _recall_by_byte(m: _Machine) -> None:
    m.at += 1
    m._stack.append(m._memo[m._data[m.at - 1]])


def _recall_by_four(m: _Machine) -> None:
    m.at += 4
    m._stack.append(m._memo[_UINT32.unpack_from(m._data, m.at - 4)[0]])


def _small_integer(m: _Machine) -> None:
    m.at += 1
    m._stack.append(m._data[m.at - 1])


def _unknown(m: _Machine) -> None:
    code = m._data[m.at - 1]
    raise BadPickle(f"unknown opcode {code:#04x} at byte {m.at - 1}")


def _value(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m._stack.append(make(m))


def _text(length: Callable[[_Machine], int], encoding: str = "utf-8") -> Callable[[_Machine], None]:
    return lambda m: m._stack.append(m._take(length(m)).decode(encoding, "surrogatepass"))


_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    ord(code): operation
    for code, operation in {
        pickle.MARK: _Machine._mark,
        pickle.POP: _Machine._drop,
        pickle.POP_MARK: lambda m: m._to_mark(),
        pickle.DUP: lambda m: m._push(m._top()),
        # numbers
        pickle.FLOAT: _value(lambda m: float(m._line())),
        pickle.INT: _value(lambda m: m._integer()),
        pickle.BININT: _value(lambda m: m._number(_INT32)),
        pickle.BININT1: _small_integer,
        pickle.LONG: _value(lambda m: int(m._line().rstrip("L"))),
        pickle.BININT2: _value(lambda m: m._number(_UINT16)),
        pickle.BINFLOAT: _value(lambda m: struct.unpack(">d", m._take(8))[0]),
        pickle.LONG1: _value(lambda m: _signed(m._take(m._byte()))),
        pickle.LONG4: _value(lambda m: _signed(m._take(m._number(_INT32)))),
        pickle.NONE: _value(lambda m: None),
        pickle.NEWTRUE: _value(lambda m: True),
        pickle.NEWFALSE: _value(lambda m: False),
        # texts and bytes
        pickle.STRING: _value(lambda m: m._quoted_string()),
        pickle.BINSTRING: _text(lambda m: m._number(_INT32), "latin-1"),
        pickle.SHORT_BINSTRING: _text(_Machine._byte, "latin-1"),
        pickle.UNICODE: _value(lambda m: m._line_bytes().decode("raw-unicode-escape")),
        pickle.BINUNICODE: _text(lambda m: m._number(_UINT32)),
        pickle.SHORT_BINUNICODE: _text(_Machine._byte),
        pickle.BINUNICODE8: _text(lambda m: m._number(_UINT64)),
        pickle.BINBYTES: _value(lambda m: m._take(m._number(_UINT32))),
        pickle.SHORT_BINBYTES: _value(lambda m: m._take(m._byte())),
        **dict.fromkeys(
            (pickle.BINBYTES8, pickle.BYTEARRAY8), _value(lambda m: m._take(m._number(_UINT64)))
        ),
        # containers
        pickle.EMPTY_LIST: lambda m: m._stack.append([]),
        pickle.EMPTY_DICT: lambda m: m._stack.append({}),
        pickle.EMPTY_TUPLE: lambda m: m._stack.append(()),
        pickle.EMPTY_SET: _value(lambda m: set()),
        pickle.LIST: lambda m: m._push(m._to_mark()),
        pickle.DICT: lambda m: m._dict(m._to_mark()),
        pickle.TUPLE: lambda m: m._push(tuple(m._to_mark())),
        pickle.TUPLE1: _tuple(1),
        pickle.TUPLE2: _tuple(2),
        pickle.TUPLE3: _tuple(3),
        pickle.FROZENSET: lambda m: m._push(frozenset(map(key, m._to_mark()))),
        pickle.APPEND: lambda m: m._append([m._pop()]),
        pickle.APPENDS: lambda m: m._append(m._to_mark()),
        pickle.SETITEM: lambda m: m._set_items(list(m._pop_pair())),
        pickle.SETITEMS: lambda m: m._set_items(m._to_mark()),
        pickle.ADDITEMS: lambda m: m._add(m._to_mark()),
        # classes and functions
        pickle.GLOBAL: lambda m: m._push(m._global(m._line(), m._line())),
        pickle.STACK_GLOBAL: lambda m: m._push(m._global(*m._pop_pair())),
        pickle.INST: lambda m: m._object([m._global(m._line(), m._line()), *m._to_mark()]),
        pickle.OBJ: lambda m: m._object(m._to_mark()),
        pickle.REDUCE: lambda m: m._make(*m._pop_pair()),
        pickle.NEWOBJ: lambda m: m._make(*m._pop_pair(), is_new=True),
        pickle.NEWOBJ_EX: lambda m: m._new_object_with_names(),
        pickle.BUILD: _Machine._build,
        pickle.PERSID: lambda m: m._load_persistent(m._line()),
        pickle.BINPERSID: lambda m: m._load_persistent(m._pop()),
        # the memo
        pickle.GET: _value(lambda m: m._memo[int(m._line())]),
        pickle.BINGET: _recall_by_byte,
        pickle.LONG_BINGET: _recall_by_four,
        pickle.PUT: _remember(lambda m: int(m._line())),
        pickle.BINPUT: _remember(_Machine._byte),
        pickle.LONG_BINPUT: _remember(lambda m: m._number(_UINT32)),
        pickle.MEMOIZE: _memoize,
        # frames and the version say nothing that matters
        pickle.PROTO: lambda m: m._take(1),
        pickle.FRAME: lambda m: m._take(8),
    }.items()
}
_STOP = ord(pickle.STOP)
_TABLE = [_OPERATIONS.get(code, _unknown) for code in range(256)]
