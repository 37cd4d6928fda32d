"""What cuDNN's recurrent layers ask PyTorch's allocator for, in order: evaluation, forward, backward.

    python tests/gpu/check_recurrent.py OUT.jsonl      # on a GPU

``tests/unit/test_dryrun_recurrent.py`` holds the dry run to what an H200 said (``tests/truth/recurrent_layers.jsonl``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIDDLE = (100, 32, 256, 512)  # steps, sequences, inputs, units
#: Sizes, layers, both directions, dropout, precision.
SHAPES = (
    (*MIDDLE, 2, 0, 0.0, "float32"),
    (*MIDDLE, 1, 0, 0.0, "float32"),
    (50, 32, 256, 512, 1, 0, 0.0, "float32"),
    (1, 32, 256, 512, 1, 0, 0.0, "float32"),
    (100, 16, 256, 512, 1, 0, 0.0, "float32"),
    (100, 32, 128, 512, 1, 0, 0.0, "float32"),
    (100, 32, 256, 256, 1, 0, 0.0, "float32"),
    (*MIDDLE, 3, 0, 0.0, "float32"),
    (*MIDDLE, 2, 1, 0.0, "float32"),
    (*MIDDLE, 1, 1, 0.0, "float32"),
    (*MIDDLE, 2, 0, 0.2, "float32"),
    (*MIDDLE, 3, 1, 0.3, "float32"),
    (*MIDDLE, 2, 0, 0.0, "float16"),
    (*MIDDLE, 2, 0, 0.0, "bfloat16"),
    (*MIDDLE, 1, 1, 0.0, "float16"),
    (37, 7, 100, 200, 2, 1, 0.5, "float32"),
    (37, 7, 100, 200, 2, 0, 0.0, "float16"),
    (200, 64, 512, 1024, 2, 0, 0.0, "float32"),
    (200, 64, 512, 1024, 4, 1, 0.1, "float16"),
    (128, 128, 64, 64, 1, 0, 0.0, "float32"),
    (300, 1, 300, 600, 2, 1, 0.0, "float32"),
    (64, 256, 128, 256, 2, 0, 0.5, "float32"),
    (64, 256, 128, 256, 2, 0, 0.5, "float16"),
)
MARK_BYTES = 7777


def jobs() -> Iterator[tuple[Any, ...]]:
    """Kind, the numbers of :data:`SHAPES`, and whether the sequences are packed."""
    for kind in ("LSTM", "GRU", "RNN"):
        for shape in SHAPES:
            for packed in (False, True):
                yield kind, *shape, packed


def run(job: tuple[Any, ...], asked: Callable[[Callable[[], Any]], Any]) -> None:
    """One layer; ``asked`` runs each part and looks at its memory."""
    import torch

    kind, steps, batch, inputs, units, layers, both, dropout, precision, packed = job
    dtype = getattr(torch, precision)
    layer = getattr(torch.nn, kind)(inputs, units, layers, bidirectional=bool(both), dropout=dropout).to(dtype).cuda()
    x = torch.ones(steps, batch, inputs, dtype=dtype).cuda().requires_grad_()
    given: Any = x
    if packed:
        lengths = torch.linspace(steps, max(1, steps // 2), batch).long()
        given = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    layer.eval()
    with torch.no_grad():
        asked(lambda: layer(given))
    layer.train()
    found = asked(lambda: layer(given))
    loss = (found[0].data if packed else found[0]).sum()
    asked(loss.backward)


def measure(out: Path) -> None:
    import torch

    with out.open("w") as rows:
        for job in jobs():
            parts: list[list[int]] = []

            def asked(part: Callable[[], Any], parts: list[list[int]] = parts) -> Any:
                torch.cuda.memory._record_memory_history(context=None, max_entries=10000)
                found = part()
                events = torch.cuda.memory._snapshot()["device_traces"][0]
                torch.cuda.memory._record_memory_history(enabled=None)
                parts.append([event["size"] for event in events if event["action"] == "alloc"])
                return found

            run(job, asked)
            rows.write(json.dumps({"job": job, "asked": parts}) + "\n")


def mark(job: tuple[Any, ...]) -> None:
    """The same, with marks between the parts in a recording that somebody else makes."""
    import torch

    def asked(part: Callable[[], Any]) -> Any:
        torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda")
        found = part()
        torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda")
        return found

    run(job, asked)


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
