"""Many files by many workers: the same answer from processes and from Dask, and no answer lost with a worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_tasks
from support import ROOT, trace_path

from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.ranks.compare import compare_ranks
from memtrace.ranks.sources import expand
from memtrace.ranks.summary import Failure, Rank, summarise
from memtrace.ranks.workers import in_processes, on_dask

COPIES = 64
SMALLEST = "llama2-7b_oom-at-load"


def fill(folder: Path, count: int, name: str = "tiny-llama_3-steps") -> list[str]:
    for rank in range(count):
        (folder / f"run_rank{rank}.pickle.xz").symlink_to(trace_path(name))
    return expand([str(folder)])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A real scheduler with two worker processes on this machine."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as made:
        yield made


def nameless(answers: list[Rank | Failure]) -> list[Rank | Failure]:
    return [replace(answer, file="", **({"rank": None} if isinstance(answer, Rank) else {})) for answer in answers]


@pytest.mark.parametrize(("count", "name"), [(COPIES, SMALLEST), (6, "tiny-llama_3-steps")])
def test_copies_give_equal_ranks_from_processes_and_from_dask(
    tmp_path: Path, cluster: Any, count: int, name: str
) -> None:
    copies = fill(tmp_path, count, name)
    done: list[int] = []
    answers = in_processes(copies, jobs=2, on_done=done.append)
    assert [answer.file for answer in answers] == copies
    assert done == list(range(1, count + 1))
    expected = summarise(copies[0])
    assert isinstance(expected, Rank)
    assert nameless(answers) == nameless([expected]) * count
    assert on_dask(copies, cluster.scheduler_address) == answers
    compared = compare_ranks(answers)
    assert [rank.rank for rank in compared.ranks] == list(range(count))
    assert compared.odd is None and "balanced" in compared.sentence
    assert all(spread.spread_bytes == 0 for spread in compared.imbalance.values())
    assert all(row.spread_bytes == 0 for row in compared.steps)


def test_a_killed_worker_costs_no_answer(tmp_path: Path) -> None:
    sources = fill(tmp_path, 8, SMALLEST)
    (tmp_path / "kill").touch()
    answers = in_processes(sources, jobs=2, task=rank_tasks.dies_once)
    assert not (tmp_path / "kill").exists()
    assert answers == in_processes(sources, jobs=2)


def test_a_killed_dask_worker_costs_no_answer(tmp_path: Path, cluster: Any) -> None:
    sources = fill(tmp_path, 8, SMALLEST)
    (tmp_path / "kill").touch()
    answers = on_dask(sources, cluster.scheduler_address, task=rank_tasks.dies_once)
    assert not (tmp_path / "kill").exists()
    assert answers == [summarise(source) for source in sources]


def test_a_file_that_kills_its_reader_is_reported_and_takes_nothing_with_it(tmp_path: Path) -> None:
    sources = fill(tmp_path, 6, SMALLEST)
    answers = in_processes(sources, jobs=2, task=rank_tasks.always_dies)
    dead = [answer for answer in answers if isinstance(answer, Failure)]
    assert [Path(failure.file).name for failure in dead] == ["run_rank3.pickle.xz"]
    assert "killed" in dead[0].error
    assert len([answer for answer in answers if isinstance(answer, Rank)]) == 5


def test_an_unreadable_file_is_reported_by_either_engine(tmp_path: Path, cluster: Any) -> None:
    sources = fill(tmp_path, 2, SMALLEST)
    (tmp_path / "run_rank2.pickle").write_bytes(b"\x80\x04 this is no snapshot")
    sources = expand([str(tmp_path)])
    for answers in (in_processes(sources, jobs=2), on_dask(sources, cluster.scheduler_address)):
        assert [type(answer) for answer in answers] == [Rank, Rank, Failure]
        assert answers[2].file == sources[2]
        assert "\n" not in answers[2].error  # type: ignore[union-attr]


def test_no_scheduler_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.ranks.workers._CONNECT_S", 1)
    with pytest.raises(UsageError, match="no Dask scheduler answers"):
        on_dask(["x.pickle"], "tcp://127.0.0.1:9")


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20, (1 << 62).to_bytes(8, "little") * 10, b"\x01" + bytes(40)],
    ids=["nothing", "http", "sizes", "frames"],
)  # fmt: skip
def test_what_listens_and_is_no_scheduler_is_one_line(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of Dask's would wait for it without end, or end in a traceback twenty seconds later."""
    monkeypatch.setattr("memtrace.ranks.workers._CONNECT_S", 1)
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    kept.append(listening.accept()[0])
                    kept[-1].sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        made: list[object] = []
        monkeypatch.setattr("distributed.Client", lambda *_, **__: made.append(1))
        with pytest.raises(UsageError, match="no Dask scheduler answers"):
            on_dask(["x.pickle"], f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        assert not made  # nothing is left to be closed at the end
        listening.shutdown(socket.SHUT_RDWR)
    for each in kept:
        each.close()


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://", "tcp://host", "host:8786", "ftp://host:21", "tcp://a b:1", "inproc://x/1/1"]
)
def test_what_is_no_address_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)  # not even imported
    with pytest.raises(UsageError, match="not an address"):
        on_dask(["x.pickle"], address)
    assert main(["ranks", "x.pickle", "--scheduler", address]) == 2


@pytest.mark.parametrize("scheme", ["tls", "ws", "ucx"])
def test_a_kind_of_connection_that_is_not_to_be_had(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.ranks.workers._CONNECT_S", 1)
    with pytest.raises(UsageError, match="no Dask scheduler answers"):
        on_dask(["x.pickle"], f"{scheme}://127.0.0.1:9")


SCHEDULER = """
import asyncio, sys
from distributed import Scheduler, Worker

async def main():
    async with Scheduler(port=0, dashboard_address=":0") as scheduler:
        async with Worker(scheduler.address, nthreads=1):
            print(scheduler.address, flush=True)
            await asyncio.sleep(100)

asyncio.run(main())
"""


def test_a_scheduler_that_is_killed_in_the_middle_is_one_line_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(rank_tasks.__file__).parent)])}
    scheduler = subprocess.Popen(
        [sys.executable, "-c", SCHEDULER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    )
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().strip()

    def end() -> None:
        while not list(tmp_path.glob("*.pid")):
            time.sleep(0.01)
        scheduler.kill()

    threading.Thread(target=end, daemon=True).start()
    answers = on_dask([str(tmp_path / name) for name in "ab"], address, task=rank_tasks.waits)
    scheduler.wait()
    assert [type(answer) for answer in answers] == [Failure, Failure]
    assert all("scheduler went away" in answer.error for answer in answers)  # type: ignore[union-attr]
    assert "Traceback" not in capfd.readouterr().err


ENDED = """
import os, signal, sys, threading, time
from pathlib import Path
import memtrace.entry
from memtrace.ranks.workers import in_processes
import rank_tasks

signal.signal(signal.SIGTERM, memtrace.entry._end)

folder, number = Path(sys.argv[1]), int(sys.argv[2])

def end():
    while len(list(folder.glob("*.pid"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), number)

if __name__ == "__main__":
    threading.Thread(target=end, daemon=True).start()
    in_processes([str(folder / name) for name in "abcd"], jobs=2, task=rank_tasks.waits)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(int(number))],
        capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(rank_tasks.__file__).parent)])},
    )  # fmt: skip
    assert done.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9, signal.SIGINT: -2}[number]
    if number == signal.SIGTERM:
        assert done.stderr == ""
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(workers) == 2  # they held stderr, so that they had ended when run() returned
    assert len(list(tmp_path.glob("*.undone"))) == 2
