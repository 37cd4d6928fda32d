"""The live view, driven by keys, on a recorded run that is played as if it ran."""

from __future__ import annotations

from typing import Any

from memtrace_tui.live import LiveApp, LiveScreen
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.widgets.base import Lines
from support import analysis, trace_path
from textual.pilot import Pilot

from memtrace.live.replay import PlayedRun
from memtrace.live.state import LiveView

LEAK = "llama2-7b_kept-graphs"
GIB = 1 << 30


class Played(LiveApp):
    """Plays at full speed; notifications are kept."""

    def __init__(self, name: str = LEAK) -> None:
        super().__init__(PlayedRun(analysis(name), None, 6 * GIB), 0.0, 0.0, dies=40)
        self.watched.state.name = str(trace_path(name))
        self.said: list[str] = []

    def notify(self, message: str, **options: Any) -> None:
        self.said.append(message)


async def until(pilot: Pilot[int], holds: Any) -> None:
    for _ in range(600):
        await pilot.pause(0.05)
        if holds():
            return
    raise AssertionError("it never came to that")


def page(app: LiveApp) -> str:
    return app.screen_stack[1].query_one("#live", Lines).text


def ended(app: LiveApp) -> bool:
    view = app._live.view
    return isinstance(view, LiveView) and view.ended


async def test_a_replay_shows_what_moves_and_what_grows() -> None:
    app = Played()
    async with app.run_test(size=(110, 40)) as pilot:
        await until(pilot, lambda: ended(app))
        text = page(app)
    assert "activations" in text and "fragmentation" in text and "largest free block" in text
    assert "a step  activations/checkpoint_input  llama/modeling_llama.py" in text
    assert "backward 5.36 GiB" in text and "of 6.00 GiB" in text and "it dies in step 40" in text
    assert app._live.view is not None and app._live.view.step == 11


async def test_a_snapshot_is_walked_in_the_browser_and_q_comes_back() -> None:
    app = Played()
    async with app.run_test(size=(110, 40)) as pilot:
        await until(pilot, lambda: ended(app))
        await pilot.press("s")
        await until(pilot, lambda: isinstance(app.screen, MainScreen))
        await pilot.press("2", "q")
        await until(pilot, lambda: isinstance(app.screen, LiveScreen))
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)
    assert app.error is None and app.crash is None


async def test_the_other_keys() -> None:
    app = Played()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: ended(app))
        await pilot.press("space", "b", "e", "t", "question_mark")
        await pilot.pause(0.2)
        assert len(app.screen_stack) == 3
        await pilot.press("escape", "m")
        await pilot.pause(0.3)
        await pilot.press(*"load", "enter")
        await pilot.pause(0.2)
        assert isinstance(app.screen, LiveScreen) and app.screen.is_held
        app._answer({"do": "stacks", "error": "[bold]a recording"})
        app._answer({"do": "phase", "phase": "load"})
        app._answer({"do": "blocks", "wait_s": 3})
    assert app.error is None and app.crash is None
    assert "Held." in app.said and "stacks: [bold]a recording" in app.said
