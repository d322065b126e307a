"""Every snippet of every page runs: support/pages.py says how, and what a page's comments mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import pages, s3_server
from support.pages import ROOT, Reader, snippets

PAGES = pages.pages()
COMMANDS = ("$", "unickpt", "python", "torchrun", "pip", "make")


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "bucket")
    yield
    s3_server.remove_bucket(moto, "bucket")


@pytest.mark.integration  # imports frameworks, starts processes and a server
@pytest.mark.parametrize(
    "page", [p for p in PAGES if pages.own_test(p) is None and snippets(p)], ids=str
)
def test_the_snippets_of_a_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    if any("s3://bucket" in s.text and s.not_run is None for s in snippets(page)):
        request.getfixturevalue("bucket")
    with Reader() as reader:
        for snippet in snippets(page):
            reader.follow(snippet)


@pytest.mark.parametrize("page", PAGES)
def test_no_snippet_is_left_out_without_a_reason(page: str) -> None:
    for snippet in snippets(page):
        where = f"{page}:{snippet.line}"
        assert snippet.language in pages.RUN | pages.SHOWN, f"{where}: nothing runs this language"
        assert snippet.not_run is None or len(snippet.not_run.split()) > 2, f"{where}: why not?"
        words = {line.split(" ")[0] for line in snippet.text.splitlines()}
        assert snippet.language or words.isdisjoint(COMMANDS), f"{where}: mark it as ```sh"


@pytest.mark.parametrize("page", PAGES)
def test_a_snippet_that_is_a_file_is_run_by_a_command_below(page: str) -> None:
    found = snippets(page)
    for at, snippet in enumerate(found):
        if snippet.title is not None and snippet.not_run is None:
            below = [s for s in found[at:] if s.language == "sh" and s.not_run is None]
            imports = f"from {snippet.title.removesuffix('.py')} import"
            is_run = any(snippet.title in s.text.split() for s in below)
            assert is_run or any(s.title and imports in s.text for s in found[at:]), (
                f"{page}:{snippet.line}"
            )


@pytest.mark.parametrize("page", PAGES)
def test_all_code_is_in_fences(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    assert re.findall(rf"^ {{4,}}(?:{'|'.join(COMMANDS[1:])}) .*", text, re.M) == []
    assert "~~~" not in text
    assert "<pre>" not in text
