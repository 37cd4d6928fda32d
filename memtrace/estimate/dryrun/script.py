"""``memtrace dryrun SCRIPT``: an unchanged program on a card that is not there, recorded as a real run would be."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from typing import Any

from memtrace.allocator.conf_text import parse_conf
from memtrace.allocator.config import CONF_VARIABLES
from memtrace.estimate.dryrun import helper
from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.estimate.dryrun.cuda import install
from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.presets import GpuPreset, gpu_preset

_FUNCTIONS = dict(helper.Answers._fields_)


@dataclass(frozen=True, slots=True)
class Card:
    """What runs: ``capacity_bytes`` of memory and the kernels of ``gpu``."""

    gpu: GpuPreset
    capacity_bytes: int


def open_device(card: Card | None = None, assumed: Assumptions | None = None) -> DryMemory:
    """Put the dry device into this process; PyTorch is imported on the way. Raises MissingDependencyError, UsageError."""
    gpu = card.gpu if card else gpu_preset("h200")
    assumed = assumed or Assumptions()
    library = helper.load()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    library.memtrace_known.argtypes = [ctypes.c_void_p]
    memory: Any = None
    kernels: Any = None
    refusal = ctypes.create_string_buffer(2048)

    def refused() -> int:
        refusal.value = memory.refusal.encode()
        return ctypes.addressof(refusal)

    given = helper.Answers(
        _FUNCTIONS["allocate"](lambda size: memory.allocate(size)),
        _FUNCTIONS["release"](lambda address: memory.release(address)),
        _FUNCTIONS["refusal"](refused),
        _FUNCTIONS["value"](lambda kind, _maker: assumed.value(("float", "integer", "boolean")[kind])),
        _FUNCTIONS["attention"](lambda facts: kernels.attention(facts)),
        _FUNCTIONS["workspace"](
            lambda biased: gpu.device.cublaslt_workspace_bytes if biased else gpu.device.cublas_workspace_bytes
        ),
    )
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    total = card.capacity_bytes if card else gpu.total_bytes
    text = next((os.environ[name] for name in CONF_VARIABLES if os.environ.get(name)), "")
    memory = DryMemory(gpu, total, parse_conf(text, version, total))
    try:
        import bitsandbytes  # noqa: F401  before there is a GPU: it would look for the CUDA libraries
    except ImportError:
        pass
    library.memtrace_open(ctypes.byref(given))
    _kept.extend((given, refusal, library))
    from memtrace.estimate.dryrun.kernels import Kernels

    install(memory)
    kernels = Kernels(library, gpu.device, assumed)
    kernels.install(helper.operators_of_cuda())
    import atexit

    atexit.register(library.memtrace_close)
    return memory


_kept: list[Any] = []
