"""What-if runs as text."""

from __future__ import annotations

import textwrap

from rich.text import Text

from memtrace.allocator.whatif.selfcheck import SelfCheck
from memtrace.answers.simulate import Answer, Run
from memtrace.render.text import columns, heading, warning_lines
from memtrace.units import format_bytes, format_count

_BY_LUCK = ", by luck of addresses"


def render_simulation(answer: Answer, width: int = 100) -> list[Text]:
    """The self-check, a table of runs, what no setting can go below, and what to be wary of."""
    lines = [*_self_check(answer.self_check), Text()]
    recorded = answer.recorded
    lines.append(
        Text(
            f"the recording: peak reserved {format_bytes(recorded.peak_reserved_bytes)}, "
            f"peak allocated {format_bytes(recorded.peak_allocated_bytes)}, {_ooms(recorded.num_ooms)}"
        )
    )
    lines.append(Text())
    lines += _table(answer.runs, width)
    lines.append(Text())
    lines += _ranges(answer.runs)
    lines += _bounds(answer)
    return [*lines, Text(), *warning_lines(answer.notes)] if answer.notes else lines


def _ooms(count: int) -> str:
    return {0: "no refusal", 1: "one refusal"}.get(count, f"{count} refusals")


def _self_check(check: SelfCheck) -> list[Text]:
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
    most = check.limit.size_bytes
    limit = "" if most is None else f" under a limit of {format_bytes(most)}"
    if check.predicted:
        lines.append(Text(f"and predicted from the program alone{limit}, refusals and reclaims included"))
    else:
        lines.append(Text(f"but not predicted from the program alone{limit}: {check.predicted_why}"))
    return lines


def _limit(run: Run) -> str:
    return "none" if run.capacity_bytes is None else format_bytes(run.capacity_bytes)


def _settings(number: int, run: Run) -> str:
    """What a run is: its settings, whole, so that they can be copied, and how its program was edited."""
    settings = run.conf or "PyTorch's defaults"
    name = f"recorded settings: {settings}" if number == 0 else settings
    return ", ".join([name, *run.edits])


def _verdict(run: Run) -> str:
    if run.first_oom_event is not None:
        where = "before the trace" if run.first_oom_event < 0 else f"event {run.first_oom_event:,}"
        return f"OOM at {where}"
    passed = "passes the OOM" if run.survived_oom_events else "fits"
    return passed if run.fits_always else passed + _BY_LUCK


def _table(runs: tuple[Run, ...], width: int) -> list[Text]:
    """A line a run where that fits ``width``; else two, the settings on a line of their own."""
    limits = {run.capacity_bytes for run in runs}
    figures: list[tuple[str, ...]] = [("peak reserved", "peak alloc.", "retries", "driver calls", "")]
    figures += [
        (
            format_bytes(run.peak_reserved_bytes),
            format_bytes(run.peak_allocated_bytes),
            format_count(run.num_alloc_retries),
            format_count(run.segment_allocs + run.segment_frees),
            _verdict(run),
        )
        for run in runs
    ]
    right = (True, True, True, True, False)
    names = [_settings(number, run) for number, run in enumerate(runs)]
    if len(limits) > 1:
        names = [f"{name} (limit {_limit(run)})" for name, run in zip(names, runs, strict=True)]
    firsts = [("run", "settings"), *((str(number), name) for number, name in enumerate(names))]
    rows = [(*first, *rest) for first, rest in zip(firsts, figures, strict=True)]
    head, *rest = columns(rows, (False, False, *right))
    styles = ["" if run.fits else "red" for run in runs]
    lines: list[Text]
    if max(map(len, (head, *rest))) <= width:
        lines = [heading(head), *(Text(line, style=style) for line, style in zip(rest, styles, strict=True))]
    else:
        lines = _two_lines(names, columns(figures, right), styles, width)
    if len(limits) == 1:  # said once instead of in every row
        lines.append(Text(f"limit on reserved memory in all runs: {_limit(runs[0])}"))
    return lines


def _two_lines(names: list[str], figures: list[str], styles: list[str], width: int) -> list[Text]:
    """For each run its settings, and its figures below them, under the heading of the figures."""
    margin = max(len("run"), len(str(len(names) - 1))) + 2
    lines = [Text(f"{'run':<{margin}}settings"), heading(" " * margin + figures[0])]
    for number, (name, line, style) in enumerate(zip(names, figures[1:], styles, strict=True)):
        pad = " " * margin
        first = f"{number:<{margin}}"
        told = textwrap.wrap(name, width, initial_indent=first, subsequent_indent=pad, break_long_words=False)
        lines += [Text(part, style=style) for part in [*told, pad + line]]
    return lines


def _ranges(runs: tuple[Run, ...]) -> list[Text]:
    """How much peaks depend on where the driver puts segments, where the figures show it."""
    found = []
    for number, run in enumerate(runs):
        low, high = format_bytes(run.peak_reserved_low_bytes), format_bytes(run.peak_reserved_high_bytes)
        share = (run.peak_reserved_high_bytes - run.peak_reserved_low_bytes) / max(run.peak_reserved_bytes, 1)
        if low != high and f"{share:.1%}" != "0.0%":
            found.append(Text(f"  run {number}: {low} to {high} ({share:.1%})"))
    if not found:
        return []
    return [Text("peak reserved depends on the addresses that the driver hands out:"), *found, Text()]


def _bounds(answer: Answer) -> list[Text]:
    bounds = answer.lower_bounds
    of_edited = " of the edited program" if any(run.edits for run in answer.runs) else ""
    lines = [
        Text(
            f"no setting can go below {format_bytes(bounds.placement_bytes)} reserved: "
            f"live blocks{of_edited} packed without a gap"
        ),
        Text(
            f"  in pages of 2 MiB per pool and stream; {format_bytes(bounds.rounded_bytes)} of blocks, "
            f"{format_bytes(bounds.requested_bytes)} asked for"
        ),
    ]
    packing = answer.packing
    if packing is not None:
        least, found = format_bytes(packing.at_least_bytes), format_bytes(packing.found_bytes)
        more = packing.found_bytes / max(packing.at_least_bytes, 1) - 1
        lines.append(
            Text(f"placement that knew the future: between {least} and {found} (a packing found, +{more:.2%})")
        )
    return lines
