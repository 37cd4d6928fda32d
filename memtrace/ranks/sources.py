"""Where the recordings of a run are: files, folders, patterns, and addresses that fsspec understands."""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError, SnapshotError, UsageError

_PICKLE = re.compile(r"\.(pickle|pkl)(\.(gz|xz|zst))?$", re.IGNORECASE)
_JSON = re.compile(r"\.json(\.(gz|xz|zst))?$", re.IGNORECASE)
_REMOTE = re.compile(r"^[a-z][a-z0-9+.-]+(::|://)", re.IGNORECASE)


def is_remote(source: str) -> bool:
    """Whether the source is an address (``s3://…``) rather than a path. A file that is called like a chain of file
    systems (``s3::x.pickle``), as one in a stranger's folder may be, is a file."""
    found = _REMOTE.match(source)
    return found is not None and (found[1] == "://" or not os.path.lexists(source))


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts ``rank2`` before ``rank10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def expand(sources: Sequence[str]) -> list[str]:
    """Every recording the sources name, each once, in natural order within a source.

    A folder stands for its pickles, or its JSON files if it has no pickle; if it has neither, for those of its
    subfolders. Raises UsageError for a folder or pattern without any. Files that are named outright are not checked,
    and links that lead nowhere are among the rest, so that reading tells of them.
    """
    found: dict[str, None] = {}
    for source in sources:
        if not source:
            raise UsageError("an empty name is neither a file nor a folder")
        members = _remote(source) if is_remote(source) else _local(source)
        if members is None:
            members = [source]
        elif not members:
            raise UsageError(f"{source}: no snapshots (.pickle, .pkl or .json, plain or .gz/.xz/.zst) there")
        for member in sorted(members, key=natural):
            found.setdefault(member)
    return list(found)


def _snapshots(names: list[str]) -> list[str]:
    return [name for name in names if _PICKLE.search(name)] or [name for name in names if _JSON.search(name)]


def _local(source: str) -> list[str] | None:
    path = Path(source)
    try:
        if path.is_dir():
            here = _snapshots([str(child) for child in path.iterdir() if _is_meant(child)])
            return here or _snapshots([str(child) for child in path.rglob("*") if _is_meant(child)])
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror or error}") from None
    if not path.exists() and glob.has_magic(source):
        names = glob.glob(source, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        return [name for name in names if _is_meant(Path(name))]
    return None


def _is_meant(path: Path) -> bool:
    """A file, or a link that ought to lead to one."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _filesystem(source: str) -> tuple[Any, str]:
    """(fsspec file system, path in it). Raises MissingDependencyError or UsageError with one line."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingDependencyError.of_extra(f"{source} needs fsspec", "remote") from None
    try:
        filesystem, path = url_to_fs(source)
    except (ImportError, ValueError) as error:
        kind = MissingDependencyError if isinstance(error, ImportError) else UsageError
        raise kind(f"{source}: {_line(error)}") from None
    return filesystem, str(path)


def _remote(source: str) -> list[str] | None:
    filesystem, path = _filesystem(source)
    try:
        if glob.has_magic(path):
            names = [str(name) for name in filesystem.glob(path)]
        elif filesystem.isdir(path):
            names = _snapshots([str(name) for name in filesystem.find(path, maxdepth=1)])
            names = names or _snapshots([str(name) for name in filesystem.find(path)])
        else:
            return None
    except Exception as error:  # each file system has errors of its own
        raise SnapshotError(f"{source}: {_line(error)}") from None
    return [str(filesystem.unstrip_protocol(name)) for name in names]


@contextmanager
def local_copy(source: str) -> Iterator[str]:
    """A local path with the source's bytes: itself, or a temporary file that is removed afterwards.

    Raises SnapshotError if it can't be fetched.
    """
    if not is_remote(source):
        yield source
        return
    filesystem, path = _filesystem(source)
    with tempfile.TemporaryDirectory(prefix="memtrace-") as folder:
        target = os.path.join(folder, "snapshot")  # noqa: PTH118 - a plain string for fsspec
        try:
            filesystem.get_file(path, target)
        except FileNotFoundError:
            raise SnapshotError(f"{source}: no such file") from None
        except Exception as error:  # each file system has errors of its own
            raise SnapshotError(f"{source}: {_line(error)}") from None
        yield target


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
