"""The program's side of ``memtrace live``: what watchers may do to it, which is nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from capture_standin import StandIn  # noqa: E402
from torch import nn  # noqa: E402

import memtrace  # noqa: E402
from memtrace.errors import UsageError  # noqa: E402
from memtrace.live import protocol  # noqa: E402
from memtrace.live.watch import _SEEN, Watch  # noqa: E402
from memtrace.record import steplog  # noqa: E402
from memtrace.record.recorder import RecordOptions  # noqa: E402


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(steplog, "_SHARE", 0)  # the steps here are shorter than any real one


class Watcher:
    """A connection that collects what the program says."""

    def __init__(self) -> None:
        (place,) = protocol.sockets()
        self.socket = protocol.connect(place)
        self.reader = protocol.LineReader(protocol.MAX_LINE_BYTES)
        self.said: list[dict[str, Any]] = []

    def ask(self, **order: Any) -> dict[str, Any]:
        self.socket.sendall(protocol.encode(order))
        return self.wait(lambda message: message["type"] == "done" and message["do"] == order["do"])

    def wait(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        self.socket.settimeout(20)
        while True:
            for message in list(self.said):
                self.said.remove(message)
                if fits(message):
                    return message
            self.said += self.reader.feed(self.socket.recv(1 << 16))

    def of_type(self, kind: str) -> dict[str, Any]:
        return self.wait(lambda message: message["type"] == kind)


def net() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def live(tmp_path: Path, **options: Any) -> Any:
    return memtrace.record(tmp_path / "run.pickle", live=True, **options)


def test_a_watcher_is_told_the_steps_and_the_counters(stand_in: StandIn, tmp_path: Path) -> None:
    model, optimizer = net()
    with live(tmp_path) as recording:
        watcher = Watcher()
        hello = watcher.of_type("hello")
        assert (hello["pid"], hello["version"]) == (os.getpid(), protocol.VERSION)
        train(model, optimizer, 3)
        rows = watcher.of_type("rows")["rows"]
        while len(rows) < 3:
            rows += watcher.of_type("rows")["rows"]
        assert [row[hello["columns"].index("step")] for row in rows] == [0, 1, 2]
        assert watcher.of_type("now")["allocated_bytes"] > 0
        place = recording.recorder.live.place
        assert stat.S_IMODE(place.stat().st_mode) == 0o600 and stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert not place.exists()
    watcher.of_type("bye")


def test_each_step_has_the_shape_of_its_largest_batch(stand_in: StandIn, tmp_path: Path) -> None:
    model = nn.Embedding(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with live(tmp_path) as recording:
        for shapes in ((3, 5),), ((2, 7), (1, 9)), ():
            for shape in shapes:
                model(torch.zeros(shape, dtype=torch.long)).sum().backward()
            optimizer.step()
        rows = recording.recorder.steps.since(0)[0]
    assert [row[6:8] for row in rows] == [[15, 5], [14, 9], [0, 0]]


def test_what_a_watcher_may_ask_for(stand_in: StandIn, tmp_path: Path) -> None:
    model, optimizer = net()
    with live(tmp_path, stacks="none") as recording:
        watcher = Watcher()
        train(model, optimizer, 1)
        assert not recording.recorder.recording
        assert watcher.ask(do="stacks", on=True)["stacks"] is True
        assert watcher.ask(do="phase", name="validation")["phase"] == "validation"
        file = Path(watcher.ask(do="snapshot")["file"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert memtrace.load(file).memtrace["phases"][-1]["name"] == "validation"
        train(model, optimizer, 2)
        assert watcher.ask(do="stacks", on=False)["stacks"] is False
        assert len(memtrace.load(tmp_path / "run-stopped.pickle").device(0).trace) > 10
        assert "no such order" in watcher.ask(do="rm -rf")["error"]
        assert "at is one of" in watcher.ask(do="blocks", at="\x1b[31m")["error"]
    assert stand_in.recording is None


@pytest.mark.parametrize("moment", ["now", "step", "backward"])
def test_blocks_are_looked_at_when_asked(stand_in: StandIn, tmp_path: Path, moment: str) -> None:
    model, optimizer = net()
    with live(tmp_path, model=model, optimizer=optimizer):
        watcher = Watcher()
        train(model, optimizer, 2)
        assert "error" not in watcher.ask(do="blocks", at=moment)
        train(model, optimizer, 2)
        told = watcher.of_type("blocks")
        snapshot = memtrace.load(told["file"])
        assert told["at"] == moment and stat.S_IMODE(Path(told["file"]).stat().st_mode) == 0o600
        assert (snapshot.device(0).trace.action == 0).all()  # of blocks that nothing labels; no history
        assert len(snapshot.device(0).trace) < 20 and snapshot.memtrace["labels"]
        assert watcher.ask(do="blocks", at="now")["wait_s"] > 0  # not twice in a moment
    assert not Path(told["file"]).exists()


def test_what_was_seen_has_categories(stand_in: StandIn, tmp_path: Path) -> None:
    """With stacks on, what the forward pass holds is told from weights, gradients and states."""
    model, _ = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with live(tmp_path, model=model, optimizer=optimizer, stacks="python"):
        watch = Watch(protocol.sockets()[0], looks=False)
        train(model, optimizer, 2)
        watch.ask_now("backward")
        wait_for(lambda: watch.poll(0.1) and bool(train(model, optimizer, 1)) and watch.state.report is not None)
        found = watch.state.report
        assert found is not None
        assert found.categories["lora"] >= sum(p.nbytes for p in model.parameters() if p.dim() > 1)
        assert found.categories["activations"] >= 8 * 256 * 4
        assert sum(found.categories.values()) == found.reserved_bytes
        assert found.warnings == (_SEEN,)
        watch.close()


class Followed(nn.Parameter):
    """Knows which threads read its gradient."""

    readers: ClassVar[set[str]] = set()

    @property
    def grad(self) -> Any:
        self.readers.add(threading.current_thread().name)
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, value: Any) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def test_gradients_are_read_in_the_programs_own_threads(stand_in: StandIn, tmp_path: Path) -> None:
    """Another thread may read one that a backward pass lets go of at that moment, which ends the program; what is seen
    and what is written says all the same which blocks are gradients."""
    model = nn.Linear(64, 64)
    model.weight = Followed(model.weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> bool:
        model(torch.randn(8, 64)).square().mean().backward()  # its gradients stay
        optimizer.step()
        return True

    with live(tmp_path, model=model, optimizer=optimizer):
        watcher = Watcher()
        work()
        Followed.readers.clear()
        watcher.ask(do="blocks", at="step")
        work()
        seen = watcher.of_type("blocks")
        request = memtrace.load(watcher.ask(do="snapshot")["file"])
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for((tmp_path / "run-request.pickle").exists)
        for snapshot in (memtrace.load(seen["file"]), request, memtrace.load(str(tmp_path / "run-request.pickle"))):
            assert any(row["name"] == "weight.grad" for row in snapshot.memtrace["labels"])
    assert Followed.readers == {"MainThread"}


def test_hanging_shouting_and_dying_watchers_cost_nothing(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are bit-equal, the thread lives on, and a well-behaved watcher is still served."""
    alone = train(*net_of_seed(), 40)
    with live(tmp_path) as recording:
        (place,) = protocol.sockets()
        hanging = [protocol.connect(place) for _ in range(4)]
        nested = b'{"do":' + b"[" * 700 + b"]" * 700 + b"}\n"
        for number in range(25):
            with protocol.connect(place) as shouting:
                shouting.sendall((b"\xff" * 20_000, b"[" * 3000 + b"\n", b'{"do": 5}\n', b"null\n", nested)[number % 5])
            protocol.connect(place).close()
        watched = train(*net_of_seed(), 40)
        server = recording.recorder.live
        server._tell({"type": "x", "text": "y" * 900_000})
        for _ in range(30):
            server._tell({"type": "x", "text": "y" * 900_000})
        deadline = time.monotonic() + 20
        while len(server._watchers) != len(hanging) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(len(each.unsent) <= 4 << 20 for each in server._watchers)
        assert any(each.dropped for each in server._watchers)
        well = Watcher()
        assert well.of_type("hello")["pid"] == os.getpid()
        for each in hanging:
            each.close()
    assert watched == alone
    assert "Traceback" not in capsys.readouterr().err
    assert "memtrace-live" not in [thread.name for thread in threading.enumerate()]


