"""Findings: the verdict, every cause with its evidence, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from textual.app import ComposeResult

from memtrace.render.words import clip, moment_name
from memtrace_tui.data.findings import finding_lines, sentence, whatif_lines
from memtrace_tui.data.lines import BLANK, Goto, line
from memtrace_tui.dialogs import Ask
from memtrace_tui.provider import BrowsedRecording, Provider
from memtrace_tui.views import View
from memtrace_tui.widgets.base import Failed, Lines, Open, keys

if TYPE_CHECKING:
    from memtrace.answers.simulate import Answer


class FindingsView(View):
    """What ``memtrace explain`` says of the moment the recording is about, or of the cursor on demand."""

    about = (
        "Why, and what to change. Enter on a finding goes to its evidence; e explains the state at the cursor; "
        "w replays the recorded program under other allocator settings; Enter on a run opens it as a second file."
    )
    BINDINGS = keys("""
        w  whatif   What if
        e  explain  Explain the cursor
    """)

    replaying: float | None = None  # share done of a replay in progress

    def compose(self) -> ComposeResult:
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
        lines = finding_lines(answer, event, width)
        if event != session.event:
            about = f"{moment_name(session.provider.at(event))}, not at the cursor (e explains the cursor)"
            lines = [line((clip(about, width), "warn")), *lines]
        replays = session.whatifs.get(session.provider)
        if self.replaying is not None:
            lines = [line((f"replaying … {self.replaying:.0%}", "accent")), BLANK, *lines]
        elif replays is not None:
            lines = [*whatif_lines(replays, width), *lines]
        self.main().show(lines)

    def action_explain(self) -> None:
        """Explain the state at the cursor instead; the main screen works it out in its thread."""
        self.session.explained_event = self.session.event
        self.call_later(self.screen.run_action, "explain")
        self.show()

    # -- what-if replays

    def action_whatif(self) -> None:
        """Ask for settings, then replay under them in a thread."""
        hint = "settings as in PYTORCH_CUDA_ALLOC_CONF, such as max_split_size_mb:256; empty tries the sensible ones"
        self.app.push_screen(Ask("What if the settings were", hint, "expandable_segments:True", self._begin))

    def _begin(self, conf: str) -> None:
        """Refuse what PyTorch would refuse, else start."""
        from memtrace.allocator.conf_text import parse_conf

        if conf.strip():
            parse_conf(conf.strip())
        self.replaying = 0.0
        self.run_worker(partial(self._replay, conf.strip()), thread=True, group="whatif", exclusive=True)
        self.show()

    def _replay(self, conf: str) -> None:
        """In the worker thread; only messages go back."""
        session, provider = self.session, self.session.provider
        try:
            found = {provider: session.simulate(conf, self._tell)}
        except Exception as error:
            self.post_message(Failed(error, "replay"))
            found = {}
        self.call_later(self._replayed, found)

    def _tell(self, share: float) -> None:
        self.replaying = share
        self.call_later(self.show)

    def _replayed(self, found: dict[Provider, Answer]) -> None:
        self.session.whatifs |= found
        self.replaying = None
        self.main().reset(0, keep=False)
        self.show()

    # -- a run as a second file

    def on_rows_opened(self, message: Lines.Opened) -> None:
        target = self.main().lines[message.row].target
        if isinstance(target, int):
            self.notify("making the predicted recording …", timeout=3)
            self.run_worker(partial(self._predict, target), thread=True, group="whatif", exclusive=True)

    def _predict(self, number: int) -> None:
        """In the worker thread."""
        answer = self.session.whatifs[self.session.provider]
        try:
            self.call_later(self._open, self.session.predicted(answer, number), sentence(answer, number))
        except Exception as error:
            self.post_message(Failed(error, "replay"))

    def _open(self, made: BrowsedRecording, said: str) -> None:
        self.session.open_other(made, said)
        self.post_message(Open(Goto("diff")))

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
