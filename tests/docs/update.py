"""Rewrite stale command output in the documentation: ``python tests/docs/update.py [PAGE.md…]``.

Runs the ``console`` and ``pycon`` blocks of the pages (default: all) and puts in what they print now. Lines that a page
leaves out (``…``) stay left out. Look at the difference before you commit it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as pytest has it

from doc_commands import Session, rewritten
from doc_pages import blocks, name_of, pages

CHECKED = ("console", "pycon")


def update(page: Path) -> bool:
    """Rewrite one page; says whether anything changed."""
    text = page.read_text()
    lines = text.split("\n")
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder).resolve())
        fresh = [(block, rewritten(block, session)) for block in blocks(text) if block.language in CHECKED]
    for block, content in reversed(fresh):
        indented = [(block.indent + line).rstrip() for line in content]
        lines[block.first : block.first + len(block.lines)] = indented
    changed = "\n".join(lines)
    if changed != text:
        page.write_text(changed)
    return changed != text


def main() -> None:
    """Update the named pages, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="*", type=Path, help="default: every page")
    chosen = [page.resolve() for page in parser.parse_args().page] or pages()
    for page in chosen:
        if update(page):
            print(f"updated {name_of(page)}")


if __name__ == "__main__":
    main()
