"""Device memory that the allocator does not hold, and whose it is as far as memtrace's own recorder saw it come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memtrace.history.timeline import Timeline

#: What came until each reading of the recorder, and before the first.
CAME = {
    "start": ("before_recording", "before the recording began: CUDA context, libraries"),
    "model": ("loading", "until the first call of the model: loading, process groups with their communicators"),
    "backward": ("first_pass", "in the first forward and backward pass: kernels' code, handles of cuBLAS and cuDNN"),
    "step": ("first_step", "until the end of the first step"),
    "snapshot": ("later", "since then"),
}
OTHERS = ("other_processes", "other processes, and what the driver keeps for itself")
OWNERS = dict((*CAME.values(), OTHERS))


def outside_allocator(timeline: Timeline) -> dict[str, Any] | None:
    """What the file tells of device memory that the allocator does not hold; None if it tells nothing. Bytes.

    memtrace's own recorder stores device totals and readings; an OOM event stores the free bytes of the device at that
    moment. ``rows`` (``owner``, ``bytes``) sum to what was outside when the file was written; ``managed_bytes`` are
    optimizer states that the driver moves between card and host.
    """
    extra: Mapping[str, Any] = timeline.snapshot.memtrace
    total, free = extra.get("device_total_bytes"), extra.get("device_free_bytes")
    ooms, at = timeline.trace.oom_device_free_bytes, len(timeline.trace) - 1
    if ooms:
        seen = ooms[max(ooms)]
        free, at = (seen, max(ooms)) if seen >= 0 else (free, at)
    total, free, limit = (_size(value) for value in (total, free, extra.get("limit_bytes")))
    if total is None and free is None:
        return None
    used = total - free if total is not None and free is not None else None
    readings = [row for row in _dicts(extra.get("outside")) if _is_whole(row)]
    own = _size(readings[-1].get("process_bytes")) if readings else None
    labels = [row for row in _dicts(extra.get("labels")) if row.get("outside") is True]
    return {
        "device_total_bytes": total,
        "device_free_bytes": free,
        "device_used_bytes": used,
        "limit_bytes": limit,
        "this_process_bytes": own,
        "not_this_allocator_bytes": used - timeline.curve_at(at)[2] if used is not None else None,
        "managed_bytes": sum(_size(row.get("bytes")) or 0 for row in labels),
        "rows": [{"owner": owner, "bytes": size} for owner, size in _rows(readings)],
    }


def _rows(readings: list[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """What each step between two readings added, of this process alone where every reading tells it.

    Nothing where the readings are not of the start and then in their order, as what came before one would count as what
    came then; nor where a process holds less than its allocator, or more than all.
    """
    points = [row["at"] for row in readings]
    if points[:1] != ["start"] or points[-1] != "snapshot" or points != [each for each in CAME if each in points]:
        return
    is_told = all(_size(row.get("process_bytes")) is not None for row in readings)
    held = "process_bytes" if is_told else "used_bytes"
    if any(not row["reserved_bytes"] <= row[held] <= row["used_bytes"] for row in readings):
        return
    before = 0
    for row in readings:
        now = row[held] - row["reserved_bytes"]
        yield CAME[row["at"]][0], now - before
        before = now
    if is_told:
        yield OTHERS[0], readings[-1]["used_bytes"] - readings[-1]["process_bytes"]


def _is_whole(row: Mapping[str, Any]) -> bool:
    sizes = _size(row.get("used_bytes")), _size(row.get("reserved_bytes"))
    return isinstance(row.get("at"), str) and row["at"] in CAME and None not in sizes


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _size(value: Any) -> int | None:
    """A stored byte count that can be one; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 60 else None
