"""How texts for people call what the JSON has as identifiers: verdicts, streams, pools."""

from __future__ import annotations

_VERDICTS = {"no_oom": "no OOM", "not_gpu_memory": "not GPU memory", "not_pytorch": "not PyTorch"}


def verdict_name(verdict: str) -> str:
    """``no OOM`` for ``no_oom``."""
    return _VERDICTS.get(verdict, verdict.replace("_", " "))


def stream_name(stream: int) -> str:
    """``default stream``, or ``stream 0x55d0``."""
    return f"stream 0x{stream:x}" if stream else "default stream"


def pool_name(name: str) -> str:
    """A pool as answers name it (``large``, ``(1, 0) large``), with the word that says what the pair is."""
    return f"private pool {name}" if name.startswith("(") else name
