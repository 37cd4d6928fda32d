"""The reading verbs as a user runs them: output, JSON keys of the contract, exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import SMALL, TRACES, trace_path

from memtrace.cli import VERBS, main

TINY = str(TRACES / "tiny-llama_3-steps.pickle.xz")
FRAGMENTED = str(TRACES / "llama2-7b_oom-fragmentation.pickle.xz")


def run(capsysbinary: pytest.CaptureFixture[bytes], *args: str, code: int = 0) -> tuple[str, str]:
    assert main(args) == code
    out, err = capsysbinary.readouterr()
    return out.decode(), err.decode()


def run_json(capsysbinary: pytest.CaptureFixture[bytes], *args: str) -> dict[str, Any]:
    out, _ = run(capsysbinary, *args, "--json")
    assert out.count("\n") == 1
    return json.loads(out)


def test_report_keys_of_the_contract(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    answer = run_json(capsysbinary, "report", FRAGMENTED)
    assert set(answer) >= {
        "file", "device", "at", "requested_bytes", "allocated_bytes", "reserved_bytes", "categories", "subcategories",
        "outside_allocator", "peaks", "attribution", "top", "warnings",
    }  # fmt: skip
    assert set(answer["at"]) == {"kind", "event", "time_us"}
    assert answer["at"]["kind"] == "oom"
    assert sum(answer["categories"].values()) == answer["reserved_bytes"] == 23672651776
    assert sum(answer["subcategories"].values()) == answer["reserved_bytes"]
    assert set(answer["peaks"]) == {"requested_bytes", "allocated_bytes", "reserved_bytes"}
    assert set(answer["attribution"]) == {"attributed_bytes", "unattributed_bytes", "unattributed"}
    assert set(answer["top"][0]) >= {"category", "subcategory", "bytes", "count", "frame", "evidence"}
    assert answer["outside_allocator"]["device_free_bytes"] > 0


def test_report_text_fits_and_names_what_matters(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out, err = run(capsysbinary, "report", FRAGMENTED)
    assert "out of memory at event 250,595, step 10, forward" in out
    assert "asked for 86.0 MiB" in out
    assert "holes                1.83 GiB" in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("verb", ["report", "info", "fragmentation", "segments"])
def test_text_verbs_on_every_kind_of_recording(
    capsysbinary: pytest.CaptureFixture[bytes], verb: str, name: str
) -> None:
    out, _ = run(capsysbinary, verb, str(trace_path(name)))
    assert out.strip()


def test_why(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out, _ = run(capsysbinary, "report", TINY, "--why", "lora")
    assert "rule adapter" in out
    assert "cast_adapter_dtype" in out
    answer = run_json(capsysbinary, "report", TINY, "--why", "base_weights/quantized")
    address = answer["decisions"][0]["examples"][0]["address"]
    again = run_json(capsysbinary, "report", TINY, "--why", hex(address))
    assert again["decisions"][0]["subcategory"] == "quantized"
    assert run(capsysbinary, "report", TINY, "--why", "0x1", code=4)[1].count("\n") == 1


def test_info_keys(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    answer = run_json(capsysbinary, "info", TINY)
    assert set(answer) >= {"file", "format", "devices", "settings", "warnings"}
    assert set(answer["format"]) == {"torch_at_least", "torch_below", "keys"}
    device = answer["devices"][0]
    assert set(device) >= {
        "device", "events", "segments", "blocks", "reserved_bytes", "allocated_bytes", "has_oom", "truncated",
        "streams", "pools",
    }  # fmt: skip
    assert (device["events"], device["truncated"], device["has_oom"]) == (10064, False, False)
    ring = run_json(capsysbinary, "info", str(trace_path("llama2-7b_ring-truncated")))
    assert ring["devices"][0]["truncated"] is True


def test_allocations_rows(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    out, _ = run(capsysbinary, "allocations", TINY, "--all")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == [
        "alloc_event", "free_event", "address", "requested_bytes", "block_bytes", "stream", "pool", "category",
        "subcategory", "phase", "step", "evidence", "frame",
    ]  # fmt: skip
    assert len(rows) == 3578
    live, _ = run(capsysbinary, "allocations", TINY, "--at", "end", "--format", "json")
    assert len(json.loads(live)) == 352  # active.all.current of the recorded process
    target = tmp_path / "a.parquet"
    run(capsysbinary, "allocations", TINY, "--all", "--format", "parquet", "-o", str(target))
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(target)
    assert table.num_rows == 3578
    assert "exists" in run(capsysbinary, "allocations", TINY, "-o", str(target), code=2)[1]
    assert pyarrow.parquet.read_table(target).num_rows == 3578
    run(capsysbinary, "allocations", TINY, "-o", str(target), "--force")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize(
    ("verb", "name", "begins"),
    [
        ("allocations", "a.parquet", b"PAR1"), ("allocations", "a.json", b"[\n{"),
        ("allocations", "a.CSV", b"alloc_event,"), ("allocations", "a.table", b"alloc_event,"),
        ("timeline", "a.json", b"[\n{"), ("timeline", "a.csv", b"event,"),
        ("graph", "a.dot", b"digraph"), ("graph", "a.graphml", b"<?xml"), ("graph", "a.json", b"{"),
    ],
)  # fmt: skip
def test_a_format_that_nobody_named_is_that_of_the_file(
    verb: str, name: str, begins: bytes, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    run(capsysbinary, verb, TINY, "-o", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(begins)
    run(capsysbinary, verb, TINY, "-o", str(tmp_path / name), "--force", "--format", "json")
    json.loads((tmp_path / name).read_bytes())


def test_timeline_keeps_extremes(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    full = list(csv.DictReader(io.StringIO(run(capsysbinary, "timeline", TINY)[0])))
    some = list(csv.DictReader(io.StringIO(run(capsysbinary, "timeline", TINY, "--points", "200")[0])))
    assert len(full) == 10064
    assert len(some) < 400
    for column in ("requested_bytes", "allocated_bytes", "reserved_bytes", "lora", "temporary", "fragmentation"):
        assert max(int(row[column]) for row in some) == max(int(row[column]) for row in full)
        assert min(int(row[column]) for row in some) == min(int(row[column]) for row in full)
    for row in some:
        names = ("base_weights", "lora", "activations", "temporary", "runtime", "fragmentation", "unattributed")
        assert sum(int(row[name]) for name in names) == int(row["reserved_bytes"])
    plot = tmp_path / "p.svg"
    run(capsysbinary, "timeline", TINY, "--plot", str(plot))
    assert "<svg" in plot.read_text()[:1000]
    run(capsysbinary, "timeline", TINY, "--plot", str(plot), code=2)
    run(capsysbinary, "timeline", TINY, "--plot", str(tmp_path / "p.gif"), code=2)


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("timeline", str(trace_path("tiny-llama_3-steps")), "--points", "20")
    assert run(capsysbinary, *asked, "-o", "-") == run(capsysbinary, *asked)
    assert list(tmp_path.iterdir()) == []


def test_tables_keep_the_key_with_or_without_adapters(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for name in ("tinyllama_full", "tiny-llama_3-steps"):
        asked = ("timeline", str(trace_path(name)), "--points", "20")
        assert run(capsysbinary, *asked)[0].splitlines()[0].split(",")[6] == "lora"
        assert "lora" in json.loads(run(capsysbinary, *asked, "--format", "json")[0])[0]


def test_fragmentation_keys(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    answer = run_json(capsysbinary, "fragmentation", FRAGMENTED)
    assert set(answer) >= {
        "at", "reserved_bytes", "allocated_bytes", "requested_bytes", "rounding_bytes", "unsplit_tail_bytes",
        "holes_bytes", "cached_segments_bytes", "pending_free_bytes", "largest_free_block_bytes", "free_block_count",
        "by_pool", "utilisation", "peak_utilisation", "pinned_segments",
    }  # fmt: skip
    assert set(answer["by_pool"][0]) == {
        "pool", "stream", "kind", "reserved_bytes", "allocated_bytes", "free_bytes", "largest_free_block_bytes",
    }  # fmt: skip
    assert answer["asked_bytes"] == 90177536 > answer["largest_free_block_bytes"]
    assert round((answer["holes_bytes"] + answer["cached_segments_bytes"]) / 2**30, 2) == 1.83


def test_segments_that_look_alike_share_a_row(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Every segment is counted once: in a row, or among those that are not shown."""
    short, _ = run(capsysbinary, "segments", FRAGMENTED)
    every, _ = run(capsysbinary, "segments", FRAGMENTED, "--all")
    rows = re.findall(r"^  0x[0-9a-f]+ (?:×(\d+))?", short, re.MULTILINE)
    hidden = sum(int(found.replace(",", "")) for found in re.findall(r"… ([\d,]+) more", short))
    assert sum(int(count or 1) for count in rows) + hidden == len(re.findall(r"^  0x", every, re.MULTILINE))
    assert len(rows) <= 80 < 106 <= max(int(count or 1) for count in rows) and "×" not in every


