"""What a dry run came to: of a script, and of the step that a stream is made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memtrace.estimate.dryrun.assumed import Assumption
from memtrace.estimate.dryrun.stacks import Frames
from memtrace.estimate.stream import Stream
from memtrace.units import counted, format_bytes, printable


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a dry run saw. ``stacks[stack_of[i]]`` is where allocation i was made; ``parameters`` counts all weights.
    ``products``: (outputs, inputs) of its 4-bit products; ``assumed``: what it took for granted, one line each."""

    stream: Stream
    stacks: list[Frames]
    stack_of: list[int]
    parameters: int
    trainable: int
    products: set[tuple[int, int]]
    assumed: list[str]


@dataclass(frozen=True, slots=True)
class DryScript:
    """How a dry run of a program ended. Peaks are those of the whole run; ``exit_code`` is the program's.

    ``refused_bytes``: the request that did not fit and that nobody handled, ``impossible`` what stopped the dry run
    and nothing else, with its place. ``file``: the recording. ``low`` and ``high`` are the reserved peak with other
    addresses of the driver's, or where the card keeps up; ``fits_always`` says that it fits with all that were tried.
    """

    exit_code: int
    steps: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_reserved_low_bytes: int
    peak_reserved_high_bytes: int
    capacity_bytes: int
    margin_bytes: int
    fits_always: bool
    refused_bytes: int | None
    impossible: str | None
    assumptions: list[Assumption]
    file: str | None


def lines(found: DryScript, gpu: str) -> list[str]:
    """Peak and verdict, then each assumption once."""
    card = f"{gpu} of {format_bytes(found.capacity_bytes)}"
    requested, allocated, reserved = (
        format_bytes(size)
        for size in (found.peak_requested_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes)
    )
    steps = counted(found.steps, "optimizer step")
    peaks = f"{requested} requested, {allocated} allocated, {reserved} reserved"
    result = [f"memtrace: predicted peak over {steps}: {peaks}"]
    is_held = found.peak_requested_bytes > found.peak_allocated_bytes  # what other streams used is not free yet
    ahead = "how far the host is ahead of the card"
    if is_held:
        result.append(f"memtrace: requested is {allocated} to {requested}, by {ahead}")
    low, high = map(format_bytes, (found.peak_reserved_low_bytes, found.peak_reserved_high_bytes))
    if low != high and found.refused_bytes is None:
        cause = "the addresses that the driver hands out" + f" and {ahead}" * is_held
        result.append(f"memtrace: reserved is {low} to {high}, by {cause}")
    if found.refused_bytes is not None:
        result.append(f"memtrace: does not fit on {card}: {format_bytes(found.refused_bytes)} more were asked for")
    elif found.exit_code == 0:
        unsure = "" if found.fits_always else "; with other addresses of the driver's it does not"
        result.append(f"memtrace: fits on {card}, {format_bytes(found.margin_bytes)} to spare{unsure}")
    elif found.impossible is not None:
        result.append(f"memtrace: the dry run went no further: {printable(found.impossible)}")
    return result + assumed_lines(found.assumptions)


def assumed_lines(assumptions: Iterable[Assumption]) -> list[str]:
    """Each assumption once."""
    return [
        f"memtrace: assumed: {printable(one.said)} ({counted(one.count, 'time')}, first at {printable(one.first)})"
        for one in assumptions
    ]
