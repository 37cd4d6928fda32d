"""What-if runs as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from memtrace.allocator.whatif.selfcheck import SelfCheck
from memtrace.answers.simulate import Answer, Run
from memtrace.render.text import Text, columns, heading, table, warning_lines
from memtrace.units import format_bytes, format_count


def render_simulation(answer: Answer, width: int = 100) -> Iterator[Text]:
    """The self-check, a table of runs, what no setting can go below, and what to be wary of."""
    yield from _self_check(answer.self_check)
    yield Text()
    recorded = answer.recorded
    reserved, allocated = format_bytes(recorded.peak_reserved_bytes), format_bytes(recorded.peak_allocated_bytes)
    refusals = {0: "no refusal", 1: "one refusal"}.get(recorded.num_ooms, f"{recorded.num_ooms} refusals")
    yield Text(f"the recording: peak reserved {reserved}, peak allocated {allocated}, {refusals}")
    yield Text()
    yield from _table(answer.runs, width)
    yield Text()
    yield from _ranges(answer.runs)
    yield from _bounds(answer)
    if answer.notes:
        yield Text()
        yield from warning_lines(answer.notes)


def _self_check(check: SelfCheck) -> Iterator[Text]:
    if not check.exact:
        parted = (f"diverged at event {check.diverged_at:,}", "red bold")
        yield Text.assemble("self-check: ", parted, f": {check.why}")
        yield Text("what-ifs below rest on a model that does not explain this recording fully")
        return
    reproduced = ": every address, driver call and the final layout reproduced"
    yield Text.assemble("self-check: ", ("exact", "green bold"), reproduced)
    most = check.limit.size_bytes
    limit = "" if most is None else f" under a limit of {format_bytes(most)}"
    if check.predicted:
        yield Text(f"and predicted from the program alone{limit}, refusals and reclaims included")
    else:
        yield Text(f"but not predicted from the program alone{limit}: {check.predicted_why}")


def _limit(run: Run) -> str:
    return "none" if run.capacity_bytes is None else format_bytes(run.capacity_bytes)


def _settings(number: int, run: Run) -> str:
    """What a run is: its settings, whole, so that they can be copied, and how its program was edited."""
    settings = run.conf or "PyTorch's defaults"
    name = f"recorded settings: {settings}" if number == 0 else settings
    return ", ".join([name, *run.edits])


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
            run.outcome,
        )
        for run in runs
    ]
    right = (True, True, True, True, False)
    names = [_settings(number, run) for number, run in enumerate(runs)]
    if len(limits) > 1:
        names = [f"{name} (limit {_limit(run)})" for name, run in zip(names, runs, strict=True)]
    firsts = [("run", "settings"), *((str(number), name) for number, name in enumerate(names))]
    rows = [(*first, *rest) for first, rest in zip(firsts, figures, strict=True)]
    styles = ["" if run.fits else "red" for run in runs]
    lines = table(rows, (False, False, *right), styles)
    if max(len(line.plain) for line in lines) > width:
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


def _bounds(answer: Answer) -> Iterator[Text]:
    bounds, packing = answer.lower_bounds, answer.packing
    of_edited = " of the edited program" if any(run.edits for run in answer.runs) else ""
    packed = f"live blocks{of_edited} packed without a gap"
    yield Text(f"no setting can go below {format_bytes(bounds.placement_bytes)} reserved: {packed}")
    sizes = f"{format_bytes(bounds.rounded_bytes)} of blocks, {format_bytes(bounds.requested_bytes)} asked for"
    yield Text(f"  in pages of 2 MiB per pool and stream; {sizes}")
    if packing is not None:
        least, found = format_bytes(packing.at_least_bytes), format_bytes(packing.found_bytes)
        more = packing.found_bytes / max(packing.at_least_bytes, 1) - 1
        yield Text(f"placement that knew the future: between {least} and {found} (a packing found, +{more:.2%})")
