"""Each threshold that a detector or the judge decides by: just above it speaks, just below it is silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import parse_log
from toy_run import ADAM, CALL, COPY, EVALUATE, LOADER, MIB, MODEL, PACK, TRAIN, Run, Toy, root, trained

from memtrace.attribution.categories import Purpose
from memtrace.explain.answer import Basis, Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors import DETECTORS
from memtrace.explain.dims import _repeats
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts
from memtrace.explain.log_answer import findings_of_log, verdict_from_log
from memtrace.explain.process_facts import layers_by_name
from memtrace.explain.proof import Bench, Proposal, proven
from memtrace.explain.snapshot_facts import verdict_at
from memtrace.explain.verdict import judge
from memtrace.history.timeline import At, choose_event

GIB = 1 << 30
PLAIN: dict[str, Any] = {"checkpointing": True, "logits": 2 * MIB}


def case_of(toy: Toy | Run, event: int | None = None) -> Case:
    seen = (toy.run if isinstance(toy, Toy) else toy).analysis()
    at = choose_event(seen.timeline, None) if event is None else At("event", event, None)
    return Case(seen, at, *verdict_at(seen, at.event))


def look(name: str, case: Case, allocated: float | None = None) -> Finding | None:
    """What a detector says, as if so much were allocated (default: next to nothing, so that any share is material)."""
    case.allocated_bytes = int(allocated) if allocated is not None else 1
    return DETECTORS[name](case)


def refused(toy: Toy, scale: float = 1.0) -> Toy:
    with pytest.raises(MemoryError):
        toy.step(scale)
    return toy


def with_lengths(limit: int | None = None) -> Toy:
    toy = Toy(checkpointing=True, run=Run(limit=limit)).load().adapters()
    for scale in (1, 2, 0.7, 1.3, 0.5, 1.7, 0.9, 2.1):
        toy.step(scale)
    return toy


def longer_batch() -> Toy:
    toy = Toy(run=Run(limit=GIB)).load().adapters()
    for scale in (1, 1.1, 0.9, 1):
        toy.step(scale)
    return refused(toy, 3)


def larger_evaluation() -> Toy:
    toy = trained(checkpointing=True)
    for _ in range(3):
        held, loss, _ = toy.forward(scale=4, inner=(EVALUATE,))
        toy.run.free(*held, *loss, at=(EVALUATE, *root(20)))
    return toy


def hidden_states(layers: int, kept: int) -> Toy:
    """An evaluation pass, at its end, in which the outputs of the first ``kept`` layers stay alive."""
    toy = trained(checkpointing=True, layers=layers)
    held, loss, logits = toy.forward(scale=2, inner=(EVALUATE,))
    toy.run.free(*held[1 + kept :], *loss, logits, at=(EVALUATE, *root(20)))
    return toy


def graph_held() -> Toy:
    toy = Toy(layers=6).load().adapters()
    kept: list[int] = []
    for number in range(5):
        held, loss, logits = toy.forward()
        toy.run.free(logits, *loss, at=root())
        toy.run.free(toy.run.alloc(24 * MIB))
        toy.run.free(*kept)
        kept = held if number >= 2 else []
        toy.run.free(*(() if kept else held))
    toy.forward()
    return toy


def buckets() -> Toy:
    toy = trained(steps=1, checkpointing=True, logits=2 * MIB, adapter=4 * MIB)
    toy.run.alloc(48 * MIB, "/x/site-packages/torch/nn/parallel/distributed.py:1207 _ddp_init_helper", *root(7))
    return toy.step()


def zero() -> Toy:
    toy = trained(checkpointing=True)
    toy.run.alloc(64 * MIB, "/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py:300 __init__", *root(7))
    return toy.step()


def first_states() -> Toy:
    free = trained(steps=1, adapter=10 * MIB, checkpointing=True, optimizer=False)
    held = free.run.analysis().timeline.peaks()[2].size_bytes
    return refused(Toy(run=Run(limit=held + 60 * MIB), adapter=10 * MIB, checkpointing=True).load().adapters())


def loading(pack: bool) -> Run:
    run = Run(limit=100 * MIB)
    with pytest.raises(MemoryError):
        for _ in range(4):
            run.alloc(32 * MIB, COPY, LOADER, *root(5))
            if pack:
                run.alloc(8 * MIB, PACK, LOADER, *root(5))
    return run


def experts(size: int = 160 * MIB) -> Toy:
    toy = Toy(checkpointing=True, layers=6).load()
    for _ in range(6):
        toy.run.alloc(size, COPY, LOADER, *root(5))
    toy.adapters()
    return toy.step().step()


def padded(*lengths: int) -> Toy:
    """A run whose largest batch, the last one, had sequences of these lengths."""
    toy = longer_batch()
    toy.run.extra = {"version": 1, "config": {"run": {"batch": len(lengths), "lengths": list(lengths)}}}
    return toy


def metrics(kept: int) -> Toy:
    """A metric that collects what it was given in ``kept`` of four steps."""
    toy = trained(checkpointing=True)
    for step in range(4):
        toy.step()
        made = toy.run.alloc(8 * MIB, "/x/site-packages/torchmetrics/metric.py:500 update", *root(15))
        if step >= kept:
            toy.run.free(made, at=root(16))
    return toy.step()


class Caching(Toy):
    """The model fills a cache of keys and values; the program holds it until it has the next pass's."""

    def forward(self, scale: float = 1.0, inner: tuple[str, ...] = ()) -> tuple[list[int], list[int], int]:
        found = super().forward(scale, inner)
        cache = ("/x/site-packages/transformers/cache_utils.py:100 update", f"{MODEL}:250 forward", *CALL)
        old, self.kept = self.kept, [self.run.alloc(8 * MIB, *cache, *inner, *root()) for _ in range(6)]
        self.run.free(*old, at=root())
        return found


