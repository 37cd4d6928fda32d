"""What-if runs as text."""

from __future__ import annotations

from rich.text import Text

from memtrace.export.text import clip, columns, heading, warning_lines
from memtrace.simulation import Answer, Run, SelfCheckAnswer
from memtrace.units import format_bytes, format_count


def render_simulation(answer: Answer, width: int = 100) -> list[Text]:
    """The self-check, a table of runs, what no setting can go below, and what to be wary of."""
    lines = [*_self_check(answer.self_check), Text()]
    recorded = answer.recorded
    lines.append(
        Text(
            f"recorded: peak reserved {format_bytes(recorded.peak_reserved_bytes)}, "
            f"peak allocated {format_bytes(recorded.peak_allocated_bytes)}, {_ooms(recorded.num_ooms)}"
        )
    )
    lines.append(Text())
    lines += _table(answer.runs, width)
    lines.append(Text())
    lines += _ranges(answer.runs)
    lines += _bounds(answer.runs[0])
    return [*lines, Text(), *warning_lines(answer.notes)] if answer.notes else lines


def _ooms(count: int) -> str:
    return {0: "no refusal", 1: "one refusal"}.get(count, f"{count} refusals")


def _self_check(check: SelfCheckAnswer) -> list[Text]:
    if not check.exact:
        return [
            Text.assemble("self-check: ", (f"diverged at event {check.diverged_at:,}", "red bold"), f": {check.why}"),
            Text("what-ifs below rest on a model that does not explain this recording fully"),
        ]
    lines = [
        Text.assemble(
            "self-check: ", ("exact", "green bold"), ": every address, driver call and the final layout reproduced"
        )
    ]
    limit = "" if check.limit_bytes is None else f" under a limit of {format_bytes(check.limit_bytes)}"
    if check.predicted:
        lines.append(Text(f"and predicted from the program alone{limit}, refusals and reclaims included"))
    else:
        lines.append(Text(f"but not predicted from the program alone{limit}: {check.predicted_why}"))
    return lines


def _limit(run: Run) -> str:
    return "none" if run.capacity_bytes is None else format_bytes(run.capacity_bytes)


def _verdict(run: Run) -> str:
    if run.first_oom_event is not None:
        where = "before the trace" if run.first_oom_event < 0 else f"event {run.first_oom_event:,}"
        return f"OOM at {where}"
    if run.survived_oom_events:
        return "passes the OOM" if run.fits_always else "passes the OOM, by luck of addresses"
    return "fits" if run.fits_always else "fits, by luck of addresses"


def _table(runs: tuple[Run, ...], width: int) -> list[Text]:
    limits = {run.capacity_bytes for run in runs}
    rows: list[tuple[str, ...]] = [
        ("", "settings", "limit", "peak reserved", "peak alloc.", "retries", "driver calls", "")
    ]
    for number, run in enumerate(runs):
        rows.append(
            (
                "recorded" if number == 0 else f"{number}",
                clip(run.conf or "PyTorch's defaults", max(width - (74 if len(limits) > 1 else 63), 24)),
                _limit(run),
                format_bytes(run.peak_reserved_bytes),
                format_bytes(run.peak_allocated_bytes),
                format_count(run.num_alloc_retries),
                format_count(run.segment_allocs + run.segment_frees),
                _verdict(run),
            )
        )
    right: tuple[bool, ...] = (False, False, True, True, True, True, True, False)
    if len(limits) == 1:  # said once instead of in every row
        rows = [(*row[:2], *row[3:]) for row in rows]
        right = (*right[:2], *right[3:])
    head, *rest = columns(rows, right)
    lines = [heading(head)]
    for run, line in zip(runs, rest, strict=True):
        lines.append(Text(line, style="" if run.fits else "red"))
    if len(limits) == 1:
        lines.append(Text(f"limit on reserved memory in all runs: {_limit(runs[0])}"))
    changed = next((run for run in runs if run.edits), None)
    if changed is not None:
        lines.append(Text(f"all runs but the first: {', '.join(changed.edits)}"))
    return lines


def _ranges(runs: tuple[Run, ...]) -> list[Text]:
    """How much peaks depend on where the driver puts segments, where they do."""
    lines = []
    for number, run in enumerate(runs):
        low, high = run.peak_reserved_low_bytes, run.peak_reserved_high_bytes
        if low != high:
            share = (high - low) / max(run.peak_reserved_bytes, 1)
            lines.append(
                Text(
                    f"run {number}: between {format_bytes(low)} and {format_bytes(high)} ({share:.1%}), "
                    "depending on the addresses that the driver hands out"
                )
            )
    return [*lines, Text()] if lines else []


def _bounds(run: Run) -> list[Text]:
    bounds = run.lower_bounds
    return [
        Text(
            f"no setting can go below {format_bytes(bounds.placement_bytes)} reserved: live blocks packed without a gap"
        ),
        Text(
            f"  in pages of 2 MiB per pool and stream; {format_bytes(bounds.rounded_bytes)} of blocks, "
            f"{format_bytes(bounds.requested_bytes)} asked for"
        ),
    ]
