"""Out-of-memory messages in training logs: every text PyTorch and its neighbours print, read from whole logs.

``read_log`` takes a log of any size and returns its messages, and the lines that set the allocator. The texts and how
they are told apart are described in docs/oom-messages.md.
"""

from __future__ import annotations

from memtrace.oomlog.message import CONTRACT_KEYS, MessageKind, OomMessage
from memtrace.oomlog.scan import LogReading, read_log

__all__ = [
    "CONTRACT_KEYS",
    "LogReading",
    "MessageKind",
    "OomMessage",
    "read_log",
]
