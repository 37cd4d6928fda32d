"""Names, settings, labels and file names with escapes, bidi marks, markup and formulas: every verb, every format."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from support import ROOT

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
]  # fmt: skip
LINES_ALLOWED = frozenset("\n")


def obeyed(text: str) -> set[str]:
    """Characters that a terminal, an editor or a page might obey."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")} - LINES_ALLOWED


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What each verb printed: its exit code, stdout, stderr."""
    folder = tmp_path_factory.mktemp("hostile")
    file = folder / NAME
    shutil.copy(HOSTILE / "terminal_escapes.pickle.xz", file)
    script = """
import io, json, os, sys
from memtrace.cli import main
found = {}
for verb in json.loads(sys.argv[1]):
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    sys.stdout, sys.stderr = out, err
    words = [word.replace("{file}", sys.argv[2]).replace("{out}", sys.argv[3] + str(len(found))) for word in verb]
    try:
        code = main([words[0], sys.argv[2], *words[1:]])
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        code = repr(error)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "surrogateescape"))
    found[" ".join(verb)] = [code, *texts]
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(VERBS), str(file), str(folder / "out")],
        capture_output=True, check=True, env=os.environ | {"MEMTRACE_NO_INDEX": "1", "COLUMNS": "100"},
    )  # fmt: skip
    return {verb: tuple(found) for verb, found in json.loads(done.stdout).items()}


@pytest.mark.parametrize("verb", [" ".join(verb) for verb in VERBS])
def test_nothing_that_is_obeyed_gets_through(verb: str, outputs: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = outputs[verb]
    assert code in (0, 1, 2, 4), code
    assert obeyed(out) == set() and obeyed(err) == set()
    assert "Traceback" not in err
    if "html" in verb or "svg" in verb:
        assert "<img src=x" not in out
    if code in (0, 1) and ("json" in verb or verb.endswith(("chrome", "speedscope"))):
        json.loads(out)


def test_a_name_in_json_means_the_same(outputs: dict[str, tuple[int, str, str]]) -> None:
    named = json.loads(outputs["report --json"][1])["file"]
    assert Path(named).name.startswith("a\x1b]0;x\x07b\x9b2J\u202ec\nd<img")


def test_no_cell_is_a_formula(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from memtrace.cli import main

    assert main(["allocations", str(HOSTILE / "csv_formula.pickle"), "--all"]) == 0
    rows = list(csv.reader(io.StringIO(capfdbinary.readouterr()[0].decode())))
    cells = [cell for row in rows for cell in row if cell and not cell.lstrip("-").replace(".", "").isdecimal()]
    assert any("HYPERLINK" in cell for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from memtrace.cli import main

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
