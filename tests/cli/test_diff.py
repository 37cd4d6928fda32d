"""``memtrace diff``: contract, exit codes, forms of output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import trace_path

from memtrace.cli import main

TINY, FIRST_OOM = str(trace_path("tiny-llama_3-steps")), str(trace_path("llama2-7b_oom-first-step"))
BASELINE = str(trace_path("llama2-7b_baseline"))


def out_of(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["diff", *args]) == code
    return capsys.readouterr().out


def test_json_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(out_of(capsys, TINY, FIRST_OOM, "--json"))
    assert {"before", "after", "delta", "sites", "unmatched"} <= set(answer)
    assert {"peak_allocated_bytes", "peak_reserved_bytes", "categories", "subcategories"} <= set(answer["delta"])
    site_keys = {"category", "subcategory", "frame", "before_bytes", "after_bytes", "delta_bytes"}
    assert all(site_keys <= set(site) for site in answer["sites"])
    for name, delta in answer["delta"]["categories"].items():
        assert sum(site["delta_bytes"] for site in answer["sites"] if site["category"] == name) == delta
    assert answer["after"]["at"]["kind"] == "oom" and answer["compared"]["before"]["step"] == 0
    assert answer["outcome"] == {"before": "ok", "after": "oom", "before_step": 2, "after_step": 0}
    assert sum(cause["bytes"] for cause in answer["causes"]) == answer["delta"][answer["explains"]]
    assert all({"id", "title", "bytes", "evidence", "from", "to"} <= set(cause) for cause in answer["causes"])
    unmatched = answer["unmatched"]
    assert unmatched["before_bytes"] == sum(site["before_bytes"] for site in unmatched["before"])
    assert unmatched["after_bytes"] == sum(site["after_bytes"] for site in unmatched["after"]) > 0


def test_text_says_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, TINY, FIRST_OOM)
    assert text.startswith("Survived, now dies in step 0: ")
    for word in ("before", "after", "change", "activations", "peak reserved", "call sites that changed most"):
        assert word in text
    assert "Traceback" not in text


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, TINY, FIRST_OOM, "--md")
    assert "| | before | after | change |" in text and "| **activations** |" in text
    assert text.count("\n|---") == 3
    before, after = (line.split()[1] for line in text.splitlines() if line and line[-1] in "▁▂▃▄▅▆▇█")
    assert len(before) == len(after) == 60 and "█" in after and "█" not in before


@pytest.mark.parametrize(("limit", "code"), [("0%", 0), ("2%", 0), ("0", 0)])
def test_no_growth_passes(capsys: pytest.CaptureFixture[str], limit: str, code: int) -> None:
    out_of(capsys, TINY, TINY, "--fail-on-growth", limit, code=code)


def test_growth_fails_and_says_so_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", TINY, FIRST_OOM, "--json", "--fail-on-growth", "200MiB"]) == 1
    caught = capsys.readouterr()
    json.loads(caught.out)  # nothing else on stdout
    assert "peak allocated" in caught.err and "FAILED" in caught.err
    assert main(["diff", FIRST_OOM, TINY, "--fail-on-growth", "0%"]) == 0
    assert main(["diff", TINY, FIRST_OOM, "--fail-on-growth", "30GiB", "--peak", "reserved"]) == 1  # out of memory
    assert main(["diff", TINY, BASELINE, "--fail-on-growth", "30GiB", "--peak", "reserved"]) == 0


def test_events_can_be_chosen_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(out_of(capsys, TINY, TINY, "--at", "end", "--at-before", "100", "--json"))
    assert answer["before"]["at"] == {"kind": "event", "event": 100, "time_us": answer["before"]["at"]["time_us"]}
    assert answer["after"]["at"]["kind"] == "end"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_plot_of_both_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    target = tmp_path / f"both.{suffix}"
    out_of(capsys, TINY, FIRST_OOM, "--plot", str(target))
    head = target.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    assert main(["diff", TINY, TINY, "--plot", str(target)]) == 2  # exists


def test_recordings_without_trace_or_memory_are_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, nothing = tmp_path / "bare.json", str(trace_path("llama2-7b_oom-at-load"))
    bare.write_text("[]")
    for pair in ((str(bare), TINY), (TINY, nothing), (nothing, str(bare))):
        text = out_of(capsys, *pair, "--plot", str(tmp_path / "x.svg"), "--force")
        assert "peak" in " ".join(text.splitlines()[:3])


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([TINY], 2),
        ([TINY, TINY, "--fail-on-growth", "lots"], 2),
        ([TINY, TINY, "--json", "--md"], 2),
        (["-", "-"], 2),
        ([TINY, TINY, "--at-after", "999999999"], 2),
        ([TINY, "absent.pickle"], 3),
        ([TINY, __file__], 3),
        ([TINY, TINY, "--at", "oom"], 4),
        ([TINY, TINY, "--plot", "x.bmp"], 2),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], args: list[str], code: int) -> None:
    try:
        assert main(["diff", *args]) == code
    except SystemExit as stop:  # argparse
        assert stop.code == code
    assert "Traceback" not in capsys.readouterr().err
