"""``memtrace live`` on a GPU: the same losses, the same memory, watchers that come, hang and die.

    python3 tests/gpu/check_live.py OUT.json [--steps 1500]

The seeded program runs alone and live, in processes of its own; what a step costs is in check_live_cost.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import memtrace  # noqa: E402
from memtrace.live import protocol  # noqa: E402

WARM_UP = 5


class Small:
    """Twelve layers of 256 and a batch of 128 tokens: a step is nothing but launches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.model = nn.Sequential(encoder, nn.Linear(256, 512)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, rows: int = 2) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(rows, 64, 256, device="cuda")).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def warm_up(small: Small) -> None:
    for _ in range(WARM_UP):
        small.step()


def watcher() -> subprocess.Popen[str]:
    """Watches the socket that is written to its standard input."""
    command = [sys.executable, str(HERE), "--watch"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def be_watched(by: subprocess.Popen[str], recorder: Any, small: Small) -> None:
    """Until the watcher is let in, the program works on."""
    assert by.stdin is not None
    by.stdin.write(f"{recorder.live.place}\n")
    by.stdin.flush()
    while not recorder.live._watchers:
        small.step()


def own_seconds(folder: Path, steps: int = 300) -> dict[str, Any]:
    """Seconds of memtrace's own code in the training thread, measured directly: hooks, counters, phases."""
    small = Small()
    warm_up(small)
    before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    with memtrace.record(folder / "own.pickle", stacks="none", live=True, force=True) as recording:
        warm_up(small)
        found = watcher()
        be_watched(found, recording.recorder, small)
        warm_up(small)
        after = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        spent = 0.0
        recorder = recording.recorder

        def wrapped(function: Any) -> Any:
            def call(*args: Any) -> Any:
                nonlocal spent
                began = time.perf_counter()
                result = function(*args)
                spent += time.perf_counter() - began
                return result

            return call

        recorder.steps.note, recorder.live.stepped = wrapped(recorder.steps.note), wrapped(recorder.live.stepped)
        recorder.live.entered = wrapped(recorder.live.entered)
        clock = time.pthread_getcpuclockid(recorder.live._thread.ident)
        torch.cuda.synchronize()
        began, thread_began = time.perf_counter(), time.clock_gettime(clock)
        for _ in range(steps):
            small.step()
        torch.cuda.synchronize()
        whole, thread_s = time.perf_counter() - began, time.clock_gettime(clock) - thread_began
        found.kill()
        found.wait()
    return {
        "own_us_a_step": 1e6 * spent / steps, "step_ms": 1e3 * whole / steps, "share": spent / whole,
        "other_thread_share": thread_s / whole,
        "device_bytes_taken": before[0] - after[0], "reserved_bytes_taken": after[1] - before[1],
    }  # fmt: skip


def program(steps: int) -> None:
    """The seeded program that runs alone and live: prints its losses and its memory."""
    small = Small()
    losses = [float(small.step(2 + step % 3)).hex() for step in range(steps)]
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    names = ("requested_bytes", "allocated_bytes", "reserved_bytes", "active_bytes")
    peaks = {name: stats[f"{name}.all.peak"] for name in names}
    print(json.dumps({"losses": losses, "peaks": peaks}), flush=True)


def run_program(steps: int, live: bool, bothered: bool) -> tuple[dict[str, Any], dict[str, int]]:
    own = [str(HERE), "--program", str(steps)]
    with tempfile.TemporaryDirectory() as out:
        under = ["-m", "memtrace", "run", "--live", "--stacks", "none", "--out", out] if live else []
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        running = subprocess.Popen([sys.executable, *under, *own], stdout=subprocess.PIPE, env=env)
        counts = bother(running) if bothered else {}
        assert running.stdout is not None
        said = running.stdout.read()
        code = running.wait()
    return json.loads(said) | {"code": code, "sockets_left": len(protocol.sockets())}, counts


_HANGS = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
print(1, flush=True)
time.sleep(99)
"""


def bother(running: subprocess.Popen[bytes]) -> dict[str, int]:
    """A hundred watchers: a third hang, a third are killed, a third shout, ask and go."""
    counts = {"hung": 0, "killed": 0, "asked": 0}
    place = protocol.folder(make=True) / f"{running.pid}.sock"
    while not place.exists() and running.poll() is None:
        time.sleep(0.05)
    children = []
    for number in range(100):
        if running.poll() is not None:
            break
        if number % 3 < 2:
            child = subprocess.Popen([sys.executable, "-S", "-c", _HANGS, str(place)], stdout=subprocess.PIPE,
                                     stderr=subprocess.DEVNULL)  # fmt: skip
            assert child.stdout is not None
            came = child.stdout.readline() == b"1\n"
            if number % 3 == 0:
                child.kill()
                child.wait()
                counts["killed"] += came
            else:
                children.append(child)
                counts["hung"] += came
                if len(children) > 10:  # sixteen are let in at a time
                    first = children.pop(0)
                    first.kill()
                    first.wait()
        else:
            with contextlib.suppress(OSError):
                asks = protocol.connect(place)
                asks.sendall(b'{"do":"blocks","at":"step"}\n{"do":"phase","name":"load"}\n')
                asks.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    asks.recv(1 << 16)
                asks.sendall(b"\xff" * 8192)
                asks.close()
                counts["asked"] += 1
    for child in children:
        child.kill()
        child.wait()
    return counts


def killed_program() -> dict[str, Any]:
    """SIGKILL while it is watched; the next one with watchers must work, and nothing may be left."""
    with tempfile.TemporaryDirectory() as out:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "memtrace", "run", "--live", "--out", out, str(HERE), "--program", "100000"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
        place = protocol.folder(make=True) / f"{running.pid}.sock"
        while not place.exists():
            time.sleep(0.05)
        time.sleep(4)
        look = [sys.executable, "-m", "memtrace", "live", str(running.pid), "--json", "--once"]
        began = time.monotonic()
        said = subprocess.run(look, capture_output=True, env=env, text=True)
        took = time.monotonic() - began
        running.send_signal(signal.SIGKILL)
        running.wait()
        after = subprocess.run(look, capture_output=True, env=env, text=True)
    answer = json.loads(said.stdout) if said.returncode == 0 else {"error": said.stderr[-500:]}
    kept = {
        key: answer.get(key) for key in ("reserved_bytes", "categories", "looked_at", "step", "headroom_bytes", "now")
    }
    kept["top"] = (answer.get("top") or [])[:3]
    return {
        "seen": kept,
        "look_s": took,
        "after_kill_code": after.returncode,
        "left": [each.name for each in place.parent.iterdir()],
    }


def blocks_cost(folder: Path) -> dict[str, Any]:
    """Milliseconds for which looking at the blocks stops the program, with a full ring of history and without any."""
    found = {}
    for stacks in ("none", "python"):
        small = Small()
        with memtrace.record(
            folder / "ring.pickle", stacks=stacks, live=True, force=True, max_entries=200_000
        ) as recording:
            for _ in range(60):
                small.step()
            torch.cuda.synchronize()
            recorder = recording.recorder
            times = []
            for _ in range(5):
                began = time.perf_counter()
                raw = recorder.backend.blocks()
                times.append(1e3 * (time.perf_counter() - began))
            blocks = [block for segment in raw["segments"] for block in segment["blocks"]]
            traces = raw.get("device_traces", [])
            found[stacks] = {
                "ms": statistics.median(times), "blocks": len(blocks), "events": sum(map(len, traces)),
                "with_frames": sum(bool(block.get("frames")) for block in blocks), "keys": sorted(raw),
            }  # fmt: skip
            began = time.perf_counter()
            recorder.backend.snapshot()
            found[stacks]["whole_snapshot_ms"] = 1e3 * (time.perf_counter() - began)
            recorder._stop_history()
    return found


def watch() -> None:
    from memtrace.live.watch import Watch

    found = Watch(Path(sys.stdin.readline().strip()))
    while found.poll(0.2):
        found.state.view()


def same(steps: int) -> dict[str, Any]:
    """Twice alone and once live, with a hundred watchers: the losses bit by bit, and the allocator's peaks."""
    with ThreadPoolExecutor() as pool:
        plain = [pool.submit(run_program, steps, live=False, bothered=False) for _ in range(2)]
        live, counts = run_program(steps, live=True, bothered=True)
        alone, again = (each.result()[0] for each in plain)
    return {
        "steps": len(alone["losses"]), "repeatable": alone["losses"] == again["losses"],
        "peaks_repeatable": alone["peaks"] == again["peaks"],
        "losses_equal": alone["losses"] == live["losses"], "peaks_equal": alone["peaks"] == live["peaks"],
        "peaks": [run["peaks"] for run in (alone, again, live)],
        "codes": [alone["code"], live["code"]], "watchers": counts, "sockets_left": live["sockets_left"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?")
    parser.add_argument("--parts", default="same,killed,own,blocks")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--program", type=int)
    parser.add_argument("--watch", action="store_true")
    args = parser.parse_args()
    if args.program is not None:
        program(args.program)
    elif args.watch:
        watch()
    else:
        measure(Path(args.out), args.parts.split(","), args.steps)


def measure(out: Path, parts: list[str], steps: int) -> None:
    answer: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {
            "same": lambda: same(steps),
            "killed": killed_program,
            "own": lambda: own_seconds(folder),
            "blocks": lambda: blocks_cost(folder),
        }
        for part in parts:
            began = time.monotonic()
            try:
                answer[part] = jobs[part]()
            except Exception as error:
                answer[part] = {"failed": f"{type(error).__name__}: {error}"}
            answer[f"{part}_s"] = round(time.monotonic() - began, 1)
            print(part, json.dumps(answer[part])[:1500], flush=True)
            out.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
