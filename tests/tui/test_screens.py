"""Every key on every screen, on real and made-up recordings, at several sizes; what the keys do."""

from __future__ import annotations

from typing import Any

import pytest
from browser_cases import CASES, TINY, hit, main_screen, open_app, settle, text_of, until
from memtrace_tui.data.lines import Goto
from memtrace_tui.data.query import parse
from memtrace_tui.data.rows import AllocationTable
from memtrace_tui.settings import Settings
from memtrace_tui.views.allocations import AllocationsView
from memtrace_tui.views.stacks import StacksView
from memtrace_tui.widgets.base import Drawn, Lines, Open
from memtrace_tui.widgets.chart import Chart
from memtrace_tui.widgets.segmap import BlockMap, SegMap
from memtrace_tui.widgets.table import Table
from textual import events
from textual.binding import Binding
from textual.pilot import Pilot

from memtrace.attribution.categories import Category
from memtrace.units import format_bytes

OOM = "llama2-7b_oom-first-step"
VIEWS = {
    "overview": "1", "timeline": "2", "segments": "3", "allocations": "4", "stacks": "5", "findings": "6",
    "events": "8",
}  # fmt: skip
LEAVING = {"q", "ctrl+q", "ctrl+c"}
ASKING = {"colon", "x", "X", "question_mark", "f1", "slash"}  # they open a dialog or an input, closed by Escape


def keys_of(node: object, synonyms: bool = True) -> list[str]:
    """Every key that memtrace's own classes bind for a widget; or one key for each thing they do."""
    keys = []
    for cls in type(node).__mro__:
        if cls.__module__.startswith("memtrace_tui"):
            for binding in vars(cls).get("BINDINGS", ()):
                assert isinstance(binding, Binding)
                keys += binding.key.split(",") if synonyms else binding.key.split(",")[:1]
    return [key for key in dict.fromkeys(keys) if key not in LEAVING]


async def close_dialogs(pilot: Pilot[int]) -> None:
    while pilot.app.screen is not main_screen(pilot):
        await hit(pilot, "escape", draw=False)


@pytest.mark.parametrize(("number", "case"), [*enumerate(case for case in CASES if case not in (TINY, "no-trace"))])
async def test_every_key_on_every_screen(number: int, case: str) -> None:
    """The keys of a screen in the recordings that test_every_key does not press them in; the keys that work everywhere
    on one screen of each, in turn."""
    async with open_app(case, (80, 24)) as pilot:
        screen = main_screen(pilot)
        for position, (view, digit) in enumerate(VIEWS.items()):
            await hit(pilot, digit)
            assert screen.current == view
            everywhere = keys_of(screen) if position == number % len(VIEWS) else []
            main = keys_of(screen.view.main(), synonyms=False)
            for key in dict.fromkeys([*main, *keys_of(screen.view), *everywhere]):
                await hit(pilot, key)
                await close_dialogs(pilot)
                assert pilot.app.error is None, f"{key} on {view}: {pilot.app.error!r}"  # type: ignore[attr-defined]
                if key in ASKING:
                    await hit(pilot, "escape", draw=False)
                if screen.current != view:
                    await hit(pilot, digit, draw=False)
            screen.stop()


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (220, 60)])
async def test_every_screen_at_every_size_and_after_a_resize(size: tuple[int, int]) -> None:
    async with open_app(OOM, size) as pilot:
        for number in VIEWS.values():
            await hit(pilot, number)
            await settle(pilot)
            lines = text_of(pilot).split("\n")
            assert len(lines) == size[1] and all(len(line) <= size[0] for line in lines)
        await pilot.resize_terminal(90, 26)
        for number in VIEWS.values():
            await hit(pilot, number)
            await settle(pilot)


@pytest.mark.parametrize("theme", ["memtrace-light", "memtrace-safe", "memtrace-16"])
async def test_every_palette(theme: str) -> None:
    async with open_app(TINY, (100, 30), Settings(theme=theme)) as pilot:
        for number in VIEWS.values():
            await hit(pilot, number)


