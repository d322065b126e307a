"""The registry of formats into which checkpoints are exported."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from unickpt import doors
from unickpt.format.writer_protocol import Writer
from unickpt.quoting import quoted
from unickpt.storage import paths

OWN = "unickpt"
"""The name of unickpt's own format."""
# The format by the suffix of a destination, if it is not given otherwise.
_BY_SUFFIX = {
    ".safetensors": "safetensors", ".npz": "npz",
    ".pt": "torch", ".pth": "torch", ".bin": "torch", ".pth.tar": "torch",
}  # fmt: skip
# Suffixes of formats that several writers have, or none.
_OTHER_SUFFIXES = (
    ".ckpt", ".gguf", ".h5", ".hdf5", ".keras", ".msgpack", ".npy", ".onnx", ".tflite", ".mlmodel",
    ".pb", ".pkl", ".pickle", ".joblib", ".nemo", ".mar", ".pt2", ".eqx", ".skops", ".json",
    ".zip", ".tar", ".gz",
)  # fmt: skip

_registered: dict[str, Callable[..., Writer]] = {}


def register_writer(name: str, make: Callable[..., Writer]) -> None:
    """Adds a format into which checkpoints are exported. A package brings one for all programs by
    an entry point: see `unickpt.doors`.

    Arguments:
        name: of the format, for `convert(to=)`.
        make: makes its writer; the options of the format are its arguments.

    Raises:
        ValueError: a format has the name already.
    """
    if name in _registered or name in doors.ours("writers"):
        raise ValueError(f"a format is called {quoted(name)} already")
    _registered[name] = make


def unregister_writer(name: str) -> None:
    """Removes a format that was registered."""
    del _registered[name]


def names() -> list[str]:
    """The names of all formats of unickpt, and of those that were registered."""
    return [*doors.ours("writers"), *_registered]


def _maker(format: str) -> Callable[..., Writer] | None:
    """The function that makes the writer of a format; None if there is none.

    Raises:
        PluginError: it is another package's, which cannot be imported.
    """
    if format in _registered:
        return _registered[format]
    door = doors.find("writers", format)
    return None if door is None else cast(Callable[..., Writer], door.open())


def chosen(to: str | None, path: paths.PathLike) -> str:
    """The format to write: the requested one, or that of the destination's suffix.

    Arguments:
        to: the name of a format; None if only the path determines it.
        path: the destination.

    Returns:
        The name of a format; `OWN` if neither determines one.

    Raises:
        ValueError: the suffix is that of another format, or of one that unickpt does not write.

    Example:
        >>> chosen(None, "model.safetensors"), chosen(None, "runs/step_1"), chosen("hf", "llama")
        ('safetensors', 'unickpt', 'hf')
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    suffixes = sorted((*_BY_SUFFIX, *_OTHER_SUFFIXES), key=len, reverse=True)
    suffix = next((suffix for suffix in suffixes if text.lower().endswith(suffix)), None)
    meant = _BY_SUFFIX.get(suffix or "")
    if suffix is None or to in _registered or (to is not None and to == meant):
        return to or OWN
    if to is not None:
        if suffix in getattr(_maker(to), "suffixes", ()):
            return to
        kind = "unickpt's own format, which is a folder" if to == OWN else f"the format {to!r}"
        raise ValueError(
            f"{quoted(text)}: the suffix {suffix} does not fit {kind}; choose another path or "
            "format"
        )
    if meant is None:
        raise ValueError(_without_writer(text, suffix))
    return meant


def _without_writer(path: str, suffix: str) -> str:
    """The error for a suffix that does not determine a format."""
    fitting = [name for name in names() if suffix in getattr(_maker(name), "suffixes", ())]
    if fitting:
        formats = " or ".join(map(quoted, fitting))
        return f"{quoted(path)}: the suffix {suffix} can be {formats}; pass to= (export --to)"
    return (
        f"{quoted(path)}: unickpt does not write {suffix} files. It writes {', '.join(_BY_SUFFIX)} "
        f"and, with to= (export --to), {', '.join(names())}; for a folder of unickpt's own format, "
        "choose a path without such a suffix"
    )


def make_writer(format: str, options: Mapping[str, Any]) -> Writer:
    """The writer of a format, by its name: of unickpt, registered, or another package's.

    Arguments:
        format: its name.
        options: of this format.

    Raises:
        ValueError: there is no such format, or an option has an invalid value.
        TypeError: the format has no such option, or needs one that is missing.

    Example:
        >>> make_writer("hf", {"max_shard_size": "1GB"}).suffixes
        ()
    """
    make = _maker(format)
    if make is None:
        every = ", ".join([*names(), *doors.other_packages("writers")])
        raise ValueError(f"no format is called {quoted(format)}; there are {every}")
    parameters = inspect.signature(make).parameters
    if unknown := [option for option in options if option not in parameters]:
        takes = ", ".join(parameters) or "none"
        raise TypeError(
            f"the format {format!r} has no option {quoted(unknown[0])}; it takes {takes}"
        )
    without = [p.name for p in parameters.values() if p.default is p.empty]
    if missing := [name for name in without if name not in options]:
        raise TypeError(f"the format {format!r} needs the option {missing[0]!r}")
    return make(**options)
