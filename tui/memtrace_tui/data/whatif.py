"""What-if replays as lines: the recorded settings first, then each other setting with its peak and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtrace.units import format_bytes, format_count, format_delta, printable
from memtrace_tui.data.lines import BLANK, Line, line, wrap

if TYPE_CHECKING:
    from memtrace.answers.simulate import Answer, Run

_NUMBERS = 51  # cells beside the settings


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A line that stands for a run, by its number in the answer."""

    run: int


def sentence(answer: Answer, number: int) -> str:
    """What came of a run, in one line."""
    run, first = answer.runs[number], answer.runs[0]
    words, _ = outcome(run)
    change = run.peak_reserved_bytes - first.peak_reserved_bytes
    return (
        f"predicted, not recorded: {printable(run.conf) or 'defaults'}: {words}; peak reserved "
        f"{format_bytes(run.peak_reserved_bytes)} ({format_delta(change) if change else 'as recorded'})"
    )


def outcome(run: Run) -> tuple[str, str]:
    """(words, role): in the words of ``memtrace simulate``. Past the recorded OOM nothing is known."""
    if run.first_oom_event is not None:
        where = "before the trace" if run.first_oom_event < 0 else f"event {format_count(run.first_oom_event)}"
        return f"OOM at {where}", "bad"
    words = "passes the OOM" if run.survived_oom_events else "fits"
    return (words, "good") if run.fits_always else (f"{words}, by luck of addresses", "warn")


def whatif_lines(answer: Answer, width: int) -> list[Line]:
    """A heading, a line a run, and what the answer rests on."""
    room = max(width - _NUMBERS, 16)
    lines = [
        line(("what if", "title"), ("  the recorded program under other settings", "dim")),
        line((f"  {'settings':<{room}}{'peak reserved':>14}{'change':>12}   outcome", "dim")),
    ]
    first = answer.runs[0]
    for number, run in enumerate(answer.runs):
        name = "as recorded" + (f": {run.conf}" if run.conf else "") if number == 0 else run.conf or "defaults"
        change = run.peak_reserved_bytes - first.peak_reserved_bytes
        words, role = outcome(run)
        target = WhatIf(number) if number else None
        above, name = _names(printable(name), room - 1, width - 4)
        lines += [line((f"  {part}", "strong" if number else "dim")) for part in above]
        delta = "" if not number else format_delta(change) if change else "="
        lines.append(line(
            (f"  {name:<{room}}", "strong" if number else "dim"),
            (f"{format_bytes(run.peak_reserved_bytes):>14}", "text"),
            (f"{delta:>12}", "good" if change < 0 else "bad" if change > 0 else "dim"), (f"   {words}", role),
            target=target,
        ))  # fmt: skip
    lines.append(line(("  Enter opens a run as a second file: its map, its timeline, the difference", "dim")))
    for note in answer.notes:
        lines += wrap([("  " + printable(note), "dim")], width, 2)
    return [*lines, BLANK]


def _names(name: str, room: int, width: int) -> tuple[list[str], str]:
    """(lines of their own, what stands before the numbers): settings that don't fit there are never cut short."""
    if len(name) <= room:
        return [], name
    parts = wrap([(name.replace(",", ", "), "text")], width, 2)
    return [part.plain.replace(", ", ",").rstrip() for part in parts], ""
