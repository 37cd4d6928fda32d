"""Changes to recommend, each written once, with the conditions under which it makes sense.

Names of arguments were checked against transformers 5.24, PEFT 0.21, TRL 1.16 and bitsandbytes 0.50. Savings come
from the detectors; formulas follow docs/estimate.md.
"""

from __future__ import annotations

import re
from dataclasses import replace

from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.whatif.program import extract
from memtrace.allocator.whatif.whatif import Simulation, simulate
from memtrace.explain.answer import Advice, Basis
from memtrace.explain.case import Case
from memtrace.explain.setting import RunSetting

_WINDOWS_PATH = re.compile(r"^[A-Za-z]:[\\/]")
_REPLAY_EVENTS = 3_000_000
"""Longer recordings are not replayed while somebody waits; ``memtrace simulate`` does it on request."""


def rule(change: str) -> Advice:
    """Advice without a number."""
    return Advice(change, None, Basis.RULE)


def formula(change: str, saves_bytes: int) -> Advice:
    """Advice whose saving is arithmetic on measured sizes; without a number if nothing would be won."""
    return Advice(change, saves_bytes, Basis.FORMULA) if saves_bytes > 0 else rule(change)


def ran_on_windows(case: Case) -> bool:
    """Whether file names in the stacks are Windows paths."""
    return any(_WINDOWS_PATH.match(frame.filename) for frame in case.timeline.snapshot.stacks.frames)


def _any_file(case: Case, part: str) -> bool:
    return any(part in frame.filename.replace("\\", "/") for frame in case.timeline.snapshot.stacks.frames)


def uses_autocast(case: Case) -> bool:
    """Whether the forward pass ran under autocast: as the recorder saw it, or by the decorator that trainers use."""
    config = case.timeline.snapshot.memtrace.get("config")
    seen = isinstance(config, dict) and bool(config.get("autocast"))
    return seen or case.timeline.snapshot.stacks.called("amp/autocast_mode.py", "decorate_autocast")


def uses_liger(case: Case) -> bool:
    """Whether kernels of the liger-kernel package ran."""
    return _any_file(case, "liger_kernel/")


def uses_expandable(case: Case) -> bool:
    """Whether expandable segments are in effect."""
    return case.config.expandable_segments or bool(case.timeline.replay.is_expandable.any())


def compute_capability(case: Case) -> tuple[int, int] | None:
    """The GPU's, where memtrace's recorder stored it."""
    value = case.timeline.snapshot.memtrace.get("capability")
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return int(value[0]), int(value[1])
    return None


def attention_backends(case: Case) -> str:
    """The attention implementation to ask for on this GPU."""
    capability = compute_capability(case)
    if capability is not None and capability < (8, 0):
        return 'attn_implementation="sdpa" (FlashAttention needs an Ampere GPU or later)'
    return 'attn_implementation="sdpa", or "flash_attention_2" on Ampere or later with 16-bit tensors'


def replay_expandable(case: Case) -> Simulation | None:
    """The recorded program under expandable segments up to the event; None if it can't or needn't be replayed."""
    timeline = case.timeline
    if uses_expandable(case) or not timeline.replay.exact or len(timeline) > _REPLAY_EVENTS or len(timeline) == 0:
        return None
    if timeline.replay.initial_reserved_bytes and not timeline.replay.initial_segments.address.size:
        return None
    limit = case.capacity.low_bytes if case.is_oom and case.capacity is not None else None
    config = replace(case.config, expandable_segments=True).with_limit(limit)
    program = extract(gather(timeline.device, case.config)).to_run()
    return simulate(program, config, until=case.at.event if case.is_oom else None)


def against_pieces(setting: RunSetting) -> list[str]:
    """Settings that keep free memory in one piece, as this back end, release and platform spell them."""
    found = []
    if setting.may_expand:
        found.append(
            f"{setting.variable}=expandable_segments:True in the environment before Python starts (not with vLLM's "
            "sleep mode)"
        )
    if setting.may_split:
        found.append(
            f"{setting.variable}=max_split_size_mb:128 in the environment before Python starts: large blocks are kept "
            "whole for large requests"
        )
    return found


def expandable_segments(case: Case) -> Advice | None:
    """Switch expandable segments on, with the saving by replay; None where they are on or can't be used."""
    if uses_expandable(case) or ran_on_windows(case):
        return None
    change = (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment before Python starts "
        "(Linux, PyTorch 2.1+; not with vLLM's sleep mode)"
    )
    outcome = replay_expandable(case)
    if outcome is None:
        return rule(change)
    if case.is_oom:
        if outcome.refused and not outcome.refused[0].recorded:
            return None
        served = bool(outcome.spared)
        saves = case.reserved_bytes - outcome.end_reserved_bytes
        if not served or saves <= 0:
            return None
        return Advice(f"{change}: this request is served then", saves, Basis.REPLAY)
    saves = case.timeline.peaks()[2].size_bytes - outcome.peak_reserved_bytes
    return Advice(change, saves, Basis.REPLAY) if saves > 0 else None
