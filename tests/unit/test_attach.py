"""Attaching to a program that knows nothing of memtrace, and leaving it as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from memtrace.cli import main
from memtrace.cli.attach import inject
from memtrace.errors import MissingDependencyError, NoAnswerError

_PROGRAM = """
import sys, threading, time
sys.path.append({tests!r})
import torch
from torch.nn.modules import module as modules
def look():
    return dict(threads=sorted(t.name for t in threading.enumerate()), backward=id(torch.autograd.backward),
        hooks=len(modules._global_forward_pre_hooks) + len(modules._global_forward_hooks), path=list(sys.path))
{backend}
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
before = look()
print("ready", flush=True)
for step in range(100000):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    {remote}
    if __import__("os").path.exists({end!r}):
        break
print(before == look(), flush=True)
"""
_STAND_IN = "from capture_standin import StandIn\nfound = StandIn(64 << 20).__enter__()\n"
# The target's part of sys.remote_exec, for Pythons that have none.
_REMOTE = "r = __import__('pathlib').Path({script!r}); r.exists() and exec(r.read_text() + str(r.unlink())[:0], {{}})"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("torch")
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    started: list[subprocess.Popen[str]] = []

    def start(stand_in: bool = True, remote: bool = False) -> subprocess.Popen[str]:
        code = _PROGRAM.format(
            tests=str(ROOT / "tests"), backend=_STAND_IN if stand_in else "", end=str(tmp_path / "end"),
            remote=_REMOTE.format(script=str(tmp_path / "remote.py")) if remote else "",
        )  # fmt: skip
        code += "\n" if not stand_in else ""
        env = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"}
        env["PYTHONPATH"] = str(ROOT)
        found = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
        started.append(found)
        assert found.stdout is not None and found.stdout.readline() == "ready\n"
        return found

    yield start
    for each in started:
        each.kill()
        each.wait()


@pytest.fixture
def stand_in_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that is run in the program puts the stand-in in the GPU's place."""
    from memtrace.record import attach

    use = "from memtrace.record import backend as b; b._in_use.append(sys.modules['__main__'].found)"
    monkeypatch.setattr(attach, "SCRIPT", attach.SCRIPT.replace("        begin(", f"        {use}\n        begin("))


def lives_through_attaching(program: subprocess.Popen[str], tmp_path: Path, capsys: Any, by: str) -> None:
    assert main(["attach", str(program.pid), "--out", str(tmp_path)]) == 0
    assert f"attached to {program.pid} by {by}" in capsys.readouterr().out
    assert main(["attach", str(program.pid)]) == 4
    assert "already" in capsys.readouterr().err
    time.sleep(1.0)
    assert main(["live", str(program.pid), "--once", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["pid"] == program.pid and said["categories"]["lora"] > 0
    assert main(["attach", str(program.pid), "--detach"]) == 0
    assert main(["attach", str(program.pid), "--detach"]) == 4
    assert list((tmp_path / "run" / "memtrace").iterdir()) == []
    (tmp_path / "end").touch()
    assert program.stdout is not None and program.stdout.read() == "True\n"
    assert program.wait() == 0


@pytest.mark.skipif(shutil.which("gdb") is None or hasattr(sys, "remote_exec"), reason="gdb, for Python before 3.14")
def test_by_gdb(program: Any, stand_in_inside: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives_through_attaching(program(), tmp_path, capsys, "gdb")


def test_by_remote_exec(
    program: Any, stand_in_inside: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Python 3.14's own way; before that, a program that reads what it is to run from a file."""
    if not hasattr(sys, "remote_exec"):
        there = tmp_path / "remote.py"

        def ask(pid: int, script: str) -> None:
            (tmp_path / "writing").write_text(Path(script).read_text())
            (tmp_path / "writing").replace(there)

        monkeypatch.setattr(sys, "remote_exec", ask, raising=False)
        lives_through_attaching(program(remote=True), tmp_path, capsys, "sys.remote_exec")
    else:
        lives_through_attaching(program(), tmp_path, capsys, "sys.remote_exec")


def test_what_can_not_be_recorded_says_why(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(pid: int, script: str) -> None:
        (tmp_path / "writing").write_text(Path(script).read_text())
        (tmp_path / "writing").replace(tmp_path / "remote.py")

    monkeypatch.setattr(sys, "remote_exec", ask, raising=False)
    assert main(["attach", str(program(stand_in=False, remote=True).pid)]) == 4
    assert "can't be recorded: MissingDependencyError" in capsys.readouterr().err
    assert main(["attach", "999999999"]) == 4
    assert "process 999999999: No such" in capsys.readouterr().err


def test_no_way_in_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, script: str) -> None:
        raise RuntimeError("remote debugging is not enabled")

    monkeypatch.setattr(sys, "remote_exec", refuse, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="not enabled, and gdb is not installed here; start it with"):
        inject(os.getpid(), tmp_path / "script.py")
    fake = tmp_path / "gdb"
    fake.write_text("#!/bin/sh\necho 'ptrace: Operation not permitted.' >&2\n")
    fake.chmod(0o755)
    with pytest.raises(NoAnswerError, match="ptrace: Operation not permitted"):
        inject(os.getpid(), tmp_path / "script.py")
    fake.write_text("#!/bin/sh\necho 'No symbol \"Py_AddPendingCall\" in current context.' >&2\n")
    with pytest.raises(NoAnswerError, match="no Python that can be asked runs there"):
        inject(os.getpid(), tmp_path / "script.py")
