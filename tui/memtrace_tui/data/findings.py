"""What ``explain`` says, as lines; each finding leads to its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace.render.words import clip, verdict_meaning, verdict_name
from memtrace.units import format_bytes, printable
from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import BLANK, Line, Span, indented, line, wrap
from memtrace_tui.data.query import exactly

if TYPE_CHECKING:
    from memtrace.explain.answer import Explanation, Finding

_PLACES = {
    "variable_length_fragmentation": Goto("segments"), "growth_across_steps": Goto("timeline"),
    "eval_peak": Goto("timeline"), "padding_or_packing": Goto("timeline"), "outside_allocator": Goto("overview"),
    "process_limit": Goto("timeline"), "truncated_trace": Goto("events"), "load_time_copies": Goto("timeline"),
}  # fmt: skip


def place_of(finding: Finding, event: int) -> Goto:
    """Where a finding's evidence shows: its call site's allocations, or the screen that shows that kind of thing."""
    if finding.frame:
        return Goto("allocations", event, filter=f"site:/^{exactly(printable(finding.frame))}$/")
    found = _PLACES.get(finding.id, Goto("allocations", filter=""))
    return Goto(found.view, event, found.filter)


def verdict_title(verdict: str) -> str:
    """``FRAGMENTATION: there was room, but in pieces``, in the words of the other outputs."""
    return f"{verdict_name(verdict).upper()}: {verdict_meaning(verdict)}"


def verdict_lines(answer: Explanation, width: int, sentences: int | None = None) -> list[Line]:
    """The verdict and what it rests on."""
    title = verdict_title(answer.verdict)
    role = "title" if answer.verdict in ("no_oom", "unknown") else "alarm"
    lines = [line((f" {title} " if role == "alarm" else title, role), (f"  {answer.confidence}", "dim"))]
    for sentence in answer.because[:sentences]:
        lines += wrap([(printable(sentence), "text")], width, 2)
    return lines


def short_lines(answer: Explanation, width: int, moment: str | None = None, most: int = 4) -> list[Line]:
    """The first findings, a line each, for the overview. ``moment``: what they are about, if not the cursor."""
    if not answer.findings:
        return []
    about = "what matters here first; more on the findings screen" if moment is None else moment
    lines = [line(("what to change", "title"), ("  " + clip(about, width - 16), "dim" if moment is None else "warn"))]
    for finding in answer.findings[:most]:
        saves = max((a.saves_bytes for a in finding.advice if a.saves_bytes is not None), default=None)
        size = f"-{format_bytes(saves)}" if saves else ""
        lines.append(line((f"{size:>11} ", "good"), (clip(printable(finding.title), max(width - 13, 10)), "text"),
                          target=Goto("findings")))  # fmt: skip
    return lines


def finding_lines(answer: Explanation, event: int, width: int) -> list[Line]:
    """Everything: verdict, every finding with evidence and advice, what the refused size may be, warnings."""
    lines = [*verdict_lines(answer, width), BLANK]
    for number, finding in enumerate(answer.findings, 1):
        size = (
            format_bytes(finding.bytes) + (" a step" if finding.per_step else "") if finding.bytes is not None else ""
        )
        goto = place_of(finding, event)
        title = clip(f"{number} {printable(finding.title)}", max(width - len(size) - 2, 10))
        lines.append(line((title, "strong"), (f"  {size}", "accent"), target=goto))
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
    for title, texts in (
        ("the refused size", answer.sizes),
        ("worth saying", answer.worth_saying),
        ("be aware", answer.warnings),
    ):
        if texts:
            lines.append(line((title, "title")))
            for text in texts:
                lines += wrap([("  " + printable(text), "text")], width, 4)
            lines.append(BLANK)
    return lines
