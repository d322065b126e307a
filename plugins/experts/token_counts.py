"""Token counts of experts, the argument of a save."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import SaveCall
from unickpt.plugins.experts.keys import ExpertKeys

TokensSeen = Mapping[str, Mapping[int, float] | Sequence[float]]
"""How many tokens the experts of each layer have seen: by their numbers, or of all in order."""
_TOKENS = "tokens/"


def tokens_among(
    metrics: Mapping[str, float], tokens: TokensSeen | None
) -> tuple[dict[str, float], TokensSeen | None]:
    """Parts token counts from metrics that are named "tokens/<layer>/<number of an expert>".

    Arguments:
        metrics: as for `Checkpointer.save`.
        tokens: likewise; wins over a metric.

    Raises:
        UnsupportedLeaf: such a name has no number, or `tokens` is no mapping.

    Example:
        >>> tokens_among({"loss": 1.5, "tokens/moe/0": 10}, None)
        ({'loss': 1.5}, {'moe': {0: 10}})
    """
    if tokens is not None and not isinstance(tokens, Mapping):
        raise UnsupportedLeaf(f"tokens must be a dict, not of type {type(tokens).__name__}")
    other_metrics, tokens_by_layer = {}, dict[str, dict[int, float]]()
    for name, value in metrics.items():
        if not str(name).startswith(_TOKENS):
            other_metrics[name] = value
            continue
        layer, _, number = name.removeprefix(_TOKENS).rpartition("/")
        if not number.isdecimal() or not number.isascii() or len(number) > 9:
            raise UnsupportedLeaf(f"metrics: {name!r} must be tokens/<layer>/<number of an expert>")
        tokens_by_layer.setdefault(layer, {})[int(number)] = value
    return other_metrics, {**tokens_by_layer, **(tokens or {})} or tokens


def taken_from(
    call: SaveCall, keys: ExpertKeys
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """The token counts of a call to save, which are taken out of it; none but on process 0.

    Returns:
        By layer, the counts by the experts' numbers, and the key of the experts.

    Raises:
        UnsupportedLeaf: they are not valid.
    """
    tokens = call.keywords.pop("tokens", None)
    call.metrics, tokens = tokens_among(call.metrics or {}, tokens)
    counts_by_layer = (tokens if call.is_coordinator else None) or {}
    layers = {layer: key_of(layer, keys) for layer in counts_by_layer}
    return {layer: counts_of(layer, counts) for layer, counts in counts_by_layer.items()}, layers


def key_of(layer: str, keys: ExpertKeys) -> str:
    """The key of the experts of a layer."""
    try:
        key = keys.key_of_layer(layer)
    except ValueError as error:
        raise UnsupportedLeaf(f"tokens: {layer!r}: {error}") from None
    if key is None:
        key_names = ", ".join(repr(key.text) for key in keys)
        raise UnsupportedLeaf(
            f"tokens: {layer!r} is neither a key of `experts` ({key_names}), nor the part of "
            "array names before an expert's number, nor an array of experts"
        )
    return key


def counts_of(layer: str, counts: Mapping[int, float] | Sequence[float]) -> dict[int, float]:
    """The token counts of a layer by the numbers of its experts."""
    seen: dict[int, float] = {}
    for number, count in counts.items() if isinstance(counts, Mapping) else enumerate(counts):
        where = f"tokens[{layer!r}][{number!r}]"
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number < 10**9:
            raise UnsupportedLeaf(f"{where}: {number!r} is not the number of an expert")
        try:
            amount = float(count)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedLeaf(f"{where} must be a number: {error}") from error
        if not 0 <= amount < math.inf:
            raise UnsupportedLeaf(f"{where} is {amount}, but counts tokens")
        seen[int(number)] = amount
    return seen
