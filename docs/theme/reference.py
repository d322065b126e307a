"""The pages that come from the code: the API from its docstrings, the commands from their help."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import unickpt.errors
import unickpt.extend
import unickpt.integrations
import unickpt.types
from unickpt.cli.app import app

# The page of a public name follows from the wing that defines it; those of other wings are tools.
PAGES = {
    "saving": "Saving",
    "runs": "Runs",
    "loading": "Loading",
    "reading": "Loading",
    "frameworks": "Leaves and layouts",
    "trees": "Leaves and layouts",
    "arrays": "Leaves and layouts",
    "rules": "Rules in Python",
    "errors": "Errors",
}
# How the command line calls the types of its options.
KINDS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "Path": "PATH"}
# What users import of other modules than `unickpt` and its integrations.
OTHERS = {"Leaves and layouts": ["unickpt.adapters.torch.NamedOptimizer"]}

# What the integrations share; no user imports it.
SHARED = {"destination", "rng"}


def pages() -> dict[str, str]:
    """The pages to be made: their paths in the site, and what is in them."""
    return {**api_pages(), "cli.md": cli_page()}


# --- the API -------------------------------------------------------------------------------------


def public_names() -> dict[str, list[str]]:
    """The titles of the pages of `unickpt`, with the names on each, as they are imported."""
    found: dict[str, list[str]] = {title: [] for title in [*PAGES.values(), "Tools"]}
    seen = set()
    for home in (unickpt, unickpt.errors, unickpt.types):
        for name in sorted({*home.__all__} - seen - {"__version__"}):
            thing = getattr(home, name)
            module = thing.__name__ if inspect.ismodule(thing) else thing.__module__
            found[PAGES.get(module.split(".")[1], "Tools")].append(f"{home.__name__}.{name}")
            seen.add(name)
    found["Extensions"] = [f"unickpt.extend.{name}" for name in unickpt.extend.__all__]
    # Functions first.
    return {
        title: sorted(names, key=_last) + OTHERS.get(title, []) for title, names in found.items()
    }


def _last(name: str) -> tuple[bool, str]:
    last = name.rpartition(".")[2]
    return last[0].isupper(), last


def public_modules() -> dict[str, list[str]]:
    """The modules of `unickpt.integrations` with what they offer, without importing trainers.

    The modules in a package are parts of it, unless it offers them, or they say what they offer, by
    `__all__`.
    """
    folder = Path(unickpt.integrations.__path__[0])
    files = {path.stem: path for path in folder.glob("*.py")}
    files |= {path.parent.name: path for path in folder.glob("*/__init__.py")}
    found = {}
    for name, file in sorted(files.items()):
        if name.startswith("_") or name in SHARED:
            continue
        offered = _offered(file)
        inner = file.parent.glob("[!_]*.py") if file.parent != folder else ()
        parts = {part.stem: part for part in sorted(inner)}
        found[f"unickpt.integrations.{name}"] = [n for n in offered if n not in parts]
        for stem, part in parts.items():
            if stem in offered or "\n__all__ = " in part.read_text():
                found[f"unickpt.integrations.{name}.{stem}"] = _offered(part)
    return found


def _offered(file: Path) -> list[str]:
    """What `__all__` of a module says, else its own classes and functions."""
    own = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=_last)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            own.append(node.name)
    return own


def api_pages() -> dict[str, str]:
    made = {}
    for title, names in public_names().items():
        path = title.split(" ")[0].lower()
        made[f"api/{path}.md"] = _page(title, names)
    for module, names in public_modules().items():
        entries = [f"{module}.{name}" for name in names]
        about = f"::: {module}\n    options: {{members: false, show_root_heading: false}}\n"
        short = module.removeprefix("unickpt.")
        made[f"api/{short}.md"] = _page(f"`{short}`", entries, about)
    return made


def _page(title: str, names: list[str], about: str = "") -> str:
    return f"# {title}\n\n{about}\n" + "\n".join(f"::: {name}\n" for name in names)


# --- the commands --------------------------------------------------------------------------------


def cli_page() -> str:
    """The commands, as `unickpt COMMAND --help` has them."""
    group: Any = typer.main.get_command(app)
    about = _help(group.help)
    commands = [_command(name, group.get_command(None, name)) for name in group.list_commands(None)]
    return "\n".join(["# Command line", "", about, *commands])


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    arguments = " ".join(_argument(p) for p in command.params if _is_argument(p))
    rows = [_row(parameter, context) for parameter in command.params]
    usage = " ".join(f"unickpt {name} [OPTIONS] {arguments}".split())
    table = ["| argument, option | what it does |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## {name}", "", "```text", usage, "```", "", _help(command.help), *table])


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper().strip("{}[]")
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any, context: Any) -> str:
    if _is_argument(parameter):
        names, told = _argument(parameter).strip("[]"), parameter.help or ""
    else:
        names, told = parameter.get_help_record(context)
        names = re.sub(r"<(?:list\[)?(\w+)\]?>", lambda kind: KINDS[kind[1]], names)
        names = names.replace(" / ", "`, `")
    told = told.replace("|", "\\|").replace("*", "\\*").replace("[", "\\[").replace("<", "&lt;")
    return f"| `{names}` | {told} |"


def _help(text: str | None) -> str:
    """Help as Markdown; paragraphs that a terminal shows as they are become code."""
    return "\n".join(_paragraphs(text or ""))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield f"```text\n{paragraph[1:].strip(chr(10))}\n```\n"
        else:
            yield paragraph.replace("*", "\\*").replace("<", "&lt;") + "\n"
