"""`Rules`: all rules of a file and of those that it includes, compiled; or of a preset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from unickpt import doors
from unickpt.errors import RuleError, RuleSyntaxError, RuleWarning
from unickpt.quoting import counted, first_few
from unickpt.rules import parser
from unickpt.rules.ast import (
    ConventionLine,
    IncludeLine,
    LiftLine,
    RuleLine,
    Statement,
    WhereLine,
    included,
    syntax_error,
)
from unickpt.rules.compiling import CompiledRules, Convention, compile_rule
from unickpt.rules.functions import Function
from unickpt.rules.lint import swapped_names
from unickpt.rules.observed import DraftReport, ObservedReport, RulesCheck
from unickpt.rules.optimizer_slots import SharedState, lift
from unickpt.rules.rule import Rule
from unickpt.rules.rule_files import (
    MOST_CHARACTERS,
    open_included,
    preset_file,
    preset_text,
    presets,
    read_text,
)
from unickpt.rules.view import load_view

_DEEPEST, _MOST_FILES = 30, 1000  # of what a file includes


@dataclass(frozen=True, repr=False)
class Rules(CompiledRules):
    """Rules that relate the arrays of two sides; the left one is read, the right one is made.

    Made by `parse`, `load` and `preset`; `inverse` reads the right side and makes the left one.

    Example:
        >>> rules = Rules.parse("params/w [i o] <-> w [o i]")
        >>> print(rules.inverse)
        w [o i] <-> params/w [i o]
    """

    report: ObservedReport | DraftReport | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rules, str):
            raise RuleError("make rules from a text with Rules.parse(text)")

    @classmethod
    def parse(
        cls,
        text: str | Mapping[str, str],
        *,
        sizes: Mapping[str, int] | None = None,
        functions: Mapping[str, Function] | None = None,
        name: str = "rules",
    ) -> Rules:
        """Reads rules.

        Arguments:
            text: in the notation of docs/rules.md; or a dict of renames, where each key and its
                value are the two sides of a rule: the stored and the loaded name.
            sizes: extents of axes; they take precedence over those in the text.
            functions: the functions that rules call by `via`.
            name: of the text, for messages.

        Raises:
            RuleSyntaxError: shows the line with a caret.

        Warns:
            RuleWarning: two rules exchange two names.

        Example:
            >>> print(Rules.parse({"params/{m...}/kernel": "model.{m...}.weight"}))
            params/{m...}/kernel [...] <-> model.{m...}.weight [...]
        """
        _check_functions(functions)
        written = text if isinstance(text, str) else _lines_of(text)
        return _compile(written, name, Path(), sizes or {}, functions or {})

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str],
        *,
        sizes: Mapping[str, int] | None = None,
        functions: Mapping[str, Function] | None = None,
    ) -> Rules:
        """Reads a file of rules; see `parse`. Paths of included files are relative to it.

        Raises:
            RuleSyntaxError: shows the line with a caret.
            FileNotFoundError: there is no such file.
        """
        _check_functions(functions)
        path = Path(file)
        return _compile(read_text(path), str(path), path.parent, sizes or {}, functions or {})

    @classmethod
    def observe(
        cls,
        function: Callable[[Any], Any],
        example: Any,
        *,
        strict: bool = True,
        framework: str | None = None,
        name: str | None = None,
    ) -> Rules:
        """Derives the rules of an existing converter by running it.

        The converter is called several times with arrays whose elements are all different numbers,
        which show where each element went; then with fresh random numbers, on which the rules must
        do the same, in both directions. Its code is not read.

        Arguments:
            function: takes a tree of arrays, such as a state dict, and returns another; or changes
                its argument in place, and returns None.
            example: of its argument: arrays, whose elements do not matter, anything with a shape
                and a dtype, or shapes alone for float32. Small ones are faster, and suffice.
            strict: whether to refuse a converter that makes some array in a way that no rule can
                express; if not, `Rules.report` lists these.
            framework: "numpy", "torch" or "jax": the type of the arrays that the converter gets; by
                default that of the example.
            name: of the rules, for messages.

        Returns:
            The rules; `report` lists what they cover and what is lost, and has them as a text.

        Raises:
            RuleError: an array depends on values, or its elements are in an order that axes do not
                give; names the array and the first element that shows it.

        Example:
            >>> def convert(state):
            ...     return {f"{k}.weight": x.T for k, x in state.items()}
            >>> print(Rules.observe(convert, {"up": (3, 5), "down": (5, 3)}))
            {n=up|down} [i o] <-> {n=up|down}.weight [o i]
        """
        observe = doors.need("names", "observe")
        rules: Rules = observe(function, example, strict=strict, framework=framework, name=name)
        return rules

    @classmethod
    def draft(cls, left: Any, right: Any, *, name: str = "draft") -> Rules:
        """Drafts rules for two matching sides, by values, names and shapes.

        If both hold the same weights, values decide which arrays match and the order of axes, even
        for square arrays. Else, or for arrays of a single value, names with the same words decide,
        if no other name is similar and the sizes allow only one order. The rest are guesses, which
        are not rules until you write them down as such.

        Arguments:
            left, right: trees of arrays, or checkpoints: a path, a URL, or what `unickpt.open`
                returned; or shapes, or a model without memory, whose values are not known.
            name: of the rules, for messages.

        Returns:
            The certain rules; `report` has the guesses with their alternatives, the left-over
            names, and all of it as a text.

        Example:
            >>> import numpy as np
            >>> w = np.arange(12.0).reshape(4, 3)
            >>> rules = Rules.draft({"up": {"kernel": w}}, {"up.weight": w.T.copy()})
            >>> print(rules)
            up/kernel [i o] <-> up.weight [o i]
        """
        rules: Rules = doors.need("names", "draft_rules")(left, right, name=name)
        return rules

    def check(self, left: Any, right: Any, *, probes: int = 64, rtol: float = 1e-5) -> RulesCheck:
        """Checks that the rules make the right side from the left side.

        Both must hold the same weights, such as a model before and after a conversion. A
        few elements of each array are compared: names and shapes do not show a wrong transpose of
        a square kernel, or in which order heads are; values do.

        Arguments:
            left, right: trees of arrays, or checkpoints: a path, a URL, or what `unickpt.open`
                returned; only the chunks with the compared elements are read.
            probes: about how many elements of each array to compare.
            rtol: the relative difference to tolerate for rules with arithmetic.

        Returns:
            The differences, with likely reasons; true if there are none.

        Raises:
            RuleError: the rules do not fit the names and shapes.

        Example:
            >>> import numpy as np
            >>> w = np.arange(9.0).reshape(3, 3)
            >>> rules = Rules.parse("kernel <-> weight")
            >>> print(rules.check({"kernel": w}, {"weight": w}))
            9 elements of 1 array are as the rules make them
            >>> bool(rules.check({"kernel": w}, {"weight": w.T}))
            False
        """
        check = doors.need("names", "check_rules")
        report: RulesCheck = check(self, left, right, probes=probes, rtol=rtol)
        return report

    @classmethod
    def preset(cls, name: str, *, sizes: Mapping[str, int] | None = None) -> Rules:
        """Rules that come with unickpt; see `presets`.

        Raises:
            RuleError: there is none of that name; the message lists them.
        """
        folder = preset_file(name).parent
        return _compile(preset_text(name), f"preset {name}", folder, sizes or {}, {})

    @staticmethod
    def presets() -> list[str]:
        """The names of all presets."""
        return presets()

    @property
    def inverse(self) -> Rules:
        """The other direction: reads the right side, and makes the left one.

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
            if rule.moves != (inverse.region is None):
                raise RuleError(
                    f"{rule}\n  has no inverse: {rule.function!r} and its inverse must both have "
                    "region=, or neither"
                )
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

    _load_view = load_view

    def __repr__(self) -> str:
        count = sum(not rule.lifted for rule in self.rules)
        files = [repr(file) for file in dict.fromkeys(rule.position.file for rule in self.rules)]
        slots = f", {len(self.rules) - count} more of slots" if count < len(self.rules) else ""
        return f"Rules({first_few(files)}: {counted(count, 'rule')}{slots})"

    def _repr_html_(self) -> str:
        """The rules as they are written, for notebooks."""
        from unickpt.display import html  # here, so that importing unickpt stays fast

        texts = [rule.written for rule in self.rules if not rule.lifted]
        facts = [f"{len(texts):,} rules", f"{len(self.rules) - len(texts):,} more of slots"]
        rows = ((number, text) for number, text in enumerate(texts, 1))
        return html.page("Rules", "", facts, html.table(("", "rule"), rows, len(texts)))

    def __str__(self) -> str:
        """The rules in the notation; a comment counts the omitted ones from `lift` lines."""
        lines = [rule.written for rule in self.rules if not rule.lifted]
        if count := len(self.rules) - len(lines) + len(self.shared):
            lines.append(
                f"# not shown: {counted(count, 'rule')} of optimizer slots, from `lift` lines"
            )
        return "\n".join(lines)


