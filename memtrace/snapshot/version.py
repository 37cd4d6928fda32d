"""Which PyTorch release and back end wrote a snapshot, judged by the keys that are there and the ones that are not.

No release is written into the file. Each feature below appeared in the release beside it; features marked
``always`` are in every file from that release on, so their absence is evidence as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.snapshot.model import Snapshot


# (release, whether it is in every file since, kind of dictionary, key)
_FEATURES = (
    ("1.13", True, "segment", "stream"),
    ("2.0", True, "segment", "requested_size"),
    ("2.0", True, "top", "device_traces"),
    ("2.1", True, "segment", "segment_pool_id"),
    ("2.1", True, "block", "address"),
    ("2.2", True, "event", "time_us"),
    ("2.3", True, "top", "allocator_settings"),
    ("2.5", True, "top", "external_annotations"),
    ("2.8", True, "event", "compile_context"),
    ("2.9", True, "settings", "graph_capture_record_stream_reuse"),
    ("2.10", True, "event", "user_metadata"),
    ("2.11", False, "event", "forward_frames"),
    ("2.12", True, "event", "pool_id"),
    ("2.13", True, "settings", "max_round_threshold"),
    ("2.14", True, "top", "host_segments"),
    ("2.15", False, "event", "internal_metadata"),
)


def _order(release: str) -> tuple[int, int]:
    major, minor = release.split(".")
    return int(major), int(minor)


def release_range(samples: Mapping[str, Mapping[str, Any] | None]) -> tuple[str | None, str | None]:
    """(at least, below) of the PyTorch release; None where open.

    ``samples`` maps "top", "segment", "block", "event", "settings" to one recorded dictionary of that kind, or None
    where the file holds none. Contradicting keys (vendor builds for other accelerators mix them) give (None, None).
    """
    at_least: str | None = None
    below: str | None = None
    for release, always, where, key in _FEATURES:
        sample = samples.get(where)
        if sample is None:
            continue
        if key in sample:
            at_least = release
        elif always and below is None:
            below = release
    block = samples.get("block")
    if block is not None and "history" in block:
        at_least, below = at_least or "1.13", below or "2.1"
    if at_least and below and _order(at_least) >= _order(below):
        return None, None
    return at_least, below


_OTHERS = {  # back ends that are not CUDA or HIP: where their files lie
    "npu": ("/torch_npu/",), "musa": ("/torch_musa/",), "mlu": ("/torch_mlu/",), "gcu": ("/torch_gcu/",),
    "xpu": ("/torch/xpu/", "/c10/xpu/"),
}  # fmt: skip


def other_backend(snapshot: Snapshot) -> str | None:
    """``npu``, ``xpu``, … where the settings or a file on the stacks name such a back end; None for CUDA and HIP."""
    set_by = (name for name in _OTHERS if snapshot.settings.get(f"PYTORCH_{name.upper()}_ALLOC_CONF"))
    if (named := next(set_by, None)) is not None:
        return named
    files = {frame.filename for frame in snapshot.stacks.frames}
    seen = "\n".join("/" + name.replace("\\", "/") for name in files)
    return next((name for name, parts in _OTHERS.items() if any(part in seen for part in parts)), None)
