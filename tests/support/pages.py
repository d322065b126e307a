"""Pages of documentation as programs: their snippets, run one after the other.

A page is run in an empty folder; its Python snippets share their names, as cells of a notebook do.
What a page's reader need not see stands in comments of its source:

    <!-- setup            Python that runs at this place: what the snippets take for granted
    state = {"w": ...}
    -->
    <!-- not run: why -->    above a snippet that cannot be run

A snippet with a title (```python title="save.py") is a file, which a later shell snippet runs. What
stands directly below a snippet or a setup, in a block without language, is what it prints, with
"..." for what differs each time; if it raises, that is the last line: `LoadMismatch: ...`. A bucket
of S3 is there for a page that uses `s3://bucket`. torchrun itself runs only for the README: other
pages have ranks that are forked from a process with torch, as scripts are from one with what they
import.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from support import TESTS
from support.processes import Processes
from unickpt import Rules
from unickpt.cli.app import app

ROOT = Path(TESTS).parent
DOCS = ROOT / "docs"
RUN = {"python", "sh", "setup", "rules", "json"}
SHOWN = {"", "text", "ebnf", "toml"}  # nothing to run

_START = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)(?: title=\"(?P<title>[^\"]+)\")?$")
_NOT_RUN = re.compile(r"^<!-- not run: (.*) -->$")


@dataclass(frozen=True)
class Snippet:
    """A block of a page.

    Arguments:
        page: the page's path in the repository.
        line: the number of its first line, after the fence.
        language: that of the fence, or "setup".
        text: what stands in it.
        title: the file that it is.
        not_run: why it is not run.
        prints: what stands below it as its output.
    """

    page: str
    line: int
    language: str
    text: str
    title: str | None = None
    not_run: str | None = None
    prints: str | None = None


def pages() -> list[str]:
    """The README and all pages of docs/, by their paths in the repository."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
    return ["README.md", *found]


def own_test(page: str) -> Path | None:
    """The module that runs a page of a trainer, whose jobs need more than a page's source says.

    Its docstring names the page: "docs/integrations/ray.md", "docs/integrations/{keras,flax}.md".
    """
    folder, _, name = page.rpartition("/")
    if folder != "docs/integrations":
        return None
    stem = name.removesuffix(".md")
    named = re.compile(rf"docs/integrations/(?:{stem}|{{[^}}]*\b{stem}\b[^}}]*}})\.md")
    modules = sorted((Path(TESTS) / "docs").glob("test_*.py"))
    found = [m for m in modules if named.search(ast.get_docstring(ast.parse(m.read_text())) or "")]
    return found[0] if found else None


def snippets(page: str) -> list[Snippet]:
    """The snippets of a page, in their order, and what its comments say to them."""
    lines = (ROOT / page).read_text().splitlines()
    found: list[Snippet] = []
    reason: str | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if line == "<!-- setup":
            stop = lines.index("-->", at)
            found.append(Snippet(page, at + 2, "setup", _text(lines[at + 1 : stop])))
        elif (start := _START.match(line)) is not None:
            indent = start["indent"]
            stop = lines.index(f"{indent}```", at + 1)
            text = _text([line.removeprefix(indent) for line in lines[at + 1 : stop]])
            if _is_output(start["language"], lines[at - 1], found):
                found[-1] = _with_output(found[-1], text)
            else:
                found.append(Snippet(page, at + 2, start["language"], text, start["title"], reason))
            reason = None
        elif (told := _NOT_RUN.match(line)) is not None:
            reason, stop = told[1], at
        else:
            stop = at
        at = stop + 1
    return found


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _is_output(language: str, before: str, found: list[Snippet]) -> bool:
    below = {"```": ("python", "sh"), "-->": ("setup",)}.get(before.strip(), ())
    return not language and bool(found) and found[-1].language in below


def _with_output(snippet: Snippet, text: str) -> Snippet:
    return Snippet(**{**snippet.__dict__, "prints": text})


def _forked(words: list[str], settings: dict[str, str], itself: bool) -> str:
    """Does what `python` or `torchrun` would, in processes that have imported what takes long.

    Arguments:
        words: of the command.
        settings: further environment variables.
        itself: torchrun runs, and starts interpreters.

    Returns: what they print.

    Raises:
        AssertionError: one failed.
    """
    program, *arguments = words
    env = {"PYTHONPATH": str(ROOT), **settings}
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        try:
            if program == "torchrun" and not itself:
                option, count, script, *arguments = arguments
                assert option == "--nproc-per-node", words
                started = processes.torch(int(count), Path(script).read_text(), *arguments, env=env)
            else:
                source, imports = TORCHRUN, ["torch"]
                if program == "python" and arguments[0] == "-m":
                    source, imports = MODULE, ["jax", "torch"]
                elif program == "python":
                    source = Path(arguments.pop(0)).read_text()
                    imports = [name for name in ("jax", "torch") if name in source]
                started = [processes.forked(source, *arguments, of=imports, env=env)]
            return "".join(processes.finish(started))
        finally:
            processes.close()


MODULE = """
import runpy, sys
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TORCHRUN = "from torch.distributed.run import main; main()"


class Reader:
    """Follows a page: runs its snippets in the current folder."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "page"}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        # Functions of the page refer to these names, so that else the garbage collector ends what
        # is in them: it would wait 5 s for each worker process of a loader of torch.
        self.names.clear()

    def follow(self, snippet: Snippet) -> None:
        """Runs a snippet.

        Raises:
            AssertionError: it printed something else than the page says.
            Exception: it failed; the traceback has the line of the page.
        """
        if snippet.not_run is not None or snippet.language in SHOWN:
            return
        if snippet.title is not None:
            Path(snippet.title).write_text(snippet.text)
            return
        printed = getattr(self, f"_{snippet.language}")(snippet)
        where = f"{snippet.page}:{snippet.line}"
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if snippet.prints is not None:
            same = doctest.OutputChecker().check_output(snippet.prints, printed, flags)
            assert same, f"{where} prints\n{printed}\nthe page says\n{snippet.prints}"

    def _setup(self, snippet: Snippet) -> str:
        return self._python(snippet)

    def _python(self, snippet: Snippet) -> str:
        code = compile("\n" * (snippet.line - 1) + snippet.text, snippet.page, "exec")
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, self.names)
        except Exception as error:
            if snippet.prints is None:
                raise
            print(f"{type(error).__name__}: {error}", file=out)
        return out.getvalue()

    def _rules(self, snippet: Snippet) -> str:
        Rules.parse(snippet.text)
        return ""

    def _json(self, snippet: Snippet) -> str:
        json.loads(snippet.text)
        return ""

    def _sh(self, snippet: Snippet) -> str:
        text = snippet.text.replace("\\\n", " ")
        return "".join(self._command(line, snippet) for line in text.splitlines())

    def _command(self, line: str, snippet: Snippet) -> str:
        words = shlex.split(line, comments=True)
        settings = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            settings[name] = value
        if not words:
            return ""
        if words[0] == "unickpt":
            result = CliRunner().invoke(app, words[1:])
            found_some = words[1] == "diff" and result.exit_code == 1
            failed, printed = 0 if found_some else result.exit_code, result.output
        else:
            assert words[0] in ("python", "torchrun"), (
                f"{snippet.page}:{snippet.line}: {words[0]!r}?"
            )
            failed, printed = 0, _forked(words, settings, itself=snippet.page == "README.md")
        assert not failed or snippet.prints is not None, f"{line}: exit code {failed}\n{printed}"
        return printed
