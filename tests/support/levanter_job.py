"""A job of levanter: its own trainer, with a small model of haliax, on CPUs.

    levanter_job.py WAY FOLDER STEPS DIE SHARDED

WAY is "ours" or "theirs". After step DIE the process kills itself, right after it has begun to
save; -1 for never. SHARDED is 1 if the parameters are distributed over the devices. Prints a line
`loss STEP HEX` for each step, at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.distributed import DistributedConfig, RayConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

Batch, In, Hidden = hax.Axis("batch", 8), hax.Axis("in", 4), hax.Axis("embed", 16)


class Model(eqx.Module):
    first: hax.nn.Linear
    layers: list[hax.nn.Linear]
    scale: jax.Array
    norm: hax.nn.LayerNorm

    @staticmethod
    def init(key: Any) -> Model:
        a, b, c = jax.random.split(key, 3)
        hidden = Hidden.alias("embed2")
        return Model(
            hax.nn.Linear.init(In, Hidden, key=a),
            [
                hax.nn.Linear.init(Hidden, hidden, key=b),
                hax.nn.Linear.init(hidden, Hidden, key=c),
            ],
            jax.numpy.ones(3),
            hax.nn.LayerNorm.init(Hidden),
        )

    def __call__(self, x: Any) -> Any:
        x = hax.nn.relu(self.first(x))
        for layer in self.layers:
            x = hax.nn.relu(layer(x))
        return self.norm(x) * self.scale[0]


def loss_fn(model: Any, x: Any, *, key: Any = None) -> Any:
    return hax.mean(model(x) ** 2 - model(x)).scalar()


def batches(step: int) -> Any:
    while True:
        values = np.random.default_rng(step).normal(size=(Batch.size, In.size))
        yield hax.named(jax.numpy.asarray(values, dtype="float32"), (Batch, In))
        step += 1


def main(way: str, folder: str, steps: str, die: str, sharded: str) -> None:
    logging.disable(logging.WARNING)
    if way == "ours":
        from unickpt.integrations import levanter

        levanter.install()
    config = TrainerConfig(
        id="run",
        log_dir=Path(folder, "logs"),  # else in the working directory
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        num_train_steps=int(steps),
        train_batch_size=Batch.size,
        checkpointer=CheckpointerConfig(
            base_path=folder, save_interval=timedelta(hours=1), keep=[{"every": 2}]
        ),
        axis_resources={"batch": ("replica", "data")},
        parameter_axis_resources={"embed": "data"} if int(sharded) else {},
        require_accelerator=False,
        distributed=DistributedConfig(initialize_jax_distributed=False),
        ray=RayConfig(auto_start_cluster=False),
    )

    def dying(info: Any) -> None:
        print("loss", info.step, float(info.loss).hex(), flush=True)
        if info.step == int(die):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(config, optax.adam(0.01), loss_fn)
    trainer.add_hook(dying)
    with trainer:
        key = jax.random.PRNGKey(0)
        state = trainer.initial_state(key, model_init=lambda: Model.init(jax.random.PRNGKey(1)))
        trainer.train(state, batches(int(state.step)))


if __name__ == "__main__":
    main(*sys.argv[1:])