async def test_without_colours_letters_stand_in() -> None:
    async with open_app(TINY, (100, 30), plain=True) as pilot:
        for number in VIEWS.values():
            await hit(pilot, number)
            for widget in main_screen(pilot).view.query(Drawn):
                for y in range(widget.size.height if widget.display else 0):
                    for segment in widget.render_line(y):
                        style = segment.style
                        assert style is None or (style.color is None and style.bgcolor is None), (number, segment)
        await hit(pilot, "2")
        chart = main_screen(pilot).view.query_one(Chart)
        drawn = "\n".join(chart.render_line(y).text for y in range(chart.size.height))
        assert "B" in drawn and "A" in drawn and "·" in drawn


@pytest.mark.parametrize("case", [TINY, OOM, "llama2-7b_ring-truncated", "no-trace"])
async def test_the_overview_shows_the_report(case: str) -> None:
    async with open_app(case, (160, 48)) as pilot:
        text, report = text_of(pilot), main_screen(pilot).session.report
        rows = text.split("\n")
        for category in Category:
            if category is not Category.UNATTRIBUTED or report.categories[category]:
                name = str(category).replace("_", " ")
                assert any(f" {name} " in row and format_bytes(report.categories[category]) in row for row in rows), (
                    name
                )
        for key, size in report.subcategories.items():
            name = key.split("/")[1].replace("_", " ")
            assert any(name in row and format_bytes(size) in row for row in rows), key
        for name in ("requested", "allocated", "reserved"):
            assert format_bytes(report.peaks[f"{name}_bytes"]) in text


async def test_one_cursor_on_all_screens() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "p", "8")
        assert screen.session.event == screen.session.provider.peaks[1].event
        table = screen.view.query_one("#events-table", Table)
        await until(lambda: table.selected == screen.session.event)
        await hit(pilot, "down", "down")
        await settle(pilot)
        event = screen.session.event
        assert event == screen.session.provider.peaks[1].event + 2
        await hit(pilot, "comma", "4")
        await settle(pilot)
        assert screen.session.event == event - 1
        assert f"{event - 1:,}" in text_of(pilot)
        rows = screen.view.query_one("#allocations-table", Table).row_count
        assert rows == len(screen.session.provider.live(event - 1))
        await hit(pilot, "right_curly_bracket")
        await settle(pilot)
        assert screen.session.event in [span.start for span in screen.session.provider.spans]


async def test_playing_moves_the_cursor_and_stops_at_the_end() -> None:
    async with open_app(TINY) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "3")
        screen.go(100)
        await hit(pilot, "space")
        await until(lambda: screen.session.event > 130)
        await hit(pilot, "space")
        await settle(pilot)
        stopped = screen.session.event
        await pilot.pause(0.2)
        assert screen.session.event == stopped
        await hit(pilot, "backspace")
        await until(lambda: screen.session.event < stopped)
        screen.go(5)
        await until(lambda: screen.session.playing == 0)
        assert screen.session.event == 0
        last = screen.session.provider.count - 1
        screen.go(last)
        await hit(pilot, "space")  # from the end it begins anew
        await until(lambda: 0 < screen.session.event < last)
        screen.stop()


@pytest.mark.parametrize(("share", "is_shown"), [(1.02, True), (1.5, True), (1.7, False), (6, False)])
async def test_the_limit_is_a_line_where_it_is_near(share: float, is_shown: bool) -> None:
    async with open_app(TINY) as pilot:
        provider = main_screen(pilot).session.provider
        provider.__dict__["capacity_bytes"] = round(provider.peaks[2].size_bytes * share)
        await hit(pilot, "2")
        lines = text_of(pilot).splitlines()
        assert [" capacity " in line for line in lines if "╌" in line] == [True] * is_shown
        chart = [number for number, line in enumerate(lines) if "│" in line[:12] or "┤" in line[:12] or "╌" in line]
        if is_shown:
            at = next(number for number, line in enumerate(lines) if "╌" in line)
            height = (chart[-1] + 1 - at) / len(chart)  # of the scale, which ends 3 % above the higher of the two
            assert abs(height * share * 1.03 - share) < 2 * share / len(chart)


