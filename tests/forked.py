"""Commands that share their beginning: one process loads what all of them load, and each goes on in a child of it, with
streams, folder, environment and an end of its own.

``dryrun`` loads what every dry run loads before its script (the compiled helper, PyTorch, bitsandbytes) and most of
what scripts load; ``standin`` runs commands with the stand-in for the GPU, as ``standin_memtrace.py`` does.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_SCRIPTS_LOAD = (
    "transformers.trainer", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "peft",
)  # fmt: skip


Runs = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Running:
    """A command at work; ``out`` and ``err`` are what it has printed so far."""

    words: tuple[str, ...]
    pid: int
    out: Path
    err: Path

    def wait_until_it_prints(self) -> None:
        while not self.out.read_text():
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            assert ended is None, self.err.read_text()
            time.sleep(0.05)

    def wait(self) -> subprocess.CompletedProcess[str]:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return subprocess.CompletedProcess(self.words, code, self.out.read_text(), self.err.read_text())


class Forked:
    """The first process; each call is ``memtrace WORDS…`` in a child of it."""

    def __init__(self, kind: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self._count = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, __file__, kind], env=dict(environment), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def begin(self, *words: str, cwd: Path | None = None, **settings: str) -> Running:
        """``settings`` are variables of its environment."""
        self._count += 1
        out, err = (self.folder / f"{self._count}.{name}.txt" for name in ("out", "err"))
        assert self.server.stdin is not None and self.server.stdout is not None
        for path in (out, err):  # the run may be asked what it printed before it had its turn to open them
            path.touch()
        # Runs become children of the tests' process, so that a test is told what its own runs took.
        _adopt(True)
        order = [words, settings, str(cwd or Path.cwd()), str(out), str(err)]
        print(json.dumps(order), file=self.server.stdin, flush=True)
        pid = int(self.server.stdout.readline())
        assert self.server.stdout.readline() == "alone\n"
        _adopt(False)
        return Running(words, pid, out, err)

    def __call__(self, *words: str, cwd: Path | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.begin(*words, cwd=cwd, **settings).wait()

    def close(self) -> None:
        self.server.communicate()


def _adopt(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether))


def _dryrun() -> Callable[[list[str]], int]:
    from memtrace.cli import main
    from memtrace.estimate.dryrun import helper
    from memtrace.estimate.dryrun.cuda import page_states

    library = helper.load()
    helper.load = lambda: library
    page_states()
    for name in _SCRIPTS_LOAD:
        importlib.import_module(name)
    return main


def _standin() -> Callable[[list[str]], int]:
    from standin_memtrace import main

    importlib.import_module("torch._dynamo")  # of every optimizer
    return main


def serve(kind: str) -> None:
    main = {"dryrun": _dryrun, "standin": _standin}[kind]()
    gc.collect()
    gc.freeze()  # else each run copies what it only looks at
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, settings, folder, out, err = json.loads(line)
        if parent := os.fork():
            os.waitpid(parent, 0)
            print("alone", file=answers, flush=True)
            continue
        if run := os.fork():
            print(run, file=answers, flush=True)
            os._exit(0)
        for number, path in enumerate((os.devnull, out, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        answers.close()
        os.environ.update(settings)
        os.chdir(folder)
        sys.argv[1:] = words
        code = main(words)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking PyTorch apart takes longer than most of the runs


if __name__ == "__main__":
    serve(sys.argv[1])


def between_marks(out: Path, mark_bytes: int) -> list[list[int]]:
    """Sizes allocated in a recording, cut wherever something of ``mark_bytes`` was."""
    found: list[list[int]] = [[]]
    for event in pickle.loads(out.read_bytes())["device_traces"][0]:
        if event["action"] == "alloc" and event["size"] == mark_bytes:
            found.append([])
        elif event["action"] == "alloc":
            found[-1].append(event["size"])
    return found
