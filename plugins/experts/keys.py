"""Which arrays hold which experts of a mixture of experts, by their names or along a dimension."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from unickpt.extend import ArrayUnits
from unickpt.types import Layout

_MARK, _LAYER = "{x}", "{l}"
_NUMBERS = {_MARK: "(?P<x>0|[1-9][0-9]{0,8})", _LAYER: "(?P<l>0|[1-9][0-9]{0,8})"}
_SEPARATOR = "[/.]"  # torch's names have dots


@dataclass(frozen=True)
class ExpertKey:
    """One key of `Experts`.

    Arguments:
        text: the key.
        k: how many experts a save writes.
        axis: of stacked arrays: the dimension, or the mesh axis that splits it.
    """

    text: str
    k: int
    axis: int | str | None = None

    @classmethod
    def of(cls, text: object, value: object) -> ExpertKey:
        """A key from its text.

        Raises:
            ValueError: it is not valid; names the valid forms.
        """
        if not isinstance(text, str) or not text:
            raise ValueError(f"experts: the key {text!r} is not a name")
        text = str.__str__(text)
        axis: Any = None
        k: Any = value
        if isinstance(value, tuple):
            axis, k = value if len(value) == 2 else (None, None)
        if isinstance(k, bool) or not isinstance(k, Integral) or int(k) < 1:
            raise ValueError(
                f"experts[{text!r}] is {value!r}, but must be the number of experts to save, at "
                "least 1; for stacked experts a pair of their axis and that number"
            )
        marks = text.count(_MARK)
        if axis is None and marks != 1:
            raise ValueError(
                f"experts: the key {text!r} must have {_MARK} once, in the place of an expert's "
                "number; the value of a key of stacked experts is a pair, (axis, k)"
            )
        if axis is not None and marks:
            raise ValueError(f"experts: {text!r} has {_MARK}, so that no axis can be given")
        if text.count(_LAYER) > 1 or (marks and text.find(_LAYER) > text.find(_MARK)):
            raise ValueError(
                f"experts: the key {text!r} may have {_LAYER} once, in the place of a layer's "
                f"number, before {_MARK}"
            )
        if any("*" in part and part not in ("*", "**") for part in _parts(text)):
            raise ValueError(f"experts: in the key {text!r}, * and ** must be whole components")
        if isinstance(axis, Integral) and not isinstance(axis, bool) and int(axis) >= 0:
            axis = int(axis)
        elif axis is not None and not isinstance(axis, str):
            raise ValueError(
                f"experts[{text!r}]: the axis {axis!r} is neither a dimension, at least 0, nor the "
                "name of a mesh axis"
            )
        axis = str.__str__(axis) if isinstance(axis, str) else axis
        return cls(text, int(k), axis)

    def of_layer(self, layer: str | None) -> str:
        """The key with the number of a layer, if it names layers."""
        return self.text if layer is None else self.text.replace(_LAYER, layer)


class ExpertKeys:
    """The keys of `Experts`.

    Arguments:
        each_save: how many to save by key; see `Experts`.

    Raises:
        ValueError: a key or a value is not valid.
    """

    def __init__(self, each_save: Mapping[str, Any]) -> None:
        if not isinstance(each_save, Mapping) or not each_save:
            raise ValueError("experts must be a dict that is not empty")
        self._keys = [ExpertKey.of(text, value) for text, value in each_save.items()]
        self._names = [(key, _pattern(_parts(key.text))) for key in self._keys]
        self._layers = [(key, _pattern(_layer(key))) for key in self._keys]
        self._cache: dict[str, tuple[tuple[Any, Any], ArrayUnits | None]] = {}
        self._texts = {key.text: key for key in self._keys if _LAYER not in key.text}
        self._layered = [(key, _layered(key)) for key in self._keys if _LAYER in key.text]

    def __iter__(self) -> Iterator[ExpertKey]:
        return iter(self._keys)

    def find(self, name: str, shape: Sequence[int], layout: Layout | None) -> ArrayUnits | None:
        """The experts that an array holds a part of; None if it is saved every time.

        Arguments:
            name: of the array.
            shape, layout: of the array.

        Raises:
            ValueError: two keys match it.
        """
        # Each save of a run looks names up again, in the call.
        facts, units = self._cache.get(name, (None, None))
        if facts != (tuple(shape), layout):
            units = self._find(name, shape, layout)
            self._cache[name] = (tuple(shape), layout), units
        return units

    def _find(self, name: str, shape: Sequence[int], layout: Layout | None) -> ArrayUnits | None:
        matching = [
            (key, match) for key, pattern in self._names if (match := pattern.fullmatch(f"/{name}"))
        ]
        if len(matching) > 1:
            both = " and ".join(repr(key.text) for key, _ in matching)
            raise ValueError(f"several keys of `experts` match it: {both}")
        for key, match in matching:
            text = key.of_layer(match.groupdict().get("l"))
            if key.axis is None:
                number = int(match["x"])
                return ArrayUnits(text, range(number, number + 1))
            axis = _dimension(key.axis, len(shape), layout)
            if axis is not None:
                return ArrayUnits(text, range(shape[axis]), axis)
        return None

    def key_of(self, text: str) -> tuple[ExpertKey, int] | None:
        """The key that a checkpoint records, and the number of its layer, or 0; None if it is of
        another `Experts`.

        Arguments:
            text: as of `ArrayUnits.key`.
        """
        if text in self._texts:
            return self._texts[text], 0
        for key, pattern in self._layered:
            if match := pattern.fullmatch(text):
                return key, int(match["l"])
        return None

    def key_of_layer(self, layer: str) -> str | None:
        """The key of the experts of a layer, as of `ArrayUnits.key`.

        Arguments:
            layer: a key, or the part before the number in the name of an array of one expert, or
                the name of an array of stacked experts.

        Raises:
            ValueError: several keys match it.
        """
        if self.key_of(layer) is not None:
            return layer
        matching = [(key, pattern.fullmatch(f"/{layer}")) for key, pattern in self._layers]
        texts = [key.of_layer(m.groupdict().get("l")) for key, m in matching if m is not None]
        if len(texts) > 1:
            raise ValueError(f"several keys of `experts` match it: {', '.join(map(repr, texts))}")
        return texts[0] if texts else None

    def check(self, units: Mapping[str, ArrayUnits]) -> None:
        """Checks that all arrays that are stacked under one key have the same experts.

        Raises:
            ValueError: names two arrays that differ.
        """
        first: dict[str, str] = {}
        for name, array_units in units.items():
            if array_units.axis is not None:
                other = first.setdefault(array_units.key, name)
                if units[other].numbers != array_units.numbers:
                    raise ValueError(
                        f"{len(units[other].numbers)} experts are stacked in {other!r}, but "
                        f"{len(array_units.numbers)} in {name!r}; give them different "
                        "keys of `experts`"
                    )


def _dimension(axis: int | str, rank: int, layout: Layout | None) -> int | None:
    if isinstance(axis, int):
        return axis if axis < rank else None
    dims = () if layout is None else layout.dims
    return next((dim for dim, axes in enumerate(dims) if axis in axes), None)


def _parts(text: str) -> list[str]:
    return re.split(_SEPARATOR, text)


def _layer(key: ExpertKey) -> list[str]:
    """The components of a key that stand before the expert's."""
    parts = _parts(key.text)
    if key.axis is not None:
        return parts
    return parts[: next(position for position, part in enumerate(parts) if _MARK in part)]


def _layered(key: ExpertKey) -> re.Pattern[str]:
    """The pattern of a key with the numbers of layers."""
    return re.compile(_NUMBERS[_LAYER].join(map(re.escape, key.text.split(_LAYER))))


def _pattern(parts: Sequence[str]) -> re.Pattern[str]:
    """The pattern of names: `*` is one component, `**` any number of them.

    Each component of the pattern takes the separator before it, and the first one none.
    """
    made = ""
    for part in parts:
        if part == "**":
            made += f"(?:{_SEPARATOR}[^/.]+)*"
        elif part == "*":
            made += f"{_SEPARATOR}[^/.]+"
        else:
            pieces = re.split(r"(\{[xl]\})", part)
            made += _SEPARATOR + "".join(_NUMBERS.get(p) or re.escape(p) for p in pieces)
    return re.compile(made)
