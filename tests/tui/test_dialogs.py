"""Loading, errors, dialogs, files that are written, settings: what is not one of the screens."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from browser_cases import TINY, hit, main_screen, open_app, recording, running, settle, text_of, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.dialogs import Ask, Details, LoadingScreen
from memtrace_tui.look import ScreenLook
from memtrace_tui.main_screen import MainScreen
from memtrace_tui.palette import PALETTES, PHASE_LETTERS, SIXTEEN, colour
from memtrace_tui.provider import BrowsedRecording
from memtrace_tui.settings import Settings, config_path
from memtrace_tui.views import VIEWS, help_lines
from support import trace_path
from textual import events
from textual.binding import Binding

from memtrace.cli import main
from memtrace.cli.browse import run as run_browse
from memtrace.errors import MissingDependencyError, UsageError
from memtrace.render.words import MARKS
from memtrace.snapshot.decoder.columns import TraceColumns

SHOWN = [view for view in VIEWS if view != "diff"]


async def test_loading_shows_progress_then_the_overview() -> None:
    app = BrowseApp(str(trace_path(TINY)), remember=False)
    async with app.run_test(size=(80, 24)) as pilot:
        assert isinstance(app.screen, (LoadingScreen, MainScreen))
        await until(lambda: isinstance(app.screen, MainScreen))
        await settle(pilot)
        assert "base weights" in text_of(pilot)
    assert app.error is None


async def test_what_the_file_ends_with_is_shown_before_its_events_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, was_shown = threading.Event(), threading.Event()
    begin = TraceColumns.__init__

    def slow(self: TraceColumns, *args: object) -> None:
        was_shown.set()
        go_on.wait(10)
        begin(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TraceColumns, "__init__", slow)
    app = BrowseApp(str(trace_path(TINY)), remember=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(was_shown.is_set)
        await settle(pilot)
        shown = text_of(pilot)
        for key in ("colon", "3", "0", "0", "enter"):  # typed ahead
            app.post_message(events.Key(key, {"colon": ":", "enter": "\r"}.get(key, key)))
        go_on.set()
        await until(lambda: isinstance(app.screen, MainScreen))
        await until(lambda: main_screen(pilot).session.event == 300)
    assert "reading" in shown and "the file ends with" in shown and "reserved in" in shown and " events" not in shown


async def test_loading_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(*args: object, on_progress: object = None, **kwargs: object) -> BrowsedRecording:
        go_on.wait(10)
        args[3](0.5)  # type: ignore[operator]
        raise AssertionError("the thread went on after it was told to stop")

    monkeypatch.setattr(BrowsedRecording, "open", slow)
    app = BrowseApp("a.pickle", remember=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: isinstance(app.screen, LoadingScreen))
        await settle(pilot)
        assert "a.pickle" in text_of(pilot) and "esc" in text_of(pilot)
        app.simulate_key("escape")
        await until(lambda: app.return_value is not None)
        go_on.set()
    assert app.return_value == 130 and app.error is None


@pytest.mark.parametrize(("content", "word"), [(b"no snapshot at all", "not"), (b"", "empty"), (None, "no such file")])
async def test_a_file_that_cannot_be_read_is_a_dialog_and_an_exit_code(
    content: bytes | None, word: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.pickle"
    if content is not None:
        path.write_bytes(content)
    app = BrowseApp(str(path), remember=False)
    async with app.run_test(size=(100, 24)) as pilot:
        await until(lambda: isinstance(app.screen, Details))
        await settle(pilot)
        assert word in " ".join(text_of(pilot).replace("│", "").split())
        app.simulate_key("escape")
        await until(lambda: app.return_value is not None)
    assert app.return_value == 3


async def test_a_fault_while_drawing_is_a_dialog_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    app = BrowseApp(recording=recording(TINY), settings=Settings(), remember=False)
    async with running(app, (100, 30)) as pilot:
        await hit(pilot, "3")

        def broken(y: int) -> object:
            raise RuntimeError("drawing went wrong")

        monkeypatch.setattr(app.screen.query_one("#segmap"), "draw_line", broken)
        app.screen.query_one("#segmap").refresh()
        await until(lambda: isinstance(app.screen, Details))
        await settle(pilot)
        assert "RuntimeError" in text_of(pilot) and "drawing went wrong" in text_of(pilot)
        await hit(pilot, "escape", "4")  # the map still can't be drawn, which must not hold anyone there
        assert app.screen is main_screen(pilot) and main_screen(pilot).current == "allocations"


async def test_a_fault_in_an_action_is_a_dialog(monkeypatch: pytest.MonkeyPatch) -> None:
    app = BrowseApp(recording=recording(TINY), settings=Settings(), remember=False)
    async with running(app, (100, 30)) as pilot:
        monkeypatch.setattr(MainScreen, "action_oom", lambda self: 1 / 0)
        await hit(pilot, "o")
        assert isinstance(app.screen, Details) and isinstance(app.error, ZeroDivisionError)
        await hit(pilot, "escape", "2")
        assert main_screen(pilot).current == "timeline"


async def test_go_to() -> None:
    async with open_app(TINY, (100, 30)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "colon")
        assert isinstance(pilot.app.screen, Ask)
        await hit(pilot, *["backspace"] * 8, *"99%", "enter")
        assert screen.session.event == round(0.99 * (screen.session.provider.count - 1))
        await hit(pilot, "colon", *["backspace"] * 8, *"nowhere", "enter")
        assert isinstance(pilot.app.screen, Ask) and "nowhere" in text_of(pilot)
        await hit(pilot, *["backspace"] * 8, *"peak", "enter")
        assert screen.session.event == screen.session.provider.peaks[1].event


@pytest.mark.parametrize("view", SHOWN)
async def test_every_screen_saves_csv_and_svg(view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_app(TINY, (100, 30)) as pilot:
        screen = main_screen(pilot)
        await until(lambda: screen.session.explanation is not None)
        await hit(pilot, VIEWS[view].key, "x", "enter")
        with (tmp_path / f"memtrace-{view}.csv").open() as file:
            rows = list(csv.reader(file))
        assert len(rows) > 1 and len({len(row) for row in rows}) == 1
        if view == "overview":
            report = screen.session.report
            assert {f"{c}/{s}": int(size) for c, s, size in rows[1:]} == dict(report.subcategories)
        await hit(pilot, "x", "enter")
        assert isinstance(pilot.app.screen, Ask) and "exists already" in text_of(pilot)
        await hit(pilot, "escape", "X", "enter")
        assert (tmp_path / f"memtrace-{view}.svg").read_text().startswith("<svg")


async def test_copying_goes_through_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(BrowseApp, "copy_to_clipboard", lambda self, text: copied.append(text))
    async with open_app(TINY, (100, 30)) as pilot:
        for view in SHOWN:
            await hit(pilot, VIEWS[view].key, "y")
    assert len(copied) == len(SHOWN) and all(copied)


async def test_help_names_every_key() -> None:
    async with open_app(TINY, (100, 30)) as pilot:
        screen = main_screen(pilot)
        for view in SHOWN:
            await hit(pilot, VIEWS[view].key)
            text = "\n".join(line.plain for line in help_lines(screen, screen.view, 90))
            for cls in (type(screen.view), type(screen.view.main()), MainScreen):
                for binding in vars(cls).get("BINDINGS", ()):
                    assert isinstance(binding, Binding)
                    if binding.show:
                        name = pilot.app.get_key_display(binding).split(",")[0]
                        assert name in text, (view, binding)


async def test_the_command_palette_knows_every_screen() -> None:
    async with open_app(TINY, (100, 30)) as pilot:
        screen = main_screen(pilot)
        commands = list(pilot.app.get_system_commands(screen))
        titles = [command.title for command in commands]
        assert all(f"Show {view.title}" in titles for view in VIEWS.values())
        assert all((e.load().view, e.load().title) == (view, e.title) for view, e in VIEWS.items())
        await next(c for c in commands if c.title == "Show Segments").callback()  # type: ignore[misc]
        assert screen.current == "segments"
        next(c for c in commands if c.title == "Theme: Light").callback()
        assert pilot.app.theme == "memtrace-light"


async def test_two_files_open_the_diff() -> None:
    first, second = recording(TINY), recording("no-stacks")
    app = BrowseApp(recording=first, settings=Settings(), remember=False)
    app._start = lambda one, other=None: BrowseApp._start(app, one, second)  # type: ignore[method-assign]
    async with running(app, (120, 40)) as pilot:
        screen = main_screen(pilot)
        assert screen.current == "diff"
        await settle(pilot)
        difference = screen.session.difference()
        assert difference.delta.reserved_bytes == 0
        assert difference.sentence.split()[0] in text_of(pilot)
        await hit(pilot, "comma", "w")
        assert screen.session.swapped and screen.session.provider is second.provider()
        await hit(pilot, "1", "2", "3", "7", "w", "x", "escape", "y")
        assert screen.session.provider is first.provider()
    assert app.error is None


# -- settings and palettes


async def test_choices_are_remembered() -> None:
    app = BrowseApp(recording=recording(TINY), few_colours=False)
    async with running(app, (100, 30)) as pilot:
        await hit(pilot, "t", "3", "c", "5", "v", "q")
        await until(lambda: app.return_value is not None)
    stored = Settings.load()
    assert (stored.theme, stored.coloring, stored.inverted) == ("memtrace-light", "age", True)


def test_settings_fail_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load() == Settings()
    config_path().parent.mkdir(parents=True)
    for content in ("not json", "[1]", '{"theme": 7, "fold": "no", "axis": "time", "unknown": 1}'):
        config_path().write_text(content)
        loaded = Settings.load()
        assert loaded.theme == Settings().theme and loaded.fold is True
    assert loaded.axis == "time"
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    Settings().save(blocked / "browser.json")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(blocked))
    Settings().save()
    Settings(axis="time").save(tmp_path / "deep" / "browser.json")
    assert json.loads((tmp_path / "deep" / "browser.json").read_text())["axis"] == "time"


def test_palettes_know_every_role_and_tell_categories_apart() -> None:
    for palette in PALETTES.values():
        assert set(palette.category) == set(MARKS) and set(palette.phase) == set(PHASE_LETTERS)
        assert len(set(palette.category.values())) == len(MARKS)
        for role in ("text", "dim", "title", "hole", "unused", "cat:lora", "faded:cat|lora", "shade:ramp|2", "heat:5",
                     "hue:3", "phase:forward", "fill:cat|lora", "select"):  # fmt: skip
            assert len(colour(palette, role)) == 7
            ScreenLook(palette).style(role, "panel")
    ansi = {"00", "55", "aa", "ff"}
    for value in (*SIXTEEN.category.values(), *SIXTEEN.phase.values(), SIXTEEN.background, SIXTEEN.hole):
        assert {value[i : i + 2] for i in (1, 3, 5)} <= ansi
    assert len({mark.letter for mark in MARKS.values()}) == len(MARKS)


# -- the command


def test_without_a_terminal_the_command_says_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["browse", str(trace_path(TINY))]) == UsageError.exit_code
    assert "memtrace report" in capsys.readouterr().err
    assert main([str(trace_path(TINY))]) == UsageError.exit_code  # memtrace FILE
    assert "browse needs a terminal" in capsys.readouterr().err


def test_serving_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    monkeypatch.delitem(sys.modules, "memtrace_tui.serving", raising=False)  # another test may have imported it
    monkeypatch.delattr("memtrace_tui.serving", raising=False)
    args = argparse.Namespace(
        serve=True,
        file="a",
        other=None,
        device=None,
        at=None,
        rules=None,
        host="localhost",
        port=1,
        events=None,
        steps=None,
    )
    with pytest.raises(MissingDependencyError, match="serve"):
        run_browse(args)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("is_closed", [False, True], ids=["the quit key", "the terminal goes away"])
async def test_in_a_real_terminal_it_starts_and_ends(tmp_path: Path, is_closed: bool) -> None:
    """Also where the shell (nohup) has the signal of a closed terminal ignored."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        if is_closed:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        environment = {**os.environ, "TERM": "xterm-256color", "XDG_CONFIG_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "memtrace", "browse", str(trace_path(TINY))]
        os.execvpe(command[0], command, environment)
    os.set_blocking(terminal, False)
    seen = b""

    def read() -> bytes:
        nonlocal seen
        with contextlib.suppress(OSError):  # nothing there yet, or the other end is closed
            seen += os.read(terminal, 1 << 16)
        return seen

    await until(lambda: b"base weights" in read())
    if is_closed:
        os.close(terminal)
    else:
        os.write(terminal, b"q")
    for _ in range(1000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        await asyncio.sleep(0.01)
        read()
    if not is_closed:
        os.close(terminal)
    elif not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert done and os.waitstatus_to_exitcode(status) == (-signal.SIGHUP if is_closed else 0)
