"""What is no tensor's doing: the process's limit, other memory on the card, settings, and what the recording lacks."""

from __future__ import annotations

import re

from memtrace.allocator.conf_text import ConfError, parse_conf
from memtrace.allocator.config import CONF_VARIABLES
from memtrace.analysis import is_truncated
from memtrace.answers.outside import OWNERS
from memtrace.answers.outside import outside_allocator as outside_of
from memtrace.attribution.categories import Category
from memtrace.attribution.origin import is_cpp
from memtrace.explain.advice import rule
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector
from memtrace.units import GIB
from memtrace.units import format_bytes as size

_OUTSIDE_SHARE = 0.1
_CONTEXT_BYTES = GIB  # a CUDA context with its libraries: 0.5 to 0.8 GiB measured after a training step
_TRAFFIC_SHARE = 0.1


@detector("The limit of this process ran out, not the card", is_context=True)
def process_limit(case: Case) -> Seen | None:
    """The limit of this process refused the request while the card had room."""
    capacity, refusal = case.capacity, case.refusal
    if capacity is None or refusal is None or capacity.kind != "limit":
        return None
    free = refusal.device_free_bytes
    if free is not None and free < refusal.need_bytes:
        return None
    room = f"{size(free)} was free on the card" if free is not None else "the limit was reached"
    asked, need = size(refusal.asked_bytes), size(refusal.need_bytes)
    evidence = f"{room} when {need}{f' ({asked} rounded up)' if need != asked else ''} was refused"
    low, high = size(capacity.low_bytes), size(capacity.high_bytes)
    if capacity.source == "inferred":
        bounds = f"between {low} and {high}" if capacity.low_bytes else f"below {high}"
        evidence += f": inferred, a limit {bounds} (or else a driver that refuses without saying why)."
    else:
        evidence += f"; the limit is {low} {'by the log' if capacity.source == 'log' else f'as {capacity.source}'}."
    change = rule(
        "raise or drop torch.cuda.set_per_process_memory_fraction (per_process_memory_fraction in the settings string) "
        "if it is not meant"
    )
    return Seen(None, evidence, (change,), size_bytes=capacity.low_bytes or None)


@detector("Memory in use outside PyTorch's allocator", least=0)
def outside_allocator(case: Case) -> Seen | None:
    """Memory in use on the card that this allocator does not hold, where the file has the card's totals."""
    facts = outside_of(case.timeline) or {}
    total, other = facts.get("device_total_bytes"), facts.get("not_this_allocator_bytes")
    if total is None or other is None or other < max(_OUTSIDE_SHARE * total, 2 * _CONTEXT_BYTES):
        return None
    rows = sorted((row for row in facts["rows"] if row["bytes"] > 0), key=lambda row: -row["bytes"])
    who = "; ".join(f"{size(row['bytes'])} {OWNERS[row['owner']]}" for row in rows[:3])
    who = who or "context, NCCL, paged optimizer states, other libraries or other processes"
    evidence = f"{size(other)} of the {size(total)} card is neither free nor PyTorch's: {who}."
    look = f"{case.setting.card_tool} names the processes; "
    change = rule(look + "paged optimizers and vLLM in the same process don't show in a snapshot")
    return Seen(None, evidence, (change,), size_bytes=other)


@detector("Allocator settings that don't take effect", is_context=True)
def settings_without_effect(case: Case) -> Seen | None:
    """A settings string that PyTorch refuses, ignores, or could not put into effect."""
    settings = case.timeline.snapshot.settings
    texts = {key: settings[key] for key in CONF_VARIABLES if isinstance(settings.get(key), str) and settings[key]}
    segments = case.timeline.device.segments
    problems: list[str] = []
    for key, text in texts.items():
        try:
            parse_conf(text)
        except ConfError as error:
            problems.append(f"{key}={text}: {error}")
        wanted = re.search(r"expandable_segments\s*[:=]\s*True", text)
        if wanted and "=" in wanted[0]:
            problems.append(f"{key}={text}: a setting and its value are joined by a colon")
        elif wanted and "expandable_segments" in settings and settings["expandable_segments"] is not True:
            problems.append(f"{key} asks for expandable_segments, but it is off in the recorded settings")
        elif wanted and len(segments) and not segments.is_expandable.any():
            problems.append(f"{key} asks for expandable_segments, but no segment is expandable")
    if len(set(texts.values())) > 1:
        problems.append(f"{' and '.join(texts)} are both set: only the first counts")
    threshold = settings.get("garbage_collection_threshold")
    limited = case.capacity is not None and case.capacity.kind == "limit"
    if isinstance(threshold, float) and threshold > 0 and case.is_oom and not limited:
        problems.append("garbage_collection_threshold does nothing without a memory fraction")
    if not problems:
        return None
    hint = "write key:value pairs with commas, in the environment before Python starts"
    if case.setting.is_windows:
        hint += "; expandable segments don't exist on Windows"
    return Seen(None, "; ".join(problems[:3]) + ".", (rule(hint),))


@detector("Stacks without Python frames", is_context=True)
def cpp_only_stacks(case: Case) -> Seen | None:
    """Live bytes whose stack has frames, none of them Python's."""
    made = case.facts.born >= 0
    frames = case.timeline.snapshot.stacks.stack
    rows = case.with_stack(lambda stack: bool(frames(stack)) and all(is_cpp(f.filename, f.name) for f in frames(stack)))
    rows &= made
    traffic = case.total(rows) / max(case.total(made), 1)
    if traffic < _TRAFFIC_SHARE:
        return None
    evidence = (
        f"{traffic:.0%} of all bytes ever allocated were asked for by threads that run no Python (autograd's): only "
        "C++ frames are known of them. memtrace goes by their lifetimes instead."
    )
    change = rule(
        "to name the forward code behind them record under torch.autograd.set_detect_anomaly(True); "
        'stacks="python" keeps files small at no loss'
    )
    return Seen(None, evidence, (change,), size_bytes=case.live_total(rows))


@detector("Recording began after the model was loaded", is_context=True)
def late_recording(case: Case) -> Seen | None:
    """Recording began after the model was loaded: its weights have no stacks."""
    if is_truncated(case.timeline) is not None:
        return None
    early = case.facts.before_trace & case.live
    lost = case.live_total(case.kind(Category.UNATTRIBUTED))
    if not case.is_material(case.total(early), 0.1) or not case.is_material(lost):
        return None
    evidence = f"{int(early.sum())} live blocks are older than the first event; "
    evidence += f"nothing tells what {size(lost)} of them is for."
    change = rule("call torch.cuda.memory._record_memory_history() before from_pretrained, or use memtrace run")
    return Seen(None, evidence, (change,), size_bytes=case.total(early))


@detector("The beginning of the recording is lost", is_context=True)
def truncated_trace(case: Case) -> Seen | None:
    """The ring buffer overflowed: what was live before the first event has no history."""
    if is_truncated(case.timeline) is not True:
        return None
    early, blocks = case.timeline.replay.initial_requested_bytes, len(case.timeline.replay.initial_pending)
    change = rule("a larger max_entries in torch.cuda.memory._record_memory_history, or record fewer steps")
    evidence = f"{size(early)} in {blocks} blocks were live before the first event."
    return Seen(None, evidence, (change,), size_bytes=early)
