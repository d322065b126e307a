"""Plain values and containers that pickles hold, and how to compare them."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import strategies as st


def _short(key: Any) -> bool:
    return not isinstance(key, int) or abs(key) < 1 << 32


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    st.binary(max_size=300),
)
keys = st.one_of(
    st.text(st.characters(codec="utf-8")), st.integers(-(1 << 59), 1 << 59), st.binary(), st.none()
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(keys, st.tuples(keys.filter(_short), st.text("ab"))), inner),
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """A value with its types, which `==` does not compare."""
    if isinstance(value, dict):
        return ("dict", [(typed(k), typed(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(v) for v in value])
    return (type(value).__name__, struct.pack("d", value) if isinstance(value, float) else value)
