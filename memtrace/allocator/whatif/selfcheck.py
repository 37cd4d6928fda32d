"""How far the model can be trusted on a recording: does it predict the recording, without being told?"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from memtrace.allocator.replay.replay import Replay
from memtrace.allocator.whatif.addresses import Policy
from memtrace.allocator.whatif.program import Program
from memtrace.allocator.whatif.whatif import Simulation, simulate
from memtrace.frozen import dataclass
from memtrace.snapshot.model import Action


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit on reserved bytes that a recorded run had, as far as it is known.

    ``source`` is "given", "recorded", "card" (full when a request was refused), "inferred" or "none". Where it is
    inferred it lies between ``at_least_bytes`` and ``below_bytes``, and ``size_bytes`` is what simulations use.
    """

    size_bytes: int | None
    source: str
    at_least_bytes: int | None = None
    below_bytes: int | None = None


def recorded_limit(replay: Replay, recorded_bytes: int | None = None) -> Limit:
    """The limit of the recorded run: ``recorded_bytes`` if some recorder stored it, else what the trace shows.

    An inferred limit is the lowest that explains every success, so a simulation under it never fits by luck; where
    nothing was granted at all, it is the highest that explains the refusals.
    """
    if recorded_bytes is not None:
        return Limit(recorded_bytes, "recorded")
    low, high = replay.limit_from_bytes, replay.limit_below_bytes
    if high is None:
        return Limit(None, "none")
    return Limit(low if 0 < low < high else high - 1, "inferred", low, high)


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """``exact``: told about refusals, the model reproduces the recording (addresses, segment events, final layout).
    ``predicted``: it does so untold, from the program and ``limit`` alone; None if it was not tried, since the replay
    diverges. ``why`` and ``predicted_why`` are sentences, ``run`` is the one that was compared.
    """

    exact: bool
    diverged_at: int | None
    why: str | None
    predicted: bool | None
    predicted_why: str | None
    limit: Limit
    run: Simulation | None = field(default=None, repr=False)


def self_check(program: Program, replay: Replay, limit: Limit) -> SelfCheck:
    """Compare what the model makes of the recorded program under the recorded settings with the recording."""
    if not replay.exact:
        return SelfCheck(False, replay.diverged_at, replay.why, None, None, limit)
    config = program.evidence.config.with_limit(limit.size_bytes)
    run = simulate(program, config, Policy.RECORDED)
    why = difference(program, run)
    return SelfCheck(True, None, None, why is None, why, limit, run)


def settle(program: Program, replay: Replay, limit: Limit) -> SelfCheck:
    """:func:`self_check`, choosing within the bounds of an inferred limit one that predicts the recording, if any does.

    Garbage collection depends on the exact limit, not only on what was granted and refused.
    """
    check = self_check(program, replay, limit)
    low, high = limit.at_least_bytes, limit.below_bytes
    if check.predicted is not False or limit.source != "inferred" or low is None or high is None:
        return check
    for tried in (high - 1, (low + high) // 2, low + (high - low) // 4, low + 3 * (high - low) // 4):
        other = self_check(program, replay, Limit(tried, limit.source, low, high))
        if other.predicted:
            return other
    return check


def difference(program: Program, run: Simulation) -> str | None:
    """The first way in which a simulated run differs from the recorded one, as a sentence; None if in none."""
    evidence = program.evidence
    trace, life = evidence.device.trace, evidence.life
    refused = [refusal.event for refusal in run.refused]
    recorded = [refusal.event for refusal in program.refusals]
    made = slice(life.initial, None)
    wrong = np.flatnonzero(run.address[made] != life.address[made])
    if len(wrong):
        event = int(life.alloc_event[life.initial + int(wrong[0])])
        return f"the allocation at event {event} is placed elsewhere or refused"
    if refused != recorded:
        event = min(set(refused) ^ set(recorded))
        what = "not predicted" if event in recorded else "predicted but not recorded"
        return f"the refusal at event {event} is {what}"
    kinds = (trace.action >= Action.SEGMENT_ALLOC) & (trace.action <= Action.SEGMENT_UNMAP)
    theirs = np.stack([trace.action[kinds].astype(np.int64), trace.address[kinds], trace.size[kinds]], axis=1)
    mine = run.segment_events[:, 1:4]
    rows = min(len(mine), len(theirs))
    differ = np.flatnonzero((mine[:rows] != theirs[:rows]).any(axis=1))
    if len(differ) or len(mine) != len(theirs):
        row = int(differ[0]) if len(differ) else rows
        event = int(np.flatnonzero(kinds)[row]) if row < len(theirs) else len(trace) - 1
        return f"the segment event at event {event} is not the one predicted"
    return None
