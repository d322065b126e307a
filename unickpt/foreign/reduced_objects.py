"""Objects of Python and NumPy as the facts that `pickle_writer` writes: what their own
`__reduce_ex__` says, so that a pickle has them as `pickle.dumps` would write them here."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

from unickpt.foreign.pickle_objects import Global, PersistentId, PickledObject

_PROTOCOL = 2
_FACTS = (type(None), bool, int, float, str, bytes, Global, PersistentId, PickledObject)


def reduced(value: Any) -> Any:
    """An object as facts.

    Arguments:
        value: an object of a class of Python or NumPy; what is in it may be facts already.

    Example:
        >>> import pickle, datetime
        >>> from unickpt.foreign.pickle_writer import dumps
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
    function, args, *rest = value.__reduce_ex__(_PROTOCOL)
    state, appended, items = (*rest, None, None, None)[:3]
    is_new = function.__name__ == "__newobj__"
    if is_new:
        function, *args = args
    return PickledObject(
        reduced(function),
        tuple(map(reduced, args)),
        reduced(state),
        [reduced(x) for x in appended or ()],
        [(reduced(key), reduced(x)) for key, x in items or ()],
        is_new,
    )
