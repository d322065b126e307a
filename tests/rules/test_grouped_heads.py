"""Fused kernels of grouped heads, as docs/rules.md has them, against NumPy, in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support import TESTS

import unickpt

PAGE = Path(TESTS).parent.joinpath("docs", "rules.md").read_text()
(GROUPED,) = re.findall(r"^attn/qkv/kernel .*$", PAGE, re.M)
ROWS = "attn/qkv/kernel [e (q + k + v)] <-> q_proj.weight [q e], k_proj.weight [k e], "
ROWS += "v_proj.weight [v e]  q=24 k=6 v=6"


@pytest.mark.parametrize("text", [GROUPED, ROWS])
def test_a_fused_kernel_is_taken_apart_and_put_together(text: str, tmp_path: Path) -> None:
    kernel = np.random.default_rng(0).normal(size=(5, 36)).astype(np.float32)
    if text == GROUPED:
        groups = kernel.reshape(5, 2, 6, 3)
        parts = groups[:, :, :4], groups[:, :, 4:5], groups[:, :, 5:]
    else:
        parts = kernel[:, :24], kernel[:, 24:30], kernel[:, 30:]
    names = [f"{name}_proj.weight" for name in "qkv"]
    weights = {n: p.reshape(5, -1).T for n, p in zip(names, parts, strict=True)}
    rules = unickpt.Rules.parse(text)
    unickpt.save(tmp_path / "fused", {"attn": {"qkv": {"kernel": kernel}}})
    found = unickpt.load(tmp_path / "fused", rules=rules)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(found[name], weight)
    unickpt.save(tmp_path / "apart", weights)
    back = unickpt.load(tmp_path / "apart", rules=rules.inverse)
    assert np.array_equal(back["attn"]["qkv"]["kernel"], kernel)
