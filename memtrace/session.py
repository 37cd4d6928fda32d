"""One recording and all that can be asked of it, for scripts and notebooks: ``memtrace.open(FILE)``.

Answers are the dataclasses that the commands print. In a notebook each shows itself as the HTML page does; ``print``
shows what the command prints. Sizes are bytes, times microseconds, events numbers of the device's trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers import simulate
from memtrace.answers.diff.comparison import Difference
from memtrace.answers.fragmentation import Fragmentation, measure
from memtrace.answers.report import Report, report
from memtrace.answers.why import Why, explain_decision
from memtrace.cache.index import OpenRecording, open_recording
from memtrace.errors import MissingDependencyError, SnapshotError
from memtrace.explain.answer import Explanation
from memtrace.history.timeline import At
from memtrace.ranges import check_ranges
from memtrace.snapshot.devices import choose_device, device_name
from memtrace.snapshot.model import Device
from memtrace.units import counted, parse_capacity, printable

_WIDTH, _SHOWN_ROWS, _REPR = 120, 10, 100
_FRAME = 'sandbox="allow-scripts" width="100%" height="620" style="border:0" loading="lazy"'


class Shown:
    """An answer that shows itself: ``str()`` as the command prints it, in a notebook as the HTML page has it."""

    _text: Callable[[], Iterable[Any]]
    _html: Callable[[], str] | None

    def __str__(self) -> str:
        return "\n".join(printable(str(line)) for line in self._text())

    def __repr__(self) -> str:
        first = next((line.strip() for line in str(self).splitlines() if line.strip()), "")
        return f"<{type(self).__name__.removeprefix('Shown')}: {first[:_REPR]}; print() shows all>"

    def _repr_html_(self) -> str:
        if self._html is None:
            return f"<pre>{escape(str(self))}</pre>"
        return _framed(self._html())


def _framed(page: str) -> str:
    """A whole page in a notebook's cell, whose styles stay inside."""
    return f'<iframe {_FRAME} srcdoc="{escape(page)}"></iframe>'


class ShownReport(Shown, Report):
    """A :class:`~memtrace.answers.report.Report`."""


class ShownExplanation(Shown, Explanation):
    """An :class:`~memtrace.explain.answer.Explanation`."""


class ShownWhy(Shown, Why):
    """A :class:`~memtrace.answers.why.Why`."""


class ShownDifference(Shown, Difference):
    """A :class:`~memtrace.answers.diff.comparison.Difference`."""


class ShownSimulation(Shown, simulate.Answer):
    """An :class:`~memtrace.answers.simulate.Answer`."""


class ShownFragmentation(Shown, Fragmentation):
    """A :class:`~memtrace.answers.fragmentation.Fragmentation`."""


S = TypeVar("S", bound=Shown)


def _shown(kind: type[S], answer: Any, text: Callable[[], Iterable[Any]], html: Callable[[], str] | None = None) -> S:
    made = kind(**{field.name: getattr(answer, field.name) for field in fields(answer)})
    object.__setattr__(made, "_text", text)  # the answers are frozen
    object.__setattr__(made, "_html", html)
    return made


class ArrowTable:
    """Columns of equal length. pandas, polars, DuckDB and pyarrow take it by Arrow's C interface (needs pyarrow here);
    numbers are not copied. ``columns`` has them as numpy arrays."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __repr__(self) -> str:
        return f"<{counted(len(self), 'row')}: {', '.join(self.columns)}>"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A capsule of Arrow's C stream. Raises MissingDependencyError without pyarrow."""
        try:
            import pyarrow
        except ImportError:
            raise MissingDependencyError.of_extra("Arrow tables need pyarrow", "parquet") from None
        arrow = pyarrow.table({name: pyarrow.array(column) for name, column in self.columns.items()})
        return arrow.__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        def row(kind: str, cells: Iterable[object]) -> str:
            return "<tr>" + "".join(f"<{kind}>{escape(printable(str(cell)))}</{kind}>" for cell in cells) + "</tr>"

        first = zip(*(column[:_SHOWN_ROWS].tolist() for column in self.columns.values()), strict=True)
        body = "".join(row("td", cells) for cells in first)
        return f"<table>{row('th', self.columns)}{body}</table><p>{counted(len(self), 'row')}</p>"


