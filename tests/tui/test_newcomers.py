"""What a newcomer stumbled over: text cut without a sign, jumps that are remembered, words that say too much."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from browser_cases import TINY, hit, main_screen, open_app, recording, running, settle, text_of, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.data.coloring import MODES, coloring
from memtrace_tui.data.difference import category_lines
from memtrace_tui.data.findings import whatif_lines
from memtrace_tui.data.lines import Goto
from memtrace_tui.data.query import parse
from memtrace_tui.data.rows import AllocationTable
from memtrace_tui.dialogs import Ask, Details
from memtrace_tui.look import ScreenLook
from memtrace_tui.palette import DARK
from memtrace_tui.settings import Settings
from memtrace_tui.views import help_lines
from memtrace_tui.views.allocations import AllocationsView
from memtrace_tui.widgets.bars import FilterBar
from memtrace_tui.widgets.base import Lines
from memtrace_tui.widgets.chart import Chart
from memtrace_tui.widgets.tree import CallTree
from textual.command import CommandPalette

from memtrace.answers.diff.diff import diff
from memtrace.answers.simulate import Answer, Run
from memtrace.errors import MemtraceError
from memtrace.units import format_bytes

OOM = "llama2-7b_oom-first-step"
SIZES = [(80, 24), (160, 48)]


# -- nothing is cut without a sign


def test_spans_that_do_not_fit_end_with_a_sign() -> None:
    look = ScreenLook(DARK)
    assert look.spans([("abc", "text"), ("def", "dim")], 6).text == "abcdef"
    assert look.spans([("abc", "text"), ("def", "dim")], 5).text == "abcd…"
    assert look.spans([("名前名前", "text")], 4).cell_length == 4
    assert look.spans([("abc", "text")], 0).text == ""


@pytest.mark.parametrize("size", [(60, 20), *SIZES])
async def test_the_call_tree_shows_counts_and_line_numbers_whole(size: tuple[int, int]) -> None:
    async with open_app(TINY, size) as pilot:
        await hit(pilot, "5", "e")  # everything open: deep frames, too
        await settle(pilot)
        tree = main_screen(pilot).view.query_one(CallTree)
        assert len(tree.nodes) > 20 and max(node.depth for node in tree.nodes) > 5
        for row, node in enumerate(tree.nodes):
            text = tree.draw_row(row, tree.size.width - 1, False).text
            assert text.rstrip().endswith(f"  ×{node.count:,}")
            place = node.label.partition(" ")[0] if node.frame >= 0 else ""
            if place:
                assert re.search(rf"{re.escape(place.rpartition('.')[2])}  ×", text), text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(80, 24), (118, 30)])
async def test_the_legend_of_the_map_is_whole(mode: str, size: tuple[int, int]) -> None:
    async with open_app(OOM, size, Settings(coloring=mode)) as pilot:
        await hit(pilot, "3")
        await settle(pilot)
        legend = main_screen(pilot).view.query_one("#legend", Lines)
        text = "\n".join(legend.render_line(y).text for y in range(legend.size.height))
        provider = main_screen(pilot).session.provider
        colours = coloring(provider, provider.layout(main_screen(pilot).session.event), mode)
        present = set(colours.codes.tolist())
        assert "…" not in text
        assert any(
            all(f"█ {label}" in text for code, label in enumerate(labels) if code in present)
            for labels in (colours.labels, colours.short)
        ), text


@pytest.mark.parametrize("size", [(80, 24), (118, 30), (160, 48)])
async def test_what_pins_a_segment_is_named_whole(size: tuple[int, int]) -> None:
    async with open_app(OOM, size) as pilot:
        await hit(pilot, "3")
        await settle(pilot)
        pane = main_screen(pilot).view.query_one("#details", Lines)
        pins = main_screen(pilot).session.report.fragmentation.pinned_segments[0].pinned_by
        assert pins and all(len(line.plain) <= pane.size.width - 1 for line in pane.lines)
        for pin in pins[:12]:
            assert f"/{pin.subcategory} ".replace("_", " ") in pane.text


@pytest.mark.parametrize("size", [(118, 30), (120, 40), (200, 50)])
async def test_side_panes_fit(size: tuple[int, int]) -> None:
    async with open_app(OOM, size) as pilot:
        for key in "148":
            await hit(pilot, key)
            await settle(pilot)
            for pane in main_screen(pilot).view.query(Lines):
                if pane.display and pane.has_class("side"):
                    assert pane.row_count and all(len(line.plain) <= pane.size.width for line in pane.lines)


@pytest.mark.parametrize("width", [80, 118, 160])
async def test_without_colours_the_timeline_says_what_its_letters_mean(width: int) -> None:
    async with open_app(OOM, (width, 24), plain=True) as pilot:
        await hit(pilot, "2")
        await settle(pilot)
        chart = main_screen(pilot).view.query_one(Chart)
        lines = [chart.render_line(y).text for y in range(chart.size.height)]
        assert "B base" in lines[0] and "L lora" in lines[0] and "…" not in lines[0]
        assert re.search("[blartf]", "".join(line[10:] for line in lines[2:-3]))
        assert "lower case: at times" in lines[-1] and "·: reserved" in lines[-1]
    async with open_app(OOM, (width, 24)) as pilot:
        await hit(pilot, "2")
        assert "lower case" not in text_of(pilot)


# -- dialogs and keys


@pytest.mark.parametrize("size", SIZES)
async def test_the_command_palette_shows_its_commands(size: tuple[int, int]) -> None:
    async with open_app(TINY, size) as pilot:
        await hit(pilot, "ctrl+p")
        assert isinstance(pilot.app.screen, CommandPalette)
        await until(lambda: "Everywhere" in _after_settling(pilot))
        await hit(pilot, *"show stacks")
        await until(lambda: "Show Stacks" in _after_settling(pilot))
        await hit(pilot, "enter")
        await until(lambda: main_screen(pilot).current == "stacks")


def _after_settling(pilot: Any) -> str:
    pilot.app.screen._on_timer_update()
    return text_of(pilot)


async def test_the_command_palette_names_each_action_once() -> None:
    async with open_app(TINY) as pilot:
        commands = list(pilot.app.get_system_commands(main_screen(pilot)))
        titles = [command.title for command in commands]
        assert len(set(titles)) == len(titles)
        assert not any("MainScreen" in command.help or "copy_text" in command.help for command in commands)


async def test_a_place_that_is_none_is_said_in_the_words_of_the_dialog() -> None:
    provider = recording(TINY).provider()
    for wrong in ("banana", "99999999", "inf%", "1e999%", "nan%", "step x", "-7"):
        with pytest.raises(MemtraceError) as caught:
            provider.named(wrong)
        assert "--at" not in str(caught.value)
    async with open_app(TINY) as pilot:
        await hit(pilot, "colon", *["backspace"] * 8, *"banana", "enter")
        await settle(pilot)
        assert isinstance(pilot.app.screen, Ask)
        text = " ".join(text_of(pilot).replace("│", "").split())
        assert "'banana'" in text
        for word in ("start", "end", "50%", "step 3", "reserved-peak"):
            assert word in text
        await hit(pilot, "escape")


async def test_the_key_of_the_comparison_says_that_it_needs_two_files() -> None:
    async with open_app(TINY) as pilot:
        await hit(pilot, "7")
        assert [n.message for n in pilot.app._notifications] == [
            "This screen compares: A here, 7 elsewhere; or memtrace browse BEFORE AFTER"
        ]
        assert main_screen(pilot).current == "overview"


@pytest.mark.parametrize("key", list("12345"))
async def test_help_names_tab_once_and_fits(key: str) -> None:
    async with open_app(TINY) as pilot:
        await hit(pilot, key)
        lines = [line.plain for line in help_lines(main_screen(pilot), main_screen(pilot).view, 70)]
        assert sum(line.strip().startswith("tab ") for line in lines) == 1
        await hit(pilot, "question_mark")
        shown = pilot.app.screen.query_one("#dialog-lines", Lines)
        room = shown.size.width - 1  # the scroll bar
        assert shown.row_count > shown.size.height and all(len(line.plain) <= room for line in shown.lines[:6])
        await hit(pilot, "escape")


async def test_a_file_that_fails_while_it_loads_leaves_only_the_message(tmp_path: Any) -> None:
    path = tmp_path / "broken.pickle"
    path.write_bytes(b"\x80\x02no snapshot at all")
    app = BrowseApp(str(path), remember=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: isinstance(app.screen, Details))
        await settle(pilot)
        assert "esc cancels" not in text_of(pilot) and "reading" not in text_of(pilot)
        app.simulate_key("escape")
        await until(lambda: app.return_value is not None)


# -- what is remembered


async def test_jumps_are_not_remembered() -> None:
    app = BrowseApp(recording=recording(TINY), settings=Settings(group="site"), few_colours=False)
    async with running(app, (100, 30)) as pilot:
        session = main_screen(pilot).session
        await hit(pilot, "3", "w")
        assert (session.coloring, session.segment_sort) == ("pins", "free")
        await main_screen(pilot).open(Goto("allocations", filter="category:lora"))
        assert session.group == "none"
        await hit(pilot, "q")
        await until(lambda: app.return_value is not None)
    stored = Settings.load()
    assert (stored.coloring, stored.segment_sort, stored.group) == ("category", "address", "site")


async def test_choices_are_and_w_goes_back_to_them() -> None:
    app = BrowseApp(recording=recording(TINY), few_colours=False)
    async with running(app, (100, 30)) as pilot:
        session = main_screen(pilot).session
        await hit(pilot, "3", "c", "s", "s", "w", "w")
        assert (session.coloring, session.segment_sort) == ("age", "share")
        await hit(pilot, "4", "g", "escape", "g", "q")
        await until(lambda: app.return_value is not None)
    stored = Settings.load()
    assert (stored.coloring, stored.segment_sort, stored.group) == ("age", "share", "category")


# -- words


async def test_findings_name_the_moment_they_are_about() -> None:
    async with open_app(OOM, (80, 40)) as pilot:
        screen = main_screen(pilot)
        await until(lambda: screen.session.explanation is not None)
        await settle(pilot)
        found = screen.session.explanation
        assert found is not None
        assert "what matters here first" in text_of(pilot) and "not at the cursor" not in text_of(pilot)
        screen.go(found[0] // 2)
        await settle(pilot)
        assert f"out of memory at event {found[0]:,}, not at the cursor" in text_of(pilot)
        assert "what matters here" not in text_of(pilot)
        await hit(pilot, "6")
        assert f"out of memory at event {found[0]:,}, not at the cursor" in text_of(pilot)


@pytest.mark.parametrize("size", SIZES)
async def test_allocated_and_requested_bytes_are_told_apart(size: tuple[int, int]) -> None:
    async with open_app(OOM, size) as pilot:
        report = main_screen(pilot).session.report
        for key in ("4", "5"):
            await hit(pilot, key)
            await settle(pilot)
            text = text_of(pilot)
            assert re.search(rf"alloc(\.|ated) {re.escape(format_bytes(report.allocated_bytes))}", text)
            assert re.search(rf"res(\.|erved) {re.escape(format_bytes(report.reserved_bytes))}", text)
            assert f"{format_bytes(report.requested_bytes)} requested" in text


@pytest.mark.parametrize("size", [(40, 12), (60, 20)])
async def test_a_narrow_cursor_line_cuts_no_number_silently(size: tuple[int, int]) -> None:
    async with open_app(OOM, size) as pilot:
        text = text_of(pilot).split("\n")[1 if size[1] < 16 else 2]
        assert format_bytes(main_screen(pilot).session.report.reserved_bytes) in text or text.rstrip().endswith("…")


async def test_the_first_filter_that_is_suggested_keeps_what_it_says() -> None:
    async with open_app(TINY) as pilot:
        await hit(pilot, "4", "slash")
        view = main_screen(pilot).view
        assert isinstance(view, AllocationsView)
        bar = main_screen(pilot).query_one(FilterBar)
        assert len(bar.placeholder) < 76
        first = bar.placeholder.removeprefix("filter: ").split()[0]
        await hit(pilot, *first, "enter")
        table = AllocationTable(main_screen(pilot).session.provider)
        kept = {table.provider.purposes[table.rule[row]].split("/")[0] for row in view.rows.tolist()}
        assert len(view.rows) and kept == {first.removeprefix("category:")}
        assert "(stack, too)" not in text_of(pilot)
        await hit(pilot, "slash", "ctrl+u", *"lora", "enter")
        assert "filter lora  (stack, too)" in text_of(pilot)
        assert parse("lora")[0].field == "any"


def test_no_change_is_an_equals_sign_as_in_the_command() -> None:
    provider = recording(TINY).provider()
    at = provider.at(provider.start.event)
    lines = category_lines(diff(provider.analysis, provider.analysis, at, at), 80)
    assert all(line.plain.split("│")[0].rstrip().endswith(" =") for line in lines[1:])


# -- what-if replays


def _run(conf: str, **changes: object) -> Run:
    first = cast(Any, SimpleNamespace(
        conf=conf, edits=(), capacity_bytes=1 << 34, peak_reserved_bytes=5 << 30, first_oom_event=None, fits=True,
        fits_always=True, survived_oom_events=(),
    ))  # fmt: skip
    for name, value in changes.items():
        setattr(first, name, value)
    first.outcome = Run.outcome.fget(first)  # type: ignore[attr-defined]
    return cast(Run, first)


RUNS = (
    _run("", first_oom_event=250_595, fits=False, fits_always=False),
    _run("expandable_segments:True", survived_oom_events=(250_595,), peak_reserved_bytes=4 << 30),
    _run("garbage_collection_threshold:0.6", survived_oom_events=(250_595,)),
    _run("garbage_collection_threshold:0.8"),
    _run(
        "max_split_size_mb:128,garbage_collection_threshold:0.8,roundup_power2_divisions:16,pinned_use_something:True"
    ),
    _run("max_split_size_mb:64", fits_always=False, survived_oom_events=(1,)),
    _run("x", first_oom_event=-1, fits=False, fits_always=False),
)


@pytest.mark.parametrize("width", [76, 120])
def test_whatif_says_what_simulate_says_and_names_settings_whole(width: int) -> None:
    answer = cast(Answer, SimpleNamespace(runs=RUNS, notes=("a note",)))
    lines = [line.plain for line in whatif_lines(answer, width)]
    text = "\n".join(lines)
    rows = [line for line in lines[2:] if "GiB" in line]
    assert len(rows) == len(RUNS)
    for run, row in zip(RUNS, rows, strict=True):
        assert row.endswith("   " + run.outcome)
        assert run.conf in re.sub(r",\n +", ",", text)
    assert "fits yes" not in text and " yes" not in text and "…" not in text
    assert rows[2].split("GiB")[1].split()[0] == "="
    assert all(len(line) <= width for line in lines if not re.search("luck|before", line))


async def test_what_is_wrong_with_a_filter_is_said_once_and_the_cursor_stays_in_sight() -> None:
    async with open_app(TINY, (100, 30)) as pilot:
        await hit(pilot, "4", "slash", *"categry:lora")
        assert text_of(pilot).count("did you mean category:lora?") == 1
        assert "reserved" in text_of(pilot).split("\n")[2]
