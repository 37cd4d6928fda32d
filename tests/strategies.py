"""Snapshots for tests: hand-made ones in every release's form, and damaged ones."""

from __future__ import annotations

import copy
from typing import Any

MIB = 1 << 20
FRAME = {"filename": "/home/me/train.py", "line": 12, "name": "step"}
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
    "expandable_segments": False, "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
}  # fmt: skip
BASE = 0x7F0000000000


def block(size: int, requested: int, state: str = "active_allocated", address: int | None = None) -> dict[str, Any]:
    """One block of a PyTorch ≥ 2.1 snapshot."""
    made = {"size": size, "requested_size": requested, "state": state, "frames": [FRAME] if "active" in state else []}
    return made if address is None else {"address": address, **made}


def segment(
    address: int, blocks: list[dict[str, Any]], device: int = 0, small: bool = False, **extra: Any
) -> dict[str, Any]:
    """A segment tiled by ``blocks`` (addresses filled in)."""
    at, placed = address, []
    for made in blocks:
        placed.append({"address": at, **made})
        at += made["size"]
    active = [b for b in placed if b["state"] != "inactive"]
    return {
        "device": device, "address": address, "total_size": at - address,
        "allocated_size": sum(b["size"] for b in placed if b["state"] == "active_allocated"),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b["requested_size"] for b in active),
        "stream": 0, "segment_type": "small" if small else "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": placed, **extra,
    }  # fmt: skip


def event(action: str, addr: int, size: int, time_us: int, frames: Any = (FRAME,), **extra: Any) -> dict[str, Any]:
    """A trace entry of PyTorch 2.11's form."""
    return {
        "action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "compile_context": "N/A",
        "user_metadata": "", "frames": list(frames), **extra,
    }  # fmt: skip


def modern() -> dict[str, Any]:
    """A sound snapshot of about PyTorch 2.11: two allocations in a 20 MiB segment, one freed; and a small one."""
    free_frames = [FRAME]
    return copy.deepcopy({  # so that a test may damage it without damaging the next one's
        "segments": [
            segment(BASE, [block(2 * MIB, 2 * MIB), block(18 * MIB, 0, "inactive")]),
            segment(BASE + (1 << 30), [block(512, 100), block(2 * MIB - 512, 0, "inactive")], small=True),
        ],
        "device_traces": [[
            event("segment_alloc", BASE, 20 * MIB, 1), event("alloc", BASE, 2 * MIB, 2),
            event("alloc", BASE + 2 * MIB, 3 * MIB, 3),
            event("free_requested", BASE + 2 * MIB, 3 * MIB, 4, free_frames),
            event("free_completed", BASE + 2 * MIB, 3 * MIB, 4, free_frames),
            event("segment_alloc", BASE + (1 << 30), 2 * MIB, 5), event("alloc", BASE + (1 << 30), 100, 6),
        ]],
        "allocator_settings": {**SETTINGS, "graph_capture_record_stream_reuse": False},
        "external_annotations": [],
    })  # fmt: skip


def without(raw: dict[str, Any], *keys: str, trace_keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy without some top-level and trace keys."""
    made = copy.deepcopy({key: value for key, value in raw.items() if key not in keys})
    for trace in made.get("device_traces", []):
        for entry in trace:
            for key in trace_keys:
                entry.pop(key, None)
    return made


def legacy_20() -> dict[str, Any]:
    """PyTorch 2.0: ``history`` instead of block frames, no block addresses, no times."""
    made = without(modern(), "allocator_settings", "external_annotations",
                   trace_keys=("time_us", "compile_context", "user_metadata"))  # fmt: skip
    for seg in made["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            seg.pop(key)
        for made_block in seg["blocks"]:
            frames = made_block.pop("frames")
            made_block.pop("address")
            if frames:
                made_block["history"] = [
                    {"addr": seg["address"], "real_size": made_block["requested_size"], "frames": frames}
                ]
    return made


def legacy_113() -> list[dict[str, Any]]:
    """PyTorch 1.13: a bare list, no requested sizes but in ``history``."""
    segments = legacy_20()["segments"]
    for seg in segments:
        seg.pop("requested_size")
        for made_block in seg["blocks"]:
            made_block.pop("requested_size")
    return segments
