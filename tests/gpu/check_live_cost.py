"""What ``memtrace live`` costs a step of a small, launch-bound model: many short units, each beside its neighbours.

    python3 tests/gpu/check_live_cost.py OUT.json [--seconds 220] [--device cuda] [--steps 2]

A unit is one step that is not timed and two that are. Units come in sixes: live, plain and toggled in a random order,
then in the reverse one, so that what drifts over half a second drops out. Live is all of it: hooks, the model watched,
counters, the thread of its own, a watcher connected. Toggled is the control: everything is switched on and off again
before the unit, which is then plain. A unit's length is compared with that of its own six, as the logarithm of a ratio.

The thread's clock stands still while no unit is live, and the watcher asks a third as often as usual, so that work of
once a second or once in ten falls into live units only, and as often as in a program that is live all the time. Units
with such work are rare and long; a trimmed mean would leave them out. So units are told apart by what happened in them
(nothing; work of the second; a look at the blocks): each kind has a mean without its highest and lowest fifth, and
these are weighted by how often the kind came. Intervals are 95 %, by bootstrap over the sixes. The trimmed means of all
units, of processor time too, stand beside.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402

import memtrace  # noqa: E402
from memtrace.record import backend, steplog  # noqa: E402
from memtrace.record import live as live_module  # noqa: E402

KINDS = ("live", "plain", "toggled")
WORK = ("nothing", "second", "look")
DRAWS = 2000


class Watched(nn.Sequential):
    """A class of its own, so that following it leaves the plain model's class, and what Python caches of it, alone."""


class Small:
    """Twelve layers of 256 and a batch of 128 tokens: a step is nothing but launches. On a CPU: smaller still."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        width, layers = (256, 12) if device == "cuda" else (64, 6)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        parts = encoder.to(device), nn.Linear(width, 2 * width).to(device)
        self.plain, self.watched = nn.Sequential(*parts), Watched(*parts)
        self.model: nn.Module = self.plain
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-4)
        self.given = (2, 64, width) if device == "cuda" else (2, 16, width)

    def step(self) -> None:
        self.model(torch.randn(*self.given, device=self.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class Clock:
    """A clock that runs while it is on, for a thread that sleeps otherwise: whoever runs the steps wakes it."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self._gone = self._began = 0.0
        self._is_on = False
        self._due = math.inf

    def now(self) -> float:
        return self._gone + (time.perf_counter() - self._began if self._is_on else 0.0)

    def start(self) -> None:
        self._began = time.perf_counter()
        self._is_on = True

    def stop(self) -> None:
        self._gone = self.now()
        self._is_on = False

    def stepped(self) -> None:
        if self._is_on and self.now() >= self._due:
            self.wake.set()

    def select(self, readers: Any, writers: Any, errors: Any, timeout_s: float) -> Any:
        """``select.select`` by this clock; what is there to read is read when the time is up."""
        self._due = self.now() + timeout_s
        self.wake.wait()
        self.wake.clear()
        self._due = math.inf
        return select.select(readers, writers, errors, 0)


class Switch:
    """Switches all that is live on and off in microseconds; what is switched on is as warm as in a long run."""

    def __init__(self, recorder: Any, small: Small, clock: Clock) -> None:
        self.small, self.clock = small, clock
        self.hooks = recorder.hooks
        self.of_optimizers = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
        self.kept = [dict(each) for each in self.of_optimizers]
        assert all(self.kept), "the program is followed"

    def on(self) -> None:
        torch.autograd.backward = self.hooks._backward[1]
        for hooks, kept in zip(self.of_optimizers, self.kept, strict=True):
            hooks.update(kept)
        self.small.model = self.small.watched
        self.clock.start()

    def off(self) -> None:
        self.clock.stop()
        torch.autograd.backward = self.hooks._backward[0]
        for hooks in self.of_optimizers:
            hooks.clear()
        self.small.model = self.small.plain


