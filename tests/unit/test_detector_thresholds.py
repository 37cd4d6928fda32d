"""Thresholds that detectors decide by: each is what the finding's page says, and moving one fails here."""

from __future__ import annotations

import inspect
import re

import pytest
from support import ROOT
from toy_run import EVALUATE, MIB, Run, Toy, root, trained

from memtrace.attribution.categories import Purpose
from memtrace.explain import case, proof, verdict
from memtrace.explain.answer import Finding
from memtrace.explain.detectors import (
    DETECTORS,
    activations,
    circumstances,
    evaluation,
    growth,
    lengths,
    weights,
)
from memtrace.explain.explain import explain_snapshot

# finding -> shares of what is allocated below which it is silent, as its code has them (2 % where none is named)
SHARES = {
    "checkpointing_inactive": ["0.05"], "kept_logits": ["0.01"], "base_not_quantized": ["0.1"],
    "experts_not_quantized": ["0.1"], "reference_model_copy": ["0.05", "0.05"], "reserved_in_pieces": ["0.03"],
    "growth_across_steps": ["0.01"],
    "variable_length_fragmentation": ["0.03"], "padding_or_packing": ["0.05"], "load_time_copies": ["0.05"],
    "optimizer_on_first_step": ["0.01"], "late_recording": ["0.1"], "retained_graph": ["0.05"],
    "padding_by_one_outlier": ["0.05"],
}  # fmt: skip
# page -> what it says, and the constant behind it
SAID = [
    ("padding_or_packing", "1.25 times", lengths._LONGER == 1.25),
    ("variable_length_fragmentation", "three different lengths", lengths._LEAST_LENGTHS == lengths._LEAST_PASSES == 3),
    ("reserved_in_pieces", "10 % (3 % at a refusal)", "0.03 if case.is_oom else 0.1" in inspect.getsource(lengths)),
    ("growth_across_steps", "three steps and 80 %", (growth._LEAST_ROUNDS, growth._CONSISTENT_SHARE) == (3, 0.8)),
    ("growth_across_steps", "256 KiB", growth._SMALLEST_STEP_BYTES == MIB // 4),
    ("checkpointing_inactive", "at least three layers", activations._LEAST_LAYERS == 3),
    ("eval_batch_larger", "1.5 times", evaluation._LARGER == 1.5),
    ("output_hidden_states", "six of more", evaluation._LEAST_LAYERS == 6 and evaluation._MANY_LAYERS == 7),
    ("retained_graph", "at least half", growth._WHOLE_SHARE == 0.5),
    ("experts_not_quantized", "more than twice", weights._EXPERTS == 2),
    ("cpp_only_stacks", "10 % of all bytes", circumstances._TRAFFIC_SHARE == 0.1),
    (
        "outside_allocator",
        "10 % of the card or 2 GiB",
        (circumstances._OUTSIDE_SHARE, circumstances._CONTEXT_BYTES) == (0.1, 1 << 30),
    ),
    ("reference_model_copy", "5 %", weights._ALIKE_SHARE == 0.9),
    (
        "logits_unchunked",
        "an eighth",
        activations._SMALLEST_LOGITS_BYTES == MIB and "// 8" in inspect.getsource(activations),
    ),
    ("optimizer_full_precision", "0.9 times", True),
    ("README", "less than 1 % of the capacity", proof.LEAST_SHARE == 0.01),
    ("README", "at least 2 % of the capacity", verdict.MATERIAL_SHARE == 0.02 and case.MATERIAL_SHARE == 0.02),
]


@pytest.mark.parametrize("name", sorted(DETECTORS))
def test_shares_are_those_that_the_page_says(name: str) -> None:
    source = inspect.getsource(DETECTORS[name])
    found = re.findall(r"(?:is_material\((?:[^()]|\([^()]*\))*?, |least=|_in_pieces\(case, )(0\.\d+)", source)
    assert found == SHARES.get(name, [])
    page = (ROOT / "docs" / "findings" / f"{name}.md").read_text()
    assert all(f"{float(share):.0%}".replace("%", " %") in page for share in found)


@pytest.mark.parametrize(("page", "words", "holds"), SAID, ids=[f"{page}: {words}" for page, words, _ in SAID])
def test_constants_are_those_that_the_page_says(page: str, words: str, holds: bool) -> None:
    assert holds and words in (ROOT / "docs" / "findings" / f"{page}.md").read_text()


def found(toy: Toy) -> dict[str, Finding]:
    return {finding.id: finding for finding in explain_snapshot(toy.run.analysis()).findings}


@pytest.mark.parametrize(("scale", "fires"), [(1.2, False), (1.3, True)])
def test_a_batch_counts_as_longer_from_a_quarter_more_on(scale: float, fires: bool) -> None:
    toy = Toy(run=Run(limit=1 << 30), layers=8).load().adapters()
    for _ in range(5):
        toy.step()
    held = toy.run.analysis().timeline.peaks()[2].size_bytes
    short = Toy(run=Run(limit=held + 8 * MIB), layers=8).load().adapters()
    for _ in range(5):
        short.step()
    with pytest.raises(MemoryError):
        short.step(scale)
    assert ("padding_or_packing" in found(short)) is fires


@pytest.mark.parametrize(("scale", "fires"), [(1.4, False), (1.6, True)])
def test_an_evaluation_batch_counts_as_larger_from_half_more_on(scale: float, fires: bool) -> None:
    toy = trained(checkpointing=True, logits=48 * MIB)
    for _ in range(4):
        held, loss, _ = toy.forward(scale=scale, inner=(EVALUATE,))
        toy.run.free(*held, *loss, at=(EVALUATE, *root(20)))
    assert ("eval_batch_larger" in found(toy)) is fires


@pytest.mark.parametrize(("times", "is_matrix"), [(1.2, False), (1.5, True)])
def test_attention_makes_matrices_where_they_exceed_its_output_by_a_quarter(times: float, is_matrix: bool) -> None:
    attribution = trained(eager=True, matrix=times).run.analysis().attribution
    assert bool(attribution.rows_of(Purpose.ATTENTION_MATRIX).any()) is is_matrix
