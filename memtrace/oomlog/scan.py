"""Whole logs to messages: windows -> lines -> flows of one process -> messages, in the order of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from memtrace.oomlog.allocator import allocator_drafts, exception_before, is_code
from memtrace.oomlog.clean import TextFlow, clean_lines, flows
from memtrace.oomlog.collect import Collector
from memtrace.oomlog.message import MessageDraft, MessageKind, OomMessage
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


@dataclass(frozen=True)
class LogReading:
    """Everything read from one log. ``settings``: lines that set the allocator, or say that a setting has no effect;
    ``stopped_early``: it holds more messages than are kept (see collect.py)."""

    messages: tuple[OomMessage, ...]
    settings: tuple[str, ...] = ()
    stopped_early: bool = False


def parse_log(stream: Readable | bytes | str) -> tuple[OomMessage, ...]:
    """Every out-of-memory message of a log, in order, each printed once or more counted once.

    ``stream``: a binary stream, or bytes or text; any size, any encoding. Never raises on content.
    """
    return read_log(stream).messages


def read_log(stream: Readable | bytes | str) -> LogReading:
    """Like :func:`parse_log`, with the settings in the log and whether all of it was read."""
    collector, settings = Collector(), dict[str, None]()
    for window in windows(stream, settings):
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
            if other is None or len(message.half_unit_bytes) > len(other.half_unit_bytes):
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


def _finish(flow: TextFlow, draft: MessageDraft, start: int, end: int) -> OomMessage:
    first, last = flow.index_at(max(0, start)), flow.index_at(max(0, end - 1))
    line = flow.lines[first]
    is_warning, rank = _said_by(f"{line.prefix}{line.text}")
    draft.is_caught = draft.kind is not MessageKind.WARNING and is_warning
    shown = " ".join(flow.lines[i].text for i in range(first, min(last + 1, first + 40)))
    rank = line.rank if line.rank is not None else rank
    return draft.build(line=line.number, rank=rank, text=shown[:_TEXT_LIMIT])
