"""The watcher's side: finding programs, state over time, JSON, ranks, replays, metrics; the program in processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, shared_recordings, trace_path

from memtrace.cli import main
from memtrace.errors import MissingDependencyError, NoAnswerError, UsageError
from memtrace.live import protocol
from memtrace.live.metrics import open_sink, prometheus_text
from memtrace.live.state import LiveState, growing
from memtrace.live.watch import Watch, find, owners
from memtrace.render.live_text import live_text, sparkline

COLUMNS = ["step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "tokens", "holes_bytes"]
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def each_recording_is_read_once() -> Iterator[None]:
    with shared_recordings():
        yield


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


_PROGRAM = """
import os, sys, time
sys.path[:0] = [{tests!r}]
import torch
from capture_standin import StandIn
import memtrace
from memtrace.record import backend
mib, *others = sys.argv[1:]
if others:
    os.environ.update(RANK="0", WORLD_SIZE=str(len(others) + 1))
for rank, each in enumerate(others, 1):  # one import of PyTorch for all
    if not os.fork():
        os.environ["RANK"], mib = str(rank), each
        break
kept = []
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with StandIn(64 << 20) as found, backend.use(found):
    with memtrace.record({out!r}, live=True, stacks="none", model=model, optimizer=optimizer):
        extra = torch.zeros(int(mib) << 18)
        os.write(1, f"{{os.environ.get('RANK', 0)}} {{os.getpid()}}\\n".encode())
        for step in range(100000):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.zeros(1 << 12))
            time.sleep(0.1)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Callable[..., list[int]]]:
    """Starts a job that trains on the stand-in: a rank for each number of MiB to hold; says their process ids."""
    pytest.importorskip("torch")
    started: list[subprocess.Popen[bytes]] = []

    def start(*mib: int) -> list[int]:
        code = _PROGRAM.format(tests=str(ROOT / "tests"), out=str(tmp_path / "p.pickle"))
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tui")])}
        job = subprocess.Popen([sys.executable, "-c", code, *map(str, mib)], stdout=subprocess.PIPE, env=env,
                               start_new_session=True)  # fmt: skip
        started.append(job)
        assert job.stdout is not None
        return [int(line.split()[1]) for line in sorted(job.stdout.readline() for _ in mib)]

    yield start
    for job in started:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_json_and_text_of_a_running_program(programs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (pid,) = programs(1)
    assert main(["live", "--json", "--once"]) == 0
    said = answer(capsys)
    assert said["pid"] == pid and said["looked_at"] == "now"
    assert sum(said["categories"].values()) == said["reserved_bytes"] > 0
    assert said["categories"]["lora"] >= 64 * 64 * 4
    assert {"step", "rate_bytes_per_step", "headroom_bytes", "forecast_oom_step", "file", "top", "peaks"} <= set(said)
    assert main(["live", str(pid), "--once"]) == 0
    text = capsys.readouterr().out
    assert "fragmentation" in text and "headroom" in text and "stacks off" in text
    assert main(["live", "--json", "--count", "2", "--every", "0.3"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum(first["categories"].values()) == first["reserved_bytes"]
    assert second["step"] >= first["step"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert main(["live", "--once"]) == 4
    assert "no program of yours" in capsys.readouterr().err


def test_several_programs_need_a_name_and_the_odd_rank_is_marked(
    programs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pids, [another] = programs(2, 2, 12), programs(40)  # another job is no odd rank of this one
    assert main(["live", "--once"]) == 2
    listed = capsys.readouterr().err
    assert all(str(pid) in listed for pid in pids) and "name one by its pid" in listed
    assert main(["live", "--ranks", "--once", "--json"]) == 0
    said = answer(capsys)
    assert {each["pid"] for each in said["programs"]} == {*pids, another} and said["odd"]["pid"] == pids[2]
    assert main(["live", "--ranks", "--once"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[2] for row in rows[1:5] if row.startswith("*")] == [str(pids[2])]


def test_a_stopped_program_is_said_to_be_silent(tmp_path: Path) -> None:
    made, place = protocol.listen(os.getpid())
    with pytest.raises(NoAnswerError, match="does not answer"):
        Watch(place)
    made.close()
    with pytest.raises(NoAnswerError):
        Watch(place)
    with pytest.raises(NoAnswerError, match="no program 12345"):
        find("12345")


class Peer:
    """A program that says what a test wants."""

    def __init__(self, *lines: bytes) -> None:
        self.made, self.place = protocol.listen(os.getpid())
        self.made.setblocking(True)
        self.heard = b""
        self._thread = threading.Thread(target=self._serve, args=(lines,), daemon=True)
        self._thread.start()

    def _serve(self, lines: tuple[bytes, ...]) -> None:
        try:
            while True:
                there, _ = self.made.accept()
                for each in lines:
                    there.sendall(each)
                there.settimeout(1)
                self.heard += there.recv(4096)
                there.close()
        except OSError:
            return

    def close(self) -> None:
        self.made.shutdown(socket.SHUT_RDWR)
        self.made.close()


HELLO = protocol.encode({"type": "hello", "version": 1, "pid": 7, "columns": COLUMNS, "argv": ["\x1b[2Jevil\n", 5]})


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n", b"[1]\n", b"x" * (2 << 20), b'{"type": "rows", "rows": [[1, "\\u001b[2J"], 5, [1]]}\n',
        b'{"type": "now", "allocated_bytes": "9", "step": 1e99, "phase": "\\u001b]0;x\\u0007", "phases": [3]}\n',
        b'{"type": "now", "alarms": [{"id": "\\u001b[1m", "line": "\\u202e\\n"}], "reserved_bytes": -5}\n',
        b'{"type": "blocks", "file": "/etc/passwd", "at": [], "step": {}}\n', b'{"type": 5}\n', b"\n",
    ],
    ids=["bytes", "list", "long", "rows", "now", "alarms", "blocks", "type", "empty"],
)  # fmt: skip
def test_nothing_that_a_peer_says_hurts(line: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    peer = Peer(HELLO, line)
    assert main(["live", str(peer.place), "--once"]) in (0, 4)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert all(c.isprintable() or c == "\n" for c in said.out + said.err)
    assert main(["live", str(peer.place), "--json", "--once"]) in (0, 4)
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)
    peer.close()


def test_the_only_file_that_is_read_is_the_one_beside_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(
        "memtrace.live.watch.load", lambda path: read.append(path) or (_ for _ in ()).throw(NoAnswerError(""))
    )
    peer = Peer(HELLO, protocol.encode({"type": "blocks", "file": "/etc/passwd"}))
    protocol.sample_place(peer.place).touch()
    watch = Watch(peer.place, looks=False)
    while not read and watch.poll(0.2):
        continue
    assert read == [protocol.sample_place(peer.place)]
    watch.close()
    peer.close()


def taught(rows: int, leak: int = 0) -> LiveState:
    state = LiveState("made")
    state.take({"type": "hello", "version": 1, "pid": 7, "columns": COLUMNS})
    made = [[n, n * 10**6, 900 * MIB + leak * n, 1000 * MIB, 950 * MIB + leak * n, 1, MIB] for n in range(rows)]
    state.take({"type": "rows", "rows": made})
    state.take({"type": "now", "step": rows, "allocated_bytes": 900 * MIB, "reserved_bytes": 1000 * MIB,
                "capacity_bytes": 2000 * MIB, "requested_bytes": 899 * MIB, "phase": "forward"})  # fmt: skip
    return state


def test_the_view_over_time() -> None:
    steady = taught(60).view()
    assert steady.rate_bytes_per_step == 0 and steady.forecast_oom_step is None
    assert steady.headroom_bytes == 1050 * MIB and steady.seconds_per_step == 1
    said = steady.as_json()
    assert sum(said["categories"].values()) == said["reserved_bytes"] == 1000 * MIB
    leaking = taught(60, 10 * MIB).view()
    assert leaking.rate_bytes_per_step == 10 * MIB
    assert leaking.forecast_oom_step == pytest.approx(59 + (2000 - 950 - 590) / 10, abs=1)
    assert "at this rate it ends in step" in live_text(leaking, 100)
    assert taught(0).view().curves == [(0, 900 * MIB, 1000 * MIB, 0)]
    assert LiveState("empty").view().as_json()["reserved_bytes"] == 0


def test_curves_are_those_of_the_last_hour() -> None:
    assert len(taught(5000).view().curves) == 3601


def test_call_sites_that_grow() -> None:
    key, other = ("activations", "saved", "a.py:1 f"), ("lora", "grads", "b.py:2 g")
    found = growing([(10, {key: 100, other: 50}), (12, {key: 0}), (20, {key: 300, other: 50})])
    assert [(site.frame, site.per_step_bytes) for site in found] == [("a.py:1 f", 20.0)]
    assert growing([(10, {key: 100})]) == []


def test_sparklines_keep_the_highest() -> None:
    assert sparkline([0, 0, 0, 9, 0, 0], 3) == "▁█▁"
    assert sparkline([], 5) == "" and sparkline([4, 4], 5) == "▁▁"


def test_replays_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leak = str(trace_path("llama2-7b_kept-graphs"))
    assert main(["live", "--replay", leak, "--limit", "6GiB", "--once", "--json"]) == 0
    said = answer(capsys)
    assert sum(said["categories"].values()) == said["reserved_bytes"]
    assert said["growing"][0]["subcategory"] == "checkpoint_input"
    assert main(["live", "--replay", leak, "--speed", "10000", "--count", "3"]) == 0
    assert capsys.readouterr().out.count("headroom") == 3
    log = tmp_path / "run.steps.jsonl"
    lines = [json.dumps({"columns": COLUMNS})]
    lines += [
        json.dumps([n, n * 10**6, (900 + 10 * n) * MIB, 2000 * MIB, (950 + 10 * n) * MIB, 1, 0]) for n in range(60)
    ]
    log.write_text("\n".join(lines))
    (tmp_path / "forecast.json").write_text('{"oom": {"step": 99}}')
    args = ["live", "--replay", str(log), "--limit", "2000MiB", "--once", "--forecast", str(tmp_path / "forecast.json")]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert (
        "! growth: allocated memory grew" in text
        and "ALARM: by the forecast of its lengths the run dies in step 99" in text
    )
    assert main([*args[:-1], str(log)]) == 2


def test_a_recording_without_steps_is_not_played_as_if_it_held_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", "--replay", str(trace_path("llama2-7b_oom-at-load")), "--once"]) == 4
    said = capsys.readouterr()
    assert not said.out and "no step was recorded" in said.err


def test_a_replay_that_ran_out_of_memory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    died = str(trace_path("llama2-7b_oom-fragmentation"))
    assert main(["explain", died, "--json"]) == 0
    capacity = answer(capsys)["capacity"]["low_bytes"]
    assert main(["live", "--replay", died, "--once", "--json"]) == 0
    said = answer(capsys)
    assert said["now"]["capacity_bytes"] == capacity
    assert [alarm["step"] for alarm in said["alarms"] if alarm["id"] == "oom"] == [10]
    # What the broken-off step holds is no growth: nothing grows faster than all together.
    assert all(site["per_step_bytes"] < 2**20 for site in said["growing"]) and said["rate_bytes_per_step"] < 2**20
    assert main(["live", "--replay", died, "--once"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "out of memory" in text and "ended" not in text and "asked for 86.0 MiB and was refused" in text
    assert "of 22.05 GiB (about; the limit, by the refused request)" in text
    assert "free then holes" in text and "at its end the largest free piece has 34.9 MiB, and 0 B can still" in text
    assert main(["live", "--replay", died, "--once", "--limit", "30GiB"]) == 0
    assert "of 30.00 GiB (the --limit given)" in capsys.readouterr().out
    assert main(["live", "--replay", str(trace_path("tiny-llama_3-steps")), "--once"]) == 0
    assert "ended" in (text := capsys.readouterr().out) and "refused" not in text


def test_a_label_ends_no_line_of_prometheus_text() -> None:
    text = prometheus_text({"step": 3}, {"device": '0"} 1\nother{x="\\'})
    assert text.splitlines()[-1] == 'memtrace_step{device="0\\"} 1\\nother{x=\\"\\\\"} 3'


def test_prometheus_text_is_in_the_format() -> None:
    text = prometheus_text({"allocated_bytes": 5, "step": 3}, {"device": 0})
    assert text == (
        "# HELP memtrace_step optimizer steps so far\n# TYPE memtrace_step gauge\n"
        'memtrace_step{device="0"} 3\n'
        "# HELP memtrace_allocated_bytes bytes allocated after the step\n# TYPE memtrace_allocated_bytes gauge\n"
        'memtrace_allocated_bytes{device="0"} 5\n'
    )


def test_metrics_of_a_replay_go_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "memtrace.prom"
    leak = str(trace_path("llama2-7b_kept-graphs"))
    assert main(["live", "--replay", leak, "--speed", "10000", "--metrics", f"prometheus:{out}"]) == 0
    assert 'memtrace_peak_allocated_bytes{device="0"} 5' in out.read_text()
    assert 'memtrace_step{device="0"} 11\n' in out.read_text()
    with pytest.raises(UsageError, match="known: tensorboard"):
        open_sink("smoke:signals")
    with pytest.raises(UsageError, match="needs a file"):
        open_sink("prometheus")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "otel"])
def test_a_missing_package_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb", "mlflow", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=f"metrics to {kind} need a package"):
        open_sink(kind)


def test_owners_are_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\nprintf 'GPU-a, 7, 100, python\\nGPU-a, 8, 50, /bin/x, y\\nGPU-b, 9, 5, z\\nGPU-a, 10, [N/A], q\\n'"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert owners(7) == [{"pid": 8, "name": "/bin/x, y", "bytes": 50 * MIB}]
    assert owners(1) == []
