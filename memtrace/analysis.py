"""A device's timeline with its attribution and its caveats: what every question starts from.

Caveats are what a reader should know before trusting a number: gaps of the recording, and where memtrace had to assume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memtrace.arrays import among
from memtrace.attribution.classify import Attribution, attribute
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.attribution.user_rules import UserRule
from memtrace.frozen import dataclass
from memtrace.history.timeline import At, Timeline
from memtrace.ranges import find_event, window_of
from memtrace.snapshot.model import Action, Snapshot
from memtrace.units import format_bytes, format_count

PREDICTED = "predicted by memtrace (estimate or dryrun), not recorded"
_LATE_START_BLOCKS = 64  # a process that only warmed the GPU up has a handful of blocks before recording


@dataclass(frozen=True, slots=True)
class Analysis:
    """A device's timeline with its attribution: what every question starts from.

    ``caveats`` are the whole recording's, also where the timeline holds a part of it only.
    """

    timeline: Timeline
    attribution: Attribution
    caveats: tuple[str, ...]

    def within(self, events: str | None, steps: str | None) -> Analysis:
        """The same with its timeline's window set by a range of events or steps; unchanged where neither is given.

        Raises UsageError for a bad range, NoAnswerError where the recording has no such events.
        """
        if events is None and steps is None:
            return self
        timeline = self.timeline
        phases = self.attribution.facts.phases
        window = window_of(events, steps, len(timeline), phases, timeline.snapshot.source)
        return replace(self, timeline=replace(timeline, window=window))

    def at(self, when: str | None) -> At:
        """The event that ``--at`` names; see :func:`memtrace.ranges.find_event`."""
        return find_event(self.timeline, self.attribution.facts.phases, when)


def analyse(timeline: Timeline, user_rules: Sequence[UserRule] | None = None) -> Analysis:
    """Attribute a timeline; the user's own rules come before memtrace's."""
    return analysis_of(timeline, attribute(timeline, user_rules or ()))


def analysis_of(timeline: Timeline, attribution: Attribution) -> Analysis:
    """A whole timeline with an attribution that is known."""
    return Analysis(timeline, attribution, warnings_of(timeline, attribution))


def is_truncated(timeline: Timeline) -> bool | None:
    """Whether the ring buffer overflowed, so that the beginning is lost.

    True: the file says so, the trace begins inside an operation, or it has a round number of events and begins with
    live memory; None: it begins with live memory, and a late start explains that as well; False: it is whole.
    """
    settings, trace = timeline.snapshot.settings, timeline.trace
    if settings.get("trace_alloc_overflowed") is True:
        return True
    count = len(trace)
    if count == 0:
        return False
    first = int(trace.action[0])
    begins_inside = first == Action.FREE_COMPLETED
    round_count = count >= 1000 and (count % 1000 == 0 or count & (count - 1) == 0)
    early = len(timeline.replay.initial_pending)
    if early and (begins_inside or round_count or settings.get("trace_alloc_max_entries") == count):
        return True
    return None if early > _LATE_START_BLOCKS else False


def is_predicted(snapshot: Snapshot) -> bool:
    """Whether the file says that it was written by ``memtrace estimate --trace`` or ``memtrace dryrun --trace``."""
    return snapshot.memtrace.get("predicted") is True


def warnings_of(timeline: Timeline, attribution: Attribution) -> tuple[str, ...]:
    """Lines for people, most important first."""
    replay, trace = timeline.replay, timeline.trace
    lines = [PREDICTED] if is_predicted(timeline.snapshot) else []
    if not replay.exact:
        where = f" from event {replay.diverged_at}" if replay.diverged_at is not None else ""
        lines.append(
            f"the allocator's behaviour could not be reproduced{where}: {replay.why}; sizes are estimates there"
        )
    if replay.padding_bytes:
        lines.append(
            f"torch_npu wrote this file: device {timeline.device.device} is an NPU, and blocks are sized by that back "
            f"end's rule (request + {replay.padding_bytes} bytes, rounded up to 512)"
        )
    early_bytes = replay.initial_requested_bytes
    truncated = is_truncated(timeline)
    if truncated:
        lines.append(
            f"the recording's ring buffer overflowed: the beginning is lost, {format_bytes(early_bytes)} were live "
            "before its first event (record with a larger max_entries)"
        )
    elif truncated is None:
        lines.append(
            f"recording began late: {format_bytes(early_bytes)} in {format_count(len(replay.initial_pending))} "
            "blocks were live before its first event, without stacks"
        )
    if len(trace) == 0:
        lines.append("no trace was recorded, only the final state (torch.cuda.memory._record_memory_history was off)")
    else:
        kinds = attribution.facts.stacks.kind[
            trace.stack[timeline.allocations.alloc_event[len(replay.initial_pending) :]]
        ]
        if len(kinds) and bool((kinds == Kind.NONE).all()):
            lines.append("no stacks were recorded: categories rest on lifetimes and sizes alone")
        elif not among(
            attribution.facts.phases.phase, [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION]
        ).any():
            lines.append("no training step was recognised in the recording")
    lines += replay.notes
    lines += timeline.snapshot.warnings
    return tuple(lines)
