"""Examines an installation of unickpt: its packages, and why some do not work; and a path."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from unickpt import __version__
from unickpt.errors import PluginError
from unickpt.extend import Door, PathLike, every_door, find_door, resolve_path
from unickpt.plugins.doctor.abilities import Ability, abilities

_DEVELOPERS = {"bench", "dev", "docs", "test", "all"}  # extras that users do not need
_REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+).*?(?:extra\s*==\s*["']([a-z0-9]+)["'])?\s*$""")


@dataclass(frozen=True)
class Package:
    """A package that unickpt uses.

    Arguments:
        name: of the package.
        version: None if it is not installed.
        extra: the extra that installs it, as in `pip install 'unickpt[extra]'`; empty if unickpt
            itself does.
    """

    name: str
    version: str | None
    extra: str = ""


@dataclass(frozen=True)
class Plugin:
    """A format, writer, scheme or folder of presets, of unickpt or of another package.

    Arguments:
        group: one of `doors.GROUPS`.
        name: its own.
        package: who has it, with its version.
        target: where it is.
        error: why it cannot be used; empty if it can.
    """

    group: str
    name: str
    package: str
    target: str
    error: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """The result of `examine`.

    Arguments:
        version: of unickpt.
        python: its version, and the system that it runs on.
        packages: those that unickpt uses.
        plugins: all of unickpt, and of other packages.
        url: the path that was tried; empty for none.
        abilities: of the storage there.
    """

    version: str
    python: str
    packages: Sequence[Package]
    plugins: Sequence[Plugin]
    url: str = ""
    abilities: Sequence[Ability] = ()

    @property
    def ok(self) -> bool:
        """Whether all plug-ins can be used, and checkpoints be saved at the path."""
        works = (ability.works for ability in self.abilities if ability.is_needed)
        return not any(plugin.error for plugin in self.plugins) and all(works)


def examine(path: PathLike | None = None) -> DoctorReport:
    """Imports each plug-in, and tries out a path.

    Arguments:
        path: a local path or a URL, of a checkpoint or a run, which need not exist; small files are
            written there, and removed. None for none.

    Raises:
        InvalidPath: it is no path.

    Example:
        >>> report = examine("memory://run")
        >>> report.ok, [ability.name for ability in report.abilities]
        (True, ['write and read', 'list', 'conditional writes'])
    """
    location = None if path is None else resolve_path(path)
    return DoctorReport(
        __version__,
        f"{platform.python_version()} ({sys.executable}), {platform.platform()}",
        tuple(_packages()),
        tuple(map(_plugin, every_door())),
        "" if location is None else str(location),
        () if location is None else tuple(abilities(location)),
    )


def _packages() -> Iterator[Package]:
    """The packages in unickpt's metadata, without those that only developers need."""
    try:
        requirements = metadata.requires("unickpt") or []
    except metadata.PackageNotFoundError:  # a tree of sources on the path
        return
    seen_names = set[str]()
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is None or (match[2] or "") in _DEVELOPERS or match[1] in {"unickpt", *seen_names}:
            continue
        seen_names.add(match[1])
        try:
            version = metadata.version(match[1])
        except metadata.PackageNotFoundError:
            version = None
        yield Package(match[1], version, match[2] or "")


def _plugin(door: Door) -> Plugin:
    error = ""
    try:
        usable = find_door(door.group, door.name)
        if usable != door:
            raise PluginError(f"{usable} comes before it; one of the two needs another name")
        door.open()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Plugin(door.group, door.name, door.package or "unickpt", door.target, error)
