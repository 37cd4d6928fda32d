"""``memtrace.open``: the same answers as the commands', as tables for other libraries, and as cells of a notebook."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import trace_path

import memtrace
from memtrace.answers.report import Report
from memtrace.cli import main
from memtrace.errors import SnapshotError
from memtrace.session import Investigation, Shown

OOM = str(trace_path("llama2-7b_oom-first-step"))
TINY = str(trace_path("tiny-llama_3-steps"))


@pytest.fixture(scope="module")
def died() -> Investigation:
    return memtrace.open(OOM)


@pytest.fixture(scope="module")
def tiny() -> Investigation:
    return memtrace.open(TINY)


def printed(capsysbinary: pytest.CaptureFixture[bytes], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    return json.loads(capsysbinary.readouterr().out)


def plain(answer: Any) -> Any:
    return json.loads(json.dumps(asdict(answer), default=int))


@pytest.mark.parametrize(
    ("ask", "command"),
    [
        (lambda it: it.report(), ["report"]),
        (lambda it: it.report("step 1"), ["report", "--at", "step 1"]),
        (lambda it: it.report(2000), ["report", "--at", "2000"]),
        (lambda it: it.explain(), ["explain"]),
        (lambda it: it.why("lora"), ["report", "--why", "lora"]),
        (lambda it: it.fragmentation("peak"), ["fragmentation", "--at", "peak"]),
    ],
)
def test_answers_are_those_of_the_commands(
    ask: Any, command: list[str], tiny: Investigation, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    answer, told = plain(ask(tiny)), printed(capsysbinary, command[0], TINY, *command[1:])
    assert {key: told[key] for key in answer if key != "files"} == {k: v for k, v in answer.items() if k != "files"}


def test_simulations_and_differences_are_those_of_the_commands(
    tiny: Investigation, died: Investigation, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    asked = tiny.simulate("expandable_segments:True", without=["temporary/logits"])
    told = printed(
        capsysbinary, "simulate", TINY, "--conf", "expandable_segments:True", "--without", "temporary/logits"
    )
    assert [run.peak_reserved_bytes for run in asked.runs] == [run["peak_reserved_bytes"] for run in told["runs"]]
    told = printed(capsysbinary, "diff", TINY, OOM)
    for other in (died, OOM, Path(OOM)):
        assert tiny.diff(other).sentence == told["sentence"]


def test_printed_they_read_as_the_commands_do(died: Investigation, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", OOM, "--all"])
    assert capsys.readouterr().out.rstrip() == str(died.explain()).rstrip()
    main(["report", OOM, "--why", "activations"])
    assert capsys.readouterr().out.rstrip() == str(died.why("activations")).rstrip()


@pytest.mark.parametrize(
    ("ask", "command"),
    [
        (lambda it: it.report(), ["report", OOM]),
        (lambda it: it.fragmentation(), ["fragmentation", OOM]),
        (lambda it: it.simulate("expandable_segments:True"), ["simulate", OOM, "--conf", "expandable_segments:True"]),
        (lambda it: it.diff(TINY), ["diff", OOM, TINY]),
    ],
)
def test_printed_each_answer_reads_as_its_command(
    ask: Any, command: list[str], died: Investigation, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "120")
    main(command)
    assert str(ask(died)).split() == capsys.readouterr().out.split()


def test_what_is_asked_of_a_part(tiny: Investigation) -> None:
    part = memtrace.open(TINY, steps="1:2").report()
    assert part.window is not None and part.window[0] > 0
    assert tiny.report().window is None


def test_mistakes_are_one_line(tiny: Investigation, tmp_path: Path) -> None:
    for wrong in (
        lambda: memtrace.open(tmp_path / "none.pickle"),
        lambda: memtrace.open(TINY, device=7),
        lambda: memtrace.open(TINY, steps="9"),
        lambda: tiny.report("yesterday"),
        lambda: tiny.why("lore"),
        lambda: tiny.simulate("expandable:True"),
    ):
        with pytest.raises(memtrace.MemtraceError) as caught:
            wrong()
        assert "\n" not in str(caught.value)


def test_a_log_is_sent_to_explain(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has ...\n")
    with pytest.raises(SnapshotError, match=rf"it is a log: memtrace explain {log}"):
        memtrace.open(log)
    log.write_text("all is well\n")
    with pytest.raises(SnapshotError) as caught:
        memtrace.open(log)
    assert "it is a log" not in str(caught.value)


def test_an_answers_repr_is_one_short_line(died: Investigation) -> None:
    shown = repr(died.explain())
    assert shown.startswith("<Explanation: budget, measured") and len(shown) < 160 and "\n" not in shown
    assert len(repr(died.report())) < 160


def test_settings_by_the_commands_name(tiny: Investigation) -> None:
    given = str(tiny.simulate("expandable_segments:True"))
    assert str(tiny.simulate(conf="expandable_segments:True")) == given
    assert str(tiny.simulate(conf=["expandable_segments:True"])) == given


# tables


def test_tables_reach_other_libraries(tiny: Investigation) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = tiny.allocations()
    arrow = pyarrow.table(table)
    assert arrow.column_names == list(table.columns) and arrow.num_rows == len(table)
    for name, column in table.columns.items():
        assert arrow.column(name).to_pylist() == column.tolist()


def test_numbers_are_not_copied(tiny: Investigation) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = tiny.timeline()
    arrow = pyarrow.table(table)
    for name in ("event", "reserved_bytes", "activations"):
        [chunk] = arrow.column(name).chunks
        assert chunk.buffers()[1].address == table[name].ctypes.data


def test_duckdb_takes_them(tiny: Investigation) -> None:
    duckdb = pytest.importorskip("duckdb")
    live = tiny.allocations("peak")  # noqa: F841 (the query names it)
    [(total,)] = duckdb.sql("select sum(requested_bytes) from live where category = 'activations'").fetchall()
    assert total == tiny.report("peak").categories["activations"]


def test_pandas_takes_them(tiny: Investigation) -> None:
    pandas = pytest.importorskip("pandas")
    table = tiny.timeline(50)
    frame = pandas.DataFrame(table.columns)
    assert len(frame) == len(table) and frame.reserved_bytes.max() == tiny.report().peaks["reserved_bytes"]


def test_without_pyarrow_a_table_says_what_it_needs(tiny: Investigation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(memtrace.MemtraceError, match=r"torch-memtrace\[parquet\]"):
        tiny.allocations().__arrow_c_stream__()


def test_rows_of_tables(tiny: Investigation) -> None:
    assert len(tiny.allocations()) == len(tiny.analysis.timeline.allocations)
    live = tiny.allocations("peak")
    assert int(live["requested_bytes"].sum()) == tiny.report("peak").requested_bytes
    whole, part = tiny.timeline(), tiny.timeline(60)
    assert len(whole) == len(tiny.analysis.timeline) > len(part) > 20
    assert np.isin(part["event"], whole["event"]).all()
    assert part["reserved_bytes"].max() == whole["reserved_bytes"].max()


# notebooks


def framed(text: str) -> str:
    """The page inside a cell's frame."""
    found = re.search(r'<iframe [^>]*srcdoc="([^"]*)"></iframe>$', text)
    assert found is not None and 'sandbox="allow-scripts"' in text
    return html.unescape(found[1])


