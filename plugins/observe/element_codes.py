"""Codes: identify the input and position of each element of an output, by runs on known numbers.

Every element of the inputs has a number of its own. It is written in digits small enough for the
dtype to hold exactly, one digit in each run, in an order that looks random, so that a converter
that sorts, or searches for a maximum, finds no regular pattern. Three further numbers of the first
digit `d`, as `d`, `2 d` and `d + K`, tell the scale `s` and the offset `c` of `s x + c`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unickpt.extend import Array, DType, dtype_name

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs the converter on arrays by name."""

_BITS = {
    "float64": 18, "float32": 18, "float16": 9, "bfloat16": 6, "float8_e4m3fn": 2,
    "float8_e4m3fnuz": 2, "float8_e5m2": 1, "int64": 18, "int32": 18, "int16": 12, "int8": 5,
    "uint64": 18, "uint32": 18, "uint16": 12, "uint8": 5, "complex64": 18, "complex128": 18,
}  # fmt: skip
"""How many bits a digit may have so that three times the digit is held exactly."""
_ODD = 0x9E3779B97F4A7C15  # the golden ratio: neighbours get codes far from each other
_NEAR = 0.26


class NamesDiffer(ValueError):
    """A converter returned other arrays for other values."""


@dataclass
class Traced:
    """Where the elements of an output come from.

    Arguments:
        name: of the output.
        shape: of it.
        source: for each element the number of the input; -1 if it is of none.
        index: for each element its flat index there.
        scale, offset: of the arithmetic, for each element; of a constant only the offset.
        fault: why the elements cannot be traced, with the first one that shows it; "" if they can.
    """

    name: str
    shape: tuple[int, ...]
    source: Array
    index: Array
    scale: Array
    offset: Array
    fault: str = ""

    @property
    def sources(self) -> list[int]:
        """The numbers of the inputs whose elements it has, ascending."""
        if not self.source.size:
            return []
        if self.source.min() == self.source.max():  # as of most
            return [int(self.source[0])] if self.source[0] >= 0 else []
        return [int(source) for source in np.unique(self.source) if source >= 0]


@dataclass(frozen=True)
class _Class:
    """Inputs whose elements are distinguished in one series of runs.

    Arguments:
        members: their numbers.
        starts: the number of the first element of each member, and the number of all at the end.
        bits: of a digit.
        digits: how many there are.
    """

    members: Sequence[int]
    starts: Array
    bits: int
    digits: int

    @classmethod
    def of(cls, members: Sequence[int], inputs: Sequence[Array], bits: int) -> _Class:
        starts = np.concatenate([[0], np.cumsum([inputs[m].size for m in members])])
        needed = max(1, int(starts[-1] - 1).bit_length())
        return cls(members, starts, bits, -(-needed // bits))

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self.bits * self.digits) - 1)

    def digit(self, position: int, place: int) -> Array:
        """A digit of the codes of a member's elements, from 1."""
        numbers = np.arange(self.starts[position], self.starts[position + 1], dtype=np.uint64)
        codes = ((numbers * np.uint64(_ODD)) & self._mask) >> np.uint64(place * self.bits)
        return (codes & np.uint64((1 << self.bits) - 1)).astype(np.int64) + 1

    def numbers(self, digits: Sequence[Array]) -> Array:
        """The numbers of elements with these digits, which begin with 0 here; -1 for no element."""
        codes = np.zeros(len(digits[0]), np.uint64)
        for place, digit in enumerate(digits):
            codes |= digit.astype(np.uint64) << np.uint64(place * self.bits)
        inverse = np.uint64(pow(_ODD, -1, 1 << self.bits * self.digits))
        numbers = ((codes * inverse) & self._mask).astype(np.int64)
        return np.where(numbers < self.starts[-1], numbers, -1)