def cached(trains: bool) -> Toy:
    toy = Caching(checkpointing=True).load()
    if trains:
        return toy.adapters().step().step().step()
    for _ in range(3):
        held, loss, logits = toy.forward()
        toy.run.free(logits, *loss, *held, at=root())
    return toy


# finding -> (its run, the share of what is allocated from which it is worth a line, the bytes that count)
SHARES: dict[str, tuple[Callable[[], Toy | Run], float]] = {
    "checkpointing_inactive": (lambda: trained(layers=8), 0.05),
    "logits_unchunked": (lambda: trained(checkpointing=True, logits=64 * MIB), 0.02),
    "kept_logits": (lambda: trained(checkpointing=True, keep_logits=True), 0.01),
    "attention_matrices": (lambda: trained(eager=True), 0.02),
    "base_not_quantized": (lambda: trained(quantized=False, **PLAIN), 0.1),
    "experts_not_quantized": (experts, 0.1),
    "fp32_upcast_head": (lambda: trained(upcast=True, **PLAIN), 0.02),
    "fp32_lora_branch": (lambda: trained(dropout=True), 0.02),
    "reference_model_copy": (lambda: trained(reference=True, **PLAIN), 0.05),
    "growth_across_steps": (lambda: trained(steps=8, keep_loss=True, checkpointing=True), 0.01),
    "variable_length_fragmentation": (with_lengths, 0.03),
    "reserved_in_pieces": (lambda: trained(steps=8), 0.1),
    "padding_or_packing": (longer_batch, 0.05),
    "eval_peak": (lambda: trained(**{**PLAIN, "logits": 24 * MIB}).evaluate(12), 0.02),
    "eval_batch_larger": (larger_evaluation, 0.02),
    "retained_graph": (graph_held, 0.05),
    "zero_on_one_gpu": (zero, 0.02),
    "optimizer_full_precision": (lambda: trained(**PLAIN), 0.02),
    "optimizer_on_first_step": (first_states, 0.01),
    "load_time_copies": (lambda: loading(pack=True), 0.05),
    "padding_by_one_outlier": (lambda: padded(400, 500, 2000), 0.05),
    "metrics_on_gpu": (lambda: metrics(4), 0.02),
}


