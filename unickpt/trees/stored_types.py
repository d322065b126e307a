"""Values of types that the format lacks, such as sets and paths, stored as their parts.

The type of each value is stored next to them, as a text under the key `STORED_TYPES`: JSON of the
names of types, outermost first, by the names of values. The names are those of a fixed list, so
that no class is ever looked up.
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

import msgspec
import numpy as np

from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.quoting import quoted

STORED_TYPES = "unickpt_types"
"""The key under which the types are stored, next to the values."""
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)
}


@dataclass(frozen=True)
class StoredType:
    """How values of a type are stored.

    Arguments:
        name: stored.
        kinds: the classes; their subclasses do not count.
        store: returns the parts of a value.
        restore: the reverse; checks its argument.
    """

    name: str
    kinds: tuple[type, ...]
    store: Callable[[Any], Any]
    restore: Callable[[Any], Any]


def _defaultdict(stored: Any) -> Any:
    factory, members = stored
    return defaultdict(None if factory is None else _FACTORIES[factory], members)


def has_known_factory(value: Any) -> bool:
    """Whether a value is no `defaultdict`, or one whose default is of a built-in type."""
    factory = value.default_factory if type(value) is defaultdict else None
    return factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory


PYTHON_TYPES = (
    StoredType("path", (PosixPath, WindowsPath), str, Path),
    StoredType("set", (set,), lambda x: sorted(x, key=repr), set),
    StoredType("frozenset", (frozenset,), lambda x: sorted(x, key=repr), frozenset),
    StoredType("deque", (deque,), lambda x: [list(x), x.maxlen], lambda x: deque(x[0], x[1])),
    StoredType("counter", (Counter,), dict, Counter),
    StoredType(
        "defaultdict",
        (defaultdict,),
        lambda x: [x.default_factory and x.default_factory.__name__, dict(x)],
        _defaultdict,
    ),
    StoredType("namespace", (argparse.Namespace,), vars, lambda x: argparse.Namespace(**x)),
    StoredType("complex", (complex,), lambda x: [x.real, x.imag], lambda x: complex(*x)),
    StoredType(
        "timedelta",
        (datetime.timedelta,),
        lambda x: [x.days, x.seconds, x.microseconds],
        lambda x: datetime.timedelta(*x),
    ),
    StoredType(
        "datetime",
        (datetime.datetime,),
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    StoredType("numpy", (), lambda x: x, np.asarray),
    StoredType("numpy scalar", (), np.asarray, lambda x: x[()]),
    StoredType("items", (), lambda x: [list(pair) for pair in x.items()], dict),
)
"""The types of Python itself and of NumPy."""


def parsed_types(text: Any, where: str, known_names: Collection[str]) -> dict[str, list[str]]:
    """The types of values, by their names, outermost first.

    Arguments:
        text: the value of `STORED_TYPES`; untrusted.
        where: the checkpoint, for errors.
        known_names: of types.

    Raises:
        CheckpointCorrupt: the text is malformed.
        UnsupportedFormat: it names an unknown type.

    Example:
        >>> parsed_types('{"callbacks/dirpath": ["path"]}', "runs/last.ckpt", ["path"])
        {'callbacks/dirpath': ['path']}
    """
    try:
        types = msgspec.json.decode(text, type=dict[str, list[str]])
    except (TypeError, ValueError, RecursionError):
        raise CheckpointCorrupt(f"{where}: {STORED_TYPES!r} is {quoted(text)}") from None
    strange = [x for kinds in types.values() for x in kinds if x not in known_names]
    if strange:
        raise UnsupportedFormat(
            f"{where} has values of type {quoted(strange[0])}, which this version of "
            "unickpt does not know; install a newer one"
        )
    return types