class Investigation:
    """One device of one recording. ``when`` is what ``--at`` takes (``"peak"``, ``"step 3"``, an event …), by default
    the last OOM, else the peak. Methods raise subclasses of MemtraceError, whose text is one line."""

    def __init__(self, recording: OpenRecording, device: Device, load: Callable[[], Analysis]) -> None:
        self._recording, self._device, self._load = recording, device, load

    @property
    def file(self) -> str:
        """The recording's name."""
        return self._recording.snapshot.source

    @property
    def device(self) -> int:
        """The number of the GPU."""
        return self._device.device

    @cached_property
    def analysis(self) -> Analysis:
        """The device's timeline with what every allocation was for: what all answers come from."""
        return self._load()

    def __repr__(self) -> str:
        name, events = device_name(self._recording.snapshot, self.device), counted(len(self._device.trace), "event")
        return f"<memtrace recording {printable(self.file)}, {name}, {events}>"

    def _repr_html_(self) -> str:
        return _framed(self._page(self.at())())

    def at(self, when: str | int | None = None) -> At:
        """The event that ``when`` names. Raises UsageError, NoAnswerError."""
        return self.analysis.at(None if when is None else str(when))

    def report(self, when: str | int | None = None) -> ShownReport:
        """Where every reserved byte is, as ``memtrace report``."""
        from memtrace.render.report_text import render_report

        answer = report(self.analysis, self.at(when))
        html = self._page(answer.at, "budget", "memory", "sites", "warnings")
        return _shown(ShownReport, answer, lambda: render_report(answer, _WIDTH), html)

    def explain(self, when: str | int | None = None, capacity: str | None = None) -> ShownExplanation:
        """Why memory ran out and what to change, as ``memtrace explain``. ``capacity``: the limit, if no file tells."""
        from memtrace.explain.explain import explain_snapshot
        from memtrace.render.explain_text import render_explanation

        capacity_bytes = None if capacity is None else parse_capacity(capacity)
        at = self.at(when)
        answer = explain_snapshot(self.analysis, at, capacity_bytes=capacity_bytes)
        text = lambda: render_explanation(answer, everything=True)  # noqa: E731
        return _shown(ShownExplanation, answer, text, self._page(at, "opening", "warnings"))

    def why(self, what: str, when: str | int | None = None) -> ShownWhy:
        """The rules behind a category, ``category/subcategory`` or address, as ``memtrace report --why``."""
        from memtrace.render.report_text import render_why

        answer = explain_decision(self.analysis, self.at(when), what)
        meaning = self.analysis.attribution.lora_meaning
        return _shown(ShownWhy, answer, lambda: render_why(answer, meaning))

    def diff(self, other: Investigation | str | os.PathLike[str]) -> ShownDifference:
        """What changed from this recording to ``other``, as ``memtrace diff``."""
        from memtrace.explain.causes import compare
        from memtrace.export.html.page import html_report
        from memtrace.render.diff_text import render_diff

        after = other if isinstance(other, Investigation) else open_file(other)
        answer = compare(self.analysis, after.analysis)
        sides = (self.analysis, answer.before.at), (after.analysis, answer.after.at)
        html = lambda: html_report(*sides[0], sides[1], ("opening", "budget", "memory"))  # noqa: E731
        return _shown(ShownDifference, answer, lambda: render_diff(answer, _WIDTH), html)

    def simulate(
        self,
        *confs: str,
        conf: str | Sequence[str] = (),
        capacity: str | None = None,
        search: bool = False,
        without: Sequence[str] = (),
        scale: Mapping[str, float] | None = None,
    ) -> ShownSimulation:
        """The same program under other allocator settings, limits and edits, as ``memtrace simulate``.

        ``conf``: settings strings by the command's name, one or several, after those given in place."""
        from memtrace.render.simulation_text import render_simulation

        edits = simulate.parse_edits(without, [f"{what}={factor}" for what, factor in (scale or {}).items()])
        capacity_bytes = None if capacity is None else parse_capacity(capacity)
        question = simulate.Question(
            (*confs, *([conf] if isinstance(conf, str) else conf)), capacity_bytes, search, edits
        )
        answer = simulate.answer(self.analysis.timeline, question, self.analysis.attribution if edits else None)
        return _shown(ShownSimulation, answer, lambda: render_simulation(answer, _WIDTH))

    def fragmentation(self, when: str | int | None = None) -> ShownFragmentation:
        """What is reserved and not in use: kinds, pools, what pins it, as ``memtrace fragmentation``."""
        from memtrace.answers.pins import pins
        from memtrace.history.layout import layout_at
        from memtrace.render.fragmentation_text import render_fragmentation

        at = self.at(when)
        layout = layout_at(self.analysis.timeline, at.event)
        answer = measure(self.analysis.timeline, self.analysis.attribution, at, layout)
        html, meaning = self._page(at, "map", "fragmentation"), self.analysis.attribution.lora_meaning

        def text() -> Iterable[Any]:
            return render_fragmentation(answer, meaning, pins(self.analysis, layout), _WIDTH)

        return _shown(ShownFragmentation, answer, text, html)

    def allocations(self, when: str | int | None = None) -> ArrowTable:
        """Every allocation of the recording, or those live at an event; columns as of ``memtrace allocations``."""
        from memtrace.export.table import allocation_columns

        timeline = self.analysis.timeline
        rows = timeline.rows_within() if when is None else timeline.live_rows(self.at(when).event)
        return ArrowTable(allocation_columns(self.analysis, rows))

    def timeline(self, points: int | None = None) -> ArrowTable:
        """Memory after each event by category, or at about ``points`` events that keep every extreme."""
        from memtrace.answers.curves import category_curves, pick_events
        from memtrace.export.table import curve_columns

        curves = category_curves(self.analysis, self.analysis.timeline.window)
        events = pick_events(curves, points) if points else np.arange(curves.first, curves.first + len(curves))
        return ArrowTable(curve_columns(self.analysis, curves, events))

    def _page(self, at: At, *sections: str) -> Callable[[], str]:
        def made() -> str:
            from memtrace.export.html.page import html_report

            return html_report(self.analysis, at, only=sections)

        return made


def open_file(
    file: str | os.PathLike[str],
    *,
    device: int | None = None,
    rules: str | os.PathLike[str] | None = None,
    events: str | None = None,
    steps: str | None = None,
) -> Investigation:
    """Open a recording (``memtrace.open``). ``device``: a GPU's number, by default the one that matters; ``rules``: a
    TOML file of your own; ``events`` or ``steps``: ask of ``"A:B"`` only.

    Raises SnapshotError for what is no readable snapshot, UsageError for a device or range that makes no sense.
    """
    check_ranges(events, steps)
    try:
        recording = open_recording(os.fspath(file))
    except SnapshotError as error:
        from memtrace.explain.inputs import is_log

        if is_log(Path(file)):
            raise SnapshotError(f"{error}; it is a log: memtrace explain {os.fspath(file)}") from None
        raise
    chosen, _ = choose_device(recording.snapshot, device)
    own: Sequence[Any] = ()
    if rules is not None:
        from memtrace.attribution.user_rules import read_rules

        own = read_rules(os.fspath(rules))
    return Investigation(recording, chosen, lambda: recording.analysis(chosen, own).within(events, steps))
