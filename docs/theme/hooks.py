"""What MkDocs does beyond copying pages: mkdocs.yml names this module as its hook.

- An entry of the navigation with a star becomes the pages that it matches.
- A link that leaves docs/, such as one to an example, becomes one to a page that shows that file.
- Pages of the reference are made: docs/theme/reference.py.
"""

from __future__ import annotations

import gc
import json
import posixpath
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import reference  # noqa: E402

# [text](target) and ![text](target), but no links to other hosts, and none within the page.
LINK = re.compile(r"(\]\()(?!#|[a-z]+:)([^)#\s]+)")
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
# What a snippet prints stands directly below it.
OUTPUT = re.compile(r"^```\n```$\n", re.MULTILINE)
FENCE = re.compile(r"^( *```.*?^ *```)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".rules": "text", ".json": "json", ".toml": "toml"}


def on_startup(*, command: str, dirty: bool) -> None:
    """A build keeps all that it makes: looking for cycles takes a tenth of its time."""
    if command == "build":
        gc.disable()


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that no file of docs/ holds."""
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    for file in list(files.documentation_pages()):
        for target in _outside(file.src_uri, file.content_string):
            if files.get_file_from_path(_page_of(target)) is None:
                page = File.generated(config, _page_of(target), content=_shown(target))
                page.inclusion = page.inclusion.NOT_IN_NAV
                files.append(page)
    pages = [file.src_uri for file in files.documentation_pages()]
    hidden = set(config.not_in_nav.match_files(pages)) if config.not_in_nav else set()
    config.nav = _expanded(config.nav, [page for page in pages if page not in hidden])
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links between files become links between pages; comments are for tests."""
    at = page.file.src_uri

    def linked(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(at), match[2]))
        if not target.startswith("../"):
            return match[0]
        return match[1] + posixpath.relpath(_page_of(target[3:]), posixpath.dirname(at) or ".")

    markdown = OUTPUT.sub("```\n\n```{.text .output}\n", markdown)
    parts = FENCE.split(markdown)  # links are in the even ones, code in the odd ones
    parts[::2] = [LINK.sub(linked, COMMENT.sub("", part)) for part in parts[::2]]
    return "".join(parts)


def _outside(at: str, markdown: str) -> set[str]:
    """The files out of docs/ that a page links to, by their paths in the repository."""
    if at.startswith("files/"):
        return set()
    links = [match[2] for part in FENCE.split(markdown)[::2] for match in LINK.finditer(part)]
    found = {posixpath.normpath(posixpath.join(posixpath.dirname(at), link)) for link in links}
    return {path[3:] for path in found if path.startswith("../")}


def _page_of(path: str) -> str:
    """The page of the site that shows a file which lies outside of docs/."""
    if path == "README.md":
        return "README.md"
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def _shown(path: str) -> str:
    file = ROOT / path
    if not file.is_file():
        raise PluginError(f"a page links to {path}, which is no file of the repository")
    if file.suffix == ".md":
        # Its own links are those of GitHub's readers; here they are names.
        return re.sub(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", file.read_text())
    language = LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{file.read_text()}````\n"


def _expanded(entries: list[Any], pages: list[str]) -> list[Any]:
    """A navigation in which entries with a star are the pages that it does not name otherwise."""
    named = set(_names(entries))

    def expand(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            return [{k: _expanded_in(v, expand) for k, v in entry.items()}]
        if "*" not in entry:
            return [entry]
        matching = (page for page in sorted(pages) if fnmatchcase(page, entry))
        return [p for p in matching if p not in named and p.count("/") == entry.count("/")]

    return _expanded_in(entries, expand)


def _expanded_in(entries: Any, expand: Any) -> Any:
    return [e for entry in entries for e in expand(entry)] if isinstance(entries, list) else entries


def _names(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    return [name for entry in inner for name in _names(entry)]


WORKER = """\
// Browsers refuse workers from files on the disk, but take them from memory: the search needs one.
if (location.protocol === "file:") {{
  const source = {source}
  Worker = class extends Worker {{
    constructor() {{ super(URL.createObjectURL(new Blob([source]))) }}
  }}
}}
"""


def on_post_build(*, config: Any) -> None:
    """Writes what the search needs where no server is; mkdocs.yml names it."""
    site = Path(config.site_dir)
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    source = json.dumps(worker.read_text())
    (site / "theme" / "iframe-worker.js").write_text(WORKER.format(source=source))
