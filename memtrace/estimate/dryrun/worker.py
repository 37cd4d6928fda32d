"""A process with the dry device that runs QLoRA steps for this one, which may have imported PyTorch long ago.

The process imports everything once and forks for each step, so that every step runs as in a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass, replace
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from memtrace.allocator.config import CONF_VARIABLES
from memtrace.errors import MemtraceError, MissingDependencyError, NoAnswerError
from memtrace.estimate.dryrun.outcome import Recorded
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.options import RunOptions

if TYPE_CHECKING:
    from memtrace.estimate.dryrun.script import DryDevice

_CAPACITY_BYTES = 1 << 45  # more than any card has: what fits is asked later
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
#: What every step needs, imported before the first fork.
_SHARED = (
    "memtrace.estimate.dryrun.step", "peft", "transformers.models.auto.modeling_auto", "transformers.quantizers",
    "transformers.integrations.bitsandbytes", "transformers.integrations.peft",
)  # fmt: skip
#: What has values is small: threads would only wait for each other, and loaded by threads no two runs are alike.
_ALONE = {"OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Job:
    """One step to run: ``architecture`` are the keys of a ``config.json``."""

    architecture: dict[str, Any]
    options: RunOptions
    device: KernelDevice
    steps: int


def dry_run(architecture: dict[str, Any], options: RunOptions, device: KernelDevice, steps: int = 2) -> Recorded:
    """Load ``architecture`` and train it for ``steps`` steps without data.

    Raises UsageError where Transformers can't build it, NoAnswerError where its code fails, MissingDependencyError
    where PyTorch's parts or a compiler are missing.
    """
    with _one_at_a_time:
        worker = _worker(replace(device, product_rows=0))
        questions, answers = cast(IO[bytes], worker.stdin), cast(IO[bytes], worker.stdout)
        try:
            pickle.dump(Job(architecture, options, device, steps), questions)
            questions.flush()
            answer = pickle.load(answers)
        except BaseException as error:  # an interrupt, too: what comes later answers no question of ours
            _worker.cache_clear()
            _end(worker)
            if isinstance(error, (EOFError, BrokenPipeError, pickle.UnpicklingError)):
                raise NoAnswerError("the process of the dry run ended without an answer") from None
            raise
    if isinstance(answer, MemtraceError):
        raise answer
    return cast("Recorded", answer)


@cache
def _worker(device: KernelDevice) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", __name__]
    ours = str(Path(__file__).parents[3])
    places = map(os.path.abspath, sys.path if ours in sys.path else [ours, *sys.path])
    where = {"PYTHONPATH": os.pathsep.join(places)} | dict.fromkeys(CONF_VARIABLES, "")  # no allocator is set up there
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | _QUIET | _ALONE | where)
    atexit.register(_end, worker)
    pickle.dump(device, cast(IO[bytes], worker.stdin))
    return worker


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Nobody asks any more: it ends itself, and what it runs."""
    with contextlib.suppress(OSError):
        cast(IO[bytes], worker.stdin).close()
    cast(IO[bytes], worker.stdout).close()
    worker.wait()


# ---- in the process --------------------------------------------------------------------------------------------------
def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all of them, and the asker alone says so
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # whom they would ask
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        ready: DryDevice | MemtraceError = _open(pickle.load(questions))
    except MemtraceError as error:
        ready = error
    while True:
        try:
            job = pickle.load(questions)
        except EOFError:
            return
        if isinstance(ready, MemtraceError):
            _answer(answers, ready)
        elif not _has_answered(questions, answers, job, ready):
            return  # its answer may be half written


def _has_answered(questions: BufferedReader, answers: IO[bytes], job: Job, device: DryDevice) -> bool:
    """Whether a process of its own has run the job. It is ended where nobody waits any more."""
    lives, its_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BrokenPipeError):
            _answer(answers, _done(job, device))
        os._exit(0)
    os.close(its_end)
    ready, _, _ = select.select([questions.fileno(), lives], [], [])
    if lives not in ready and not questions.peek(1):
        os.kill(child, signal.SIGKILL)
    os.close(lives)
    return os.waitpid(child, 0)[1] == 0


def _answer(to: IO[bytes], answer: Any) -> None:
    pickle.dump(answer, to, protocol=pickle.HIGHEST_PROTOCOL)
    to.flush()


def _open(device: KernelDevice) -> DryDevice:
    from memtrace.estimate.dryrun.assumed import Assumptions
    from memtrace.estimate.presets import gpu_preset

    try:
        from memtrace.estimate.dryrun.script import DryDevice
        from memtrace.estimate.dryrun.weights import stand_in

        gpu = replace(gpu_preset("h200"), device=device)
        made = DryDevice(gpu, _CAPACITY_BYTES, Assumptions())
        import transformers

        for name in _SHARED:
            importlib.import_module(name)
        stand_in(made.assumed)
        with contextlib.suppress(ImportError):
            import trl.kernels  # noqa: F401
    except (ImportError, OSError) as error:  # the latter of a library that can't be loaded
        raise MissingDependencyError.of_extra(
            f"a dry run needs PyTorch, Transformers and PEFT ({error})", "capture"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return made


def _done(job: Job, device: DryDevice) -> Any:
    from memtrace.estimate.dryrun.step import QloraStep

    device.kernels.device = job.device
    try:
        return QloraStep(device, job.options, job.steps).run(job.architecture)
    except MemtraceError as error:
        return error
    except BaseException as error:  # other people's code: an option that a model refuses, a shape it can't do
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return NoAnswerError(f"the dry run stopped in {_place(error)}: {reason}")


def _place(error: BaseException) -> str:
    """File, line and function where an error came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} ({frame.name})"


if __name__ == "__main__":
    from memtrace.estimate.dryrun import worker  # not __main__, so that what is pickled has one name

    worker._serve()
    os._exit(0)  # nothing is left to tidy up, and somebody waits