def material(name: str, found: Finding, case: Case) -> float:
    """The bytes that a detector weighs: a finding's own, but the whole growth, and what is free in pieces."""
    if name == "growth_across_steps":
        return 6.0 * (found.bytes or 0)
    return float(found.bytes or 0)


def limits_of(name: str, *runs: tuple[Toy | Run, bool]) -> None:
    for toy, speaks in runs:
        assert (look(name, case_of(toy)) is not None) is speaks


@pytest.mark.parametrize("name", SHARES)
def test_a_finding_is_silent_below_its_share_of_what_is_allocated(name: str) -> None:
    make, share = SHARES[name]
    case = case_of(make())
    found = look(name, case)
    assert found is not None
    enough = material(name, found, case) / share
    assert look(name, case, 0.97 * enough) is not None
    assert look(name, case, 1.03 * enough) is None


@pytest.mark.parametrize(("layers", "kept", "speaks"), [(8, 6, True), (8, 5, False), (5, 5, False), (9, 6, True)])
def test_hidden_states_of_six_layers_or_of_all_but_one(layers: int, kept: int, speaks: bool) -> None:
    toy = hidden_states(layers, kept)
    case = case_of(toy, len(toy.run.events) - 1)
    found = look("output_hidden_states", case)
    assert (found is not None) is speaks
    if found is not None:
        assert look("output_hidden_states", case, 0.97 * (found.bytes or 0) / 0.02) is not None
        assert look("output_hidden_states", case, 1.03 * (found.bytes or 0) / 0.02) is None


def test_layers_kept_are_three_at_least() -> None:
    limits_of("checkpointing_inactive", (trained(layers=3), True), (trained(layers=2), False))


def test_lengths_differ_from_three_passes_and_lengths_on() -> None:
    for scales, speaks in (((1, 2, 0.7), True), ((1, 2, 1, 2), False), ((1, 2), False)):
        toy = Toy(checkpointing=True).load().adapters()
        for scale in scales:
            toy.step(scale)
        limits_of("variable_length_fragmentation", (toy, speaks))


@pytest.mark.parametrize(("share", "speaks"), [(0.031, True), (0.029, False)])
def test_pieces_at_a_refusal_count_from_three_percent_on(share: float, speaks: bool) -> None:
    run = Run(limit=400 * MIB)
    names = [run.alloc(5 * MIB, *root(9)) for _ in range(40)]
    run.free(*names[::2], at=root(9))
    with pytest.raises(MemoryError):
        run.alloc(300 * MIB, *root(9))
    case = case_of(run)
    case.verdict = replace(case.verdict, verdict="fragmentation")
    free = case.reserved_bytes - case.allocated_bytes
    case.reserved_bytes = int(free / share) + free
    assert (look("reserved_in_pieces", case, free / share) is not None) is speaks


def growth(steps: int, leaks: Callable[[int], int]) -> Toy:
    """Steps that leave ``leaks(step)`` bytes behind each."""
    toy = Toy(checkpointing=True).load().adapters()
    for step in range(steps):
        toy.step()
        if size := leaks(step):
            toy.run.alloc(size, f"{TRAIN}:30 keep", *root(31))
    return toy


