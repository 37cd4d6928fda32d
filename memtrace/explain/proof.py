"""Changes tried before they are advised: by replay of the recording, by forecast of the same run, or by arithmetic.

A :class:`Proposal` says what would change: tensors that would be smaller or gone, settings of the allocator, or options
of the run. What a proof shows to save less than 1 % of the capacity is not advice; it is kept apart with its figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.allocator.conf_text import parse_conf
from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.whatif.program import Program, extract
from memtrace.allocator.whatif.whatif import Simulation, simulate
from memtrace.attribution.categories import Category
from memtrace.attribution.phases import Phase
from memtrace.explain.answer import Advice, Basis, Finding, Together
from memtrace.explain.case import Case
from memtrace.frozen import dataclass
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes as size

if TYPE_CHECKING:
    from memtrace.explain.forecaster import Forecaster

LEAST_SHARE = 0.01
"""Of the capacity: what saves less is not advice."""
_CONFIRMS = 0.9  # of a formula's figure: what the replay must win for it to stand
_MOST_TOGETHER = 2  # larger subsets are not searched
_SHARE_STEPS = 16  # of the longest sequence, tried by forecasts
_REPLAY_EVENTS = 3_000_000  # longer recordings are not replayed while somebody waits; memtrace simulate does on request


@dataclass(frozen=True, slots=True)
class Proposal(Advice):
    """Advice that is still to be tried. ``rows`` would be ``share`` smaller (1: gone); ``conf`` is a settings string;
    ``options`` are those of ``memtrace estimate``; ``asks_bytes`` is what would be asked for instead of the refused
    request, where that is one of those tensors."""

    rows: Bool | None = None
    share: float = 1.0
    asks_bytes: int | None = None
    conf: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Bench:
    """The recorded program of a case, to be run again with changes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._program: Program | None = None

    @cached_property
    def _forecaster(self) -> Forecaster | None:
        case = self.case
        if not case.timeline.snapshot.config:
            return None
        from memtrace.explain.forecaster import forecaster_of  # brings all of the estimate

        return forecaster_of(case.analysis, case.reserved_bytes if case.is_oom else None)

    @property
    def can_replay(self) -> bool:
        """Whether the program is whole enough to be run again, and short enough to be waited for."""
        timeline = self.case.timeline
        blocks_known = not timeline.replay.initial_reserved_bytes or bool(timeline.replay.initial_segments.address.size)
        return timeline.replay.exact and 0 < len(timeline) <= _REPLAY_EVENTS and blocks_known

    def run(self, proposals: Sequence[Proposal]) -> Simulation:
        """The program with all the changes, under the capacity, up to the refusal (or to its end)."""
        case = self.case
        if self._program is None:
            self._program = extract(gather(case.timeline.device, case.config)).to_run()
        program, config = self._program, case.config
        gone = np.zeros(len(case.size), dtype=np.bool_)
        for proposal in proposals:
            if proposal.rows is not None and proposal.share >= 1:
                gone |= proposal.rows
            elif proposal.rows is not None:
                program = program.scaled(proposal.rows, 1 - proposal.share)
            if proposal.conf:
                config = with_conf(config, proposal.conf)
            if proposal.asks_bytes is not None:
                program = program.asking(case.at.event, proposal.asks_bytes)
        if gone.any():
            program = program.without(gone)
        limit = case.capacity.low_bytes if case.is_oom and case.capacity is not None else None
        return simulate(program, config.with_limit(limit), until=case.at.event if case.is_oom else None)

    def forecast(self, options: Mapping[str, Any]) -> tuple[int, int, int] | None:
        """(most allocated as it was, most allocated and most reserved with these options changed) in the same run; None
        where the recording does not carry its configuration or the prediction does not match the recording."""
        if self._forecaster is None or (peaks := self._forecaster.peaks(options)) is None:
            return None
        return self._forecaster.allocated_bytes, peaks.allocated_bytes, peaks.reserved_bytes

    @property
    def longest_tokens(self) -> int:
        """Of the recorded sequences that a forecast goes by."""
        return max(self._forecaster.lengths) if self._forecaster is not None else 0

    def rest_after(self, proposals: Sequence[Proposal]) -> int:
        """What the pass would still have needed behind the refused request, as much smaller as the proposals make what
        the pass had made so far."""
        needed = self.case.refused.facts.still_needed_bytes if self.case.refused is not None else None
        if needed is None or self.case.refusal is None:
            return 0
        fixed = self.case.kind(Category.LORA, Category.RUNTIME, Category.BASE_WEIGHTS) & self.case.live
        growing = self.case.live & ~fixed
        gone = np.zeros(len(self.case.size))
        for proposal in proposals:
            if proposal.rows is not None:
                gone = np.maximum(gone, np.where(proposal.rows & growing, proposal.share, 0.0))
        left = 1 - float((gone * self.case.size).sum()) / max(self.case.total(growing), 1)
        return round(max(0, needed - self.case.refusal.asked_bytes) * max(0.0, left))

    @cached_property
    def _as_it_was(self) -> Simulation:
        return self.run([])

    def won_bytes(self, proposal: Proposal) -> int:
        """By how much less is allocated at the peak with the change."""
        return self._as_it_was.peak_allocated_bytes - self.run([proposal]).peak_allocated_bytes

    def replayed(self, proposals: Sequence[Proposal]) -> tuple[int, bool]:
        """(reserved bytes with the changes, whether everything that was asked for was served)."""
        outcome = self.run(proposals)
        if not self.case.is_oom:
            return outcome.peak_reserved_bytes, outcome.fits
        served = bool(outcome.spared) and not any(not refused.recorded for refused in outcome.refused)
        return outcome.end_reserved_bytes, served

    @property
    def recorded_bytes(self) -> int:
        """What a change is compared with: what would have been reserved had the request been served, or the peak."""
        case = self.case
        if case.refusal is not None:
            return case.refusal.reserved_bytes + case.refusal.need_bytes
        return case.timeline.peaks()[2].size_bytes


