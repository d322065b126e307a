"""The site of docs/: it builds strictly, needs no network, and has every public name and error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import TESTS
from support.pages import snippets

import unickpt
from unickpt import errors

pytest.importorskip("mkdocs")
sys.path.insert(0, str(Path(TESTS).parent / "docs" / "theme"))

import reference  # of docs/theme

ROOT = Path(TESTS).parent
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it: a broken link or an unreadable docstring fails."""
    built = tmp_path_factory.mktemp("site")
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(mkdocs, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


class _Loaded(HTMLParser):
    """What a browser fetches for a page, and the ids in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = dict(given)
        self.ids.add(attributes.get("id") or "")
        self.fetched.append(attributes.get("src") or "")
        if tag == "link":
            self.fetched.append(attributes.get("href") or "")


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = [url for url in _Loaded(page.read_text()).fetched if url]
        assert [url for url in fetched if re.match(r"([a-z]+:)?//", url)] == [], page
        missing = [
            url
            for url in fetched
            if page.name != "404.html" and not (page.parent / url.partition("?")[0]).exists()
        ]
        assert missing == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", sheet.read_text()) == []


def test_every_public_name_has_an_entry(site: Path) -> None:
    ids = {i for page in site.glob("api/*.html") for i in _Loaded(page.read_text()).ids}
    names = [name for group in reference.public_names().values() for name in group]
    assert {f"unickpt.{name}" for name in unickpt.__all__} - {*names} == {"unickpt.__version__"}
    modules = reference.public_modules()
    names += [f"{module}.{name}" for module, offered in modules.items() for name in offered]
    assert {"unickpt.integrations.dcp", "unickpt.integrations.metrics"} <= modules.keys()
    assert [name for name in names if name not in ids] == []


def test_arguments_and_errors_are_tables_and_examples_code(site: Path) -> None:
    text = (site / "api" / "saving.html").read_text()
    entry = text[text.index('id="unickpt.save"') :].partition('id="unickpt.save_async"')[0]
    assert len(re.findall("<table>", entry)) == 3  # arguments, returns, raises
    assert "<code>overwrite</code>" in entry
    assert '<span class="gp">&gt;&gt;&gt; </span>' in entry


def test_pages_that_docstrings_name_are_links_to_them(site: Path) -> None:
    links = {
        (page.parent / link).resolve()
        for page in site.glob("api/*.html")
        for link in re.findall(r'<a href="([^"#:]+)"', page.read_text())
    }
    assert (site / "reuse.html").resolve() in links
    assert [link for link in links if not link.exists()] == []


def test_every_command_and_option_is_described(site: Path) -> None:
    page = (site / "cli.html").read_text()
    for command in ("inspect", "verify", "convert", "import", "merge", "clean", "prune"):
        assert f'id="{command}"' in page
    for option in ("--hint NAME=VALUE", "--like", "--no-verify", "--dry-run"):
        assert f"<code>{option}" in page, option


def test_pages_of_files_outside_of_docs_are_shown(site: Path) -> None:
    page = (site / "howto" / "frameworks.html").read_text()
    (link,) = re.findall(r'href="([^"]*train_jax[^"]*)"', page)
    assert ">def<" in (site / "howto" / link).read_text()


def test_generated_rows_are_in_no_menu_and_linked(site: Path) -> None:
    assert (site / "zoo.html").is_file()
    assert 'href="presets.html"' in (site / "index.html").read_text()
    assert 'href="zoo.html"' not in (site / "index.html").read_text()
    assert 'href="zoo.html"' in (site / "presets.html").read_text()


def test_the_search_knows_all_pages(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    assert "howto/save.html#time-limits" in index
    assert "lunr" in (site / "theme" / "iframe-worker.js").read_text()


# --- troubleshooting -----------------------------------------------------------------------------

PAGE = "docs/troubleshooting.md"
ERRORS = [
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not errors.UnickptError
]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_a_section_with_a_message_of_its_own(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", (ROOT / PAGE).read_text(), re.M | re.S)
    assert section is not None
    assert "**Means**" in section[1]
    assert "**Do**" in section[1]
    printed = [s.prints for s in snippets(PAGE) if s.prints and s.prints in section[1]]
    assert any(text.startswith(f"{name}: ") for text in printed)
