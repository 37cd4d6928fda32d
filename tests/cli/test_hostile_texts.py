"""Names, settings, labels and file names with escapes, bidi marks, markup and formulas: every verb, every format."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, shared_recordings

from memtrace.cli import main

HOSTILE = ROOT / "tests" / "hostile"
NAME = "a\x1b]0;x\x07b\x9b2J\u202ec\nd<img src=x onerror=alert(1)>[red]e\udcff.pickle.xz"
VERBS = [
    ["report"], ["report", "--json"], ["report", "--why", "other"], ["explain"], ["explain", "--json"],
    ["explain", "--md"], ["info"], ["info", "--json"], ["allocations", "--all"],
    ["allocations", "--all", "--format", "json"], ["timeline"], ["timeline", "--format", "csv"],
    ["timeline", "--format", "json"], ["fragmentation"], ["fragmentation", "--json"], ["segments"],
    ["segments", "--json"], ["graph", "--format", "dot"], ["graph", "--format", "json"],
    ["graph", "--format", "graphml"], ["steps"], ["steps", "--json"], ["ranks"], ["ranks", "--json"], ["simulate"],
    ["simulate", "--json"], ["scrub", "--check"], ["scrub", "--check", "--json"], ["check", "--max-peak", "80GiB"],
    ["check", "--max-peak", "80GiB", "--json"], ["check", "--max-peak", "1MiB"], ["export", "-f", "html"],
    ["export", "-f", "chrome"], ["export", "-f", "speedscope"], ["export", "-f", "collapsed"],
    ["export", "-f", "perfetto", "-o", "{out}"], ["timeline", "--plot", "{out}.svg"], ["diff", "{file}"],
    ["diff", "{file}", "--json"], ["diff", "{file}", "--md"], ["diff", "{file}", "--fail-on-growth", "1%"], ["browse"],
    ["allocations", "--all", "--format", "parquet", "-o", "{out}.parquet"],
]  # fmt: skip
RAW = (b"\x1b]", b"\x1b[", "\x9b".encode(), "\u202e".encode())  # as they stand in the recording and its name
LINES_ALLOWED = frozenset("\n")


def obeyed(text: str) -> set[str]:
    """Characters that a terminal, an editor or a page might obey."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")} - LINES_ALLOWED


def written(file: Path) -> bytes:
    """The texts of a file; of Parquet, whose pages are packed, those of its columns."""
    if file.suffix != ".parquet":
        return file.read_bytes()
    table = pytest.importorskip("pyarrow.parquet").read_table(file)
    texts = [str(value) for row in table.to_pylist() for value in row.values()]
    return b"".join((table.schema.metadata or {}).values()) + "\n".join(texts).encode()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recording in which every text is hostile, its name included; it is replayed once."""
    file = tmp_path_factory.mktemp("hostile") / NAME
    shutil.copy(HOSTILE / "terminal_escapes.pickle.xz", file)
    with shared_recordings(file.parent):
        yield file


def printed(verb: str, file: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """What a verb says: its exit code, stdout, stderr."""
    monkeypatch.setenv("MEMTRACE_NO_INDEX", "1")
    monkeypatch.setenv("COLUMNS", "100")
    first, *words = (word.replace("{file}", str(file)).replace("{out}", str(out)) for word in verb.split())
    said = {name: io.TextIOWrapper(io.BytesIO(), "utf-8") for name in ("stdout", "stderr")}
    with monkeypatch.context() as patched:
        for name, stream in said.items():
            patched.setattr(sys, name, stream)
        try:
            code = main([first, str(file), *words])
        except SystemExit as error:
            code = int(error.code or 0)
    texts = []
    for stream in said.values():
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "surrogateescape"))  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


@pytest.mark.usefixtures("ranks_in_this_process")
@pytest.mark.parametrize("verb", [" ".join(verb) for verb in VERBS])
def test_nothing_that_is_obeyed_gets_through(
    verb: str, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = printed(verb, hostile, tmp_path / "out", monkeypatch)
    assert code in (0, 1, 2, 4), code
    assert obeyed(out) == set() and obeyed(err) == set()
    assert "Traceback" not in err
    for file in tmp_path.iterdir():
        data = written(file)
        assert len(data) > 1000 and not [each for each in RAW if each in data]
    if "html" in verb or "svg" in verb:
        assert "<img src=x" not in out
    if code in (0, 1) and ("json" in verb or verb.endswith(("chrome", "speedscope"))):
        json.loads(out)


def test_a_name_in_json_means_the_same(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = json.loads(printed("report --json", hostile, tmp_path, monkeypatch)[1])["file"]
    assert Path(named).name.startswith("a\x1b]0;x\x07b\x9b2J\u202ec\nd<img")


def test_no_cell_is_a_formula(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["allocations", str(HOSTILE / "csv_formula.pickle"), "--all"]) == 0
    rows = list(csv.reader(io.StringIO(capfdbinary.readouterr()[0].decode())))
    cells = [cell for row in rows for cell in row if cell and not cell.lstrip("-").replace(".", "").isdecimal()]
    assert any("HYPERLINK" in cell for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / NAME.replace(".pickle.xz", ".log")
    log.write_bytes(
        b"\x1b[31m[rank1]\x07 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. \xc2\x9b2J GPU 0 "
        b"has a total capacity of 23.65 GiB of which 1.00 GiB is free. \xe2\x80\xae<img src=x> Including non-PyTorch "
        b"memory, this process has 22.00 GiB memory in use.\x1b]0;title\x07 Of the allocated memory 20.00 GiB is "
        b"allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
        b"PYTORCH_CUDA_ALLOC_CONF=\x1b[2Ja:1\n"
    )
    for more in ([], ["--json"], ["--md"]):
        assert main(["explain", str(log), *more]) == 0
        out, err = capfd.readouterr()
        assert obeyed(out) == set() and obeyed(err) == set()
