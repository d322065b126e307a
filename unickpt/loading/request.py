"""Request: the leaves of `like`, and what rules need to know about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.arrays import dtypes
from unickpt.errors import UnsupportedLeaf
from unickpt.frameworks.leaves import LocalFragments, PerProcess, expand, is_leaf
from unickpt.frameworks.protocol import Adapter, ArrayTarget
from unickpt.frameworks.registry import adapter_of, by_type
from unickpt.loading.request import ALL, Selection
from unickpt.rules.plan import Fact, LeafKind
from unickpt.trees import tree

_NUMBERS = {bool: "bool", int: "int64", float: "float64"}


@dataclass(frozen=True)
class Request:
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
    ) -> Request:
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
        return _Facts(self)


class _Facts(Mapping[str, Fact]):
    """Made when they are looked at: without rules, only those of plain numbers are."""

    def __init__(self, asked: Request) -> None:
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
