"""Caches the description and plan of a save for the next save of the same tree.

A training loop saves the same tree repeatedly: the same names, shapes, dtypes and layouts with
other data. Then only the data are read. Small arrays are copied in bulk, into reused memory; on
devices they are gathered first.
Immutable arrays are referenced, without a description of each. A save that the caller waits for
copies nothing and references all arrays in host memory. If units take turns, only the units whose
turn it is are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.verified_chunks import SMALL
from unickpt.frameworks.adapter_protocol import (
    Adapter,
    ArraySource,
    Fragment,
    Gatherer,
    Memory,
    Read,
)
from unickpt.frameworks.leaves import (
    ArrayFacts,
    PerProcess,
    adapter_of,
    expand,
    leaf_test,
)
from unickpt.frameworks.process_group import Group, members_of
from unickpt.options import SaveOptions
from unickpt.saving.describe import Description, checked_metadata, problem_finder, unstorable
from unickpt.saving.snapshot_policy import SnapshotMethod, SnapshotPolicy
from unickpt.saving.task import SaveTask
from unickpt.saving.write_plan import WritePlan
from unickpt.trees import tree, tree_json
from unickpt.trees.tree import Skeleton, leaves_of, skeleton

if TYPE_CHECKING:
    from unickpt.frameworks.members import Members
    from unickpt.frameworks.sections import EncodedValue
    from unickpt.write_filter import Unit, Units, WriteFilter

_PLAIN = {int, float, bool, str, bytes, type(None)}
_ALIGNMENT = 64
_PRIVATE = Memory(mutable=False)


@dataclass(eq=False)
class _Together:
    """Small or immutable arrays of one framework, in host memory: kept in bulk.

    Arguments:
        adapter: of the framework.
        copied: whether they are copied; else they are referenced.
        unit: of all of them; None if they have none.
        numbers: their numbers among the leaves.
        names: their names.
        sources: the arrays as they are kept.
        reads: read their copies.
        copy: copies them; None until there is room for the copies.
    """

    adapter: Adapter
    copied: bool
    unit: Unit | None
    numbers: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sources: list[ArraySource] = field(default_factory=list)
    reads: Sequence[Read] = ()
    copy: Callable[[Sequence[Any], Sequence[int] | None], None] | None = None

    def keep(self, values: Sequence[Any], now: Description | None = None) -> int:
        """Keeps them as they are now, but copies none that `now` does not look at; returns how many
        bytes were copied."""
        sources, reads, indices = self.sources, self.reads, None
        if self.copied and now is not None and now.skipped is not None:
            skipped = now.skipped
            indices = [
                n
                for n, (name, source) in enumerate(zip(self.names, sources, strict=True))
                if source.assumed or not skipped.skips(name, source.fragments[0].box)
            ]
            sources, reads = [sources[n] for n in indices], [reads[n] for n in indices]
        leaf_numbers = self.numbers if indices is None else [self.numbers[n] for n in indices]
        leaves = [values[number] for number in leaf_numbers]
        if self.copy is not None:
            self.copy(leaves, indices)
        else:
            reads = self.adapter.readers(leaves)
        for source, read in zip(sources, reads, strict=True):
            for fragment in source.fragments:
                fragment.read = read
        if not self.copied:
            return 0
        nbytes = self._nbytes
        return sum(nbytes if indices is None else map(nbytes.__getitem__, indices))

    @cached_property
    def _nbytes(self) -> list[int]:
        return [source.held_bytes for source in self.sources]

    def current(
        self, names: Collection[str], values: Sequence[Any], job_group: Group
    ) -> Iterator[tuple[str, ArraySource]]:
        """Those of some names, as they are now."""
        members = [n for n, name in enumerate(self.names) if name in names]
        reads = self.adapter.readers([values[self.numbers[n]] for n in members])
        for n, read in zip(members, reads, strict=True):
            source = self.sources[n]
            fragments = tuple(Fragment(f.box, f.replicas, read, _PRIVATE) for f in source.fragments)
            yield self.names[n], source.with_fragments(fragments)

    def let_go(self) -> None:
        """Drops references to the program's memory, so that nothing reads what a later save might
        leave out; makes room for copies."""
        _forget(self.sources)
        if self.copied and self.copy is None:
            rooms = list(self._rooms())
            boxes = [fragment.box for source in self.sources for fragment in source.fragments]
            self.reads = list(map(_reading, rooms, boxes))
            self.copy = self.adapter.copier(rooms)

    def _rooms(self) -> Iterator[Array]:
        size = sum(-(-source.held_bytes // _ALIGNMENT) * _ALIGNMENT for source in self.sources)
        buffer = np.empty(size, np.uint8)
        for source in self.sources:
            (fragment,) = source.fragments
            nbytes, dtype = source.held_bytes, source.dtype.newbyteorder("=")
            yield buffer[:nbytes].view(dtype).reshape(fragment.box.shape)
            buffer = buffer[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]


class _SingleArray(NamedTuple):
    """An array that is described again.

    Arguments:
        number: its number among the leaves.
        name: of it.
        unit: of the array; None if it has none, or several.
        adapter: of its framework.
        kept_source: how it is kept.
        is_gathered: whether a device could copy it to the host together with others.
    """

    number: int
    name: str
    unit: Unit | None
    adapter: Adapter
    kept_source: ArraySource
    is_gathered: bool = False


@dataclass(eq=False)
class _GatheredArrays:
    """Small arrays on devices, which are copied to the host together.

    Arguments:
        gatherer: copies them.
        arrays: as it takes them, all of one unit.
    """

    gatherer: Gatherer
    arrays: Sequence[_SingleArray]

    def __post_init__(self) -> None:
        self.unit = self.arrays[0].unit
        self.sources = [array.kept_source for array in self.arrays]
        self._nbytes = sum(source.held_bytes for source in self.sources)
        self._is_prepared = False

    def keep(self, values: Sequence[Any], now: Description | None = None) -> int:
        """Keeps them as they are now, unless `now` looks at none of them; returns how many bytes
        are copied."""
        if (
            now is not None
            and now.skipped is not None
            and all(
                not source.assumed and now.borrows(array.name, fragment.box)
                for array, source in zip(self.arrays, self.sources, strict=True)
                for fragment in source.fragments
            )
        ):
            return 0
        reads = self.gatherer.start([values[array.number] for array in self.arrays])
        for source, read in zip(self.sources, reads, strict=True):
            for fragment in source.fragments:
                fragment.read = read
        return self._nbytes

    def current(
        self, names: Collection[str], values: Sequence[Any], job_group: Group
    ) -> Iterator[tuple[str, ArraySource]]:
        """As `_Together.current`."""
        for array in self.arrays:
            if array.name in names:
                yield array.name, array.adapter.source(values[array.number], job_group)

    def let_go(self) -> None:
        """As `_Together.let_go`; takes what later copies need."""
        _forget(self.sources)
        if not self._is_prepared:
            self.gatherer.prepare()
            self._is_prepared = True


def _gather(
    singles: Sequence[_SingleArray],
    sources: Mapping[str, ArraySource],
    values: Sequence[Any],
    most_bytes: int,
) -> tuple[Sequence[_GatheredArrays], Sequence[_SingleArray]]:
    """Of arrays that each save describes, those that devices can copy together, and the others.

    Arguments:
        singles: the arrays.
        sources: as they are now, by name.
        values: the leaves.
        most_bytes: how many bytes may be copied together.
    """
    candidates: dict[tuple[int, Unit | None], list[_SingleArray]] = {}
    for single in singles:
        nbytes = single.kept_source.held_bytes
        if single.is_gathered and nbytes <= most_bytes:
            most_bytes -= nbytes
            candidates.setdefault((id(single.adapter), single.unit), []).append(single)
    groups, numbers = list[_GatheredArrays](), set[int]()
    for members in candidates.values():
        leaves = [values[member.number] for member in members]
        now = [sources[member.name] for member in members]
        gatherer = members[0].adapter.gatherer(leaves, now)
        if gatherer is not None:
            groups.append(_GatheredArrays(gatherer, [members[n] for n in gatherer.numbers]))
            numbers.update(array.number for array in groups[-1].arrays)
    return groups, [single for single in singles if single.number not in numbers]


# No plan depends on these: they may differ in each call, or where steps are kept in several places.
_NEVER = {"group", "metrics", "progress", "base", "fsync", "changed", "timing"}
_planned_by = attrgetter(*(o.name for o in fields(SaveOptions) if o.name not in _NEVER))


def _of(group: Group) -> tuple[int, int, Members | None]:
    """The parts of a group on which descriptions of arrays depend."""
    return group.index, group.count, members_of(group)


def _reading(room: Array, room_box: Box) -> Read:
    return lambda box, make_buffer: room[box.relative_to(room_box.start).slices]


def _forget(sources: Sequence[ArraySource]) -> None:
    for source in sources:
        for fragment in source.fragments:
            fragment.read, fragment.memory, fragment.sample = _no_longer, _PRIVATE, None


def _no_longer(box: Box, make_buffer: Callable[[], Array]) -> Array:
    raise AssertionError("the save has ended, or leaves this out")


@dataclass(eq=False)
class CachedPlan:
    """The cached facts of a tree from a save of it. Only one save at a time uses them.

    Arguments:
        cache: the cache that holds it.
        options: the options of that save on which a plan depends.
        among, group, units: of that save; a plan depends on them, too. `units` are those that a
            save may leave out.
        skeleton: of the tree.
        types: of its leaves.
        names: of its values and values per process, by their numbers among the leaves.
        arrays: the numbers and names of its arrays.
        facts: of these.
        description: of the save, with the arrays as they are kept.
        together: arrays that are kept in bulk.
        singles: arrays that each save describes one by one.
        plan: of the chunks; None until it is made.
    """

    cache: PlanCache
    options: tuple[Any, ...]
    among: Sequence[Adapter]
    group: tuple[int, int, Members | None]
    units: Units | None
    skeleton: Skeleton
    types: Sequence[type]
    names: Mapping[int, str]
    arrays: Sequence[tuple[int, str]]
    facts: Sequence[ArrayFacts]
    description: Description
    together: Sequence[_Together | _GatheredArrays]
    singles: Sequence[_SingleArray]
    plan: WritePlan | None = None

    def __post_init__(self) -> None:
        sources = self.description.sources
        fragments = chain.from_iterable(source.fragments for source in sources.values())
        self.methods = dict.fromkeys(fragments, SnapshotMethod.REFERENCE)
        self.assumed = [
            (number, name, source)
            for number, (name, source) in enumerate(sources.items())
            if source.assumed and source.fragments
        ]
        """The assumed replicas: their numbers, names, and how they are kept."""

    def recognise(self, values: Sequence[Any]) -> bool:
        """Whether these leaves have the same descriptions."""
        if list(map(type, values)) != self.types:
            return False
        try:
            return all(ArrayFacts.gather(f.adapter, f.numbers, values) == f for f in self.facts)
        except Exception:  # such as a deleted array, which `describe` reports
            return False

    def planned(self, job: SaveTask) -> WritePlan:
        """The plan of a save of the tree; not cached if it skips unchanged arrays."""
        plan = job.plan(self.plan if job.description.skipped is None else None)
        self.plan = plan if job.description.skipped is None else self.plan
        return plan

    def give_back(self) -> None:
        """Returns it for the next save after the save that used it has ended; drops references to
        the program's memory, so that it can be freed before."""
        for group in self.together:
            group.let_go()
        _forget([single.kept_source for single in self.singles])
        self.cache._give(self)


