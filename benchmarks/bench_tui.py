"""How the terminal browser feels: start-up, keys and memory, measured from outside in a pseudo-terminal.

The browser runs as a user runs it, in a terminal of its own; this script presses keys and watches the output. From a
key to the first byte of output is the reaction; to the last byte before the terminal falls silent is the repaint.
``memtrace report`` on the same file, timed in the same run, is the reference for start-up and memory: of a file that
was never opened before, with an empty cache on both sides, and of one that was. ``--link`` reads
no faster than so many bytes a second, as over a slow connection, whose delay is not in the figures.

    python benchmarks/bench_tui.py FILE [--size 160x48] [--rounds 2] [--link 1000000] [--json]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import resource
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

# An installed package has its bytecode cached; so do both commands here, whatever this shell says.
_SCRATCH = tempfile.mkdtemp(prefix="bench_tui.")
ENVIRONMENT = {**os.environ, "PYTHONPYCACHEPREFIX": _SCRATCH, "XDG_CONFIG_HOME": _SCRATCH}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
SILENCE_S = 0.04  # the browser draws at 60 Hz; two frames without output end a repaint
KEYS = {
    "LEFT": "\x1b[D", "RIGHT": "\x1b[C", "UP": "\x1b[A", "DOWN": "\x1b[B", "PGDN": "\x1b[6~", "PGUP": "\x1b[5~",
    "ENTER": "\r", "ESC": "\x1b", "HOME": "\x1b[H", "END": "\x1b[F", "TAB": "\t",
}  # fmt: skip
# A tour of all screens; each word is one key.
TOUR = " ".join(
    (
        "1 DOWN DOWN , . [ ] { } P p",
        "2 LEFT LEFT RIGHT + + LEFT RIGHT - - m LEFT m z 0 [ ] p",
        "3 LEFT RIGHT UP DOWN c c c c c s s s s w w ENTER RIGHT LEFT DOWN UP n n + + - - ESC , . [ ] p",
        "4 DOWN DOWN PGDN PGUP END HOME s s r g g g g g g g g a a [ ] p",
        "5 DOWN DOWN RIGHT LEFT v v f f i RIGHT DOWN i [ ] p",
        "6 DOWN DOWN PGDN PGUP",
        "8 DOWN DOWN UP PGDN PGUP b b END HOME p",
        "? ESC t t t t 1 2 3 4 5 6 8 1",
    )
).split()


class Terminal:
    """A process in a pseudo-terminal of a given size."""

    def __init__(self, command: list[str], columns: int, rows: int, link_bytes_s: int = 0) -> None:
        self.link_bytes_s = link_bytes_s
        self.link_free = 0.0  # when what was read so far has gone through the link
        environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.start = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, environment)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)
        self.text = b""
        self.sent_bytes = 0  # to the terminal, since the start

    def read(self, timeout_s: float) -> bytes:
        """What comes within the time, b"" for nothing."""
        ready, _, _ = select.select([self.fd], [], [], timeout_s)
        if not ready:
            return b""
        try:
            data = os.read(self.fd, 1 << 12 if self.link_bytes_s else 1 << 16)
        except OSError:
            return b""
        if self.link_bytes_s:
            now = time.perf_counter()
            self.link_free = max(self.link_free, now) + len(data) / self.link_bytes_s
            time.sleep(self.link_free - now)
        self.text = (self.text + data)[-(1 << 20) :]
        self.sent_bytes += len(data)
        return data

    def wait_for(self, words: bytes, timeout_s: float = 120) -> float:
        """Seconds since the start until the words were drawn."""
        while words not in self.text:
            if time.perf_counter() - self.start > timeout_s:
                raise SystemExit(f"the browser never drew {words!r}")
            self.read(1.0)
        return time.perf_counter() - self.start

    def drain(self, silence_s: float) -> None:
        """Read until nothing comes for a while."""
        while self.read(silence_s):
            pass

    def press(self, key: str, timeout_s: float = 2.0) -> tuple[float, float] | None:
        """(seconds to the first byte, to the last); None if the key drew nothing."""
        self.drain(0.02)
        sent = time.perf_counter()
        os.write(self.fd, KEYS.get(key, key).encode())
        if not self.read(timeout_s if key not in ("LEFT", "HOME", "UP") else 0.3):
            return None
        first = last = time.perf_counter() - sent
        while self.read(SILENCE_S):
            last = time.perf_counter() - sent
        return first, last

    def cpu_s(self) -> float:
        """Processor seconds so far; unlike the clock, other processes of the machine don't add to it."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Highest resident memory so far."""
        for row in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) * 1024
        return 0

    def close(self) -> None:
        """Leave by the quit key."""
        os.write(self.fd, b"q")
        self.drain(0.5)
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def report_reference(file: str) -> tuple[float, int, float]:
    """(seconds, highest resident bytes, processor seconds) of ``memtrace report --json``."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "memtrace", "report", file, "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT) as run:
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"memtrace report failed ({run.returncode})")
    return time.perf_counter() - started, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile."""
    return sorted(values)[max(round(share * len(values) + 0.5) - 1, 0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--size", default="160x48")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--link", type=int, default=0, metavar="BYTES_S")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    columns, rows = map(int, args.size.split("x"))

    new_reports, pictures, new_screens = [], [], []
    for _ in range(3):
        ENVIRONMENT["MEMTRACE_CACHE"] = tempfile.mkdtemp(dir=_SCRATCH)
        new_reports.append(report_reference(args.file)[0])
        ENVIRONMENT["MEMTRACE_CACHE"] = tempfile.mkdtemp(dir=_SCRATCH)
        terminal = Terminal([sys.executable, "-m", "memtrace", "browse", args.file], columns, rows, args.link)
        pictures.append(terminal.wait_for(b"the file ends with"))
        new_screens.append(terminal.wait_for(b"base weights"))
        terminal.drain(0.5)
        terminal.close()
    references = [report_reference(args.file) for _ in range(3)]
    report_s, report_bytes = min(r[0] for r in references), min(r[1] for r in references)
    starts, start_cpu, report_cpu = [], [], min(r[2] for r in references)
    for number in range(3):
        terminal = Terminal([sys.executable, "-m", "memtrace", "browse", args.file], columns, rows, args.link)
        starts.append(terminal.wait_for(b"base weights"))
        start_cpu.append(terminal.cpu_s())
        if number < 2:
            terminal.drain(0.5)
            terminal.close()
    terminal.drain(4.0)  # let the findings, which are worked out in the background, come first
    slowest: list[tuple[float, str]] = []
    repaints: list[float] = []
    firsts: list[float] = []
    sent: list[float] = []
    cpu_before, screen = terminal.cpu_s(), "1"
    for _ in range(args.rounds):
        for key in TOUR:
            screen = key if key.isdigit() and key != "0" else screen
            before = terminal.sent_bytes
            times = terminal.press(key)
            if times is not None:
                sent.append(terminal.sent_bytes - before)
                firsts.append(times[0])
                repaints.append(times[1])
                slowest.append((round(times[1] * 1e3), f"{screen} {key}"))
    memory, cpu = terminal.memory_bytes(), terminal.cpu_s() - cpu_before
    terminal.close()
    shutil.rmtree(_SCRATCH, ignore_errors=True)
    result = {
        "file": args.file,
        "size": args.size,
        "link_bytes_s": args.link,
        "load_average": [round(part, 1) for part in os.getloadavg()],
        "new_file_report_s": round(statistics.median(new_reports), 3),
        "new_file_picture_s": round(statistics.median(pictures), 3),
        "new_file_picture_per_report": round(statistics.median(pictures) / statistics.median(new_reports), 3),
        "new_file_overview_per_report": round(statistics.median(new_screens) / statistics.median(new_reports), 3),
        "first_screen_s": round(min(starts), 3),
        "report_s": round(report_s, 3),
        "first_screen_per_report": round(min(starts) / report_s, 3),
        "first_screen_cpu_per_report": round(min(start_cpu) / report_cpu, 3),
        "keys": len(repaints),
        "reaction_median_ms": round(statistics.median(firsts) * 1e3, 1),
        "repaint_median_ms": round(statistics.median(repaints) * 1e3, 1),
        "repaint_p95_ms": round(percentile(repaints, 0.95) * 1e3, 1),
        "sent_median_bytes": round(statistics.median(sent)),
        "sent_p95_bytes": round(percentile(sent, 0.95)),
        "cpu_per_key_ms": round(cpu / max(len(repaints), 1) * 1e3, 1),
        "repaint_max_ms": round(max(repaints) * 1e3, 1),
        "memory_bytes": memory,
        "report_memory_bytes": report_bytes,
        "memory_per_report": round(memory / report_bytes, 3),
        "slowest_keys_ms": [f"{screen_and_key}: {ms}" for ms, screen_and_key in sorted(slowest, reverse=True)[:12]],
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<26} {value}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
