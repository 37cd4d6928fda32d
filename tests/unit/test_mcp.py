"""``memtrace mcp``: what an agent gets, and what it is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, trace_path

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters

from memtrace.cli import main
from memtrace.cli.mcp import ask
from memtrace.cli.parsing import verb_module, verb_parser
from memtrace.errors import UsageError
from memtrace.mcp_server import LONGEST_ANSWER, NOT_HERE, READ_FROM, Fence, make_server, trimmed

TINY, DIED = trace_path("tiny-llama_3-steps"), trace_path("llama2-7b_oom-fragmentation")
TOOLS = {"explain", "report", "why", "diff", "simulate", "forecast", "fit"}
THREADS = [json.loads(line)["log"] for line in (ROOT / "tests/truth/oom_messages.jsonl").read_text().splitlines()]
RUN = {"model": "tiny-llama", "lengths": "128,256", "limit": "1GiB", "batch": 2, "dropout": 0.1}


def called(folder: Path, *calls: tuple[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """(is an error, text) of each call, in one session."""

    async def session() -> list[tuple[bool, str]]:
        async with Client(make_server([str(folder)], ask)) as client:
            answers = [await client.call_tool(name, given) for name, given in calls]
        return [(answer.is_error, answer.content[0].text) for answer in answers]

    return asyncio.run(session())


def refusal(folder: Path, name: str, given: dict[str, Any]) -> str:
    [(is_error, text)] = called(folder, (name, given))
    assert is_error
    assert text.isprintable()  # one line, nothing that a terminal obeys
    assert "Traceback" not in text
    return text


def environment() -> dict[str, str]:
    """Of a child that imports what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_from_a_pasted_thread_to_a_verified_change_in_two_calls_over_stdio() -> None:
    thread = next(text for text in THREADS if "max_split_size_mb" in text)
    command = [sys.executable, "-m", "memtrace", "mcp", str(DIED.parent)]
    env = environment()

    async def session() -> tuple[set[str], Any, Any]:
        async with Client(StdioServerParameters(command=command[0], args=command[1:], env=env)) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            first = await client.call_tool("explain", {"file": DIED.name, "text": thread})
            found = json.loads(first.content[0].text)
            changes = [advice["change"] for finding in found["findings"] for advice in finding["advice"]]
            conf = next(match[0] for text in changes if (match := re.search(r"expandable_segments:True", text)))
            second = await client.call_tool("simulate", {"file": DIED.name, "conf": conf})
            return names, found, json.loads(second.content[0].text)

    names, found, proof = asyncio.run(session())
    assert names == TOOLS
    assert (found["verdict"], found["confidence"]) == ("fragmentation", "measured")
    recorded, changed = proof["runs"]
    assert proof["self_check"]["exact"]
    assert (recorded["fits"], changed["fits"]) == (False, True)


def test_without_a_recording_it_takes_three_calls(tmp_path: Path) -> None:
    thread = next(text for text in THREADS if "reserved by PyTorch but unallocated" in text)
    run = {"model": "llama2-7b", "lengths": "512,2048,4096", "batch": 4, "limit": "22GiB", "checkpointing": False}
    answers = called(
        tmp_path,
        ("explain", {"text": thread}),
        ("fit", {"options": {**run, "no-ladder": True, "keep": "length,micro-batch"}}),
        ("forecast", {"options": {**run, "checkpointing": True}}),
    )
    assert not any(is_error for is_error, _ in answers)
    found, search, proof = (json.loads(text) for _, text in answers)
    assert found["confidence"] != "measured"  # a message's figures alone
    assert not search["fits_as_is"]
    assert any(change["option"] == "checkpointing" for plan in search["plans"] for change in plan["changes"])
    assert proof["fits"] and proof["peak_reserved_bytes"] <= 22 << 30


def test_every_pasted_text_is_answered_or_refused_in_one_line(tmp_path: Path) -> None:
    answers = called(tmp_path, *(("explain", {"text": text}) for text in THREADS[::2]))
    assert len(answers) > 25
    for is_error, text in answers:
        assert text.isprintable() if is_error else json.loads(text)["verdict"]


