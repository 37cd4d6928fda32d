"""What is reserved and not used, on a layout made by hand: a pending block holds its segment, a taken one is no hole"""

from __future__ import annotations

from strategies import BASE, MIB, block, event, modern, segment

from memtrace.analysis import Analysis, analyse
from memtrace.answers.fragmentation import measure
from memtrace.explain.snapshot_facts import measure_pieces, refusals
from memtrace.history.layout import layout_at
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw

FAR, CACHED = BASE + (1 << 30), BASE + (2 << 30)


def made() -> Analysis:
    """A segment held by a pending block alone, one with a large block and a small hole, and one that is all free."""
    raw = modern()
    raw["segments"] = [
        segment(BASE, [block(2 * MIB, 2 * MIB, "active_pending_free"), block(18 * MIB, 0, "inactive")]),
        segment(FAR, [block(15 * MIB, 15 * MIB), block(5 * MIB, 0, "inactive")]),
        segment(CACHED, [block(22 * MIB, 0, "inactive")]),
    ]
    raw["device_traces"] = [[
        event("segment_alloc", BASE, 20 * MIB, 1), event("alloc", BASE, 2 * MIB, 2),
        event("segment_alloc", CACHED, 22 * MIB, 3), event("alloc", CACHED, 22 * MIB, 4),
        event("free_requested", CACHED, 22 * MIB, 5), event("free_completed", CACHED, 22 * MIB, 5),
        event("free_requested", BASE, 2 * MIB, 6),
        {"action": "oom", "size": 40 * MIB, "device_free": 0, "stream": 0, "time_us": 7, "frames": []},
    ]]  # fmt: skip
    snapshot = from_raw(raw, "made")
    return analyse(build(snapshot, snapshot.devices[0]))


def test_a_pending_block_keeps_its_segment_from_being_given_back() -> None:
    analysis = made()
    answer = measure(analysis.timeline, analysis.attribution, analysis.at("end"))
    assert answer.pending_free_bytes == 2 * MIB
    assert answer.holes_bytes == 18 * MIB + 5 * MIB
    assert answer.cached_segments_bytes == 22 * MIB
    assert {pinned.address: pinned.free_bytes for pinned in answer.pinned_segments} == {BASE: 18 * MIB, FAR: 5 * MIB}
    assert all(sum(pin.bytes for pin in pinned.pinned_by) > 0 for pinned in answer.pinned_segments)


def test_only_what_is_free_is_a_free_block() -> None:
    layout = layout_at(made().timeline, len(made().timeline) - 1)
    assert layout.largest_free_bytes().tolist() == [18 * MIB, 5 * MIB, 22 * MIB]
    assert layout.used_bytes().tolist() == [0, 15 * MIB, 0]


def test_the_judge_releases_no_segment_that_a_pending_block_holds() -> None:
    timeline = made().timeline
    (refusal,) = refusals(timeline)
    pieces = measure_pieces(layout_at(timeline, refusal.event), refusal)
    assert pieces.releasable_bytes == 22 * MIB
    assert pieces.pending_bytes == 2 * MIB
    assert pieces.own_free_bytes + pieces.elsewhere_bytes == 23 * MIB
    assert pieces.usable_bytes == 18 * MIB
