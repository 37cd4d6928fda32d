"""Send one task a file to many workers: processes on this machine, or a Dask cluster. A lost worker costs no answer.

Every worker holds one recording at a time and returns a small summary.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from types import FrameType

from memtrace.errors import MissingDependencyError, UsageError
from memtrace.ranks.sources import is_remote
from memtrace.ranks.summary import Failure, Rank, summarise

Answer = Rank | Failure
Task = Callable[[str, int | None], Answer]
_KILLED = "its worker was killed while reading it (out of memory?)"
_CONNECT_S, _CLOSE_S = 10, 5
_UNWIND_S = 1.0
_SAFE_PATH = "PYTHONSAFEPATH"
_ADDRESS = re.compile(r"(?:tcp|tls|ws|wss|ucx)://[^/\s]+:\d{1,5}/?")
_GONE = "the Dask scheduler went away while it was read"
_ENDING = (signal.SIGINT, signal.SIGTERM)


def cores() -> int:
    """Cores this process may use."""
    with suppress(AttributeError):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def in_processes(
    sources: Sequence[str],
    device: int | None = None,
    jobs: int | None = None,
    on_done: Callable[[int], None] | None = None,
    task: Task = summarise,
) -> list[Answer]:
    """One answer a source, in order. ``on_done`` is called with the number finished so far.

    When a worker dies, the files that were being read are read again; one that is there at a second death is read in
    a process of its own, so that a file that kills its reader is reported and takes nothing else with it.
    """
    jobs = min(jobs or cores(), max(1, len(sources)))
    answers: dict[str, Answer] = {}
    deaths: dict[str, int] = dict.fromkeys(sources, 0)
    waiting = deque(dict.fromkeys(sources))
    while waiting:
        together = [source for source in waiting if deaths[source] < 2]
        batch, workers = (together, jobs) if together else ([waiting[0]], 1)
        lost = _run_pool(batch, device, workers, task, answers, on_done)
        for source in lost:
            deaths[source] += 1
            if not together:
                answers[source] = Failure(source, _KILLED)
        waiting = deque(source for source in waiting if source not in answers)
    return [answers[source] for source in sources]


def _run_pool(
    batch: Sequence[str],
    device: int | None,
    workers: int,
    task: Task,
    answers: dict[str, Answer],
    on_done: Callable[[int], None] | None,
) -> list[str]:
    """Work through ``batch``; returns the sources whose worker died (the pool is then gone)."""
    # spawn: a fork of a process with threads (the terminal browser, say) can deadlock.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
    queue = deque(batch)
    running: dict[Future[Answer], str] = {}
    lost: list[str] = []
    try:
        while (queue or running) and not lost:
            try:
                while queue and len(running) < workers:  # no more than the workers hold: a death costs only these
                    with _interrupts_later(), _safe_path():
                        running[pool.submit(task, queue[0], device)] = queue[0]
                    queue.popleft()
            except BrokenProcessPool:
                lost = list(running.values())
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                source = running.pop(future)
                try:
                    answers[source] = future.result()
                except BrokenProcessPool:
                    lost.append(source)
                    continue
                except Exception as error:  # a task that can't be sent or returned
                    answers[source] = Failure(source, f"unexpected {type(error).__name__}: {error}")
                if on_done is not None:
                    on_done(len(answers))
        lost += [source for source in running.values() if source not in lost]
    except (SystemExit, KeyboardInterrupt):  # what the workers are reading is of no use any more
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return lost


def _begin_worker() -> None:
    """Ctrl-C reaches the whole process group, and the parent alone answers it; SIGTERM, or the parent's end however it
    came, ends a worker so that it leaves no unfinished file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_worker)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # that nobody takes its answer any more is no news
    os.kill(os.getpid(), signal.SIGTERM)


def _end_worker(number: int, frame: FrameType | None) -> None:
    """Unwind what the worker is at; the pool's loop would go on, so the end is sure to come."""
    end = threading.Timer(_UNWIND_S, os._exit, (128 + number,))
    end.daemon = True
    end.start()
    signal.signal(number, signal.SIG_IGN)  # once is enough: nothing is to be left undone
    raise SystemExit(128 + number)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes started meanwhile import nothing from the current folder, which may be a stranger's."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH)
        os.environ.update({} if before is None else {_SAFE_PATH: before})


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back meanwhile, where the system can.

    A process started here never gets Ctrl-C, not even while it starts and could only answer with a traceback; nor is it
    left alone while it waits for what it shall do.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    # another thread may get them
    answers = [(each, signal.signal(each, lambda number, _: came.append(number))) for each in _ENDING]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for each, answer in answers:
            signal.signal(each, answer)
        for number in came[:1]:
            signal.raise_signal(number)


def on_dask(
    sources: Sequence[str],
    scheduler: str,
    device: int | None = None,
    on_done: Callable[[int], None] | None = None,
    task: Task = summarise,
) -> list[Answer]:
    """The same tasks on a Dask cluster whose workers see the same files; Dask reschedules those of lost workers.

    Raises MissingDependencyError without dask.distributed, UsageError if no scheduler answers.
    """
    if not _ADDRESS.fullmatch(scheduler):
        raise UsageError(f"--scheduler {scheduler[:200]!r}: not an address like tcp://host:8786 or tls://host:8786")
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise MissingDependencyError.of_extra("--scheduler needs Dask", "cluster") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what it has to say is told by what it raises
    try:
        with ThreadPoolExecutor(1) as aside:  # a notebook's own loop runs in this thread
            aside.submit(asyncio.run, asyncio.wait_for(_identity(scheduler), _CONNECT_S)).result()
        client = Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except Exception as refused:  # each kind of connection has errors of its own
        detail = " ".join(str(refused).split())[:120] or type(refused).__name__
        raise UsageError(f"--scheduler {scheduler}: no Dask scheduler answers there ({detail})") from None
    answers: dict[str, Answer] = {}
    try:
        # Workers may run in another folder.
        located = {source: source if is_remote(source) else os.path.abspath(source) for source in sources}  # noqa: PTH100
        futures = {client.submit(_named, task, located[s], s, device, pure=False, retries=1): s for s in located}
        for future in as_completed(list(futures), loop=client.loop):
            source = futures[future]
            try:
                answers[source] = future.result()  # waits where a worker was lost with its result, which is made again
            except (Exception, asyncio.CancelledError) as reason:
                killed = type(reason).__name__ == "KilledWorker"
                gone = isinstance(reason, asyncio.CancelledError) or client.status != "running"
                text = f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
                answers[source] = Failure(source, _KILLED if killed else _GONE if gone else text)
            future.release()
            if on_done is not None:
                on_done(len(answers))
    except (OSError, RuntimeError, TimeoutError):  # the connection itself
        if not sources or client.status == "running":
            raise
    finally:
        with suppress(Exception):
            client.close(timeout=_CLOSE_S)
    return [answers.get(source) or Failure(source, _GONE) for source in sources]


async def _identity(scheduler: str) -> None:
    """Have the scheduler say who it is. A client would wait without end for one that listens and says nothing, and for
    20 s, with a traceback, at the end of the program."""
    from distributed.comm.core import connect

    comm = await connect(scheduler, timeout=_CONNECT_S)
    try:
        await comm.write({"op": "identity", "reply": True})
        await comm.read()
    finally:
        comm.abort()


def _named(task: Task, located: str, source: str, device: int | None) -> Answer:
    """Run the task on an absolute path and answer under the name the user gave."""
    from dataclasses import replace

    return replace(task(located, device), file=source)
