"""unickpt inside Orbax's own managers: handlers that store trees in unickpt's format.

    import orbax.checkpoint as ocp
    from unickpt.integrations.orbax import registry
    manager = ocp.CheckpointManager(path, handler_registry=registry())

`v1_registry` is for a `Context` of `orbax.checkpoint.v1`. docs/integrations/orbax.md lists the
differences.
"""

from typing import TYPE_CHECKING, Any

from unickpt.integrations.orbax.handler import Handler, registry

if TYPE_CHECKING:
    from unickpt.integrations.orbax.v1_handler import TreeHandler, v1_registry

__all__ = ["Handler", "TreeHandler", "registry", "v1_registry"]


def __getattr__(name: str) -> Any:
    if name in ("TreeHandler", "v1_registry"):  # which need a later Orbax
        from unickpt.integrations.orbax import v1_handler

        return getattr(v1_handler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
