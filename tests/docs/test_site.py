"""The built site: strict, and nothing in it is loaded from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

pytest.importorskip("material", reason="the extra [docs] is not installed")

LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?(https?:)?//[^\s\">]+")
CSS_LOADED = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    loaded = {match[0] for page in pages for match in LOADED.finditer(page.read_text())}
    loaded |= {style.name for style in site.rglob("*.css") if CSS_LOADED.search(style.read_text())}
    assert not loaded


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("page", ["index.html", "findings/eval_peak.html"])
def test_the_search_works_from_a_folder_without_a_network(site: Path, page: str) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"file://{site / page}?q=expandable"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.findall(r'<a href="file://([^"#]+)" class="md-search-result__link"', shown)
    assert str(site / "oom-messages.html") in found