def test_segments_and_graph(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    answer = run_json(capsysbinary, "segments", TINY)
    assert sum(s["total_bytes"] for s in answer["segments"]) == answer["reserved_bytes"]
    region = json.loads(run(capsysbinary, "graph", TINY, "--region", "40MiB")[0])
    assert region["regions"][0]["total_bytes"] >= 40 << 20
    address = hex(answer["segments"][0]["address"])
    assert json.loads(run(capsysbinary, "graph", TINY, "--pins", address)[0])["segment"].endswith(address)
    assert "large" in next(iter(json.loads(run(capsysbinary, "graph", TINY, "--pool", "large")[0])))
    for form in ("graphml", "json", "dot"):
        assert run(capsysbinary, "graph", TINY, "--format", form)[0]
    assert run(capsysbinary, "graph", TINY, "--region", "huge", code=2)[1].count("\n") == 1
    assert run(capsysbinary, "graph", TINY, "--pins", "0x10", code=4)[1].count("\n") == 1


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["report", "/no/such/file"], 3),
        (["report", str(Path(__file__))], 3),
        (["report", TINY, "--at", "oom"], 4),
        (["report", TINY, "--at", "999999"], 2),
        (["report", TINY, "--at", "soon"], 2),
        (["report", TINY, "--device", "7"], 2),
        (["allocations", TINY, "--all", "--at", "peak"], 2),
        (["report", TINY, "--rules", "/no/such/rules.toml"], 3),
    ],
)
def test_bad_input_is_one_line_and_a_documented_code(
    capsysbinary: pytest.CaptureFixture[bytes], args: list[str], code: int
) -> None:
    out, err = run(capsysbinary, *args, code=code)
    assert out == ""
    assert err.startswith("memtrace: ")
    assert err.count("\n") == 1


