"""``memtrace check``: the gate and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import trace_path

from memtrace.cli import main

TINY, FIRST_OOM = str(trace_path("tiny-llama_3-steps")), str(trace_path("llama2-7b_oom-first-step"))


@pytest.fixture
def baseline(tmp_path: Path) -> str:
    target = tmp_path / "base.json"
    assert main(["check", TINY, "--write", str(target)]) == 0
    return str(target)


def test_a_written_baseline_is_a_report(baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["report", TINY, "--json"]) == 0
    written, printed = json.loads(Path(baseline).read_text()), json.loads(capsys.readouterr().out)
    for key in ("file", "device", "at", "peaks", "categories", "subcategories", "reserved_bytes"):
        assert written[key] == printed[key]


def test_the_same_run_passes(baseline: str) -> None:
    assert main(["check", TINY, "--baseline", baseline]) == 0
    assert main(["check", TINY, "--baseline", baseline, "--max-growth", "2%", "--max-growth", "lora=0"]) == 0


def test_a_larger_run_fails(baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["check", FIRST_OOM, "--baseline", baseline, "--max-growth", "2%"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 2
    assert main(["check", FIRST_OOM, "--baseline", baseline, "--max-growth", "40GiB"]) == 0


def test_a_category_has_a_limit_of_its_own(baseline: str) -> None:
    loose = ["check", FIRST_OOM, "--baseline", baseline, "--max-growth", "40GiB"]
    assert main([*loose, "--max-growth", "runtime=1GiB"]) == 0
    assert main([*loose, "--max-growth", "activations=1%"]) == 1
    assert main(["check", FIRST_OOM, "--baseline", baseline, "--max-growth", "runtime=1GiB"]) == 0


def test_a_fixed_limit_needs_no_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", TINY, "--max-peak", "24GiB"]) == 0
    capsys.readouterr()
    assert main(["check", TINY, "--max-peak", "1MiB", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] is False
    assert answer["checks"][0]["limit_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([], 2),
        (["--max-growth", "2%"], 2),
        (["--baseline", "absent.json"], 3),
        (["--baseline", __file__], 3),
        (["--max-peak", "big"], 2),
    ],
)
def test_exit_codes(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", TINY, *args]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("limits", [["gpu=2%"], ["2%", "3%"], ["lora=much"]])
def test_limits_that_make_no_sense(baseline: str, limits: list[str]) -> None:
    given = [part for limit in limits for part in ("--max-growth", limit)]
    assert main(["check", TINY, "--baseline", baseline, *given]) == 2


def test_an_existing_baseline_is_not_overwritten(baseline: str) -> None:
    assert main(["check", TINY, "--write", baseline]) == 2
    assert main(["check", TINY, "--write", baseline, "--force"]) == 0
