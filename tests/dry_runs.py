"""Dry runs that share their beginning: one process loads what every dry run loads before its script (the compiled
helper, PyTorch, bitsandbytes), and each run goes on in a child of it, with streams and an end of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class DryRuns:
    """The first process; each call is ``memtrace dryrun WORDS…`` in a child of it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        _adopt(True)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        assert self.server.stdin is not None and self.server.stdout is not None
        print(json.dumps([["dryrun", *words], str(out), str(err)]), file=self.server.stdin, flush=True)
        run = int(self.server.stdout.readline())
        assert self.server.stdout.readline() == "alone\n"
        code = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def close(self) -> None:
        self.server.communicate()
        _adopt(False)


def _adopt(whether: bool) -> None:
    """Runs become children of the tests' process, so that a test is told what its own runs took."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether))


def serve() -> None:
    from memtrace.cli import main
    from memtrace.estimate.dryrun import helper
    from memtrace.estimate.dryrun.cuda import page_states

    library = helper.load()
    helper.load = lambda: library
    page_states()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, out, err = json.loads(line)
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
        sys.argv[1:] = words
        sys.exit(main(words))


if __name__ == "__main__":
    serve()
