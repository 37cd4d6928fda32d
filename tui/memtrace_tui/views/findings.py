"""Findings: the verdict, every cause with its evidence, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtrace_tui.data.findings import finding_lines
from memtrace_tui.data.lines import line
from memtrace_tui.views.base import View
from memtrace_tui.widgets.lines import Lines


class FindingsView(View):
    """What ``memtrace explain`` says of the moment the recording is about, or of the cursor on demand."""

    view = "findings"
    key = "6"
    title = "Findings"
    about = "Why, and what to change. Enter on a finding goes to its evidence; e explains the state at the cursor."
    BINDINGS: ClassVar[list[BindingType]] = [Binding("e", "explain", "Explain the cursor")]

    def compose(self) -> ComposeResult:
        """One list."""
        yield Lines(id="findings")

    def main(self) -> Lines:
        return self.query_one("#findings", Lines)

    def show(self) -> None:
        session, width = self.session, min(max(self.app.size.width - 4, 20), 120)
        found = session.explanation
        if found is None:
            self.main().show([line((" looking for causes …", "dim"))])
            return
        event, answer = found
        self.main().show(finding_lines(answer, event, width))

    def action_explain(self) -> None:
        """Explain the state at the cursor instead."""
        self.session.explained_event = self.session.event
        self.browser_explain()
        self.show()

    def browser_explain(self) -> None:
        """Ask the main screen to work it out in its thread."""
        self.call_later(self.screen.run_action, "explain")

    def csv(self) -> Iterable[Sequence[str]]:
        yield "id", "title", "bytes", "evidence", "frame", "change", "saves_bytes", "basis"
        found = self.session.explanation
        for finding in found[1].findings if found is not None else ():
            head = (finding.id, finding.title, "" if finding.bytes is None else str(finding.bytes), finding.evidence)
            for advice in finding.advice:
                saves = "" if advice.saves_bytes is None else str(advice.saves_bytes)
                yield (*head, finding.frame, advice.change, saves, str(advice.basis))
            if not finding.advice:
                yield (*head, finding.frame, "", "", "")

    def copy_text(self) -> str:
        return self.main().text
