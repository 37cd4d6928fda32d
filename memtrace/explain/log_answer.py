"""The answer of a log: the facts and the verdict on its principal message, what else it shows, and findings.

Differences of printed figures are uncertain by megabytes, often as much as the request itself; they stay intervals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

from memtrace.attribution.sites import short_path
from memtrace.explain.advice import against_pieces, rule
from memtrace.explain.answer import Advice, Basis, Finding
from memtrace.explain.detectors import ranked
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts, Refuser, at_least
from memtrace.explain.setting import RunSetting
from memtrace.explain.traceback import TracebackCause, cause_in, finding_of
from memtrace.explain.verdict import judge
from memtrace.frozen import dataclass
from memtrace.oomlog import MessageKind, OomMessage
from memtrace.oomlog.message import intersect
from memtrace.snapshot.stacks import Frame
from memtrace.units import GIB, MIB, format_bytes

_OUTSIDE_SHARE = 0.10
"""Memory outside PyTorch's allocator from this share of the card on is worth a sentence."""

_BY_COMPONENT = {
    "bitsandbytes": (
        "bitsandbytes allocates unified memory for paged optimizers; on WSL and Windows that is scarce or missing: "
        "a paged_* optimizer replaced by adamw_8bit or adamw_torch avoids it."
    ),
    "nccl": (
        "NCCL's shared-memory transport needs pinned memory of the machine, which WSL and containers cap: "
        "check that (NCCL_SHM_DISABLE=1 as a test) before the card."
    ),
    "vllm-cumem": "vLLM's sleep-mode pool is not in a PyTorch snapshot; free training memory before wake_up().",
    "vllm": "vLLM plans with gpu_memory_utilization; what else is on the card has to be left out of that share.",
    "tensorflow": "TensorFlow takes the whole card at start unless memory growth is set; it takes it from PyTorch too.",
    "jax": "JAX takes 75 % of the card at start unless XLA_PYTHON_CLIENT_PREALLOCATE=false.",
    "triton": "Smaller block sizes or fewer pipeline stages help; batch size and VRAM don't matter.",
}
_BY_KIND = {
    MessageKind.LIBRARY: (
        "Library handles are created late, so this is often the first allocation that finds the card full: "
        "look at what was in use just before."
    ),
    MessageKind.DRIVER: (
        "A plain driver error can also be pinned memory of the machine (pin_memory, offloading, WSL's cap on it): "
        "check whether the card had memory free."
    ),
}
_OWN_OUTSIDE_BYTES = 2 * GIB
_OTHERS_BYTES = GIB // 4
_OWN_MEMORY = ("nccl", "bitsandbytes", "vllm-cumem")
_HALF_DIGIT_BYTES = 0.005 * (1 << 30)


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """``verdict`` and ``confidence`` are words of the JSON contract; the sentences carry the numbers."""

    verdict: str
    confidence: str
    because: tuple[str, ...]
    worth_saying: tuple[str, ...] = ()
    oom: OomMessage | None = None
    """The message the verdict is about: the first GPU message that ended the run, else the first."""
    facts: OomFacts | None = None
    setting: RunSetting = field(default_factory=RunSetting)
    cause: TracebackCause | None = None
    """What the traceback names."""


def verdict_from_log(
    messages: Sequence[OomMessage],
    setting: RunSetting | None = None,
    frames: Sequence[Frame] = (),
) -> TextAnswer:
    """Judge the messages of one log (as ``read_log`` returns them). ``frames``: of the traceback that ends in the
    principal message, the outermost first."""
    if not messages:
        return TextAnswer("unknown", "guess", ("Nothing in the log says that memory ran out.",))
    message = principal(messages)
    setting = setting or RunSetting(backend=message.backend or "cuda")
    facts = facts_of_text(message)
    found = judge(facts)
    because = found.because
    cause = cause_in(frames) if message.is_gpu_oom else None
    if cause is not None:
        because = (f"By the traceback the request is {cause.what}.", *because)
    elif frames and message.is_gpu_oom:
        own = (frame for frame in reversed(frames) if "/torch/" not in frame.filename.replace("\\", "/"))
        last = next(own, frames[-1])
        where = f"{short_path(last.filename)}:{last.line} {last.name}"
        because = (*because[:1], f"By the traceback it was asked for at {where}.", *because[1:])
    if message.is_caught:
        caught = "It stands inside a warning: the program caught it and went on, so it is not what ended the run."
        because = (*because, caught)
    more = (*setting.already(), *_worth_saying(message, facts, found.verdict, messages))
    return TextAnswer(found.verdict, found.confidence, because, more, message, facts, setting, cause)


def principal(messages: Sequence[OomMessage]) -> OomMessage:
    """The message to judge: one that was not caught, GPU memory before look-alikes, errors before warnings, then the
    first."""
    return min(messages, key=lambda m: (m.is_caught, not m.is_gpu_oom, m.kind is MessageKind.WARNING))