async def test_timeline_zoom_pan_and_live_set() -> None:
    async with open_app(TINY, (100, 30)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "2")
        chart = screen.view.query_one(Chart)
        count = screen.session.provider.count
        assert (chart.start, chart.stop) == (0, count)
        await hit(pilot, "plus")
        assert chart.stop - chart.start == round(count / 2)
        assert chart.start <= screen.session.event < chart.stop
        for _ in range(20):
            await hit(pilot, "plus")
        assert chart.stop - chart.start >= 4
        await hit(pilot, "0")
        assert (chart.start, chart.stop) == (0, count)
        await hit(pilot, "z")
        spans = [s for s in screen.session.provider.spans if s.step == screen.session.report.moment.step]
        assert (chart.start, chart.stop) == (spans[0].start, spans[-1].stop)
        before = screen.session.event
        await hit(pilot, "right")
        await settle(pilot)
        assert screen.session.event > before
        await hit(pilot, "left", "left")
        await settle(pilot)
        assert screen.session.event < before
        await hit(pilot, "e")
        assert screen.session.settings.axis == "time"
        await hit(pilot, "enter")
        await settle(pilot)
        assert screen.current == "allocations"


async def test_segment_map_selection_and_zoom() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "3")
        segments = screen.view.query_one(SegMap)
        worst = screen.session.report.fragmentation.pinned_segments[0]
        assert int(segments.layout_now.address[segments.segment]) == worst.address
        await settle(pilot)
        assert f"{worst.address:#x}" in text_of(pilot)
        await hit(pilot, "home", "right", "right")
        order = list(segments.prepare().cells)
        assert segments.segment == order[2]
        await hit(pilot, "enter")
        await settle(pilot)
        blocks = screen.view.query_one(BlockMap)
        assert blocks.display and not segments.display and blocks.has_focus
        await hit(pilot, "home")
        first = blocks.block
        await hit(pilot, "right")
        assert blocks.block == min(first + 1, int(segments.layout_now.first_block[segments.segment + 1]) - 1)
        whole = blocks.stop - blocks.start
        await hit(pilot, "plus", "plus")
        assert blocks.stop - blocks.start < whole
        await hit(pilot, "escape")
        await settle(pilot)
        assert segments.display and segments.has_focus
        address = segments.address
        await hit(pilot, "comma", "comma")  # another layout: the selection stays on its segment
        await settle(pilot)
        assert segments.address == address
        await hit(pilot, "w")
        assert (screen.session.coloring, screen.session.segment_sort) == ("pins", "free")


async def test_filtering_sorting_and_grouping_allocations() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "4")
        view = screen.view
        assert isinstance(view, AllocationsView)
        everything = view.main().row_count
        await hit(pilot, "slash", *"lora")
        await settle(pilot)
        assert 0 < view.main().row_count < everything
        await hit(pilot, "escape")
        await settle(pilot)
        assert view.main().row_count == everything and view.main().has_focus
        await hit(pilot, "slash", *"/(/")
        await settle(pilot)
        assert "not a regular expression" in text_of(pilot)
        await hit(pilot, "backspace", "backspace", "backspace", *"size>1MiB", "enter")
        await settle(pilot)
        sizes = screen.session.table.table.requested_bytes[view.rows]
        assert len(sizes) and (sizes > 1 << 20).all() and (sizes[:-1] >= sizes[1:]).all()
        await hit(pilot, "r")
        sizes = screen.session.table.table.requested_bytes[view.rows]
        assert (sizes[:-1] <= sizes[1:]).all()
        await hit(pilot, "escape", "g")
        await settle(pilot)
        assert view.grouping == "category" and sum(g.count for g in view.groups) == everything
        group = view.groups[0]
        await hit(pilot, "enter")
        await settle(pilot)
        assert view.grouping == "none" and view.main().row_count == group.count
        await hit(pilot, "escape", "a")
        await settle(pilot)
        assert view.main().row_count == len(screen.session.table.table)
        await pilot.click("#allocations-table", offset=(20, 0))
        await settle(pilot)
        assert view.sort == "purpose"


