"""An exact model of PyTorch's CUDA caching allocator: replay of recordings, and what-if under other settings.

Public names are imported on first use: the model alone (config, state, flat) needs nothing of what reads recordings.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.allocator.replay.initial import InitialBlocks
    from memtrace.allocator.replay.replay import Replay, replay_device
    from memtrace.allocator.replay.segments import InitialSegments

__all__ = ["InitialBlocks", "InitialSegments", "Replay", "replay_device"]

_HOME = {
    "InitialBlocks": "initial",
    "InitialSegments": "segments",
    "Replay": "replay",
    "replay_device": "replay",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