def findings_of_log(log: TextAnswer) -> tuple[Finding, ...]:
    """What the figures of the principal message show; empty without figures."""
    f, message, tool = log.facts, log.oom, log.setting.card_tool
    if f is None or message is None or not message.is_gpu_oom:
        return ()
    found = [] if log.cause is None else [finding_of(log.cause, f.asked, log.setting)]

    def add(name: str, title: str, span: ByteSpan, evidence: str, *advice: Advice) -> None:
        found.append(Finding(name, title, round(span.middle), f"by the text {span} {evidence}.", advice))

    if log.verdict == "fragmentation" and f.slack is not None:
        asked = round(f.asked.middle) if f.asked is not None else None
        terms = f"{f.slack} in pieces and {f.room or 0} to be had, against {f.asked}"
        title = "In one piece: room for this request; not proven for the next"
        add("reserved_in_pieces", title, f.slack, "was reserved but unallocated",
            *(Advice(change, asked, Basis.FORMULA, terms) for change, _ in against_pieces(log.setting)),
            rule("record a snapshot to see what the pieces lie between: memtrace run"))  # fmt: skip
    limit = f.limit if f.limit is not None and f.total is not None and f.limit.high < f.total.low else None
    card_full = f.free is not None and f.asked is not None and at_least(f.free, f.asked) is False
    if limit is not None and log.verdict != "limit" and not card_full:
        add("process_limit", "The limit of this process ran out, not the card", limit, f"of {f.total} is allowed",
            rule("raise or drop torch.cuda.set_per_process_memory_fraction if it is not meant"))  # fmt: skip
    if f.others is not None and f.others.low > _OTHERS_BYTES:
        add("other_processes", "Other processes use the card", f.others, "is in use by other processes",
            rule(f"{tool} names them; end what is left over from an earlier run, or use another card"))  # fmt: skip
    outside = f.own_outside if f.own_outside is not None and f.own_outside.low > _OWN_OUTSIDE_BYTES else None
    if outside is None and f.others is None and f.outside is not None and f.total is not None:
        outside = f.outside if f.outside.low > _OUTSIDE_SHARE * f.total.high else None
    if outside is not None:
        add("outside_allocator", "Memory in use outside PyTorch's allocator", outside, "is neither free nor PyTorch's",
            rule(f"{tool} shows whose it is: another process, or another library in this one"))  # fmt: skip
    return ranked(found, log.verdict)


def _worth_saying(message: OomMessage, figures: OomFacts, verdict: str, messages: Sequence[OomMessage]) -> list[str]:
    """Sentences, the most useful first; none of them repeats the verdict."""
    told = [text for look in (_limits, _outside, _pieces) for text in look(message, figures, verdict)]
    if message.component in _BY_COMPONENT:
        told.append(_BY_COMPONENT[message.component])
    elif message.kind in _BY_KIND:
        told.append(_BY_KIND[message.kind])
    told += [*_other_runs(message, messages), *_across(message, messages), *map(sentence, message.notes)]
    if message.cut_short:
        told.append("The text is cut off before its last figure.")
    elif message.damaged:
        told.append("Part of the text could not be read: it is interrupted or misspelt.")
    return told


def _limits(message: OomMessage, f: OomFacts, verdict: str) -> Iterator[str]:
    if f.limit is not None and f.total is not None and f.limit.high < f.total.low:
        share = 100 * f.limit.middle / f.total.middle
        yield f"This process may use {f.limit} of {f.total} ({share:.2g} %): the limit ran out, not the card."
    if f.total and f.allocated and f.allocated.low > f.total.high:
        yield "More is allocated than the card has: Windows pages GPU memory to RAM, slow long before it fails."
    if verdict != "limit":
        return
    suspects = [
        "a Windows commit limit or a paging file that is too small",
        "WSL's cap on pinned memory",
        "a MIG or vGPU slice",
        "the driver's bound on the number of mappings",
    ]
    silent = intersect((message.torch_at_least, message.torch_below), ("2.1", "2.5"))
    if f.limit is None and silent is not None:
        suspects.insert(0, "set_per_process_memory_fraction (PyTorch 2.1-2.4 does not print it)")
    if message.backend == "hip":
        suspects = ["on an APU, the driver's share of the system's memory", "a container's or partition's limit"]
    if message.backend == "xpu":
        suspects = ["the largest single allocation the device allows (4 GiB on many Arc cards)"]
    if f.free is not None and f.asked is not None and f.asked.middle > 0 and f.free.middle > 2 * f.asked.middle:
        yield f"Free memory is {f.free.middle / f.asked.middle:.0f} times the request: batch size is not the cause."
    yield "Suspects: " + "; ".join(suspects) + "."