def test_growth_needs_three_steps_four_fifths_of_them_and_a_quarter_mebibyte() -> None:
    limits_of(
        "growth_across_steps",
        (growth(5, lambda _: MIB), True),
        (growth(4, lambda _: MIB), False),  # the first and the last don't count
        (growth(12, lambda step: MIB * (step not in (3, 7))), True),  # 8 of 10
        (growth(12, lambda step: MIB * (step not in (3, 5, 7))), False),
        (growth(9, lambda _: MIB // 4 + 4096), True),
        (growth(9, lambda _: MIB // 4 - 4096), False),
    )


@pytest.mark.parametrize(("share", "named"), [(0.96, True), (0.93, False)])
def test_a_line_is_named_that_nearly_all_was_made_under(share: float, named: bool) -> None:
    toy = Toy(checkpointing=True).load().adapters()
    for _ in range(9):
        toy.step()
        toy.run.alloc(round(100 * MIB * share), f"{TRAIN}:30 keep", *root(31))
        toy.run.alloc(round(100 * MIB * (1 - share)), "/home/me/other.py:3 keep")
    found = look("growth_across_steps", case_of(toy))
    assert found is not None and ("all under" in found.evidence) is named


@pytest.mark.parametrize(("kept", "speaks"), [(4, True), (2, False)])
def test_half_of_what_a_pass_saved_is_a_graph(kept: int, speaks: bool) -> None:
    toy = Toy(layers=6).load().adapters()
    old: list[int] = []
    for number in range(5):
        held, loss, logits = toy.forward()
        toy.run.free(logits, *loss, at=root())
        toy.run.free(toy.run.alloc(24 * MIB))
        toy.run.free(*old)
        old = held[: len(held) * kept // 6] if number >= 2 else []
        toy.run.free(*[name for name in held if name not in old])
    toy.forward()
    limits_of("retained_graph", (toy, speaks))


def test_states_of_nine_tenths_of_the_parameters_are_whole() -> None:
    for share, speaks in ((0.92, True), (0.88, False)):
        toy = trained(**PLAIN, optimizer=False)
        for name in toy.params:
            toy.run.alloc(round(share * toy.run.machine.live[name][3]), ADAM, *root(12))
        limits_of("optimizer_full_precision", (toy.step(), speaks))


@pytest.mark.parametrize(("events", "speaks"), [(0, True), (2, True), (3, False)])
def test_a_wide_copy_replaces_what_is_freed_within_eight_events(events: int, speaks: bool) -> None:
    toy = Toy(checkpointing=True).load()
    narrow = toy.run.alloc(40 * MIB, COPY, LOADER, *root(5))
    toy.run.alloc(80 * MIB, COPY.replace("1240", "1250"), LOADER, *root(5))
    for _ in range(events):  # each is an allocation and two events of its end
        toy.run.free(toy.run.alloc(512, LOADER, *root(5)), at=root())
    toy.run.free(narrow, at=root())
    toy.adapters()
    limits_of("fp32_upcast_head", (toy.step().step(), speaks))


def twice_loaded(share: float, matrix: int = 2 * MIB) -> Run:
    """Two loads; the second has ``share`` of the first one's matrices in the same sizes."""
    run, count = Run(), 50
    for line, same in ((5, count), (7, round(share * count))):
        for number in range(count):
            run.alloc(
                matrix + 512 * (number >= same), COPY, LOADER, f"{TRAIN}:{line} load_{line}", f"{TRAIN}:99 <module>"
            )
    return run


def test_two_loads_are_one_model_from_nine_tenths_on_and_matrices_from_64_kib() -> None:
    limits_of(
        "reference_model_copy",
        (twice_loaded(0.92), True), (twice_loaded(0.86), False),
        (twice_loaded(1, 65 << 10), True), (twice_loaded(1, 63 << 10), False),
    )  # fmt: skip


def full_weights(count: int, size: int = 2 * MIB) -> Toy:
    toy = Toy(checkpointing=True, layers=2, quantized=False, logits=2 * MIB)
    for _ in range(count):
        toy.run.alloc(size, COPY, LOADER, *root(5))
    toy.adapters()
    return toy.step().step()


def test_layers_matrices_repeat_six_times_and_have_a_quarter_mebibyte() -> None:
    limits_of(
        "base_not_quantized",
        (full_weights(6), True), (full_weights(5), False),
        (full_weights(8, 257 << 10), True), (full_weights(8, 255 << 10), False),
    )  # fmt: skip


def test_experts_are_twice_what_the_largest_quantised_layer_would_be() -> None:
    limits_of("experts_not_quantized", (experts(33 * MIB), True), (experts(31 * MIB), False))


@pytest.mark.parametrize(("total", "outside", "speaks"), [
    (40, 4.1, True), (40, 3.9, False), (8, 2.1, True), (8, 1.9, False)])  # fmt: skip
def test_memory_outside_counts_from_a_tenth_of_the_card_or_2_gib(total: int, outside: float, speaks: bool) -> None:
    toy = trained(**PLAIN)
    reserved = case_of(toy).timeline.curve_at(len(toy.run.events) - 1)[2]
    free = total * GIB - reserved - int(outside * GIB)
    toy.run.extra = {"version": 1, "device_total_bytes": total * GIB, "device_free_bytes": free}
    limits_of("outside_allocator", (toy, speaks))


@pytest.mark.parametrize(("native", "speaks"), [(11, True), (9, False)])
def test_a_tenth_of_all_bytes_without_python_frames_is_told(native: int, speaks: bool) -> None:
    run = Run()
    for number in range(100):
        run.alloc(MIB, *(("/pytorch/engine.cpp:9 at::add",) if number < native else root(5)))
    limits_of("cpp_only_stacks", (run, speaks))


@pytest.mark.parametrize(("logits", "speaks"), [(1.1, True), (0.9, False)])
def test_logits_count_from_a_mebibyte_on(logits: float, speaks: bool) -> None:
    toy = trained(logits=round(logits * MIB))
    found = look("logits_unchunked", case_of(toy))
    assert (found is not None) is speaks


def test_a_loss_in_tiles_keeps_one_tile() -> None:
    found = look("logits_unchunked", case := case_of(trained(checkpointing=True, logits=300 * MIB)))
    assert found is not None
    (advice,) = found.advice
    rows = advice.rows if isinstance(advice, Proposal) else None
    assert rows is not None and advice.saves_bytes == case.saving(rows) - 256 * MIB


def test_a_change_is_advice_from_one_percent_of_the_capacity_on() -> None:
    case = case_of(trained(**PLAIN))
    for share, kept in ((0.011, 1), (0.009, 0)):
        proposal = Proposal("change", round(share * case.whole_bytes), Basis.FORMULA, "terms")
        finding, held = proven(Bench(case), Finding("id", "title", 1, "", (proposal,)))
        assert (len(finding.advice), len(held), len(finding.tried)) == (kept, kept, 1 - kept)


def test_layers_are_four_at_least() -> None:
    for count, told in ((4, 4), (3, None)):
        assert layers_by_name([f"model.layers.{i}.up.weight" for i in range(count)]) == told
        assert _repeats(np.array([1, 2, 3] * count)) == told


def judged(**spans: Any) -> tuple[str, str]:
    """Verdict and confidence of a request for 1 GiB on a full card, in GiB."""
    known = {"asked": 1.0, "allocated": 20.0, "reserved": 24.0, "slack": 4.0, "free": 0.0, "total": 24.0} | spans
    plain = {name: known.pop(name) for name in ("pieces", "still_needed_bytes", "source") if name in known}
    sizes = {name: value if value is None else ByteSpan.exactly(value * GIB) for name, value in known.items()}
    found = judge(OomFacts(**({"source": FactSource.SNAPSHOT} | plain), **sizes))  # type: ignore[arg-type]
    return found.verdict, found.confidence


@pytest.mark.parametrize(
    ("spans", "answer"),
    [
        ({"slack": 0.49, "allocated": 23.51, "asked": 0.4}, ("fragmentation", "measured")),  # 2 % of the capacity
        ({"slack": 0.47, "allocated": 23.53, "asked": 0.4}, ("budget", "derived")),
        ({"slack": 0.47, "allocated": 23.53, "asked": 0.2}, ("budget", "measured")),
        ({"free": 1.49, "total": 25.49, "limit": 30.0}, ("limit", "derived")),  # less than 2 % of the card to spare
        ({"free": 1.55, "total": 25.55, "limit": 30.0}, ("limit", "measured")),
        ({"still_needed_bytes": int(8.1 * GIB)}, ("budget", "measured")),  # twice the 4 GiB that could be had
        ({"still_needed_bytes": int(7.9 * GIB)}, ("budget", "derived")),
        ({"slack": None, "allocated": 19.5, "source": FactSource.TEXT, "reserved": None}, ("budget", "guess")),  # 85 %
        ({"slack": None, "allocated": 19.3, "source": FactSource.TEXT, "reserved": None}, ("unknown", "guess")),
        ({"asked": 2 / 1024, "source": FactSource.TEXT}, ("fragmentation", "guess")),  # small tensors
        ({"asked": 2.1 / 1024, "source": FactSource.TEXT}, ("fragmentation", "derived")),
    ],
)
def test_the_judge_decides_at_its_limits(spans: dict[str, Any], answer: tuple[str, str]) -> None:
    assert judged(**spans) == answer


LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 40.00 GiB "
    "of which {free:.2f} GiB is free. {others}Including non-PyTorch memory, this process has {own:.2f} GiB memory in "
    "use. Of the allocated memory {held:.2f} GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but "
    "unallocated."
)


@pytest.mark.parametrize(
    ("log", "ids"),
    [
        (LOG.format(free=0.5, others="", own=39.5, held=36.9), {"outside_allocator"}),
        (LOG.format(free=0.5, others="", own=39.5, held=37.1), set()),  # this process's, from 2 GiB on
        (LOG.format(free=0.5, others="", own=39.2, held=38.5), {"other_processes"}),
        (LOG.format(free=0.5, others="", own=39.3, held=38.5), set()),  # from 256 MiB on
    ],
)
def test_findings_of_a_log_have_their_limits(log: str, ids: set[str]) -> None:
    assert {finding.id for finding in findings_of_log(verdict_from_log(parse_log(log)))} == ids


@pytest.mark.parametrize(("held", "told"), [(34.8, True), (35.2, False)])
def test_a_tenth_of_the_card_outside_is_worth_a_sentence(held: float, told: bool) -> None:
    log = LOG.format(free=0.5, others="", own=0, held=held).replace(
        "Including non-PyTorch memory, this process has 0.00 GiB memory in use. ", ""
    )
    answer = verdict_from_log(parse_log(log))
    assert any("is in use outside PyTorch's allocator" in line for line in answer.worth_saying) is told
    assert ("outside_allocator" in {finding.id for finding in findings_of_log(answer)}) is told


def test_one_outlier_is_a_fifth_of_its_batch_or_more() -> None:
    limits_of(
        "padding_by_one_outlier",
        (padded(100, 790, 1000), True), (padded(100, 810, 1000), False), (padded(1000), False), (longer_batch(), False),
    )  # fmt: skip
    found = look("padding_by_one_outlier", case_of(padded(400, 500, 2000)))
    assert found is not None and "75% of the batch" in found.evidence


def test_metrics_that_are_let_go_of_are_no_finding() -> None:
    limits_of("metrics_on_gpu", (metrics(2), True), (metrics(0), False), (trained(steps=5), False))


def test_a_cache_is_a_finding_only_where_something_is_trained() -> None:
    for trains in (True, False):
        toy = cached(trains)
        stacks = [event["frames"] for event in toy.run.events]
        last = max(i for i, stack in enumerate(stacks) if stack and "cache_utils" in stack[0]["filename"])
        case = case_of(toy, last)
        assert case.phase.label == "forward" and (case.kind(Purpose.KV_CACHE) & case.live).any()
        assert (look("kv_cache_in_training", case) is not None) is trains
