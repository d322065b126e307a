"""Doors: plug-ins by group and name, of unickpt itself and of other packages.

A package brings them by entry points, such as

    [project.entry-points."unickpt.formats"]
    acme = "acme_checkpoints.reader"

Each is imported when it is needed. Those of unickpt are listed in `_doors`, and tried first; those
of other packages are looked up once per process, and only for names that ours do not have. Lazily
imported names of our public modules are resolved here too (`late_names`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args

from unickpt._doors import DOORS
from unickpt.errors import PluginError

Group = Literal[
    "codecs",
    "commands",
    "encodings",
    "features",
    "formats",
    "names",
    "presets",
    "reads",
    "references",
    "refusals",
    "restorers",
    "schemes",
    "tiers",
    "values",
    "writers",
]
GROUPS: tuple[Group, ...] = get_args(Group)
_PREFIX = "unickpt."
# The attributes that a door's target must have, by group.
_ASKED: Mapping[Group, tuple[str, ...]] = {
    "codecs": ("encode", "decode", "stored_bytes", "zarr_codec", "merge", "validate", "facts"),
    "commands": ("registered_commands",),
    "encodings": ("__call__",),
    "features": ("__call__",),
    "formats": ("HINTS", "open"),
    "names": (),  # public names of unickpt that the core does not have
    "presets": ("__path__",),
    "reads": ("in_job", "on_node"),
    "references": ("__call__",),
    "refusals": ("refusal",),
    "restorers": ("__call__",),
    "schemes": ("name", "spec"),
    "tiers": ("__call__",),
    "values": ("apply",),
    "writers": ("__call__",),
}


@dataclass(frozen=True)
class Door:
    """An entry point.

    Arguments:
        group: the kind of plug-in.
        name: the name of the plug-in.
        target: a module, or `module:attribute`.
        package: the package that declares it, with its version; None for unickpt itself.
    """

    group: Group
    name: str
    target: str
    package: str | None = None

    def open(self) -> Any:
        """Imports and returns its target.

        Raises:
            PluginError: another package's cannot be imported, or does not fit its group.
            ImportError: one of unickpt cannot be imported.
        """
        module, _, attribute = self.target.partition(":")
        try:
            leads_to = importlib.import_module(module)
            leads_to = getattr(leads_to, attribute) if attribute else leads_to
            for name in _ASKED[self.group]:
                getattr(leads_to, name)
            return leads_to
        except Exception as error:
            if self.package is None:
                raise
            raise PluginError(
                f"{self} cannot be used: {type(error).__name__}: {error}. Mend the package, "
                "or uninstall it"
            ) from error

    def __str__(self) -> str:
        """Its name in messages."""
        kind = self.group.removesuffix("s")
        return f"the {kind} {self.name!r} of {self.package or 'unickpt'} ({self.target})"


@cache
def ours(group: Group) -> Mapping[str, Door]:
    """The doors of unickpt, by name, in the order of pyproject.toml."""
    return {name: Door(group, name, target) for name, target in DOORS.get(group, {}).items()}


def other_packages(group: Group) -> Mapping[str, Door]:
    """The doors of other packages whose names no door of unickpt has.

    Raises:
        PluginError: two packages have one of the same name.
    """
    by_name = dict[str, Door]()
    for door in _of_packages():
        if door.group != group or door.name in ours(group):
            continue
        other = by_name.setdefault(door.name, door)
        if other is not door:
            raise PluginError(
                f"{other.package} and {door.package} both have an entry point {door.name!r} in the "
                f"group {_PREFIX}{group} ({other.target} and {door.target}). Uninstall one of them"
            )
    return by_name


def find(group: Group, name: str) -> Door | None:
    """The door of a name; None if there is none.

    Raises:
        PluginError: two packages have it.
    """
    return ours(group).get(name) or other_packages(group).get(name)


def need(group: Group, name: str) -> Any:
    """The target of the door of a name.

    Raises:
        PluginError: there is none, or it cannot be imported.
    """
    door = find(group, name)
    if door is None:
        raise PluginError(
            f"this installation of unickpt lacks the plug-in {name!r} (an entry point of the group "
            f"{_PREFIX}{group}); install unickpt whole"
        )
    return door.open()


def late_names(
    module: str, imports: Mapping[str, str], of_plugins: Collection[str] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a module.

    Type checkers find the same imports under `TYPE_CHECKING`; a test compares them.

    Arguments:
        module: its name.
        imports: for each module below `unickpt` the names to import from it, in the form of an
            import statement: "apply as apply_rules, facts_of". The names under "" are modules.
        of_plugins: names that plug-ins have, behind doors of the group `names`.
    """
    places = dict[str, tuple[str, str]]()
    for home, names in imports.items():
        for clause in names.split(", "):
            attribute, _, name = clause.partition(" as ")
            places[name or attribute] = home, attribute

    def find(name: str) -> Any:
        if name in of_plugins:
            target = need("names", name)
        elif name in places:
            home, attribute = places[name]
            target = importlib.import_module(f"unickpt.{home or attribute}")
            if home:  # a name of a package may be a module
                inner = f"unickpt.{home}.{attribute}"
                has_it = hasattr(target, attribute)
                target = getattr(target, attribute) if has_it else importlib.import_module(inner)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, target)
        return target

    return find


def every() -> Iterator[Door]:
    """All doors: of unickpt, then of other packages, including those whose names are taken."""
    for group in GROUPS:
        yield from ours(group).values()
    yield from _of_packages()


@cache
def _of_packages() -> tuple[Door, ...]:
    """The doors of other packages; the first of a name on the path counts, as for imports."""
    from importlib import metadata  # here, so that importing unickpt stays fast

    doors, seen = list[Door](), {"unickpt"}
    for package in metadata.distributions():
        points = [p for p in package.entry_points if p.group.startswith(_PREFIX)]
        if not points or package.name.lower() in seen:
            continue
        seen.add(package.name.lower())
        for point in points:
            group = cast(Group, point.group.removeprefix(_PREFIX))
            if group in GROUPS:
                who = f"{package.name} {package.version}"
                doors.append(Door(group, point.name, point.value, who))
    return tuple(sorted(doors, key=lambda door: (door.group, door.name, str(door.package))))
