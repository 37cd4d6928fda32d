"""A forecast as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from memtrace.estimate.forecast import Forecast, OrderOutcome
from memtrace.explain.verdict import Verdict
from memtrace.units import counted, format_bytes

WIDTH = 80
_STEPS_SHOWN = 8


def render_forecast(
    found: Forecast,
    verdict: Verdict | None,
    needs: int | None,
    outcomes: Sequence[OrderOutcome],
    assumptions: Sequence[str],
    longest_tokens: int | None = None,
    is_least: bool = True,
) -> Iterator[str]:
    """All lines. ``is_least``: less than ``needs`` bytes are known not to suffice."""
    plan = found.plan
    longest = max(batch.length for step in plan.steps for batch in step)
    yield from _wrapped(
        f"{plan.source.model['name']}: {counted(len(plan.steps), 'step')}, up to {longest:,} tokens a sequence "
        f"({plan.source.basis})"
    )
    yield ""
    yield from _verdict(found, verdict)
    yield ""
    yield f"{'':<12}{'requested':>14}{'allocated':>14}{'reserved':>14}"
    peaks = (found.peaks.requested_bytes, found.peaks.allocated_bytes, found.peaks.reserved_bytes)
    yield f"{'peak':<12}" + "".join(f"{format_bytes(size):>14}" for size in peaks)
    yield from _wrapped(
        f"{counted(found.segment_allocs, 'segment')} from the driver, {found.segment_frees:,} given back, "
        f"{found.num_alloc_retries:,} retries"
    )
    if needs is not None:
        yield (
            f"needs a limit of at least {format_bytes(needs)}"
            if is_least
            else f"a limit of {format_bytes(needs)} is enough"
        )
    if longest_tokens is not None and not found.fits:
        yield f"survives with sequences cut to {longest_tokens:,} tokens"
    yield ""
    yield from _steps(found)
    if outcomes:
        yield ""
        yield from _orders(outcomes)
    for note in assumptions:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _verdict(found: Forecast, verdict: Verdict | None) -> Iterator[str]:
    limit = found.config.limit_bytes
    if found.oom is None:
        margin = f", {format_bytes(limit - found.peak_reserved_bytes)} below the limit" if limit is not None else ""
        fits = "FITS" if len(found.steps) > 1 else "FITS in the one step that was looked at"
        yield from _wrapped(f"{fits}: reserves {format_bytes(found.peak_reserved_bytes)} at most{margin}.")
        return
    oom = found.oom
    where = "while the model is loaded" if oom.step < 0 else f"in step {oom.step}, {oom.phase}"
    yield from _wrapped(
        f"DIES {where}: {format_bytes(oom.requested_bytes)} refused under a limit of "
        f"{format_bytes(limit or 0)}" + (f" ({verdict.verdict})." if verdict is not None else ".")
    )
    for sentence in verdict.because if verdict is not None else ():
        yield from textwrap.wrap(f"  {sentence}", WIDTH, subsequent_indent="  ")


def _steps(found: Forecast) -> Iterator[str]:
    """The steps that reserve more than every step before them, the last ones where there are many."""
    record, highest = [], 0
    for step in found.steps:
        if step.peak_reserved_bytes > highest or step is found.steps[-1]:
            record.append(step)
        highest = max(highest, step.peak_reserved_bytes)
    yield f"{'step':>8}{'tokens':>10}{'requested':>14}{'allocated':>14}{'reserved':>14}"
    for step in record[-_STEPS_SHOWN:]:
        sizes = (step.peak_requested_bytes, step.peak_allocated_bytes, step.peak_reserved_bytes)
        dies = "  dies" if found.oom is not None and found.oom.step == step.step else ""
        yield f"{step.step:>8,}{step.tokens:>10,}" + "".join(f"{format_bytes(size):>14}" for size in sizes) + dies


def _orders(outcomes: Sequence[OrderOutcome]) -> Iterator[str]:
    fit = [outcome for outcome in outcomes if outcome.fits]
    yield f"{len(fit)} of {counted(len(outcomes), 'shuffling')} fit"
    for outcome in outcomes:
        fate = "fits" if outcome.fits else f"dies in step {outcome.oom_step}"
        yield f"  seed {outcome.seed:<4}{fate:<22}{format_bytes(outcome.peak_reserved_bytes):>12} reserved"
