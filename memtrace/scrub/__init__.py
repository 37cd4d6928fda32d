"""Snapshots without personal things: paths, names of users, hosts and projects, command lines, other processes."""

from memtrace.scrub.document import Scrubbed, scrub
from memtrace.scrub.frames import Options

__all__ = ["Options", "Scrubbed", "scrub"]
