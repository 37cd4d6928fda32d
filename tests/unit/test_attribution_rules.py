"""Every rule of the table decides something: without it, a recording or a small made program comes out wrong."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
from made_programs import LOAD, MADE, MIB, UNKNOWN_LOADER, Program
from scoring import Score, score
from support import labels, timeline
from thinned import WAYS, bare, shares

from memtrace.attribution import classify
from memtrace.attribution.categories import Purpose
from memtrace.attribution.rules import RULES
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw

# The smallest recording that a rule decides bytes of, for rules that no made program is about.
DECIDES = {
    "cublas-frame": "mistral-7b_oom-late-cpp",
    "cublas-once": "tiny-llama_3-steps",
    "optimizer-state": "tiny-llama_3-steps",
    "step-gradient": "deepspeed-2_oom",
    "master": "half-precision_oom",
    "early-other-state": "shampoo_late",
    "early-part": "recurrent_late",
    "saved-input": "contrast_late",
    "optimizer-temporary": "tiny-llama_3-steps",
    "gathered-trained": "fsdp1_late",
    "sharded-weight": "deepspeed-3_oom",
    "master-copy": "deepspeed-3_oom",
    "early-sharded": "deepspeed-3_late",
    "gathered": "fsdp2-qlora_oom",
    "reduced-gradient": "fsdp1_late",
    "early-given-up": "ddp_late",
    "gradient": "tiny-llama_3-steps",
    "adapter": "mistral-7b_no-checkpointing",
    "trained-weight": "tinyllama_full",
    "quant-state": "llama2-7b_oom-first-step",
    "loaded-weight": "tiny-llama_3-steps",
    "loading-copy": "tiny-llama_3-steps",
    "weight-copy": "mistral-7b_no-checkpointing",
    "weight-copy-shape": "mistral-7b_no-checkpointing",
    "logits-in-loss": "tinyllama_full",
    "loss": "tiny-llama_3-steps",
    "loss-saves": "liger_late",
    "logits": "tiny-llama_3-steps",
    "logits-copy": "tinyllama_hf-trainer",
    "logits-compiled": "compiled_late",
    "attention-matrix": "falcon_sdpa-math",
    "kv-cache": "llama_generate_own-recorder",
    "recompute": "mistral-7b_reentrant",
    "recompute-temporary": "mistral-7b_reentrant",
    "cast-for-good": "qwen2-7b_baseline",
    "kept-data": "policy_oom",
    "result": "features_oom",
    "activation": "tiny-llama_3-steps",
    "activation-unfinished": "llama2-7b_oom-first-step",
    "forward-temporary": "tiny-llama_3-steps",
    "loss-gradient": "tiny-llama_3-steps",
    "backward": "tiny-llama_3-steps",
    "early-scales": "llama2-7b_recorded-after-load",
    "early-trainable": "tinyllama_full-late",
    "later-gradient": "splats_late",
    "later-weight": "splats_late",
    "early-flat-gradients": "deepspeed-3_late",
    "early-follower": "lookahead_late",
    "early-adapter": "mistral-7b_oom-late-cpp",
    "early-weight": "mixtral_lora_late",
    "other-frames": "llama_generate_own-recorder",
}
# Rules that say what a part of a recording does not show: without them, more of it is wrong.
THINNED = {
    "weight-untold": ("tinyllama_full", "out of memory in the first backward pass"),
    "early-untold": ("own-adamw_oom", "one pass"),
    "input-untold": ("graph_oom", "out of memory in the first forward pass"),
    "activation-left": ("detection_oom", "stacks of the final state"),
}
COMPARED = {"early-quantized": ("llama2-7b_recorded-after-load", "llama2-7b_baseline", Purpose.QUANTIZED)}
# They say that something is not known: see test_attribution_truth.py.
SAYS = {"one-of-equals", "early-one-of-equals", "early-unknown"}


def _without(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(classify, "RULES", tuple(each for each in RULES if each.id != rule))


def test_every_rule_has_its_case() -> None:
    assert {*DECIDES, *MADE, *COMPARED, *THINNED, *SAYS} == {rule.id for rule in RULES}


@lru_cache(maxsize=1)
def _truth(name: str) -> dict[str, Any]:
    return labels(name)


def _scored(name: str) -> Score:
    made = timeline(name)
    bare = dataclasses.replace(made, snapshot=dataclasses.replace(made.snapshot, memtrace={}))
    return score(bare, classify.attribute(bare), _truth(name))


_with_all_rules = lru_cache(maxsize=1)(_scored)


@pytest.mark.parametrize(("name", "rule"), sorted((name, rule) for rule, name in DECIDES.items()))
def test_a_recording_is_wrong_without_the_rule(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _with_all_rules(name)
    _without(monkeypatch, rule)
    left = _scored(name)
    assert left.wrong.total() > whole.wrong.total() or left.at_peak < whole.at_peak


@pytest.mark.parametrize("rule", THINNED)
def test_a_part_of_a_recording_is_wrong_without_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, way = THINNED[rule]
    whole = bare(timeline(name))
    thinned = WAYS[way](whole)
    assert thinned is not None
    found = shares(thinned, classify.attribute(thinned.timeline), whole, labels(name))
    _without(monkeypatch, rule)
    less = shares(thinned, classify.attribute(thinned.timeline), whole, labels(name))
    assert found.wrong < 0.02 and less.wrong + less.unattributed > found.wrong + 0.04


def test_of_functions_on_plain_tensors_that_die_in_their_first_pass_nothing_is_known() -> None:
    whole = bare(timeline("functional-style_oom"))
    thinned = WAYS["out of memory in the first forward pass"](whole)
    assert thinned is not None
    found = shares(thinned, classify.attribute(thinned.timeline), whole, labels("functional-style_oom"))
    assert found.wrong == 0 and found.unattributed > 0.8


@pytest.mark.parametrize("rule", MADE)
def test_a_made_program_is_wrong_without_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, purpose = MADE[rule]
    program = Program()
    make(program)
    snapshot = from_raw(program.snapshot(), rule)
    made = build(snapshot, snapshot.devices[0])
    row = made.allocations.address.tolist().index(program.places["asked"][0])

    def decided() -> tuple[str, Purpose]:
        attribution = classify.attribute(made)
        by = attribution.rules[int(attribution.rule[row])]
        return by.id, by.purpose

    assert decided() == (rule, purpose)
    _without(monkeypatch, rule)
    assert decided()[1] is not purpose


@pytest.mark.parametrize(("is_trained", "purpose"), [(True, Purpose.OTHER), (False, Purpose.UNQUANTIZED)])
def test_beside_a_model_that_is_trained_what_the_program_keeps_is_data(is_trained: bool, purpose: Purpose) -> None:
    program = Program()
    program.alloc("weight", 2 * MIB, LOAD)
    program.alloc("store", 64 * MIB, UNKNOWN_LOADER)
    program.passes(size=2 * MIB if is_trained else 64)
    snapshot = from_raw(program.snapshot(), "made")
    made = build(snapshot, snapshot.devices[0])
    found = classify.attribute(made)
    row = made.allocations.address.tolist().index(program.places["store"][0])
    assert found.rules[int(found.rule[row])].purpose is purpose


@pytest.mark.parametrize("rule", COMPARED)
def test_a_late_recording_says_what_a_whole_one_of_the_same_model_says(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, whole, purpose = COMPARED[rule]

    def bytes_of(name: str) -> int:
        made = timeline(name)
        return int(made.allocations.requested_bytes[classify.attribute(made).rows_of(purpose)].sum())

    expected = bytes_of(whole)
    assert bytes_of(late) == pytest.approx(expected, rel=1e-3)
    _without(monkeypatch, rule)
    assert bytes_of(late) != pytest.approx(expected, rel=1e-3)
