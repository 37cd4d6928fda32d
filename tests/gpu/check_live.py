"""``memtrace live`` on a GPU: the same losses, the same memory, what a step costs, watchers that come, hang and die.

    python3 tests/gpu/check_live.py OUT.json [--blocks 40] [--steps 600]

Cost: blocks of steps of a small, launch-bound model, interleaved: alone, live, live with a watcher that looks at the
blocks; each block's median is compared with that of its neighbour alone, with a 95 % interval by bootstrap. The rest
runs the same seeded program alone and live, in processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
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

BLOCK, WARM_UP = 30, 4


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


def median_step_s(small: Small, steps: int = BLOCK) -> float:
    """The median of a block's steps: on a shared machine a mean is its neighbours' doing. What the other thread takes
    is measured by :func:`own_seconds`."""
    for _ in range(WARM_UP):
        small.step()
    found = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        small.step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def watcher(place: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE), "--watch", str(place), "--seconds", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def timed(small: Small, how: str, folder: Path) -> float:
    if how == "alone":
        return median_step_s(small)
    stacks = "python" if how.startswith("history") else "none"
    live = how != "history"
    with memtrace.record(
        folder / f"{how}.pickle", stacks=stacks, live=live, force=True, max_entries=20_000
    ) as recording:
        found = None
        if "watched" in how:
            found = watcher(recording.recorder.live.place, 60)
            time.sleep(1.0)  # until it has started and looked once
        seconds = median_step_s(small)
        if found is not None:
            found.kill()
            found.wait()
        recording.recorder._stop_history()  # nothing is to be written
    return seconds


def interval(values: list[float], draws: int = 4000) -> tuple[float, float]:
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def cost(folder: Path, blocks: int, base: str, others: tuple[str, ...]) -> dict[str, Any]:
    small = Small()
    for _ in range(3):
        median_step_s(small)
    ratios: dict[str, list[float]] = {how: [] for how in others}
    alone: list[float] = []
    for number in range(blocks):
        order = [base, *(how for how in others if "watched" not in how or number % 2 == 0)]
        random.Random(number).shuffle(order)
        seconds = {how: timed(small, how, folder) for how in order}
        alone.append(seconds[base])
        for how in seconds.keys() - {base}:
            ratios[how].append(seconds[how] / seconds[base])
    return {
        "base": base, "blocks": blocks, "steps_a_block": BLOCK, "step_ms": 1e3 * statistics.median(alone),
        **{how: {"mean_ratio": statistics.fmean(found), "median_ratio": statistics.median(found),
                 "95_percent": interval(found)} for how, found in ratios.items()},
    }  # fmt: skip


def own_seconds(folder: Path, steps: int = 300) -> dict[str, Any]:
    """Seconds of memtrace's own code in the training thread, measured directly: hooks, counters, phases."""
    small = Small()
    median_step_s(small)
    before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    with memtrace.record(folder / "own.pickle", stacks="none", live=True, force=True) as recording:
        for _ in range(20):
            small.step()
        found = watcher(recording.recorder.live.place, 60)
        time.sleep(2)
        for _ in range(20):
            small.step()
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
        recorder.log.on_enter = wrapped(recorder.log.on_enter)
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


def watch(place: str, seconds: float) -> None:
    from memtrace.live.watch import Watch

    found, end = Watch(Path(place)), time.monotonic() + seconds
    while time.monotonic() < end and found.poll(0.2):
        found.state.view()


def same(steps: int) -> dict[str, Any]:
    """Twice alone and once live, with a hundred watchers: the losses bit by bit, and the allocator's peaks."""
    with ThreadPoolExecutor() as pool:
        plain = [pool.submit(run_program, steps, live=False, bothered=False) for _ in range(2)]
        live, counts = run_program(steps, live=True, bothered=True)
        alone, again = (each.result()[0] for each in plain)
    return {
        "steps": len(alone["losses"]), "repeatable": alone["losses"] == again["losses"],
        "losses_equal": alone["losses"] == live["losses"], "peaks_equal": alone["peaks"] == live["peaks"],
        "codes": [alone["code"], live["code"]], "watchers": counts, "sockets_left": live["sockets_left"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?")
    parser.add_argument("--parts", default="same,killed,own,blocks,cost,history")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--program", type=int)
    parser.add_argument("--watch")
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    if args.program is not None:
        program(args.program)
    elif args.watch is not None:
        watch(args.watch, args.seconds)
    else:
        measure(Path(args.out), args.parts.split(","), args.blocks, args.steps)


def measure(out: Path, parts: list[str], blocks: int, steps: int) -> None:
    answer: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {
            "same": lambda: same(steps),
            "killed": killed_program,
            "own": lambda: own_seconds(folder),
            "blocks": lambda: blocks_cost(folder),
            "cost": lambda: cost(folder, blocks, "alone", ("live", "live watched")),
            "history": lambda: cost(folder, blocks, "history", ("history live",)),
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