@pytest.mark.parametrize(
    ("tool", "given", "command"),
    [
        ("report", {"file": TINY.name, "at": "step 1"}, ["report", str(TINY), "--at", "step 1"]),
        ("why", {"file": TINY.name, "what": "lora"}, ["report", str(TINY), "--why", "lora"]),
        ("diff", {"before": TINY.name, "after": TINY.name}, ["diff", str(TINY), str(TINY)]),
        ("forecast", {"options": RUN}, ["forecast", *(f"--{name}={value}" for name, value in RUN.items())]),
        ("fit", {"options": RUN}, ["fit", *(f"--{name}={value}" for name, value in RUN.items())]),
    ],
)
def test_the_answer_is_the_command_s(
    tool: str, given: dict[str, Any], command: list[str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    [(is_error, text)] = called(TINY.parent, (tool, given))
    assert not is_error
    answer = json.loads(text)
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsysbinary.readouterr().out)
    cut = {name.split(".")[0].split("[")[0] for name in answer.pop("left_out", {})}
    answer.pop("notes", None)
    assert answer.keys() == printed.keys()
    assert {name for name in printed if answer[name] != printed[name]} <= cut


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recording, and beside it what nobody named."""
    inside, outside = tmp_path / "runs", tmp_path / "private"
    inside.mkdir(), outside.mkdir()
    (inside / "run.pickle.xz").write_bytes(TINY.read_bytes())
    (outside / "run.pickle.xz").write_bytes(TINY.read_bytes())
    (outside / "config.json").write_text("{}")
    return inside


@pytest.mark.parametrize(
    "name", ["../private/run.pickle.xz", "{parent}/private/run.pickle.xz", "/etc/passwd", "~", ".."]
)
def test_what_lies_outside_is_refused(folder: Path, name: str) -> None:
    name = name.format(parent=folder.parent)
    for tool, given in (
        ("report", {"file": name}),
        ("explain", {"file": name}),
        ("diff", {"before": "run.pickle.xz", "after": name}),
        ("forecast", {"options": {"model": name, "lengths": "128"}}),
        ("fit", {"options": {"like": name}}),
        ("forecast", {"options": {"model": "tiny-llama", "lengths": name}}),
    ):
        assert re.search("outside the folders|no such file", refusal(folder, tool, given))


def test_links_are_followed_before_they_are_judged(folder: Path) -> None:
    private = folder.parent / "private"
    try:
        (folder / "file.pickle.xz").symlink_to(private / "run.pickle.xz")
    except OSError:
        pytest.skip("no links here")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").symlink_to(private / "config.json")
    (folder / "within.pickle.xz").symlink_to(folder / "run.pickle.xz")
    (folder / "loop").symlink_to(folder / "loop")
    assert "outside the folders" in refusal(folder, "report", {"file": "file.pickle.xz"})
    assert "a link in it" in refusal(folder, "forecast", {"options": {"model": "model", "lengths": "128"}})
    refusal(folder, "report", {"file": "loop"})
    assert not called(folder, ("report", {"file": "within.pickle.xz"}))[0][0]


def test_a_configuration_can_t_name_a_model_outside(folder: Path) -> None:
    pytest.importorskip("yaml")
    config = {
        "model_name_or_path": str(folder.parent / "private"),
        "finetuning_type": "lora",
        "stage": "sft",
        "do_train": True,
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    assert "outside the folders" in refusal(folder, "forecast", {"options": {"config": "run.yaml", "lengths": "128"}})


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("report", {"file": "\x1b[2Jno\nsuch"}),
        ("report", {"file": "a\0b"}),
        ("report", {"file": "x" * 5000}),
        ("report", {"file": "-"}),
        ("report", {"file": "--json"}),
        ("report", {"file": "run.pickle.xz", "at": "\x1b]0;x\x07"}),
        ("why", {"file": "run.pickle.xz", "what": "\x9b31m"}),
        ("why", {}),
        ("report", {"file": 3}),
        ("explain", {}),
        ("explain", {"text": "nothing of the kind \x1b[31m"}),
        ("simulate", {"file": "run.pickle.xz", "conf": ["--export=x.pickle"]}),
        ("fit", {"options": {**RUN, "trace": "x.pickle"}}),
        ("forecast", {"options": {**RUN, "tra": "x.pickle"}}),
        ("forecast", {"options": {**RUN, "plot": "x.svg"}}),
        ("forecast", {"options": {**RUN, "x --trace": "x.pickle"}}),
        ("nothing\x1b[2J", {}),
    ],
)
def test_hostile_or_wrong_arguments_are_refused_in_one_line(folder: Path, tool: str, given: dict[str, Any]) -> None:
    before = sorted(folder.rglob("*"))
    refusal(folder, tool, given)
    assert sorted(folder.rglob("*")) == before
    assert not Path("x.pickle").exists()


def test_every_option_that_names_a_file_is_fenced() -> None:
    named = re.compile(r"FILE|DIR|RECORDING|OUT|PATH")
    for verb in ("forecast", "fit"):
        for action in verb_parser(verb, verb_module(verb))._actions:
            if named.search(str(action.metavar)) and action.dest != "model":  # it is judged once parsed
                assert action.option_strings[-1][2:] in READ_FROM | NOT_HERE


def test_texts_out_of_files_are_printable(tmp_path: Path) -> None:
    """Whatever a recording's frames, names and warnings hold."""
    answer = {"frame": "a\x1b[2J\nb", "message": "one\ntwo\x9b", "n\x07": ["\u202e"]}

    async def session() -> str:
        async with Client(make_server([str(tmp_path)], lambda *_: answer)) as client:
            return (await client.call_tool("explain", {"text": "x"})).content[0].text

    text = asyncio.run(session())
    assert text.isprintable()
    assert json.loads(text) == {"frame": "a\\x1b[2J\\nb", "message": "one\ntwo\\x9b", "n\\x07": ["\\u202e"]}


def test_answers_are_cut_and_say_so() -> None:
    rows = [{"bytes": number, "frame": "f" * 300} for number in range(1000)]
    text = trimmed({"rows": rows, "total": 1000, "message": "m" * 50_000})
    assert len(text) <= LONGEST_ANSWER
    answer = json.loads(text)
    assert answer["total"] == 1000
    assert len(answer["rows"]) + answer["left_out"]["rows"] == 1000
    assert answer["rows"] == rows[: len(answer["rows"])]
    with pytest.raises(UsageError):
        trimmed({str(number): "x" * 1000 for number in range(90)})


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to one process there")
def test_ctrl_c_ends_it_while_the_agent_holds_its_end_open() -> None:
    held = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-m", "memtrace", "mcp", str(TINY.parent)], env=environment(), **held
    ) as server:
        assert server.stdin is not None and server.stdout is not None and server.stderr is not None
        server.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
        server.stdin.flush()
        assert server.stdout.readline()  # it serves
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
        assert server.stderr.read() == b"memtrace: interrupted\n"


def test_a_folder_that_is_none() -> None:
    with pytest.raises(UsageError, match="not a folder"):
        Fence([str(TINY)])


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 5
    assert "[mcp]" in capsys.readouterr().err
