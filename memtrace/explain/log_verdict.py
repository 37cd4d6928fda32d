"""A verdict from the text of a log alone.

What a text can tell, it tells by three sums: free memory against the request (a request that fitted was refused for
another reason), free plus reserved-but-unallocated memory against it (room that exists but in pieces), and what is
neither free nor PyTorch's. Where the printed digits can't decide a sum, the verdict is a guess and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.oomlog import Kind, MemorySummary, OomMessage

from .log_facts import sentence, worth_saying
from .log_figures import LogFigures, Span, at_least, log_figures

MATERIAL_SHARE = 0.02
"""Reserved-but-unallocated memory below this share of the capacity is ordinary; no setting wins more than that."""

BORDERLINE_SHARE = 0.02
"""Free memory that exceeds the request by less than this share of the card: drivers keep some of it back."""

SMALL_SEGMENT_BYTES = 2 << 20
"""What the allocator asks the driver for when a tensor of up to 1 MiB finds no room."""

_OWN_MEMORY = ("nccl", "bitsandbytes", "vllm-cumem")


@dataclass(frozen=True, slots=True)
class LogVerdict:
    """``verdict`` and ``confidence`` are words of the JSON contract; the sentences carry the numbers."""

    verdict: str
    confidence: str
    """"derived" from the printed figures, or "guess"."""
    because: tuple[str, ...]
    worth_saying: tuple[str, ...] = ()
    oom: OomMessage | None = None
    """The message the verdict is about: the first GPU message that is more than a warning, else the first."""
    figures: LogFigures | None = None


def verdict_from_log(messages: Sequence[OomMessage], summaries: Sequence[MemorySummary] = ()) -> LogVerdict:
    """Judge the messages of one log (as ``parse_log`` returns them)."""
    if not messages:
        return LogVerdict("no_oom", "derived", ("The log holds no out-of-memory message.",))
    message = principal(messages)
    figures = log_figures(message)
    verdict, sure, because = _judge(message, figures)
    facts = worth_saying(message, figures, verdict, messages, summaries)
    return LogVerdict(verdict, "derived" if sure else "guess", tuple(because), tuple(facts), message, figures)


def principal(messages: Sequence[OomMessage]) -> OomMessage:
    """The message to judge: GPU memory before look-alikes, errors before warnings, then the first."""
    return min(messages, key=lambda m: (not m.is_gpu_oom, m.kind is Kind.WARNING))


_Answer = tuple[str, bool, list[str]]


def _judge(message: OomMessage, f: LogFigures) -> _Answer:
    what = sentence(message.what)
    if not message.is_gpu_oom:
        certain = "SIGKILL" not in message.what
        return ("not_pytorch" if message.kind is Kind.PLAN else "not_gpu_memory"), certain, [what]
    if message.kind is Kind.FOREIGN:
        return "not_pytorch", True, [what]
    if message.kind is Kind.LIBRARY and message.component in _OWN_MEMORY:
        return (
            "not_pytorch",
            False,
            [what, "That memory is not PyTorch's allocator's, and the text has no figures of it."],
        )
    if message.kind is Kind.METAL:
        return _metal(message, f, what)
    if message.kind is Kind.WARNING:
        return _warning(f, what)
    if f.tried is None or (f.total is None and f.capacity is None):
        return _without_figures(message, f, what)
    return _allocator(f)


def _without_figures(message: OomMessage, f: LogFigures, what: str) -> _Answer:
    because = [what]
    if f.tried is not None:
        because.append(f"It asked for {f.tried}; how full the card was is not in the text.")
    else:
        because.append("The text has no figures, so neither fragmentation nor a lack of memory can be told from it.")
    if message.torch_at_least == "2.12" and "preemptively" in " ".join(message.notes) + message.text:
        because.append("The process's own limit refused it, not the card.")
        return "budget", False, because
    return "unknown", False, because


def _metal(message: OomMessage, f: LogFigures, what: str) -> _Answer:
    if f.tried is None or f.limit is None:
        return ("limit" if f.tried is not None else "unknown"), False, [what]
    if f.allocated is None:
        return "unknown", False, [what]
    found = message.interval("other_allocations_bytes")
    other = Span(*found) if found else Span(0, 0)
    wanted = f.allocated + other + f.tried
    sums = f"{f.allocated} allocated, {other} of other allocations and {f.tried} asked for make {wanted}"
    return "budget", at_least(wanted, f.limit) is True, [what, f"{sums}; {f.limit} is allowed."]


def _warning(f: LogFigures, what: str) -> _Answer:
    because = [what, "Only the warning is in the log: the second attempt may have succeeded."]
    if f.tried and f.free and at_least(f.free, f.tried):
        because.append(f"{f.free} was free, more than the {f.tried} asked for.")
        return "limit", False, because
    return "unknown", False, because


def _allocator(f: LogFigures) -> _Answer:
    assert f.tried is not None
    tried = f.tried
    if f.capacity is not None and at_least(tried, f.capacity):
        return "budget", True, [f"The request alone, {tried}, is larger than the capacity, {f.capacity}."]
    if f.total and f.allocated and at_least(f.allocated, f.total) and f.allocated.low > f.total.high:
        return (
            "budget",
            True,
            [f"{f.allocated} is allocated on a card of {f.total}: the driver already pages to the machine's memory."],
        )
    refused = _refused_despite_room(f, tried)
    if refused is not None:
        return refused
    if f.slack is None or f.reserved is None or f.capacity is None:
        return _without_slack(f, tried)
    elsewhere = _elsewhere(f, tried, f.reserved)
    if elsewhere is not None:
        return elsewhere
    return _pieces(f, tried, f.slack, f.capacity)


def _refused_despite_room(f: LogFigures, tried: Span) -> _Answer | None:
    if f.room is None or not at_least(f.room, tried):
        return None
    total = f.total.middle if f.total else f.room.middle
    borderline = f.room.middle - tried.middle < BORDERLINE_SHARE * total
    because = [
        f"{f.room} could still be had and only {tried} was asked for, so neither size nor fragmentation refused it."
    ]
    if borderline:
        because.append("The margin is small: drivers keep some memory back and need more than the bare size.")
    return "limit", not borderline, because


def _without_slack(f: LogFigures, tried: Span) -> _Answer:
    if f.allocated is not None and f.capacity is not None:
        need = f.allocated + tried
        sentence = f"{f.allocated} allocated plus {tried} asked for, of {f.capacity}."
        if at_least(need, f.capacity):
            return "budget", True, [sentence]
        if at_least(need, f.capacity.times(0.85)):
            return "budget", False, [sentence, "What the allocator holds unused is not in the text."]
    room = f"{f.free} is free for a request of {tried}. " if f.free is not None else ""
    return "unknown", False, [f"{room}How much PyTorch holds, and how much of it unused, is not in the text."]


def _elsewhere(f: LogFigures, tried: Span, reserved: Span) -> _Answer | None:
    """Most of what is in use is not PyTorch's, and would have held the request."""
    if f.outside is None or f.total is None or f.free is None:
        return None
    if f.limit is not None and f.limit.low < f.total.low and (f.limit - reserved).low < f.free.low:
        return None  # the process's limit refused it; others don't count against that
    if not (f.outside.low > reserved.high and at_least(f.outside + f.free, tried)):
        return None
    because = [f"PyTorch in this process holds {reserved} of {f.total}; {f.outside} is in use outside its allocator."]
    if f.others is not None and f.own_outside is not None:
        if f.own_outside.low > f.others.high:
            because.append(f"{f.own_outside} of that is this process's own (another library's), not PyTorch's.")
            return "not_pytorch", True, because
        if f.others.low > f.own_outside.high:
            because.append(f"{f.others} of that belongs to other processes.")
            return "not_this_process", True, because
    because.append("The text does not say whose it is; a process's own memory outside PyTorch is rarely above 2 GiB.")
    return "not_this_process", False, because