def with_conf(config: AllocatorConfig, conf: str) -> AllocatorConfig:
    """The recorded settings with those of a string in force as well."""
    asked, plain = parse_conf(conf, config.version), parse_conf("", config.version)
    changed = {
        name: getattr(asked, name)
        for name in ("expandable_segments", "max_split_bytes", "gc_threshold", "roundup_divisions")
        if getattr(asked, name) != getattr(plain, name)
    }
    return replace(config, **changed)


def proven(bench: Bench, finding: Finding) -> tuple[Finding, list[Proposal]]:
    """The finding with its proposals tried, and those that hold, the best first; others stand in ``tried``."""
    advice: list[Advice] = []
    tried: list[Advice] = []
    held: list[Proposal] = []
    for one in finding.advice:
        if not isinstance(one, Proposal):
            advice.append(one)
            continue
        tested = _tested(bench, one)
        if tested is None:
            continue
        if tested.saves_bytes is not None and tested.saves_bytes >= LEAST_SHARE * bench.case.whole_bytes:
            advice.append(tested)
            held.append(one)
        else:
            tried.append(tested)
    advice.sort(key=lambda one: -(one.saves_bytes or 0))
    held.sort(key=lambda one: [other.change for other in advice].index(one.change))
    return replace(finding, advice=tuple(advice), tried=tuple(tried)), held


def _tested(bench: Bench, proposal: Proposal) -> Advice | None:
    if proposal.conf:
        if not bench.can_replay:
            return None
        reserved, served = bench.replayed([proposal])
        saves = bench.recorded_bytes - reserved if served else 0
        what = f"replayed: {size(reserved)} reserved instead of {size(bench.recorded_bytes)}"
        if bench.case.is_oom:
            what += ", this request served" if served else ", this request refused all the same"
        return Advice(proposal.change, saves, Basis.REPLAY, what)
    if proposal.options and (peaks := bench.forecast(proposal.options)) is not None:
        before, after, _ = peaks
        what = f"forecast of the same run: peak {size(after)} instead of {size(before)}"
        return Advice(proposal.change, before - after, Basis.FORECAST, what)
    return _unrefuted(bench, proposal, Advice(proposal.change, proposal.saves_bytes, Basis.FORMULA, proposal.proof))