@dataclass
class _Compiler:
    """The content of a file and its includes; lifts wait for the rules of all of them."""

    sizes: Mapping[str, int]
    functions: Mapping[str, Function]
    rules: list[Rule] = field(default_factory=list)
    lifts: list[LiftLine] = field(default_factory=list)
    conventions: list[Convention] = field(default_factory=list)
    size_lines: list[WhereLine | IncludeLine] = field(default_factory=list)
    files: int = 0
    characters: int = 0

    def collect(
        self,
        statements: Sequence[Statement],
        folder: Path,
        files: Sequence[str],
        where: Mapping[str, int],
    ) -> None:
        """Adds the statements of a file, and those of the files that it includes.

        Arguments:
            statements: of the file.
            folder: for files that it includes.
            files: its name, after those of the files that include it.
            where: sizes that those have given.
        """
        for statement in statements:
            if isinstance(statement, WhereLine):
                where = {**where, **dict(statement.sizes)}
                self.size_lines.append(statement)
        for statement in statements:
            match statement:
                case RuleLine():
                    self._add_rule(statement, where)
                case IncludeLine():
                    name, text, inside = open_included(statement, folder)
                    if name in files:
                        raise syntax_error(
                            f"{statement.target!r} includes itself", statement.position
                        )
                    self.size_lines.append(statement)
                    self._count(statement, text, files)
                    lines = [included(line, statement) for line in _parse(statement, name, text)]
                    self.collect(lines, inside, (*files, name), {**where, **dict(statement.sizes)})
                case ConventionLine():
                    self.conventions.append(
                        Convention(statement.name, statement.left, statement.right)
                    )
                case LiftLine():
                    self.lifts.append(statement)

    def _count(self, statement: IncludeLine, text: str, files: Sequence[str]) -> None:
        """Refuses files that include each other without end, or ever more."""
        self.files, self.characters = self.files + 1, self.characters + len(text)
        if len(files) > _DEEPEST:
            raise syntax_error(
                f"files include each other more than {_DEEPEST} deep; does one include itself?",
                statement.position,
            )
        if self.files > _MOST_FILES or self.characters > MOST_CHARACTERS:
            raise syntax_error(
                f"more than {_MOST_FILES} files, or {MOST_CHARACTERS >> 20} Mi characters, would "
                "be included; does one include another again and again?",
                statement.position,
            )

    def _add_rule(self, line: RuleLine, where: Mapping[str, int]) -> None:
        function = None if line.function is None else self.functions.get(line.function)
        moves = function is None or function.region is None
        self.rules.append(compile_rule(line, moves, where, self.sizes))
        if line.function is not None and function is None:
            raise syntax_error(
                f"no function {line.function!r}: give it, as in Rules.parse(text, "
                f"functions={{{line.function!r}: Function(...)}})",
                line.position,
            )


