"""The cheapest changes that make a run fit, each plan proven by a forecast.

Changes are tried in order of what they cost: first those that cost no time, then a little, then recomputation and
smaller micro-batches, last those that make it another training (shorter sequences, fewer adapters). A plan is the
fewest and cheapest changes that fit together: everything that still fits without it was taken out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from memtrace.estimate.cells import Cells
from memtrace.estimate.estimate import kernels_of
from memtrace.estimate.forecast import Forecast, Progress, forecast, prepare
from memtrace.estimate.moves import FitChange, FitRun, Move, moves
from memtrace.estimate.schedule import Step
from memtrace.estimate.source import ShapeSource
from memtrace.frozen import dataclass

SAFETY_SHARE = 0.02
"""A plan must fit with this share of the limit to spare: reserved memory depends on what came before, too."""
_MOST_PLANS = 4
_WORST_STEPS = 3  # steps that a change is tried on before it is tried on the whole run


@dataclass(frozen=True, slots=True)
class FitPlan:
    """Changes that together fit. ``margin_bytes`` is what the limit leaves above the peak of reserved memory."""

    changes: tuple[FitChange, ...]
    moves: tuple[Move, ...]
    forecast: Forecast
    margin_bytes: int

    @property
    def time_share(self) -> float:
        """How much longer a step takes, as a share."""
        return sum(move.time_share for move in self.moves)

    @property
    def cost(self) -> float:
        """For comparing plans: time, and double what it alters."""
        return self.time_share + 2 * sum(move.alters for move in self.moves) + 0.001 * len(self.moves)

    @property
    def slowdown(self) -> str:
        """The worst of its changes."""
        return max((move.slowdown for move in self.moves), key=("none", "small", "large").index, default="none")

    def as_json(self) -> dict[str, Any]:
        """With the keys of the contract."""
        changes = [{"option": c.option, "from": c.was, "to": c.now, "why": c.why} for c in self.changes]
        return {
            "changes": changes,
            "peak_reserved_bytes": self.forecast.peak_reserved_bytes,
            "margin_bytes": self.margin_bytes,
            "slowdown": self.slowdown,
            "time_share": round(self.time_share, 3),
            "other_training": any(move.alters for move in self.moves),
            "basis": "forecast",
        }


class Search:
    """Looks for plans under the limit of ``run``. ``keep`` names options that must stay as they are."""

    def __init__(self, run: FitRun, keep: Sequence[str] = (), on_progress: Progress | None = None) -> None:
        assert run.config.limit_bytes is not None
        self.run, self.limit_bytes = run, run.config.limit_bytes
        self._safe = run.config.with_limit(int(run.config.limit_bytes * (1 - SAFETY_SHARE)))
        self._moves = [move for move in moves() if move.option not in keep]
        self._tried: dict[tuple[Any, ...], bool] = {}
        self._cells: dict[tuple[Any, ...], Cells] = {}
        self._on_progress = on_progress
        self._forecasts = 0

    @cached_property
    def as_is(self) -> Forecast:
        """The run unchanged."""
        return self._forecast(self.run)

    def _forecast(self, run: FitRun, steps: tuple[Step, ...] | None = None) -> Forecast:
        """Of the whole run, or of some of its steps. What is prepared for one is used for all with the same options."""
        plan = run.plan
        key = (plan.options, frozenset(batch for step in plan.steps for batch in step))
        if key not in self._cells:
            self._cells[key] = prepare(plan)
        return forecast(plan if steps is None else replace(plan, steps=steps), run.config, self._cells[key])

    def single(self) -> FitPlan | None:
        """The cheapest single change that suffices."""
        return next((self._plan((i,)) for i, _ in enumerate(self._moves) if self._fits((i,))), None)

    def plans(self) -> tuple[FitPlan, ...]:
        """Plans that fit, cheapest first."""
        found: dict[tuple[int, ...], None] = {}
        single = [(i,) for i, _ in enumerate(self._moves) if self._fits((i,))]
        several = [self._together(skip) for skip in ("", "checkpointing", "micro-batch")]
        for chosen in (*single, *(chosen for chosen in several if chosen is not None)):
            found[chosen] = None
        plans = [plan for chosen in found if (plan := self._plan(chosen)) is not None]
        unlike = {plan.changes: plan for plan in sorted(plans, key=lambda plan: -plan.cost)}
        return tuple(sorted(unlike.values(), key=lambda plan: plan.cost))[:_MOST_PLANS]

    def _together(self, skip: str = "") -> tuple[int, ...] | None:
        """Changes in order of cost until they fit, then without those that are not needed, dearest first."""
        chosen: tuple[int, ...] = ()
        for i, move in enumerate(self._moves):
            if move.option == skip or self._changed((*chosen, i)) is None:
                continue
            chosen = (*chosen, i)
            if self._fits(chosen):
                break
        else:
            return None
        order = sorted(chosen, key=lambda i: (self._moves[i].alters, self._moves[i].time_share), reverse=True)
        for i in order:
            without = tuple(j for j in chosen if j != i)
            if without and self._fits(without):
                chosen = without
        return chosen

    def _changed(self, chosen: tuple[int, ...]) -> tuple[FitRun, tuple[FitChange, ...]] | None:
        """The run with those changes; None if one of them changes nothing."""
        run, changes = replace(self.run, config=self._safe), list[FitChange]()
        for i in chosen:
            made = self._moves[i].make(run)
            if made is None:
                return None
            run, was, now = made
            same = next((c for c in changes if c.option == self._moves[i].option), None)
            if same is not None:  # made again: one change, from where it began
                changes[changes.index(same)] = replace(same, now=now, why=self._moves[i].why)
            else:
                changes.append(FitChange(self._moves[i].option, was, now, self._moves[i].why))
        return run, tuple(changes)

    def _fits(self, chosen: tuple[int, ...]) -> bool:
        made = self._changed(chosen)
        if made is None:
            return False
        run, _ = made
        key = (run.plan.options, run.plan.steps, run.config)
        if key not in self._tried:
            self._forecasts += 1
            if self._on_progress is not None:
                self._on_progress(self._forecasts / (self._forecasts + len(self._moves)))
            self._tried[key] = self._survives(run)
        return self._tried[key]

    def _survives(self, run: FitRun) -> bool:
        """What is asked for in the longest batches comes first, since most changes that don't suffice die there."""
        if self._asks_too_much(run):
            return False
        worst = sorted(run.plan.steps, key=lambda step: -max(batch.tokens for batch in step))[:_WORST_STEPS]
        if len(run.plan.steps) > 2 * _WORST_STEPS and not self._forecast(run, tuple(worst)).fits:
            return False
        return self._forecast(run).fits

    def _asks_too_much(self, run: FitRun) -> bool:
        """Whether the batch with most tokens, or with the longest sequence, asks for more than the limit by itself."""
        source, batches = run.plan.source, [batch for step in run.plan.steps for batch in step]
        if not isinstance(source, ShapeSource):
            return False
        largest = {max(batches, key=lambda batch: batch.tokens), max(batches, key=lambda batch: batch.length)}
        device = kernels_of(run.plan.gpu).device
        return any(
            source.requested_peak(replace(run.plan.options, sequence=batch.length, batch=batch.rows), device)
            > (run.config.limit_bytes or 0)
            for batch in largest
        )

    def _plan(self, chosen: tuple[int, ...]) -> FitPlan | None:
        made = self._changed(chosen)
        if made is None:
            return None
        run, changes = made
        found = self._forecast(replace(run, config=run.config.with_limit(self.limit_bytes)))
        margin = self.limit_bytes - found.peak_reserved_bytes
        return FitPlan(changes, tuple(self._moves[i] for i in chosen), found, margin) if found.fits else None
