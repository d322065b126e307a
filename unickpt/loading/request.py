"""LoadRequest: the leaves of `like`, and what rules need to know about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.names import matches
from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.frameworks.leaves import (
    LocalFragments,
    PerProcess,
    adapter_of,
    by_type,
    expand,
    is_leaf,
)
from unickpt.frameworks.protocol import Adapter, ArrayTarget
from unickpt.quoting import quoted, some
from unickpt.rules.plan import Fact, LeafKind
from unickpt.trees import tree

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class Selection:
    """The leaves that match one of the patterns of `only`, and none of those of `skip`.

    Arguments:
        only: patterns of names; None selects all.
        skip: patterns of names.
    """

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()

    @classmethod
    def of(cls, only: Patterns | None, skip: Patterns) -> Selection:
        """From the arguments of `load`.

        Raises:
            TypeError: they are neither a pattern nor several.
        """
        return cls(None if only is None else _patterns("only", only), _patterns("skip", skip))

    @property
    def selects_all(self) -> bool:
        return self.only is None and not self.skip

    def has(self, name: str) -> bool:
        """Whether a leaf is selected."""
        if self.only is not None and not any(matches(p, name) for p in self.only):
            return False
        return not any(matches(p, name) for p in self.skip)

    def left_out(self, names: Iterable[str]) -> frozenset[str]:
        """Those of some leaves that are not selected."""
        if self.selects_all:
            return frozenset()
        return frozenset(name for name in names if not self.has(name))

    def among(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of some leaves, by name, that are selected."""
        if self.selects_all:
            return known
        return {name: value for name, value in known.items() if self.has(name)}

    def check(self, where: str, asked: Collection[str], stored: Collection[str]) -> None:
        """Checks that every pattern matches a leaf, and that a leaf is selected.

        Arguments:
            where: the checkpoint, for messages.
            asked: names of the leaves of `like`, or of all that is stored without it.
            stored: names of what is stored, or of what rules make of it.

        Raises:
            LoadMismatch: names the patterns that match nothing, and some leaves.
        """
        if self.selects_all:
            return
        known = list(dict.fromkeys([*asked, *stored]))
        for argument, patterns in (("only", self.only or ()), ("skip", self.skip)):
            idle = [p for p in patterns if not any(matches(p, name) for name in known)]
            if idle:
                inner = [p for p in idle if any(name.startswith(f"{p}/") for name in known)]
                whole = f". All below {inner[0]!r} is {inner[0] + '/**'!r}" if inner else ""
                raise LoadMismatch(
                    f"{where}: {argument}={quoted(idle)} matches no leaf; there are "
                    f"{some([repr(name) for name in known]) or 'none'}{whole}. `*` is any text "
                    "within a component of a name, `**` any number of components"
                )
        if not any(map(self.has, asked)):
            raise LoadMismatch(f"{where}: only= and skip= together select no leaf")


ALL = Selection()


def _patterns(argument: str, given: Patterns) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f'{argument} must be a pattern of names such as "params/**", or several in a list, not '
            f"{quoted(given)}"
        )
    return tuple(patterns)


_NUMBERS = {bool: "bool", int: "int64", float: "float64"}


@dataclass(frozen=True)
class LoadRequest:
    """What a load requests.

    Arguments:
        node: the structure of `like`.
        leaves: the selected ones by name.
        targets: the arrays among them.
        left_out: the leaves that are not selected, by name.
    """

    node: tree.Node | tree.Leaf
    leaves: Mapping[str, Any]
    targets: Mapping[str, ArrayTarget]
    left_out: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        like: Any,
        among: Sequence[Adapter],
        known: Mapping[str, Any],
        selection: Selection = ALL,
    ) -> LoadRequest:
        """The leaves of a tree.

        Arguments:
            like: the tree.
            among: the frameworks' adapters.
            known: what is stored, or what rules make of it; for optimizers without state.
            selection: which leaves are requested.
        """
        known = selection.among(known)
        node = tree.flatten(
            like,
            by_type(lambda x: is_leaf(x, among)),
            lambda obj, name: expand(obj, name, among, known),
            "`like` cannot be loaded into",
        )
        leaves = {leaf.name: leaf.value for leaf in tree.leaves(node)}
        left_out = {name: leaves.pop(name) for name in selection.left_out(list(leaves))}
        return cls(node, leaves, _targets_of(leaves, among), left_out)

    @property
    def facts(self) -> Mapping[str, Fact]:
        """The leaves as rules see them."""
        return _RequestedFacts(self)


class _RequestedFacts(Mapping[str, Fact]):
    """Made when they are looked at: without rules, only those of plain numbers are."""

    def __init__(self, asked: LoadRequest) -> None:
        self._asked = asked

    def __getitem__(self, name: str) -> Fact:
        value, target = self._asked.leaves[name], self._asked.targets.get(name)
        if target is not None:
            return Fact(tuple(target.shape), dtypes.name_of(target.dtype))
        if isinstance(value, PerProcess):
            return Fact(kind=LeafKind.PROCESS)
        return Fact((), _NUMBERS.get(type(value), ""), LeafKind.VALUE)

    def __contains__(self, name: object) -> bool:
        return name in self._asked.leaves

    def __iter__(self) -> Iterator[str]:
        return iter(self._asked.leaves)

    def __len__(self) -> int:
        return len(self._asked.leaves)


def _targets_of(leaves: Mapping[str, Any], among: Sequence[Adapter]) -> dict[str, ArrayTarget]:
    """The arrays among the leaves of `like`, as targets.

    Raises:
        UnsupportedLeaf: names every leaf that cannot be loaded into, and why.
    """
    targets: dict[str, ArrayTarget] = {}
    bad: list[str] = []
    find_adapter = by_type(lambda value: adapter_of(value, among))
    for name, value in leaves.items():
        if type(value) in _NUMBERS:
            continue
        adapter = find_adapter(value)
        try:
            if isinstance(value, LocalFragments):
                targets[name] = value.target()
            elif adapter is not None:
                targets[name] = adapter.target(value)
        except (TypeError, ValueError) as error:
            bad.append(f"  {name!r}: {error}")
    if bad:
        raise UnsupportedLeaf("these leaves of `like` cannot be loaded into:\n" + "\n".join(bad))
    return targets
