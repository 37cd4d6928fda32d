"""Device memory outside the allocator: what the recorder reads, and whose the report says it is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from capture_standin import StandIn  # noqa: E402
from torch import nn  # noqa: E402

import memtrace  # noqa: E402
from memtrace.analysis import analyse  # noqa: E402
from memtrace.answers.outside import outside_allocator  # noqa: E402
from memtrace.answers.report import report  # noqa: E402
from memtrace.history.timeline import build  # noqa: E402
from memtrace.record import outside  # noqa: E402
from memtrace.render.report_text import render_report  # noqa: E402
from memtrace.snapshot.load import load  # noqa: E402

MIB = 1 << 20


class Card(StandIn):
    """What lies outside the allocator grows by ``grows`` with each reading."""

    device_type = "cpu"
    held = 300 * MIB
    grows = (0, 40 * MIB, 60 * MIB, 2 * MIB, 0, 0)

    def __init__(self) -> None:
        super().__init__()
        self._steps = iter(self.grows)

    def memory_info(self, device: int) -> tuple[int, int]:
        self.held += next(self._steps, 0)
        return self.capacity - self.allocated - self.held, self.capacity


def recorded(folder: Path) -> Path:
    from memtrace.record import backend

    with Card() as card, backend.use(card):
        with memtrace.record(folder / "run.pickle") as recording:
            model = nn.Linear(64, 64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(8, 64)).sum().backward()
                optimizer.step()
        assert recording.file is not None
        return recording.file


def test_what_grows_between_two_readings_is_a_row(tmp_path: Path) -> None:
    snapshot = load(recorded(tmp_path))
    analysis = analyse(build(snapshot, snapshot.devices[0]))
    found = outside_allocator(analysis.timeline)
    assert found is not None
    assert [(row["owner"], row["bytes"] // MIB) for row in found["rows"]] == [
        ("before_recording", 300), ("loading", 40), ("first_pass", 60), ("first_step", 2), ("later", 0),
    ]  # fmt: skip
    assert found["this_process_bytes"] is None
    text = "\n".join(map(str, render_report(report(analysis))))
    assert "402.0 MiB:" in text
    assert "60.0 MiB  in the first forward and backward pass" in text
    assert "other processes, and what the driver" not in text


def test_other_processes_are_told_apart_where_each_reading_names_this_one(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    raw = pickle.loads(file.read_bytes())
    for row in raw["memtrace"]["outside"]:
        row |= {"process_bytes": row["used_bytes"] - 100 * MIB}
    raw["memtrace"]["labels"].append({"address": 1, "bytes": 5 * MIB, "category": "lora", "outside": True})
    file.write_bytes(pickle.dumps(raw))
    snapshot = load(file)
    found = outside_allocator(build(snapshot, snapshot.devices[0]))
    assert found is not None
    sizes = {row["owner"]: row["bytes"] // MIB for row in found["rows"]}
    assert (sizes["before_recording"], sizes["other_processes"]) == (200, 100)
    assert sum(sizes.values()) == 402
    assert found["managed_bytes"] == 5 * MIB


_NOW = {"at": "snapshot", "used_bytes": 5, "reserved_bytes": 0}


@pytest.mark.parametrize(
    "rows",
    [
        [_NOW],
        [_NOW | {"at": "start"}, _NOW, _NOW],
        "x",
        [1],
        [{"at": "snapshot"}],
        [{"at": [], "used_bytes": -1}],
        [{"at": "start", "used_bytes": True}],
        [_NOW | {"at": at} for at in ("start", "step", "backward", "snapshot")],  # not in their order
        [_NOW | {"at": "start", "reserved_bytes": 9}, _NOW],  # the allocator holds more than the card
        [_NOW | {"at": "start", "process_bytes": 9}, _NOW | {"process_bytes": 5}],  # the process, too
    ],
)
def test_strange_readings_are_no_rows(rows: Any, tmp_path: Path) -> None:
    file = recorded(tmp_path)
    raw = pickle.loads(file.read_bytes())
    raw["memtrace"]["outside"] = rows
    file.write_bytes(pickle.dumps(raw))
    snapshot = load(file)
    found = outside_allocator(build(snapshot, snapshot.devices[0]))
    assert found is not None
    assert found["rows"] == []


def test_without_a_driver_no_process_is_named() -> None:
    assert outside.by_process(0) == {}
