"""MaxText's own train loop, with its manager over unickpt."""

import logging
import os

import jax
import target
from maxtext.common import checkpointing
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils
from support import maxtext_job

import unickpt
from unickpt.integrations import maxtext

logging.disable(logging.WARNING)
metrics = lambda report: target.committed(report, 1)  # noqa: E731  # step 0 is saved after one
maxtext.install({"options": unickpt.SaveOptions(metrics=metrics)})
create = train_utils.create_checkpoint_manager


def creates(*arguments):
    manager = create(*arguments)
    latest = checkpointing.latest_step(manager)
    target.resumed(0 if latest is None else latest + 1)
    if latest == target.STEPS - 1:  # MaxText refuses to begin a run that has ended
        end()
    return manager


def end():
    state = unickpt.load(f"{target.FOLDER}/run/checkpoints/step_{target.STEPS - 1}")["items"]
    leaves, _ = jax.tree.flatten_with_path(state)
    target.ended({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    target.leave()


train_utils.create_checkpoint_manager = creates
settings = {
    **maxtext_job.SETTINGS,
    "base_output_directory": target.FOLDER,
    "steps": target.STEPS,
    "checkpoint_period": 1,
    "max_num_checkpoints_to_keep": target.KEPT,
    "jax_cache_dir": os.environ["CHAOS_COMPILED"],
}
train.main(["train", *(f"{name}={value}" for name, value in settings.items())])
end()
