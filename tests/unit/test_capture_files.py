"""Snapshot files: whole or absent, never in an older file's place."""

from __future__ import annotations

import os
import pickle
import pickletools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memtrace import writing
from memtrace.record import files
from memtrace.writing import free_name


def test_written_file_is_a_protocol_4_pickle(tmp_path: Path) -> None:
    path = files.write_snapshot({"segments": [1]}, tmp_path / "a.pickle")
    content = path.read_bytes()
    assert pickle.loads(content) == {"segments": [1]}
    assert next(pickletools.genops(content))[1] == 4
    assert [item.name for item in tmp_path.iterdir()] == ["a.pickle"]


def test_an_older_file_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(b"old")
    names = [files.write_snapshot({"n": n}, tmp_path / "a.pickle").name for n in range(3)]
    assert names == ["a-2.pickle", "a-3.pickle", "a-4.pickle"]
    assert (tmp_path / "a.pickle").read_bytes() == b"old"


def test_force_replaces(tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(b"old")
    assert files.write_snapshot({"n": 1}, tmp_path / "a.pickle", force=True).name == "a.pickle"
    assert pickle.loads((tmp_path / "a.pickle").read_bytes()) == {"n": 1}


def test_without_hard_links_nothing_is_replaced_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a.pickle").write_bytes(b"old")
    assert files.write_snapshot({"n": 1}, tmp_path / "a.pickle").name == "a-2.pickle"
    assert (tmp_path / "a.pickle").read_bytes() == b"old"


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_snapshot({"n": 1}, tmp_path / "a.pickle")
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from memtrace.record import files
class Slow(dict):
    def __reduce__(self):
        import time
        print("writing", flush=True)
        time.sleep(60)
        return dict, ()
files.write_snapshot({"a": "x" * 200_000, "b": Slow()}, Path(sys.argv[1]))
"""


def test_killed_in_the_middle_leaves_no_final_file_and_the_next_writer_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "a.pickle"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert not target.exists()
    assert len(list(tmp_path.glob(".memtrace-*.tmp"))) == 1
    files.write_snapshot({"n": 1}, target)
    assert [item.name for item in tmp_path.iterdir()] == ["a.pickle"]


def test_files_of_living_processes_and_other_hosts_are_left_alone(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    living = tmp_path / f"{writing._PREFIX}{sleeper.pid}-0.tmp"
    elsewhere = tmp_path / ".memtrace-otherhost-99999999-0.tmp"
    living.touch()
    elsewhere.touch()
    writing.remove_stale(tmp_path)
    assert living.exists()
    assert elsewhere.exists()
    sleeper.kill()
    sleeper.wait()
    time.sleep(0.05)
    writing.remove_stale(tmp_path)
    assert not living.exists()


def test_the_message_of_an_error_is_added_to_its_file(tmp_path: Path) -> None:
    document = {"segments": list(range(500)), "memtrace": {"oom": {"message": "", "step": 1}}}
    path = files.write_snapshot(document, tmp_path / "a.pickle")
    files.add_oom_message(path, "CUDA out of memory. Tried to allocate 86.00 MiB. ü")
    document["memtrace"]["oom"]["message"] = "CUDA out of memory. Tried to allocate 86.00 MiB. ü"  # type: ignore[index, call-overload]
    assert pickle.loads(path.read_bytes()) == document
    assert [item.name for item in tmp_path.iterdir()] == ["a.pickle"]


def test_unwritable_folder_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    folder, problem = files.writable_folder(taken / "sub")
    assert problem is not None
    assert str(taken / "sub") in problem
    assert folder.is_dir()
    assert files.writable_folder(tmp_path / "new") == (tmp_path / "new", None)


def test_another_name_is_a_free_one(tmp_path: Path) -> None:
    (tmp_path / "b.pickle").write_bytes(b"old")
    (tmp_path / "a.pickle").write_bytes(b"new")
    assert free_name(tmp_path / "a.pickle", tmp_path / "b.pickle").name == "b-2.pickle"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["b-2.pickle", "b.pickle"]
