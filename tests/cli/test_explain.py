"""``memtrace explain`` as people run it: what it takes, what it prints, and how it ends."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from support import SMALL, TRACES, TRUTH, info

from memtrace.cli import main

KEYS = {"oom", "verdict", "confidence", "when", "because", "findings", "ooms"}
OOM_KEYS = {"is_gpu_oom", "backend", "device", "tried_bytes", "total_bytes", "free_bytes", "allocated_bytes",
            "reserved_bytes", "reserved_unallocated_bytes", "limit_bytes", "process_bytes", "component"}  # fmt: skip
FIRST = "llama2-7b_oom-first-step"


def path(name: str) -> str:
    return str(TRACES / f"{name}.pickle.xz")


def message(name: str) -> str:
    return f"torch.OutOfMemoryError: {info(name)['oom']['message']}\n"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["explain", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    return json.loads(out)


def check_contract(found: dict[str, Any]) -> None:
    assert found.keys() >= KEYS
    assert found["confidence"] in ("measured", "derived", "guess")
    assert found["verdict"] in ("fragmentation", "budget", "limit", "not_this_process", "not_gpu_memory",
                                "not_pytorch", "no_oom", "unknown")  # fmt: skip
    assert found["oom"] is None or found["oom"].keys() >= OOM_KEYS
    assert found["when"] is None or found["when"].keys() >= {"phase", "step", "first_step", "event"}
    assert all(isinstance(line, str) and line for line in found["because"])
    for finding in found["findings"]:
        assert finding.keys() >= {"id", "title", "bytes", "evidence", "advice"}
        for advice in finding["advice"]:
            assert advice.keys() == {"change", "saves_bytes", "basis", "proof"}
            assert advice["basis"] in ("replay", "formula", "rule")


@pytest.mark.parametrize("name", [FIRST, "llama2-7b_oom-at-load", "tiny-llama_3-steps"])
def test_json_keeps_the_contract(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_contract(answer(capsys, path(name)))


@pytest.mark.parametrize("name", SMALL)
def test_text_fits_one_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, path(name))
    lines = out.splitlines()
    assert code == 0 and 3 <= len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith((" ", "\t")) for line in lines)


def test_every_known_log_text_is_answered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, line in enumerate((TRUTH / "oom_messages.jsonl").read_text().splitlines()):
        log = tmp_path / f"{number}.log"
        log.write_text(json.loads(line)["log"])
        found = answer(capsys, str(log))
        check_contract(found)
        assert (found["verdict"] != "no_oom" and found["oom"] == found["ooms"][0]) or len(found["ooms"]) > 1
        code, out, _ = run(capsys, str(log))
        assert code == 0 and len(out.splitlines()) <= 20 and max(map(len, out.splitlines())) <= 80


def test_everything_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    _, brief, _ = run(capsys, path(FIRST))
    _, whole, _ = run(capsys, path(FIRST), "--all")
    assert len(whole.splitlines()) > len(brief.splitlines()) and max(map(len, whole.splitlines())) <= 80
    assert "lora_dropout=0" in whole and "because" in whole


def test_markdown_names_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, path(FIRST), "--md")
    assert code == 0 and out.startswith("### budget, measured")
    assert str(TRACES) not in out and "| `checkpointing_inactive` | 17.49 GiB |" in out


def test_a_log_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(message(FIRST).encode()))  # type: ignore[arg-type]

    monkeypatch.setattr("sys.stdin", Stdin())
    found = answer(capsys, "-")
    assert found["oom"]["tried_bytes"] == 86 << 20 and found["confidence"] == "derived" and found["when"] is None


def test_snapshot_and_log_in_any_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "out.pickle"  # names decide nothing
    log.write_text("step 1\n" + message(FIRST))
    one, other = answer(capsys, path(FIRST), str(log)), answer(capsys, str(log), path(FIRST))
    assert one["capacity"]["source"] == "log" and one["verdict"] == "budget"
    assert {k: v for k, v in one.items() if k != "files"} == {k: v for k, v in other.items() if k != "files"}


def test_packed_logs_and_json_snapshots_are_told_by_content(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    packed = tmp_path / "run.log.gz"
    packed.write_bytes(gzip.compress(message(FIRST).encode()))
    assert answer(capsys, str(packed))["oom"]["tried_bytes"] == 86 << 20
    lines = tmp_path / "run.jsonl"
    lines.write_text(json.dumps({"level": "error", "message": message(FIRST)}) + "\n")
    assert answer(capsys, str(lines))["oom"]["is_gpu_oom"]
    snapshot = tmp_path / "snapshot.log"
    snapshot.write_text(json.dumps({"segments": [], "device_traces": [[]]}))
    assert answer(capsys, str(snapshot))["verdict"] == "unknown"


def test_several_messages_are_all_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(message(FIRST) + "restarting\n" + message("llama2-7b_oom-at-load"))
    found = answer(capsys, str(log))
    assert found["ooms"][0]["tried_bytes"] == found["oom"]["tried_bytes"] == 86 << 20
    assert len(found["ooms"]) == 2


def test_capacity_takes_sizes_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, path(FIRST), "--capacity", "22.5GiB")
    assert found["capacity"]["low_bytes"] == found["oom"]["limit_bytes"] == 24159191040
    assert run(capsys, path(FIRST), "--capacity", "lots")[0] == 2


def test_any_event_can_be_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, path("tiny-llama_3-steps"), "--at", "end")
    assert found["when"]["kind"] == "end" and found["verdict"] == "no_oom"
    assert run(capsys, path("tiny-llama_3-steps"), "--at", "oom")[0] == 4


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda p: str(p / "missing"), 3, "no such file"),
        (lambda p: str(p), 3, "folder"),
        (lambda p: _write(p / "x.pickle", b"\x80\x04broken"), 3, "x.pickle"),
        (lambda p: _write(p / "x.zip", b"PK\x03\x04" + bytes(64)), 3, "zip"),
        (lambda p: _write(p / "x.pickle", b""), 3, "empty"),
        (lambda p: _write(p / "x.pickle", b'{"hello": 1}\n'), 3, "neither a snapshot nor"),
        (lambda p: _write(p / "x.html", b"<!DOCTYPE html><html></html>\n"), 3, "HTML"),
    ],
)
def test_bad_input_is_one_line(
    make: Any, code: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    got, out, err = run(capsys, make(tmp_path))
    assert (got, out) == (code, "") and len(err.splitlines()) == 1 and words in err


def _write(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return str(file)


def test_two_snapshots_are_for_other_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, path(FIRST), path("tiny-llama_3-steps"))
    assert code == 2 and "memtrace diff" in err


def test_an_empty_log_answers_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, _write(tmp_path / "log", b""))[0] == 4


def test_a_snapshot_without_history_tells_no_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a run that did die: the final state alone must not read as if nothing had been refused."""
    with lzma.open(path("llama2-7b_oom-fragmentation")) as file:
        snapshot = pickle.load(file)
    snapshot["device_traces"] = [[] for _ in snapshot["device_traces"]]
    bare = _write(tmp_path / "bare.pickle", pickle.dumps(snapshot))
    found = answer(capsys, bare)
    assert (found["verdict"], found["confidence"]) == ("unknown", "derived")
    assert "No history was recorded" in found["because"][0]
    text = "".join(f"{line}\n" for line in run(capsys, bare)[1].splitlines())
    assert "nothing was refused" not in text
    log = _write(tmp_path / "train.log", message("llama2-7b_oom-fragmentation").encode())
    assert answer(capsys, bare, log)["verdict"] == "fragmentation"
    assert main(["report", bare]) == 0
    shown = capsys.readouterr().out
    assert "final state, no history recorded" in shown and "peaks over" not in shown and "peak of" not in shown


