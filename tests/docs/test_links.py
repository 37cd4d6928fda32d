"""Links between pages, to headings and to pictures lead somewhere. No network: outside addresses are not opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, anchors, blocks, links, name_of, pages


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_internal_links(page: Path) -> None:
    dead = []
    for link in links(page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            dead.append(link)
        elif DOCS in page.parents and DOCS not in target.parents:
            dead.append(f"{link} (leaves docs/: dead on the built site)")
        elif anchor and anchor not in anchors(target.read_text()):
            dead.append(f"{link} (no such heading)")
    assert not dead


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    missing = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert not [name for name in missing if name not in listed]


def test_pictures_are_used() -> None:
    used = {(page.parent / link).resolve() for page in pages() for link in links(page.read_text()) if "images/" in link}
    assert not [path.name for path in (DOCS / "images").iterdir() if path.resolve() not in used]


def test_every_finding_has_a_page_and_is_listed() -> None:
    index = (DOCS / "findings" / "README.md").read_text()
    for page in (DOCS / "findings").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_parsing() -> None:
    text = "# A `b` c\n\n[x](y.md#a-b-c) ![p](i.png)\n```sh\n[no](code.md)\n```\n`[no](span.md)`\n"
    assert links(text) == ["y.md#a-b-c", "i.png"]
    assert anchors(text) == {"a-b-c"}
    assert [(block.language, block.first, block.lines) for block in blocks(text)] == [("sh", 4, ("[no](code.md)",))]
