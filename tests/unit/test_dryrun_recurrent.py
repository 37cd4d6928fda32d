"""cuDNN's recurrent layers without a GPU: what they ask for, in the order in which an H200's recordings have it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
if sys.platform != "linux":
    pytest.skip("the dry device needs Linux", allow_module_level=True)

from forked import Runs, between_marks

GPU = Path(__file__).parents[1] / "gpu"
TRUTH = Path(__file__).parents[1] / "truth" / "recurrent_layers.jsonl"
MARK_BYTES = 7777
#: A seed and random numbers, once for the process; the card was asked after it had them.
DROPOUT = [8, 132 * 48 << 10]
SCRIPT = f"""
import sys
sys.path.insert(0, {str(GPU)!r})
from check_recurrent import jobs, mark
for job in jobs():
    mark(job)
"""


@pytest.fixture(scope="module")
def asked(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What each part of each layer asked for: evaluation, forward, backward."""
    folder = tmp_path_factory.mktemp("runs")
    script, out = folder / "train.py", folder / "run.pickle"
    script.write_text(SCRIPT)
    done = runs("-o", str(out), str(script))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recurrent layers are those that cuDNN" in done.stderr
    parts = between_marks(out, MARK_BYTES)[1::2]
    first = next(part for part in parts if DROPOUT[1] in part)
    place = first.index(DROPOUT[1])
    assert first[place - 1 : place + 1] == DROPOUT
    del first[place - 1 : place + 1]
    assert not any(DROPOUT[1] in part for part in parts)
    return parts


def _kinds(asked: list[list[int]]) -> list[tuple[list[object], int, list[int], list[int]]]:
    rows = [json.loads(line) for line in TRUTH.read_text().splitlines()]
    assert len(asked) == 3 * len(rows)
    return [
        (row["job"], part, asked[3 * place + part], measured)
        for place, row in enumerate(rows)
        for part, measured in enumerate(row["asked"])
    ]


def test_results_weights_and_what_is_kept_are_exact_and_in_their_order(asked: list[list[int]]) -> None:
    """The workspace, the last of a forward pass but one, is told apart below."""
    for job, part, said, measured in _kinds(asked):
        assert len(said) == len(measured), (job, part)
        last, first = len(said) - 1, 7 if job[0] == "LSTM" else 5
        workspaces = {0: {last}, 1: {last - 1}, 2: {first, first + 2}}[part]
        for place, sizes in enumerate(zip(said, measured, strict=True)):
            if place not in workspaces:
                assert abs(sizes[0] - sizes[1]) <= 300, (job, part, place)


@pytest.mark.parametrize(("which", "place", "most"), [(0, -1, 0.125), (1, -2, 0.003)], ids=["evaluation", "training"])
def test_workspaces_of_lstm_and_gru_are_near_what_was_measured(
    which: int, place: int, most: float, asked: list[list[int]]
) -> None:
    off = {
        tuple(job): abs(said[place] / measured[place] - 1)
        for job, part, said, measured in _kinds(asked)
        if part == which and job[0] != "RNN" and int(str(job[4])) >= 100
    }
    assert sorted(off.values())[len(off) // 2] < 0.0001
    assert max(off.values()) < most, max(off, key=lambda job: off[job])
