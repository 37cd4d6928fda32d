"""Watch a program that was started without memtrace, from now on: memtrace attach PID, then memtrace live PID.

It is asked in the interpreter's own way where both sides run Python 3.14 (sys.remote_exec), else by gdb, which stops
the program for a second or two. --detach ends the recording and leaves the program as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from memtrace.cli.common import option, whole_number
from memtrace.errors import MissingDependencyError, NoAnswerError
from memtrace.units import printable
from memtrace.writing import check_place

_PATIENCE_S = 20.0
_HOW = "start it with memtrace run --live, or with memtrace.record(…, live=True)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    add("pid PID", "the program's process", type=whole_number)
    add("--detach", "end a recording and leave the program as it was")
    add("--out DIR", "folder for recordings (default: .)", type=Path, default=Path())
    add("--stacks", "history to record at once (default: none)", choices=("none", "python", "all"), default="none")
    add("--on-alarm HOW", "print (default), warn, or a command that gets it as JSON", default="print")


def run(args: argparse.Namespace) -> int:
    from memtrace.live import protocol

    pid = args.pid
    try:
        sockets = protocol.folder(make=True)
        scripts = check_place(sockets)
        owner = Path(f"/proc/{pid}").stat().st_uid if Path("/proc/self").exists() else os.getuid()
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        raise NoAnswerError(f"process {pid}: {getattr(error, 'strerror', None) or printable(str(error))}") from None
    if owner != os.getuid():
        raise NoAnswerError(f"process {pid} belongs to another user")
    place = sockets / f"{pid}.sock"
    if args.detach:
        return _detach(place, pid)
    if place in protocol.sockets():
        raise NoAnswerError(f"process {pid} can be watched already: memtrace live {pid}")
    from memtrace.record.attach import SCRIPT

    script, failed = scripts / f"{pid}.py", scripts / f"{pid}.failed"
    try:
        failed.unlink(missing_ok=True)
        script.write_text(
            SCRIPT.format(
                root=str(Path(__file__).parents[2]), folder=str(args.out.absolute()), sockets=str(sockets),
                stacks=args.stacks, on_alarm=args.on_alarm, failed=str(failed),
            )
        )  # fmt: skip
        how = inject(pid, script)
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if failed.exists():
                time.sleep(0.1)  # it is being written
                raise NoAnswerError(
                    f"process {pid} can't be recorded: {printable(failed.read_text(errors='replace')[:500])}"
                )
            if place.exists():
                print(f"attached to {pid} {how}; next: memtrace live {pid}, at last memtrace attach {pid} --detach")
                return 0
            time.sleep(0.05)
    finally:
        for each in (script, failed):
            with contextlib.suppress(OSError):
                each.unlink()
    raise NoAnswerError(
        f"process {pid} was asked and has not begun within {_PATIENCE_S:.0f} s: it does not use the GPU yet, or its "
        "main thread is in a call that does not return"
    )


def inject(pid: int, script: Path) -> str:
    """Have a process's interpreter run a script; returns by what. Raises MissingDependencyError where nothing can."""
    ask = getattr(sys, "remote_exec", None)
    why = "this Python has no sys.remote_exec (3.14 has)"
    if ask is not None:
        try:
            ask(pid, str(script))
            return "by sys.remote_exec"
        except (OSError, RuntimeError) as error:
            why = f"sys.remote_exec: {error}"
    if shutil.which("gdb") is None:
        raise MissingDependencyError(f"can't attach to {pid}: {why}, and gdb is not installed here; {_HOW}")
    code = f"exec(compile(open({str(script)!r}).read(), 'memtrace attach', 'exec'), {{}})"
    text = code.replace("\\", "\\\\").replace('"', '\\"')
    # Only a system call and a queue's short lock are used, so that it does not matter where the program was stopped.
    steps = [
        *(f"sharedlibrary {name}" for name in ("libpython", "libc[.-]", "ld-musl")),
        "set $memtrace = (char *) ((void *(*)(void *, long, int, int, int, long)) mmap)(0, 4096, 3, 0x22, -1, 0)",
        f'set {{char[{len(code.encode()) + 1}]}} $memtrace = "{text}"',
        "print ((int (*)(void *, void *)) Py_AddPendingCall)((void *) &PyRun_SimpleString, (void *) $memtrace)",
    ]
    # The program stands still meanwhile: no symbols of PyTorch's libraries are read, which takes seconds.
    command = ["gdb", "-nx", "-batch", "-iex", "set auto-load no", "-iex", "set auto-solib-add off", "-p", str(pid)]
    for step in steps:
        command += ["-ex", step]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"can't attach to {pid}: gdb did not come to an end; {_HOW}") from None
    if "$1 = 0" not in done.stdout:
        said = (done.stderr.strip().splitlines() or ["gdb said nothing"])[-1]
        if said.startswith("No symbol"):
            raise NoAnswerError(
                f"can't attach to {pid}: no Python that can be asked runs there (gdb: {printable(said)[:80]})"
            )
        raise NoAnswerError(f"can't attach to {pid}: {why}; gdb: {printable(said)[:200]}; {_HOW}")
    return "by gdb"


def _detach(place: Path, pid: int) -> int:
    from memtrace.live.watch import Watch

    watch = Watch(place, looks=False)
    watch.order("detach")
    end = time.monotonic() + _PATIENCE_S
    while watch.poll(0.2) and time.monotonic() < end:
        continue
    wrong = next((str(answer["error"]) for answer in watch.state.take_answers() if "error" in answer), None)
    watch.close()
    if wrong is not None:
        raise NoAnswerError(f"process {pid}: {printable(wrong)}")
    while place.exists() and time.monotonic() < end:
        time.sleep(0.05)
    if place.exists():
        raise NoAnswerError(f"process {pid} has not ended its recording within {_PATIENCE_S:.0f} s")
    print(f"detached from {pid}")
    return 0
