"""The one judge of a refused request, over the same facts whether a snapshot, a log or the failing process tells them.

Three sums decide. What could still be had, against the request: one that fitted was refused for another reason
(*limit*). What could be had and what is free in pieces, together, against the request: if that would not have held it
in one piece either, memory was too small (*budget*). What is neither free nor this allocator's: somebody else's
(*not_this_process*, *not_pytorch*). If the pieces would have held the request, they are to blame (*fragmentation*),
unless they are too few to matter or the same pass still needed more than they hold. Where the intervals leave a sum
open, the verdict is not sure.
"""

from __future__ import annotations

from memtrace.explain.facts import ByteSpan, FactSource, OomFacts, Refuser, at_least
from memtrace.frozen import dataclass
from memtrace.units import counted
from memtrace.units import format_bytes as size

MATERIAL_SHARE = 0.02
"""Free pieces below this share of the capacity are ordinary; no setting wins more than that."""

BORDERLINE_SHARE = 0.02
"""Room that exceeds the request by less than this share of the card: drivers keep some of it back."""

NEARLY_FULL_SHARE = 0.85
"""Allocated memory and the request from this share of the capacity on: too little, where the pieces are not known."""

SMALL_SEGMENT_BYTES = 2 << 20
"""What the allocator asks the driver for when a tensor of up to 1 MiB finds no room."""

_WIDE_SHARE = 0.05
_SURELY_MORE = 2  # what is still to come is an estimate: so many times the room decides


@dataclass(frozen=True, slots=True)
class Verdict:
    """``verdict`` and ``confidence`` are words of the JSON contract; ``because`` are sentences with the numbers."""

    verdict: str
    confidence: str
    because: tuple[str, ...]


_Ruling = tuple[str, bool, list[str]]


def judge(facts: OomFacts) -> Verdict:
    """The verdict on one refused request: what decides first of the rules in their order."""
    found = next((ruling for rule in _RULES if (ruling := rule(facts)) is not None), None)
    verdict, is_sure, because = found or _in_pieces(facts)
    if verdict == "budget" and (others := _others_would_do(facts)) is not None:
        verdict, because = "not_this_process", [others, *because]
    if not facts.is_exact:
        because.append("The recording could not be reproduced exactly, so sizes of blocks are estimates.")
    words = ("derived", "guess") if facts.source is FactSource.TEXT else ("measured", "derived")
    return Verdict(verdict, words[0 if is_sure and facts.is_exact else 1], tuple(because))


def _not_the_allocator(f: OomFacts) -> _Ruling | None:
    if f.refuser in (Refuser.HOST, Refuser.KILLED):
        return "not_gpu_memory", f.refuser is Refuser.HOST, [f.what]
    if f.refuser is Refuser.FRAMEWORK:
        return "not_pytorch", True, [f.what]
    if f.refuser is Refuser.LIBRARY:
        why = "That memory is not PyTorch's allocator's, and the text has no figures of it."
        return "not_pytorch", False, [f.what, why]
    if f.refuser is Refuser.SINGLE:
        return "limit", False, [f.what]
    if f.refuser is not Refuser.RETRY:
        return None
    because = [f.what, "Only the warning is in the log: the second attempt may have succeeded."]
    if f.asked and f.free and at_least(f.free, f.asked):
        return "limit", False, [*because, f"{f.free} was free, more than the {f.asked} asked for."]
    return "unknown", False, because


def _without_figures(f: OomFacts) -> _Ruling | None:
    if f.refuser is Refuser.FRACTION:
        return "budget", False, [f.what, "The process's own limit refused it, not the card."]
    if f.asked is None:
        why = "The text has no figures, so neither fragmentation nor a lack of memory can be told from it."
        return "unknown", False, [f.what, why]
    if f.capacity is None:
        return "unknown", False, [f.what, f"It asked for {f.asked}; how full the card was is not known."]
    return None


def _larger_than_all(f: OomFacts) -> _Ruling | None:
    bound = f.limit if f.is_limited else f.total
    if f.asked and bound and at_least(f.asked, bound):
        return "budget", True, [f"The request alone, {f.asked}, is larger than the capacity.", *_state(f)]
    if f.total and f.allocated and f.allocated.low > f.total.high:
        held = f"{f.allocated} is allocated on a card of {f.total}"
        return "budget", True, [f"{held}: the driver already pages to the machine's memory."]
    return None


