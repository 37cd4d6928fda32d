"""What detectors look at: one device at one event, with the questions they share answered once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from memtrace.analysis import Analysis
from memtrace.answers.report import category_bytes, moment_of
from memtrace.arrays import among
from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.course import Pass, SamePoint, find_passes, same_points, span_at
from memtrace.explain.dims import Dims, dims_of
from memtrace.explain.setting import RunSetting, setting_of_snapshot
from memtrace.explain.snapshot_facts import Refused, course_of
from memtrace.explain.verdict import Verdict
from memtrace.history.timeline import At, Window, running
from memtrace.snapshot.model import Action, Bool

MATERIAL_SHARE = 0.02
"""A cause below this share of the memory in use is not worth a line."""


class Case:
    """One device at one event. Masks and arrays have one entry a row of ``Timeline.allocations``; sizes are bytes."""

    def __init__(self, analysis: Analysis, at: At, verdict: Verdict, refused: Refused | None) -> None:
        self.analysis, self.at, self.verdict, self.refused = analysis, at, verdict, refused
        self.timeline, self.attribution = analysis.timeline, analysis.attribution
        self.facts, self.table, self.config = self.attribution.facts, self.timeline.allocations, self.timeline.config
        self.size = self.table.requested_bytes
        _, self.allocated_bytes, self.reserved_bytes = self.timeline.curve_at(at.event)
        self.is_oom = refused is not None
        self.refusal = refused.refusal if refused is not None else None
        self.capacity = refused.capacity if refused is not None else None
        self.moment = moment_of(analysis, at.event)
        self.span = span_at(self.facts.phases, at.event)  # row of the phases; -1 if the event lies in none
        self.phase = Phase(int(self.facts.phases.phase[self.span])) if self.span >= 0 else Phase.UNKNOWN

    @property
    def whole_bytes(self) -> int:
        """The capacity at a refusal; else, or where nothing tells it, the most that was ever reserved."""
        return self.capacity.low_bytes if self.capacity is not None else self.timeline.peaks()[2].size_bytes

    @cached_property
    def setting(self) -> RunSetting:
        """Back end, release, platform and trainer of the run."""
        expandable = self.config.expandable_segments or self.timeline.replay.maps_pages
        return setting_of_snapshot(self.timeline.snapshot, expandable, self.config.padding_bytes > 0)

    @cached_property
    def live(self) -> Bool:
        """Rows that hold memory at the event, pending frees left out."""
        mask = np.zeros(len(self.table), dtype=np.bool_)
        mask[self.timeline.held_rows(self.at.event)] = True
        return mask

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Training passes of the recording."""
        return find_passes(self.facts.phases)

    @cached_property
    def here(self) -> Pass | None:
        """The pass that the event lies in."""
        return next((p for p in self.passes if p.start <= self.at.event < p.end), None)

    @cached_property
    def points(self) -> list[SamePoint]:
        """The same point of earlier passes, latest first."""
        return same_points(course_of(self.analysis, self.at.event), self.at.event)

    def grown_since(self, point: SamePoint) -> dict[str, int]:
        """Change of live requested bytes by ``category/subcategory`` since an earlier point, largest first."""
        held = (self.timeline.held_rows(event) for event in (self.at.event, point.event))
        now, then = (category_bytes(self.analysis, rows) for rows in held)
        change = {key: now.get(key, 0) - then.get(key, 0) for key in now.keys() | then.keys()}
        order = sorted(change.items(), key=lambda item: (-abs(item[1]), -item[1], item[0]))
        return {key: size_bytes for key, size_bytes in order if size_bytes}

    @cached_property
    def dims(self) -> Dims | None:
        """Dimensions of the pass that the event lies in, else of the first pass that shows them."""
        wanted = [self.here] if self.here is not None else list(self.passes[:2])
        return next((d for p in wanted if p and (d := dims_of(self.analysis, p.start, p.end))), None)

    @cached_property
    def event_tags(self) -> Tag:
        """Tags of the stack that asked for memory at the event, or last before it."""
        trace, event = self.timeline.trace, self.at.event
        asks = np.flatnonzero(among(trace.action[: event + 1], (Action.ALLOC, Action.OOM)))
        return Tag(int(self.facts.stacks.tags[trace.stack[asks[-1]]])) if len(asks) else Tag(0)

    @cached_property
    def in_evaluation(self) -> bool:
        """Whether the event lies in a forward pass that no backward pass is to follow: the phases or the stack say so,
        or the head has run more often in a row than before any backward pass."""
        if self.phase in (Phase.EVALUATION, Phase.GENERATION) or self.event_tags & (Tag.EVALUATE | Tag.GENERATE):
            return True
        if self.phase is not Phase.FORWARD or self.here is None:
            return False
        heads = self.kind(Purpose.LOGITS) & (self.attribution.serving("head"))
        born = self.facts.born
        ran = [int((heads & (born >= p.start) & (born < self._forward_end(p))).sum()) for p in self.passes]
        mine = self.passes.index(self.here)
        return mine > 0 and ran[mine] > max(ran[:mine])

    def _forward_end(self, one: Pass) -> int:
        phases = self.facts.phases
        later = next((i for i in one.spans if phases.phase[i] != Phase.FORWARD), None)
        return one.end if later is None else int(phases.start[later])

    def kind(self, *wanted: Category | Purpose) -> Bool:
        """Rows of any of the categories and purposes."""
        return self.attribution.rows_of(*wanted)

    def total(self, mask: Bool) -> int:
        """Requested bytes of the rows."""
        return int(self.size[mask].sum())

    def live_total(self, mask: Bool) -> int:
        """Requested bytes of those rows that are live at the event."""
        return self.total(mask & self.live)

    def is_material(self, size_bytes: int, share: float = MATERIAL_SHARE) -> bool:
        """Whether a size is worth a finding: a share of what is in use at the event."""
        return size_bytes > 0 and size_bytes >= share * max(self.allocated_bytes, 1)

    def saving(self, mask: Bool, share: float = 1.0) -> int:
        """By how much the state in question shrinks if the rows were ``share`` smaller.

        For an OOM: at the refusal. Else the highest requested level over the span in question is taken again without
        them, since the peak may move elsewhere.
        """
        count = len(self.timeline)
        if self.is_oom or not count:
            return round(self.live_total(mask) * share)
        rows = np.flatnonzero(mask)
        born, died, size = self.facts.born[rows], self.facts.died[rows], self.size[rows]
        first, stop = self.timeline.span
        part = running(Window(0, count), int(size[born < 0].sum()), (born, size), (died, -size))
        level = self.timeline.requested_bytes[first:stop]
        return max(0, int(level.max()) - round(float((level - share * part[first:stop]).max())))

    def by_stack(self, rows: Bool) -> dict[int, int]:
        """Requested bytes of the rows by the stack that made them, in the order of their first rows."""
        stacks, first, inverse = np.unique(self.table.stack[rows], return_index=True, return_inverse=True)
        sums = np.zeros(len(stacks), dtype=np.int64)
        np.add.at(sums, inverse, self.size[rows])
        return {int(stacks[i]): int(sums[i]) for i in np.argsort(first)}

    def frame_of(self, rows: Bool) -> str:
        """Label of the call site that made most of the rows' bytes, of equals the first; "" if none was recorded."""
        sums = self.by_stack(rows)
        return self.attribution.sites.label(max(sums, key=lambda stack: sums[stack])) if sums else ""

    def with_stack(self, holds: Callable[[int], bool]) -> Bool:
        """Rows whose stack (its number in the snapshot's table) is one for which ``holds``."""
        found = [holds(stack) for stack in range(len(self.timeline.snapshot.stacks))]
        return np.array([*found, False])[self.table.stack]

    def made_in(self, part: str, *names: str) -> Bool:
        """Rows whose stack contains a frame of a file whose path has ``part``, in one of the functions if named."""
        return self._with_frame(
            part in frame.filename.replace("\\", "/") and (not names or frame.name in names)
            for frame in self.timeline.snapshot.stacks.frames
        )

    def has_function(self, names: Iterable[str]) -> Bool:
        """Rows whose stack contains a function of one of these names."""
        return self._with_frame(frame.name in names for frame in self.timeline.snapshot.stacks.frames)

    def _with_frame(self, wanted: Iterable[bool]) -> Bool:
        hit, table = np.array([*wanted], dtype=np.bool_), self.timeline.snapshot.stacks
        if not hit.any():
            return np.zeros(len(self.size), dtype=np.bool_)
        return self.with_stack(lambda stack: bool(hit[table.frame_ids(stack)].any()))
