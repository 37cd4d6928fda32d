"""``memtrace check``: the gate and its exit codes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from strategies import modern
from support import trace_path

from memtrace.answers.gate import CONDITIONS
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


LARGER = str(trace_path("llama2-7b_baseline"))
ALL_THE_SAME = ["--allow", "model"]


def test_a_larger_run_fails(baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    compare = ["check", LARGER, "--baseline", baseline, *ALL_THE_SAME]
    assert main([*compare, "--max-growth", "2%"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 2
    assert main([*compare, "--max-growth", "40GiB"]) == 0


def test_a_category_has_a_limit_of_its_own(baseline: str) -> None:
    compare = ["check", LARGER, "--baseline", baseline, *ALL_THE_SAME]
    loose = [*compare, "--max-growth", "40GiB"]
    assert main([*loose, "--max-growth", "runtime=1GiB"]) == 0
    assert main([*loose, "--max-growth", "activations=1%"]) == 1
    assert main([*compare, "--max-growth", "runtime=1GiB"]) == 0


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


def test_nobody_reading_the_output_changes_no_verdict(baseline: str) -> None:
    """``check … | true`` under pipefail."""
    for command in (
        ["check", FIRST_OOM, "--baseline", baseline],
        ["check", FIRST_OOM, "--baseline", baseline, "--json"],
        ["diff", TINY, FIRST_OOM, "--fail-on-growth", "2%"],
    ):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as closed:
            done = subprocess.run([sys.executable, "-m", "memtrace", *command], stdout=closed, stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--baseline", "--max-peak", "--write"])
def test_an_empty_argument_switches_nothing_off(option: str, baseline: str) -> None:
    loose = [] if option == "--baseline" else ["--baseline", baseline]
    assert main(["check", TINY, "--max-growth", "2%", *loose, option, ""]) in (2, 3)
    assert main(["diff", TINY, FIRST_OOM, "--fail-on-growth", ""]) == 2


@pytest.mark.parametrize("more", [[], [f"--allow={what}" for what in CONDITIONS]], ids=["strict", "loose"])
def test_a_run_that_ran_out_of_memory_fails_whatever_is_allowed(
    more: list[str], baseline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["check", FIRST_OOM, "--baseline", baseline, "--max-growth", "90GiB", "--json", *more]) == 1
    out, err = capsys.readouterr()
    assert "ran out of memory" in err and json.loads(out)["out_of_memory"] is True
    assert main(["check", FIRST_OOM, "--max-peak", "80GiB"]) == 1
    assert main(["diff", TINY, FIRST_OOM, "--fail-on-growth", "90GiB"]) == 1
    target = Path(baseline).with_name("new.json")
    assert main(["check", FIRST_OOM, "--write", str(target)]) == 1 and not target.exists()


CONDITION: dict[str, tuple[Any, Any]] = {  # what a recording of memtrace's says, and what another does
    "gpu": ("NVIDIA H200", "NVIDIA L4"),
    "limit": (24 << 30, None),
    "torch": ("2.10.0", "2.11.0"),
    "packages": ({"peft": "0.17", "trl": "0.2"}, {"peft": "0.18", "trl": "0.2"}),
    "configuration": (
        {"models": [{"class": "A", "parameters": 5}], "argv": ["a"]},
        {"models": [{"class": "A", "parameters": 6}], "argv": ["a"]},
    ),
}
KEYS = {"limit": "limit_bytes", "configuration": "config"}


def made(path: Path, **extra: Any) -> str:
    raw = modern() | {"memtrace": {"version": 1, **{KEYS.get(key, key): value for key, value in extra.items()}}}
    path.write_bytes(pickle.dumps(raw, 4))
    return str(path)


@pytest.mark.parametrize("what", CONDITION)
def test_what_cannot_be_compared_fails_unless_it_is_allowed(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(tmp_path / "base.json")
    same = {key: first for key, (first, _) in CONDITION.items()}
    first = made(tmp_path / "a.pickle", **same)
    assert main(["check", first, "--write", base]) == 0
    assert main(["check", first, "--baseline", base]) == 0
    assert main(["check", made(tmp_path / "argv.pickle", **same | {"pid": 7}), "--baseline", base]) == 0
    other = made(tmp_path / "b.pickle", **same | {what: CONDITION[what][1]})
    capsys.readouterr()
    assert main(["check", other, "--baseline", base, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [entry["what"] for entry in answer["unlike"]] == [what] and not answer["passed"]
    if what == "configuration":
        assert answer["unlike"][0]["baseline"] == "{'models': [{'parameters': 5}]}"
    assert main(["check", other, "--baseline", base, "--allow", what]) == 0
    wrong = next(each for each in CONDITIONS if each != what)
    assert main(["check", other, "--baseline", base, "--allow", wrong]) == 1


def test_a_baseline_that_does_not_say_fails_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = made(tmp_path / "a.pickle", gpu="NVIDIA H200", torch="2.10.0")
    capsys.readouterr()
    assert main(["report", file, "--json"]) == 0
    base = tmp_path / "base.json"
    base.write_text(capsys.readouterr().out)
    assert main(["check", file, "--baseline", str(base)]) == 1
    assert main(["check", file, "--baseline", str(base), "--allow", "gpu", "--allow", "torch"]) == 0


def test_another_device_event_or_model_fails(baseline: str, tmp_path: Path) -> None:
    assert main(["check", TINY, "--baseline", baseline, "--at", "end"]) == 1
    assert main(["check", TINY, "--baseline", baseline, "--at", "end", "--allow", "event"]) == 0
    stored = json.loads(Path(baseline).read_text())
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(stored | {"device": 1}))
    assert main(["check", TINY, "--baseline", str(elsewhere)]) == 1
    assert main(["check", TINY, "--baseline", str(elsewhere), "--allow", "device"]) == 0
    assert main(["check", LARGER, "--baseline", baseline, "--max-growth", "90GiB"]) == 1


def test_a_failed_check_writes_no_baseline(baseline: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(baseline).read_text()
    assert main(["check", FIRST_OOM, "--baseline", baseline, "--write", baseline, "--force"]) == 1
    assert "no baseline was written" in capsys.readouterr().err
    assert Path(baseline).read_text() == before


def test_a_final_state_alone_has_no_peaks_to_judge(tmp_path: Path, baseline: str) -> None:
    bare = tmp_path / "bare.json"
    bare.write_text('{"segments": [], "device_traces": [[]]}')
    assert main(["check", str(bare), "--baseline", baseline]) == 4
    assert main(["diff", TINY, str(bare), "--fail-on-growth", "1%"]) == 4


def test_the_verdict_of_a_diff_is_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", TINY, FIRST_OOM, "--fail-on-growth", "2%", "--json"]) == 1
    gate = json.loads(capsys.readouterr().out)["gate"]
    assert gate["passed"] is False and len(gate["checks"]) == 2


def test_two_limits_for_one_category_are_refused(baseline: str) -> None:
    assert main(["check", TINY, "--baseline", baseline, "--max-growth", "lora=0", "--max-growth", "lora=10%"]) == 2