def _fitted(f: OomFacts) -> _Ruling | None:
    if f.room is None or f.need is None or not at_least(f.room, f.need):
        return None
    if f.limit is None and f.source is not FactSource.TEXT:
        return "limit", False, [
            f"{f.need} was refused with {f.free} free on the card, after this process had held more than that: no "
            "limit that stays the same explains it.",
            "Suspects: a limit changed at run time, a Windows commit limit, WSL's cap on pinned memory, a MIG or vGPU "
            "slice, the driver's bound on mappings.",
        ]  # fmt: skip
    because = [f"{f.need} was refused although {f.room} more was to be had: neither size nor pieces."]
    whole = f.total or f.room
    is_close = not f.is_limited and f.room.middle - f.need.middle < BORDERLINE_SHARE * whole.middle
    if is_close:
        because.append("The margin is small: drivers keep some memory back and need more than the bare size.")
    return "limit", not is_close, because


def _pieces_unknown(f: OomFacts) -> _Ruling | None:
    if f.slack is not None and f.capacity is not None:
        return None
    assert f.asked is not None
    if f.allocated is not None and f.capacity is not None:
        need = f.allocated + f.asked
        sums = f"{f.allocated} allocated plus {f.asked} asked for, of {f.capacity}."
        if at_least(need, f.capacity):
            return "budget", True, [sums]
        if at_least(need, f.capacity.times(NEARLY_FULL_SHARE)):
            return "budget", False, [sums, "What the allocator holds unused is not in the text."]
    room = f"{f.free} is free for a request of {f.asked}. " if f.free is not None else ""
    return "unknown", False, [f"{room}How much PyTorch holds, and how much of it unused, is not in the text."]


def _elsewhere(f: OomFacts) -> _Ruling | None:
    """Most of what is in use on a full card is not this allocator's, and would have held the request."""
    if f.outside is None or f.free is None or f.need is None or f.reserved is None or f.is_limited:
        return None
    if not (f.outside.low > f.reserved.high and at_least(f.outside + f.free, f.need)):
        return None
    held = f"PyTorch in this process holds {f.reserved} of {f.total}; {f.outside} is in use outside its allocator."
    if f.others is not None and f.own_outside is not None:
        if f.own_outside.low > f.others.high:
            whose = f"{f.own_outside} of that is this process's own (another library's), not PyTorch's."
            return "not_pytorch", True, [held, whose]
        if f.others.low > f.own_outside.high:
            return "not_this_process", True, [held, f"{f.others} of that belongs to other processes."]
    if f.source is not FactSource.TEXT:
        return "not_this_process", True, [held, *_state(f)]
    unsaid = "The text does not say whose it is; a process's own memory outside PyTorch is rarely above 2 GiB."
    return "not_this_process", False, [held, unsaid]


def _others_would_do(f: OomFacts) -> str | None:
    """What was needed would have fitted without the other processes that are named on the card."""
    held = sum(size_bytes for _, size_bytes in f.other_processes)
    whose = f.own_pid is not None or f.others is not None
    if not held or not whose or f.is_limited or f.asked is None or f.capacity is None or f.room is None:
        return None
    wanted = max(f.asked.high, f.still_needed_bytes or 0)
    if held < MATERIAL_SHARE * f.capacity.low or held + f.room.low + (f.slack.low if f.slack else 0) < wanted:
        return None
    names = ", ".join(f"{pid}: {size(n)}" for pid, n in sorted(f.other_processes, key=lambda item: -item[1])[:4])
    return f"Other processes hold {size(held)} of the card ({names}); without them it would have fitted."


def _too_little(f: OomFacts) -> _Ruling | None:
    """Not even in one piece; where the sum is open, what is more likely, as long as pieces play a part at all."""
    asked, slack, capacity, had = _sums(f)
    enough = at_least(had, asked)
    proven = had.middle if f.source is FactSource.TEXT else had.low  # an inferred limit is proven up to its lower bound
    if enough or (enough is None and (proven >= asked.middle or slack.high <= MATERIAL_SHARE * capacity.low)):
        return None
    because = _state(f)
    if at_least(asked, capacity):
        because.insert(0, f"The request alone, {asked}, is larger than the capacity.")
    elif slack.high:
        because.append(f"The {slack} that is free in pieces would not have held it in one either.")
    else:
        because.append("Nothing was free inside reserved memory, so pieces play no part.")
    is_sure = enough is False or 2 * slack.high < asked.low
    if not is_sure:
        because.append(_COARSE)
    return "budget", is_sure, [*because, *_outlook(f)]


def _too_few(f: OomFacts) -> _Ruling | None:
    asked, slack, capacity, had = _sums(f)
    if not (slack.high <= MATERIAL_SHARE * capacity.low):
        return None
    share = slack.middle / max(capacity.low, 1)
    because = _state(f)
    because.append(
        "Nothing is free in pieces: no allocator setting can win anything."
        if not slack.high
        else f"Only {slack} ({share:.1%} of the capacity) is free in pieces: no allocator setting can win "
        "more than that."
    )
    would_do = bool(at_least(had, asked)) and asked.middle > slack.middle / 2 and f.still_needed_bytes is None
    if would_do:
        because.append(f"In one piece it would have held this request of {asked}, but hardly the next.")
    return "budget", not would_do, [*because, *_outlook(f)]


