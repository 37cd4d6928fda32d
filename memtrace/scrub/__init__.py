"""Snapshots without personal things: paths, names of users, hosts and projects, command lines, other processes."""

from memtrace.scrub.document import Scrubbed, scrub
from memtrace.scrub.hiding import ScrubOptions

__all__ = ["ScrubOptions", "Scrubbed", "scrub"]
