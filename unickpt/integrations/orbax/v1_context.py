"""What of Orbax's `Context` of version 1 counts here.

What tunes Orbax's files is of no effect; what would change the result is honoured or refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from unickpt.reading.options import LoadOptions
from unickpt.saving.options import SaveOptions

# Each with the value that is not refused.
_Refused = tuple[tuple[str, Any, str], ...]
_SAVING: _Refused = (
    ("checkpoint_layout", ("orbax", "auto", None), "unickpt export writes other formats"),
    ("multiprocessing.primary_host", (0,), "process 0 is the coordinator"),
    (
        "multiprocessing.active_processes",
        (None,),
        "give training.Checkpointer unickpt={'options': unickpt.SaveOptions(group=...)}",
    ),
    ("file.path_permission_mode", (None,), "set the umask"),
    (
        "memory.serialization_status_callback",
        (None,),
        "give training.Checkpointer unickpt={'options': unickpt.SaveOptions(progress=...)}",
    ),
)
_LOADING: _Refused = (
    (
        "array.loading.enable_padding_and_truncation",
        (False, None),
        "arrays are not padded or cut; ask for the stored shape",
    ),
)
_DELETING: _Refused = (
    (
        "deletion.gcs_deletion_options.todelete_full_path",
        (None,),
        "checkpoints are removed, not moved",
    ),
)
_LONG = {"asynchronous": "async_options"}  # as older versions of Orbax call it


def active() -> Any:
    """Orbax's Context of the `with` block that this is called in; None without."""
    cls = _context_class()
    module = sys.modules.get(getattr(cls, "__module__", ""))
    get = getattr(module, "get_context", None)
    if cls is None or get is None:
        return None
    nothing = cls()
    found = get(nothing)
    return None if found is nothing else found


def _context_class() -> Any:
    """Orbax's `Context`, if the program has imported Orbax."""
    orbax = sys.modules.get("orbax.checkpoint")
    return getattr(getattr(orbax, "v1", None), "Context", None)


def check(context: Any) -> None:
    """Raises a TypeError if something given as `context=` is none."""
    if context is not None and not hasattr(context, "checkpoint_layout"):
        raise TypeError(f"context={context!r} must be a Context of Orbax's version 1")


@dataclass(frozen=True)
class Settings:
    """What a Context says, or nothing.

    Arguments:
        context: Orbax's; None for what counts without one.
    """

    context: Any = None

    @classmethod
    def current(cls, otherwise: Any = None) -> Settings:
        """Those of the `with` block that this is called in, else of another Context."""
        found = active()
        return cls(otherwise if found is None else found)

    def get(self, path: str) -> Any:
        """The value of an option; None if this version of Orbax has none of that name."""
        first, *rest = path.split(".")
        found = getattr(self.context, first, None)
        if found is None:
            found = getattr(self.context, _LONG.get(first, f"{first}_options"), None)
        for name in rest:
            found = getattr(found, name, None)
        return found

    @property
    def partial_load(self) -> bool:
        """Whether what the abstract tree lacks is left out."""
        return bool(self.get("pytree.loading.partial_load"))

    @property
    def registry(self) -> Any:
        """The handlers of checkpointables; those that are registered globally by default."""
        found = self.get("checkpointables.registry")
        if found is None and _context_class() is not None:
            found = sys.modules["orbax.checkpoint"].v1.handlers.global_registry()
        return found

    # --- saving ----------------------------------------------------------------------------------

    def save_options(self, options: SaveOptions | None = None) -> SaveOptions:
        """How to save.

        Raises:
            ValueError: something cannot be honoured; names the option.
        """
        self._refuse(_SAVING)
        found = SaveOptions.or_default(options)
        if self.context is None:
            return found
        timeout = self.get("asynchronous.timeout_secs")
        budget = self.get("memory.write_concurrent_bytes")
        chunk = self.get("array.saving.storage_options.chunk_byte_size")
        return replace(
            found,
            timeout_s=found.timeout_s if timeout is None else float(timeout),
            budget_bytes=found.budget_bytes if budget is None else budget,
            chunk_bytes=found.chunk_bytes if chunk is None else chunk,
        )

    @property
    def on_commit(self) -> Callable[[], None] | None:
        """Is called after the commit."""
        found: Callable[[], None] | None = self.get("asynchronous.post_finalization_callback")
        return found

    def cast(self, tree: Any) -> Any:
        """A tree to save, with its arrays in the dtypes of `StorageOptions`."""
        dtype = self.get("array.saving.storage_options.dtype")
        scoped = self.get("array.saving.scoped_storage_options_creator")
        if dtype is None and scoped is None:
            return tree

        def leaf(path: Any, value: Any) -> Any:
            own = None if scoped is None else getattr(scoped(path, value), "dtype", None)
            wanted = dtype if own is None else own
            if wanted is None or not _is_castable(value):
                return value
            return value.astype(wanted)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    # --- loading, deleting -----------------------------------------------------------------------

    def load_options(self) -> LoadOptions:
        """How to load.

        Raises:
            ValueError: something cannot be honoured; names the option.
        """
        self._refuse(_LOADING)
        budget = self.get("memory.read_concurrent_bytes")
        # One reads, and sends the others their parts; here each chunk, not each replica.
        together = True if self.get("array.loading.use_load_and_broadcast") else None
        return LoadOptions(budget_bytes=budget, exchange=together)

    def check_deletion(self) -> None:
        """Raises a ValueError if something cannot be honoured; names the option."""
        self._refuse(_DELETING)

    def _refuse(self, options: _Refused) -> None:
        if self.context is None:
            return
        for path, taken, advice in options:
            value = self.get(path)
            if getattr(value, "value", value) not in taken:
                raise ValueError(f"Context: {path}={value!r} is not supported: {advice}")


def _is_castable(value: Any) -> bool:
    """Whether a leaf is an array of numbers; JAX's random keys are not."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "astype"):
        return False
    return not jax.numpy.issubdtype(dtype, jax.dtypes.extended)
