"""Every key and every entry of the command palette, on every screen: at three sizes, with one file, with two, with
one without a trace. Nothing may fail; keys typed ahead are not lost; what crashes leaves a terminal behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from browser_cases import TINY, hit, main_screen, open_app, recording, running, settle, text_of, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.dialogs import Details
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.settings import Settings
from memtrace_tui.views import VIEWS
from memtrace_tui.views.allocations import AllocationsView
from memtrace_tui.widgets.base import Lines
from support import trace_path
from textual import events
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import Input

SIZES = [(80, 24), (120, 40), (200, 60)]
FILES = {"one": (TINY, None), "two": (TINY, "no-stacks"), "no trace": ("no-trace", None)}
TRIED = [(files, size) for files in FILES for size in SIZES]
LEAVING = {"q", "ctrl+q", "ctrl+c"}


def browser(files: str) -> BrowseApp:
    first, second = FILES[files]
    app = BrowseApp(recording=recording(first), settings=Settings(), few_colours=False, remember=False)
    if second is not None:
        other = recording(second)
        app._start = lambda one, _=None: BrowseApp._start(app, one, other)  # type: ignore[method-assign]
    return app


async def back(pilot: Pilot[int], view: str) -> None:
    """The view again, whatever a key opened; the way there is drawn with what the next key does."""
    for _ in range(4):
        if pilot.app.screen is main_screen(pilot):
            break
        await hit(pilot, "escape", draw=False)
    screen = main_screen(pilot)
    assert pilot.app.screen is screen
    if screen.focused is not None and screen.focused.id is None:
        await hit(pilot, "escape", draw=False)
    screen.stop()
    if screen.current != view:
        await hit(pilot, VIEWS[view].key, draw=False)
    screen.set_focus(screen.view.main())


def views_of(screen: MainScreen) -> list[str]:
    return [view for view in VIEWS if view != "diff" or screen.session.compares]


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize(("files", "size"), TRIED)
async def test_every_key(
    files: str, size: tuple[int, int], part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every third screen, beginning with ``part``."""
    monkeypatch.chdir(tmp_path)
    app = browser(files)
    async with running(app, size) as pilot:
        screen = main_screen(pilot)
        pressed = 0
        for number, view in [*enumerate(views_of(screen))][part::3]:
            await back(pilot, view)
            everywhere = set(screen._bindings.key_to_bindings)
            own = [key for key in screen.active_bindings if key not in everywhere | LEAVING]
            shared = sorted(everywhere - LEAVING)[(number + SIZES.index(size)) % 3 :: 3]  # over the sizes, all of them
            for key in [*own, *shared, "enter"]:
                await hit(pilot, key)
                await back(pilot, view)
                pressed += 1
                assert app.error is None, f"{key} on {view}: {app.error!r}"
        assert pressed > 25
    assert app.crash is None