def _is_copied(
    source: ArraySource,
    kept_source: ArraySource,
    staging: str,
    methods: Mapping[Fragment, SnapshotMethod] | None,
) -> bool | None:
    """True if an array is copied in bulk, False if it is referenced in bulk, None if each save
    describes it."""
    memory = source.fragments[0].memory
    plain = not memory.on_device and source.prng is None and source.dtype != np.bool_
    if methods is None:
        is_whole = source.fragments[0].box == Box.whole(source.shape)
        return False if plain and (is_whole or not memory.mutable) else None
    if not plain or any(methods[f] is not SnapshotMethod.REFERENCE for f in kept_source.fragments):
        return None
    if memory.mutable:
        return True if len(kept_source.fragments) == 1 else None
    return False if staging != "copy" else None


def _is_gathered(source: ArraySource) -> bool:
    """Whether a device could copy an array to the host together with others."""
    on_device = source.fragments[0].memory.on_device
    return on_device and source.prng is None and source.held_bytes <= SMALL


def _may_share(sources: Iterable[ArraySource]) -> bool:
    """Whether arrays that are not copied could lie in memory that the program writes to."""
    memories = [f.memory for s in sources for f in s.fragments if f.memory.spans is not None]
    return len({memory.mutable for memory in memories}) == 2


