"""Multi-GPU runs: one summary a rank, made by many workers, then compared."""