class Seen:
    """Notes what the server did, and when."""

    def __init__(self, server: Any) -> None:
        self.spans: list[tuple[float, float, str]] = []
        self.spent: dict[str, list[float]] = {name: [] for name in ("_second", "_look", "_hand_out")}
        for name, kind in (("_second", "second"), ("_look", "look"), ("_hand_out", "look")):
            setattr(server, name, self._noted(name, kind, getattr(server, name)))

    def _noted(self, name: str, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began, worked = time.perf_counter(), time.thread_time()
            try:
                return function(*args)
            finally:
                self.spans.append((began, time.perf_counter(), kind))
                self.spent[name].append(time.thread_time() - worked)

        return call

    def during(self, began: float, ended: float) -> str:
        """The heaviest kind of work that overlapped that time; what is older than that is forgotten."""
        self.spans = [span for span in self.spans if span[1] >= began]
        kinds = {span[2] for span in self.spans if span[0] <= ended}
        return max(kinds, key=WORK.index, default="nothing")


def unit(small: Small, clock: Clock, steps: int) -> tuple[float, float, float]:
    """(when it began, seconds, seconds of the processor) of some steps; nothing is waited for between them."""
    small.step()
    small.wait()
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        clock.stepped()
        small.step()
    small.wait()
    return began, time.perf_counter() - began, time.process_time() - worked


def measure(folder: Path, seconds: float, device: str, steps: int) -> dict[str, Any]:
    small, clock, dice = Small(device), Clock(), random.Random(0)
    watcher = subprocess.Popen(
        [sys.executable, str(HERE), "--watch"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with memtrace.record(folder / "cost.pickle", stacks="none", live=True, force=True) as recording:
        recorder = recording.recorder
        assert watcher.stdin is not None
        watcher.stdin.write(f"{recorder.live.place}\n")
        watcher.stdin.close()
        recorder.hooks.watch(small.watched)
        small.model = small.watched
        while not recorder.live._watchers:
            small.step()
        for _ in range(100 if device == "cuda" else 20):
            small.step()
        server, seen, switch = recorder.live, Seen(recorder.live), Switch(recorder, small, clock)
        live_module.time = steplog.time = SimpleNamespace(monotonic=clock.now, perf_counter=clock.now)  # type: ignore[assignment]
        live_module.select = SimpleNamespace(select=clock.select)  # type: ignore[assignment]
        server._last_second = server._own_at = server._judge_at = server._not_before = 0.0
        recorder.steps._not_before = 0.0
        switch.off()
        time.sleep(0.5)
        thread_clock = time.pthread_getcpuclockid(server._thread.ident)
        thread_began = time.clock_gettime(thread_clock)
        gc.collect()
        gc.freeze()
        sixes: list[list[tuple[str, str, float, float]]] = []
        rows, end = len(recorder.steps), time.monotonic() + seconds
        while time.monotonic() < end:
            order = dice.sample(KINDS, 3)
            six = []
            for kind in order + order[::-1]:
                if kind != "plain":
                    switch.on()
                if kind == "toggled":
                    switch.off()
                began, wall, worked = unit(small, clock, steps)
                if kind == "live":
                    switch.off()
                six.append((kind, seen.during(began, began + wall) if kind == "live" else "nothing", wall, worked))
            sixes.append(six)
        thread_s = time.clock_gettime(thread_clock) - thread_began
        noted, live_s = len(recorder.steps) - rows, clock.now()
        live_module.time = steplog.time = time
        live_module.select = select
        clock.wake.set()
        switch.on()
    watcher.kill()
    watcher.wait()
    answer: dict[str, Any] = {"sixes": len(sixes), "steps_a_unit": steps}
    answer["step_ms"] = 1e3 / steps * statistics.median(each[2] for six in sixes for each in six if each[0] == "plain")
    answer["rows_a_live_step"] = noted / (2 * (steps + 1) * len(sixes))
    answer["live_s"] = live_s
    answer["own_thread_share_while_live"] = thread_s / live_s
    answer["own_thread_ms"] = {
        name: {"times": len(found), "mean_ms": 1e3 * statistics.fmean(found or [0])}
        for name, found in seen.spent.items()
    }
    for index, name in ((2, "wall"), (3, "processor")):
        answer[name] = {
            "live_to_plain": estimate(sixes, "live", ("plain", "toggled"), index),
            "control_toggled_to_plain": estimate(sixes, "toggled", ("plain",), index),
        }
    answer["units"] = [
        [[kind, work, round(1e6 * wall), round(1e6 * cpu)] for kind, work, wall, cpu in six] for six in sixes
    ]
    return answer


def estimate(sixes: Any, kind: str, against: tuple[str, ...], index: int) -> dict[str, Any]:
    """How much longer units of a kind are than those of the others in their six, as a share."""
    found: list[list[tuple[str, float]]] = []
    for six in sixes:
        base = statistics.fmean(math.log(each[index]) for each in six if each[0] in against)
        found.append([(each[1], math.log(each[index]) - base) for each in six if each[0] == kind])
    chance = random.Random(0)
    drawn = [_both(chance.choices(found, k=len(found))) for _ in range(DRAWS)]
    result: dict[str, Any] = {}
    for number, name in enumerate(("by_kind_of_work", "all_units_trimmed")):
        ordered = sorted(each[number] for each in drawn)
        result[name] = {
            "share": math.expm1(_both(found)[number]),
            "95_percent": [math.expm1(ordered[int(part * DRAWS)]) for part in (0.025, 0.975)],
        }
    units = [each for six in found for each in six]
    result["kinds"] = {
        work: {"units": len(those), "trimmed": math.expm1(trimmed(those))}
        for work in WORK if (those := [value for was, value in units if was == work])
    }  # fmt: skip
    return result


def _both(found: list[list[tuple[str, float]]]) -> tuple[float, float]:
    units = [each for six in found for each in six]
    by_work = [[value for was, value in units if was == work] for work in WORK]
    weighted = sum(len(those) * trimmed(those) for those in by_work if those) / len(units)
    return weighted, trimmed([value for _, value in units])


def trimmed(values: list[float]) -> float:
    """The mean without the highest and the lowest fifth: on a shared machine those are its neighbours' doing."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def watch() -> None:
    from memtrace.live import watch as watching

    watching._ASK_EVERY_S *= len(KINDS)  # the program is live a third of the time
    found = watching.Watch(Path(sys.stdin.read().strip()))
    while found.poll(0.2):
        found.state.view()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--steps", type=int, default=2, help="timed, of a unit")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--watch", action="store_true")
    args = parser.parse_args()
    if args.watch:
        watch()
        return
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as entered:
        env = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), env])
        entered.enter_context(contextlib.redirect_stderr(entered.enter_context(Path(os.devnull).open("w"))))
        if args.device == "cpu":
            from capture_standin import StandIn

            torch.set_num_threads(1)
            books = StandIn()  # not entered: to see every tensor would cost more than the step
            books.live = {0x7F0000000000 + (number << 21): (1 << 20, []) for number in range(500)}
            entered.enter_context(backend.use(books))  # type: ignore[arg-type]
        answer = measure(Path(name), args.seconds, args.device, args.steps)
    answer = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    } | answer
    args.out.write_text(json.dumps(answer))
    print(json.dumps({key: value for key, value in answer.items() if key != "units"}, indent=1))


if __name__ == "__main__":
    main()
