"""What a text's wording says about the PyTorch version that printed it: at least (inclusive), below (exclusive)."""

from __future__ import annotations

import re

Range = tuple[str | None, str | None]

UNKNOWN: Range = (None, None)

# Exceptions as they changed class; the bound between 2.4 and 2.5 is known from logs only. RuntimeError (1.12 and
# earlier) says nothing, for programs raise it again with the old text in it.
EXCEPTIONS: dict[str, Range] = {
    "torch.cuda.OutOfMemoryError": ("1.13", "2.5"),
    "torch.OutOfMemoryError": ("2.5", None),
    "torch.AcceleratorError": ("2.8", None),
}

# Wording after the figures (white space removed), most specific first.
TAILS: tuple[tuple[re.Pattern[str], Range], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), versions)
    for pattern, versions in (
        (r"expandable_segmentsisenabled\.Ifinsteadtheprocess", ("2.15", None)),
        (r"exceedstheexpandable-segmentreserve", ("2.15", None)),
        (r"customallocatorbackingthisMemPool", ("2.15", None)),
        (r"PYTORCH_ALLOC_CONF=", ("2.10", "2.11")),
        (r"#optimizing-memory-usage-with-pytorch-cuda-alloc-conf", ("2.8", None)),
        (r"unallocatedmemoryislargetrysettingmax_split_size_mb", ("2.1", "2.2")),
        (r"unallocatedmemoryislargetrysettingPYTORCH_\w+_CONF=expandable", ("2.2", None)),
        (r"notes/cuda\.html#environment-variables", ("2.2", "2.11")),
        (r">>allocatedmemorytrysettingmax_split_size_mb", ("1.10", "2.1")),
    )
)


def key(version: str) -> tuple[int, ...]:
    """``"2.10"`` -> ``(2, 10)``, for comparing."""
    return tuple(int(part) for part in version.split("."))


def intersect(one: Range, other: Range) -> Range | None:
    """Versions in both ranges; None if there are none."""
    low = max((v for v in (one[0], other[0]) if v), key=key, default=None)
    high = min((v for v in (one[1], other[1]) if v), key=key, default=None)
    if low is not None and high is not None and key(low) >= key(high):
        return None
    return low, high
