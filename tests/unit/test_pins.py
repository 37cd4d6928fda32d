"""Who pins free memory: dominators, what only pins, and the best trade, on layouts made by hand and on recordings."""

from __future__ import annotations

import pytest
from strategies import BASE, MIB, block, event, modern, segment
from support import analysis

from memtrace.analysis import Analysis, analyse
from memtrace.answers.graph import build_graph
from memtrace.answers.pins import Pins, pins
from memtrace.history.layout import layout_at
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw

FAR = BASE + (1 << 30)


def made(*, shared: bool) -> tuple[Analysis, Pins]:
    """Two segments, each held by a small block: of one call site or, with ``shared``, the second by two."""
    sites = [[{"filename": f"/x/{name}.py", "line": 1, "name": name}] for name in ("one", "two")]
    small = block(2 * MIB, 2 * MIB)
    held = [small | {"frames": sites[0]}, *([small | {"frames": sites[1]}] if shared else [])]
    raw = modern()
    raw["segments"] = [
        segment(BASE, [small | {"frames": sites[0]}, block(18 * MIB, 0, "inactive")]),
        segment(FAR, [*held, block((20 - 2 * len(held)) * MIB, 0, "inactive")]),
    ]
    trace = [event("segment_alloc", BASE, 20 * MIB, 1), event("alloc", BASE, 2 * MIB, 2, sites[0])]
    trace += [event("segment_alloc", FAR, 20 * MIB, 3)]
    trace += [event("alloc", FAR + 2 * MIB * i, 2 * MIB, 4, sites[i]) for i in range(len(held))]
    raw["device_traces"] = [trace]
    snapshot = from_raw(raw, "made")
    made = analyse(build(snapshot, snapshot.devices[0]))
    return made, pins(made, layout_at(made.timeline, len(made.timeline) - 1))


def test_one_site_holds_both_segments() -> None:
    _, found = made(shared=False)
    assert found.pinned_free_bytes == 36 * MIB
    (holder,) = found.held_by
    assert (holder.free_bytes, holder.segments) == (36 * MIB, 2) and "one" in (holder.frame or "")
    assert [one.segment_free_bytes for one in found.evictable] == [18 * MIB] * 2
    assert len(found.clearing.segments) == 2
    assert (found.clearing.given_back_bytes, found.clearing.must_go_bytes) == (40 * MIB, 4 * MIB)


def test_a_segment_that_two_sites_share_is_their_categorys() -> None:
    _, found = made(shared=True)
    by_site = {holder.frame is not None: holder for holder in found.held_by}
    assert by_site[True].free_bytes == 18 * MIB and by_site[True].segments == 1
    assert by_site[False].free_bytes == 16 * MIB and by_site[False].subcategory is None
    assert found.clearing.must_go_bytes == 6 * MIB and len(found.clearing.sites) == 2


def test_the_graph_marks_what_only_pins() -> None:
    here, found = made(shared=False)
    graph = build_graph(here, len(here.timeline) - 1)
    marked = {data["only_pins_bytes"] for _, data in graph.nodes(data=True) if "only_pins_bytes" in data}
    assert marked == {18 * MIB} and len(found.evictable) == 2


@pytest.mark.parametrize("name", ["llama2-7b_oom-fragmentation", "llama2-7b_baseline"])
def test_base_weights_are_no_candidates_and_a_trade_is_worth_it(name: str) -> None:
    here = analysis(name)
    layout = layout_at(here.timeline, here.at(None).event)
    found = pins(here, layout)
    assert not any(one.category in ("base_weights", "lora") for one in found.evictable)
    assert not any(site.startswith(("base_weights", "lora")) for site in found.clearing.sites)
    assert found.clearing.given_back_bytes >= found.clearing.must_go_bytes
    assert sum(holder.free_bytes for holder in found.held_by) <= found.pinned_free_bytes <= layout.reserved_bytes
