"""One out-of-memory message as read from a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

CONTRACT_KEYS = (
    "is_gpu_oom",
    "backend",
    "device",
    "tried_bytes",
    "total_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "reserved_unallocated_bytes",
    "limit_bytes",
    "process_bytes",
    "component",
)
"""Keys of the ``oom`` object of ``memtrace explain --json``."""


class Kind(StrEnum):
    """Which family of text a message belongs to."""

    ALLOCATOR = "allocator"  # PyTorch's caching allocator (CUDA, HIP, XPU, NPU and relatives)
    ASYNC = "async"  # PyTorch's cudaMallocAsync back end
    METAL = "metal"  # PyTorch's MPS allocator
    WARNING = "warning"  # 2.13+: one refused driver call; PyTorch flushes its cache and tries again
    DRIVER = "driver"  # a driver call refused, no figures from an allocator
    LIBRARY = "library"  # cuBLAS, NCCL, bitsandbytes, … allocating for themselves inside a PyTorch process
    HIDDEN = "hidden"  # an error raised while PyTorch was composing its out-of-memory text
    FOREIGN = "foreign"  # another framework's GPU allocator
    HOST = "host"  # look-alike: memory of the machine, not of the GPU
    ON_CHIP = "on_chip"  # look-alike: shared memory or registers of one kernel
    PLAN = "plan"  # look-alike: a program that computed beforehand that something will not fit


def _no_precision() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class OomMessage:
    """What one message says; every figure is as printed, in bytes, and None where the text does not give it.

    Nothing is derived: the formats of PyTorch 1.4-2.0 print reserved bytes, those of 2.1 and later (and of 1.3 and
    earlier, as "cached") print reserved-but-unallocated bytes, and the other of the two stays None.
    ``half_unit_bytes`` maps a figure's name to half of its last printed digit (0 for exact byte counts).
    """

    is_gpu_oom: bool
    kind: Kind
    backend: str | None = None
    device: int | None = None
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    limit_bytes: int | None = None
    process_bytes: int | None = None
    component: str | None = None
    private_pools_bytes: int | None = None
    other_allocations_bytes: int | None = None
    other_processes: tuple[tuple[int, int | None], ...] = ()
    half_unit_bytes: Mapping[str, float] = field(default_factory=_no_precision, hash=False)
    what: str = ""
    """One clause in words: what was refused, by whom."""
    line: int = 0
    """1-based line of the log on which the message begins."""
    rank: int | None = None
    exception: str | None = None
    torch_at_least: str | None = None
    torch_below: str | None = None
    cut_short: bool = False
    """The text ends before its format does."""
    damaged: bool = False
    """Something stood between the parts of the text, or a part could not be read."""
    times_printed: int = 1
    notes: tuple[str, ...] = ()
    text: str = ""
    """The message itself, white space collapsed, at most 600 characters."""

    def interval(self, name: str) -> tuple[float, float] | None:
        """Lowest and highest value (bytes) that prints as figure ``name`` did; None where it isn't given."""
        value = getattr(self, name)
        if value is None:
            return None
        half = self.half_unit_bytes.get(name, 0.0)
        return max(0.0, value - half), value + half

    def contract(self) -> dict[str, object]:
        """The ``oom`` object of the JSON contract."""
        return {key: getattr(self, key) for key in CONTRACT_KEYS}

    @property
    def has_figures(self) -> bool:
        """Whether the text says how much was asked for or how much there was."""
        return self.tried_bytes is not None or self.total_bytes is not None
