"""The screens, one a file."""

from __future__ import annotations

from memtrace_tui.session import Session
from memtrace_tui.views.allocations import AllocationsView
from memtrace_tui.views.base import View
from memtrace_tui.views.diff import DiffView
from memtrace_tui.views.events import EventsView
from memtrace_tui.views.findings import FindingsView
from memtrace_tui.views.overview import OverviewView
from memtrace_tui.views.segments import SegmentsView
from memtrace_tui.views.stacks import StacksView
from memtrace_tui.views.timeline import TimelineView

__all__ = ["View", "all_views"]


def all_views(session: Session) -> list[type[View]]:
    """The screens that make sense for a session, in order of their keys."""
    diff: list[type[View]] = [DiffView] if session.other is not None else []
    return [OverviewView, TimelineView, SegmentsView, AllocationsView, StacksView, FindingsView, *diff, EventsView]
