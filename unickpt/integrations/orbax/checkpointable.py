"""A part of a step of Orbax's version 1 that unickpt writes and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from unickpt.loading import loader
from unickpt.reading.options import LoadOptions
from unickpt.saving import saver
from unickpt.saving.options import SaveOptions

FOLDER = "unickpt"
"""The folder within the checkpointable's own."""


class UnickptCheckpointable:
    """A tree that `orbax.checkpoint.v1` saves and loads through unickpt.

    Orbax decides when to save, names the step and commits it; the tree is a checkpoint of unickpt
    in the folder `<step>/<name>/unickpt`, which `unickpt.load` opens as well. Until Orbax has
    committed the step, it does not count.

    Arguments:
        state: the tree to save; or to load into, then the loaded one.
        save_options, load_options: as for `unickpt.save` and `unickpt.load`.

    Example, with Orbax's own Checkpointer:

        part = UnickptCheckpointable(state)
        checkpointer.save_checkpointables(step, {"state": part, "extra": other})
        like = UnickptCheckpointable(abstract_state)
        checkpointer.load_checkpointables(step, {"state": like})
        state = like.state
    """

    def __init__(
        self,
        state: Any,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        self.state = state
        self._save_options, self._load_options = save_options, load_options

    async def save(self, directory: Any) -> Awaitable[None]:
        """Copies the state, so that it may change; what is returned waits for the commit.

        Arguments:
            directory: Orbax's `PathAwaitingCreation`.
        """
        # Orbax may still be creating it, and not expect to find it.
        folder = await directory.await_creation()
        pending = saver.save_async(f"{folder}/{FOLDER}", self.state, options=self._save_options)

        async def committed() -> None:
            await asyncio.to_thread(pending.result)

        return committed()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Returns what loads the state."""

        async def loaded() -> None:
            self.state = await asyncio.to_thread(
                loader.load, f"{directory}/{FOLDER}", self.state, options=self._load_options
            )

        return loaded()
