"""The facts of a refused request from the text of its message.

Differences of printed figures are uncertain by megabytes, often as much as the request itself; they stay intervals.
"""

from __future__ import annotations

from memtrace.explain.facts import ByteSpan, FactSource, OomFacts, Refuser
from memtrace.oomlog import MessageKind, OomMessage

_OWN_MEMORY = ("nccl", "bitsandbytes", "vllm-cumem")
_HALF_DIGIT_BYTES = 0.005 * (1 << 30)


def facts_of_text(message: OomMessage) -> OomFacts:
    """Intervals of a message's figures and what follows from them: ``reserved`` and ``slack`` from each other and
    ``allocated``, what is this process's and what others' from the process lines."""

    def span(name: str) -> ByteSpan | None:
        found = message.interval(f"{name}_bytes")
        return ByteSpan(*found) if found else None

    total, free, allocated, limit = span("total"), span("free"), span("allocated"), span("limit")
    reserved, slack, process = span("reserved"), span("reserved_unallocated"), span("process")
    if allocated is not None and reserved is None and slack is not None:
        reserved = allocated + slack
    elif allocated is not None and slack is None and reserved is not None:
        slack = (reserved - allocated).floor_zero()
    if message.kind is MessageKind.METAL and allocated is not None:
        allocated += span("other_allocations") or ByteSpan(0, 0)
    own_pid: int | None = None
    if total and free and reserved and process is None:
        own_pid, process = _own_process(message, total - free, reserved)
    return OomFacts(
        source=FactSource.TEXT,
        refuser=_refuser(message),
        what=sentence(message.what),
        asked=span("tried"),
        allocated=allocated,
        reserved=reserved,
        slack=slack,
        free=free,
        total=total,
        limit=limit,
        own_outside=(process - reserved).floor_zero() if process and reserved else None,
        others=(total - free - process).floor_zero() if process and total and free else None,
        other_processes=tuple((pid, n) for pid, n in message.other_processes if n is not None and pid != own_pid),
        own_pid=own_pid,
    )


def sentence(clause: str) -> str:
    """A clause as a sentence; names that begin with a small letter keep it."""
    first = clause.split(" ", 1)[0]
    if first.isalpha() and first.islower() and first != "bitsandbytes":
        clause = clause[:1].upper() + clause[1:]
    return clause + "."


def _refuser(message: OomMessage) -> Refuser:
    kind = message.kind
    if kind in (MessageKind.PLAN, MessageKind.FOREIGN):
        return Refuser.FRAMEWORK
    if not message.is_gpu_oom:
        return Refuser.KILLED if "SIGKILL" in message.what else Refuser.HOST
    if kind is MessageKind.LIBRARY and message.component in _OWN_MEMORY:
        return Refuser.LIBRARY
    if kind is MessageKind.WARNING:
        return Refuser.RETRY
    if kind is MessageKind.METAL and message.tried_bytes is not None and message.limit_bytes is None:
        return Refuser.SINGLE
    if message.total_bytes is None and message.limit_bytes is None and "preemptively" in message.text:
        return Refuser.FRACTION
    return Refuser.ALLOCATOR


def _own_process(message: OomMessage, used: ByteSpan, reserved: ByteSpan) -> tuple[int | None, ByteSpan | None]:
    """The process line that is this process, if the figures leave no other choice.

    Inside a container the failing process appears under a number it does not know. What PyTorch reserved is in use
    by one of the listed processes, or by one that is not listed: if all that the others hold and all that nobody is
    named for is less than it, the process in question is the one.
    """
    known = [(pid, amount) for pid, amount in message.other_processes if amount is not None]
    if not known or len(known) != len(message.other_processes):
        return None, None
    named = sum(amount for _, amount in known)
    unnamed_high = max(0.0, used.high - named + _HALF_DIGIT_BYTES * len(known))
    fitting = [(pid, amount) for pid, amount in known if amount + _HALF_DIGIT_BYTES >= reserved.low]
    if len(fitting) == 1 and unnamed_high < reserved.low:
        pid, amount = fitting[0]
        return pid, ByteSpan(amount - _HALF_DIGIT_BYTES, amount + _HALF_DIGIT_BYTES)
    return None, None
