"""The registry of formats into which checkpoints are exported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from unickpt.format.writer import Writer
from unickpt.quoting import quoted

# Classes in modules of `unickpt.backends`.
_BUILT_IN = {
    "hf": ("safetensors.writer", "HuggingFaceWriter"),
    "safetensors": ("safetensors.writer", "SafetensorsWriter"),
    "dcp": ("dcp.writer", "DcpWriter"),
    "orbax": ("orbax.writer", "OrbaxWriter"),
    "keras": ("orbax.keras_writer", "KerasWriter"),
    "torch": ("torch_writer", "TorchWriter"),
    "lightning": ("lightning_writer", "LightningWriter"),
    "npz": ("npz_writer", "NpzWriter"),
    "universal": ("deepspeed.writer", "UniversalWriter"),
    "trainer": ("trainer_writer", "TrainerWriter"),
    "accelerate": ("accelerate_writer", "AccelerateWriter"),
}


_registered: dict[str, Callable[..., Writer]] = {}


def register(name: str, make: Callable[..., Writer]) -> None:
    """Adds a format into which checkpoints are exported.

    Arguments:
        name: of the format, for `convert(to=)`.
        make: makes its writer; the options of the format are its arguments.

    Raises:
        ValueError: a format has the name already.
    """
    if name in names():
        raise ValueError(f"a format is called {quoted(name)} already")
    _registered[name] = make


def unregister(name: str) -> None:
    """Removes a format that was registered."""
    del _registered[name]


def names() -> list[str]:
    """The names of all formats."""
    return [*_BUILT_IN, *_registered]


def _maker(format: str) -> Callable[..., Writer]:
    if format in _registered:
        return _registered[format]
    module, name = _BUILT_IN[format]
    found = getattr(importlib.import_module(f"unickpt.backends.{module}"), name)
    return cast(Callable[..., Writer], found)


def make(format: str, options: Mapping[str, Any]) -> Writer:
    """The writer of a format.

    Arguments:
        format: its name.
        options: of this format.

    Raises:
        ValueError: there is no such format, or an option has a value that it cannot have.
        TypeError: the format has no such option, or needs one that is missing.

    Example:
        >>> make("hf", {"max_shard_size": "1GB"}).suffixes
        ()
    """
    if format not in names():
        raise ValueError(f"no format is called {quoted(format)}; there are {', '.join(names())}")
    make = _maker(format)
    known = list(inspect.signature(make).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes none"
        raise TypeError(f"the format {format!r} has no option {quoted(unknown[0])}; it {takes}")
    parameters = inspect.signature(make).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise TypeError(f"the format {format!r} needs the option {missing[0]!r}")
    return make(**options)
