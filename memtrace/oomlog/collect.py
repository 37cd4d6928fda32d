"""Messages of a log in order: doubles counted once, warnings joined to the error they precede."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from memtrace.oomlog.message import MessageKind, OomMessage, intersect

MAX_MESSAGES = 4_000
"""A log with more distinct messages (a run that skips every batch that does not fit) is not read to its end."""

MAX_PRINTED = 12_000
"""The same, counting every repetition."""

NEAR_LINES = 200
_FIGURES = (
    "tried_bytes", "total_bytes", "free_bytes", "allocated_bytes", "reserved_bytes", "reserved_unallocated_bytes",
    "limit_bytes", "process_bytes",
)  # fmt: skip


class Collector:
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
        figures = ("tried_bytes",) if is_warning else _FIGURES
        key = (
            message.kind, message.backend, message.component, message.device, message.is_gpu_oom,
            *(getattr(message, name) for name in figures),
            "" if message.has_figures and not is_warning else message.what,
        )  # fmt: skip
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
            if message.kind is MessageKind.ALLOCATOR and message.tried_bytes is not None:
                message = _with_warnings(message, kept)
            kept.append(message)
        full = [
            m.line
            for m in kept
            if m.has_figures and m.kind in (MessageKind.ALLOCATOR, MessageKind.ASYNC, MessageKind.METAL)
        ]
        return tuple(m for m in kept if not _is_mention(m, full))


def _merge(known: OomMessage, again: OomMessage) -> OomMessage:
    """The same message printed twice, perhaps the second time with what the first lacked."""
    if known.kind is MessageKind.WARNING:  # what was free last counts
        free = again.free_bytes if again.free_bytes is not None else known.free_bytes
        return replace(known, free_bytes=free, times_printed=known.times_printed + 1)
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
    exact: dict[str, int] = {}
    for name in ("tried_bytes", "total_bytes", "free_bytes"):
        value = getattr(warning, name)
        if value is not None and getattr(message, name) is not None and _inside(message, name, value):
            exact[name] = value
    known = (message.torch_at_least, message.torch_below)
    versions = intersect(known, (warning.torch_at_least, warning.torch_below)) or known
    return replace(
        message,
        **exact,  # type: ignore[arg-type]  # figures only
        half_unit_bytes=MappingProxyType({**message.half_unit_bytes, **dict.fromkeys(exact, 0.0)}),
        torch_at_least=versions[0],
        torch_below=versions[1],
        rank=message.rank if message.rank is not None else warning.rank,
        notes=(*message.notes, "exact byte counts from the warning lines before it"),
    )
