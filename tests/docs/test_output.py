"""Every ``console`` and ``pycon`` block of the documentation is run, and prints what the page shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doc_commands import Session, differences
from doc_output import fits, renewed
from doc_pages import blocks, name_of, pages

CHECKED = ("console", "pycon")
WITH_OUTPUT = [page for page in pages() if any(block.language in CHECKED for block in blocks(page.read_text()))]


@pytest.mark.parametrize("page", WITH_OUTPUT, ids=name_of)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    if page.name == "dryrun.md":
        for package in ("torch", "transformers", "peft", "bitsandbytes"):
            pytest.importorskip(package)
        if sys.platform != "linux":
            pytest.skip("the dry device needs Linux")
    session = Session(tmp_path)
    wrong = []
    for block in blocks(page.read_text()):
        for step, lines in differences(block, session):
            wrong.append("\n".join([f"{name_of(page)}:{block.first}: {step.source[0]}", *lines]))
    assert not wrong, "stale output (rewrite it with: python tests/docs/update.py)\n" + "\n\n".join(wrong)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (["a", "b"], ["a", "b", ""], True),
        (["a", "…", "d"], ["a", "b", "c", "d"], True),
        (["a", "…"], ["a"], True),
        (["…", "c", "…", "e"], ["a", "c", "d", "e"], True),
        (["…", "e", "…", "c"], ["a", "c", "d", "e"], False),
        (["took … s"], ["took 1.5 s"], True),
        (["took … s"], ["took 1.5 min"], False),
        (["a"], ["a", "b"], False),
        (["a", "…", "b"], ["a"], False),
        (["1.5"], ["1x5"], False),
    ],
)
def test_ellipsis(expected: list[str], actual: list[str], same: bool) -> None:
    assert fits(expected, actual) is same


@pytest.mark.parametrize(
    ("expected", "actual", "result"),
    [
        (["old"], ["new", "lines"], ["new", "lines"]),
        (["a 1", "…", "d"], ["a 2", "b", "c", "d"], ["a 2", "…", "d"]),
        (["a", "…"], ["a", "b", "c"], ["a", "…"]),
        (["a", "took … s", "old"], ["a", "took 3 s", "new"], ["a", "took … s", "new"]),
        ([], ["new"], ["new"]),
    ],
)
def test_updating_keeps_what_was_left_out(expected: list[str], actual: list[str], result: list[str]) -> None:
    assert renewed(expected, actual) == result
    assert fits(result, actual)
