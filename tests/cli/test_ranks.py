"""``memtrace ranks``: one row a rank, unreadable files reported, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import trace_path

from memtrace.cli import main
from memtrace.render.ranks_text import short_names

BOTH = [str(trace_path("ddp_rank0")), str(trace_path("ddp_rank1"))]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", *BOTH, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    for rank in answer["ranks"]:
        assert {"peaks", "reserved_bytes", "categories", "verdict", "file", "steps"} <= set(rank)
        assert sum(rank["categories"].values()) == rank["reserved_bytes"]
    assert answer["odd"]["rank"] == 1 and answer["failed"] == []
    assert answer["imbalance"]["peak_allocated"]["spread_bytes"] > 1 << 30


@pytest.mark.usefixtures("ranks_in_this_process")
def test_text_with_an_unreadable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "rank2.pickle"
    broken.write_bytes(b"")
    assert main(["ranks", *BOTH, str(broken)]) == 0
    text = capsys.readouterr().out
    assert "rank 1 (ddp_rank1.pickle.xz) is the odd one out" in text and "longer sequences" in text
    assert f"{broken}: the file is empty" in text.replace("\n", " ")
    assert "imbalance" in text and "highest on" in text


@pytest.mark.usefixtures("ranks_in_this_process")
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["absent.pickle"], 3),
        ([BOTH[0], "--jobs", "0"], 2),
        ([BOTH[0], "--jobs", "2", "--scheduler", "tcp://x:1"], 2),
        (["-"], 2),
        ([""], 2),
        ([*BOTH, "--device", "5"], 2),
        ([*BOTH, "absent.pickle", "--device", "5"], 3),
        (["/nonexistent/*.pickle"], 2),
    ],
)
def test_exit_codes(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", *args]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("ranks_in_this_process")
def test_tables_and_sentences_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ranks", *BOTH]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "no OOM" in text and "no_oom" not in text


def test_what_tells_files_apart_is_shown() -> None:
    assert short_names(["run/rank0.pickle", "run/rank1.pickle"]) == ["rank0.pickle", "rank1.pickle"]
    assert short_names(["run/rank0/s.pickle", "run/rank1/s.pickle"]) == ["rank0/s.pickle", "rank1/s.pickle"]
    assert short_names(["s.pickle"]) == ["s.pickle"] and short_names([]) == []
    assert short_names(["s.pickle", "s.pickle"]) == ["s.pickle", "s.pickle"]
    assert short_names(["s.pickle", "a/s.pickle"]) == ["s.pickle", "a/s.pickle"]


@pytest.mark.usefixtures("ranks_in_this_process")
def test_names_that_are_no_text_keep_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, file in enumerate(BOTH):
        (tmp_path / f"n\udcffon_rank{rank}.pickle.xz").symlink_to(file)
    assert main(["ranks", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("rank  file"))
    assert r"n\udcffon_rank0.pickle.xz" in lines[head + 1]
    peak = lines[head].index("peak") + len("peak")
    assert all(line[:peak].endswith("GiB") for line in lines[head + 1 : head + 3])
