"""Advice on what to store instead of an unsupported object."""

from __future__ import annotations

import datetime
import enum
import io
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import PurePath


def hint(
    obj: object,
    otherwise: str = "convert it, leave it out, or give it state_dict() and load_state_dict()",
) -> str:
    """What to store instead of an object that is neither a leaf nor a container.

    Arguments:
        obj: the object.
        otherwise: what to do with an object of an unknown type.
    """
    if type(obj).__module__.partition(".")[0] == "omegaconf":
        return "store OmegaConf.to_container(x, resolve=True)"
    if isinstance(obj, enum.Enum):
        return "store x.name, from which Type[name] restores it"
    for kinds, text in _hints():
        if isinstance(obj, kinds):
            return text
    return otherwise


_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def _hints() -> Iterable[tuple[tuple[type, ...], str]]:
    # Only needed for an error, and slow to import.
    import decimal
    import fractions
    import uuid

    return (
        ((complex,), "store numpy.complex128(x)"),
        ((PurePath, decimal.Decimal, uuid.UUID), "store str(x)"),
        ((datetime.date, datetime.time), "store x.isoformat()"),
        ((datetime.timedelta,), "store (x.days, x.seconds, x.microseconds)"),
        ((fractions.Fraction,), "store (x.numerator, x.denominator)"),
        ((range,), "store (x.start, x.stop, x.step)"),
        ((Set,), "store sorted(x), which has the same order in every process"),
        ((deque,), "store list(x)"),
        ((Mapping,), "store dict(x)"),
        ((bytearray, memoryview), "store bytes(x)"),
        ((int,), "store int(x)"),
        ((float,), "store float(x)"),
        ((str,), "store str(x)"),
        ((bytes,), "store bytes(x)"),
        (_CODE, "leave it out: code is not stored"),
        ((type(...), type(NotImplemented)), "leave it out"),
        ((io.StringIO,), "store x.getvalue()"),
        ((io.IOBase,), "leave it out: open files are not stored"),
        ((Iterator,), "store list(x), which exhausts the iterator"),
    )
