"""What the recording itself lacks, as far as it limits the answer."""

from __future__ import annotations

import numpy as np

from memtrace.analysis import is_truncated
from memtrace.attribution.categories import Category
from memtrace.explain.advice import rule
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import format_bytes as size

_TRAFFIC_SHARE = 0.1
_NATIVE = (".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh", ".so")


def cpp_only_stacks(case: Case) -> Finding | None:
    """Live bytes whose stack has frames, none of them Python's."""
    table = case.timeline.snapshot.stacks
    native = np.array(
        [f.filename in ("", "??") or f.filename.endswith(_NATIVE) or "::" in f.name for f in table.frames] or [True]
    )
    only = np.zeros(len(table) + 1, dtype=np.bool_)
    for stack in range(len(table)):
        frames = table.frame_ids(stack)
        only[stack] = len(frames) > 0 and bool(native[frames].all())
    rows = only[case.table.stack] & (case.table.stack >= 0) & (case.facts.born >= 0)
    traffic = case.total(rows) / max(case.total(case.facts.born >= 0), 1)
    if traffic < _TRAFFIC_SHARE:
        return None
    return Finding(
        "cpp_only_stacks",
        "Stacks without Python frames",
        case.live_total(rows),
        f"{traffic:.0%} of all bytes ever allocated were asked for by threads that run no Python (autograd's): only "
        "C++ frames are known of them. memtrace goes by their lifetimes instead.",
        (rule('to name the forward code behind them record under torch.autograd.set_detect_anomaly(True); '
              'stacks="python" keeps files small at no loss'),),
    )  # fmt: skip


def truncated_trace(case: Case) -> Finding | None:
    """The ring buffer overflowed: what was live before the first event has no history."""
    if is_truncated(case.timeline) is not True:
        return None
    early = case.timeline.replay.initial_requested_bytes
    return Finding(
        "truncated_trace",
        "The beginning of the recording is lost",
        early,
        f"{size(early)} in {len(case.timeline.replay.initial_blocks.address)} blocks were live before the first event.",
        (rule("a larger max_entries in torch.cuda.memory._record_memory_history, or record fewer steps"),),
    )


def late_recording(case: Case) -> Finding | None:
    """Recording began after the model was loaded: its weights have no stacks."""
    if is_truncated(case.timeline) is not None:
        return None
    early = case.facts.before_trace & case.live
    total = case.total(early)
    lost = case.live_total(case.kind(Category.UNATTRIBUTED))
    if not case.is_material(total, 0.1) or not case.is_material(lost):
        return None
    return Finding(
        "late_recording",
        "Recording began after the model was loaded",
        total,
        f"{int(early.sum())} live blocks are older than the first event; nothing tells what {size(lost)} of them is "
        "for.",
        (rule("call torch.cuda.memory._record_memory_history() before from_pretrained, or use memtrace run"),),
    )