def test_remedies_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    _, brief, _ = run(capsys, path("llama2-7b_oom-fragmentation"))
    assert "enable( …" not in brief and "--all" in brief.splitlines()[-1]
    assert "86.0 MiB was asked for at autograd/_functions.py:334" in brief
    _, whole, _ = run(capsys, path("llama2-7b_oom-fragmentation"), "--all")
    words = whole.split()
    assert "model.gradient_checkpointing_enable(" in words  # broken only where Python lets a line end
    assert "gradient_checkpointing_kwargs={'use_reentrant':" in words


@pytest.mark.parametrize(
    "name", ["llama2-7b_oom-fragmentation", "llama2-7b_oom-at-load", "llama2-7b_oom-first-step", "llama2-7b_baseline"]
)
def test_changes_are_whole_and_fit_the_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, path(name))
    _, text, _ = run(capsys, path(name))
    assert len(text.splitlines()) <= 20 and max(map(len, text.splitlines())) <= 80
    shown = re.split(r"→ ", text)[1:]
    assert shown or not found["findings"]
    changes = ["".join(a["change"].split()) for f in found["findings"] for a in f["advice"][:1]]
    flat = "".join(text.split())
    assert sum(f"→{change}" in flat for change in changes) == len(shown)


def test_what_a_change_saves_beside_the_findings_own_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(capsys, path("llama2-7b_oom-fragmentation"))
    assert "5.51 GiB  fp32_lora_branch + 1.36 GiB masks · saves 6.88 GiB" in text
    assert "→ lora_dropout=0 in LoraConfig" in text