def test_unknown_verb_suggests(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert "did you mean report" in run(capsysbinary, "repotr", code=2)[1]


def test_demo_reports_the_bundled_recording(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert "out of memory" in run(capsysbinary, "demo")[0]


def test_stdin_and_a_closed_pipe() -> None:
    data = Path(TINY).read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "report", "-"], input=data, capture_output=True, check=True
    )
    assert b"base_weights" in done.stdout
    script = f"{sys.executable} -m memtrace allocations --all {TINY} | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, check=False)
    assert done.stdout.startswith(b"alloc_event")
    assert done.stderr == b""


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(verb: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert b"usage: memtrace" in capsysbinary.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from memtrace.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'rich', 'textual', 'torch', 'networkx', 'orjson'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_report_into_a_pipe_loads_neither_torch_nor_a_library_of_terminals() -> None:
    code = (
        f"import sys; from memtrace.cli import main; main(['report', {TINY!r}])\n"
        "sys.exit(bool({'torch', 'textual', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    pipe = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=pipe)


def test_why_fragmentation_is_answered_with_what_pins_it(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for what in ("fragmentation", "fragmentation/holes"):
        out, _ = run(capsysbinary, "report", FRAGMENTED, "--why", what)
        assert "pinned by" in out
    answer = run_json(capsysbinary, "report", FRAGMENTED, "--why", "fragmentation")
    assert answer["pinned_segments"]
    _, err = run(capsysbinary, "report", FRAGMENTED, "--why", "fragmentation/nothing", code=2)
    assert "no subcategory 'nothing'" in err


def test_a_terminal_is_not_flooded(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = run(capsysbinary, "timeline", TINY)
    assert 20 <= out.count("\n") <= 48 and max(map(len, out.splitlines())) <= 80
    assert "5,211" in out and "--format csv" in out
    assert run(capsysbinary, "timeline", TINY, "--format", "csv")[0].count("\n") > 10_000
    for args in (["graph"], *(["export", "-f", name] for name in ("html", "chrome", "speedscope", "perfetto"))):
        out, err = run(capsysbinary, *args, TINY, code=2)
        assert out == "" and "--output" in err and err.count("\n") == 1
    assert run(capsysbinary, "graph", TINY, "--pool", "large")[0].startswith("{")


def test_what_was_written_is_said(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    _, err = run(capsysbinary, "export", TINY, "-f", "html", "-o", str(target))
    assert err.startswith(f"memtrace: written {target} (") and err.endswith("KiB)\n")