def _unrefuted(bench: Bench, proposal: Proposal, said: Advice) -> Advice:
    """A formula's figure, unless the replay wins clearly less: the peak is elsewhere then. At a refusal there is no
    elsewhere, and what would come behind it is not in the recording."""
    if proposal.rows is None or said.saves_bytes is None or bench.case.is_oom or not bench.can_replay:
        return said
    won = max(0, bench.won_bytes(proposal))
    if won >= _CONFIRMS * said.saves_bytes:
        return said
    return Advice(said.change, won, Basis.REPLAY, f"replayed: {size(won)} less; {said.proof}")


def together(bench: Bench, held: Mapping[str, Proposal]) -> Together | None:
    """What all the changes come to at once, and the fewest that are enough; ``held`` has one change a finding."""
    case = bench.case
    if not held or (case.is_oom and case.capacity is None):
        return None
    whole = _outcome(bench, list(held.values()))
    if whole is None or not (whole.fits and case.is_oom):
        return whole
    for count in range(1, min(len(held), _MOST_TOGETHER + 1)):
        for some in combinations(held, count):
            found = _outcome(bench, [held[name] for name in some])
            if found is not None and found.fits:
                return replace(whole, enough=some)
    return replace(whole, enough=tuple(held))


def _outcome(bench: Bench, proposals: Sequence[Proposal]) -> Together | None:
    """One combination: by forecast where every change is an option of the run, else by replay with what the pass still
    needed added, as much smaller as what it had made is."""
    case, capacity = bench.case, bench.case.whole_bytes
    options = {key: value for proposal in proposals for key, value in proposal.options.items()}
    if all(proposal.options and not proposal.conf for proposal in proposals):
        peaks = bench.forecast(options)
        if peaks is not None:
            fits = peaks[2] <= capacity
            share = None if fits else _share_by_forecast(bench, options, capacity)
            return Together(peaks[2], capacity, fits, Basis.FORECAST, tokens_share=share)
    if not bench.can_replay:
        return None
    reserved, served = bench.replayed(proposals)
    peak = reserved + (bench.rest_after(proposals) if case.is_oom else 0)
    share = share_by_growth(bench.case, proposals, peak, capacity) if peak > capacity else None
    return Together(peak, capacity, served and peak <= capacity, Basis.REPLAY, tokens_share=share)


def _share_by_forecast(bench: Bench, options: Mapping[str, Any], capacity: int) -> float | None:
    """How much of the longest sequence fits with the options changed, by bisection; None where next to nothing does."""
    low, high = 0, _SHARE_STEPS
    while low + 1 < high:
        middle = (low + high) // 2
        peaks = bench.forecast({**options, "max_length": max(2, bench.longest_tokens * middle // _SHARE_STEPS)})
        low, high = (middle, high) if peaks is not None and peaks[2] <= capacity else (low, middle)
    return low / _SHARE_STEPS or None


def share_by_growth(case: Case, proposals: Sequence[Proposal], peak: int, capacity: int) -> float | None:
    """Share of the batch's tokens with which the pass fits, by what grows with them: all but weights, what is trained
    and the runtime's own. None where that isn't the question."""
    if case.phase not in (Phase.FORWARD, Phase.BACKWARD) or case.in_evaluation:
        return None
    stays = case.size * (case.kind(Category.LORA, Category.RUNTIME, Category.BASE_WEIGHTS) & case.live)
    for proposal in proposals:
        if proposal.rows is not None:
            stays = np.where(proposal.rows, stays * (1 - proposal.share), stays)
    fixed = float(stays.sum())
    share = (capacity - fixed) / (peak - fixed) if peak > fixed else 0.0
    return share if 0 < share < 1 else None
