"""Moments are told from parameters by names and shapes."""

from __future__ import annotations

import pytest

from unickpt.trees.moments import moments_among

PARAMETERS = {"params/up/kernel": (3, 5), "params/up/bias": (5,)}


@pytest.mark.parametrize(
    "name",
    [
        "opt_state/1/0/mu/up/kernel",
        "opt_state/nu/up/kernel",
        "opt/inner/trace/params/up/kernel",
        "optim/state/0/exp_avg",
        "optim/state/up.weight/momentum_buffer",
    ],
)
def test_moments(name: str) -> None:
    others = {name.replace("/nu/", "/mu/"): (3, 5), "opt_state/1/0/count": ()}
    assert moments_among([name], {**PARAMETERS, **others, name: (3, 5)}) == [name]


@pytest.mark.parametrize(
    "names",
    [
        {"params/mu/kernel": (3, 5), "params/logvar/kernel": (3, 5)},
        {"params/mu/kernel": (4, 4)},
        {"opt_state/0/mu/up/kernel": (2, 2)},
        {"model/enc.mu.weight": (3, 5), "model/dec.mu.weight": (3, 5)},
        {"params/attention/v/kernel": (3, 5), "params/attention/q/kernel": (3, 5)},
    ],
)
def test_parameters_are_none(names: dict[str, tuple[int, ...]]) -> None:
    assert moments_among(names, {**PARAMETERS, **names}) == []
