"""Messages of a log in order: doubles counted once, warnings joined to the error they precede."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from .message import Kind, OomMessage
from .versions import intersect

MAX_MESSAGES = 4_000
"""A log with more distinct messages (a run that skips every batch that does not fit) is not read to its end."""

MAX_PRINTED = 12_000
"""The same, counting every repetition."""

NEAR_LINES = 200
_FIGURES = (
    "tried_bytes",
    "total_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "reserved_unallocated_bytes",
    "limit_bytes",
    "process_bytes",
)
_PYTORCH = (Kind.ALLOCATOR, Kind.ASYNC, Kind.METAL)


class Collector:
    """Takes messages in the order of the log."""

    def __init__(self) -> None:
        self._messages: list[OomMessage] = []
        self._printed = 0
        self._seen: dict[tuple[object, ...], list[int]] = {}
        self._warnings: dict[int | None, int] = {}

    @property
    def full(self) -> bool:
        """Whether no more messages are taken."""
        return len(self._messages) >= MAX_MESSAGES or self._printed >= MAX_PRINTED

    def add(self, message: OomMessage) -> None:
        """Take the next message; one already seen is counted instead."""
        self._printed += 1
        if message.kind is Kind.WARNING:
            self._add_warning(message)
            return
        key = (
            message.kind,
            message.backend,
            message.component,
            message.device,
            message.is_gpu_oom,
            *(getattr(message, name) for name in _FIGURES),
            *(() if message.has_figures else (message.what,)),
        )
        for index in self._seen.get(key, ()):
            known = self._messages[index]
            near = message.has_figures or message.line - known.line <= 5 * NEAR_LINES
            if near and (message.rank == known.rank or message.rank is None or known.rank is None):
                self._messages[index] = _merge(known, message)
                return
        self._seen.setdefault(key, []).append(len(self._messages))
        self._messages.append(message)

    def _add_warning(self, message: OomMessage) -> None:
        index = self._warnings.get(message.device)
        if index is not None:
            known = self._messages[index]
            same = known.tried_bytes == message.tried_bytes and known.rank == message.rank
            if same and message.line - known.line <= NEAR_LINES and known.what == message.what:
                self._messages[index] = replace(
                    known,
                    free_bytes=message.free_bytes if message.free_bytes is not None else known.free_bytes,
                    times_printed=known.times_printed + 1,
                )
                return
        self._warnings[message.device] = len(self._messages)
        self._messages.append(message)

    def finish(self) -> tuple[OomMessage, ...]:
        """The messages, with warnings folded into the error that follows them and bare mentions dropped."""
        kept: list[OomMessage] = []
        for message in self._messages:
            if message.kind is Kind.ALLOCATOR and message.tried_bytes is not None:
                message = self._with_warnings(message, kept)
            kept.append(message)
        return tuple(_without_mentions(kept))

    @staticmethod
    def _with_warnings(message: OomMessage, kept: list[OomMessage]) -> OomMessage:
        for index in range(len(kept) - 1, max(-1, len(kept) - 40), -1):
            warning = kept[index]
            if message.line - warning.line > NEAR_LINES:
                break
            if warning.kind is not Kind.WARNING or warning.device != message.device:
                continue
            if None not in (warning.rank, message.rank) and warning.rank != message.rank:
                continue
            if not _agrees(message, warning):
                continue
            message = _refine(message, warning)
            del kept[index]
        return message


def _merge(known: OomMessage, again: OomMessage) -> OomMessage:
    """The same message printed twice, perhaps the second time with what the first lacked."""
    fuller = again if again.exception and not known.exception else known
    return replace(
        fuller,
        line=known.line,
        rank=known.rank if known.rank is not None else again.rank,
        exception=known.exception or again.exception,
        torch_at_least=fuller.torch_at_least or known.torch_at_least or again.torch_at_least,
        torch_below=fuller.torch_below or known.torch_below or again.torch_below,
        cut_short=known.cut_short and again.cut_short,
        damaged=known.damaged and again.damaged,
        other_processes=known.other_processes or again.other_processes,
        times_printed=known.times_printed + 1,
    )


def _inside(message: OomMessage, name: str, exact: int | None) -> bool:
    span = message.interval(name)
    return span is None or exact is None or span[0] - 1 <= exact <= span[1] + 1


def _agrees(message: OomMessage, warning: OomMessage) -> bool:
    """Whether a warning's byte counts can be of the same request (one mapping may be a part of it)."""
    if not _inside(message, "total_bytes", warning.total_bytes):
        return False
    if "mapping" in warning.text or "map" in warning.what:
        return True
    return _inside(message, "tried_bytes", warning.tried_bytes)


def _refine(message: OomMessage, warning: OomMessage) -> OomMessage:
    """Take exact byte counts from a warning where they round to what the message prints."""
    exact: dict[str, int] = {}
    for name in ("tried_bytes", "total_bytes", "free_bytes"):
        value = getattr(warning, name)
        if value is not None and getattr(message, name) is not None and _inside(message, name, value):
            exact[name] = value
    half_units = {**message.half_unit_bytes, **dict.fromkeys(exact, 0.0)}
    versions = intersect(
        (message.torch_at_least, message.torch_below), (warning.torch_at_least, warning.torch_below)
    ) or (message.torch_at_least, message.torch_below)
    return replace(
        message,
        tried_bytes=exact.get("tried_bytes", message.tried_bytes),
        total_bytes=exact.get("total_bytes", message.total_bytes),
        free_bytes=exact.get("free_bytes", message.free_bytes),
        half_unit_bytes=MappingProxyType(half_units),
        torch_at_least=versions[0],
        torch_below=versions[1],
        rank=message.rank if message.rank is not None else warning.rank,
        notes=(*message.notes, "exact byte counts from the warning lines before it"),
    )


def _without_mentions(messages: list[OomMessage]) -> list[OomMessage]:
    """Drop "CUDA out of memory" without figures where the full text of it stands close by."""
    full = [m for m in messages if m.kind in _PYTORCH and m.has_figures]
    return [
        m
        for m in messages
        if not (
            m.kind is Kind.ALLOCATOR
            and m.is_gpu_oom
            and not m.has_figures
            and not m.notes
            and any(abs(m.line - other.line) <= NEAR_LINES for other in full)
        )
    ]
