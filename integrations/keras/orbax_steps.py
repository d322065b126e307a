"""The steps of a run of `keras.callbacks.OrbaxCheckpoint`, which a `fit` can resume from."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, NamedTuple

import unickpt
from unickpt import Rules
from unickpt.errors import CheckpointNotFound
from unickpt.extend import PathLike, other_folders, resolve_path

_ITEM = "pytree"  # with `Model.get_state_tree`
_RULES = """
optional pytree/non_trainable_variables/{path...}/seed_generator_state [n] <->
    model/{path...}/seed_generator_state [n] as uint32
default pytree/non_trainable_variables/{path...} <-> model/{path...}
default pytree/trainable_variables/{path...} <-> model/{path...}
default pytree/optimizer_variables/{path...} <-> optimizer/{path...}
default pytree/metrics_variables/{path...} <-> metrics/{path...}
default model_config/{path...} <-> drop
"""


class OrbaxStep(NamedTuple):
    """A step.

    Arguments:
        number: as its folder is called: the epoch, or how many batches were done.
        path: of the checkpoint.
        is_item: whether it is the item with the state alone, which our handler saved.
    """

    number: int
    path: str
    is_item: bool

    @property
    def rules(self) -> Rules:
        """From the names in the step to those of `KerasState`."""
        return Rules.parse(_RULES.replace(f"{_ITEM}/", "") if self.is_item else _RULES)

    def position(self, save_freq: Literal["epoch"] | int, batches: int) -> tuple[int, int]:
        """The epoch to resume with, and how many of its batches are done.

        Arguments:
            save_freq: as the callback had it that saved this step.
            batches: of an epoch; -1 if unknown.

        Raises:
            ValueError: the step counts batches, and it is not known how many an epoch has.
        """
        if save_freq == "epoch":
            return self.number + 1, 0
        if batches < 1:
            raise ValueError(
                f"{self.path}: the epoch after {self.number} batches is not known, because the "
                "data do not say how many batches they have; pass steps_per_epoch= to fit"
            )
        return divmod(self.number, batches)


def newest(directory: PathLike) -> OrbaxStep | None:
    """The newest step that Orbax has committed in a directory; None if there is none.

    Raises:
        StorageError: the storage failed.
    """
    if not resolve_path(directory).exists():
        return None
    numbered = [folder for folder in other_folders(directory) if folder.name.isdecimal()]
    for folder in sorted(numbered, key=lambda folder: int(folder.name), reverse=True):
        for path, kind in ((folder.path, "orbax"), (f"{folder.path}/{_ITEM}", "unickpt")):
            with suppress(CheckpointNotFound):  # it was not committed, or has the other kind
                if unickpt.open(path).reader.format == kind:
                    return OrbaxStep(int(folder.name), path, kind == "unickpt")
    return None
