"""Each threshold that a detector or the judge decides by: just above it speaks, just below it is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_run import ADAM, COPY, EVALUATE, LOADER, LORA, MIB, PACK, PREPARE, TRAIN, Run, Toy, root, trained

from memtrace.explain.answer import Advice, Basis, Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors import DETECTORS
from memtrace.explain.dims import _repeats
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts, Refuser
from memtrace.explain.log_answer import findings_of_log, verdict_from_log
from memtrace.explain.process_facts import layers_by_name
from memtrace.explain.proof import Bench, Proposal, proven
from memtrace.explain.snapshot_facts import verdict_at
from memtrace.explain.verdict import judge
from memtrace.history.timeline import At, choose_event
from memtrace.oomlog import parse_log

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
    """An evaluation pass in which the outputs of the first ``kept`` layers stay alive."""
    toy = trained(checkpointing=True, layers=layers)
    toy.forward(scale=2, inner=(EVALUATE,))
    names = [name for name in toy.run.stack_of if name in toy.run.machine.live][-(layers + 2) :]
    toy.run.free(*names[kept : layers], at=(EVALUATE, *root(20)))
    toy.run.free(toy.run.alloc(600 * MIB, *root(21)), at=root(21))  # here use is highest
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
    "output_hidden_states": (lambda: hidden_states(8, 8), 0.02),
    "retained_graph": (graph_held, 0.05),
    "zero_on_one_gpu": (zero, 0.02),
    "optimizer_full_precision": (lambda: trained(**PLAIN), 0.02),
    "optimizer_on_first_step": (first_states, 0.01),
    "load_time_copies": (lambda: loading(pack=True), 0.05),
}


def material(name: str, found: Finding, case: Case) -> float:
    """The bytes that a detector weighs: a finding's own, but the whole growth, and what is free in pieces."""
    if name == "growth_across_steps":
        return 6.0 * (found.bytes or 0)
    return float(found.bytes or 0)


@pytest.mark.parametrize("name", SHARES)
def test_a_finding_is_silent_below_its_share_of_what_is_allocated(name: str) -> None:
    make, share = SHARES[name]
    case = case_of(make())
    found = look(name, case)
    assert found is not None
    enough = material(name, found, case) / share
    assert look(name, case, 0.97 * enough) is not None
    assert look(name, case, 1.03 * enough) is None
