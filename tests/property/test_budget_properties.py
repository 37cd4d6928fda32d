"""Invariants of predicted runs over random setups."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tools.formulas import backward_peak, forward_peak, optimizer_peak, symbols
from tools.warm import simulate_warm_run

from memtrace.allocator.config import AllocatorConfig
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.estimate import estimate
from memtrace.estimate.options import LOSSES, OPTIMIZERS, QUANT, RunOptions
from memtrace.estimate.placement import place
from memtrace.estimate.presets import gpu_names, gpu_preset, model_names, model_preset
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.source import ShapeSource
from memtrace.estimate.stream import EMPTY_CACHE, Stream

H200 = gpu_preset("h200")


@st.composite
def setups(draw: st.DrawFn, plain: bool = False) -> tuple[ModelShape, RunOptions]:
    """A shallow model and options; ``plain`` ones are covered by the closed formulas."""
    names = ["tiny-llama", "tinyllama-1.1b", "mistral-7b", "qwen2-7b"] if plain else sorted(model_names())
    shape = replace(model_preset(draw(st.sampled_from(names))), layers=draw(st.integers(2, 6)))
    if shape.family == "phi3" or plain:
        targets: tuple[str, ...] = ("all-linear",)
    else:
        targets = draw(st.sampled_from([("all-linear",), ("q_proj", "v_proj"), ("down_proj",), ("o_proj", "up_proj")]))
    return shape, RunOptions(
        sequence=draw(st.integers(130, 2100)),
        batch=draw(st.integers(1, 3)),
        rank=draw(st.sampled_from([4, 16, 64])),
        targets=targets,
        dropout=draw(st.sampled_from([0.0, 0.1])),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        checkpointing=draw(st.booleans()),
        reentrant=False if plain else draw(st.booleans()),
        prepare_kbit=draw(st.booleans()),
        autocast=False if plain else draw(st.booleans()),
        adapter_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        keep_logits=draw(st.booleans()),
        loss="full" if plain else draw(st.sampled_from(LOSSES)),
        quant=draw(st.sampled_from(["nf4", "nf4-dq"] if plain else QUANT)),
        embeddings_require_grad=True if plain else draw(st.booleans()),
        hold_loss=False if plain else draw(st.booleans()),
        accumulation=1 if plain else draw(st.integers(1, 2)),
    )


def levels(stream: Stream) -> list[int]:
    """Live bytes after every event."""
    current, found = 0, []
    for entry in stream.events:
        if entry < EMPTY_CACHE:
            current += stream.sizes[entry] if entry >= 0 else -stream.sizes[~entry]
        found.append(current)
    return found


@settings(max_examples=40, deadline=None)
@given(setups(), st.sampled_from(gpu_names()))
def test_streams_are_well_formed_and_steady(setup: tuple[ModelShape, RunOptions], gpu: str) -> None:
    """Everything is freed once, after it was made; the third step does what the second did."""
    shape, options = setup
    stream = simulate_run(shape, options, gpu_preset(gpu).device, steps=3)
    live: set[int] = set()
    made = 0
    for entry in stream.events:
        if entry >= EMPTY_CACHE:
            continue
        if entry >= 0:
            assert entry == made and stream.sizes[entry] > 0
            made += 1
            live.add(entry)
        else:
            live.remove(~entry)
    assert made == len(stream.sizes) == len(stream.labels)
    starts = [mark.event for mark in stream.marks if mark.name == "inputs" and mark.step in (1, 2)]
    starts = [starts[0], starts[len(starts) // 2], stream.marks[-1].event]
    level = levels(stream)
    second, third = level[starts[0] : starts[1]], level[starts[1] : starts[2]]
    assert max(second) == max(third) and second[-1] == third[-1]


@settings(max_examples=25, deadline=None)
@given(setups())
def test_two_shallow_models_tell_the_peak_of_a_deep_one(setup: tuple[ModelShape, RunOptions]) -> None:
    shape, options = setup
    shape = replace(shape, layers=shape.layers + 5)
    stream = simulate_run(shape, options, H200.device)
    begin = next(mark.event for mark in stream.marks if mark.step == 1)
    level = levels(stream)
    points = [level[i] for i in range(begin, stream.marks[-1].event) if 0 <= stream.events[i] < EMPTY_CACHE]
    assert ShapeSource(shape).requested_peak(options, H200.device) == max(points)


@settings(max_examples=25, deadline=None)
@given(setups(plain=True))
def test_closed_formulas_equal_the_engine(setup: tuple[ModelShape, RunOptions]) -> None:
    shape, options = setup
    stream = simulate_warm_run(shape, options, H200.device)
    level = levels(stream)
    peaks = {"forward": 0, "backward": 0, "optimizer": 0}
    ends = [mark.event for mark in stream.marks[1:]] + [len(level)]
    names = {"inputs": "forward", "loss": "forward", "recompute": "backward", "zero_grad": "optimizer"}
    for mark, end in zip(stream.marks, ends, strict=True):
        if mark.step == 1 and mark.name != "end" and end > mark.event:
            name = names.get(mark.name, mark.name)
            peaks[name] = max(peaks[name], max(level[mark.event - 1 : end]))
    x = symbols(shape, options, H200.device)
    assert (forward_peak(x), backward_peak(x), optimizer_peak(x)) == tuple(peaks.values())


@settings(max_examples=15, deadline=None)
@given(setups())
def test_estimates_add_up(setup: tuple[ModelShape, RunOptions]) -> None:
    shape, options = setup
    found = estimate(shape, options, H200)
    assert sum(found.categories.values()) == int(found.placement.reserved[found.peak_event])
    assert all(size >= 0 for size in found.subcategories.values())
    assert sum(term.bytes for term in found.terms) == int(found.placement.requested[found.peak_event])
    assert found.peak_requested_bytes <= found.peak_allocated_bytes <= found.peak_reserved_bytes
    assert found.peak_allocated_bytes == max(peak.allocated_bytes for peak in found.phases.values())


@settings(max_examples=10, deadline=None)
@given(setups(), st.floats(0.3, 1.2))
def test_a_limit_is_never_passed(setup: tuple[ModelShape, RunOptions], share: float) -> None:
    shape, options = setup
    stream = simulate_run(shape, options, H200.device)
    free = place(stream)
    limit = int(int(free.reserved.max()) * share)
    tight = place(stream, AllocatorConfig(limit_bytes=limit))
    if len(tight.reserved):
        assert int(tight.reserved.max()) <= limit
    if tight.refused_event is None:
        assert len(tight.requested) == len(free.requested)
    else:
        assert share < 1.0 and stream.events[tight.refused_event] >= 0
