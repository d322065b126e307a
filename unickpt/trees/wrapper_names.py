"""Names with the components that wrappers add; canonical names have none.

Modules are saved under canonical names. Older checkpoints, and plain dicts of a wrapped torch
module's `state_dict()`, have the wrappers' components in their names. So have the variables of
Flax' NNX that Orbax saved: each array is the `value` of one.
"""

from __future__ import annotations

from collections.abc import Iterable

# Added by DistributedDataParallel, torch.compile, activation checkpointing and FSDP1.
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_VARIABLE = "/value"  # of an `nnx.Variable`


def bare(name: str) -> str:
    """A name without wrapper components; equal for names that may stand for the same leaf.

    Example:
        >>> bare("optim/state/module.layers.0.weight/exp_avg")
        'optim/state/layers.0.weight/exp_avg'
        >>> bare("params/linear/kernel/value")
        'params/linear/kernel'
    """
    return "/".join(map(_bare_part, name.removesuffix(_VARIABLE).split("/")))


def _bare_part(part: str) -> str:
    *path, last = part.split(".")
    return ".".join([*(p for p in path if p not in WRAPPERS), last])


def without_wrappers(requested: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """The stored names that are requested without their wrapper components.

    Arguments:
        requested: names that are not stored under exactly this name.
        stored: stored names that are not requested under exactly this name.

    Returns:
        The stored name by requested name, for pairs that match each other uniquely.

    Example:
        >>> without_wrappers(["enc.module.w", "b"], ["module.enc.module.w"])
        {'enc.module.w': 'module.enc.module.w'}
    """
    wrapped = _by_bare_name(name for name in stored if bare(name) != name)
    sources: dict[str, list[str]] = {}
    meant: dict[str, list[str]] = {}
    for name in requested if wrapped else ():
        sources[name] = [s for s in wrapped.get(bare(name), ()) if _leaves_out(name, s)]
        for source in sources[name]:
            meant.setdefault(source, []).append(name)
    pairs = ((name, matches[0]) for name, matches in sources.items() if len(matches) == 1)
    return {name: source for name, source in pairs if len(meant[source]) == 1}


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    names_by_bare_name: dict[str, list[str]] = {}
    for name in names:
        names_by_bare_name.setdefault(bare(name), []).append(name)
    return names_by_bare_name


def _leaves_out(short: str, long: str) -> bool:
    """Whether `short` is `long` without some of its components."""
    components = iter(long.replace("/", ".").split("."))
    return all(part in components for part in short.replace("/", ".").split("."))
