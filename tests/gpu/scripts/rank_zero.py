"""Rank 0 of a run of ``stack_programs.py``, for its peaks alone: ``rank_zero.py NAME FOLDER`` (with a config.json).

Prints the peaks as one line of JSON at the end. The program is the one that ``record_truth.py`` records, in full size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent), str(HERE.parent.parent.parent)]

import torch  # noqa: E402
from stack_programs import STACKS  # noqa: E402
from truth_configs import RUNS  # noqa: E402

from memtrace.record import qlora  # noqa: E402

NAME, FOLDER = sys.argv[1], Path(sys.argv[2])


class Rank:
    """What a program asks of its stage; nothing is noted."""

    device, small, rank, checkpoint, scratch = "cuda:0", False, 0, FOLDER, FOLDER
    ranks, options, cfg = RUNS[NAME].ranks, RUNS[NAME].options, qlora.StepConfig(**RUNS[NAME].step)

    def nothing(self, *_args: Any, **_options: Any) -> None:
        """Nobody asks."""

    mark = know = follow = note = nothing

    def surprise(self) -> bool:
        """No larger batch."""
        return False


torch.distributed.init_process_group("nccl", init_method=f"file://{FOLDER}/meeting", rank=0, world_size=Rank.ranks)
torch.manual_seed(0)
for _ in STACKS[RUNS[NAME].program](Rank()):
    pass
stats = torch.cuda.memory_stats()
print(json.dumps({key: stats[f"{key}_bytes.all.peak"] for key in ("requested", "allocated", "reserved")}))
