"""What-if replays as lines: the recorded settings first, then each other setting with its peak and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace.units import format_bytes, format_count, format_delta
from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import BLANK, Line, clean, clip, line, wrap

if TYPE_CHECKING:
    from memtrace.simulation import Answer


def whatif_lines(answer: Answer, width: int) -> list[Line]:
    """A heading, a line a run, and what the answer rests on."""
    room = max(width - 48, 16)
    lines = [
        line(("what if", "title"), ("  the recorded program under other settings", "dim")),
        line((f"  {'settings':<{room}}{'peak reserved':>14}{'change':>12}   fits", "dim")),
    ]
    first = answer.runs[0]
    for number, run in enumerate(answer.runs):
        name = "as recorded" + (f": {run.conf}" if run.conf else "") if number == 0 else run.conf or "defaults"
        change = run.peak_reserved_bytes - first.peak_reserved_bytes
        if run.fits:
            fits, role, target = "yes", "good", None
        else:
            event = run.first_oom_event if run.first_oom_event is not None else -1
            fits, role, target = f"refused at {format_count(event)}", "bad", Goto("segments", event)
        lines.append(line(
            (f"  {clip(clean(name), room - 1):<{room}}", "strong" if number else "dim"),
            (f"{format_bytes(run.peak_reserved_bytes):>14}", "text"),
            (f"{format_delta(change) if number else '':>12}", "good" if change < 0 else "bad" if change > 0 else "dim"),
            (f"   {fits}", role), target=target,
        ))  # fmt: skip
    for note in answer.notes:
        lines += wrap([("  " + clean(note), "dim")], width, 2)
    return [*lines, BLANK]
