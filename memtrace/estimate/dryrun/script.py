"""``memtrace dryrun SCRIPT``: an unchanged program on a card that is not there, recorded as a real run would be."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from memtrace.allocator.conf_text import parse_conf
from memtrace.allocator.config import conf_string
from memtrace.allocator.whatif.addresses import Policy
from memtrace.allocator.whatif.search import BRACKET
from memtrace.estimate.dryrun import helper, triton
from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.estimate.dryrun.cuda import install, page_states
from memtrace.estimate.dryrun.elsewhere import Elsewhere
from memtrace.estimate.dryrun.generation import without_end
from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.dryrun.outcome import DryScript
from memtrace.estimate.dryrun.stacks import caller
from memtrace.estimate.dryrun.weights import stand_in
from memtrace.estimate.presets import GpuPreset
from memtrace.record import backend, launcher, messages
from memtrace.record.hooks import OutermostStep
from memtrace.record.recorder import RecordOptions
from memtrace.units import format_bytes

_FUNCTIONS: dict[str, Any] = dict(helper.Answers._fields_)
_TOLD_AFTER_S = 5.0
_ALIKE = 3  # so many steps in a row with the same births and deaths: steps repeat
_kept: list[Any] = []  # what the helper points to


class _Enough(SystemExit):
    """The steps that were asked for are done."""


class DryDevice:
    """The dry device of this process."""

    def __init__(self, gpu: GpuPreset, capacity_bytes: int, assumed: Assumptions) -> None:
        """Put it in place; PyTorch is imported on the way. Raises MissingDependencyError, UsageError."""
        self.gpu, self.assumed = gpu, assumed
        self.failed: str | None = None
        self._refusal = ctypes.create_string_buffer(2048)
        self.helper = library = helper.load()
        for function in (library.memtrace_known, library.memtrace_forget, library.memtrace_share, library.memtrace_set):
            function.argtypes = [ctypes.c_void_p]
        library.memtrace_share.restype, library.memtrace_set.restype = ctypes.c_double, ctypes.c_int64
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        import torch

        numbers = re.findall(r"\d+", torch.__version__)
        config = parse_conf(conf_string(os.environ), (int(numbers[0]), int(numbers[1])), capacity_bytes)
        self.memory = DryMemory(gpu, capacity_bytes, config)
        self.memory.drain = library.memtrace_drain
        library.memtrace_resize.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self.memory.resize = library.memtrace_resize
        with contextlib.suppress(ImportError):
            page_states()  # imports bitsandbytes while there is no GPU: else it looks for CUDA's libraries
        from memtrace.estimate.dryrun.kernels import Kernels

        self.kernels = Kernels(library, self.memory, assumed)
        answers = self._answers()
        _kept.append((answers, library))
        library.memtrace_open(ctypes.byref(answers))
        atexit.register(library.memtrace_close)
        install(self.memory)
        triton.install(self.kernels.forget)
        self.kernels.install(helper.operators_of_cuda())
        compile_model = torch.compile

        def compiled(*args: Any, **kwargs: Any) -> Any:
            assumed.note("compile", "torch.compile: the model runs uncompiled, which takes more memory")
            return compile_model(*args, **kwargs)

        torch.compile = compiled

    def _answers(self) -> helper.Answers:
        device = self.gpu.device
        found = {
            "allocate": self.memory.allocate,
            "release": self.memory.release,
            "refusal": self._refused,
            "value": lambda kind, _maker: self.assumed.value(("float", "integer", "boolean")[kind]),
            "attention": self.kernels.attention,
            "workspace": lambda lt: device.cublaslt_workspace_bytes if lt else device.cublas_workspace_bytes,
            "failed": self._fails,
            "used": self.memory.use,
            "waited": self.memory.wait,
            "multiprocessors": device.multiprocessors,
        }
        return helper.Answers(*(_FUNCTIONS[name](cast(Any, value)) for name, value in found.items()))

    def _refused(self) -> int:
        self._refusal.value = self.memory.refusal.encode()
        return ctypes.addressof(self._refusal)

    def _fails(self, op: bytes) -> None:
        self.failed = f"{op.decode()} can't run without data, at {caller()}"


class DryBackend(backend.CudaBackend):
    """The dry device as the recorder sees it."""

    def __init__(self, device: DryDevice) -> None:
        self.device = device

    def precheck(self) -> None:
        """There is a card for sure."""

    require = precheck

    def when_ready(self, begin: Any) -> None:
        """At once."""
        begin()

    def device_facts(self, device: int) -> dict[str, Any]:
        """Also the mark of a prediction, and what it took for granted."""
        listed = [asdict(one) for one in self.device.assumed.listed.values()]
        return super().device_facts(device) | {"predicted": True, "assumptions": listed}


def run_script(
    program: Sequence[str],
    is_module: bool,
    options: RecordOptions,
    device: DryDevice,
    steps: int | None,
    repeat: bool = False,
) -> DryScript:
    """Run ``program`` (script or module, then its arguments) to its end, its error or its ``steps``-th step.

    ``repeat``: or to the step after which ``_ALIKE`` in a row had the same births and deaths of the same sizes.
    """
    from torch.optim import optimizer

    done, said_at, step = 0, time.monotonic(), OutermostStep()
    courses: list[int] = []

    def count(stepped: object, *_: object) -> None:
        nonlocal done, said_at
        if not step.ends(stepped):
            return
        done += 1
        if sys.stderr.isatty() and time.monotonic() - said_at > _TOLD_AFTER_S:
            said_at = time.monotonic()
            messages.say(f"step {done}: {format_bytes(device.memory.most['reserved_bytes'])} reserved at most so far")
        if steps is not None and done >= steps:
            raise _Enough(0)
        courses.append(device.memory.course)
        device.memory.course = 0
        if repeat and courses[-_ALIKE:] == courses[-1:] * _ALIKE:
            said = f"steps go on as the last {_ALIKE} of {done}, which had the same memory; what follows was not run"
            device.assumed.note("repeat", said)
            raise _Enough(0)

    stand_in(device.assumed)
    without_end(device.assumed)
    optimizer.register_optimizer_step_pre_hook(lambda begun, *_: step.begins(begun))
    optimizer.register_optimizer_step_post_hook(count)
    memory = device.memory
    memory.elsewhere = [Elsewhere(memory.config, policy) for policy in BRACKET]
    memory.elsewhere.append(Elsewhere(memory.config, Policy.DRIVER, keeps_up=True))
    with backend.use(DryBackend(device)):
        code = launcher.launch(program, is_module, options)
    most = memory.most
    peaks = [most["reserved_bytes"], *(one.peak_reserved_bytes for one in memory.elsewhere)]
    written = sorted(options.folder.glob(f"{options.stem}*{options.suffix}"), key=lambda file: file.stat().st_mtime)
    return DryScript(
        code, done, most["requested_bytes"], most["allocated_bytes"], most["reserved_bytes"],
        min(peaks), max(peaks), memory.total_bytes, memory.total_bytes - memory.outside_bytes - most["reserved_bytes"],
        all(one.fits for one in memory.elsewhere), memory.refused[0] if code and memory.refused else None,
        device.failed if code and not memory.refused else None,
        list(device.assumed.listed.values()),
        str(written[-1]) if written else None,
    )  # fmt: skip


def output_of(path: Path, force: bool) -> RecordOptions:
    """Where the recording goes."""
    return RecordOptions(path.parent.absolute(), path.stem, path.suffix or ".pickle", force=force, max_entries=1 << 22)
