"""What a dry run of a script came to, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace.units import counted, format_bytes, printable

if TYPE_CHECKING:
    from memtrace.estimate.dryrun.script import DryScript


def lines(found: DryScript, gpu: str) -> list[str]:
    """Peak and verdict, then each assumption once."""
    card = f"{gpu} of {format_bytes(found.capacity_bytes)}"
    requested, allocated, reserved = (
        format_bytes(size)
        for size in (found.peak_requested_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes)
    )
    steps = counted(found.steps, "optimizer step")
    result = [f"memtrace: predicted peak over {steps}: {requested} requested, {allocated} allocated, {reserved} reserved"]
    if found.refused_bytes is not None:
        result.append(f"memtrace: does not fit on {card}: {format_bytes(found.refused_bytes)} more were asked for")
    elif found.exit_code == 0:
        result.append(f"memtrace: fits on {card}, {format_bytes(found.margin_bytes)} to spare")
    elif found.impossible is not None:
        result.append(f"memtrace: the dry run went no further: {printable(found.impossible)}")
    for one in found.assumptions:
        times = counted(one.count, "time")
        result.append(f"memtrace: assumed: {printable(one.said)} ({times}, first at {printable(one.first)})")
    return result
