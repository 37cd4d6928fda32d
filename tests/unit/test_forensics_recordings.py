"""``explain`` on the bundled recordings: verdict, moment, findings, and their bytes against the recorded truth."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support import NAMES, analysis, info, labels, read_text

from memtrace.explain.answer import Explanation, Finding
from memtrace.explain.explain import explain_snapshot
from memtrace.render.explain_text import render_explanation

LLAMA = "llama2-7b_"


@cache
def explained(name: str) -> Explanation:
    return explain_snapshot(analysis(name))


def finding(name: str, wanted: str) -> Finding:
    found = {f.id: f for f in explained(name).findings}
    assert wanted in found, f"{name}: {sorted(found)}"
    return found[wanted]


def ids(name: str) -> set[str]:
    return {f.id for f in explained(name).findings}


def near(measured: int | None, truth: int, share: float = 0.01) -> bool:
    return measured is not None and abs(measured - truth) <= share * truth


def peak_truth(name: str, *keys: str) -> int:
    return sum(labels(name)["peak_breakdown"].get(key, 0) for key in keys)


@pytest.mark.parametrize(
    ("name", "verdict", "phase", "step", "first"),
    [
        ("oom-fragmentation", "fragmentation", "forward", 10, False),
        ("oom-first-step", "budget", "forward", 0, True),
        ("variable-length-expandable", "budget", "backward", 17, False),
        ("oom-at-load", "budget", "load", None, None),
    ],
)
def test_verdict_and_moment_of_an_oom(
    name: str, verdict: str, phase: str, step: int | None, first: bool | None
) -> None:
    answer = explained(LLAMA + name)
    assert (answer.verdict, answer.confidence) == (verdict, "measured")
    assert answer.when is not None and answer.oom is not None
    assert (answer.when.phase, answer.when.step, answer.when.first_step) == (phase, step, first)
    truth = info(LLAMA + name)["oom"]
    assert (truth["phase"], truth["step"]) == (phase, step or 0)
    assert answer.oom["tried_bytes"] == truth["requested"]
    assert answer.oom["free_bytes"] == truth["device_free"]


@pytest.mark.parametrize("name", ["oom-fragmentation", "oom-first-step", "variable-length-expandable", "oom-at-load"])
def test_a_limit_set_through_the_api_is_bounded_and_said_to_be_inferred(name: str) -> None:
    capacity = explained(LLAMA + name).capacity
    assert capacity is not None and (capacity.kind, capacity.source) == ("limit", "inferred")
    # The observer was handed the limit exactly; segments are multiples of 2 MiB.
    assert capacity.low_bytes <= info(LLAMA + name)["oom"]["device_allocated"] <= capacity.high_bytes
    assert "inferred" in finding(LLAMA + name, "process_limit").evidence


@pytest.mark.parametrize("name", [name for name in NAMES if info(name).get("oom") is None])
def test_every_recording_without_an_oom_says_so(name: str) -> None:
    answer = explained(name)
    assert answer.verdict == "no_oom" and answer.oom is None and answer.capacity is None


def test_fragmentation_has_its_bytes_and_the_setting_by_replay() -> None:
    found = finding(LLAMA + "oom-fragmentation", "variable_length_fragmentation")
    assert f"{found.bytes / 2**30:.2f}" == "1.83"  # what the recorded message prints
    best = found.advice[0]
    assert "expandable_segments:True" in best.change and best.basis == "replay"
    assert best.saves_bytes is not None and best.saves_bytes > 2**30
    assert explained(LLAMA + "oom-fragmentation").findings[0] is found


def test_expandable_segments_are_not_recommended_where_they_are_on() -> None:
    for name in ("variable-length-expandable", "baseline-expandable"):
        text = " ".join(a.change for f in explained(LLAMA + name).findings for a in f.advice)
        assert "expandable_segments" not in text


def test_first_step_keeps_every_layer() -> None:
    name = LLAMA + "oom-first-step"
    found = finding(name, "checkpointing_inactive")
    assert near(found.bytes, peak_truth(name, "activations/saved"))
    because = " ".join(explained(name).because)
    assert "22 of 32 layers" in because


def test_load_without_quantisation() -> None:
    found = finding(LLAMA + "oom-at-load", "base_not_quantized")
    assert near(found.bytes, info(LLAMA + "oom-at-load")["oom"]["requested"])
    assert "llama2-7b in 16 bits" in found.evidence
    # What it would take: packed linears and 16-bit tables, by the recordings that are quantised.
    four_bit = peak_truth(LLAMA + "baseline", "base_weights/weight", "base_weights/quant_const") - 524_288_000
    assert found.advice[0].saves_bytes is not None
    assert near(found.bytes - four_bit, found.advice[0].saves_bytes, 0.05)


def test_kept_graphs_grow_by_what_the_run_measured() -> None:
    name = LLAMA + "kept-graphs"
    found = finding(name, "growth_across_steps")
    levels = [step["alloc"] for step in info(name)["steps"]]
    assert found.per_step and near(found.bytes, (levels[-1] - levels[1]) // (len(levels) - 2))
    assert "train/scen.py" in found.evidence and "graph" in found.evidence


def test_reference_model_is_one_of_two_copies() -> None:
    found = finding(LLAMA + "reference-model", "reference_model_copy")
    one = peak_truth(LLAMA + "baseline", "base_weights/weight", "base_weights/quant_const", "base_weights/buffer")
    assert near(found.bytes, one)
    assert "base_not_quantized" not in ids(LLAMA + "reference-model")


def test_large_vocabulary() -> None:
    name = "qwen2-7b_large-vocabulary"
    logits = finding(name, "logits_unchunked")
    assert near(logits.bytes, peak_truth(name, "temporary/logits", "temporary/loss", "temporary/loss_grad"))
    head = finding(name, "fp32_upcast_head")
    assert near(head.bytes, 2 * 152064 * 3584 * 4)
    assert head.advice[0].saves_bytes is not None and near(2 * head.advice[0].saves_bytes, head.bytes or 0)


def test_the_baseline_is_free_of_what_it_does_not_have() -> None:
    absent = {"checkpointing_inactive", "growth_across_steps", "logits_unchunked", "reference_model_copy",
              "base_not_quantized", "eval_peak", "variable_length_fragmentation", "attention_matrices",
              "padding_or_packing", "kept_logits", "truncated_trace", "cpp_only_stacks"}  # fmt: skip
    for name in (LLAMA + "baseline", LLAMA + "baseline-expandable"):
        assert not ids(name) & absent


def test_tiny_llama_has_no_checkpointing_and_full_logits() -> None:
    name = "tiny-llama_3-steps"
    assert near(finding(name, "checkpointing_inactive").bytes, peak_truth(name, "activations/saved"), 0.06)
    truth = peak_truth(name, "temporary/loss", "temporary/loss_grad")
    assert near(finding(name, "logits_unchunked").bytes, truth)


def test_late_recording_is_explained_by_sizes() -> None:
    name = LLAMA + "recorded-after-load"
    assert near(finding(name, "optimizer_full_precision").bytes, peak_truth(name, "lora/optstate"))
    assert near(finding(name, "fp32_upcast_head").bytes, 2 * 32000 * 4096 * 4)


def test_lost_beginning_and_native_stacks_are_said() -> None:
    assert "truncated_trace" in ids(LLAMA + "ring-truncated")
    assert "cpp_only_stacks" in ids(LLAMA + "cpp-stacks")


def test_variable_lengths_without_an_oom() -> None:
    name = LLAMA + "variable-length"
    found = finding(name, "variable_length_fragmentation")
    peaks = info(name)["steps"][-1]
    assert near(found.bytes, peaks["peak_reserved"] - peaks["peak"])
    # The same run was recorded under expandable segments; without a limit the replay gains most of the difference.
    assert found.advice[0].basis == "replay" and found.advice[0].saves_bytes is not None
    assert found.advice[0].saves_bytes > 0.8 * (found.bytes or 0)


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_one_screen(name: str) -> None:
    lines = render_explanation(explained(name))
    assert 3 <= len(lines) <= 20 and max(map(len, lines)) <= 80
    assert max(map(len, render_explanation(explained(name), everything=True))) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_is_measured_and_says_why(name: str) -> None:
    for found in explained(name).findings:
        assert found.title and found.evidence and (found.advice or found.tried), found.id
        assert found.bytes is None or found.bytes > 0
        for advice in found.advice:
            assert advice.saves_bytes is None or advice.saves_bytes > 0
            assert (advice.saves_bytes is None) == (advice.basis == "rule") or advice.basis == "replay"


@pytest.mark.parametrize("name", ["oom-fragmentation", "oom-first-step"])
def test_the_log_of_a_run_supplies_limit_and_card(name: str) -> None:
    oom: dict[str, Any] = info(LLAMA + name)["oom"]
    log = f"step 3\nTraceback (most recent call last):\ntorch.OutOfMemoryError: {oom['message']}\n"
    alone, both = explained(LLAMA + name), explain_snapshot(analysis(LLAMA + name), reading=read_text(log))
    assert both.verdict == alone.verdict
    assert both.capacity is not None and both.capacity.source == "log"
    assert both.oom is not None and both.oom["total_bytes"] and near(both.oom["limit_bytes"], oom["device_allocated"])
    assert len(both.ooms) == 1 and not both.warnings


def test_a_log_of_another_run_is_not_mixed_in() -> None:
    message = info(LLAMA + "oom-at-load")["oom"]["message"]
    answer = explain_snapshot(analysis(LLAMA + "oom-first-step"), reading=read_text(message))
    assert answer.capacity is not None and answer.capacity.source == "inferred"
    assert any("log" in line for line in answer.warnings)


def test_a_given_capacity_replaces_the_inferred_one() -> None:
    name = LLAMA + "oom-first-step"
    exact = explain_snapshot(analysis(name), capacity_bytes=round(22.5 * 2**30))
    assert exact.capacity is not None and exact.capacity.is_exact and exact.verdict == "budget"
    assert exact.oom is not None and exact.oom["limit_bytes"] == round(22.5 * 2**30)
    roomy = explain_snapshot(analysis(name), capacity_bytes=40 * 2**30)
    assert roomy.verdict == "limit"  # it would have fitted there and was refused all the same


def test_the_refused_request_is_named_by_site_and_size() -> None:
    text = " ".join(explained(LLAMA + "oom-first-step").sizes)
    assert "2,048 tokens" in text and "11,008 values" in text and "may be" in text
