"""What a newcomer gives to the wrong verb leads to the right one, in one line."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from support import trace_path

from memtrace.cli import QUESTIONS, VERBS, main
from memtrace.snapshot.container import LEGACY_CHECKPOINT

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB"
READERS = (
    "report",
    "info",
    "simulate",
    "fragmentation",
    "timeline",
    "check --max-peak 1GiB",
    "export -f html -o x.html",
)


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr of a command that fails."""
    assert main(list(args)) in (2, 3)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memtrace: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run's output folder: a log, a checkpoint, weights, two recordings."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.log").write_text(f"step 3\n{OOM} of which 12.00 MiB is free.\n")
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}))
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b'{"a":{} }')
    for rank in range(2):
        shutil.copy(trace_path("tiny-llama_3-steps"), folder / f"rank{rank}.pickle.xz")
    return folder


@pytest.mark.parametrize("verb", READERS)
def test_every_reading_verb_leads_on(verb: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = verb.split()
    assert f"memtrace ranks {run_folder} compares the 2 recordings" in said(capsys, *words, str(run_folder))
    log = run_folder / "train.log"
    assert said(capsys, *words, str(log)).endswith(f"it is a log: memtrace explain {log}")
    for name in ("model.pt", "model.safetensors"):
        assert "memtrace run train.py records one" in said(capsys, *words, str(run_folder / name))


def test_a_second_file_leads_on_too(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(trace_path("tiny-llama_3-steps"))
    assert "memtrace explain" in said(capsys, "diff", good, str(run_folder / "train.log"))


def test_folders_of_one_recording_of_a_model_and_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "memtrace run train.py makes one" in said(capsys, "report", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert f"memtrace estimate --model {tmp_path}" in said(capsys, "report", str(tmp_path))
    shutil.copy(trace_path("tiny-llama_3-steps"), tmp_path / "a.pickle.xz")
    assert f"memtrace explain {tmp_path / 'a.pickle.xz'}" in said(capsys, "report", str(tmp_path))


def test_a_running_process(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["report", str(os.getpid())], [str(os.getpid())]):
        assert f"memtrace live {os.getpid()} watches it" in said(capsys, *words)
    assert "process" not in said(capsys, "report", "999999999")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("train.py", b"import torch\n", "memtrace dryrun train.py runs it without a GPU"),
        ("conf.yaml", b"base_model: x\n", "memtrace forecast --config conf.yaml"),
        ("config.json", b'{"model_type": "llama"}', "memtrace estimate --model config.json"),
        ("trace.json", b'{"schemaVersion": 1, "traceEvents": []}', "memtrace run train.py records them"),
        ("trace.json.gz", gzip.compress(b'{"traceEvents": []}', mtime=0), "memtrace run train.py records them"),
        ("a.nsys-rep", b"\x01\x02", "memtrace run train.py records them"),
        ("a.pickle.bz2", b"BZh91AY", "unpack it first"),
        ("old.pt", b"\x80\x02" + LEGACY_CHECKPOINT, "memtrace forecast --model CONFIG.json"),
        ("oom.log.gz", gzip.compress(OOM.encode(), mtime=0), "it is a log: memtrace explain oom.log.gz"),
    ],
    ids=lambda value: value if type(value) is str and "." in value and " " not in value else "",
)
def test_other_files(name: str, content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    told = re.sub(rf"(dryrun|config|model|explain) {re.escape(name)}", rf"\1 {file}", told)
    assert told in said(capsys, "report", str(file))
    if "log" not in name:
        assert main(["explain", str(file)]) in (3, 4)
        assert told in capsys.readouterr().err


def test_an_archive_of_a_report_is_to_be_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "issue.zip", "w") as archive:
        archive.writestr("snapshot.pickle", b"")
    assert said(capsys, "explain", str(tmp_path / "issue.zip")).endswith("unpack it first (snapshot.pickle)")


def test_a_folder_of_logs_and_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.log").write_text(OOM)
    assert said(capsys, "explain", str(tmp_path)).endswith(f"memtrace explain {tmp_path}/*.log")
    assert said(capsys, "report", "https://host/a.pickle").endswith("save it to a file first")


@pytest.mark.parametrize("verb", ["run", "dryrun"])
def test_what_is_no_program(verb: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train.log", "rank0.pickle.xz"):
        assert "no Python program; memtrace explain" in said(capsys, verb, str(run_folder / name))
    assert said(capsys, verb, "/dev/zero").endswith("a device, no Python program")
    assert said(capsys, verb, "sh", "train.py").endswith("sh comes first, as in torchrun -m memtrace run train.py")


@pytest.mark.parametrize("ranks", ["0", "1048577", "9" * 20])
def test_a_number_of_ranks_that_cannot_be(ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    told = said(capsys, "dryrun", "--world-size", ranks, str(tmp_path / "train.py"))
    assert told.endswith("--world-size takes 1 to 1,048,576 processes")


def test_a_name_that_is_too_long_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "dryrun"):
        assert said(capsys, verb, "x" * 300).endswith("no such file")
    assert main(["live", "--once", "x" * 300]) == 4
    assert "the output" not in capsys.readouterr().err


def test_a_pasted_text_goes_to_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["explain", OOM], [OOM]):
        assert "memtrace explain -" in said(capsys, *words)


@pytest.mark.parametrize(
    ("verb", "word", "told"),
    [
        ("forecast", "train.py", "memtrace dryrun train.py takes a script"),
        ("fit", "axolotl.yml", "did you mean --config axolotl.yml?"),
        ("estimate", "llama2-7b", "did you mean --model llama2-7b?"),
    ],
)
def test_what_is_given_by_its_place_has_an_option(
    verb: str, word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, word])
    assert told in capsys.readouterr().err


def test_an_export_is_named_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(trace_path("tiny-llama_3-steps"))
    assert main(["export", file, "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    assert "--format says for which tool" in said(capsys, "export", file)


def test_live_plays_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", "--once", str(trace_path("tiny-llama_3-steps"))]) == 0
    assert "ended" in capsys.readouterr().out


def test_no_lead_leads_back_to_the_verb_that_failed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "quiet.log").write_text("step 1\nstep 2\n")
    assert main(["explain", str(run_folder / "quiet.log")]) == 4
    assert "memtrace" not in capsys.readouterr().err.removeprefix("memtrace: ").replace(str(run_folder), "")


def test_alone_it_says_where_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    named = re.findall(r"^  memtrace (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert named[:2] == ["demo", "explain"] and set(named) <= set(VERBS)


def test_a_file_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(trace_path("tiny-llama_3-steps"))
    assert f"memtrace explain {file}" in said(capsys, file)


def test_the_demo_ends_with_verdict_change_and_three_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    end = out[out.index("fragmentation, measured") :]
    assert "saves 1.44 GiB" in end and "expandable_segments:True" in end
    assert re.findall(r"memtrace (\w+) /", end) == ["explain", "simulate", "browse"]


def test_help_puts_questions_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    places = [out.index(f"{question}\n  ") for question in QUESTIONS]
    assert places == sorted(places) and list(QUESTIONS)[-1] == "more"
    first = {verb for question, verbs in QUESTIONS.items() if question != "more" for verb in verbs}
    assert first >= {"report", "explain", "browse", "diff", "forecast", "fit", "run", "live", "ranks", "check"}
    assert len(first) <= 10
    assert out.count("\n") < 60


def test_a_log_alone_is_not_sent_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has ...\n")
    told = said(capsys, str(log))
    assert told.endswith(f"it is a log: memtrace explain {log}")
    assert "report" not in told and told.count("memtrace explain") == 1
