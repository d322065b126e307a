"""Writes facts as a pickle of protocol 2: classes and functions by name, nothing is imported.

The result of `pickles.read` without constructors is written with the same content. Every unpickler
reads the written pickle, also torch's `weights_only=True`.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from unickpt.backends._files.pickles import FileBytes, Global, PersistentId, PickledObject
from unickpt.extend import quoted

PickledCall = PickledObject
"""A call of a class or function: `PickledCall(Global("torch.Size"), ((2, 3),))`. Its state,
appended items and set items follow."""

_Writing = Generator[Any, None, None]
_ENCODE, _SET, _FROZEN_SET = (
    Global("_codecs.encode"), Global("builtins.set"), Global("builtins.frozenset"),
)  # fmt: skip
_NEW_WITH_NAMES = Global("copyreg.__newobj_ex__")


class TooLarge(ValueError):
    """A pickle would be longer than is allowed."""


def dumps(value: Any, most: int | None = None) -> bytes:
    """A pickle of a value.

    Arguments:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, `Global`,
            `PickledCall` or `PersistentId`, nested; of these types exactly. An object that occurs
            twice is shared in the pickle as well.
        most: how many bytes it may have, about; without a limit by default.

    Raises:
        TypeError: it contains an object of another type.
        ValueError: it contains a name that no class can have.
        TooLarge: the pickle would be too long.

    Example:
        >>> import pickle
        >>> pickle.loads(dumps([1, b"2", PickledObject(Global("fractions.Fraction"), (1, 3))]))
        [1, b'2', Fraction(1, 3)]
    """
    return _Pickler().run(value, most)


class _Pickler:
    """Values that contain others are generators of these, so that their depth has no limit."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        # The places of written objects; the objects as well, since the id of a freed one is reused.
        self._memo: dict[Any, tuple[int, Any]] = {}

    def run(self, value: Any, most: int | None) -> bytes:
        nested = [self._value(value)]
        while nested:
            if most is not None and len(self._out) > most:
                raise TooLarge(f"a pickle has more than {most} bytes")
            try:
                inner = next(nested[-1])
            except StopIteration:
                nested.pop()
            else:
                nested.append(self._value(inner))
        return bytes(self._out) + b"."

    def _value(self, value: Any) -> _Writing:
        """Writes a value, and yields those that are to be written next."""
        kind = type(value)
        if self._recall(value if kind is str else id(value)):
            return
        if kind in _ATOMS:
            self._out += _ATOMS[kind](value)
            if kind is str:
                self._remember(value, value)
        elif kind in _COMPOUND:
            yield from _COMPOUND[kind](self, value)
        else:
            raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not written into a pickle")

    def _remember(self, key: Any, value: Any) -> None:
        number = len(self._memo)
        self._memo[key] = number, value
        self._out += _indexed(b"q", b"r", number)

    def _recall(self, key: Any) -> bool:
        """Writes a reference to an object that was written before; returns whether it was."""
        if key not in self._memo:
            return False
        self._out += _indexed(b"h", b"j", self._memo[key][0])
        return True

    def _global(self, value: Global) -> _Writing:
        module, name = key = _split(value)
        if not self._recall(key):
            self._out += f"c{module}\n{name}\n".encode()
            self._remember(key, value)
        yield from ()

    def _bytes(self, value: bytes) -> _Writing:
        yield from self._function(_ENCODE, (value.decode("latin-1"), "latin1"))
        self._remember(id(value), value)

    def _list(self, value: list[Any]) -> _Writing:
        self._out += b"]"
        self._remember(id(value), value)
        yield from self._filled(value, b"e")

    def _dict(self, value: dict[Any, Any]) -> _Writing:
        self._out += b"}"
        self._remember(id(value), value)
        yield from self._filled([x for pair in value.items() for x in pair], b"u")

    def _filled(self, values: list[Any], code: bytes) -> _Writing:
        """The code after the creation of a container: its content, and the opcode that adds it."""
        if values:
            self._out += b"("
            yield from values
            self._out += code

    def _tuple(self, value: tuple[Any, ...]) -> _Writing:
        few = len(value) <= 3
        self._out += b"" if few else b"("
        yield from value
        if id(value) in self._memo:  # a list in it contains it, and has written it
            self._out += b"0" * len(value) if few else b"1"
            self._recall(id(value))
            return
        self._out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if few else b"t"
        self._remember(id(value), value)

    def _set(self, value: Any) -> _Writing:
        constructor = _SET if type(value) is set else _FROZEN_SET
        yield from self._function(constructor, (_in_order(value),))
        self._remember(id(value), value)

    def _function(self, function: Global, args: tuple[Any, ...]) -> _Writing:
        yield function
        yield args
        self._out += b"R"

    def _call(self, value: PickledObject) -> _Writing:
        function, args = value.function, value.args
        is_new = value.is_new
        if value.named:
            function, args, is_new = _NEW_WITH_NAMES, (value.function, args, value.named), False
        yield function
        yield args
        if id(value) in self._memo:  # a list in its arguments contains it, and has written it
            self._out += b"00"
            self._recall(id(value))
            return
        self._out += b"\x81" if is_new else b"R"
        self._remember(id(value), value)
        yield from self._filled(value.appended, b"e")
        yield from self._filled([x for pair in value.items for x in pair], b"u")
        if value.state is not None:
            yield value.state
            self._out += b"b"

    def _persistent(self, value: PersistentId) -> _Writing:
        yield value.value
        self._out += b"Q"


