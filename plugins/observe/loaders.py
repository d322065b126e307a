"""Loaders: how an inference engine fills the parameters of each rank, and their expected content.

An engine hides a converter in its loader: it fuses, cuts and pads the arrays of a checkpoint for
tensor and expert parallelism. It is observed on each rank; the ranks' results together become
rules, where the number of the rank is an axis if a formula fits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unickpt import Rules
from unickpt.errors import RuleError
from unickpt.extend import Array, keys_of_leaves
from unickpt.plugins.observe.checking import Side
from unickpt.plugins.observe.converters import Example, leaves_in
from unickpt.plugins.observe.observe import Seen, observed, rules_of

Weights = Iterable[tuple[str, Any]]


@dataclass
class RankLoad:
    """The observation of a loader on one rank; it can be pickled, to be sent to one process.

    Arguments:
        rank: its number.
        size: of how many.
        seen: where the elements of its parameters come from.
    """

    rank: int
    size: int
    seen: Seen


def observe_loader(
    model: Any,
    load_weights: Callable[..., Any],
    rank: int,
    size: int,
    *,
    example: Any,
    framework: str = "torch",
) -> RankLoad:
    """Observes how an engine's own loader fills the parameters of a model on one rank.

    Call it in the process of each rank, or with the parallel state of each set by hand, and give
    the results to `rules_of_ranks`. Every parameter is set to zero before each of the runs.

    Arguments:
        model: the model of this rank, with `named_parameters`; or a function that returns it, which
            is called for each run; or a dict of arrays that are filled in place.
        load_weights: fills it from pairs of names and arrays: a method of the model, such as
            vLLM's, or a function of the model and the pairs.
        rank, size: of the tensor- or expert-parallel group.
        example: names and shapes of the checkpoint's arrays; see `Rules.observe`. Their dtype is
            that of the checkpoint.
        framework: "torch", "numpy" or "jax": whose arrays the loader gets.

    Raises:
        RuleError: which parameters there are depends on values.
    """
    if not 0 <= rank < size:
        raise RuleError(f"rank={rank} is not one of size={size} ranks")
    parsed_example = Example.of(example, framework)
    loader = _Loader(model, load_weights, parsed_example)
    return RankLoad(rank, size, observed(loader, parsed_example, f"the loader of rank {rank}"))


class _Loader:
    """A loader as a function of arrays by name."""

    def __init__(self, model: Any, load_weights: Callable[..., Any], example: Example) -> None:
        self._model, self._load, self._example = model, load_weights, example

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        is_made = callable(self._model) and not hasattr(self._model, "named_parameters")
        model = self._model() if is_made else self._model
        for parameter in _parameters(model).values():
            parameter[...] = 0
        pairs = self._pairs(arrays)
        if getattr(self._load, "__self__", None) is not None:
            self._load(pairs)
        else:
            self._load(model, pairs)
        return leaves_in(_parameters(model))[0]

    def _pairs(self, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Any]]:
        names = dict(keys_of_leaves(self._example.node))
        for name, x in arrays.items():
            key, *below = names[name]
            yield name if below else str(key), self._example.array(x)


def _parameters(model: Any) -> dict[str, Any]:
    if hasattr(model, "named_parameters"):
        return {name: parameter.data for name, parameter in model.named_parameters()}
    return dict(model)


def rules_of_ranks(loads: Sequence[RankLoad], *, strict: bool = True, name: str = "ranks") -> Rules:
    """The rules from a checkpoint to the parameters of all ranks of an engine.

    Arguments:
        loads: the results of `observe_loader` on each rank.
        strict: as for `Rules.observe`.
        name: of the rules, for messages.

    Returns:
        Rules whose right side is `ranks/<rank>/<parameter>`; see `Rules.observe`.

    Raises:
        RuleError: ranks are missing, or a parameter depends on values.

    Example:
        >>> def fill(rank):
        ...     def load(model, weights):
        ...         for name, array in weights:
        ...             model[name][...] = array[2 * rank :][:2]
        ...     return load
        >>> ranks = []
        >>> for rank in range(2):
        ...     model = {"w": np.zeros((2, 3), np.float32)}
        ...     ranks.append(
        ...         observe_loader(
        ...             model, fill(rank), rank, 2, example={"w": (4, 3)}, framework="numpy"
        ...         )
        ...     )
        >>> print(rules_of_ranks(ranks))
        w [(r a) b] <-> ranks/{r}/w [a b]  r=2?
    """
    loads = sorted(loads, key=lambda load: load.rank)
    sizes = {load.size for load in loads}
    if len(sizes) != 1 or [load.rank for load in loads] != list(range(max(sizes))):
        raise RuleError(
            f"ranks {[load.rank for load in loads]} were observed of {sorted(sizes)}: give what "
            "each rank of one group returned, once"
        )
    first = loads[0].seen
    joined = Seen(first.inputs, [], first.own, {}, {}, 0, lambda name: name.split("/", 2)[2])
    for load in loads:
        under, seen = f"ranks/{load.rank}/", load.seen
        if seen.inputs != joined.inputs:
            raise RuleError(f"rank {load.rank} was observed with another example than rank 0")
        joined.traced += [replace(output, name=under + output.name) for output in seen.traced]
        joined.made |= {under + output: x for output, x in seen.made.items()}
        joined.refused |= {under + output: why for output, why in seen.refused.items()}
        joined.runs = max(joined.runs, seen.runs)
    return rules_of(joined, name, strict=strict)


def expected_digests(loads: Iterable[RankLoad], checkpoint: Any) -> dict[int, dict[str, str]]:
    """The sha256 that each parameter of each rank must have after loading, without the engine.

    Compare with `hashlib.sha256` of the bytes of the engine's own parameters.

    Arguments:
        loads: results of `observe_loader`, with an example of the checkpoint's shapes.
        checkpoint: a path, a URL, a result of `unickpt.open`, or a tree of arrays.

    Returns:
        By rank and name of the parameter.

    Raises:
        RuleError: a parameter depends on values, or the checkpoint has other names or shapes than
            the example.
    """
    side = Side.of(checkpoint, "the checkpoint")
    return {load.rank: dict(_digests(load, side)) for load in loads}


def _digests(load: RankLoad, side: Side) -> Iterator[tuple[str, str]]:
    seen = load.seen
    for name, why in seen.refused.items():
        raise RuleError(f"rank {load.rank}: {name!r} {why}")
    for expected in seen.inputs:
        fact = side.facts.get(expected.name)
        if fact is None or fact.shape != expected.shape:
            actual = "missing" if fact is None else f"of shape {list(fact.shape)}"
            raise RuleError(
                f"{expected.name!r} is {actual} in {side.where}, and of shape "
                f"{list(expected.shape)} in the example with which the loader was observed"
            )
    for traced in seen.traced:
        dtype = seen.made[traced.name].dtype
        out = traced.offset.astype(dtype)
        for source in traced.sources:
            mine = traced.source == source
            x = side.whole(seen.inputs[source].name).reshape(-1)[traced.index[mine]]
            scale, offset = traced.scale[mine], traced.offset[mine]
            if (scale != 1).any() or (offset != 0).any():
                x = x.astype(np.float32) * scale.astype(np.float32) + offset.astype(np.float32)
            out[mine] = x.astype(dtype)
        yield traced.name, hashlib.sha256(out.tobytes()).hexdigest()
