"""What a pickle holds besides plain values: objects and functions, which are never called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import CheckpointCorrupt, UnickptError, UnsupportedFormat
from unickpt.extend import quoted


class BadPickle(ValueError):
    """The bytes are not a valid pickle, or use what no checkpoint needs."""


class EndsEarly(BadPickle):
    """The pickle needs more bytes than there are."""


class NotSupported(BadPickle):
    """The pickle is sound, and has what unickpt does not read."""


@dataclass(frozen=True)
class FileBytes:
    """Bytes of a pickle that were left in its file, as they are many.

    Arguments:
        offset: where they are in the file.
        size: how many.
        read: reads them: bytes, or what a text of Python 2 consists of.
    """

    offset: int
    size: int
    read: Callable[[], bytes | str]

    def __len__(self) -> int:
        return self.size


class OutsideData:
    """Data outside of a pickle, to which it refers, such as the memory of a tensor."""


def unread(error: BadPickle, where: str, damaged: str = "") -> UnickptError:
    """The error of a checkpoint with a pickle that cannot be read.

    Arguments:
        error: why it cannot.
        where: the checkpoint or its file.
        damaged: what of it is damaged if the pickle is malformed, such as "its data.pkl".
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
        module: what of the name is the module; by default all before the last dot.
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
                f"{quoted(self.name)} cannot be made of what is there: {error}"
            ) from error


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object of a class that is not known, as the pickle makes it; hashed by identity.

    Arguments:
        function: the class or function that is called.
        args: what it is called with.
        state: as it was pickled, if any.
        appended: what was appended to it, in order.
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
    """What stands in a pickle for data outside of it.

    Arguments:
        value: says which data.
    """

    value: Any


def attributes(obj: PickledObject) -> list[tuple[Any, Any]]:
    """The attributes of an object, what it contains, and what it was made of, with their names."""
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
    """What a value is; its own text could be of any length."""
    is_pickled = isinstance(value, PickledObject)
    return repr(value) if is_pickled else f"an object of {type(value).__name__}"
