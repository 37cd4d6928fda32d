"""From what was given to a verb that can't use it to the verb that can: folders, logs, checkpoints, processes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from memtrace.errors import UsageError

_GIVEN = ("file", "files", "before", "after", "other", "sources", "script")


def with_lead(error: str, args: argparse.Namespace, verb: str) -> str:
    """The error, and which verb takes what was given, if another one does."""
    for name in _GIVEN:
        value = getattr(args, name, None)
        for source in [value] if isinstance(value, str) else (value or [])[:2]:
            found = lead(source, verb)
            if found is not None and f"memtrace {verb} " not in found:
                return f"{error}; {found}"
    return error


def lead(source: str, verb: str) -> str | None:
    """What takes ``source``, in half a sentence; None for what may be a snapshot, or is nothing known."""
    path = Path(source)
    try:
        if path.is_dir():
            return _folder(path)
        if not path.exists():
            return _process(source)
        if not path.is_file() or verb == "run":
            return None
        with path.open("rb") as file:
            head = file.read(4096)
    except (OSError, ValueError):
        return None
    if head.startswith(b"PK\x03\x04") or head[8:10] == b'{"':  # torch.save, safetensors
        return (
            "weights tell nothing of a run: memtrace run train.py records one, "
            "memtrace forecast --model CONFIG.json --lengths N,N says whether it fits"
        )
    from memtrace.explain.inputs import is_log

    return f"it is a log: memtrace explain {source}" if is_log(path) else None


def _folder(path: Path) -> str | None:
    from memtrace.ranks.sources import expand

    try:
        inside = expand([str(path)])
    except UsageError:
        inside = []
    if (path / "config.json").is_file() and all(".json" in Path(name).suffixes for name in inside):
        return f"memtrace estimate --model {path} --seq-len L says what training this model takes"
    if len(inside) > 1:
        return f"memtrace ranks {path} compares the {len(inside)} recordings in it"
    if inside:
        return f"there is one recording in it: memtrace explain {inside[0]}"
    return "there is no recording in it; memtrace run train.py makes one"


def _process(source: str) -> str | None:
    if not source.isdecimal() or not 1 < int(source) < 1 << 31:
        return None
    try:
        os.kill(int(source), 0)
    except PermissionError:
        pass
    except OSError:
        return None
    watches = f"memtrace live {source} watches it where it was started with memtrace run --live"
    return f"{source} is a running process: {watches}, else after memtrace attach {source}"
