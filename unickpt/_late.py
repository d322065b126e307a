"""Names of a public module that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from unickpt import doors


def late_names(
    module: str, imports: Mapping[str, str], of_plugins: Collection[str] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a module.

    Type checkers find the same imports under `TYPE_CHECKING`; a test compares them.

    Arguments:
        module: its name.
        imports: for each module below `unickpt` what is imported from it, as an import statement
            says it: "apply as apply_rules, facts_of". What is imported from "" are modules.
        of_plugins: names that plug-ins have, behind doors of the group `names`.
    """
    places = dict[str, tuple[str, str]]()
    for home, names in imports.items():
        for each in names.split(", "):
            own, _, name = each.partition(" as ")
            places[name or own] = home, own

    def find(name: str) -> Any:
        if name in of_plugins:
            found = doors.need("names", name)
        elif name in places:
            home, own = places[name]
            found = import_module(f"unickpt.{home or own}")
            if home:
                found = getattr(found, own)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, found)
        return found

    return find
