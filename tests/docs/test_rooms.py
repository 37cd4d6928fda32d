"""The pages that describe the house name every room of it, and none that is gone."""

from __future__ import annotations

import re
import tomllib

import pytest
from doc_pages import ROOT

PACKAGES = {path.parent.name for path in (ROOT / "memtrace").glob("*/__init__.py")}


def test_the_architecture_names_every_room() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert not PACKAGES - set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_the_architecture_has_the_order_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    level = {room: number for number, layer in enumerate(layers) for room in re.findall(r"\w+", layer)}
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    order = [level[room] for row in rows for room in re.findall(r"`(\w+)`", row)]
    assert order == sorted(order)


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"(?<![\w/])(?:memtrace|tui|tests|benchmarks|fuzz|docs)/[\w/.-]*\w", text)
    gone = [path for path in named if not re.search(r"[A-Z]{2}", path) and not (ROOT / path).exists()]
    assert named
    assert not gone