def test_answers_show_themselves_as_the_page_does(died: Investigation) -> None:
    report, explanation = died.report(), died.explain()
    page = framed(report._repr_html_())
    assert "Budget" in page and "Call sites" in page and "<script src" not in page
    assert explanation.findings[0].title in html.unescape(framed(explanation._repr_html_()))
    assert "Segments and blocks" in framed(died.fragmentation()._repr_html_())
    assert framed(died._repr_html_()).count("<h2>") > page.count("<h2>")
    assert died.simulate()._repr_html_().startswith("<pre>self-check")


def test_strangers_texts_stay_text(tiny: Investigation) -> None:
    answer = tiny.why("lora")
    object.__setattr__(answer, "_text", lambda: ["<script>\x1b[2J"])
    assert answer._repr_html_() == r"<pre>&lt;script&gt;\x1b[2J</pre>"
    table = tiny.allocations()
    table.columns["frame"] = np.array(["<b>"] * len(table), dtype=object)
    assert "<b>" not in table._repr_html_()


def test_a_shown_answer_is_the_answer(tiny: Investigation) -> None:
    answer = tiny.report()
    assert isinstance(answer, Report) and isinstance(answer, Shown)
    assert [field.name for field in fields(answer)] == [field.name for field in fields(Report)]
    with pytest.raises(AttributeError):
        answer.file = "x"  # type: ignore[misc]


class Shell:
    """As much of IPython as the magic uses."""

    def __init__(self) -> None:
        self.magics: dict[str, Any] = {}
        self.names: dict[str, Any] = {}

    def register_magic_function(self, function: Any, magic_kind: str) -> None:
        self.magics[f"{magic_kind} {function.__name__}"] = function

    def run_cell(self, cell: str) -> SimpleNamespace:
        try:
            exec(cell, self.names)
        except Exception as error:
            return SimpleNamespace(error_in_exec=error)
        return SimpleNamespace(error_in_exec=None)


@pytest.fixture
def shell() -> Iterator[Shell]:
    pytest.importorskip("torch")
    from capture_standin import StandIn

    from memtrace.record import backend

    made = Shell()
    memtrace.load_ipython_extension(made)
    with StandIn(capacity=64 << 20) as gpu, backend.use(gpu):
        yield made


def test_a_cell_is_recorded(shell: Shell, tmp_path: Path) -> None:
    run = shell.magics["cell memtrace"]
    found = run(str(tmp_path / "a b.pickle").replace(" ", "\\ "), "import torch\nkept = torch.zeros(1 << 20)")
    assert found.file == str(tmp_path / "a b.pickle")
    assert found.report().peaks["allocated_bytes"] >= 4 << 20
    assert shell.names["kept"].numel() == 1 << 20
    assert run("", "more = torch.zeros(1 << 18)").report().peaks["allocated_bytes"] >= 1 << 20


def test_a_cell_that_runs_out_is_explained(shell: Shell, tmp_path: Path) -> None:
    found = shell.magics["cell memtrace"](str(tmp_path / "x.pickle"), "import torch\ntorch.zeros(1 << 28)")
    assert found.report().at.kind == "oom"


def test_the_magic_takes_one_file(shell: Shell) -> None:
    with pytest.raises(memtrace.MemtraceError, match="one file"):
        shell.magics["cell memtrace"]("a b", "")


def test_without_a_gpu_the_cell_runs_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    made = Shell()
    memtrace.load_ipython_extension(made)
    assert made.magics["cell memtrace"]("", "x = 3") is None
    assert made.names["x"] == 3 and "unrecorded" in capsys.readouterr().err
