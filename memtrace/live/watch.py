"""A connection to a program that runs: finding it, asking it, reading what it was asked to look at."""

from __future__ import annotations

import contextlib
import shutil
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from memtrace.analysis import Analysis, analyse
from memtrace.answers.report import report
from memtrace.errors import MemtraceError, NoAnswerError
from memtrace.history.timeline import build
from memtrace.live import protocol
from memtrace.live.state import LiveState
from memtrace.snapshot.load import load

_ASK_EVERY_S = 10.0
_PATIENCE_S = 15.0  # with a moment that does not come: a program that only evaluates has no backward pass
_OWNERS_EVERY_S = 15.0
_SEEN = "looked at while the program ran: blocks, their labels and stacks, without a history"


class Watched(Protocol):
    """A program, or a recording that is played as if it ran."""

    state: LiveState

    def poll(self, timeout_s: float) -> bool:
        """Take in what came within that time; false once there will be no more."""

    def order(self, do: str, **details: Any) -> None:
        """Ask for something; the answer comes into ``state.done``."""

    def close(self) -> None:
        """Stop watching."""


class Watch:
    """Watches the program behind a socket. With ``looks`` it asks by itself what the blocks are, now and then."""

    def __init__(self, place: Path, looks: bool = True) -> None:
        """Raises NoAnswerError where nobody answers."""
        self.place, self.looks = place, looks
        self.state = LiveState(str(place))
        self._reader = protocol.LineReader(protocol.MAX_LINE_BYTES)
        self._asked_at, self._waits_for, self._moment = 0.0, "", "step"
        self._owners_at = self._again_at = 0.0
        try:
            self._socket = protocol.connect(place)
            deadline = time.monotonic() + 5
            while not self.state.about and self.poll(0.5) and time.monotonic() < deadline:
                continue
        except OSError as error:
            raise NoAnswerError(f"{place}: {error.strerror or error}; nobody can be watched there") from None
        if not self.state.about:
            self.close()
            raise NoAnswerError(f"{place}: the program does not answer; is it stopped?")
        if self.state.about.get("version") != protocol.VERSION:
            self.close()
            raise NoAnswerError(f"{place}: that program runs another version of memtrace")

    def poll(self, timeout_s: float) -> bool:
        if self._again_at and time.monotonic() >= self._again_at:
            self.ask_now(self._waits_for or "now")
        if self.looks and self.state.about:
            self._ask()
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(1 << 18)
            messages = self._reader.feed(data)
        except TimeoutError:
            return True
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            self.state.take(message)
            if message.get("type") == "blocks" and "file" in message:
                self._look(message)
            elif type(message.get("wait_s")) is float:  # so that looking costs the program next to nothing
                self._again_at = time.monotonic() + message["wait_s"]
        self.state.ended |= not data
        return not self.state.ended

    def order(self, do: str, **details: Any) -> None:
        with contextlib.suppress(OSError):
            self._socket.settimeout(2)
            self._socket.sendall(protocol.encode({"do": do} | details))

    def close(self) -> None:
        self._socket.close()

    def ask_now(self, moment: str) -> None:
        """Have the blocks looked at, whatever the turn."""
        self._asked_at, self._waits_for, self._again_at = time.monotonic(), moment, 0.0
        self.order("blocks", at=moment)

    def _ask(self) -> None:
        now = time.monotonic()
        if self._waits_for and self._waits_for != "now" and now - self._asked_at > _PATIENCE_S:
            self.ask_now("now")
        elif now - self._asked_at > _ASK_EVERY_S:
            self._moment = "step" if self._moment == "backward" else "backward"
            self.ask_now(self._moment)
        if now - self._owners_at > _OWNERS_EVERY_S:
            self._owners_at = now
            self.state.outside = owners(self.state.about["pid"] or 0)

    def _look(self, message: protocol.Message) -> None:
        """Only the one file that the program at this socket writes is ever read."""
        self._waits_for = ""
        place = protocol.sample_place(self.place)
        try:
            if not stat.S_ISREG(place.lstat().st_mode):  # a pipe would never end
                return
            analysis = analysed(place, self.state.about["device"] or 0)
        except (OSError, MemtraceError):  # replaced or removed meanwhile
            return
        moment, step = str(message.get("at")), message.get("step")
        seen = replace(report(analysis, analysis.at("end")), warnings=(_SEEN,))
        self.state.look(analysis, seen, moment, step if type(step) is int else -1)


def analysed(path: Path, device: int) -> Analysis:
    """A file's analysis, of that device. Raises MemtraceError."""
    snapshot = load(path)
    found = next((each for each in snapshot.devices if each.device == device), snapshot.devices[0])
    return analyse(build(snapshot, found))


def find(wanted: str | None) -> list[Path]:
    """Sockets of the programs meant: a pid, a socket's path, or (None) all there are. Raises NoAnswerError for none."""
    if wanted is not None and not wanted.isdigit():
        return [Path(wanted)]
    places = [place for place in protocol.sockets() if wanted in (None, place.stem)]
    if not places:
        who = f"no program {wanted}" if wanted else "no program of yours"
        raise NoAnswerError(f"{who} can be watched; start it with memtrace run --live, or memtrace attach PID")
    return places


def owners(pid: int) -> list[dict[str, Any]]:
    """Other processes on the program's GPUs as nvidia-smi tells them: pid, name, bytes. Empty where it can't tell."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
        "--format=csv,noheader,nounits",
    ]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",", 3)] for line in lines]
    rows = [row for row in rows if len(row) == 4 and row[1].isdigit() and row[2].isdigit()]
    here = {row[0] for row in rows if int(row[1]) == pid}
    return [
        {"pid": int(row[1]), "name": row[3][:80], "bytes": int(row[2]) << 20}
        for row in rows
        if row[0] in here and int(row[1]) != pid
    ]
