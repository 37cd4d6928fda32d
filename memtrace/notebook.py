"""``%load_ext memtrace``, then ``%%memtrace`` above a cell: what the cell needed of the GPU, also where it ran out."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from memtrace.errors import UsageError
from memtrace.record.api import record
from memtrace.session import Investigation, open_file


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext memtrace`` calls."""

    def memtrace(line: str, cell: str) -> Investigation | None:
        """``%%memtrace [FILE]``: record the cell, keep the recording as FILE, show where its memory went."""
        return record_cell(shell, line, cell)

    shell.register_magic_function(memtrace, magic_kind="cell")


def record_cell(shell: Any, line: str, cell: str) -> Investigation | None:
    """Run a cell with recording on; the recording, opened, also where the cell failed (the shell says how).

    None, with a line on stderr, where there was nothing to record. Raises UsageError for more than one file.
    """
    words = shlex.split(line)
    if len(words) > 1:
        raise UsageError("%%memtrace takes one file to keep the recording in, or nothing")
    if not words:
        words = [str(Path(tempfile.mkdtemp(prefix="memtrace-")) / "cell.pickle")]
    recording = record(words[0], force=True)
    recording.__enter__()
    error: BaseException | None = None
    try:
        error = shell.run_cell(cell).error_in_exec
    finally:
        recording.close(error)
    if recording.file is None:
        print("memtrace: the cell ran unrecorded", file=sys.stderr)
        return None
    return open_file(recording.file)