class DescribedTree:
    """The tree of a save, once it is described; `PlanCache.describe` makes it.

    Call order: optionally `arrays` and `current`, then `keep` or `refer`, then `plan`, and
    `give_back` last, if the save has succeeded.

    Arguments:
        job: the save.
        root: the tree, flattened.
        cache: keeps its plan for the next save of the same tree.
    """

    cached: CachedPlan | None = None
    """The cached facts of the tree; None if there are none."""

    def __init__(self, job: SaveTask, root: tree.Node | tree.Leaf, cache: PlanCache) -> None:
        self._job, self._root, self._cache = job, root, cache

    @property
    def described(self) -> Collection[ArraySource]:
        """The arrays that this save describes one by one."""
        return self._job.description.sources.values()

    def arrays(self) -> Mapping[str, Any]:
        """The arrays as they are now, by their names; with other leaves."""
        return {leaf.name: leaf.value for leaf in tree.leaves(self._root)}

    def current(self, names: Collection[str]) -> Mapping[str, ArraySource]:
        """The arrays as they are now, by name, except those that this save leaves out."""
        return {name: self._job.description.sources[name] for name in names}

    def keep(self, policy: SnapshotPolicy) -> Mapping[str, ArraySource]:
        """Keeps the arrays as they are now; returns them as they are kept."""
        description = self._job.description
        sources = {
            name: policy.keep(source, partial(description.borrows, name))
            for name, source in description.sources.items()
        }
        self._learn(sources, policy.methods, policy.small_bytes)
        return sources

    def refer(self) -> None:
        """References the arrays in place: they do not change before the save has ended."""
        sources = self._job.description.sources
        if self._cache.is_repeated(sources):
            self._learn(sources, None)

    def plan(self) -> WritePlan:
        """The plan of the save."""
        return self._job.plan() if self.cached is None else self.cached.planned(self._job)

    def give_back(self) -> None:
        """Caches the facts of the tree for the next save."""
        if self.cached is not None:
            self.cached.give_back()

    def _learn(
        self,
        sources: Mapping[str, ArraySource],
        methods: Mapping[Fragment, SnapshotMethod] | None,
        gathered_bytes: int = 0,
    ) -> None:
        if isinstance(self._root, tree.Node):
            more = methods, gathered_bytes
            self.cached = self._cache.learn(self._root, self._job, sources, *more)


