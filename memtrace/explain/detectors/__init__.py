"""Detectors, one a finding: a function that looks at a :class:`~memtrace.explain.case.Case` and answers or is silent.

To add one, write the function, list it here and write docs/findings/ID.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memtrace.explain.answer import Finding, Together
from memtrace.explain.case import Case
from memtrace.explain.detectors.attention import attention_matrices, kv_cache_in_training
from memtrace.explain.detectors.checkpointing import checkpointing_inactive
from memtrace.explain.detectors.copies import gradient_buckets, offload_reloads, retained_graph, zero_on_one_gpu
from memtrace.explain.detectors.evaluation import eval_batch_larger, eval_peak, output_hidden_states
from memtrace.explain.detectors.growth import growth_across_steps
from memtrace.explain.detectors.lengths import padding_or_packing, reserved_in_pieces, variable_length_fragmentation
from memtrace.explain.detectors.logits import kept_logits, logits_unchunked
from memtrace.explain.detectors.optimizer import optimizer_full_precision, optimizer_on_first_step
from memtrace.explain.detectors.outside import outside_allocator, process_limit, settings_without_effect
from memtrace.explain.detectors.precision import fp32_lora_branch, fp32_upcast_head
from memtrace.explain.detectors.recording import cpp_only_stacks, late_recording, truncated_trace
from memtrace.explain.detectors.reference import reference_model_copy
from memtrace.explain.detectors.weights import base_not_quantized, experts_not_quantized, load_time_copies
from memtrace.explain.proof import Bench, proven, together

Detector = Callable[[Case], Finding | None]

DETECTORS: dict[str, Detector] = {
    "checkpointing_inactive": checkpointing_inactive,
    "logits_unchunked": logits_unchunked,
    "kept_logits": kept_logits,
    "attention_matrices": attention_matrices,
    "kv_cache_in_training": kv_cache_in_training,
    "base_not_quantized": base_not_quantized,
    "experts_not_quantized": experts_not_quantized,
    "reference_model_copy": reference_model_copy,
    "fp32_upcast_head": fp32_upcast_head,
    "fp32_lora_branch": fp32_lora_branch,
    "growth_across_steps": growth_across_steps,
    "variable_length_fragmentation": variable_length_fragmentation,
    "reserved_in_pieces": reserved_in_pieces,
    "padding_or_packing": padding_or_packing,
    "eval_peak": eval_peak,
    "eval_batch_larger": eval_batch_larger,
    "output_hidden_states": output_hidden_states,
    "retained_graph": retained_graph,
    "gradient_buckets": gradient_buckets,
    "zero_on_one_gpu": zero_on_one_gpu,
    "offload_reloads": offload_reloads,
    "optimizer_full_precision": optimizer_full_precision,
    "optimizer_on_first_step": optimizer_on_first_step,
    "load_time_copies": load_time_copies,
    "process_limit": process_limit,
    "outside_allocator": outside_allocator,
    "settings_without_effect": settings_without_effect,
    "cpp_only_stacks": cpp_only_stacks,
    "late_recording": late_recording,
    "truncated_trace": truncated_trace,
}
"""Finding id -> detector. Ids are part of the JSON contract."""

CONTEXT = frozenset(
    {
        "offload_reloads",
        "process_limit",
        "settings_without_effect",
        "cpp_only_stacks",
        "late_recording",
        "truncated_trace",
    }
)
"""Findings about the circumstances rather than about bytes that could be saved; listed after the others."""


IN_PIECES = frozenset({"variable_length_fragmentation", "reserved_in_pieces"})


def ranked(findings: Iterable[Finding], verdict: str) -> tuple[Finding, ...]:
    """What could save most first, circumstances last; first what grows without end, and pieces
    where they are the verdict."""

    def rank(finding: Finding) -> tuple[int, int]:
        if (verdict == "fragmentation" and finding.id in IN_PIECES) or finding.per_step:
            return 0, 0
        return (2 if finding.id in CONTEXT else 1), -finding.stake_bytes

    return tuple(sorted(findings, key=rank))


def detect(case: Case) -> tuple[tuple[Finding, ...], Together | None]:
    """Every finding that applies, ranked, its changes tried; and what the best change of each comes to together."""
    bench = Bench(case)
    found, held = [], {}
    for detector in DETECTORS.values():
        finding = detector(case)
        if finding is not None:
            tested, proposals = proven(bench, finding)
            found.append(tested)
            if proposals:
                held[finding.id] = proposals[0]
    findings = ranked(found, case.verdict.verdict)
    return findings, together(bench, {f.id: held[f.id] for f in findings if f.id in held})
