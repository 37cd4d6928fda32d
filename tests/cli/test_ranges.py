"""--events and --steps on the reading verbs."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from support import analysis, trace_path

from memtrace.cli import main

TINY = "tiny-llama_3-steps"
FILE = str(trace_path(TINY))


def out_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 0
    return capsys.readouterr().out


def rows_of(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(out_of(capsys, *args))))


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    part: dict[str, Any] = json.loads(out_of(capsys, "report", FILE, "--events", "500:900", "--json"))
    assert 500 <= part["at"]["event"] < 900
    assert part["window"] == [500, 900]
    same = json.loads(out_of(capsys, "report", FILE, "--at", str(part["at"]["event"]), "--json"))
    assert same["window"] is None
    assert part["categories"] == same["categories"]
    assert part["peaks"]["allocated_bytes"] == part["allocated_bytes"] < same["peaks"]["allocated_bytes"]
    assert "peaks over events 500 to 899" in out_of(capsys, "report", FILE, "--events", "500:900")


def test_report_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        answer = json.loads(out_of(capsys, "report", FILE, "--steps", f"{step}:{step + 1}", "--json"))
        assert answer["moment"]["step"] == step


def test_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    part = rows_of(capsys, "timeline", FILE, "--events", "700:800")
    whole = rows_of(capsys, "timeline", FILE)
    assert part == whole[700:800]
    few = rows_of(capsys, "timeline", FILE, "--events", "700:", "--points", "50")
    assert few[0]["event"] == "700" and few[-1] == whole[-1]


def test_allocations(capsys: pytest.CaptureFixture[str]) -> None:
    part = rows_of(capsys, "allocations", FILE, "--all", "--events", "700:800")
    whole = rows_of(capsys, "allocations", FILE, "--all")
    wanted = [
        row for row in whole if int(row["alloc_event"]) < 800 and not 0 <= int(row["free_event"]) <= 700
    ]  # fmt: skip
    assert part == wanted
    live = rows_of(capsys, "allocations", FILE, "--events", "700:800", "--at", "end")
    assert live == rows_of(capsys, "allocations", FILE, "--at", "799")


@pytest.mark.parametrize("verb", ["explain", "fragmentation", "segments", "graph"])
def test_other_verbs_look_at_the_part_s_peak(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    level = analysis(TINY).timeline.allocated_bytes
    event = 500 + int(level[500:900].argmax())
    part = json.loads(out_of(capsys, verb, FILE, "--events", "500:900", "--json"))
    same = json.loads(out_of(capsys, verb, FILE, "--at", str(event), "--json"))
    if verb == "explain":
        assert part["when"]["event"] == event
    elif verb == "fragmentation":
        assert part["at"]["event"] == event
        assert part["holes_bytes"] == same["holes_bytes"]
    elif verb == "graph":  # stacks are numbered as they are met, which differs from run to run
        assert len(part["nodes"]) == len(same["nodes"])
        assert [n for n in part["nodes"] if n["kind"] == "block"] == [n for n in same["nodes"] if n["kind"] == "block"]
    else:
        assert json.dumps(part).replace('"peak"', '"event"') == json.dumps(same)


@pytest.mark.parametrize("kind", ["chrome", "collapsed", "html"])
def test_exports(kind: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["export", FILE, "--format", kind, "--events", "500:900"]) == 0
    part = capsysbinary.readouterr().out
    assert main(["export", FILE, "--format", kind]) == 0
    whole = capsysbinary.readouterr().out
    assert part and part != whole
    if kind == "html":
        assert b">event 500<" in part and b">899<" in part
    if kind == "chrome":
        assert len(part) < len(whole)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--events", "9:3"], 2),
        (["--events", "x"], 2),
        (["--events", "0:99999999"], 2),
        (["--steps", "0:99"], 2),
        (["--steps", "7:"], 2),
        (["--events", "1:2", "--steps", "0:1"], 2),
        (["--events", "100:200", "--at", "7"], 2),
        (["--events", "100:200", "--at", "oom"], 4),
    ],
)
@pytest.mark.parametrize("verb", ["report", "explain", "allocations"])
def test_bad_ranges(verb: str, args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, FILE, *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("memtrace: ") and captured.err.count("\n") == 1


def test_only_the_final_state_was_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    import pickle

    bare = tmp_path / "bare.pickle"
    bare.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    assert main(["report", str(bare), "--events", "0:1"]) == 4
    assert "no trace" in capsys.readouterr().err


def test_a_bad_range_is_told_before_the_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "no-such-file.pickle", "--events", "5"]) == 2
    assert "--events" in capsys.readouterr().err
