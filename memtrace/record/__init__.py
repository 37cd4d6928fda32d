"""Recording: the only part of memtrace that imports PyTorch (lazily, inside functions)."""
