"""Every test of the browser has settings of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import screen

# The tests draw when there is something to see (browser_cases.settle); Textual's clock would do so 60 times a second.
screen.UPDATE_PERIOD = 1.0  # type: ignore[misc]


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the settings of whoever runs it, or depends on their terminal."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("NO_COLOR", raising=False)