def _compile(
    text: str,
    name: str,
    folder: Path,
    sizes: Mapping[str, int],
    functions: Mapping[str, Function],
) -> Rules:
    _check_sizes(sizes)
    compiler = _Compiler(sizes, functions)
    compiler.collect(parser.parse(text, name), folder, (name,), {})
    used = {axis for rule in compiler.rules for axis in rule.sizes}
    unused = sizes.keys() - used
    if unused:
        raise RuleError(f"{name}: a size is given for {min(unused)!r}, which no rule has")
    for where in compiler.size_lines:
        for axis, _ in where.sizes:
            if axis not in used:
                raise syntax_error(f"no rule has an axis {axis!r}", where.position)
    rules, shared = list(compiler.rules), []
    for line in compiler.lifts:
        lifted = lift(line, compiler.rules)
        if isinstance(lifted, SharedState):
            shared.append(lifted)
        else:
            rules += lifted
    for question in swapped_names(compiler.rules):
        warnings.warn(question, RuleWarning, stacklevel=3)
    # A line that a preset also has counts once.
    once = tuple(dict.fromkeys(rules)), tuple(dict.fromkeys(shared))
    return Rules(*once, tuple(compiler.conventions), functions)


def _check_sizes(sizes: object) -> None:
    """Raises RuleError if sizes that are given in a call are not a dict of integers."""
    if not isinstance(sizes, Mapping):
        raise RuleError(f"sizes must be a dict of integers, not of type {type(sizes).__name__}")
    for axis, size in sizes.items():
        if not isinstance(size, Integral) or int(size) < 0:
            raise RuleError(f"sizes[{axis!r}]={size!r} must be an integer, at least 0")


def _check_functions(functions: object) -> None:
    """Raises RuleError if the functions for `via` are not a dict of functions."""
    if functions is None:
        return
    if not isinstance(functions, Mapping):
        raise RuleError(
            f"functions must be a dict of unickpt.Function by name, not of type "
            f"{type(functions).__name__}"
        )
    for name, function in functions.items():
        if not isinstance(function, Function):
            raise RuleError(
                f"functions[{name!r}] is of type {type(function).__name__}; pass "
                "unickpt.Function(apply=lambda box, x: ...)"
            )


def _lines_of(renames: Mapping[str, str]) -> str:
    """A rule for each entry of a dict, on a line of its own."""
    if not isinstance(renames, Mapping):
        raise RuleError(
            f"Rules.parse takes a string or a dict of renames, not {type(renames).__name__}; "
            "Rules.load takes the path of a file"
        )
    lines = []
    for stored, requested in renames.items():
        for side in (stored, requested):
            if not isinstance(side, str) or "\n" in side or not side.strip():
                raise RuleError(
                    f"{{{stored!r}: {requested!r}}}: a rename maps a name to another, both of type "
                    "str; to leave something out, give 'drop'"
                )
        lines.append(f"{stored} <-> {requested}")
    return "\n".join(lines)


def _parse(line: IncludeLine, name: str, text: str) -> list[Statement]:
    """The statements of an included file. Messages show no contents of a file that may be no rule
    file."""
    try:
        return parser.parse(text, name)
    except RuleSyntaxError as error:
        if line.target in presets() or line.target.endswith(".rules"):
            raise
        number = str(error).removeprefix(f"{name}, line ").partition(":")[0]
        raise syntax_error(
            f"{line.target!r} is no file of rules: line {number} is wrong. Name it *.rules to "
            "see the errors",
            line.position,
        ) from None
