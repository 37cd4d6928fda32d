"""The caching allocator's settings and the quirks of PyTorch releases that change placement or reserved memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memtrace.frozen import dataclass

if TYPE_CHECKING:
    from memtrace.snapshot.model import Snapshot

_RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})")
_MIB = 1 << 20
Version = tuple[int, int]
OLDEST: Version = (1, 10)  # the first whose settings are modelled
NEWEST: Version = (2, 15)
INTERVALS = 16
CONF_VARIABLES = (  # PyTorch's order; torch_npu reads its own
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Every setting that can change placement or reserved memory. Sizes in bytes; ``None`` means unlimited or unset.

    ``version`` selects the quirks of a PyTorch release (major, minor). ``roundup_divisions`` holds one value for each
    interval that starts at 1, 2, 4 … 32768 MiB. ``limit_bytes`` is the most the allocator may reserve
    (``set_per_process_memory_fraction``, or what the card leaves). ``preempt_bytes`` is the size above which
    ``throw_on_cudamalloc_oom`` refuses without asking the driver, ``reservation_bytes`` the virtual length of one
    expandable segment, ``padding_bytes`` what a back end adds to every request before rounding (torch_npu: 32).
    """

    version: Version = NEWEST
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * _MIB
    large_segment_bytes: int = 20 * _MIB
    gc_threshold: float = 0.0
    roundup_divisions: tuple[int, ...] = (0,) * INTERVALS
    roundup_bypass_bytes: int | None = None
    expandable_segments: bool = False
    memory_fraction: float | None = None
    preempt_bytes: int | None = None
    backend: str = "native"
    reservation_bytes: int = 1 << 40
    padding_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def one_division_disables_rounding(self) -> bool:
        """PyTorch 2.0: one division returned the request unchanged, not even rounded to 512 bytes."""
        return self.version <= (2, 0)

    @property
    def private_pools_expand(self) -> bool:
        """Whether private pools use expandable segments too (from 2.5)."""
        return self.version >= (2, 5)

    @property
    def split_looks_at_flag(self) -> bool:
        """Until 2.9 the fine split rule followed the global flag, even in a pool with ordinary segments."""
        return self.version < (2, 10)

    @property
    def gc_active(self) -> bool:
        """Garbage collection needs a threshold and a limit; without a limit the setting does nothing."""
        return self.gc_threshold > 0 and self.limit_bytes is not None

    def with_limit(self, limit_bytes: int | None) -> AllocatorConfig:
        """The same settings under another limit on reserved bytes."""
        return replace(self, limit_bytes=limit_bytes)

    def places_like(self, other: AllocatorConfig) -> bool:
        """Whether both settings put blocks in the same places as long as no limit interferes."""
        return replace(self, limit_bytes=None, memory_fraction=None, version=NEWEST) == replace(
            other, limit_bytes=None, memory_fraction=None, version=NEWEST
        )


def fraction_limit(fraction: float, device_total_bytes: int, version: Version = NEWEST) -> int | None:
    """The limit that a memory fraction sets. From 2.10 a fraction of 1 is no limit; before, it was one."""
    if version >= (2, 10) and fraction >= 1.0:
        return None
    return int(fraction * device_total_bytes)


def release_of(snapshot: Snapshot) -> Version:
    """The PyTorch release whose rules apply: as recorded, else the oldest that writes such a file, else the newest."""
    for text in (snapshot.memtrace.get("torch"), snapshot.torch_at_least):
        match = _RELEASE.match(text) if isinstance(text, str) else None
        if match is not None:
            return int(match[1]), int(match[2])
    return NEWEST


def _as_int(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def conf_string(settings: Mapping[str, Any]) -> str:
    """The raw settings string a snapshot recorded; the first of PyTorch's variables that is set wins."""
    for key in CONF_VARIABLES:
        text = settings.get(key)
        if isinstance(text, str) and text:
            return text
    return ""


def from_snapshot(settings: Mapping[str, Any], version: Version = NEWEST) -> AllocatorConfig:
    """The recorded settings (``allocator_settings``); defaults for whatever is missing or makes no sense.

    Of the settings that PyTorch does not export, the ones named in the recorded string are read from there.
    """
    max_split = _as_int(settings.get("max_split_size"), -1)
    threshold = settings.get("garbage_collection_threshold", 0.0)
    table = settings.get("roundup_power2_divisions")
    divisions = [0] * INTERVALS
    if isinstance(table, Mapping):
        for i in range(INTERVALS):
            value = _as_int(table.get(str(1 << i)), 0)
            divisions[i] = value if 0 <= value <= 1 << 30 else 0
    named = dict(item.partition(":")[::2] for item in conf_string(settings).replace(" ", "").split(","))
    large = _megabytes(named.get("large_segment_size_mb", ""), 20 * _MIB)
    large = large if large > 10 * _MIB else 20 * _MIB
    return AllocatorConfig(
        version=version,
        max_split_bytes=max_split if 0 < max_split < (1 << 60) else None,
        max_non_split_rounding_bytes=_megabytes(named.get("max_non_split_rounding_mb", ""), large),
        large_segment_bytes=large,
        gc_threshold=float(threshold) if isinstance(threshold, (int, float)) and 0 < threshold < 1 else 0.0,
        roundup_divisions=tuple(divisions),
        expandable_segments=settings.get("expandable_segments") is True,
        memory_fraction=_fraction(named.get("per_process_memory_fraction", "")),
    )


def _megabytes(text: str, default: int) -> int:
    return min(int(text), 1 << 30) * _MIB if text.isascii() and text.isdigit() and len(text) < 12 else default


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None
