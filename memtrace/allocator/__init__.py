"""An exact model of PyTorch's CUDA caching allocator: replay of recordings, and what-if under other settings."""
