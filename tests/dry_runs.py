"""Dry runs that share their beginning: one process loads what every dry run loads before its script (the compiled
helper, PyTorch, bitsandbytes) and most of what scripts load, and each run goes on in a child of it, with streams and an
end of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_SCRIPTS_LOAD = (
    "transformers.trainer", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "peft",
)  # fmt: skip


class DryRuns:
    """The first process; each call is ``memtrace dryrun WORDS…`` in a child of it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """``settings`` are variables of the run's environment."""
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        assert self.server.stdin is not None and self.server.stdout is not None
        _adopt(True)
        print(json.dumps([["dryrun", *words], settings, str(out), str(err)]), file=self.server.stdin, flush=True)
        run = int(self.server.stdout.readline())
        assert self.server.stdout.readline() == "alone\n"
        code = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
        _adopt(False)
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def close(self) -> None:
        self.server.communicate()


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
    for name in _SCRIPTS_LOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each run copies what it only looks at
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, settings, out, err = json.loads(line)
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
        sys.argv[1:] = words
        code = main(words)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)  # taking PyTorch apart takes longer than most of the runs


if __name__ == "__main__":
    serve()