@dataclass
class Tracer:
    """Traces the elements of a converter's outputs.

    Arguments:
        run: runs it.
        inputs: an example of each input; its elements do not matter.
        names: of these.
    """

    run: Run
    inputs: Sequence[Array]
    names: Sequence[str]
    runs: int = field(default=0, init=False)

    def trace(self) -> list[Traced]:
        """All outputs.

        Raises:
            NamesDiffer: the outputs are not the same ones in each run; the message says which.
        """
        random = np.random.default_rng(0)
        fixed = [_still(x, random) for x in self.inputs]
        traced: dict[str, Traced] = {}
        for members in self._classes():
            self._trace_class(members, fixed, traced)
        return list(traced.values())

    def _classes(self) -> Iterator[list[int]]:
        """The inputs by kind of dtype, whose digits have the same number of bits."""
        kinds: dict[int, list[int]] = {}
        for number, x in enumerate(self.inputs):
            kinds.setdefault(bits_of(x.dtype), []).append(number)
        yield from (members for _, members in sorted(kinds.items(), reverse=True))
        if not self.inputs:
            yield []

    def _trace_class(
        self, members: Sequence[int], fixed: Sequence[Array], traced_by_name: dict[str, Traced]
    ) -> None:
        bits = min([bits_of(self.inputs[m].dtype) for m in members], default=1)
        coded = _Class.of(members, self.inputs, bits)
        if bits > 1:
            first = self._series(coded, fixed)
            narrow = min([bits, *(bits_of(out.dtype) for out in first[0].values())])
            if 1 < narrow < bits:  # the converter casts to a dtype that holds less
                coded = _Class.of(members, self.inputs, narrow)
                first = self._series(coded, fixed)
            further = [self._call(coded, fixed, place) for place in range(1, coded.digits)]
            rounds = [*first, *further]
        else:
            rounds = [self._call(coded, fixed, place) for place in range(coded.digits)]
            rounds.append(self._call(coded, fixed, 0, factor=-1, shift=3))  # the other digit
        check_names(rounds, [*traced_by_name.values()])
        for name, out in rounds[0].items():
            outs = [_flat(outputs[name]) for outputs in rounds]
            decoded = (_decode if bits > 1 else _decode_bits)(coded, outs)
            traced = traced_by_name.get(name)
            if traced is None:
                traced_by_name[name] = Traced(name, out.shape, *decoded)
            else:
                _combine(traced, *decoded)

    def _series(self, coded: _Class, fixed: Sequence[Array]) -> list[Mapping[str, Array]]:
        shift = 1 << coded.bits
        return [
            self._call(coded, fixed, 0),
            self._call(coded, fixed, 0, factor=2),
            self._call(coded, fixed, 0, shift=shift),
        ]

    def _call(
        self, coded: _Class, fixed: Sequence[Array], place: int, factor: int = 1, shift: int = 0
    ) -> Mapping[str, Array]:
        arrays = list(fixed)
        for position, member in enumerate(coded.members):
            x = self.inputs[member]
            digit = coded.digit(position, place) * factor + shift
            if coded.bits == 1:
                digit -= 1
            arrays[member] = digit.astype(x.dtype).reshape(x.shape)
        self.runs += 1
        return self.run(dict(zip(self.names, arrays, strict=True)))


def bits_of(dtype: DType) -> int:
    """How many bits a digit has in a dtype; 1 for those that hold no more."""
    try:
        return _BITS.get(dtype_name(dtype), 1)
    except TypeError:
        return 1


def _still(x: Array, random: np.random.Generator) -> Array:
    """The elements of an input while others are traced: small whole numbers that differ."""
    least, most = (0, 2) if x.dtype.kind == "b" else (1, 1 << max(1, bits_of(x.dtype)))
    values: Array = random.integers(least, most, x.shape).astype(x.dtype)
    return values


def _flat(x: Array) -> Array:
    wide = x.real if x.dtype.kind == "c" else x
    return np.asarray(wide, np.float64).reshape(-1)


