"""MaxText's own train loop, with our handler in Orbax's manager."""

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
maxtext.install()
create, save = train_utils.create_checkpoint_manager, checkpointing.maybe_save_checkpoint


def creates(*arguments):
    manager = create(*arguments)
    latest = checkpointing.latest_step(manager)
    target.resumed(0 if latest is None else latest + 1)
    if latest == target.STEPS - 1:  # MaxText refuses to begin a run that has ended
        end()
    return manager


def saves(manager, *arguments):
    save(manager, *arguments)
    checkpointing.wait_until_finished(manager)
    for step in checkpointing.all_steps(manager):
        target.committed(step + 1)  # step 0 is saved after one


def end():
    state = unickpt.load(f"{target.FOLDER}/run/checkpoints/{target.STEPS - 1}/items")
    leaves, _ = jax.tree.flatten_with_path(state)
    target.ended({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    target.leave()


train_utils.create_checkpoint_manager, checkpointing.maybe_save_checkpoint = creates, saves
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
