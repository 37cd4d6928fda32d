"""The rebuilt history against the recorded process's own statistics, to the byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NAMES, WHOLE, analysis, info, timeline

from memtrace.answers.report import report
from memtrace.history import timeline as timeline_module
from memtrace.history.layout import State, layout_at
from memtrace.history.timeline import At, Window, choose_event, running
from memtrace.snapshot.model import Action

GIB = 1 << 30


@pytest.mark.parametrize("name", NAMES)
def test_replay_is_exact(name: str) -> None:
    replay = timeline(name).replay
    assert replay.exact, replay.why


@pytest.mark.parametrize("name", WHOLE)
def test_peaks_equal_the_process_statistics(name: str) -> None:
    stats = info(name)["stats"]
    levels = ("requested_bytes", "allocated_bytes", "reserved_bytes")
    assert [peak.size_bytes for peak in timeline(name).peaks()] == [stats[f"{level}.all.peak"] for level in levels]


@pytest.mark.parametrize("name", NAMES)
def test_the_end_equals_the_final_segments(name: str) -> None:
    made = timeline(name)
    device = made.device
    allocated = device.blocks.state == State.ALLOCATED
    requested, blocks, reserved = made.curve_at(len(made) - 1)
    assert reserved == int(device.segments.total_size.sum())
    assert blocks == int(device.blocks.size[allocated].sum())
    assert requested == int(device.blocks.requested_size.sum())


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_oom-fragmentation"])
def test_levels_that_are_kept_are_those_of_the_curves(name: str) -> None:
    made = timeline(name)
    for event, levels in made.levels.known.items():
        assert levels == tuple(int(curve[event]) for curve in made.curves)
    assert {len(made) - 1, made.peaks()[2].event, *made.oom_events} <= set(made.levels.known)


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_recorded-after-load"])
def test_levels_anywhere_are_those_of_the_curves(name: str) -> None:
    """The first few are worked out alone, the others looked up in curves that are then made."""
    made = replace(timeline(name), _curves={})
    for event in range(0, len(made), len(made) // 5):
        assert made.curve_at(event) == tuple(int(curve[event]) for curve in timeline(name).curves)
    assert made._curves


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_recorded-after-load"])
@pytest.mark.parametrize("share", [(0, 3), (1, 2), (2, 3)])
def test_peaks_of_a_part_are_those_of_the_curves_there(name: str, share: tuple[int, int]) -> None:
    whole = timeline(name)
    first, stop = (len(whole) * third // 3 for third in share)
    part = replace(whole, window=Window(first, stop))
    for curve, peak, before in zip(whole.curves, part.peaks(), whole.curve_at(-1), strict=True):
        highest = int(curve[first:stop].max())
        assert peak.size_bytes == max(highest, before if first == 0 else 0)
        assert peak.event == first + int(curve[first:stop].argmax()) or (first == 0 and peak.event == -1)


def test_what_was_live_before_a_late_recording() -> None:
    made = timeline("llama2-7b_recorded-after-load")
    assert round(made.curve_at(-1)[0] / GIB, 3) == 4.238


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_oom-fragmentation", "llama2-7b_baseline-expandable"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_byte_is_in_one_category_at_any_event(name: str, data: st.DataObject) -> None:
    made = analysis(name)
    event = data.draw(st.integers(-1, len(made.timeline) - 1))
    budget = report(made, At("event", event, None))
    _, allocated, reserved = made.timeline.curve_at(event)
    assert budget.reserved_bytes == reserved
    assert sum(budget.categories.values()) == reserved
    assert min(budget.categories.values()) >= 0
    for category, size in budget.categories.items():
        assert size == sum(v for k, v in budget.subcategories.items() if k.split("/")[0] == category)
    f = budget.fragmentation
    assert f.total_bytes == budget.categories["fragmentation"]
    assert (f.allocated_bytes, f.reserved_bytes) == (allocated, reserved)
    assert sum(pool.free_bytes for pool in f.by_pool) == f.holes_bytes + f.cached_segments_bytes
    assert budget.attribution.attributed_bytes + budget.attribution.unattributed_bytes == f.requested_bytes


@pytest.mark.parametrize("name", ["tiny-llama_3-steps", "llama2-7b_oom-fragmentation", "llama2-7b_baseline-expandable"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_blocks_tile_segments_without_overlap(name: str, data: st.DataObject) -> None:
    made = timeline(name)
    event = data.draw(st.integers(-1, len(made) - 1))
    layout = layout_at(made, event)
    ends = layout.block_address + layout.block_bytes
    for segment in range(len(layout)):
        first, last = int(layout.first_block[segment]), int(layout.first_block[segment + 1])
        assert layout.block_address[first] == layout.address[segment]
        assert ends[last - 1] == layout.address[segment] + layout.total_bytes[segment]
        assert np.array_equal(ends[first : last - 1], layout.block_address[first + 1 : last])
    free = layout.block_state == State.FREE
    neighbours = free[1:] & free[:-1] & (layout.segment[1:] == layout.segment[:-1])
    assert not neighbours.any()  # the allocator merges free neighbours


def test_the_final_layout_is_the_recorded_one() -> None:
    made = timeline("llama2-7b_oom-fragmentation")
    layout, blocks = layout_at(made, len(made) - 1), made.device.blocks
    assert np.array_equal(layout.block_address, blocks.address)
    assert np.array_equal(layout.block_bytes, blocks.size)
    assert np.array_equal(layout.block_state, blocks.state)


def test_choosing_the_event() -> None:
    oom, plain = timeline("llama2-7b_oom-fragmentation"), timeline("tiny-llama_3-steps")
    assert oom.trace.action[choose_event(oom, None).event] == Action.OOM
    assert choose_event(plain, None).kind == "peak"
    peak = choose_event(plain, "peak").event
    assert plain.allocated_bytes[peak] == plain.allocated_bytes.max()
    assert (plain.allocated_bytes[:peak] < plain.allocated_bytes[peak]).all()
    assert choose_event(plain, "end").event == len(plain) - 1
    assert choose_event(plain, "17").event == 17


@given(st.lists(st.tuples(st.integers(-3, 30), st.integers(-9, 9)), max_size=40), st.integers(0, 9), st.integers(9, 25))
def test_a_level_is_what_was_added_so_far_however_it_is_cut(
    changes: list[tuple[int, int]], first: int, stop: int
) -> None:
    events, amounts = np.array(changes, dtype=np.int64).reshape(-1, 2).T
    inside = [(event, amount) for event, amount in changes if event >= first]
    wanted = [5 + sum(amount for event, amount in inside if event <= at) for at in range(first, stop)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline_module, "_AT_ONCE", 4)
        assert running(Window(first, stop), 5, (events, amounts)).tolist() == wanted
