"""The demo's JAX job: `train` from the beginning and save, or `resume` from a checkpoint.

It runs in as many processes as WORLD_SIZE says, with four CPU devices in each.
"""

import argparse
import os
import time
from collections.abc import Iterable
from typing import Any

import jax
import lm
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from job import fingerprint, rank, report

import unickpt

FIRST_STEPS, LATER_STEPS = range(16), range(16, 24)
FIRST_MESH, LATER_MESH = (2, 4), (4, 2)


def train(arguments: argparse.Namespace) -> None:
    """Trains on one mesh, saves, and goes on in memory on the other mesh as if nothing was."""
    corpus = lm.read_corpus()
    mesh = make_mesh(FIRST_MESH)
    state = jax.jit(lm.initialize, out_shardings=lm.shardings(mesh))()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["model"]))
    report("start", parameters=parameters, corpus=len(corpus), mesh=dict(mesh.shape))
    state = run_steps(mesh, state, corpus, FIRST_STEPS)

    saved = unickpt.save(arguments.save, {"step": FIRST_STEPS.stop, **state})
    report("saved", arrays=saved.arrays, bytes=saved.bytes, seconds=saved.seconds)
    report("fingerprints", of=fingerprints(state))

    mesh = make_mesh(LATER_MESH)
    reshard = jax.jit(lambda state: state, out_shardings=lm.shardings(mesh), donate_argnums=0)
    report("resharded", mesh=dict(mesh.shape))
    run_steps(mesh, jax.block_until_ready(reshard(state)), corpus, LATER_STEPS)


def resume(arguments: argparse.Namespace) -> None:
    """Loads a checkpoint onto the other mesh, whoever wrote it, and trains on."""
    mesh = make_mesh(LATER_MESH)
    report("start", mesh=dict(mesh.shape))
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lm.initialize),
        lm.shardings(mesh),
    )
    multihost_utils.sync_global_devices("before load")
    started = time.perf_counter()
    state = unickpt.load(arguments.load, like={"step": 0, **like})
    step = state.pop("step")
    multihost_utils.sync_global_devices("after load")
    seconds = time.perf_counter() - started
    report("loaded", step=step, bytes=nbytes(state), seconds=seconds)
    report("fingerprints", of=fingerprints(state))
    run_steps(mesh, state, lm.read_corpus(), range(step, LATER_STEPS.stop))


def make_mesh(shape: tuple[int, int]) -> Mesh:
    """A mesh over all devices of all processes; its axis types let XLA place the collectives."""
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def run_steps(mesh: Mesh, state: Any, corpus: np.ndarray, steps: Iterable[int]) -> Any:
    """Trains and reports every loss."""
    train_step = lm.make_train_step(mesh)
    with jax.set_mesh(mesh):
        for step in steps:
            started = time.perf_counter()
            state, loss = train_step(state, lm.batch(corpus, step, mesh))
            value = float(loss)
            report("loss", step=step, loss=value, seconds=time.perf_counter() - started)
    return state


def nbytes(state: Any) -> int:
    """Logical bytes of a tree of arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def fingerprints(state: Any) -> dict[str, str]:
    """A fingerprint of every global array by name; gathers the state in every process."""
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    gather = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, PartitionSpec()))
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gather(state)):
        host = np.ascontiguousarray(leaf).reshape(leaf.shape)
        data = host.reshape(-1).view(np.uint8).data
        found[lm.leaf_name(path)] = fingerprint(host.dtype.name, host.shape, data)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("train", "resume"))
    parser.add_argument("--save", help="where `train` saves")
    parser.add_argument("--load", help="what `resume` loads")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        num_processes=int(os.environ["WORLD_SIZE"]),
        process_id=rank(),
    )
    {"train": train, "resume": resume}[arguments.role](arguments)


if __name__ == "__main__":
    main()
