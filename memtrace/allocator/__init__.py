"""An exact model of PyTorch's CUDA caching allocator: replay of recordings, and what-if under other settings."""

from memtrace.allocator.initial import InitialBlocks
from memtrace.allocator.replay import Replay, replay_device
from memtrace.allocator.segments import InitialSegments

__all__ = ["InitialBlocks", "InitialSegments", "Replay", "replay_device"]