async def test_the_stacks_screen() -> None:
    async with open_app(TINY, (160, 48)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "5")
        view = screen.view
        assert isinstance(view, StacksView) and view.root is not None
        assert view.root.bytes == screen.session.report.requested_bytes
        await hit(pilot, "down", "down", "right", "v")
        await settle(pilot)
        assert screen.session.settings.inverted
        assert view.root.bytes == screen.session.report.requested_bytes
        await hit(pilot, "i", "down", "right", "enter", "escape")


async def test_findings_lead_to_their_evidence_and_replay() -> None:
    async with open_app(OOM, (120, 40)) as pilot:
        screen = main_screen(pilot)
        await until(lambda: screen.session.explanation is not None)
        await hit(pilot, "6")
        await settle(pilot)
        found = screen.session.explanation
        assert found is not None
        text = screen.view.query_one("#findings", Lines).text
        assert all(finding.title in text for finding in found[1].findings)
        await hit(pilot, "enter")
        await settle(pilot)
        assert screen.current != "findings" and screen.session.event == found[0]
        await hit(pilot, "6", "w")
        await settle(pilot)
        await hit(pilot, *["backspace"] * 30, *"nonsense:1", "enter")
        await settle(pilot)
        assert pilot.app.screen is not screen  # refused: the dialog says why and stays
        await hit(pilot, *["backspace"] * 30, *"expandable_segments:True", "enter")
        await until(lambda: screen.session.provider in screen.session.whatifs)
        await settle(pilot)
        assert "expandable_segments:True" in screen.view.query_one("#findings", Lines).text


async def test_searching_the_log() -> None:
    async with open_app(OOM, (120, 40)) as pilot:
        screen = main_screen(pilot)
        await hit(pilot, "8", "slash", *"segment_alloc", "enter")
        await settle(pilot)
        allocs = screen.session.fitting_events
        assert allocs is not None
        assert allocs[screen.session.event]
        before = screen.session.event
        await hit(pilot, "n")
        await settle(pilot)
        assert allocs[screen.session.event] and screen.session.event != before
        await hit(pilot, "N")
        await settle(pilot)
        assert screen.session.event == before


async def test_two_devices_take_turns() -> None:
    async with open_app("two-devices", (120, 40)) as pilot:
        screen = main_screen(pilot)
        for number in VIEWS.values():
            await hit(pilot, number, "d")
            await settle(pilot)
        assert screen.session.provider.device == (len(VIEWS) + screen.session.recording.device) % 2
        assert screen.session.provider.timeline.device_name in text_of(pilot)


async def test_the_mouse() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        await pilot.click("#tabs", offset=(14, 0))
        await settle(pilot)
        assert screen.current == "timeline"
        await pilot.click("#chart", offset=(60, 8))
        await settle(pilot)
        moved = screen.session.event
        assert moved != screen.session.provider.start.event
        await pilot.click("#scrubber", offset=(100, 0))
        await settle(pilot)
        assert screen.session.event > moved
        for view, widget in (("3", "#segmap"), ("4", "#allocations-table"), ("5", "#calltree"), ("8", "#events-table")):
            await hit(pilot, view)
            await settle(pilot)
            await pilot.click(widget, offset=(6, 4))
            await pilot.click(widget, offset=(6, 4))
            await settle(pilot)
            await close_dialogs(pilot)