@pytest.mark.parametrize(("files", "size"), TRIED)
async def test_every_palette_entry(
    files: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The palette is drawn; an entry is a screen, a palette of colours, or what a key of the screen does, which another
    test presses; each of them does what it says without failing."""
    monkeypatch.chdir(tmp_path)
    app = browser(files)
    combination = TRIED.index((files, size))
    async with running(app, size) as pilot:
        screen = main_screen(pilot)
        views = views_of(screen)
        await back(pilot, views[combination % len(views)])
        await hit(pilot, "ctrl+p")
        assert isinstance(app.screen, CommandPalette)
        await until(lambda: "Everywhere" in settled(pilot))
        await hit(pilot, "escape")
        for number, view in enumerate(views):
            await back(pilot, view)
            commands = [c for c in app.get_system_commands(screen) if not c.title.startswith("Quit")]
            nodes = (screen.view.main(), screen.view, screen)
            keys = {b.description for node in nodes for bs in node._bindings.key_to_bindings.values() for b in bs}
            named = [c.title for c in commands if not c.title.startswith(("Show ", "Theme: "))]
            assert len(named) > 20 and {title.replace("\\[", "[").rpartition("  (")[0] for title in named} <= keys
            for command in commands[(number + combination) % len(TRIED) :: len(TRIED)]:  # in all, each once
                result = command.callback()
                if result is not None:
                    await result
                await settle(pilot)
                await back(pilot, view)
                assert app.error is None, f"{command.title} on {view}: {app.error!r}"
    assert app.crash is None


def settled(pilot: Pilot[int]) -> str:
    """What is on screen once it is drawn."""
    pilot.app.screen._on_timer_update()
    return text_of(pilot)


# -- keys typed ahead


async def test_keys_typed_ahead_are_not_lost() -> None:
    async with open_app(TINY, (100, 30)) as pilot:
        screen = main_screen(pilot)

        def paste(keys: str) -> None:
            for key in keys:
                name = {":": "colon", "\n": "enter", "/": "slash", ".": "full_stop"}.get(key, key)
                pilot.app.post_message(events.Key(name, "\r" if key == "\n" else key))

        await hit(pilot, "8")
        screen.session.event = 0
        paste(":")
        await until(lambda: isinstance(pilot.app.focused, Input))
        pilot.app.focused.value = ""  # type: ignore[union-attr]
        paste("300\n..")
        await until(lambda: screen.session.event == 302)
        paste("4/lora\n8")
        await until(lambda: screen.current == "events" and screen.session.filter == "lora")
        assert screen.session.event == 302


# -- dialogs, links


async def test_details_unfold_copy_and_lead_on(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(BrowseApp, "copy_to_clipboard", lambda self, text: copied.append(text))
    async with open_app(TINY, (100, 40)) as pilot:
        await hit(pilot, "4")
        view = main_screen(pilot).view
        assert isinstance(view, AllocationsView)
        while not any("library frame" in line.plain for line in view.details(90)):
            await hit(pilot, "down")
        await hit(pilot, "enter")
        assert isinstance(pilot.app.screen, Details)
        lines = pilot.app.screen.query_one(Lines)
        folded = len(lines.lines)
        await hit(pilot, "f")
        assert len(lines.lines) > folded and not any("library frame" in line.plain for line in lines.lines)
        await hit(pilot, "y")
        assert copied and copied[0] == lines.text
        frame = next(row for row, line in enumerate(lines.lines) if getattr(line.target, "frame", None) is not None)
        lines.select(frame)
        await hit(pilot, "enter")
        await until(lambda: isinstance(pilot.app.screen, Details) and pilot.app.screen.heading == "Frame")
        assert re_path(pilot.app.screen.query_one(Lines).lines[0].plain)
        await hit(pilot, "enter")
        await until(lambda: main_screen(pilot).session.filter.startswith("stack:"))
        assert main_screen(pilot).current == "allocations"


def re_path(text: str) -> bool:
    return "/" in text and text.rstrip().rpartition(":")[2].isdigit()


async def test_back_and_forward_and_marks() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        start = screen.session.event
        await hit(pilot, "m", "x", "enter")  # a category of the overview: its allocations
        await until(lambda: screen.current == "allocations")
        filtered = screen.session.filter
        assert filtered
        await hit(pilot, "p", "alt+left")
        assert (screen.current, screen.session.filter, screen.session.event) == ("overview", "", start)
        await hit(pilot, "alt+right")
        assert (screen.current, screen.session.filter) == ("allocations", filtered)
        await hit(pilot, "8", "less_than_sign", "apostrophe", "x")
        await until(lambda: screen.current == "overview")
        assert (screen.session.filter, screen.session.event) == ("", start)


async def test_a_filter_with_a_typo_is_refused_with_what_was_meant() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        for wrong, meant in (("categry:lora", "category:lora"), ("category:loraa", "lora"), ("size>1MB9", "MiB")):
            await hit(pilot, "4", "slash", *wrong)
            assert meant in text_of(pilot), wrong
            await hit(pilot, "escape")
            assert screen.session.filter == ""


# -- a crash


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_crash_is_one_line_exit_code_1_and_a_terminal_as_it_was(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from memtrace_tui.main_screen import MainScreen\n"
        "from memtrace.cli import main\n"
        "async def broken(self, message):\n"
        "    raise RuntimeError('it broke\\x1b[31m')\n"
        "MainScreen._on_changed = broken\n"
        "from memtrace_tui.widgets.base import Changed\n"
        "MainScreen.on_mount = lambda self: self.post_message(Changed())\n"
        f"sys.exit(main(['browse', {str(trace_path(TINY))!r}]))\n"
    )
    import pty

    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_CONFIG_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    run = subprocess.Popen([sys.executable, "-c", script], stdin=child, stdout=child, stderr=child, env=environment,
                           start_new_session=True)  # fmt: skip
    os.close(child)
    seen = b""
    try:
        while chunk := os.read(parent, 1 << 16):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        if run.poll() is None and run.wait(60) is None:
            run.send_signal(signal.SIGKILL)
    assert run.returncode == 1
    after = seen.rpartition(b"\x1b[?1049l")[2]  # the screen from before is back
    assert b"memtrace: the browser failed: RuntimeError: it broke\\x1b[31m" in after
    assert b"Traceback" not in seen and after.count(b"\n") <= 3
