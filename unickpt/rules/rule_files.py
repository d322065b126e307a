"""Files of rules: presets and included files, which may be neither pipes nor devices."""

from __future__ import annotations

import difflib
import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from unickpt import doors
from unickpt.errors import RuleError
from unickpt.rules.ast import IncludeLine, syntax_error

MOST_CHARACTERS = 16 << 20


def presets() -> list[str]:
    """The names of all presets: those of unickpt, then those of other packages."""
    builtin = _files(doors.ours("presets"))
    return [*sorted(builtin), *sorted(_files(doors.other_packages("presets")).keys() - builtin)]


def preset_file(name: str) -> Path:
    """The rule file of a preset.

    Raises:
        RuleError: there is none of that name; the message lists them.
    """
    if not isinstance(name, str):
        raise RuleError(f"the name of a preset is a str, not of type {type(name).__name__}")
    for group in (doors.ours, doors.other_packages):
        path = _files(group("presets")).get(name)
        if path is not None:
            return path
    model = name.partition("-")[2] or name  # of another source: maxtext-qwen3, litgpt-qwen3
    models = {preset: preset.partition("-")[2] for preset in presets() if "-" in preset}
    near = [preset for preset in models if models[preset] == model]
    near = near or difflib.get_close_matches(name, presets(), n=1)
    if not near:
        close = difflib.get_close_matches(model, models.values(), n=1)
        near = [preset for preset in models if models[preset] in close]
    hint = f"presets are {', '.join(presets())}"
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}? `unickpt presets` lists all"
    raise RuleError(f"there is no preset {name!r}; {hint}")


def preset_text(name: str) -> str:
    """The text of a preset. Raises as `preset_file`."""
    return preset_file(name).read_text(encoding="utf-8")


def _files(packages: Mapping[str, doors.Door]) -> dict[str, Path]:
    """The files of presets in packages, by the presets' names."""
    folders = [Path(folder) for door in packages.values() for folder in door.open().__path__]
    return {path.stem: path for folder in folders for path in folder.glob("*.rules")}


def read_text(path: Path, opener: Callable[[str, int], int] | None = None) -> str:
    try:
        with open(path, encoding="utf-8", newline=None, opener=opener) as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise RuleError(f"{path} has more than {MOST_CHARACTERS >> 20} Mi characters")
        return text
    except UnicodeDecodeError as error:
        raise RuleError(f"{path} is not UTF-8 text: {error}") from None


def _open_regular(path: str, flags: int) -> int:
    """Opens a file that is neither a pipe nor a device, which may have no end."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file")


def open_included(line: IncludeLine, folder: Path) -> tuple[str, str, Path]:
    """The name of an included file, its text, and the folder for those that it includes.

    A preset of unickpt comes before a file of its name, and that before one of another package.
    """
    name = line.target
    if name in _files(doors.ours("presets")):
        return _included_preset(name)
    path = folder / name
    if os.path.isabs(name):
        raise syntax_error(
            f"{name!r} is absolute: give the path relative to this file", line.position
        )
    if "\0" in name:
        raise syntax_error("a path has no NUL character", line.position)
    try:
        return str(path), read_text(path, _open_regular), path.parent
    except OSError as error:
        if name in _files(doors.other_packages("presets")):
            return _included_preset(name)
        near = difflib.get_close_matches(name, presets(), n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise syntax_error(
            f"{name!r} is neither a preset nor a file ({path}: {error.strerror}). "
            f"{hint}Presets are {', '.join(presets())}",
            line.position,
        ) from None


def _included_preset(name: str) -> tuple[str, str, Path]:
    file = preset_file(name)
    return f"preset {name}", file.read_text(encoding="utf-8"), file.parent
