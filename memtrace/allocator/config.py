"""The caching allocator's settings, as a snapshot exports them or as PyTorch's configuration string gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_MIB = 1 << 20
Version = tuple[int, int]
NEWEST: Version = (2, 15)


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Every setting that can change placement or reserved memory. Sizes in bytes; ``None`` means unlimited or unset.

    ``version`` selects the quirks of a PyTorch release (major, minor). ``roundup_divisions`` holds one value for each
    interval that starts at 1, 2, 4 … 32768 MiB. ``limit_bytes`` is the most the allocator may reserve.
    """

    version: Version = NEWEST
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * _MIB
    large_segment_bytes: int = 20 * _MIB
    gc_threshold: float = 0.0
    roundup_divisions: tuple[int, ...] = (0,) * 16
    roundup_bypass_bytes: int | None = None
    expandable_segments: bool = False
    memory_fraction: float | None = None
    limit_bytes: int | None = None

    @property
    def one_division_disables_rounding(self) -> bool:
        """PyTorch 2.0: one division returned the request unchanged, not even rounded to 512 bytes."""
        return self.version <= (2, 0)

    @property
    def gc_active(self) -> bool:
        """Garbage collection needs a threshold and a limit; without a limit the setting does nothing."""
        return self.gc_threshold > 0 and self.limit_bytes is not None

    def with_limit(self, limit_bytes: int | None) -> AllocatorConfig:
        """The same settings under another limit on reserved bytes."""
        return replace(self, limit_bytes=limit_bytes)


def _as_int(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def from_snapshot(settings: Mapping[str, Any], version: Version = NEWEST) -> AllocatorConfig:
    """The recorded settings (``allocator_settings``); defaults for whatever is missing or makes no sense.

    Of the settings that PyTorch does not export, the ones named in the recorded string are read from there.
    """
    max_split = _as_int(settings.get("max_split_size"), -1)
    threshold = settings.get("garbage_collection_threshold", 0.0)
    table = settings.get("roundup_power2_divisions")
    divisions = [0] * 16
    if isinstance(table, Mapping):
        for i in range(16):
            value = _as_int(table.get(str(1 << i)), 0)
            divisions[i] = value if 0 <= value <= 1 << 30 else 0
    named = _named_sizes(settings)
    large = named.get("large_segment_size_mb", 20 * _MIB)
    return AllocatorConfig(
        version=version,
        max_split_bytes=max_split if 0 < max_split < (1 << 60) else None,
        max_non_split_rounding_bytes=named.get("max_non_split_rounding_mb", large),
        large_segment_bytes=large,
        gc_threshold=float(threshold) if isinstance(threshold, (int, float)) and 0 < threshold < 1 else 0.0,
        roundup_divisions=tuple(divisions),
        expandable_segments=settings.get("expandable_segments") is True,
    )


def _named_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that only the raw string tells; PyTorch takes the first of these variables that is set."""
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        text = settings.get(key)
        if isinstance(text, str) and text:
            found: dict[str, int] = {}
            for item in text.replace(" ", "").split(","):
                name, _, value = item.partition(":")
                if name in ("large_segment_size_mb", "max_non_split_rounding_mb") and value.isdigit():
                    found[name] = min(int(value), 1 << 30) * _MIB
            return found
    return {}