class SameTree(DescribedTree):
    """The tree of a save whose plan is cached.

    Arguments:
        job: the save.
        plan: the cached facts.
        values: the leaves.
    """

    cached: CachedPlan

    def __init__(self, job: SaveTask, plan: CachedPlan, values: Sequence[Any]) -> None:
        self._job, self.cached, self._values = job, plan, values
        self._singles, self._together = list[_SingleArray](), list[_Together | _GatheredArrays]()
        """The parts that this save writes."""
        self._sources = list[ArraySource]()
        """The arrays of `_singles`."""

    @property
    def described(self) -> Collection[ArraySource]:
        return self._sources

    def describe(
        self, metadata: Mapping[str, Any] | None, write_filter: WriteFilter | None = None
    ) -> Description:
        """The description of the save.

        Arguments:
            metadata: as for `SaveTask.describe`.
            write_filter: which units need not be written.

        Raises:
            UnsupportedLeaf: a value per process, or the metadata, cannot be stored, or no units
                can be chosen.
        """
        plain: dict[str, tree_json.Plain] = {}
        blobs: dict[str, EncodedValue] = {}
        bad: list[str] = []
        for number, name in self.cached.names.items():
            value = self._values[number]
            if isinstance(value, PerProcess):
                from unickpt.frameworks import per_process

                try:
                    blobs[name] = per_process.encode(value.value, self.cached.among)
                except (TypeError, ValueError) as error:
                    bad.append(f"{name!r}: {error}")
            else:
                plain[name] = value
        if bad:
            raise unstorable(bad)
        cached_description = self.cached.description
        index = replace(cached_description.index, values=plain, metadata=checked_metadata(metadata))
        description = replace(cached_description, index=index, blobs=blobs)
        self._description = description = (
            description if write_filter is None else description.selected(write_filter)
        )
        self._singles = [
            single for single in self.cached.singles if description.writes(single.unit)
        ]
        self._together = [group for group in self.cached.together if description.writes(group.unit)]
        values, group = self._values, self._job.group
        self._sources = [o.adapter.source(values[o.number], group) for o in self._singles]
        return description

    def arrays(self) -> Mapping[str, Any]:
        return {name: self._values[number] for number, name in self.cached.arrays}

    def current(self, names: Collection[str]) -> Mapping[str, ArraySource]:
        both = zip(self._singles, self._sources, strict=True)
        sources = {single.name: source for single, source in both if single.name in names}
        for group in self._together:
            sources |= group.current(names, self._values, self._job.group)
        return sources

    def assumed(self) -> Iterator[tuple[int, ArraySource, bool]]:
        """The assumed replicas: their numbers, sources, and whether these stay as they are."""
        both = zip(self._singles, self._sources, strict=True)
        now = {id(single.kept_source): source for single, source in both}
        for number, name, kept_source in self.cached.assumed:
            if id(kept_source) in now or self._description.has(name, kept_source):
                yield number, now.get(id(kept_source), kept_source), id(kept_source) not in now

    def keep(self, policy: SnapshotPolicy) -> Mapping[str, ArraySource]:
        now = self._job.description
        policy.methods.update(self.cached.methods)
        for target, fresh in self._fill(lambda name, s: policy.keep(s, partial(now.borrows, name))):
            policy.methods[target] = policy.methods.pop(fresh)
        policy.used.add(SnapshotMethod.REFERENCE)
        policy.copied_bytes += sum(group.keep(self._values, now) for group in self._together)
        self._values = ()
        return self.cached.description.sources

    def refer(self) -> None:
        self._fill(lambda name, source: source)
        for group in self._together:
            group.keep(self._values)
        self._values = ()

    def _fill(
        self, keep: Callable[[str, ArraySource], ArraySource]
    ) -> Sequence[tuple[Fragment, Fragment]]:
        """Lets the cached fragments of arrays that this save describes read the current arrays.

        Arguments:
            keep: how such an array is kept, by its name.

        Returns:
            The fragments of these arrays, each with the fragment of the kept array.
        """
        pairs = []
        for single, source in zip(self._singles, self._sources, strict=True):
            kept_source = keep(single.name, source)
            for target, fresh in zip(
                single.kept_source.fragments, kept_source.fragments, strict=True
            ):
                assert target.box == fresh.box, f"{target.box} is now {fresh.box}"
                target.read, target.memory = fresh.read, fresh.memory
                target.sample = fresh.sample
                pairs.append((target, fresh))
        return pairs


