"""How texts for people call what the JSON has as identifiers: verdicts, pools, streams, counts of things."""

from __future__ import annotations

_VERDICTS = {"no_oom": "no OOM", "not_this_process": "not this process", "not_gpu_memory": "not GPU memory"}


def verdict_name(verdict: str) -> str:
    """``no OOM`` for ``no_oom``."""
    return _VERDICTS.get(verdict, verdict.replace("_", " "))
