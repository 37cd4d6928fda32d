"""An exact model of PyTorch's CUDA caching allocator: replay of recordings, and what-if under other settings."""

from memtrace.allocator.replay import InitialBlocks, InitialSegments, Replay, replay_device

__all__ = ["InitialBlocks", "InitialSegments", "Replay", "replay_device"]
