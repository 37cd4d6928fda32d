"""The table of docs/browser.md: fifteen forensic questions, the keys that answer each from the first screen, and the
answer worked out another way. A text that is typed (between quotes) counts as one key, as in the table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from browser_cases import hit, main_screen, open_app, recording, running, settle, text_of, until
from memtrace_tui.app import BrowseApp
from memtrace_tui.data.details import freed_at, origin
from memtrace_tui.data.source import is_library
from memtrace_tui.provider import Provider
from memtrace_tui.session import Session
from memtrace_tui.settings import Settings
from memtrace_tui.widgets.chart import Chart
from textual.pilot import Pilot

from memtrace.history.layout import State
from memtrace.units import format_bytes, format_count, format_delta

OOM, STEPS = "llama2-7b_oom-first-step", "tiny-llama_3-steps"
NAMES = {"⏎": "enter", "↓": "down", "↑": "up", ".": "full_stop", ",": "comma", ":": "colon", "/": "slash"}
PAGE = Path(__file__).parents[2] / "docs" / "browser.md"


def questions() -> dict[str, list[str]]:
    """Question -> keys, from the table of the docs."""
    found = {}
    for row in re.findall(r"^\| \d+ \| (.+?) \| (.+?) \|", PAGE.read_text("utf-8"), re.M):
        found[row[0]] = re.findall(r"`([^`]+)`", row[1])
    return found


def test_there_are_fifteen_and_none_takes_more_than_six_keys() -> None:
    table = questions()
    assert len(table) == 15
    assert all(len(keys) <= 6 for keys in table.values()), table
    assert set(table) == set(ANSWERS)


async def press(pilot: Pilot[int], keys: list[str]) -> None:
    for key in keys:
        if key.startswith('"'):
            await hit(pilot, *key.strip('"'))
        else:
            await hit(pilot, NAMES.get(key, key))
    await settle(pilot)
    pilot.app.screen._on_timer_update()


# -- the answers, each from the data: texts that must be on screen


def biggest_at_peak(session: Session) -> list[str]:
    provider = session.provider
    rows = provider.live(provider.peaks[1].event)
    most = int(provider.timeline.allocations.requested_bytes[rows].max())
    return [format_bytes(most)]


def before_the_oom(session: Session) -> list[str]:
    event = session.provider.ooms[0] - 1
    return [format_count(event), hex(int(session.provider.timeline.trace.address[event]))]


def hole(provider: Provider) -> tuple[int, int]:
    """(segment, block): the largest hole of the segment with most free bytes that something pins."""
    layout = provider.layout(provider.start.event)
    address = provider.report(provider.start.event).fragmentation.pinned_segments[0].address
    segment = int(np.flatnonzero(layout.address == address)[0])
    first, end = int(layout.first_block[segment]), int(layout.first_block[segment + 1])
    free = layout.block_bytes[first:end] * (layout.block_state[first:end] == State.FREE)
    return segment, first + int(free.argmax())


def source_of_a_block(session: Session) -> list[str]:
    provider = session.provider
    layout = provider.layout(provider.start.event)
    row = int(layout.row[hole(provider)[1] - 1])
    stack = provider.timeline.snapshot.stacks.stack(int(provider.timeline.allocations.stack[row]))
    frame = next(frame for frame in stack if not is_library(frame))
    return [f"{frame.filename.rpartition('/')[2]}:{frame.line}"]


def what_pins(session: Session) -> list[str]:
    worst = session.report.fragmentation.pinned_segments[0]
    pin = worst.pinned_by[0]
    return [hex(worst.address), format_bytes(pin.bytes), pin.subcategory.replace("_", " ")]


def who_freed(session: Session) -> list[str]:
    provider = session.provider
    found = origin(provider, provider.layout(session.event), hole(provider)[1])
    gone = freed_at(provider.timeline, found.last)
    frame = provider.timeline.snapshot.stacks.stack(int(provider.timeline.trace.stack[gone]))[0]
    return ["freed by", format_count(gone), frame.name.rpartition(".")[2][:12]]


def who_was_here(session: Session) -> list[str]:
    provider = session.provider
    layout, block = provider.layout(session.event), hole(provider)[1]
    start, size = int(layout.block_address[block]), int(layout.block_bytes[block])
    table = provider.timeline.allocations
    owners = int(((table.address < start + size) & (table.address + table.block_bytes > start)).sum())
    return [hex(start), f"{owners:,} owner"]


def between(session: Session, a: int, b: int) -> list[str]:
    """The change of reserved bytes between the starts of two steps, category by category."""
    provider = session.provider
    events = [next(s.start for s in provider.spans if s.step == step) for step in (a, b)]
    first, second = (provider.report(event) for event in events)
    shown = ["reserved", format_bytes(first.reserved_bytes), format_bytes(second.reserved_bytes)]
    grown = {c: second.categories[c] - first.categories[c] for c in first.categories}
    return [*shown, max(grown, key=lambda c: abs(grown[c])).replace("_", " ")]


def tensors_of_a_layer(session: Session) -> list[str]:
    """Each call site of the layers made one tensor a layer, in order: the eighth of each, and all that lies between."""
    provider, table = session.provider, session.table.table
    rows = provider.live(session.event)
    sites = table.stack[rows]
    counts = {site: int((sites == site).sum()) for site in set(sites.tolist())}
    once = [site for site, count in counts.items() if count == 23]  # the layer that ran out of memory is the 23rd
    eighth, ninth = (min(int(rows[sites == site][n]) for site in once) for n in (7, 8))
    mine = [row for row in rows.tolist() if eighth <= row < ninth]
    assert len(once) > 4 and len(mine) >= len(once)
    return [f" {len(mine):,} live at event"]


def from_one_line(session: Session) -> list[str]:
    """All that came from the outermost line with most live bytes."""
    provider = session.provider
    table, stacks = provider.timeline.allocations, provider.timeline.snapshot.stacks
    lines: dict[str, list[int]] = {}
    for row in provider.live(session.event).tolist():
        if stack := stacks.stack(int(table.stack[row])):
            name = stack[-1].filename.rpartition("/")[2]
            lines.setdefault(f"{name}:{stack[-1].line}", []).append(int(table.requested_bytes[row]))
    most = max(lines, key=lambda line: sum(lines[line]))
    return [
        most.replace(".", "\\."),
        f"{len(lines[most]):,} live at event",
        f"{format_bytes(sum(lines[most]))} requested",
    ]


def longest_lived(session: Session) -> list[str]:
    table, facts = session.provider.timeline.allocations, session.table.facts
    of_rule = [purpose.startswith("temporary") for purpose in session.provider.purposes]
    chosen = np.flatnonzero(np.array(of_rule)[session.table.rule])
    died = np.minimum(facts.died[chosen], session.provider.count - 1)
    return [format_count(int((died - np.maximum(table.alloc_event[chosen], -1)).max()))]


def stream_of_a_hole(session: Session) -> list[str]:
    layout = session.provider.layout(session.event)
    stream = int(layout.stream[hole(session.provider)[0]])
    return ["stream", "default stream" if not stream else hex(stream)]


def between_ranks(session: Session) -> list[str]:
    """Both peaks, and what `memtrace ranks` says of the two files: longer sequences, or a larger batch."""
    first, second = (provider.peaks[1].size_bytes for provider in session.pair())
    return ["More tokens a pass", f"{format_bytes(first)} → {format_bytes(second)}", format_delta(second - first)]


ANSWERS = {
    "What is biggest at the peak?": (OOM, None, biggest_at_peak),
    "What happened right before the OOM?": (OOM, None, before_the_oom),
    "Which source line made this block?": (OOM, None, source_of_a_block),
    "What pins the largest half-empty segment?": (OOM, None, what_pins),
    "Who freed what lay beside it?": (OOM, None, who_freed),
    "Who had these addresses before?": (OOM, None, who_was_here),
    "How does step 0 differ from step 2?": (STEPS, None, lambda session: between(session, 0, 2)),
    "Which tensors belong to one layer?": (OOM, None, tensors_of_a_layer),
    "What was allocated from one line?": (OOM, None, from_one_line),
    "What grew between two steps?": (STEPS, None, lambda session: between(session, 1, 2)),
    "Which temporary lived longest?": (OOM, None, longest_lived),
    "Which stream owns this hole?": (OOM, None, stream_of_a_hole),
    "What would a setting change?": (OOM, None, lambda session: ["expandable_segments:True", "peak reserved"]),
    "Before or after a fix, what changed?": (OOM, STEPS, lambda session: [session.difference().sentence[:20]]),
    "How does this rank differ from that one?": ("ddp_rank0", "ddp_rank1", between_ranks),
}  # fmt: skip


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_keys_answer(question: str, size: tuple[int, int]) -> None:
    first, second, answer = ANSWERS[question]
    app = BrowseApp(recording=recording(first), settings=Settings(), few_colours=False, remember=False)
    if second is not None:
        app._start = lambda one, _=None: BrowseApp._start(app, one, recording(second))  # type: ignore[method-assign]
    async with running(app, size) as pilot:
        session = main_screen(pilot).session
        await until(lambda: session.explanation is not None)
        expected = answer(session)
        await press(pilot, questions()[question])
        if "setting" in question:
            await until(lambda: bool(session.whatifs))
            await settle(pilot)
        shown = " ".join(text_of(pilot).split())
        for text in expected:
            assert " ".join(text.split()) in shown, (text, text_of(pilot))
    assert app.error is None


# -- what else the screens answer


async def test_marking_a_and_going_on_compares_the_two_events() -> None:
    """``A`` at the start of step 1, the cursor at the peak of step 2, ``7``: the two budgets and what grew most."""
    async with open_app(STEPS, (120, 40)) as pilot:
        session = main_screen(pilot).session
        provider = session.provider
        a, b = provider.named("step 1"), provider.named("peak of step 2")
        await press(pilot, ["colon", '"step 1"', "enter", "A", "colon", '"peak of step 2"', "enter", "7"])
        first, second = provider.report(a), provider.report(b)
        assert session.pair_events() == (a, b) and first.categories != second.categories
        shown = [line.split() for line in text_of(pilot).splitlines()]
        for name in first.categories:
            before, after = first.categories[name], second.categories[name]
            if before != after:
                row = " ".join(next(words for words in shown if words[:1] == [name.partition("_")[0]]))
                assert f"{format_bytes(before)} {format_bytes(after)} {format_delta(after - before)}" in row, row


async def test_a_what_if_run_opens_as_the_second_file() -> None:
    """Enter on a run: its outcome on top, and the reserved memory that the replay of that run ends with."""
    async with open_app(OOM, (120, 40)) as pilot:
        session = main_screen(pilot).session
        await press(pilot, ["6", "w", "enter"])
        await until(lambda: bool(session.whatifs))
        answer = session.whatifs[session.provider]
        await settle(pilot)
        await press(pilot, ["enter"])
        await until(lambda: session.other is not None)
        await press(pilot, ["7"])
        run, shown = answer.runs[1], " ".join(text_of(pilot).split())
        assert "survives" not in shown  # what would have come after the refused request is not known
        for text in ("predicted, not recorded", run.conf, format_bytes(run.peak_reserved_bytes)):
            assert text in shown, text
        await press(pilot, ["w", "3"])  # the map of the predicted run
        predicted = session.provider
        assert "what if" in predicted.source
        assert int(predicted.timeline.reserved_bytes.max()) == run.peak_reserved_bytes
        layout = predicted.layout(session.event)
        assert layout.total_bytes.sum() == predicted.report(session.event).reserved_bytes
        assert f" in {int((~layout.is_small).sum())} segments" in text_of(pilot)


@pytest.mark.parametrize("mode", ["step", "stack"])
async def test_the_colour_of_the_map_is_the_step_or_the_call_site(mode: str) -> None:
    """The legend names the value with most bytes first, and every block has the colour of its own value."""
    async with open_app(STEPS, (120, 40), Settings(coloring=mode)) as pilot:
        session = main_screen(pilot).session
        await press(pilot, ["3"])
        provider, table = session.provider, session.table
        layout = provider.layout(session.event)
        sums: dict[str, int] = {}
        value = {}
        for block, row in enumerate(layout.row.tolist()):
            if row < 0:
                continue
            step = int(table.facts.step[row])
            site = provider.site(row).rpartition("/")[2] or "no stack"
            value[block] = site if mode == "stack" else str(step) if step >= 0 else "before"
            sums[value[block]] = sums.get(value[block], 0) + int(layout.block_bytes[block])
        assert len(sums) > 1
        colours = session.colours
        least = min(sums[label] for label in colours.labels if label in sums)
        for block, name in value.items():
            label = colours.labels[colours.codes[block]]
            assert label == name or (label == "others" and sums[name] <= least)
        assert f" {max(sums, key=lambda name: sums[name])} " in text_of(pilot)


async def test_the_timeline_has_room_for_the_other_rank_and_names_its_line() -> None:
    """Rank 1 has more live than rank 0 has reserved: its line is no lid at the top, and the legend says its bytes."""
    app = BrowseApp(recording=recording("ddp_rank0"), settings=Settings(), few_colours=False, remember=False)
    app._start = lambda one, _=None: BrowseApp._start(app, one, recording("ddp_rank1"))  # type: ignore[method-assign]
    async with running(app, (160, 48)) as pilot:
        session = main_screen(pilot).session
        await press(pilot, ["2"])
        first, second = session.pair()
        live = second.timeline.curve_at(session.other_event)[1]
        assert live > first.peaks[2].size_bytes
        assert f"─ other file {format_bytes(live)} live" in text_of(pilot)
        assert pilot.app.screen.query_one(Chart).top_bytes >= second.peaks[1].size_bytes


async def test_with_two_ranks_the_map_says_the_rank() -> None:
    """The file's name carries the rank: on either side the legend says whose a block is."""
    settings = Settings(coloring="compared")
    app = BrowseApp(recording=recording("ddp_rank0"), settings=settings, few_colours=False, remember=False)
    app._start = lambda one, _=None: BrowseApp._start(app, one, recording("ddp_rank1"))  # type: ignore[method-assign]
    async with running(app, (160, 48)) as pilot:
        session = main_screen(pilot).session
        for keys, mine in ((["3"], 0), (["7", "w", "3"], 1)):
            await press(pilot, keys)
            assert session.ranks == (mine, 1 - mine)
            labels = session.colours.labels
            assert labels[-2:] == ("ranks 0 and 1", f"rank {mine} only")
            legend = text_of(pilot).splitlines()
            assert any("rank, by address" in line and "0 and 1" in line for line in legend)
    assert app.error is None
