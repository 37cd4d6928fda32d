"""Hidden overheads: ranked, and they sum to what is reserved, down to the naive figure."""

from __future__ import annotations

import pytest
from support import LABELLED, NAMES, analysis
from toy_run import MIB, Run, Toy, root, trained

from memtrace.explain.explain import explain_snapshot
from memtrace.explain.overheads import overheads
from memtrace.render.explain_text import render_overheads


@pytest.mark.parametrize("name", sorted({*NAMES, *LABELLED}))
def test_they_sum_and_end_at_the_naive_figure(name: str) -> None:
    found = overheads(analysis(name))
    sizes = [row.bytes for row in found.overheads]
    assert found.naive_bytes + sum(sizes) == found.reserved_bytes
    assert sizes == sorted(sizes, reverse=True) and all(size > 0 for size in sizes)
    if found.overheads:
        assert found.overheads[-1].left_bytes == found.naive_bytes
    left = found.reserved_bytes
    for row in found.overheads:
        left -= row.bytes
        assert row.left_bytes == left
    assert len(render_overheads(found, "adapters")) == len(sizes) + 4


def test_the_naive_figure_is_the_parameters() -> None:
    toy = trained(layers=4, adapter=2 * MIB)
    found = overheads(toy.run.analysis())
    purposes = {row.purpose for row in found.overheads}
    assert "activations/saved" in purposes and not purposes & {"base_weights/quantized", "lora/params"}
    assert found.naive_bytes > 0


def test_a_ring_of_one_event_proves_nothing() -> None:
    toy = trained(layers=4)
    toy.run.events = toy.run.events[-1:]
    answered = explain_snapshot(toy.run.analysis())
    assert (answered.verdict, answered.confidence) == ("unknown", "derived")
    assert "1 event" in answered.because[0]


def test_a_final_state_of_free_segments_is_told_to_do_nothing() -> None:
    run = Run(limit=1 << 30)
    run.free(run.alloc(200 * MIB, *root()))
    run.events = []
    pieces = [f for f in explain_snapshot(run.analysis()).findings if f.id == "reserved_in_pieces"]
    assert all("expandable_segments" not in advice.change for finding in pieces for advice in finding.advice)


def test_a_lost_beginning_is_no_proof_of_no_refusal() -> None:
    answered = explain_snapshot(analysis("llama2-7b_ring-truncated"))
    assert (answered.verdict, answered.confidence) == ("no_oom", "derived")
    assert explain_snapshot(Toy(checkpointing=True).load().adapters().run.analysis()).confidence == "measured"
