"""Optimizers in a load: why one differs from its stored state, and which moments would be lost."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from unickpt.arrays.names import natural
from unickpt.errors import LoadMismatch
from unickpt.format.index import ArrayEntry
from unickpt.loading.report import Difference
from unickpt.quoting import first_few
from unickpt.trees.moments import moments_among

# A slot of torch's optimizers, under the number or the name of its parameter.
_SLOT = re.compile(
    r"((?:.*/)?)state/[^/]+/(?:step|exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|sum"
    r"|square_avg)"
)
_SETTING = re.compile(r"((?:.*/)?)param_groups/([^/]+)/([^/]+).*")
_PARAMETER = re.compile(r"((?:.*/)?)param_groups/[^/]+/params/[^/]+")
_SHOWN = 4  # names, in a message
_NOT_SETTINGS = ("params", "param_names")

_NOTHING_REQUESTED = (
    "the optimizer in `like` has nothing under {name!r}: a state_dict() is empty before the first "
    "step. Put the optimizer itself into `like`, whose state is then made; skipping it would lose "
    "the moments"
)
_NOTHING_STORED = (
    "nothing is stored under {name!r}, as before an optimizer's first step. Load it into an "
    "optimizer that has not stepped; keeping the state here would mix two runs"
)
_OTHER_OPTIMIZER = (
    "another optimizer was saved{where}: its groups have {stored}, and the groups in `like` have "
    "{requested}. To load everything else and let the optimizer in `like` start from scratch, pass "
    "skip={skip!r}"
)
_OTHER_PARAMETERS = (
    "the moments{where} belong to other parameters, such as {0.name!r}: stored {0.stored}, "
    "requested {0.requested}. The optimizer has its parameters in another order or in other groups "
    "than when it was saved: make them the same. unickpt.adapters.torch.NamedOptimizer stores the "
    "state by the names of the parameters, so their order does not matter"
)
_NEW_PARAMETERS = (
    "the optimizer{where} has {count} that {verb} not in its groups when it was saved: {names}. "
    'With missing="keep" the moments of these start from scratch'
)
_MOMENTS_UNUSED = (
    "{where}: the optimizer{under} would get no state, but arrays that look like its moments are "
    "stored and not used: {names}. Map them (with rules: check `under` of `include`, "
    "and pass NamedOptimizer(optimizer, model)). To let the optimizer start from scratch, pass "
    "skip={skip!r}"
)


def other_optimizers(rows: Iterable[Difference]) -> dict[str, str]:
    """The places, such as "optim/", where the saved optimizer is not the requested one, each with
    the likely cause as text."""
    settings: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        match = _SETTING.fullmatch(row.name)
        if match is not None and match[3] not in _NOT_SETTINGS:
            settings.setdefault(match[1], {}).setdefault(row.problem, {})[match[3]] = None
    return {
        prefix: _OTHER_OPTIMIZER.format(
            where=_where(prefix),
            stored=first_few([*keys["unexpected"]], _SHOWN),
            requested=first_few([*keys["missing"]], _SHOWN),
            skip=f"{prefix}**",
        )
        for prefix, keys in settings.items()
        if keys.keys() >= {"missing", "unexpected"}
    }


def likely_causes(rows: Sequence[Difference], requested: Collection[str]) -> list[str]:
    """Why the state of optimizers differs, as texts.

    Arguments:
        rows: the differences, without those of optimizers of another kind.
        requested: the names of all leaves of `like`.
    """
    slots: dict[str, list[Difference]] = {}
    for row in rows:
        match = _SLOT.fullmatch(row.name)
        if match is not None:
            slots.setdefault(match[1], []).append(row)
    causes = [_cause_of_slots(prefix, slots[prefix], rows, requested) for prefix in slots]
    return [*filter(None, causes), *_new_parameters(rows, requested)]


def _cause_of_slots(
    prefix: str, slots: Sequence[Difference], rows: Sequence[Difference], requested: Collection[str]
) -> str:
    problems, state = {row.problem for row in slots}, f"{prefix}state/"
    requested_slots = {name for name in requested if name.startswith(state)}
    if problems == {"unexpected"} and not requested_slots:
        return _NOTHING_REQUESTED.format(name=state)
    if problems == {"missing"} and requested_slots <= {row.name for row in rows}:
        return _NOTHING_STORED.format(name=state)
    misshapen = [row for row in slots if row.problem == "shape"]
    other_rows = (row for row in rows if row.problem == "shape" and not row.name.startswith(state))
    if misshapen and not any(other_rows):
        return _OTHER_PARAMETERS.format(misshapen[0], where=_where(prefix))
    return ""


def _new_parameters(rows: Sequence[Difference], requested: Collection[str]) -> list[str]:
    """The likely causes that parameters were added to an optimizer since it was saved."""
    added: dict[str, list[str]] = {}
    for row in rows:
        match = _PARAMETER.fullmatch(row.name)
        if match is not None and row.problem == "missing":
            name = row.requested.removeprefix("plain str ")
            added.setdefault(match[1], []).append(row.name if name == row.requested else name)
    return [
        _NEW_PARAMETERS.format(
            where=_where(prefix),
            count=f"{len(names)} parameter{'s' * (len(names) > 1)}",
            verb="were" if len(names) > 1 else "was",
            names=first_few(names, _SHOWN),
        )
        for prefix, names in added.items()
    ]


def check_moments(
    where: str,
    requested: Mapping[str, Any],
    loaded: Collection[str],
    unused: Collection[str],
    entries: Mapping[str, ArrayEntry],
) -> None:
    """Checks that no optimizer of torch stays without state while its moments are stored.

    Arguments:
        where: the checkpoint, for messages.
        requested: the leaves of `like`.
        loaded: the names of those that are loaded.
        unused: the names of stored leaves that no leaf uses, or that a rule drops.
        entries: all stored arrays by name.

    Raises:
        LoadMismatch: names the optimizer, the stored arrays, and what to do.
    """
    prefixes = {match[1] for match in map(_SETTING.fullmatch, requested) if match is not None}
    for prefix in sorted(prefixes):
        state = f"{prefix}state/"
        if any(name.startswith(state) for name in loaded) or _has_no_slots(prefix, requested):
            continue
        shapes = {name: entry.shape for name, entry in entries.items()}
        moments = sorted(moments_among(unused, shapes), key=natural)
        if moments:
            raise LoadMismatch(
                _MOMENTS_UNUSED.format(
                    where=where,
                    under=_where(prefix),
                    names=first_few([repr(name) for name in moments], _SHOWN),
                    skip=f"{prefix}**",
                )
            )


def _has_no_slots(prefix: str, requested: Mapping[str, Any]) -> bool:
    """Whether an optimizer never has state: SGD without momentum."""
    settings: dict[str, dict[str, Any]] = {}
    for name, value in requested.items():
        match = _SETTING.fullmatch(name)
        if match is not None and match[1] == prefix:
            settings.setdefault(match[2], {})[match[3]] = value
    return all("dampening" in group and not group.get("momentum", 1) for group in settings.values())


def _where(prefix: str) -> str:
    return f" under {prefix.rstrip('/')!r}" if prefix else ""
