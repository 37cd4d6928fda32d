"""Attaching to a program that knows nothing of memtrace, and leaving it as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from memtrace.cli import main
from memtrace.cli.attach import inject
from memtrace.errors import MissingDependencyError, NoAnswerError

# It says when asked whether it is as it was before anybody attached. ``remote`` is its part of ``sys.remote_exec``,
# for Pythons that have none.
_PROGRAM = """
import sys, threading, time
from pathlib import Path
sys.path.append({tests!r})
import torch
from torch.nn.modules import module as modules
from capture_standin import StandIn
def look():
    return dict(threads=sorted(t.name for t in threading.enumerate()), backward=id(torch.autograd.backward),
        hooks=len(modules._global_forward_pre_hooks) + len(modules._global_forward_hooks), path=list(sys.path))
found = StandIn(64 << 20).__enter__()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
before = look()
print("ready", flush=True)
remote, asked = Path("remote.py"), Path("asked")
while True:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if remote.exists():
        code = remote.read_text()
        remote.unlink()
        exec(code, {{}})
    if asked.exists():
        asked.unlink()
        print(before == look(), flush=True)
    if Path("end").exists():
        break
"""


@dataclass
class Program:
    """It knows nothing of memtrace, and goes on until the last test is over."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_as_it_was(self) -> bool:
        (self.folder / "asked").touch()
        assert self.process.stdout is not None
        return self.process.stdout.readline() == "True\n"

    def ask(self, pid: int, script: str) -> None:
        """The asker's part of ``sys.remote_exec``."""
        (self.folder / "writing").write_text(Path(script).read_text())
        (self.folder / "writing").replace(self.folder / "remote.py")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("program")
    env = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _PROGRAM.format(tests=str(ROOT / "tests"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=folder) as found:
        assert found.stdout is not None and found.stdout.readline() == "ready\n"
        yield Program(found, folder)
        (folder / "end").touch()
        try:
            assert found.wait(60) == 0
        finally:
            found.kill()


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def stand_in_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that is run in the program puts the stand-in in the GPU's place."""
    from memtrace.record import attach

    use = "from memtrace.record import backend as b; b._in_use[1:] = [sys.modules['__main__'].found]"
    monkeypatch.setattr(attach, "SCRIPT", attach.SCRIPT.replace("        begin(", f"        {use}\n        begin("))


def lives_through_attaching(program: Program, tmp_path: Path, capsys: Any, by: str) -> None:
    assert main(["attach", str(program.pid), "--out", str(tmp_path)]) == 0
    assert f"attached to {program.pid} by {by}" in capsys.readouterr().out
    assert main(["attach", str(program.pid)]) == 4
    assert "already" in capsys.readouterr().err
    time.sleep(1.0)
    assert main(["live", str(program.pid), "--once", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["pid"] == program.pid and said["categories"]["lora"] > 0
    assert not program.is_as_it_was()
    assert main(["attach", str(program.pid), "--detach"]) == 0
    assert main(["attach", str(program.pid), "--detach"]) == 4
    assert list((tmp_path / "run" / "memtrace").iterdir()) == []
    assert program.is_as_it_was()


@pytest.mark.skipif(shutil.which("gdb") is None or hasattr(sys, "remote_exec"), reason="gdb, for Python before 3.14")
def test_by_gdb(program: Program, stand_in_inside: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives_through_attaching(program, tmp_path, capsys, "gdb")


def test_by_remote_exec(
    program: Program, stand_in_inside: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Python 3.14's own way; before that, a program that reads what it is to run from a file."""
    if not hasattr(sys, "remote_exec"):
        monkeypatch.setattr(sys, "remote_exec", program.ask, raising=False)
    lives_through_attaching(program, tmp_path, capsys, "sys.remote_exec")


def test_what_can_not_be_recorded_says_why(
    program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memtrace.record import attach

    no_stand_in = "from memtrace.record import backend as b; del b._in_use[1:]"
    script = attach.SCRIPT.replace("        begin(", f"        {no_stand_in}\n        begin(")
    monkeypatch.setattr(attach, "SCRIPT", script)
    monkeypatch.setattr(sys, "remote_exec", program.ask, raising=False)
    assert main(["attach", str(program.pid)]) == 4
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