def _pieces(f: LogFigures, tried: Span, slack: Span, capacity: Span) -> _Answer:
    room = f.room or Span(0, 0)
    enough = at_least(slack + room, tried)
    material = at_least(slack, capacity.times(MATERIAL_SHARE))
    share = 100 * slack.middle / capacity.middle
    sums = f"{slack} reserved but unallocated plus {room} to be had, against {tried} asked for"
    if enough is False:
        return "budget", True, [f"{sums}: not enough even in one piece."]
    if material is False:
        because = [
            f"Only {slack} ({share:.1f} % of the capacity) is reserved but unallocated: "
            "no allocator setting can win more than that."
        ]
        comparable = tried.middle > slack.middle / 2
        if enough and comparable:
            because.append(f"In one piece it would have held this request of {tried}, but hardly the next.")
        return "budget", not (enough and comparable), because
    fits = enough if enough is not None else (slack + room).middle >= tried.middle
    heavy = material if material is not None else share >= 100 * MATERIAL_SHARE
    because = [f"{sums}: enough, but not in one piece." if fits else f"{sums}: not enough even in one piece."]
    if not (fits and heavy):
        because.append("The printed digits are too coarse to decide it.")
        return "budget", False, because
    sure = enough is True and material is True
    if not sure or (at_least(room, tried) is None and room.high > 0):
        because.append("The printed digits are too coarse to decide it.")
        sure = False
    if slack.middle < tried.middle:
        because.append("The pieces alone are smaller than the request: both sums are needed, so this is close.")
        sure = False
    if tried.high <= SMALL_SEGMENT_BYTES:
        because.append(
            "It is for small tensors, which can't use large pieces; how the pieces divide is not in the text."
        )
        sure = False
    return "fragmentation", sure, because