class PlanCache:
    """The plans of the last trees that were saved.

    Arguments:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._free: list[CachedPlan] = []
        self._names: list[int] = []

    def describe(
        self,
        job: SaveTask,
        root: Any,
        metadata: Mapping[str, Any] | None,
    ) -> DescribedTree:
        """Describes what a save has to save, as `SaveTask.describe_leaves`."""
        job.features.choose()
        match = self.find(root, job)
        if isinstance(match, SameTree):
            again = match.describe(metadata, job.features.write_filter)
            job.describe_again(again, match.assumed())
            return match
        job.describe_leaves(match, metadata)
        return DescribedTree(job, match, self)

    def is_repeated(self, sources: Mapping[str, ArraySource]) -> bool:
        """Whether one of the last trees had arrays of these names, and so the next one may."""
        names = hash(tuple(sources))
        with self._lock:
            is_known = names in self._names
            self._names = [*self._names, names][-self._most :]
        return is_known

    def find(self, root: Any, job: SaveTask) -> SameTree | tree.Node | tree.Leaf:
        """Takes the plan of a save's tree, if there is one; the caller gives it back.

        Returns:
            The tree, flattened, if there is none.

        Raises:
            UnsupportedLeaf: it cannot be flattened.
        """
        options, group, units, among = job.options, job.group, job.features.units, job.among
        seen = dict[tuple[str, int], tuple[Any, tree.Expansion | None]]()

        def expand_once(obj: Any, name: str) -> tree.Expansion | None:
            # `state_dict` may take long, and may need all processes to call it together. The object
            # is kept with its result, so that no other object gets its id.
            if (name, id(obj)) not in seen:
                seen[name, id(obj)] = obj, expand(obj, name, among)
            return seen[name, id(obj)][1]

        def level(obj: Any, name: str) -> tree.Expansion | None:
            return tree.level_of(obj, name, expand_once)

        key = _planned_by(options), among, _of(group)
        for plan in reversed(self._free):
            if plan.units is not units or (plan.options, plan.among, plan.group) != key:
                continue
            values = leaves_of(root, plan.skeleton, level)
            if values is not None and plan.recognise(values) and self._take(plan):
                return SameTree(job, plan, values)
        problem = problem_finder(group, options, among, job.features)
        return tree.flatten(root, leaf_test(among), expand_once, problem_of=problem)

    def _take(self, plan: CachedPlan) -> bool:
        with self._lock:
            if plan not in self._free:
                return False
            self._free.remove(plan)
            return True

    def learn(
        self,
        root: tree.Node,
        job: SaveTask,
        kept_sources: Mapping[str, ArraySource],
        methods: Mapping[Fragment, SnapshotMethod] | None,
        gathered_bytes: int = 0,
    ) -> CachedPlan | None:
        """The facts of a save's tree for the next save; the save gives them back when it ends.

        Arguments:
            root: the tree, flattened.
            job: the save; its arrays are described, and not kept yet.
            kept_sources: the arrays as they are kept.
            methods: how each fragment of them is kept; None if all stay where they are.
            gathered_bytes: how much devices may copy together.

        Returns:
            None if every leaf of the tree must be described each time.
        """
        like, among, described = skeleton(root), job.among, job.description
        if like is None or _may_share(described.sources.values()):
            return None
        names, arrays = dict[int, str](), dict[int, tuple[Adapter, list[int]]]()
        together: dict[tuple[int, bool, Unit | None], _Together] = {}
        singles = list[_SingleArray]()
        leaves = list(tree.leaves(root))
        for number, (name, value) in enumerate((leaf.name, leaf.value) for leaf in leaves):
            if type(value) in _PLAIN or type(value) is PerProcess:
                names[number] = name
                continue
            adapter = adapter_of(value, among)
            if adapter is None:
                return None
            arrays.setdefault(id(adapter), (adapter, []))[1].append(number)
            if name not in kept_sources or not kept_sources[name].fragments:
                continue  # it is another name of an array, or has no elements
            source, units = described.sources[name], described.units.get(name)
            copied, unit = None, None if units is None else units.only
            # Excluded: parts that this save leaves out, and arrays of several units.
            is_left_out = any(described.borrows(name, f.box) for f in source.fragments)
            in_bulk = (methods is None or not is_left_out) and (units is None or unit is not None)
            if in_bulk:
                copied = _is_copied(source, kept_sources[name], job.options.staging, methods)
            if copied is None:
                more = adapter, kept_sources[name], in_bulk and _is_gathered(source)
                singles.append(_SingleArray(number, name, unit, *more))
            else:
                group = _Together(adapter, copied, unit)
                same = together.setdefault((id(adapter), copied, unit), group)
                same.numbers.append(number)
                same.names.append(name)
                same.sources.append(kept_sources[name])
        values = [leaf.value for leaf in leaves]
        try:
            facts = [
                ArrayFacts.gather(adapter, numbers, values) for adapter, numbers in arrays.values()
            ]
        except Exception:  # the adapter says nothing in advance of such arrays
            return None
        gathered, left = _gather(singles, described.sources, values, gathered_bytes)
        return CachedPlan(
            cache=self,
            options=_planned_by(job.options),
            among=among,
            group=_of(job.group),
            units=job.features.units,
            skeleton=like,
            types=list(map(type, values)),
            names=names,
            arrays=[(n, leaves[n].name) for _, numbers in arrays.values() for n in numbers],
            facts=facts,
            description=Description(
                described.index, kept_sources, {}, described.units, encoders=described.encoders
            ),
            together=[*together.values(), *gathered],
            singles=left,
        )

    def _give(self, plan: CachedPlan) -> None:
        with self._lock:
            self._free = [*self._free, plan][-self._most :]
