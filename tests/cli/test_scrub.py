"""``memtrace scrub`` as a user runs it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from strategies import modern
from support import TRACES

from memtrace.cli import main

TINY = str(TRACES / "tiny-llama_3-steps.pickle.xz")


def run(capsysbinary: pytest.CaptureFixture[bytes], *args: str, code: int = 0) -> tuple[str, str]:
    assert main(args) == code
    out, err = capsysbinary.readouterr()
    return out.decode(), err.decode()


def report(capsysbinary: pytest.CaptureFixture[bytes], file: object) -> dict[str, object]:
    answer = json.loads(run(capsysbinary, "report", str(file), "--json")[0])
    return {key: answer[key] for key in ("at", "categories", "subcategories", "peaks", "moment", "exact", "warnings")}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_the_report_is_the_same(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"clean.pickle{suffix}"
    text, err = run(capsysbinary, "scrub", TINY, "-o", str(out))
    assert "project files" in text and "load_qlora" in text
    assert err == ""
    assert [item.name for item in tmp_path.iterdir()] == [out.name]
    assert report(capsysbinary, out) == report(capsysbinary, TINY)


def test_json_says_what_is_gone_and_what_stays(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    out = tmp_path / "clean.pickle"
    answer = json.loads(run(capsysbinary, "scrub", TINY, "-o", str(out), "--json")[0])
    assert set(answer) == {"file", "output", "output_bytes", "removed", "kept"}
    assert answer["output_bytes"] == out.stat().st_size
    assert answer["removed"]["project files"] == 2
    assert answer["kept"] == {"functions": ["load_qlora"]}
    answer = json.loads(run(capsysbinary, "scrub", TINY, "--check", "--json", "--functions")[0])
    assert answer["kept"] == {} and answer["output"] is None


def test_check_writes_nothing(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    assert "load_qlora" in run(capsysbinary, "scrub", TINY, "--check")[0]
    assert "nothing of the project" in run(capsysbinary, "scrub", TINY, "--check", "--functions")[0]
    assert list(tmp_path.iterdir()) == []


def test_files_are_never_lost(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    source = tmp_path / "a.pickle"
    source.write_bytes(pickle.dumps(modern(), protocol=4))
    before = source.read_bytes()
    other = tmp_path / "b.pickle"
    other.write_bytes(b"mine")
    assert "never overwritten" in run(capsysbinary, "scrub", str(source), "-o", str(source), "--force", code=2)[1]
    assert "--force" in run(capsysbinary, "scrub", str(source), "-o", str(other), code=2)[1]
    assert (source.read_bytes(), other.read_bytes()) == (before, b"mine")
    run(capsysbinary, "scrub", str(source), "-o", str(other), "--force")
    assert pickle.loads(other.read_bytes())["segments"]
    assert b"/home/me" in before and b"/home/me" not in other.read_bytes()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((TINY,), 2),
        ((TINY, "--check", "-o", "x.pickle"), 2),
        ((TINY, "-o", "x.json"), 2),
        ((TINY, "-o", "no/such/folder/x.pickle"), 2),
        (("no-such-file", "--check"), 3),
        ((str(TRACES / "manifest.json"), "--check"), 3),
    ],
)
def test_one_line_for_what_is_wrong(
    capsysbinary: pytest.CaptureFixture[bytes], args: tuple[str, ...], code: int
) -> None:
    out, err = run(capsysbinary, "scrub", *args, code=code)
    assert (out, err.count("\n")) == ("", 1)
