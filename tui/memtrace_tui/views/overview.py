"""Overview: what happened, and where every reserved byte is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal

from memtrace.render.words import moment_name
from memtrace_tui.data.findings import short_lines
from memtrace_tui.data.lines import BLANK, line
from memtrace_tui.data.overview import banner_lines, budget_lines, facts_lines, gauge_lines
from memtrace_tui.views import View
from memtrace_tui.widgets.base import Lines


class OverviewView(View):
    """The budget at the cursor with its subcategories; peaks, call sites and warnings beside or below it."""

    about = "Every reserved byte at the cursor by purpose. Enter on a line shows the allocations behind it."

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Lines(id="budget")
            yield Lines(id="facts", classes="side")

    def main(self) -> Lines:
        return self.query_one("#budget", Lines)

    def show(self) -> None:
        provider, report = self.session.provider, self.session.report
        facts = self.query_one("#facts", Lines)
        facts.display = self.wide
        width = max(self.app.size.width - 3, 20)  # padding and scroll bar
        if self.wide:
            width = width * 3 // 5 - 2
        found = self.session.explanation
        height = self.app.size.height - 8  # a frame of lines around it, and the titles
        is_tall = height >= 26
        is_about = found is not None and found[0] == self.session.event
        answer = found[1] if found is not None and is_about else None
        lines = [*banner_lines(provider, report, width, answer), BLANK, *gauge_lines(provider, report, width), BLANK]
        lines += budget_lines(report, width, parts=is_tall)
        side = facts_lines(provider, report, *((self.side_width, height) if self.wide else (width,)))
        if found is not None:
            moment = f"{moment_name(provider.at(found[0]))}, not at the cursor"
            room = height - len(lines) if is_tall else 0
            lines += [BLANK, *short_lines(found[1], width, None if is_about else moment, room)]
        if not is_tall:
            lines += [BLANK, line(("in detail", "title")), *budget_lines(report, width, categories=False)]
        if not self.wide:
            lines += [BLANK, *side]
        self.main().show(lines)
        facts.show(side if self.wide else [])

    def csv(self) -> Iterable[Sequence[str]]:
        report = self.session.report
        yield "category", "subcategory", "bytes"
        for key, size in report.subcategories.items():
            yield (*key.split("/"), str(size))
