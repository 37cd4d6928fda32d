"""The five lines printed after an out-of-memory error, from the process's own figures at that moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MIB, _GIB = 1 << 20, 1 << 30


def size_text(size_bytes: int) -> str:
    """``1.50 GiB``, ``86.00 MiB`` or ``512 bytes``."""
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.2f} GiB"
    return f"{size_bytes / _MIB:.2f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"


def labelled_bytes(labels: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by category of the labels that hold at the snapshot and lie in the allocator's memory."""
    sums: Counter[str] = Counter()
    for row in labels:
        if row["until_time_us"] is None and not row.get("outside"):
            sums[row["category"]] += row["bytes"]
    return dict(sums)


def oom_lines(extra: Mapping[str, Any], file: Path | None, events: int, is_older: bool = False) -> list[str]:
    """What failed, why, what holds the memory, where the state was saved, and what to run next.

    ``extra`` is the snapshot's ``memtrace`` dictionary. ``is_older``: its state is that of an earlier failure of the
    same request, which the program had handled.
    """
    oom, stats = extra["oom"], extra["stats"]
    tried = int(oom["requested_bytes"])
    allocated = int(stats.get("allocated_bytes.all.current", 0))
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    rank = f" (rank {extra['rank']} of {extra['world_size']})" if extra["world_size"] > 1 else ""
    lines = [
        f"out of memory{rank} in phase {oom['phase']}, step {oom['step']}: {size_text(tried)} more were asked for; "
        f"{size_text(allocated)} allocated, {size_text(reserved)} reserved on device {extra['device']}",
        _why(extra, tried, allocated, reserved),
        _holders(extra, allocated),
    ]
    if file is None:
        lines.append("the state could not be saved (see above)")
        lines.append("next: free space or choose another folder, then run again")
    else:
        which = "an earlier failure of the same request" if is_older else "the failure"
        lines.append(f"state at {which} saved to {file} ({events} events)")
        lines.append(f"next: memtrace explain {file}")
    return lines


def _why(extra: Mapping[str, Any], tried: int, allocated: int, reserved: int) -> str:
    total, limit, free = extra["device_total_bytes"], extra["limit_bytes"], extra["device_free_bytes"]
    slack = reserved - allocated
    if total is None or free is None:
        return f"{size_text(slack)} are reserved but not allocated; the device's memory is unknown"
    within = total if limit is None else min(limit, total)
    capacity = f"limit {size_text(within)}" if limit is not None else f"device {size_text(total)}"
    left = min(within, reserved + free) - allocated
    if left >= tried:
        return (
            f"fragmented: in one piece, the {size_text(slack)} that are reserved but not allocated would have held "
            f"this request, though perhaps not what follows ({capacity})"
        )
    others = total - free - reserved
    if limit is None and others > max(reserved, 2 * _GIB):
        return f"mostly not this allocator: {size_text(others)} of the device are in use outside it ({capacity})"
    return (
        f"too much for the memory there is: {size_text(max(0, left))} are not allocated, in however many pieces, and "
        f"that is less than this request ({capacity})"
    )


def _holders(extra: Mapping[str, Any], allocated: int) -> str:
    known = labelled_bytes(extra["labels"])
    base, lora = known.get("base_weights", 0), known.get("lora", 0)
    rest = max(0, allocated - base - lora)
    return (
        f"of the allocated memory {size_text(base)} are the base model, {size_text(lora)} what is trained "
        f"(with gradients and states), {size_text(rest)} activations and temporaries"
    )
