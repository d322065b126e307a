"""What of a state did not change since the base of a save, and so is neither staged nor hashed.

That is known by what the program says (`SaveOptions.changed`), and, with "tracked", by what a
framework knows of its arrays: JAX's never change, so the same object is the same array; torch
counts the changes of a storage. Check-N-Run (Eisenman et al., NSDI 2022) tracks rows in the same
way.

A few chunks of what is said to be unchanged are looked at all the same. One that did change is an
error, which names the array.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.names import matches
from unickpt.errors import StateChanged, StorageError
from unickpt.format.index import ArrayEntry, Index
from unickpt.quoting import quoted

Changed = Literal["tracked"] | Mapping[str, Any]
"""See `SaveOptions.changed`."""
_ALL = "tracked"
_LOOKED_AT = 64  # one chunk of so many
_CHUNK_BYTES = 8 << 20


def check(changed: object) -> None:
    """Checks `SaveOptions.changed`.

    Raises:
        TypeError, ValueError: it is neither "tracked" nor a dict of patterns.
    """
    if changed is None or changed == _ALL:
        return
    if not isinstance(changed, Mapping) or not all(isinstance(p, str) for p in changed):
        raise TypeError(
            'changed must be "tracked", or a dict of patterns of names with what changed, such as '
            f'{{"frozen/**": False, "embedding/w": rows}}, not {quoted(changed)}'
        )
    for pattern, what in changed.items():
        if not isinstance(what, bool | np.bool_ | str) and _rows(what) is None:
            raise TypeError(
                f"changed[{pattern!r}] is {quoted(what)}, neither a bool nor an array of bools, "
                "one for each row"
            )
        if isinstance(what, str) and what != _ALL:
            raise ValueError(f'changed[{pattern!r}] is {what!r}; the only word is "{_ALL}"')


def _rows(what: Any) -> Array | None:
    """Bools, one for each row; None if it is something else."""
    try:
        found = np.asarray(what)
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if found.dtype == np.bool_ and found.ndim == 1 else None


@dataclass(frozen=True)
class SeenState:
    """The arrays of a save, for the next one.

    Arguments:
        url, attempt: of the checkpoint; the attempt is empty if another program made it.
        tokens: by the array's name what is equal in the next save if it is the same array, and
            nobody has changed it.
    """

    url: str
    attempt: str
    tokens: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Unchanged:
    """What is as in the base.

    Arguments:
        rows: by the name of an array the rows that changed; None if none did.
        attempt: that made the base of which this is true; None if it is true of any.
        probes: by the name of an array indices of elements: chunks with these are looked at.
    """

    rows: Mapping[str, Array | None]
    attempt: str | None = None
    probes: Mapping[str, Array] = field(default_factory=dict)

    def claims(self, name: str, box: Box) -> bool:
        """Whether a box of an array is as in the base, as far as is known."""
        if name not in self.rows:
            return False
        rows = self.rows[name]
        return rows is None or not rows[box.start[0] : box.stop[0]].any()

    def spares(self, name: str, box: Box) -> bool:
        """Whether a box need not be looked at."""
        if not self.claims(name, box):
            return False
        probes = self.probes.get(name)
        if probes is None:
            return True
        inside = (probes >= np.array(box.start)) & (probes < np.array(box.stop))
        return not inside.all(axis=1).any()

    def check_base(self, base: Index | None, where: object) -> None:
        """Checks that the base is the one, and has the arrays as they are.

        Arguments:
            base: its index; None if there is none, or it cannot be used.
            where: of this save, for the error.

        Raises:
            StorageError: what is said to be unchanged was neither staged, nor can it be taken.
        """
        if base is None or self.attempt not in (None, base.attempt):
            why = "is not there or is damaged" if base is None else "is another one"
            raise StorageError(
                f"{where}: the checkpoint of which chunks were to be taken, as they did not change "
                f"since (`changed`), {why}. Nothing was saved; the next save looks at all"
            )
        for name in self.rows:
            theirs = base.arrays.get(name)
            if theirs is not None and theirs.quantized is not None:
                raise StorageError(
                    f"{where}: array {name!r} did not change (`changed`), but the checkpoint of "
                    f"which it was to be taken has it as {theirs.quantized}, and here it is stored "
                    "as it is. Nothing was saved; save it once without `changed`"
                )

    def check(self, name: str, box: Box, before: int | None, digest: int) -> None:
        """Checks a chunk that was looked at, and is as in the base, as far as is known.

        Arguments:
            name, box: which one.
            before: its digest in the base, if that has it.
            digest: of what is saved.

        Raises:
            StateChanged: it changed.
        """
        if before not in (None, digest):
            raise StateChanged(
                f"array {name!r} {box} is said not to have changed since the step before "
                "(`SaveOptions.changed`), but it did. A few chunks are looked at in each save; "
                "other changes may have been missed since: save all once without `changed`, and "
                "find out who changes it"
            )


def unchanged(
    changed: Changed,
    arrays: Mapping[str, ArrayEntry],
    token_of: Callable[[str], object],
    before: SeenState | None,
    apart: Collection[str] = (),
) -> tuple[Unchanged | None, Mapping[str, object]]:
    """Finds out what need not be looked at.

    Arguments:
        changed: see `SaveOptions.changed`.
        arrays: of the save.
        token_of: the token of an array, see `SeenState`.
        before: the base, as far as it is known; None if there is none.
        apart: arrays that the base need not have as they were in the save before: all experts.

    Returns:
        None if that is nothing; and the tokens of the arrays that are tracked.

    Raises:
        ValueError: a pattern matches no array, or has another number of rows.
    """
    patterns: Mapping[str, Any] = {"**": _ALL} if isinstance(changed, str) else changed
    unused, found, tokens = set(patterns), dict[str, Array | None](), dict[str, object]()
    for name, entry in arrays.items():
        pattern = next((p for p in patterns if matches(p, name)), None)
        if pattern is None:
            continue
        unused.discard(pattern)
        if entry.quantized is not None or name in apart:
            continue  # what a base has of it is not what it is, or was
        what = patterns[pattern]
        if isinstance(what, str):
            token = tokens[name] = token_of(name)
            if before is not None and token is not None and before.tokens.get(name) == token:
                found[name] = None
        elif isinstance(what, bool | np.bool_):
            if not what:
                found[name] = None
        else:
            found[name] = _checked_rows(pattern, entry, what)
    unused.discard("**")  # there may be nothing else
    if unused:
        raise ValueError(
            f"SaveOptions.changed: {quoted(sorted(unused))} match no array, or only arrays that an "
            f"earlier pattern matches; there are {quoted(list(arrays))}"
        )
    if not found:
        return None, tokens
    made = Unchanged(found, None if before is None else before.attempt or None)
    return replace(made, probes=_probes({name: arrays[name] for name in found})), tokens


def _checked_rows(pattern: str, entry: ArrayEntry, what: Any) -> Array:
    rows = _rows(what)
    assert rows is not None, "`check` has checked it"
    if not entry.shape or len(rows) != entry.shape[0]:
        raise ValueError(
            f"SaveOptions.changed[{pattern!r}] has {len(rows)} rows, and {entry.name!r} has the "
            f"shape {list(entry.shape)}"
        )
    return rows


def _probes(arrays: Mapping[str, ArrayEntry]) -> dict[str, Array]:
    """Elements whose chunks are looked at: others in each save, on average one chunk of
    `_LOOKED_AT`, and at least one."""
    sizes = {n: e.nbytes for n, e in arrays.items() if e.nbytes}
    counts = {n: int(s / (_LOOKED_AT * _CHUNK_BYTES) + random.random()) for n, s in sizes.items()}
    if sizes and not any(counts.values()):
        counts[random.choices(list(sizes), list(sizes.values()))[0]] = 1
    return {
        name: np.array([[random.randrange(n) for n in arrays[name].shape] for _ in range(count)])
        for name, count in counts.items()
        if count
    }
