"""Publishers and followers that are killed, over a network that loses, delays and damages files."""

from __future__ import annotations

import pytest
from weights_soak import soak

pytestmark = [pytest.mark.plugins, pytest.mark.integration]


def test_what_followers_have_is_always_a_version() -> None:
    tally = soak(16, seed=0, every_s=0.5)
    assert tally.published >= 16
    assert tally.counts["live"] > 4
    assert tally.counts["end"] == 4
