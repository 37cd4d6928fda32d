"""The built site: strict, and nothing in it is loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

pytest.importorskip("material", reason="the extra [docs] is not installed")

LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?(https?:)?//[^\s\">]+")
CSS_LOADED = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    loaded = {match[0] for page in pages for match in LOADED.finditer(page.read_text())}
    loaded |= {style.name for style in site.rglob("*.css") if CSS_LOADED.search(style.read_text())}
    assert not loaded
