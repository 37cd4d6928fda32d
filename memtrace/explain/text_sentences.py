"""Facts of an out-of-memory text that a person should hear beside the verdict, each a sentence with its number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memtrace.explain.facts import ByteSpan, OomFacts
from memtrace.explain.text_facts import sentence
from memtrace.oomlog import MemorySummary, MessageKind, OomMessage
from memtrace.oomlog.versions import intersect
from memtrace.units import GIB, MIB, format_bytes

OUTSIDE_SHARE = 0.10
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
_LIBRARY = (
    "Library handles are created late, so this is often the first allocation that finds the card full: "
    "look at what was in use just before."
)


def worth_saying(
    message: OomMessage,
    figures: OomFacts,
    verdict: str,
    messages: Sequence[OomMessage],
    summaries: Sequence[MemorySummary],
) -> list[str]:
    """Sentences, the most useful first; none of them repeats the verdict."""
    facts: list[str] = []
    facts += _limits(message, figures, verdict)
    facts += _outside(message, figures, verdict)
    facts += _pieces(message, figures, verdict)
    if message.component in _BY_COMPONENT:
        facts.append(_BY_COMPONENT[message.component])
    elif message.kind is MessageKind.LIBRARY:
        facts.append(_LIBRARY)
    elif message.kind is MessageKind.DRIVER:
        facts.append(
            "A plain driver error can also be pinned memory of the machine (pin_memory, offloading, WSL's cap on it): "
            "check whether the card had memory free."
        )
    facts += _other_runs(message, messages)
    facts += _across(message, messages)
    facts += [sentence(note) for note in message.notes]
    if message.cut_short:
        facts.append("The text is cut off before its last figure.")
    elif message.damaged:
        facts.append("Part of the text could not be read: it is interrupted or misspelt.")
    facts += _summaries(message, summaries)
    return facts


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
        if share >= OUTSIDE_SHARE and verdict not in ("not_this_process", "not_pytorch"):
            yield f"{f.outside} ({100 * share:.0f} % of the card) is in use outside PyTorch's allocator."
    if f.own_outside is not None and f.own_outside.low > 2 * GIB:
        yield f"This process uses {f.own_outside} outside PyTorch's allocator (context, NCCL, other libraries)."
    if f.own_pid is not None:
        yield f"Process {f.own_pid} must be this process: no other could hold what PyTorch has reserved."
    for pid, amount in message.other_processes:
        if pid != f.own_pid and amount is not None and amount >= 64 * MIB:
            unsure = f.own_pid is None and message.process_bytes is None
            tail = " (it may be this very process: containers renumber)." if unsure else "."
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
        yield f"{format_bytes(message.private_pools_bytes)} sits in private pools (CUDA graphs) alone."
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
        for other in messages:
            own = other.interval("process_bytes")
            if other is message or amount is None or own is None or not own[0] <= amount <= own[1]:
                continue
            yield (
                f"Process {pid}, the other holder, is the other run of this log: its own message (line {other.line}) "
                f"says {format_bytes(amount)} too."
            )
            break


def _across(message: OomMessage, messages: Sequence[OomMessage]) -> Iterator[str]:
    if message.times_printed > 1:
        yield f"The same message stands in the log {message.times_printed} times; it is counted once."
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


def _summaries(message: OomMessage, summaries: Sequence[MemorySummary]) -> Iterator[str]:
    for table in summaries:
        if message.device not in (None, table.device) or table.allocated_bytes is None or table.reserved_bytes is None:
            continue
        peak = format_bytes(table.reserved_peak_bytes) if table.reserved_peak_bytes is not None else "unknown"
        yield (
            f"The memory summary on line {table.line} shows {format_bytes(table.allocated_bytes)} allocated of "
            f"{format_bytes(table.reserved_bytes)} reserved (peak {peak}) on device {table.device}."
        )
        return
