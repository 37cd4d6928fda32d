"""What lies outside of this process' allocations: its limit, other memory on the card, settings without effect."""

from __future__ import annotations

import re

from memtrace.allocator.conf_text import ConfError, parse_conf
from memtrace.allocator.config import CONF_VARIABLES
from memtrace.answers.report import outside_allocator as outside_of
from memtrace.explain.advice import rule
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import GIB
from memtrace.units import format_bytes as size

_OUTSIDE_SHARE = 0.1
_CONTEXT_BYTES = GIB  # a CUDA context with its libraries: 0.5 to 0.8 GiB measured after a training step


def process_limit(case: Case) -> Finding | None:
    """The limit of this process refused the request while the card had room."""
    capacity, refusal = case.capacity, case.refusal
    if capacity is None or refusal is None or capacity.kind != "limit":
        return None
    free = refusal.device_free_bytes
    if free is not None and free < refusal.need_bytes:
        return None
    room = f"{size(free)} was free on the card" if free is not None else "the limit was reached"
    if capacity.source == "inferred":
        bounds = f"between {size(capacity.low_bytes)} and {size(capacity.high_bytes)}"
        if capacity.low_bytes == 0:
            bounds = f"below {size(capacity.high_bytes)}"
        evidence = (
            f"{room} when {size(refusal.need_bytes)} was refused: inferred, a limit {bounds} (or else a driver that "
            "refuses without saying why)"
        )
    else:
        source = {"given": "as given", "recorded": "as recorded", "log": "by the log"}[capacity.source]
        evidence = (
            f"{room} when {size(refusal.need_bytes)} was refused; the limit is {size(capacity.low_bytes)} {source}"
        )
    return Finding(
        "process_limit",
        "The limit of this process ran out, not the card",
        capacity.low_bytes or None,
        evidence + ".",
        (
            rule("raise or drop torch.cuda.set_per_process_memory_fraction (per_process_memory_fraction in the "
                 "settings string) if it is not meant"),
        ),
    )  # fmt: skip


def outside_allocator(case: Case) -> Finding | None:
    """Memory in use on the card that this allocator does not hold, where the file has the card's totals."""
    facts = outside_of(case.timeline, case.reserved_bytes)
    if facts is None:
        return None
    total, other = facts.get("device_total_bytes"), facts.get("not_this_allocator_bytes")
    if total is None or other is None or other < max(_OUTSIDE_SHARE * total, 2 * _CONTEXT_BYTES):
        return None
    return Finding(
        "outside_allocator",
        "Memory in use outside PyTorch's allocator",
        other,
        f"{size(other)} of the {size(total)} card is neither free nor PyTorch's: context, NCCL, paged optimizer "
        "states, other libraries or other processes.",
        (
            rule(
                f"{case.setting.card_tool} names the processes; paged optimizers and vLLM in the same process don't "
                "show in a snapshot"
            ),
        ),
    )


def settings_without_effect(case: Case) -> Finding | None:
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
    return Finding(
        "settings_without_effect",
        "Allocator settings that don't take effect",
        None,
        "; ".join(problems[:3]) + ".",
        (rule(hint),),
    )
