"""What ``explain`` says, as lines, each finding leading to its evidence; and what-if replays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memtrace.render.words import clip, verdict_meaning, verdict_name
from memtrace.units import format_bytes, format_delta, printable
from memtrace_tui.data.lines import BLANK, Goto, Line, Span, indented, line, wrap
from memtrace_tui.data.query import exactly

if TYPE_CHECKING:
    from memtrace.answers.simulate import Answer
    from memtrace.explain.answer import Explanation, Finding

_NUMBERS = 51  # cells beside the settings of a what-if run
_PLACES = {
    "variable_length_fragmentation": Goto("segments"), "growth_across_steps": Goto("timeline"),
    "eval_peak": Goto("timeline"), "padding_or_packing": Goto("timeline"), "outside_allocator": Goto("overview"),
    "process_limit": Goto("timeline"), "truncated_trace": Goto("events"), "load_time_copies": Goto("timeline"),
}  # fmt: skip


def place_of(finding: Finding, event: int) -> Goto:
    """Where a finding's evidence shows: its call site's allocations, or the screen that shows that kind of thing."""
    if finding.frame:
        return Goto("allocations", event, filter=f"site:/^{exactly(printable(finding.frame))}$/")
    return replace(_PLACES.get(finding.id, Goto("allocations", filter="")), event=event)


def verdict_title(verdict: str) -> str:
    """``FRAGMENTATION: there was room, but in pieces``, in the words of the other outputs."""
    return f"{verdict_name(verdict).upper()}: {verdict_meaning(verdict)}"


def short_lines(answer: Explanation, width: int, moment: str | None = None, room: int = 0) -> list[Line]:
    """The first findings for the overview: a line each, and their best changes as far as there is room for lines.

    ``moment``: what they are about, if not the cursor.
    """
    if not answer.findings:
        return []
    about = "what matters here first; more on the findings screen" if moment is None else moment
    lines = [line(("what to change", "title"), ("  " + clip(about, width - 16), "dim" if moment is None else "warn"))]
    for finding in answer.findings[: max(room // 4, 4)]:
        saves = max((a.saves_bytes for a in finding.advice if a.saves_bytes is not None), default=None)
        size = f"-{format_bytes(saves)}" if saves else ""
        lines.append(line((f"{size:>11} ", "good"), (clip(printable(finding.title), max(width - 13, 10)), "text"),
                          target=Goto("findings")))  # fmt: skip
        best = printable(finding.advice[0].change) if finding.advice else ""
        change = indented(wrap([("→ ", "good"), (best, "dim")], width - 13, 2), 12) if best else []
        lines += change if len(lines) + len(change) < room - 4 else []
    return lines


def finding_lines(answer: Explanation, event: int, width: int) -> list[Line]:
    """Everything: verdict, every finding with evidence and advice, what the refused size may be, warnings."""
    title = verdict_title(answer.verdict)
    head = (title, "title") if answer.verdict in ("no_oom", "unknown") else (f" {title} ", "alarm")
    lines = [line(head, (f"  {answer.confidence}", "dim"))]
    for sentence in answer.because:
        lines += wrap([(printable(sentence), "text")], width, 2)
    lines.append(BLANK)
    for number, finding in enumerate(answer.findings, 1):
        size = "" if finding.bytes is None else format_bytes(finding.bytes) + (" a step" if finding.per_step else "")
        title = clip(f"{number} {printable(finding.title)}", max(width - len(size) - 2, 10))
        lines.append(line((title, "strong"), (f"  {size}", "accent"), target=place_of(finding, event)))
        lines += indented(wrap([(printable(finding.evidence), "dim")], width - 2), 2)
        if finding.frame:
            lines.append(line((f"  at {clip(printable(finding.frame), width - 5, keep_end=True)}", "text")))
        for advice in finding.advice:
            saves: list[Span] = []
            if advice.saves_bytes is not None:
                saves = [(f"  saves {format_bytes(advice.saves_bytes)} ({advice.basis})", "good")]
            lines += indented(wrap([("→ ", "good"), (printable(advice.change), "text"), *saves], width - 2, 2), 2)
        lines.append(BLANK)
    if not answer.findings:
        lines += [line(("Nothing stands out.", "dim")), BLANK]
    more = {"the refused size": answer.sizes, "worth saying": answer.worth_saying, "be aware": answer.warnings}
    for title, texts in more.items():
        if texts:
            lines.append(line((title, "title")))
            for text in texts:
                lines += wrap([("  " + printable(text), "text")], width, 4)
            lines.append(BLANK)
    return lines


def sentence(answer: Answer, number: int) -> str:
    """What came of a run, in one line."""
    run, first = answer.runs[number], answer.runs[0]
    change = run.peak_reserved_bytes - first.peak_reserved_bytes
    return (
        f"predicted, not recorded: {printable(run.conf) or 'defaults'}: {run.outcome}; peak reserved "
        f"{format_bytes(run.peak_reserved_bytes)} ({format_delta(change) if change else 'as recorded'})"
    )


def whatif_lines(answer: Answer, width: int) -> list[Line]:
    """A heading, a line a run, which leads to its number in the answer, and what the answer rests on."""
    room = max(width - _NUMBERS, 16)
    lines = [
        line(("what if", "title"), ("  the recorded program under other settings", "dim")),
        line((f"  {'settings':<{room}}{'peak reserved':>14}{'change':>12}   outcome", "dim")),
    ]
    first = answer.runs[0]
    for number, run in enumerate(answer.runs):
        name = "as recorded" + (f": {run.conf}" if run.conf else "") if number == 0 else run.conf or "defaults"
        change = run.peak_reserved_bytes - first.peak_reserved_bytes
        role = "bad" if run.first_oom_event is not None else "good" if run.fits_always else "warn"
        name = printable(name)
        if len(name) >= room:  # settings that don't fit beside the numbers have lines of their own
            parts = wrap([(name.replace(",", ", "), "strong" if number else "dim")], width - 4, 2)
            lines += [line((f"  {part.plain.replace(', ', ',').rstrip()}", part.spans[-1][1])) for part in parts]
            name = ""
        delta = "" if not number else format_delta(change) if change else "="
        lines.append(line(
            (f"  {name:<{room}}", "strong" if number else "dim"),
            (f"{format_bytes(run.peak_reserved_bytes):>14}", "text"),
            (f"{delta:>12}", "good" if change < 0 else "bad" if change > 0 else "dim"), (f"   {run.outcome}", role),
            target=number or None,
        ))  # fmt: skip
    lines.append(line(("  Enter opens a run as a second file: its map, its timeline, the difference", "dim")))
    for note in answer.notes:
        lines += wrap([("  " + printable(note), "dim")], width, 2)
    return [*lines, BLANK]
