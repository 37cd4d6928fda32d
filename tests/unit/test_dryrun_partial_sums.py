"""Workspaces of convolutions on a whole card, from what cuDNN says without one, beside what an H200 took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memtrace.estimate.dryrun.partial_sums import on_card
from memtrace.estimate.dryrun.passes import Convolution

#: Passes of vision models under PyTorch 2.11 and cuDNN 9.19: the plan's knobs, bytes said without a card and taken.
TRUTH = Path(__file__).parents[1] / "truth" / "partial_sums.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in TRUTH.read_text().splitlines()]


def asked(row: dict[str, Any]) -> Convolution:
    x, w, y = (tuple(row[name]) for name in "xwy")
    ways = (0, 0), (1, 1), (1, 1), True, False
    return Convolution(row["kind"], f"torch.{row['dtype']}", row["channels_last"], x, w, y, *ways)


def test_partial_sums_of_measured_passes() -> None:
    said = [row["said"] - row["took"] for row in ROWS]
    found = [on_card(row["said"], asked(row), row["knobs"], 132) - row["took"] for row in ROWS]
    assert (len(ROWS), said.count(0), found.count(0)) == (196, 65, 170)
    assert (sum(map(abs, said)), sum(map(abs, found))) == (174_895_408, 134_232)


def test_a_plan_that_the_rule_does_not_explain_keeps_what_is_said() -> None:
    row = next(row for row in ROWS if row["said"] != row["took"])
    assert on_card(row["said"] + 1, asked(row), row["knobs"], 132) == row["said"] + 1
    assert on_card(row["said"], asked(row), {"TILE_SIZE": 0}, 132) == row["said"]


def test_channels_that_do_not_fill_16_bytes_are_copied_and_padded() -> None:
    """The last layer of a U-Net (64 to 3 channels, 16 x 64 x 64 pixels, 16 bits), as an H200 took it."""
    ways = (1, 1), (1, 1), (1, 1), True, False
    images, results = (16, 64, 64, 64), (16, 3, 64, 64)
    asked = Convolution("filter", "torch.float16", True, images, (3, 64, 3, 3), results, *ways)
    knobs = {"TILE_SIZE": 5, "TILEK": 1, "IDX_MODE": 1, "WORKSPACE": 0, "TILE_CGA_M": 1, "TILE_CGA_N": 5}
    assert on_card(1_057_808, asked, knobs, 132) == 2_860_687
