"""SGLang loads any checkpoint that unickpt reads, by its plugin interface.

SGLang calls `register` at its start, in every process: it is a plugin of the group
`sglang.srt.plugins`. docs/integrations/vllm.md shows the setting.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["NAME", "register"]

NAME = "unickpt"
"""The key of `model_loader_extra_config` that has the settings."""
_HOOKED = "sglang.srt.model_loader.loader.get_model_loader"


def register() -> None:
    """Has SGLang take the loader of unickpt where `model_loader_extra_config` asks for it."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_HOOKED, _choose_loader, hooks.HookType.AROUND)


def _choose_loader(
    choose: Callable[..., Any], load_config: Any, model_config: Any = None, **arguments: Any
) -> Any:
    """SGLang's choice, unless the settings are unickpt's."""
    extra = load_config.model_loader_extra_config
    if isinstance(extra, dict) and NAME in extra:
        loader = importlib.import_module("unickpt.integrations.sglang.loader")
        return loader.SGLangLoader(load_config)
    return choose(load_config, model_config, **arguments)
