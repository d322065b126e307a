"""Rules: one notation that relates names and axes of two sides, both ways (docs/rules.md).

parse (`grammar`, `rule`) -> plan (`matching`, `plan`) -> apply (`unickpt.feed`, while reading).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unickpt.errors import RuleError
from unickpt.rules import grammar
from unickpt.rules.functions import Function
from unickpt.rules.rule import Rule, Shared, compile_rule, lift
from unickpt.rules.syntax import (
    ConventionLine,
    IncludeLine,
    LiftLine,
    RuleLine,
    WhereLine,
    prefixed,
    syntax_error,
)

__all__ = ["Function", "Rules"]

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Convention:
    """What the numbers of each side mean, under a name such as `rope`."""

    name: str
    left: str
    right: str


@dataclass(frozen=True)
class Rules:
    """Rules that relate the arrays of two sides; the left one is read, the right one is made.

    Made by `parse`, `load` and `preset`; `inverse` reads the right side and makes the left one.

    Example:
        >>> rules = Rules.parse("params/w [i o] <-> w [o i]")
        >>> print(rules.inverse)
        w [o i] <-> params/w [i o]
    """

    rules: tuple[Rule, ...]
    shared: tuple[Shared, ...] = ()
    conventions: tuple[Convention, ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        sizes: Mapping[str, int] | None = None,
        functions: Mapping[str, Function] | None = None,
        name: str = "rules",
    ) -> Rules:
        """Reads rules.

        Arguments:
            text: in the notation of docs/rules.md.
            sizes: extents of axes; they come before those in the text.
            functions: what rules call by `via`.
            name: of the text, for messages.

        Raises:
            RuleSyntaxError: shows the line with a caret.
        """
        return _compile(text, name, Path(), sizes or {}, functions or {})

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str],
        *,
        sizes: Mapping[str, int] | None = None,
        functions: Mapping[str, Function] | None = None,
    ) -> Rules:
        """Reads a file of rules; see `parse`. Files that it includes lie relative to it.

        Raises:
            RuleSyntaxError: shows the line with a caret.
            FileNotFoundError: there is no such file.
        """
        path = Path(file)
        text = path.read_text(encoding="utf-8")
        return _compile(text, str(path), path.parent, sizes or {}, functions or {})

    @classmethod
    def preset(cls, name: str, *, sizes: Mapping[str, int] | None = None) -> Rules:
        """Rules that come with unickpt; see `presets`.

        Raises:
            RuleError: there is none of that name; the message lists them.
        """
        return _compile(_preset_text(name), f"preset {name}", PRESETS, sizes or {}, {})

    @staticmethod
    def presets() -> list[str]:
        """The names of all presets."""
        return sorted(path.stem for path in PRESETS.glob("*.rules"))

    @property
    def inverse(self) -> Rules:
        """The other direction: what is the right side here is read.

        Raises:
            RuleError: a rule has none, because its function has none.
        """
        functions = {}
        for rule in self.rules:
            if rule.function is None:
                continue
            inverse = self.functions[rule.function].inverse
            if inverse is None:
                raise RuleError(f"{rule}\n  has no inverse, because {rule.function!r} has none")
            functions[rule.function] = replace(
                inverse, inverse=inverse.inverse or self.functions[rule.function]
            )
        return Rules(
            tuple(rule.inverse for rule in self.rules),
            tuple(shared.inverse for shared in self.shared),
            tuple(Convention(c.name, c.right, c.left) for c in self.conventions),
            functions,
        )

    def __add__(self, other: Rules) -> Rules:
        return Rules(
            self.rules + other.rules,
            self.shared + other.shared,
            self.conventions + other.conventions,
            {**self.functions, **other.functions},
        )

    def __str__(self) -> str:
        return "\n".join([rule.written for rule in self.rules if not rule.lifted])


def _preset_text(name: str) -> str:
    if name not in Rules.presets():
        known = ", ".join(Rules.presets())
        raise RuleError(f"there is no preset {name!r}; presets are {known}")
    return (PRESETS / f"{name}.rules").read_text(encoding="utf-8")


def _compile(
    text: str,
    name: str,
    folder: Path,
    sizes: Mapping[str, int],
    functions: Mapping[str, Function],
    outer: Sequence[str] = (),
    under: tuple[str, str] = ("", ""),
    where: Mapping[str, int] | None = None,
) -> Rules:
    where = where or {}
    statements = [prefixed(statement, under) for statement in grammar.parse(text, name)]
    for statement in statements:
        if isinstance(statement, WhereLine):
            where = {**where, **dict(statement.sizes)}
    rules: list[Rule] = []
    lifts: list[LiftLine] = []
    shared: list[Shared] = []
    conventions: list[Convention] = []
    for statement in statements:
        match statement:
            case RuleLine():
                rules.append(compile_rule(statement, where, sizes))
                if statement.function is not None and statement.function not in functions:
                    raise syntax_error(
                        f"no function {statement.function!r}: give it, as in Rules.parse(text, "
                        f"functions={{{statement.function!r}: Function(...)}})",
                        statement.place,
                    )
            case IncludeLine():
                included = _include(statement, folder, where, sizes, functions, (*outer, name))
                rules += included.rules
                shared += included.shared
                conventions += included.conventions
            case ConventionLine():
                conventions.append(Convention(statement.name, statement.left, statement.right))
            case LiftLine():
                lifts.append(statement)
    unused = sizes.keys() - {axis for rule in rules for axis in rule.sizes}
    if unused and not outer:
        raise RuleError(f"{name}: a size is given for {min(unused)!r}, which no rule has")
    parameters = [rule for rule in rules if not rule.lifted]
    for line in lifts:
        lifted = lift(line, parameters)
        if isinstance(lifted, Shared):
            shared.append(lifted)
        else:
            rules += lifted
    return Rules(tuple(rules), tuple(shared), tuple(conventions), functions)


def _include(
    line: IncludeLine,
    folder: Path,
    where: Mapping[str, int],
    sizes: Mapping[str, int],
    functions: Mapping[str, Function],
    outer: Sequence[str],
) -> Rules:
    if line.target in Rules.presets():
        name, text, inside = f"preset {line.target}", _preset_text(line.target), PRESETS
    else:
        path = folder / line.target
        name, inside = str(path), path.parent
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            known = ", ".join(Rules.presets()) or "none"
            raise syntax_error(
                f"{line.target!r} is neither a preset ({known}) nor a file: {error}", line.place
            ) from None
    if name in outer:
        raise syntax_error(f"{line.target!r} includes itself", line.place)
    return _compile(text, name, inside, sizes, functions, outer, line.under, where)
