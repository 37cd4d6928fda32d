"""What-if replays against reality: one workload recorded under twelve settings, each predicted from another's program.

The recordings are real runs on a GPU (``tests/gpu/record_settings.py``); a correct model is exact to the byte.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import TRUTH

from memtrace.cli import main

SETTINGS = TRUTH / "settings"
NAMES = sorted(path.name.removesuffix(".info.json") for path in SETTINGS.glob("*.info.json"))


def real(name: str) -> dict[str, Any]:
    return json.loads((SETTINGS / f"{name}.info.json").read_text())


@pytest.mark.parametrize("program", ["default", "expandable"])
@pytest.mark.parametrize("name", NAMES)
def test_prediction_equals_the_real_run(name: str, program: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    args = [] if name == program else ["--conf", real(name)["conf"]]
    if real(name)["limit_bytes"]:
        args += ["--capacity", str(real(name)["limit_bytes"])]
    assert main(["simulate", str(SETTINGS / f"{program}.pickle.xz"), "--json", *args]) == 0
    run = json.loads(capsysbinary.readouterr().out)["runs"][-1]
    stats = real(name)["stats"]
    assert run["peak_reserved_bytes"] == stats["reserved_bytes.all.peak"]
    assert run["num_ooms"] == stats["num_ooms"]
    assert run["num_alloc_retries"] == stats["num_alloc_retries"]
    assert run["segment_allocs"] == stats["num_device_alloc"]


@pytest.mark.parametrize("name", NAMES)
def test_self_check_on_every_setting(name: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["simulate", str(SETTINGS / f"{name}.pickle.xz"), "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["self_check"]["exact"]
