"""The tutorial notebook: every cell runs, in order, and shows something."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "tutorial.ipynb"


def cells(kind: str) -> list[str]:
    """The sources of its cells of one kind."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def run(source: str, names: dict[str, Any]) -> Any:
    """A cell as a kernel runs it: the value of its last line is what it shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


def test_every_cell_runs_and_shows_something(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for source in cells("code"):
        shown = run(source, names)
        assert shown is not None, source
        assert len(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown)) > 40, source
    assert names["what_if"].runs[0].num_ooms and names["what_if"].runs[1].fits


def test_it_is_stored_without_what_it_printed() -> None:
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in stored["cells"] if "outputs" in cell)
    assert len(cells("markdown")) >= len(cells("code")) - 1  # words before every step
