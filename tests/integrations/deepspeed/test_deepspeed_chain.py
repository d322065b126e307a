"""A run that begins in DeepSpeed and goes on in FSDP2, in JAX, and in DeepSpeed again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import TESTS
from support.deepspeed_chain import TAG, TO_DEEPSPEED
from support.processes import Processes

import unickpt
from unickpt import SaveOptions

pytestmark = pytest.mark.integration
pytest.importorskip("deepspeed")
pytest.importorskip("jax")

SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
del sys.argv[1]
runpy.run_module("support.deepspeed_chain", run_name="__main__")
"""
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def losses(outputs: list[str]) -> list[float]:
    (line,) = (x for out in outputs for x in out.splitlines() if x.startswith("losses "))
    found: list[float] = json.loads(line.removeprefix("losses "))
    return found


def test_zero_3_to_fsdp2_to_jax_to_zero_2(processes: Processes, tmp_path: Path) -> None:
    def ranks(count: int, role: str, of: Path, to: Path) -> list[float]:
        started = processes.torch(count, SCRIPT, Path(TESTS), role, of, to)
        return losses(processes.finish(started))

    a, b, c = (tmp_path / name for name in "abc")
    expected = ranks(4, "uninterrupted", a, a)
    found = ranks(4, "zero3", a, a)
    found += ranks(2, "fsdp2", a, b)
    jax = processes.start(SCRIPT, Path(TESTS), "in_jax", b, c, env=EIGHT_DEVICES)
    found += losses(processes.finish([jax]))
    assert found == pytest.approx(expected[:6], rel=1e-5)
    assert ranks(2, "zero2", c, c) == pytest.approx(expected[6:], rel=1e-5)

    # DeepSpeed alone also goes on, from a folder in its own universal format.
    unickpt.convert(
        c / TAG, tmp_path / "d", to="universal", rules=TO_DEEPSPEED,
        options=SaveOptions(fsync=False),
    )  # fmt: skip
    assert ranks(2, "universal", tmp_path / "d", a) == pytest.approx(expected[6:], rel=1e-5)
