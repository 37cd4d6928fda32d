"""What the tests of the terminal browser share: recordings, real and made up, and the application under a pilot."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import lzma
import pickle
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from memtrace_tui.app import BrowseApp
from memtrace_tui.dialogs import Awaited
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.provider import BrowsedRecording
from memtrace_tui.settings import Settings
from support import trace_path
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot

from memtrace.snapshot.load import from_raw

TINY = "tiny-llama_3-steps"
CASES = (
    TINY, "llama2-7b_oom-first-step", "llama2-7b_ring-truncated", "empty", "no-trace", "no-stacks", "two-devices",
    "hostile",
)  # fmt: skip


@lru_cache(maxsize=2)
def raw(name: str = TINY) -> dict[str, Any]:
    """A bundled recording as PyTorch pickled it. Loading empties the lists, so use a copy."""
    return pickle.loads(lzma.decompress(trace_path(name).read_bytes()))


def without_stacks() -> dict[str, Any]:
    """A real recording without a single frame."""
    snapshot = copy.deepcopy(raw())
    for event in snapshot["device_traces"][0]:
        event["frames"] = []
    for segment in snapshot["segments"]:
        segment["frames"] = []
        for block in segment["blocks"]:
            block["frames"] = []
    return snapshot


def two_devices() -> dict[str, Any]:
    """The same run on two devices, the second recorded for half as long and without its last segments."""
    snapshot = copy.deepcopy(raw())
    second = copy.deepcopy(raw())
    for segment in second["segments"]:
        segment["device"] = 1
    snapshot["segments"] += second["segments"]
    snapshot["device_traces"] = [snapshot["device_traces"][0], second["device_traces"][0]]
    return snapshot


def hostile() -> dict[str, Any]:
    """Names that try to drive the terminal, a wide script, markup, and an action nobody knows."""
    snapshot = copy.deepcopy(raw())
    names = ["\x1b[31mred\x1b[0m", "[bold]markup[/bold]", "名前" * 40, "a\nb\tc", "\u202eright to left", "x" * 5000]
    for number, event in enumerate(snapshot["device_traces"][0]):
        event["frames"] = [
            {**frame, "name": names[(number + i) % len(names)], "filename": "/a\x1b]0;title\x07/b.py"}
            for i, frame in enumerate(event["frames"][:3])
        ]
    snapshot["device_traces"][0].append({"action": "\x1b[2Jclear", "addr": 1, "size": 2, "stream": 0, "frames": []})
    return snapshot


MADE_UP: dict[str, Callable[[], dict[str, Any]]] = {
    "empty": lambda: {"segments": [], "device_traces": [[]]},
    "no-trace": lambda: {**copy.deepcopy(raw()), "device_traces": [[]]},
    "no-stacks": without_stacks,
    "two-devices": two_devices,
    "hostile": hostile,
}


@lru_cache(maxsize=len(CASES) + 2)
def recording(name: str) -> BrowsedRecording:
    """A recording of ``CASES`` or a bundled one, analysed once a process."""
    if name in MADE_UP:
        return BrowsedRecording(from_raw(MADE_UP[name](), f"{name}.pickle"))
    return BrowsedRecording.open(trace_path(name))


@contextlib.asynccontextmanager
async def running(app: BrowseApp, size: tuple[int, int]) -> AsyncIterator[Pilot[int]]:
    """The application with its main screen up."""
    async with app.run_test(size=size) as pilot:
        await until(lambda: isinstance(app.screen, MainScreen))
        await settle(pilot)
        yield pilot


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something a thread brings about."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


@contextlib.asynccontextmanager
async def open_app(
    case: str, size: tuple[int, int] = (80, 24), settings: Settings | None = None, plain: bool = False
) -> AsyncIterator[Pilot[int]]:
    """The browser over one of the recordings; an error dialog fails the test."""
    app = BrowseApp(recording=recording(case), settings=settings or Settings(), plain=plain, few_colours=False,
                    remember=False)  # fmt: skip
    async with running(app, size) as pilot:
        yield pilot
    assert app.error is None, f"an error dialog came up: {app.error!r}"


async def hit(pilot: Pilot[int], *keys: str, draw: bool = True) -> None:
    """Press keys, each fully handled and (with ``draw``) drawn before the next. Unlike ``pilot.press`` it waits for
    messages, not for the processor to fall idle, which on a busy machine takes a tenth of a second a key."""
    with contextlib.nullcontext() if draw else patch.object(Awaited, "_compositor_refresh", lambda _: None):
        for key in keys:
            name = _character_to_key(key) if len(key) == 1 else key
            pilot.app.post_message(events.Key(name, key if len(key) == 1 else None))
            await settle(pilot, draw)


async def settle(pilot: Pilot[int], draw: bool = True) -> None:
    """Wait until every widget has handled what it was told, and what followed from it; then draw."""
    quiet = 0
    while quiet < 3:  # a message may be between two queues
        await asyncio.sleep(0)
        nodes = [pilot.app, *pilot.app.screen_stack, *pilot.app.screen.walk_children()]
        is_waiting = any(node.message_queue_size or node._next_callbacks for node in nodes)
        quiet = 0 if is_waiting or getattr(pilot.app, "is_busy", False) else quiet + 1
    if draw:
        pilot.app.screen._on_timer_update()


def main_screen(pilot: Pilot[int]) -> MainScreen:
    """The screen all views live on."""
    return next(screen for screen in pilot.app.screen_stack if isinstance(screen, MainScreen))


def text_of(pilot: Pilot[int]) -> str:
    """What is on screen, as text."""
    return "\n".join("".join(segment.text for segment in line) for line in pilot.app.screen._compositor.render_strips())
