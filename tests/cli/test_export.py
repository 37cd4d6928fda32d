"""``memtrace export`` and the tables: files on disk, opened by what people open them with; exit codes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import duckdb
import networkx as nx
import pytest
from support import TRUTH, analysis, trace_path

from memtrace.cli import main
from memtrace.snapshot.load import load

TINY = str(trace_path("tiny-llama_3-steps"))


def export(target: Path, *args: str) -> Path:
    assert main(["export", TINY, "-o", str(target), *args]) == 0
    return target


@pytest.mark.parametrize("kind", ["perfetto", "chrome", "speedscope", "collapsed", "html"])
def test_every_format_writes_its_file(tmp_path: Path, kind: str) -> None:
    data = export(tmp_path / "out", "--format", kind).read_bytes()
    assert len(data) > 1000
    if kind in ("chrome", "speedscope"):
        json.loads(data)
    elif kind == "html":
        assert data.startswith(b"<!DOCTYPE html>")


def test_points_and_volume(tmp_path: Path) -> None:
    few = export(tmp_path / "few", "--format", "chrome", "--points", "200").stat().st_size
    every = export(tmp_path / "every", "--format", "chrome", "--points", "0").stat().st_size
    assert few < every
    live = export(tmp_path / "live", "--format", "collapsed").read_text()
    volume = export(tmp_path / "volume", "--format", "collapsed", "--volume").read_text()
    assert sum(int(line.rpartition(" ")[2]) for line in volume.splitlines()) > sum(
        int(line.rpartition(" ")[2]) for line in live.splitlines()
    )


def test_a_cut_by_steps_holds_those_steps(tmp_path: Path) -> None:
    cut = load(export(tmp_path / "cut.pickle", "--format", "snapshot", "--steps", "1:2"))
    whole = analysis("tiny-llama_3-steps")
    phases = whole.attribution.facts.phases
    assert len(cut.devices[0].trace) == pytest.approx(
        int((phases.start[1:] - phases.start[:-1])[phases.step == 1].sum()), abs=9
    )
    by_events = load(export(tmp_path / "e.pickle", "--format", "snapshot", "--events", "100:200"))
    assert len(by_events.devices[0].trace) == pytest.approx(100, abs=9)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_duckdb_reads_the_table_of_allocations(tmp_path: Path, kind: str) -> None:
    target = tmp_path / f"all.{kind}"
    assert main(["allocations", TINY, "--all", "--format", kind, "-o", str(target)]) == 0
    database = duckdb.connect()
    query = f"SELECT category, sum(requested_bytes), count(*) FROM '{target}' GROUP BY category"
    sums = {category: (size, count) for category, size, count in database.execute(query).fetchall()}
    recording = analysis("tiny-llama_3-steps")
    names, sizes = recording.attribution.categories(), recording.timeline.allocations.requested_bytes
    for category, (size, count) in sums.items():
        mask = names == category
        assert (int(sizes[mask].sum()), int(mask.sum())) == (size, count)
    at_5000 = "alloc_event <= 5000 AND (free_event < 0 OR free_event > 5000)"
    live = database.execute(f"SELECT sum(requested_bytes) FROM '{target}' WHERE {at_5000}").fetchall()
    assert live == [(int(recording.timeline.requested_bytes[5000]),)]


def test_networkx_reads_the_graph(tmp_path: Path) -> None:
    target = tmp_path / "graph.graphml"
    assert main(["graph", TINY, "--format", "graphml", "-o", str(target)]) == 0
    graph = nx.read_graphml(target)
    segments = [data for _, data in graph.nodes(data=True) if data["kind"] == "segment"]
    at = analysis("tiny-llama_3-steps").timeline.peaks()[1].event
    assert sum(data["total_bytes"] for data in segments) == analysis("tiny-llama_3-steps").timeline.curve_at(at)[2]


def test_the_timeline_is_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", TINY, "--points", "100"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows and {"event", "time_us", "reserved_bytes", "activations"} <= set(rows[0])


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([], 2),
        (["--format", "pdf"], 2),
        (["--format", "snapshot"], 2),
        (["--format", "snapshot", "--events", "1:2", "--steps", "0:1"], 2),
        (["--format", "snapshot", "--events", "1:99999999"], 2),
        (["--format", "snapshot", "--steps", "0:99"], 2),
        (["--format", "html", "--volume"], 2),
        (["--format", "speedscope", "--points", "5"], 2),
        (["--format", "chrome", "--points", "-5"], 2),
        (["--format", "collapsed", "--volume", "--at", "end"], 2),
        (["--format", "perfetto", "--at", "end"], 2),
        (["--format", "html", "--at", "oom"], 4),
    ],
)
def test_exit_codes(args: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    try:
        assert main(["export", TINY, "-o", str(target), *args]) == code
    except SystemExit as stop:  # argparse
        assert stop.code == code
    assert not target.exists() and list(tmp_path.iterdir()) == []
    assert "Traceback" not in capsys.readouterr().err


def test_no_trace_no_timeline(tmp_path: Path) -> None:
    bare = tmp_path / "bare.json"
    bare.write_text("[]")
    assert main(["export", str(bare), "--format", "perfetto", "-o", str(tmp_path / "x")]) == 4
    assert main(["export", str(bare), "--format", "snapshot", "--events", "0:2", "-o", str(tmp_path / "x")]) == 4
    assert main(["export", str(TRUTH / "speedscope" / "LICENSE"), "--format", "html", "-o", str(tmp_path / "x")]) == 3


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    target = export(tmp_path / "x.html", "--format", "html")
    assert main(["export", TINY, "--format", "html", "-o", str(target)]) == 2
    assert main(["export", TINY, "--format", "html", "-o", str(target), "--force"]) == 0


@pytest.mark.parametrize("form", ["html", "chrome", "perfetto", "speedscope", "collapsed"])
def test_a_file_name_that_is_no_text(tmp_path: Path, form: str) -> None:
    source, target = tmp_path / "n\udcffon$x$.pickle.xz", tmp_path / "out"
    source.symlink_to(TINY)
    assert main(["export", str(source), "-f", form, "-o", str(target)]) == 0
    text = target.read_bytes()
    assert form in ("perfetto", "collapsed") or b"\\udcff" in text
    assert b"\xff" not in text or form == "perfetto"


def test_plots_of_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    source, target = tmp_path / "n\udcffon$x$.pickle.xz", tmp_path / "out.svg"
    source.symlink_to(TINY)
    assert main(["timeline", str(source), "--plot", str(target)]) == 0
    assert main(["diff", str(source), str(source), "--plot", str(target), "--force"]) == 0
