"""Whole logs to messages: windows -> lines -> flows of one process -> messages, in the order of the log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .allocator_flow import allocator_drafts, is_code
from .allocator_text import exception_before
from .clean import Flow, clean_lines, flows
from .collect import Collector
from .draft import Draft
from .foreign_texts import FOREIGN
from .gpu_texts import DRIVER, LAST, PYTORCH
from .host_texts import LAST_LOOK_ALIKES, LOOK_ALIKES
from .message import OomMessage
from .summary_table import MemorySummary, read_summaries
from .table import Text
from .triggers import is_plain
from .windows import Readable, Tally, Window, windows

_TABLES: tuple[Text, ...] = (*PYTORCH, *FOREIGN, *DRIVER, *LOOK_ALIKES)
_RANKS = (
    re.compile(r"\[?\b(?:global_?rank|rank)\W{1,12}(\d{1,5})", re.IGNORECASE),
    re.compile(r"\blocal_rank\W{1,3}(\d{1,5})", re.IGNORECASE),
    re.compile(r"(?:^|[\[\s])rank\s?(\d{1,5})\]", re.IGNORECASE),
    re.compile(r":\d+:\d+ \[(\d{1,4})\]"),  # NCCL: host:pid:thread [device]
)
_TEXT_LIMIT = 600

PATIENCE_BYTES = 3 << 20
"""After so many bytes that looked like broken messages and held none, only unbroken ones are looked for."""


@dataclass(frozen=True)
class LogReading:
    """Everything read from one log."""

    messages: tuple[OomMessage, ...]
    summaries: tuple[MemorySummary, ...]
    bytes_read: int
    lines_read: int
    stopped_early: bool
    """The log holds more messages than are kept (see collect.MAX_MESSAGES); the rest was only counted through."""


def parse_log(stream: Readable | bytes | str) -> tuple[OomMessage, ...]:
    """Every out-of-memory message of a log, in order, each printed once or more counted once.

    ``stream``: a binary stream, or bytes or text; any size, any encoding. Never raises on content.
    """
    return read_log(stream).messages


def read_log(stream: Readable | bytes | str) -> LogReading:
    """Like :func:`parse_log`, with the memory summaries in the log and what was read."""
    tally = Tally()
    collector = Collector()
    summaries: list[MemorySummary] = []
    cut = False

    def strict() -> bool:
        return tally.fruitless_bytes > PATIENCE_BYTES

    for window in windows(stream, tally, lambda: collector.full, strict):
        if collector.full:
            cut = True
            continue
        if strict() and not is_plain(window.data):
            continue
        found = _read_window(window)
        tally.fruitless_bytes += 0 if found else len(window.data)
        for message in found:
            collector.add(message)
        summaries += read_summaries(window.data, window.line)
    return LogReading(collector.finish(), tuple(summaries), tally.bytes_read, tally.lines_read, cut)


def _read_window(window: Window) -> list[OomMessage]:
    best: dict[tuple[int, int], OomMessage] = {}
    for flow in flows(clean_lines(window.data, window.line)):
        for place, message in _read_flow(flow):
            index = flow.index_at(place)
            spot = (flow.lines[index].number, place - flow.starts[index])
            other = best.get(spot)
            if other is None or len(message.half_unit_bytes) > len(other.half_unit_bytes):
                best[spot] = message
    return [best[spot] for spot in sorted(best)]


def _read_flow(flow: Flow) -> list[tuple[int, OomMessage]]:
    taken: list[tuple[int, int]] = []
    found: list[tuple[int, OomMessage]] = []

    def keep(draft: Draft, start: int, end: int) -> None:
        taken.append((start, end))
        found.append((start, _finish(flow, draft, start, end)))

    for head, draft in allocator_drafts(flow):
        prefix = len(draft.exception) + 1 if draft.exception else 0
        keep(draft, head.start() - prefix, head.end() + draft.consumed)
    low = flow.text.lower()
    for table, distance in ((_TABLES, 0), (LAST, 300), (LAST_LOOK_ALIKES, 0)):
        for row in table:
            if row.word not in low:
                continue
            for match in row.pattern.finditer(flow.text):
                start, end = match.span()
                if any(a - distance < end and start < b + distance for a, b in taken):
                    continue
                if table is LAST_LOOK_ALIKES and any(flow.index_at(a) == flow.index_at(start) for a, _ in taken):
                    continue
                if not is_code(flow, start, end) and _line_fits(row, flow, start):
                    draft = row.draft(match)
                    draft.exception = exception_before(flow.text, start, flow.line_start(start))
                    if draft.backend is None and draft.is_gpu_oom and re.search(r"cuda|gpu", low):
                        draft.backend = "cuda"
                    keep(draft, start, end)
    return found


def _line_fits(row: Text, flow: Flow, start: int) -> bool:
    return row.needs_line is None or bool(row.needs_line.search(flow.line_at(start).text))


def _finish(flow: Flow, draft: Draft, start: int, end: int) -> OomMessage:
    first, last = flow.index_at(max(0, start)), flow.index_at(max(0, end - 1))
    line = flow.lines[first]
    rank = line.rank
    if rank is None:
        whole = f"{line.prefix}{line.text}"
        rank = next((int(m[1]) for pattern in _RANKS if (m := pattern.search(whole))), None)
    shown = " ".join(flow.lines[i].text for i in range(first, min(last + 1, first + 40)))
    return draft.build(line=line.number, rank=rank, text=shown[:_TEXT_LIMIT])
