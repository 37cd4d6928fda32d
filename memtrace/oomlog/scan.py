"""Whole logs to messages: windows -> lines -> flows of one process -> messages, in the order of the log.

Doubles are counted once, warnings joined to the error they precede.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from memtrace.frozen import dataclass
from memtrace.oomlog.allocator import allocator_drafts, exception_before, is_code
from memtrace.oomlog.clean import TextFlow, clean_lines, flows
from memtrace.oomlog.message import MessageKind, OomMessage
from memtrace.oomlog.texts import TEXTS
from memtrace.oomlog.windows import Readable, TextWindow, windows

_RANKS = (
    re.compile(r"\[?\b(?:global_?rank|rank)\W{1,12}(\d{1,5})", re.IGNORECASE),
    re.compile(r"\blocal_rank\W{1,3}(\d{1,5})", re.IGNORECASE),
    re.compile(r"(?:^|[\[\s])rank\s?(\d{1,5})\]", re.IGNORECASE),
    re.compile(r":\d+:\d+ \[(\d{1,4})\]"),  # NCCL: host:pid:thread [device]
)
_WARNING = re.compile(r"\w*Warning:|warnings\.warn|\bWARN(?:ING)?\b")
_TEXT_LIMIT = 600
MAX_MESSAGES = 4_000
"""A log with more distinct messages (a run that skips every batch that does not fit) is not read to its end."""

MAX_PRINTED = 12_000
"""The same, counting every repetition."""

NEAR_LINES = 200
_MAY_LACK = ("rank", "exception", "torch_at_least", "torch_below", "other_processes")


@dataclass(frozen=True)
class LogReading:
    """Everything read from one log. ``settings``: lines that set the allocator, or say that a setting has no effect;
    ``stopped_early``: it holds more messages than are kept (see ``MAX_MESSAGES``)."""

    messages: tuple[OomMessage, ...]
    settings: tuple[str, ...] = ()
    stopped_early: bool = False


def read_log(log: Readable) -> LogReading:
    """Every out-of-memory message of a log of any size, in order, each printed once or more counted once. Never raises
    on content."""
    collector, settings = _Collector(), dict[str, None]()
    for window in windows(log, settings):
        if collector.full:
            return LogReading(collector.finish(), tuple(settings), stopped_early=True)
        for message in _read_window(window):
            collector.add(message)
    return LogReading(collector.finish(), tuple(settings))


def _read_window(window: TextWindow) -> list[OomMessage]:
    best: dict[tuple[int, int], OomMessage] = {}
    for flow in flows(clean_lines(window.data, window.line)):
        for place, message in _read_flow(flow):
            index = flow.index_at(place)
            spot = (flow.lines[index].number, place - flow.starts[index])
            other = best.get(spot)
            if other is None or len(message.figures) > len(other.figures):
                best[spot] = message
    return [best[spot] for spot in sorted(best)]


def _read_flow(flow: TextFlow) -> Iterator[tuple[int, OomMessage]]:
    taken: list[tuple[int, int]] = []
    for head, draft in allocator_drafts(flow):
        start = head.start() - (len(draft.exception) + 1 if draft.exception else 0)
        taken.append((start, head.end() + draft.consumed))
        yield start, _finish(flow, draft, *taken[-1])
    low = flow.text.lower()
    for row in TEXTS:
        if not row.may_be_in(low):
            continue
        for match in row.pattern.finditer(flow.text):
            start, end = match.span()
            if any(a - row.spare < end and start < b + row.spare for a, b in taken):
                continue
            if row.is_alone and any(flow.index_at(a) == flow.index_at(start) for a, _ in taken):
                continue
            if is_code(flow, start, end) or (row.line and not _holds(row.line, flow.line_at(start).text)):
                continue
            draft = row.draft(match)
            draft.exception = exception_before(flow, start)
            if draft.backend is None and draft.is_gpu_oom and ("cuda" in low or "gpu" in low):
                draft.backend = "cuda"
            taken.append((start, end))
            yield start, _finish(flow, draft, start, end)


@lru_cache(maxsize=8)  # a line may hold thousands of messages
def _said_by(line: str) -> tuple[bool, int | None]:
    """(whether a line is a warning, the rank that it names)."""
    ranks = (int(found[1]) for pattern in _RANKS if (found := pattern.search(line)))
    return _WARNING.search(line) is not None, next(ranks, None)


@lru_cache(maxsize=64)
def _holds(pattern: re.Pattern[str], line: str) -> bool:
    return pattern.search(line) is not None


def _finish(flow: TextFlow, draft: OomMessage, start: int, end: int) -> OomMessage:
    first, last = flow.index_at(max(0, start)), flow.index_at(max(0, end - 1))
    line = flow.lines[first]
    is_warning, rank = _said_by(f"{line.prefix}{line.text}")
    draft.is_caught = draft.kind is not MessageKind.WARNING and is_warning
    shown = " ".join(flow.lines[i].text for i in range(first, min(last + 1, first + 40)))
    draft.rank = line.rank if line.rank is not None else rank
    draft.line, draft.text = line.number, shown[:_TEXT_LIMIT]
    return draft


class _Collector:
    """Takes messages in the order of the log."""

    def __init__(self) -> None:
        self._messages: list[OomMessage] = []
        self._printed = 0
        self._seen: dict[tuple[object, ...], list[int]] = {}

    @property
    def full(self) -> bool:
        """Whether no more messages are taken."""
        return len(self._messages) >= MAX_MESSAGES or self._printed >= MAX_PRINTED

    def add(self, message: OomMessage) -> None:
        """Take the next message; one already seen is counted instead."""
        self._printed += 1
        is_warning = message.kind is MessageKind.WARNING
        told = (message.device, message.tried_bytes) if is_warning else message.contract().values()
        key = (message.kind, *told, "" if message.has_figures and not is_warning else message.what)
        for index in self._seen.get(key, ()):
            known = self._messages[index]
            reach = NEAR_LINES if is_warning else 5 * NEAR_LINES
            near = (message.has_figures and not is_warning) or message.line - known.line <= reach
            if near and (message.rank == known.rank or None in (message.rank, known.rank)):
                self._messages[index] = _merge(known, message)
                return
        self._seen.setdefault(key, []).append(len(self._messages))
        self._messages.append(message)

    def finish(self) -> tuple[OomMessage, ...]:
        """The messages, with warnings folded into the error that follows them and bare mentions dropped."""
        kept: list[OomMessage] = []
        for message in self._messages:
            may_follow = message.kind is MessageKind.ALLOCATOR and message.tried_bytes is not None
            kept.append(_with_warnings(message, kept) if may_follow else message)
        kinds = (MessageKind.ALLOCATOR, MessageKind.ASYNC, MessageKind.METAL)
        full = [m.line for m in kept if m.has_figures and m.kind in kinds]
        return tuple(m for m in kept if not _is_mention(m, full))


def _merge(known: OomMessage, again: OomMessage) -> OomMessage:
    """The same message printed twice, perhaps the second time with what the first lacked."""
    if known.kind is MessageKind.WARNING:  # what was free last counts
        free = again.free_bytes if again.free_bytes is not None else known.free_bytes
        return replace(known, free_bytes=free, times_printed=known.times_printed + 1)
    fuller = again if again.exception and not known.exception else known
    other = known if fuller is again else again
    lacking = [name for name in _MAY_LACK if getattr(fuller, name) in (None, ())]
    return replace(
        fuller,
        **{name: getattr(other, name) for name in lacking},
        line=known.line,
        cut_short=known.cut_short and again.cut_short,
        damaged=known.damaged and again.damaged,
        times_printed=known.times_printed + 1,
    )


def _is_mention(message: OomMessage, full: list[int]) -> bool:
    """ "CUDA out of memory" without figures where the full text of it stands close by."""
    is_bare = (
        message.kind is MessageKind.ALLOCATOR and message.is_gpu_oom and not message.has_figures and not message.notes
    )
    return is_bare and any(abs(message.line - line) <= NEAR_LINES for line in full)


def _with_warnings(message: OomMessage, kept: list[OomMessage]) -> OomMessage:
    for index in range(len(kept) - 1, max(-1, len(kept) - 40), -1):
        warning = kept[index]
        if message.line - warning.line > NEAR_LINES:
            break
        is_same = warning.kind is MessageKind.WARNING and warning.device == message.device
        is_same &= warning.rank == message.rank or None in (warning.rank, message.rank)
        if is_same and _agrees(message, warning):
            message = _refine(message, warning)
            del kept[index]
    return message


def _inside(message: OomMessage, name: str, exact: int | None) -> bool:
    span = message.interval(name)
    return span is None or exact is None or span[0] - 1 <= exact <= span[1] + 1


def _agrees(message: OomMessage, warning: OomMessage) -> bool:
    """Whether a warning's byte counts can be of the same request (one mapping may be a part of it)."""
    if not _inside(message, "total_bytes", warning.total_bytes):
        return False
    return "map" in warning.what or _inside(message, "tried_bytes", warning.tried_bytes)


def _refine(message: OomMessage, warning: OomMessage) -> OomMessage:
    """Take exact byte counts from a warning where they round to what the message prints."""
    exact: dict[str, Any] = {
        name: value
        for name in ("tried_bytes", "total_bytes", "free_bytes")
        if (value := getattr(warning, name)) is not None
        and getattr(message, name) is not None
        and _inside(message, name, value)
    }
    refined = replace(
        message,
        **exact,
        half_unit_bytes={**message.half_unit_bytes, **dict.fromkeys(exact, 0.0)},
        rank=message.rank if message.rank is not None else warning.rank,
        notes=(*message.notes, "exact byte counts from the warning lines before it"),
    )
    refined.implies((warning.torch_at_least, warning.torch_below))
    return refined
