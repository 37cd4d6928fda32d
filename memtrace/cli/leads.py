"""From what was given to a verb that can't use it to the verb that can: folders, logs, checkpoints, processes."""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path

from memtrace.errors import MemtraceError, UsageError

_GIVEN = ("file", "files", "before", "after", "other", "sources", "script")
_WEIGHTS = (
    "weights tell nothing of a run: memtrace run train.py records one, "
    "memtrace forecast --model CONFIG.json --lengths N,N says whether it fits"
)
_PROFILE = "a profiler's file has no events of the allocator: memtrace run train.py records them"
_MOST_LOGS = 8  # of a folder are looked into
_PACKED = (b"BZh", b"7z\xbc\xaf", b"\x04\x22\x4d\x18")  # bzip2, 7-Zip, LZ4


def with_lead(error: str, args: argparse.Namespace, verb: str) -> str:
    """The error, and which verb takes what was given, if another one does."""
    for name in _GIVEN:
        value = getattr(args, name, None)
        for source in [value] if isinstance(value, str) else (value or [])[:2]:
            found = lead(source, verb)
            if found is not None and f"memtrace {verb} {source} " not in f"{found} ":
                return f"{error}; {found}"
    return error


def check_program(name: str) -> None:
    """Raise UsageError for a program that is not there, or is a recording or a log."""
    import shutil  # here: every command imports this module
    import zipfile

    path = Path(name)
    if not os.path.exists(name):  # noqa: PTH110  # False for what is too long for a name, too
        first = f"; {name} comes first, as in torchrun -m memtrace run train.py" if shutil.which(name) else ""
        raise UsageError(f"can't open {name}: no such file{first}")
    if path.suffix == ".py" or path.is_dir() or (path.is_file() and zipfile.is_zipfile(path)):
        return
    from memtrace.explain.inputs import is_log, is_snapshot
    from memtrace.snapshot.container import never_ends

    if never_ends(path) or path.is_socket():
        raise UsageError(f"{name}: a device, no Python program")
    if path.is_file() and (is_log(path) or is_snapshot(name)):
        raise UsageError(f"{name}: no Python program; memtrace explain {name} says what is in it")


def lead(source: str, verb: str) -> str | None:
    """What takes ``source``, in half a sentence; None for what may be a snapshot, or is nothing known."""
    if "out of memory" in source.lower() and len(source.split()) > 3:
        return "a text goes to standard input: paste it after memtrace explain -, then Ctrl+D"
    path = Path(source)
    try:
        if path.is_dir():
            return _folder(path)
        if not path.exists():
            return "save it to a file first" if "://" in source else _process(source)
        if not path.is_file() or verb in ("run", "dryrun"):
            return None
        from memtrace.explain.inputs import beginning, is_log
        from memtrace.snapshot.container import LEGACY_CHECKPOINT

        head = beginning(source)
    except (MemtraceError, OSError, ValueError):
        return None
    if head.startswith(b"PK\x03\x04"):
        return _zip(path)
    if head[8:10] == b'{"' or head.startswith((b"\x89HDF", b"GGUF")) or head[2:].startswith(LEGACY_CHECKPOINT):
        return _WEIGHTS
    if path.suffix in (".nsys-rep", ".qdrep", ".ncu-rep") or b'"traceEvents"' in head or b'"schemaVersion"' in head:
        return _PROFILE
    if head.startswith(_PACKED) or head[257:262] == b"ustar":
        return "unpack it first"
    if path.suffix == ".py":
        return f"memtrace run {source} records it, memtrace dryrun {source} runs it without a GPU"
    if path.suffix in (".yaml", ".yml"):
        return f"memtrace forecast --config {source} reads the configuration of a run"
    if path.name == "config.json":
        return _model(source)
    return f"it is a log: memtrace explain {source}" if is_log(path) else None


def _zip(path: Path) -> str | None:
    """What to do with an archive: torch.save makes one, Python runs one, reports on the web come as one."""
    from memtrace.snapshot.container import is_checkpoint, zip_names

    names = zip_names(path)
    if names is None:
        return None
    return _WEIGHTS if is_checkpoint(names) else f"unpack it first ({', '.join(names)[:60]})"


def _model(source: str | Path) -> str:
    return f"memtrace estimate --model {source} --seq-len L says what training this model takes"


def _folder(path: Path) -> str | None:
    from memtrace.ranks.sources import expand

    try:
        inside = expand([str(path)])
    except UsageError:
        inside = []
    if (path / "config.json").is_file() and all(".json" in Path(name).suffixes for name in inside):
        return _model(path)
    if len(inside) > 1:
        return f"memtrace ranks {path} compares the {len(inside)} recordings in it"
    if inside:
        return f"there is one recording in it: memtrace explain {inside[0]}"
    from memtrace.explain.inputs import is_log

    logs = (child for child in sorted(path.iterdir()) if child.suffix in (".log", ".txt", ".out", ".err"))
    for child in islice(logs, _MOST_LOGS):
        if is_log(child):
            return f"there is a log in it: memtrace explain {path}/*{child.suffix}"
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
