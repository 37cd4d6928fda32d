"""Few pictures of fixed size, so that a change of looks is seen. Update with ``pytest --snapshot-update`` and look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from browser_cases import TINY, hit, settle, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.provider import BrowsedRecording
from memtrace_tui.settings import Settings
from support import trace_path
from textual.pilot import Pilot

from memtrace.snapshot.load import load


@pytest.mark.parametrize(
    ("number", "size", "theme"),
    [
        ("1", (80, 24), "memtrace-dark"),
        ("2", (100, 28), "memtrace-light"),
        ("3", (120, 36), "memtrace-dark"),
    ],
)
def test_pictures(
    snap_compare: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    number: str,
    size: tuple[int, int],
    theme: str,
) -> None:
    monkeypatch.setattr(MainScreen, "action_explain", lambda self: None)  # findings have tests of their own
    shown = BrowsedRecording(
        replace(load(trace_path(TINY)), source=f"{TINY}.pickle.xz")
    )  # the folder is not in the picture
    app = BrowseApp(recording=shown, settings=Settings(theme=theme), few_colours=False, remember=False)

    async def prepare(pilot: Pilot[int]) -> None:
        await until(lambda: isinstance(app.screen, MainScreen))
        await hit(pilot, number)
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=prepare)