def _outside(message: OomMessage, f: OomFacts, verdict: str) -> Iterator[str]:
    if f.outside is not None and f.total is not None:
        share = f.outside.middle / f.total.middle
        if share >= _OUTSIDE_SHARE and verdict not in ("not_this_process", "not_pytorch"):
            yield f"{f.outside} ({100 * share:.0f} % of the card) is in use outside PyTorch's allocator."
    if f.own_outside is not None and f.own_outside.low > _OWN_OUTSIDE_BYTES:
        yield f"This process uses {f.own_outside} outside PyTorch's allocator (context, NCCL, other libraries)."
    if f.own_pid is not None:
        yield f"Process {f.own_pid} must be this process: no other could hold what PyTorch has reserved."
    others = [(pid, amount) for pid, amount in message.other_processes
              if pid != f.own_pid and amount is not None and amount >= 64 * MIB]  # fmt: skip
    unsure = f.own_pid is None and message.process_bytes is None
    maybe = "it" if len(others) == 1 else "one of them"
    for number, (pid, amount) in enumerate(others, 1):
        tail = f" ({maybe} may be this very process: containers renumber)." if unsure and number == len(others) else "."
        yield f"Process {pid} holds {format_bytes(amount)} on the same card{tail}"
    other = message.other_allocations_bytes
    if other is not None and message.allocated_bytes is not None and other > message.allocated_bytes:
        yield f"{format_bytes(other)} of this process is Metal memory outside PyTorch's pool, more than PyTorch's own."


def _pieces(message: OomMessage, f: OomFacts, verdict: str) -> Iterator[str]:
    if f.asked is not None and message.kind is MessageKind.ALLOCATOR and message.backend in ("cuda", "hip"):
        if message.tried_bytes == 2 * MIB:
            yield "2.00 MiB is what PyTorch asks the driver for when a tensor of up to 1 MiB finds no room."
        elif message.tried_bytes == 20 * MIB:
            yield "20.00 MiB is what PyTorch asks the driver for when a tensor of 1 to 10 MiB finds no room."
    if message.private_pools_bytes:
        graphs = "HIP" if message.backend == "hip" else "CUDA"
        yield f"{format_bytes(message.private_pools_bytes)} sits in private pools ({graphs} graphs) alone."
    if f.slack is None or f.asked is None or f.capacity is None or f.allocated is None:
        return
    if verdict == "fragmentation":
        full = 100 * f.allocated.middle / f.capacity.middle
        spare = f.slack + (f.room or ByteSpan(0, 0)) - f.asked
        if full >= 85 or spare.middle < 0.1 * f.asked.middle:
            left = format_bytes(round(max(0.0, spare.middle)))
            yield f"{full:.0f} % of the capacity is allocated; in one piece {left} would be left after this request."
    elif verdict == "budget" and f.slack.middle >= 2 * f.asked.middle:
        yield f"{f.slack} reserved but unallocated exceeds the request, in pieces: the card is simply full."


def _other_runs(message: OomMessage, messages: Sequence[OomMessage]) -> Iterator[str]:
    """Another process that a message lists and that wrote a message of its own: the same memory, told by both."""
    for pid, amount in message.other_processes:
        spans = ((m.line, m.interval("process_bytes")) for m in messages if m is not message and amount is not None)
        line = next((line for line, own in spans if own is not None and own[0] <= (amount or 0) <= own[1]), None)
        if line is not None:
            yield (
                f"Process {pid}, the other holder, is the other run of this log: its own message (line {line}) "
                f"says {format_bytes(amount or 0)} too."
            )


def _across(message: OomMessage, messages: Sequence[OomMessage]) -> Iterator[str]:
    if message.times_printed > 1:
        yield f"The same message stands in the log {message.times_printed} times; it is counted once."
    host = next((m for m in messages if m.kind is MessageKind.HOST), None)
    if host is not None and message.is_gpu_oom:
        yield f"Line {host.line} tells of another failure: {host.what}. No change to GPU memory helps against that one."
    gpu = [m for m in messages if m.is_gpu_oom and m.kind is not MessageKind.WARNING]
    if len(gpu) < 2:
        return
    places = {(m.rank, m.device) for m in gpu if m.rank is not None or m.device is not None}
    tried = {m.tried_bytes for m in gpu if m.tried_bytes is not None}
    if len(places) > 1 and len(tried) == 1 and message.tried_bytes is not None:
        yield (
            f"{len(places)} ranks or devices failed at the same request of {format_bytes(message.tried_bytes)}: "
            "the cause is in the data or the model, not in one card."
        )
    elif len(places) > 1:
        yield f"{len(places)} ranks or devices ran out of memory, at requests of different sizes."
    elif (different := len({(m.tried_bytes, m.free_bytes, m.allocated_bytes, m.what) for m in gpu})) == 1:
        yield f"The same out-of-memory message was found {len(gpu)} times."
    else:
        yield f"{different} different out-of-memory messages are in the log; this is the first."


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