def check_names(rounds: Sequence[Mapping[str, Array]], traced: Sequence[Traced]) -> None:
    """Checks that a converter returned the same arrays each time.

    Arguments:
        rounds: its results.
        traced: its earlier results.

    Raises:
        NamesDiffer: says which array differs.
    """
    before = {output.name: output.shape for output in traced}
    for outputs in rounds:
        shapes = {name: out.shape for name, out in outputs.items()}
        before = before or shapes
        if shapes == before:
            continue
        differ = sorted(name for name in {*shapes, *before} if shapes.get(name) != before.get(name))
        raise NamesDiffer(
            f"{differ[0]!r} is {_shape(before.get(differ[0]))} for some values of the inputs, and "
            f"{_shape(shapes.get(differ[0]))} for others: which arrays there are depends on values"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


_Decoded = tuple[Array, Array, Array, Array, str]


def _decode(coded: _Class, outs: Sequence[Array]) -> _Decoded:
    """Source, index, scale, offset and fault of each element."""
    plain, double, shifted, *further = outs
    with np.errstate(all="ignore"):
        scale = (shifted - plain) / (1 << coded.bits)
        offset = 2 * plain - double
        still = (double == plain) & (shifted == plain)
        for out in further:
            still &= out == plain
        digits, off = [], np.zeros(len(plain))
        for number, out in enumerate([double - plain, *further]):
            place = (out if number == 0 else out - offset) / scale
            digit = np.rint(place)
            off = np.maximum(off, np.abs(place - digit))
            digits.append(digit - 1)
    good = np.isfinite(off) & (off < _NEAR) & ~still
    for digit in digits:
        good &= (digit >= 0) & (digit < 1 << coded.bits)
    numbers = np.full(len(plain), -1, np.int64)
    numbers[good] = coded.numbers([digit[good] for digit in digits])
    good &= numbers >= 0
    scale, offset = np.where(good, scale, 0.0), np.where(still, plain, np.where(good, offset, 0.0))
    return *_places(coded, numbers, good), scale, offset, _fault(good | still)


def _decode_bits(coded: _Class, outs: Sequence[Array]) -> _Decoded:
    """As `_decode`, of inputs that hold 0 and 1 only: no arithmetic is found.

    The last output is that of the first digit's opposite, which distinguishes elements from
    constants.
    """
    *digits, opposite = outs
    still = np.all([out == digits[0] for out in outs], axis=0)
    good = np.all([(out == 0) | (out == 1) for out in digits], axis=0)
    good &= opposite == 1 - digits[0]
    numbers = np.full(len(opposite), -1, np.int64)
    numbers[good] = coded.numbers([out[good] for out in digits])
    good &= numbers >= 0
    offset = np.where(still, digits[0], 0.0)
    return *_places(coded, numbers, good), good.astype(float), offset, _fault(good | still)


def _places(coded: _Class, numbers: Array, good: Array) -> tuple[Array, Array]:
    position = np.searchsorted(coded.starts, numbers, side="right") - 1
    members = np.asarray([*coded.members, -1], np.int64)
    source = np.where(good, members[np.where(good, position, -1)], -1)
    index = np.where(good, numbers - coded.starts[np.where(good, position, 0)], 0)
    return source, index


def _fault(fine: Array) -> str:
    bad = np.flatnonzero(~fine)
    return "" if not len(bad) else str(int(bad[0]))


def _combine(traced: Traced, *decoded: Any) -> None:
    """Adds the elements of an output that come from another class of inputs."""
    source, index, scale, offset, fault = decoded
    both = np.flatnonzero((source >= 0) & (traced.source >= 0))
    if len(both) or fault or traced.fault:
        first = min([int(f) for f in (fault, traced.fault) if f] + both[:1].tolist())
        traced.fault = str(first)
        return
    new = source >= 0
    traced.source[new], traced.index[new] = source[new], index[new]
    traced.scale[new], traced.offset[new] = scale[new], offset[new]