def _more_to_come(f: OomFacts) -> _Ruling | None:
    had = _sums(f)[3]
    needed = f.still_needed_bytes
    if needed is None or needed <= had.high:
        return None
    where = f"in {counted(f.pieces, 'piece')} " if f.pieces is not None else "in pieces "
    layers = _layers_left(f)
    rest = "" if layers else f": about {size(needed)}"
    held = (
        f"In one piece the {f.slack} that is free {where}would have held it, but not what this pass still needed{rest}."
    )
    is_sure = needed >= _SURELY_MORE * had.high and (f.progress is None or f.progress.total is not None)
    return "budget", is_sure, [*_state(f), held, *layers]


def _in_pieces(f: OomFacts) -> _Ruling:
    asked, slack, capacity, had = _sums(f)
    because = _state(f)
    where = f", in {counted(f.pieces, 'piece')}" if f.pieces is not None else ""
    largest = f"; the largest this request could use has {size(f.usable_bytes)}" if f.usable_bytes is not None else ""
    because.append(f"{slack} was free inside reserved memory{where}{largest}.")
    if f.still_needed_bytes is not None:
        because.append(
            f"The rest of this pass needed about {size(f.still_needed_bytes)}: in one piece it would have fitted."
        )
    if f.usable_bytes is not None and f.usable_bytes >= asked.high:
        because.append("A fitting piece came free too late: PyTorch does not search again after its flush.")
    if f.source is not FactSource.TEXT:
        return "fragmentation", True, because
    doubts = []
    room = f.room or ByteSpan(0, 0)
    is_open = at_least(had, asked) is None or slack.low < MATERIAL_SHARE * capacity.high
    if is_open or (room.high > 0 and at_least(room, asked) is None):
        doubts.append(_COARSE)
    if slack.middle < asked.middle:
        doubts.append(f"The pieces alone are too small: only together with the {room} still free would it have fitted.")
    if asked.high <= SMALL_SEGMENT_BYTES:
        doubts.append(
            "It is for small tensors, which can't use large pieces; how the pieces divide is not in the text."
        )
    return "fragmentation", not doubts, [*because, *doubts]


_RULES = (
    _not_the_allocator, _without_figures, _larger_than_all, _fitted, _pieces_unknown, _elsewhere, _too_little,
    _too_few, _more_to_come,
)  # fmt: skip
_COARSE = "The figures are too coarse to decide it."


def _sums(f: OomFacts) -> tuple[ByteSpan, ByteSpan, ByteSpan, ByteSpan]:
    """(asked, slack, capacity, slack and what was still to be had); known once the first rules have passed."""
    assert f.asked is not None and f.slack is not None and f.capacity is not None
    return f.asked, f.slack, f.capacity, f.slack + (f.room or ByteSpan(0, 0))


def _state(f: OomFacts) -> list[str]:
    if f.allocated is None or f.reserved is None or f.capacity is None:
        return []
    what = "limit of this process" if f.is_limited else "card"
    low, high = round(f.capacity.low), round(f.capacity.high)
    if low == high or f.source is FactSource.TEXT:
        allows = str(f.capacity)
    else:
        allows = f"less than {size(high)}" if high - low > _WIDE_SHARE * high else f"about {size(low)}"
    held = f"{f.allocated} allocated and {f.reserved} reserved" if f.reserved.high else "nothing allocated yet"
    return [f"{f.asked} asked for with {held}; the {what} allows {allows}."]


def _outlook(f: OomFacts) -> list[str]:
    needed = f.still_needed_bytes
    if not (layers := _layers_left(f)) and needed is not None and f.asked is not None and needed > 1.5 * f.asked.high:
        return [f"About {size(needed)} more was still to come in this pass."]
    return layers


def _layers_left(f: OomFacts) -> list[str]:
    progress, needed = f.progress, f.still_needed_bytes
    if progress is not None and progress.total is not None and progress.bytes_per_layer:
        return [
            f"{progress.done} of {progress.total} layers were done, each adding {size(progress.bytes_per_layer)}: "
            f"the rest needs about {size(progress.needed_bytes or 0)} more."
        ]
    if progress is not None and progress.bytes_per_layer and needed == progress.bytes_per_layer:
        return [f"Each layer adds {size(progress.bytes_per_layer)}, so not even the next one would have fitted."]
    return []
