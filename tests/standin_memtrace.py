"""``memtrace`` with the stand-in for ``torch.cuda.memory``: what tests run in a process of its own.

``MEMTRACE_TEST_CAPACITY`` is the imitated card in bytes. ``MEMTRACE_TEST_TIGHTEN=1`` shrinks it below the peak so far
once the second optimizer step is over, as a training script under test would do itself on a GPU.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

from capture_standin import StandIn

from memtrace import cli
from memtrace.record import backend


def tighten_after(stand_in: StandIn, steps: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done = []

    def count(*_: object) -> None:
        done.append(1)
        if len(done) == steps:
            stand_in.capacity = int(stand_in.peak * 0.9)

    register_optimizer_step_post_hook(count)


def main(words: list[str]) -> int:
    with StandIn(capacity=int(os.environ.get("MEMTRACE_TEST_CAPACITY", 1 << 40))) as stand_in, backend.use(stand_in):
        if os.environ.get("MEMTRACE_TEST_TIGHTEN"):
            tighten_after(stand_in, 2)
        return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