def net_of_seed() -> tuple[Any, Any]:
    torch.manual_seed(3)
    return net()


def test_a_device_that_answers_no_more_is_said_and_left_alone(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with live(tmp_path) as recording:
        monkeypatch.setattr(stand_in, "memory_info", fail)
        thread = recording.recorder.live._thread
        thread.join(20)
        assert not thread.is_alive()
        train(*net(), 2)
        monkeypatch.undo()
    assert 1 <= capsys.readouterr().err.count("illegal memory access") <= 4
    assert recording.file.exists()


def test_at_most_so_many_watchers(stand_in: StandIn, tmp_path: Path) -> None:
    with live(tmp_path):
        (place,) = protocol.sockets()
        kept = [protocol.connect(place) for _ in range(8)]
        late = None
        for _ in range(12):
            time.sleep(0.3)
            late = protocol.connect(place)
            kept.append(late)
        time.sleep(0.6)
        assert late is not None
        late.settimeout(5)
        assert late.recv(10) == b""
        for each in kept:
            each.close()


_PROGRAM = """
import os, socket, sys, time
from memtrace.live import protocol
made, place = protocol.listen(os.getpid())
protocol.sample_place(place).write_text("left behind")
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_program_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"ready\n"
    (place,) = protocol.sockets()
    killed.kill()
    killed.wait()
    assert place.exists()
    assert protocol.sockets() == [] and not list(place.parent.iterdir())
    made, again = protocol.listen(killed.pid)  # the same number once more
    assert again == place and protocol.sockets() == [place]
    made.close()


def test_a_killed_watcher_is_forgotten(stand_in: StandIn, tmp_path: Path) -> None:
    with live(tmp_path) as recording:
        (place,) = protocol.sockets()
        code = f"from pathlib import Path; from memtrace.live import protocol; import time\n\
s = protocol.connect(Path({str(place)!r})); print('in', flush=True); time.sleep(60)"
        watcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert watcher.stdout is not None and watcher.stdout.readline() == b"in\n"
        server = recording.recorder.live
        wait_for(lambda: len(server._watchers) == 1)
        watcher.kill()
        watcher.wait()
        wait_for(lambda: not server._watchers)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_forked_child_lets_the_parents_socket_go(stand_in: StandIn, tmp_path: Path) -> None:
    with live(tmp_path) as recording:
        server = recording.recorder.live
        number = server._socket.fileno()
        child = os.fork()
        if child == 0:
            gone = server._socket is None
            try:
                os.fstat(number)
                gone = False
            except OSError:
                pass
            os._exit(0 if gone else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert Watcher().of_type("hello")["pid"] == os.getpid()


def test_a_folder_that_others_can_enter_is_refused(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "memtrace").mkdir(mode=0o755)
    with live(tmp_path) as recording:
        assert recording.recorder.live.place is None
        train(*net(), 1)
    assert "only you can enter" in capsys.readouterr().err
    assert recording.file.exists()


def test_long_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    made, place = protocol.listen(os.getpid())
    assert protocol.sockets() == [place]
    made.close()


def test_lines_are_bounded_and_made_printable() -> None:
    reader = protocol.LineReader(100)
    assert reader.feed(b'{"a": "\\u001b[2J') == []
    assert reader.feed(b'\\n"}\n{}\n') == [{"a": "\\x1b[2J\\n"}, {}]
    with pytest.raises(ValueError):
        reader.feed(b"x" * 101)
    nested = b'{"a":' + b"[" * 700 + b"]" * 700 + b"}\n"
    for wrong in (b"[]\n", b"{\n", b"[" * 99 + b"\n", b"\xff\n", nested, b'{"a":' + b"9" * 5000 + b"}\n"):
        with pytest.raises(ValueError):
            protocol.LineReader(10_000).feed(wrong)
    whole = b'{"a": 1}\n{"b": 2}\n{"c": 3}\n'
    for size in range(1, len(whole) + 1):  # however it comes
        reader = protocol.LineReader(100)
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert [each for piece in pieces for each in reader.feed(piece)] == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_other_users_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    assert protocol.is_own(here)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not protocol.is_own(here)
    here.close()
    there.close()


@pytest.mark.filterwarnings("ignore:memtrace")
@pytest.mark.parametrize("on_alarm", ["", "prnt", "'unclosed", "/nowhere/notify --loud"])
def test_what_could_not_sound_an_alarm_is_refused_at_once(tmp_path: Path, on_alarm: str) -> None:
    with pytest.raises(UsageError, match="on_alarm"):
        RecordOptions(tmp_path, "run", on_alarm=on_alarm)


@pytest.mark.parametrize("on_alarm", ["print", "warn", "command"])
def test_alarms_are_sounded_and_the_events_kept(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], on_alarm: str
) -> None:
    out = tmp_path / "told.json"
    script = tmp_path / "tell.py"
    script.write_text(f"import sys, pathlib; pathlib.Path({str(out)!r}).write_text(sys.stdin.read())")
    how = f"{sys.executable} {script}" if on_alarm == "command" else on_alarm
    model, optimizer = net()
    stand_in.capacity = 200 << 20
    kept = []
    with live(tmp_path, on_alarm=how):
        watcher = Watcher()
        for _ in range(40):
            train(model, optimizer, 1)
            kept.append(torch.zeros(1 << 18))  # a MiB a step
        alarm = watcher.of_type("alarm")
        assert alarm["id"] == "growth" and alarm["oom_step"] > 40
        wait_for(lambda: (tmp_path / "run-alarm-growth.pickle").exists())
        if on_alarm == "command":
            wait_for(lambda: out.exists() and out.stat().st_size > 0)
            assert json.loads(out.read_text())["id"] == "growth"
    said = capsys.readouterr().err
    assert ("alarm: growth: allocated memory grew" in said) == (on_alarm != "warn")