def _in_order(values: Iterable[Any]) -> list[Any]:
    """The elements of a set, in the same order in every process if they can be ordered."""
    try:
        return sorted(values)
    except TypeError:
        return list(values)


def _split(value: Global) -> tuple[str, str]:
    if value.module is None:
        module, _, name = value.name.rpartition(".")
    else:
        module, name = value.module, value.name.removeprefix(f"{value.module}.")
    if not module or not name or "\n" in value.name:  # a line could contain more of a pickle
        raise ValueError(f"{quoted(value.name)} is not the name of a class or function")
    return module, name


def _indexed(short: bytes, long: bytes, number: int) -> bytes:
    return short + bytes([number]) if number < 256 else long + struct.pack("<I", number)


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    length = struct.pack("<B", len(data)) if len(data) < 256 else struct.pack("<i", len(data))
    return (b"\x8a" if len(data) < 256 else b"\x8b") + length + data


def _str(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


_ATOMS: dict[type, Any] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _int,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: _str,
}
_COMPOUND: dict[type, Any] = {
    bytes: _Pickler._bytes,
    list: _Pickler._list,
    dict: _Pickler._dict,
    tuple: _Pickler._tuple,
    set: _Pickler._set,
    frozenset: _Pickler._set,
    Global: _Pickler._global,
    PickledObject: _Pickler._call,
    PersistentId: _Pickler._persistent,
    FileBytes: lambda _, value: iter((value.read(),)),
}


# --- objects of Python and NumPy as the facts that are written ------------------------------------


_PROTOCOL = 2
_FACTS = (type(None), bool, int, float, str, bytes, Global, PersistentId, PickledObject)


def reduced(value: Any) -> Any:
    """An object as facts.

    Arguments:
        value: an object of a class of Python or NumPy; its content may be facts already.

    Example:
        >>> import pickle, datetime
        >>> from unickpt.backends._files.pickle_writer import dumps
        >>> pickle.loads(dumps(reduced(datetime.timedelta(1))))
        datetime.timedelta(days=1)
    """
    kind = type(value)
    if kind in _FACTS:
        return value
    if kind in (list, tuple):
        return kind(map(reduced, value))
    if kind is dict:
        return {reduced(key): reduced(x) for key, x in value.items()}
    if kind is complex:  # which pickle knows by itself
        return PickledObject(Global("builtins.complex"), (value.real, value.imag))
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return Global(f"{value.__module__}.{value.__qualname__}")
    function, args, *parts = value.__reduce_ex__(_PROTOCOL)
    state, appended, items = (*parts, None, None, None)[:3]
    is_new = function.__name__ == "__newobj__"
    if is_new:
        function, *args = args
    more = [reduced(x) for x in appended or ()]
    pairs = [(reduced(key), reduced(x)) for key, x in items or ()]
    made, made_of = reduced(function), tuple(map(reduced, args))
    return PickledObject(made, made_of, reduced(state), more, pairs, is_new)
