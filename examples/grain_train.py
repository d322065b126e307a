"""python examples/grain_train.py runs/grain 40, in 1, 2 or 4 processes of jax.distributed."""

import sys

import grain
import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

import unickpt

SHARDS, rank, world = 4, jax.process_index(), jax.process_count()
records = grain.MapDataset.range(64000).seed(1).shuffle()
shards = [iter(records[n::SHARDS].to_iter_dataset().batch(8)) for n in range(SHARDS)]


def gradient(w, numbers):  # of half the mean square
    x = jax.numpy.sin(numbers[:, None] * jax.numpy.arange(1, 9))
    return x.T @ (x @ w - 1) / 8


def deal(saved, index, count):  # the shards, to this number of processes
    return sorted(pair for pairs in saved for pair in pairs)[index::count]


state = {"step": 0, "w": np.zeros(8, np.float32)}
mine = deal([[[n, shard.get_state()] for n, shard in enumerate(shards)]], rank, world)
with unickpt.Checkpointer(sys.argv[1], keep_last=2) as run:
    if run.latest() is not None:
        state = run.load(state | {"data": unickpt.PerProcess(redistribute=deal)})
        mine = state["data"].value
    for n, position in mine:
        shards[n].set_state(position)
    for step in range(state["step"] + 1, int(sys.argv[2]) + 1):
        slopes = np.stack([gradient(state["w"], next(shards[n])) for n, _ in mine])
        mean = process_allgather(slopes).reshape(world, -1, 8).swapaxes(0, 1).reshape(-1, 8).mean(0)
        mine = [[n, shards[n].get_state()] for n, _ in mine]
        state = {"step": step, "w": state["w"] - 0.1 * mean, "data": unickpt.PerProcess(mine)}
        run.save(step, state)
        print(f"iteration {step} loss {float(np.abs(mean).sum()).hex()}", flush=True)
