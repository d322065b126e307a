"""torch jobs of several ranks; torch_ranks.py holds what the ranks do, and what must come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes

pytest.importorskip("torch")

SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
module, *sys.argv = sys.argv[2], sys.argv[0], *sys.argv[3:]
runpy.run_module(module, run_name="__main__")
"""


def check(
    processes: Processes, world: int, root: Path, module: str = "support.torch_ranks"
) -> None:
    """Starting ranks takes seconds, so all cases of a world run in one launch."""
    outputs = processes.finish(processes.torch(world, SCRIPT, Path(TESTS), module, root))
    outcomes = json.loads(outputs[0].splitlines()[-1])
    assert outcomes
    failed = {name: text for name, text in outcomes.items() if text != "ok"}
    assert not failed, "\n\n".join(f"{name}\n{text}" for name, text in failed.items())


def test_six_and_four_ranks(processes: Processes, tmp_path: Path) -> None:
    check(processes, 6, tmp_path)
    check(processes, 4, tmp_path)  # reads what six ranks wrote


def test_tensors_of_tensors_and_of_fsdp1(processes: Processes, tmp_path: Path) -> None:
    for world in (4, 2):  # two ranks read what four wrote
        check(processes, world, tmp_path, "support.sharded_ranks")
    pytest.importorskip("jax")
    jax = processes.forked(ON_FOUR_DEVICES, tmp_path, of=["jax"], env={"XLA_FLAGS": FOUR_DEVICES})
    processes.finish([jax])


FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
# What FSDP1 wrote on four ranks, bit for bit, on four devices of JAX.
ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, unickpt
from jax.sharding import NamedSharding, PartitionSpec as P

root = Path(sys.argv[1]) / "4"
mesh = jax.make_mesh((4,), ("x",))
for kind in ("flat", "orig"):
    truth = dict(np.load(root / f"{kind}.npz"))
    for tree in ("states", "objects"):
        path = root / f"fsdp1_is_saved_by_{kind}" / tree
        like = {
            name: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, P(*[None] * (x.ndim - 1), "x"))
                if x.ndim and x.shape[-1] % 4 == 0 else NamedSharding(mesh, P())
            )
            for name, x in truth.items()
        }
        rules = unickpt.Rules.parse(
            "\\n".join(f'"{name}" <-> "{n}"' for n, name in enumerate(truth))
        )
        like = {str(n): x for n, x in enumerate(like.values())}
        found = unickpt.load(path, like, rules=rules, unexpected="skip")
        for n, (name, x) in enumerate(truth.items()):
            assert np.asarray(found[str(n)]).tobytes() == x.tobytes(), (kind, tree, name)
"""


@pytest.mark.slow
def test_eight_ranks(processes: Processes, tmp_path: Path) -> None:
    check(processes, 8, tmp_path)
