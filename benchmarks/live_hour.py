"""An hour of training that is watched: a hundred watchers come, hang, crawl and die; beside it the same program alone.

    python benchmarks/live_hour.py OUT.json [--minutes 60] [--watchers 100] [--pace 0.2]

Both run the seeded program below on the tests' stand-in for PyTorch's allocator, a step every ``--pace`` seconds (a
twentieth of a core each), the one under ``memtrace run --live --step-log``. Told are: whether the losses are equal bit
by bit; each minute's memory, open files, threads and processor time of both; the size of the log; what is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
KINDS = ("hangs", "is killed", "shouts", "glances", "crawls")
HUNG_AT_ONCE = 8  # sixteen watchers are let in at a time
PROCESS_FACTS = ("minute", "rss_kib", "files", "threads", "processor_s")


# the program
def program(out: Path, minutes: float, pace_s: float) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoder(layer, 1), nn.Linear(32, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dice = random.Random(0)
    losses: list[str] = []
    rows: list[tuple[float, ...]] = []
    began = time.monotonic()
    steps = round(60 * minutes / pace_s)
    a_minute = max(1, round(60 / pace_s))
    for step in range(steps):
        ids = torch.randint(100, (4, dice.randrange(8, 33)))
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        del logits, loss
        if step % a_minute == a_minute - 1:
            rows.append((round((time.monotonic() - began) / 60, 2), *process_facts()))
        time.sleep(max(0.0, began + (step + 1) * pace_s - time.monotonic()))
    out.write_text(json.dumps({"losses": losses, "columns": PROCESS_FACTS, "rows": rows}))


def process_facts() -> tuple[float, ...]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return int(status["VmRSS"].split()[0]), files, int(status["Threads"]), round(time.process_time(), 2)


# those who watch
def watch(kind: str, place: Path, seconds: float) -> None:
    """In a process of its own. Watching is done by what ``memtrace live`` uses, everything else by hand."""
    from memtrace.live import protocol

    if kind == "is killed":
        from memtrace.live.watch import Watch

        found = Watch(place)
        print("came", flush=True)
        while found.poll(0.2):
            found.state.view()
        return
    made = protocol.connect(place)
    print("came", flush=True)
    if kind == "shouts":
        for order in (b'{"do":"blocks","at":"step"}', b'{"do":"phase","name":"load"}', b'{"do":"snapshot"}', b"{}"):
            made.sendall(order + b"\n")
        made.sendall(b"\xff" * 8192)
    end = time.monotonic() + seconds
    while kind == "hangs" or time.monotonic() < end:
        if kind == "crawls":
            made.recv(1)
        time.sleep(1)


def send_watchers(running: subprocess.Popen[bytes], place: Path, minutes: float, watchers: int) -> dict[str, Any]:
    """One after the other, spread over the time; what became of each."""
    dice, counts, refused = random.Random(1), Counter[str](), 0
    hung: list[subprocess.Popen[bytes]] = []
    others: list[tuple[float, subprocess.Popen[bytes]]] = []  # each with the time at which it is killed
    began, glances = time.monotonic(), []
    for number in range(watchers):
        at = began + 60 * minutes * (number + 0.5) / watchers
        while time.monotonic() < at and running.poll() is None:
            for entry in [each for each in others if each[0] < time.monotonic()]:
                entry[1].kill()
                entry[1].wait()
                others.remove(entry)
            time.sleep(0.5)
        if running.poll() is not None:
            break
        kind, seconds = KINDS[number % len(KINDS)], dice.uniform(5, 40)
        if kind == "glances":
            look = [sys.executable, "-m", "memtrace", "live", str(running.pid), "--once", "--json"]
            said = subprocess.run(look, capture_output=True, text=True, env=environment())
            counts[kind] += said.returncode == 0
            refused += said.returncode != 0
            if said.returncode == 0:
                seen = json.loads(said.stdout)
                glances.append({key: seen.get(key) for key in ("step", "reserved_bytes", "looked_at")})
            continue
        command = [sys.executable, str(HERE), "--watch", kind, str(place), str(seconds)]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
        assert made.stdout is not None
        came = made.stdout.readline() == b"came\n"
        counts[kind] += came
        refused += not came
        if kind == "hangs":
            hung.append(made)
            if len(hung) > HUNG_AT_ONCE:
                hung[0].kill()
                hung.pop(0).wait()
        else:
            others.append((time.monotonic() + seconds, made))
    running.wait()
    for made in [*hung, *(each for _, each in others)]:
        made.kill()
        made.wait()
    return {"came": dict(counts), "refused": refused, "glances": [*glances[:1], *glances[-1:]]}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tui", ROOT / "tests")))}


def measure(minutes: float, watchers: int, pace_s: float) -> dict[str, Any]:
    from memtrace.live import protocol

    with tempfile.TemporaryDirectory(prefix="live-hour-") as name, contextlib.ExitStack() as closing:
        out = Path(name)
        (out / "run").mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(out / "run")
        alone_py = f"from capture_standin import StandIn; import runpy, sys; sys.argv = {{}}; StandIn().__enter__(); \
runpy.run_path({str(HERE)!r}, run_name='__main__')"
        own = [str(HERE), "--minutes", str(minutes), "--pace", str(pace_s), "--program"]
        alone_argv = alone_py.format([*own, str(out / "alone.json")])
        alone = subprocess.Popen([sys.executable, "-c", alone_argv], env=environment())
        under = [sys.executable, str(ROOT / "tests" / "standin_memtrace.py"), "run", "--live", "--step-log"]
        under += ["--max-entries", "20000", "--out", str(out / "recorded"), *own, str(out / "live.json")]
        said = closing.enter_context((out / "said.txt").open("wb"))
        live = subprocess.Popen(under, env=environment(), stderr=said)
        try:
            place = protocol.folder(make=True) / f"{live.pid}.sock"
            while not place.exists() and live.poll() is None:
                time.sleep(0.1)
            watched = send_watchers(live, place, minutes, watchers)
            codes = [alone.wait(), live.wait()]
        except BaseException:
            for each in (alone, live):
                each.send_signal(signal.SIGKILL)
            raise
        plain, found = (json.loads((out / f"{each}.json").read_text()) for each in ("alone", "live"))
        logs = sum(each.stat().st_size for each in (out / "recorded").glob("*.steps.jsonl"))
        log_lines = sum(len(each.read_bytes().splitlines()) for each in (out / "recorded").glob("*.steps.jsonl"))
        return {
            "steps": len(plain["losses"]), "losses_equal": plain["losses"] == found["losses"], "codes": codes,
            "watchers": watched, "left": [each.name for each in place.parent.iterdir()],
            "log_bytes": logs, "log_lines": log_lines,
            "written": {each.name: each.stat().st_size for each in sorted((out / "recorded").iterdir())[:8]},
            "said": (out / "said.txt").read_text()[-2000:],
            "columns": PROCESS_FACTS, "alone": plain["rows"], "live": found["rows"],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--watchers", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.2, help="seconds from step to step")
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program is not None:
        program(args.program, args.minutes, args.pace)
    elif args.watch is not None:
        watch(args.watch[0], Path(args.watch[1]), float(args.watch[2]))
    else:
        sys.path[:0] = [str(ROOT)]
        found = measure(args.minutes, args.watchers, args.pace)
        args.out.write_text(json.dumps(found, indent=1))
        print({key: value for key, value in found.items() if key not in ("alone", "live", "said")})


if __name__ == "__main__":
    main()