def test_nothing_free_is_not_only_zero_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(capsys, path("llama2-7b_oom-at-load"))
    assert "Nothing is free in pieces" in text and "0 B" not in text


_REFUSED = (
    "Traceback (most recent call last):\n"
    '  File "/v/site-packages/transformers/models/llama/modeling_llama.py", line 240, in forward\n    x = y\n'
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 98.44 MiB is free. Including non-PyTorch memory, this process has 23.54 GiB memory in use. Of "
    "the allocated memory {} GiB is allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated.\n"
)


def test_a_log_says_what_a_text_can_support(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(_REFUSED.format("172.00", "20.31", "2.77"))
    text = " ".join(run(capsys, str(log))[1].split())
    assert "asked for at llama/modeling_llama.py:240 forward" in text
    assert "room for this request; not proven for the next" in text and "memtrace run SCRIPT records it" in text
    log.write_text(_REFUSED.format("2048.00", "22.48", "0.60"))
    text = " ".join(run(capsys, str(log))[1].split())
    assert text.startswith("budget") and "not proven for this one: fewer tokens a batch" in text
    assert "memtrace run SCRIPT records it" in text


def test_markdown_says_things_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(capsys, path("llama2-7b_oom-fragmentation"), "--md")
    assert text.count("Since the same point of the pass before") == 1


def test_the_same_log_twice_is_not_two_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(message(FIRST))
    _, text, _ = run(capsys, str(log), str(log), "--all")
    assert "different" not in text and "found 2 times" in text


def test_a_saved_notebook_is_read_as_it_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tracebacks stand in JSON, coloured and escaped; the message stands there twice."""
    error = message(FIRST).strip()
    frames = [
        "Traceback (most recent call last)",
        "Cell \x1b[0;32mIn[3], line 1\x1b[0m\n\x1b[0;32m----> 1\x1b[0m trainer.train()\n",
        "File \x1b[0;32m/opt/site-packages/transformers/trainer.py:2674\x1b[0m, in Trainer.training_step(self)\n"
        "\x1b[0;32m-> 2674\x1b[0m     outputs = model(**inputs)\n",
        error.replace("OutOfMemoryError", "\x1b[0;31mOutOfMemoryError\x1b[0m"),
    ]
    printed = {"output_type": "stream", "text": ["loss 2.3\n", "loss 2.1\n"]}
    failed = {"output_type": "error", "ename": "OutOfMemoryError", "evalue": error, "traceback": frames}
    cells = [{"cell_type": "markdown", "source": []}, {"cell_type": "code", "outputs": [printed, failed]}]
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}, indent=1))
    assert main(["explain", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "asked for at transformers/trainer.py:2674 training_step" in said
    assert "times" not in said.split("memtrace run")[0]
