"""One out-of-memory message as read from a log; its figures arrive one by one."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import StrEnum

from memtrace.units import GIB, KIB, MIB, TIB

Range = tuple[str | None, str | None]
"""Versions of PyTorch: at least (inclusive), below (exclusive); None is open."""

CONTRACT_KEYS = (
    "is_gpu_oom", "backend", "device", "tried_bytes", "total_bytes", "free_bytes", "allocated_bytes", "reserved_bytes",
    "reserved_unallocated_bytes", "limit_bytes", "process_bytes", "component",
)  # fmt: skip
"""Keys of the ``oom`` object of ``memtrace explain --json``."""

SIZE = r"(\d[\d,]{0,20}(?:\.\d{1,6})?)(bytes?|[KMGT]i?B)"
"""Regular expression of a size in text whose white space has been removed: two groups, figure and unit."""

SENTINEL_BYTES = 1 << 62
"""Figures from here on are a printed all-ones word (or a limit nobody set), not an amount of memory."""

_BINARY = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class MessageKind(StrEnum):
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


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def intersect(one: Range, other: Range) -> Range | None:
    """Versions in both ranges; None if there are none."""
    low = max((v for v in (one[0], other[0]) if v), key=_key, default=None)
    high = min((v for v in (one[1], other[1]) if v), key=_key, default=None)
    if low is not None and high is not None and _key(low) >= _key(high):
        return None
    return low, high


def unit_bytes(unit: str, *, decimal_units: bool = False) -> int:
    """Bytes in a printed unit.

    ``GB`` counts as GiB unless ``decimal_units``: PyTorch's CUDA texts only ever print GiB, so ``GB`` in one is a
    person's retyping; Metal's older texts do print GB.
    """
    letter = unit[:1].lower()
    if letter in ("", "b"):
        return 1
    return (_DECIMAL if decimal_units and "i" not in unit.lower() else _BINARY)[letter]


@dataclass(slots=True)
class OomMessage:
    """What one message says; every figure is as printed, in bytes, and None where the text does not give it.

    Nothing is derived: the formats of PyTorch 1.4-2.0 print reserved bytes, those of 2.1 and later (and of 1.3 and
    earlier, as "cached") print reserved-but-unallocated bytes, and the other of the two stays None.
    ``half_unit_bytes`` maps a figure's name to half of its last printed digit (0 for exact byte counts): PyTorch
    prints two decimals, so a figure stands for an interval.
    """

    kind: MessageKind
    is_gpu_oom: bool = True
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
    half_unit_bytes: dict[str, float] = field(default_factory=dict)
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
    is_caught: bool = False
    """It stands inside a warning: the program caught the error and went on."""
    times_printed: int = 1
    notes: tuple[str, ...] = ()
    text: str = ""
    """The message itself, white space collapsed, at most 600 characters."""
    consumed: int = field(default=0, compare=False)
    """While it is read: characters of the body that belong to it."""

    # ---- what it says ------------------------------------------------------------------------------------------
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
    def figures(self) -> Set[str]:
        """Names of the figures that it gives."""
        return self.half_unit_bytes.keys()

    @property
    def has_figures(self) -> bool:
        """Whether the text says how much was asked for or how much there was: it got as far as the device's figures."""
        return self.tried_bytes is not None or self.total_bytes is not None

    @property
    def is_whole(self) -> bool:
        """Whether the text was read to its end without anything in between."""
        return self.has_figures and not self.cut_short and not self.damaged

    # ---- while it is read --------------------------------------------------------------------------------------
    def put(self, name: str, figure: str, unit: str = "bytes", *, decimal_units: bool = False) -> None:
        """Record figure ``name``; sentinels leave it unknown, and a first reading is never overwritten."""
        factor = unit_bytes(unit, decimal_units=decimal_units)
        try:
            size_bytes = int((Decimal(figure.replace(",", "")) * factor).to_integral_value())
        except InvalidOperation:
            return
        if size_bytes >= SENTINEL_BYTES:
            self.note(f"{name.removesuffix('_bytes').replace('_', ' ')} printed as {figure} {unit}: means unknown")
        elif name not in self.figures:
            setattr(self, name, size_bytes)
            self.half_unit_bytes[name] = 0.0 if factor == 1 else 0.5 * factor / 10 ** len(figure.partition(".")[2])

    def put_device(self, written: str | None) -> None:
        """Record the device number; PyTorch 2.3 (and one back end up to 2.9) writes it as a raw byte."""
        if written and written.isdigit():
            self.device = int(written)
        elif written:
            self.device = ord(written)
            self.note("the device number is a raw byte (PyTorch 2.3)")

    def note(self, text: str) -> None:
        """Remember something about the reading that a person should know."""
        if text not in self.notes:
            self.notes += (text,)

    def implies(self, versions: Range) -> None:
        """Narrow the range of PyTorch versions; a contradiction is ignored (the first evidence stays)."""
        known = self.torch_at_least, self.torch_below
        self.torch_at_least, self.torch_below = intersect(known, versions) or known
