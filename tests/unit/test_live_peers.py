"""What answers on a socket may be no recorder at all: odd values in every place of a message, files beside."""

from __future__ import annotations

import copy
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memtrace.cli import main
from memtrace.cli.common import print_json
from memtrace.live import protocol
from memtrace.live.metrics import open_sink
from memtrace.live.state import LiveState
from memtrace.live.watch import Watch
from memtrace.render.live_text import live_text

COLUMNS = ["step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "tokens", "holes_bytes"]
MESSAGES: list[Any] = [
    {"type": "hello", "version": 1, "columns": COLUMNS, "pid": 5, "rank": 1, "world_size": 2, "device": 0,
     "torch": "2.11", "gpu": "H200", "device_total_bytes": 100, "limit_bytes": 90, "argv": ["train.py", "--x"],
     "started_us": 1, "peaks_are_of_steps": True},
    {"type": "rows", "rows": [[i, i * 10, i * 100, i * 200, i * 150, 7, 3] for i in range(30)]},
    {"type": "now", "time_us": 5, "step": 3, "phase": "forward", "allocated_bytes": 5, "reserved_bytes": 9,
     "active_bytes": 4, "inactive_split_bytes": 1, "peak_allocated_bytes": 6, "peak_reserved_bytes": 10,
     "device_free_bytes": 50, "device_total_bytes": 100, "limit_bytes": 90, "capacity_bytes": 90, "stacks": True,
     "phases": [{"name": "forward", "end_bytes": 5, "peak_bytes": 7}],
     "alarms": [{"id": "growth", "step": 3, "line": "it grew", "oom_step": 5}]},
    {"type": "done", "do": "blocks", "wait_s": 1.5},
]  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 2**62, 2**70, 10**400, 1.5, float("nan"), float("inf"), "", "x" * 900_000, "\x1b[2J\u202e", [], {},
    [[]], [{}], {"a": {}}, [1, "x"], ["a", ["b"]], [{"name": 5, "id": [], "peak_bytes": "x"}],
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def with_odd(path: tuple[Any, ...], odd: Any) -> list[Any]:
    made = copy.deepcopy(MESSAGES)
    inside: Any = made
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = odd
    return made


CASES = [(number, *path) for number, message in enumerate(MESSAGES) for path in places(message)]


@pytest.mark.parametrize("path", CASES, ids=lambda path: "-".join(map(str, path)))
def test_an_odd_value_in_any_place_is_left_out(path: tuple[Any, ...], tmp_path: Path) -> None:
    sink = open_sink(f"prometheus:{tmp_path / 'metrics.prom'}")
    for odd in ODD:
        state, reader = LiveState("x"), protocol.LineReader(protocol.MAX_LINE_BYTES)
        try:
            for message in with_odd(path, odd):
                for each in reader.feed(protocol.encode(message)):
                    state.take(each)
        except ValueError:  # hung up on
            continue
        view = state.view()
        text = live_text(view, 100)
        assert len(text) < 20_000 and all(line.isprintable() for line in text.splitlines())
        print_json(view.as_json())
        sink.write(list(state.rows), dict(view.now) | {"device": view.about.get("device") or 0})
        assert all(set(row) <= set(COLUMNS) for row in state.rows)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], Path]]:
    """Listens as a recorder does and says what it is given to everybody, for as long as somebody listens."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    made, place = protocol.listen(os.getpid())
    made.setblocking(True)
    said: list[bytes] = []

    def tell(to: socket.socket, endless: bool) -> None:
        with suppress(OSError), to:
            to.sendall(said[0])
            while endless:
                to.sendall(said[-1])
            to.recv(1)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=tell, args=(made.accept()[0], len(said) > 1), daemon=True).start()

    def begin(*what: bytes) -> Path:
        said[:] = what
        threading.Thread(target=serve, daemon=True).start()
        return place

    yield begin
    with suppress(OSError):
        made.shutdown(socket.SHUT_RDWR)
    made.close()


HELLO = protocol.encode(MESSAGES[0])
NOW = protocol.encode(MESSAGES[2])


@pytest.mark.parametrize(
    "said",
    [(b"\xff" * 5000,), (b"GET / HTTP/1.1\r\n\r\n",), (HELLO.replace(b'"version":1', b'"version":"1"'),),
     (b'{"type":"hello"}\n',), (b"", b"x" * 60_000), (HELLO + NOW, b"{}\n" * 20_000),
     (HELLO, b'{"type":"blocks","file":"/dev/zero"}\n'), (HELLO + NOW, b'{"a":' + b"[" * 700 + b"]" * 700 + b"}\n")],
    ids=["bytes", "http", "version", "bare", "no line", "endless", "endless blocks", "nested"],
)  # fmt: skip
@pytest.mark.parametrize("more", [["--once"], ["--ranks", "--once"], ["--count", "2", "--every", "0.1"]],
                         ids=["once", "ranks", "count"])  # fmt: skip
def test_whatever_listens_there_is_an_answer_or_one_line(
    peer: Any, said: tuple[bytes, ...], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    place = peer(*said)
    assert main(["live", *([] if "--ranks" in more else [str(place)]), *more]) in (0, 4)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("planted", ["pipe", "link to a device", "folder"])
def test_what_lies_in_the_samples_place_is_a_file_or_is_left_alone(peer: Any, planted: str) -> None:
    place = peer(HELLO + NOW + b'{"type":"blocks","file":"x","at":"now","step":1}\n')
    sample = protocol.sample_place(place)
    if planted == "pipe":
        os.mkfifo(sample)
    elif planted == "folder":
        sample.mkdir()
    else:
        sample.symlink_to("/dev/zero")
    watch = Watch(place, looks=False)
    for _ in range(3):
        watch.poll(0.1)
    assert watch.state.report is None
    watch.close()