async def test_a_jump_to_an_address_opens_the_segment() -> None:
    async with open_app(TINY, (120, 40)) as pilot:
        screen = main_screen(pilot)
        layout = screen.session.provider.layout(screen.session.event)
        address = int(layout.block_address[7])
        screen.post_message(Open(Goto("segments", address=address)))
        await until(lambda: screen.current == "segments" and bool(screen.query(BlockMap)))
        await settle(pilot)
        assert screen.view.query_one(BlockMap).block == 7


@pytest.mark.parametrize("plain", [False, True])
async def test_without_adapters_no_screen_names_them(plain: bool) -> None:
    """Full fine-tuning: the second category reads *trained* everywhere, and is found by that word and by its key."""
    async with open_app("llama_full-finetuning-eager", (150, 50), plain=plain) as pilot:
        screen, seen = main_screen(pilot), ""
        for view, digit in VIEWS.items():
            await hit(pilot, digit)
            assert screen.current == view
            for key in ("", "down", "g", "question_mark", "escape"):
                if key:
                    await hit(pilot, key)
                seen += text_of(pilot)
            await close_dialogs(pilot)
        assert "trained" in seen
        assert "lora" not in seen.lower()
        table = AllocationTable(screen.session.provider)
        count = table.fitting(parse("category:trained")).sum()
        assert 0 < count == table.fitting(parse("category:lora")).sum()
        assert table.fitting(parse("trained")).sum() >= count


async def test_a_screen_that_is_made_does_not_push_the_present_one_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both beside each other, for a moment, would halve the room, and what is selected would scroll."""
    shown: list[int] = []
    async with open_app(TINY, (80, 24)) as pilot:
        screen = main_screen(pilot)
        body = screen.query_one("#body")
        real = body.mount

        def mount(*views: Any, **kwargs: Any) -> Any:
            shown.append(sum(bool(view.display) for view in (*body.children, *views)))
            return real(*views, **kwargs)

        monkeypatch.setattr(body, "mount", mount)
        await hit(pilot, "2", "3", "4")
        assert shown == [1, 1, 1] and screen.current == "allocations" and screen.view.display


async def test_what_stands_above_the_first_line_that_leads_somewhere_can_be_read() -> None:
    """On a small screen the budgets of a comparison: at first, by keys, and by the wheel."""
    async with open_app(TINY, (80, 24)) as pilot:
        await hit(pilot, "colon", *"step 0 .. step 2", "enter")
        lines = main_screen(pilot).view.main()
        assert lines.show_vertical_scrollbar and not lines.can_select(0)
        assert "before      after" in text_of(pilot)
        await hit(pilot, "down", "down")
        assert lines.scroll_y > 0
        await hit(pilot, "home")
        assert lines.scroll_y == 0
        await pilot._post_mouse_events([events.MouseScrollDown], lines, offset=(2, 2))
        await settle(pilot)
        assert lines.scroll_y > 0
        await hit(pilot, "up", "up", "up", "up")
        assert lines.scroll_y == 0


async def test_an_empty_list_says_where_there_is_more() -> None:
    async with open_app(TINY, (80, 24)) as pilot:
        await hit(pilot, "4", "slash", *"life=1", "enter")
        assert " 0 live at event" in text_of(pilot) and "(a: of everything ever allocated)" in text_of(pilot)
        await hit(pilot, "a")
        assert "ever allocated, " in text_of(pilot) and " 0 ever" not in text_of(pilot)


async def test_a_file_without_a_trace_has_no_event_to_name() -> None:
    async with open_app("no-trace", (80, 24)) as pilot:
        assert "before the recording" in text_of(pilot) and "event before" not in text_of(pilot)
        await hit(pilot, "4")
        assert " live before the recording, " in text_of(pilot) and "event -1" not in text_of(pilot)


async def test_the_segment_that_is_described_is_in_sight() -> None:
    """On a small screen the map begins where the selected segment is, which two marks stand around."""
    async with open_app("llama2-7b_oom-fragmentation", (80, 24)) as pilot:
        await hit(pilot, "3")
        await settle(pilot)
        assert any("▐" in row or "▌" in row for row in text_of(pilot).splitlines()[3:16])
