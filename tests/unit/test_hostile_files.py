"""Files made to cost far more than their size: each is refused with one line, at once, in little memory."""

from __future__ import annotations

import copy
import gzip
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from strategies import BASE, event, modern

from memtrace.analysis import analyse
from memtrace.answers.report import report
from memtrace.answers.steps import from_snapshot_key
from memtrace.cli import main
from memtrace.errors import MemtraceError, SnapshotError
from memtrace.history.timeline import build
from memtrace.snapshot.bounds import CutShort, Damaged, Foreign, Hostile
from memtrace.snapshot.decoder import decode
from memtrace.snapshot.decoder.machine import Machine
from memtrace.snapshot.load import from_raw, load
from memtrace.snapshot.plain import Look, look


@contextmanager
def time_limit(seconds: int = 20) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def doubled(levels: int, kind: type = tuple) -> Any:
    """A container of two parts that are one container of two parts that …"""
    value: Any = kind()
    for _ in range(levels):
        value = kind((value, value))
    return value


def nested(opcode: bytes, levels: int) -> bytes:
    return b"\x80\x04" + b")" + opcode * levels + b"."


def without_segments(**extra: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": [[]], **extra}


def many_devices() -> dict[str, Any]:
    raw = modern()
    raw["device_traces"] = [raw["device_traces"][0] * 1000] * 4000
    return raw


def many_segments() -> dict[str, Any]:
    raw = modern()
    blocks = raw["segments"][0]["blocks"] * 5000
    raw["segments"] = [{**raw["segments"][0], "blocks": blocks} for _ in range(5000)]
    return raw


def event_with(key: str, value: Any) -> dict[str, Any]:
    raw = modern()
    raw["device_traces"][0][1][key] = value
    return raw


def cycle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def one_event() -> dict[str, Any]:
    raw = modern()
    raw["device_traces"][0] += [raw["device_traces"][0][1]] * 3_000_000
    return raw


def one_block() -> dict[str, Any]:
    raw = modern()
    raw["segments"][0]["blocks"] += [raw["segments"][0]["blocks"][0]] * 1_000_000
    return raw


HOSTILE: dict[str, bytes] = {
    "one event named over and over": pickle.dumps(one_event(), 4),
    "one block named over and over": pickle.dumps(one_block(), 4),
    "one segment named over and over": pickle.dumps({"segments": [modern()["segments"][0]] * 1_000_000}, 4),
    "hash bomb as a value": pickle.dumps(event_with("stream", doubled(60)), 4),
    "hash bomb as an action": pickle.dumps(event_with("action", doubled(60)), 4),
    "deep tuple": nested(b"\x85", 2_000_000),
    "deep tuple as a key": b"\x80\x04})" + b"\x85" * 500_000 + b"Ns.",
    "text bomb": pickle.dumps(event_with("internal_metadata", doubled(60, list)), 4),
    "settings bomb": pickle.dumps(without_segments(allocator_settings={"a": doubled(60, list)}), 4),
    "extra key bomb": pickle.dumps(without_segments(memtrace={"a": doubled(60, list)}), 4),
    "settings that hold themselves": pickle.dumps(without_segments(allocator_settings={"a": cycle()}), 4),
    "one trace for every device": pickle.dumps(many_devices(), 4),
    "one list of blocks in every segment": pickle.dumps(many_segments(), 4),
    "memo index": b"\x80\x04}r\xff\xff\xff\x7f.",
    "long text": b"\x80\x04X\xff\xff\xff\x7fabc",
    "long text, 8 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00abc",
    "long bytes": b"\x80\x04B\xff\xff\xff\x7fabc",
    "long integer": b"\x80\x04\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b".",
    "long digits": b"\x80\x02I" + b"9" * 60_000 + b"\n.",
    "endless line": b"\x80\x02V" + b"a" * 200_000 + b"\n.",
    "set": b"\x80\x04\x8f(K\x01\x90.",
    "marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_with_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.pickle"
    path.write_bytes(HOSTILE[name])
    with time_limit():
        try:
            load(path)
        except SnapshotError as error:
            assert "\n" not in str(error)
            assert str(error).count(str(path)) == 1
        else:
            assert name == "text bomb"  # nothing needs that text in full


def test_recorded_files_are_plain(tmp_path: Path) -> None:
    for protocol in (4, 5):
        assert look(pickle.dumps(modern(), protocol)) is Look.PLAIN


@pytest.mark.parametrize(
    ("size", "index"), [(200, 1 << 8), (70_000, 1 << 17), (20 << 20, 1 << 25), (20 << 20, 1 << 31)]
)
def test_a_memo_index_beyond_the_file_is_not_plain(size: int, index: int) -> None:
    head = b"\x80\x02]r" + struct.pack("<I", index) + b"X" + struct.pack("<I", size)
    assert look(head + bytes(size) + b"a.") is Look.OTHER
    sound = b"\x80\x02]r" + struct.pack("<I", size // 2) + b"X" + struct.pack("<I", size)
    assert look(sound + bytes(size) + b"a.") is Look.PLAIN


@pytest.mark.parametrize("cut", [3, 40, 200, 555])
def test_a_file_cut_short_is_seen_without_the_slow_machine(cut: int) -> None:
    data = pickle.dumps(modern(), 4)
    assert look(data[:-cut]) is Look.CUT_SHORT


@pytest.mark.parametrize("protocol", range(6))
def test_the_machine_builds_what_pickle_builds(protocol: int) -> None:
    value = [
        modern(), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, 2), 3), None, True, False, 1.5, -1,
        255, 65_535, -(2**31), 2**31,
        2**63, -(2**70), "", "é", "x" * 300, "\ud800", {}, [[]], {1: 2, (0, 0): 3, 1.5: None}, list(range(2500)),
        {str(i): i for i in range(2500)},
    ]  # fmt: skip
    data = pickle.dumps(value, protocol)
    assert Machine(data).load() == pickle.loads(data) == value


def test_the_machine_keeps_shared_objects_shared() -> None:
    inner = [1]
    made = Machine(pickle.dumps([inner, inner], 4)).load()
    assert made[0] is made[1]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x80\x04K", CutShort), (b"\x80\x04", CutShort), (b"\x80\x04h\x00.", Damaged), (b"\x80\x04.", Damaged),
        (b"\x80\x04]K\x01K\x02e.", Damaged), (b"\x80\x04K\x01K\x02a.", Damaged), (b"\x80\x04\x81.", Foreign),
        (b"\x80\x04cos\nsystem\n.", Foreign), (b"\x80\x06N.", Damaged), (b"\x80\x04}]Ns.", Damaged),
        (b"\x80\x04\xff.", Damaged), (b"\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", CutShort),
        (b"\x80\x04)\x85\x86.", Damaged), (nested(b"2\x86", 40), Hostile), (b"\x80\x04(]e.", Damaged),
    ],
)  # fmt: skip
def test_the_machine_says_what_is_wrong(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        Machine(data).load()


@pytest.mark.parametrize("packed", [False, True])
def test_no_file_may_take_more_than_half_of_what_is_free(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "half_of_free_memory_bytes", lambda: 5 << 20)
    assert decode.memory_allowance_bytes(60 << 20, packed) == 5 << 20


def test_a_file_that_needs_more_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.pickle.gz"  # not .xz: packing it would take longer than all that is tested
    content = {"segments": [], "memtrace": {str(i): i for i in range(1_000_000)}}
    path.write_bytes(gzip.compress(pickle.dumps(content, 4), 1))
    monkeypatch.setattr(decode, "half_of_free_memory_bytes", lambda: 64 << 20)
    with pytest.raises(SnapshotError, match="memory") as refused:
        load(path)
    assert "\n" not in str(refused.value)


ODD_SIZES = (512.5, "512", True, 1 << 60, -512, 1 << 64, None, [512], float("nan"), float("inf"), b"512")


@pytest.mark.parametrize("key", ["size", "addr"])
@pytest.mark.parametrize("value", ODD_SIZES, ids=repr)
def test_what_is_no_size_is_refused_in_one_line(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(event_with(key, value), 4))
    if key == "addr" and value in (1 << 60,):
        load(path)
        return
    if key == "addr" and value is None:
        load(path)
        return
    with pytest.raises(SnapshotError) as refused:
        load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["size", "requested_size", "address"])
@pytest.mark.parametrize("value", [512.5, "512", True, -512, 1 << 64, [512], float("nan")], ids=repr)
def test_nor_does_a_block_take_it(key: str, value: Any, tmp_path: Path) -> None:
    raw = modern()
    raw["segments"][0]["blocks"][0][key] = value
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(raw, 4))
    with pytest.raises(SnapshotError):
        load(path)


SAID_BY_US: dict[str, Any] = {
    "phases": [{"time_us": 1, "name": "forward", "step": 0}], "pid": 4, "gpu": "H200", "torch": "2.11", "reason": "oom",
    "labels": [{"address": BASE, "bytes": 512, "category": "lora", "subcategory": "params", "name": "l"}],
    "problems": ["x"], "packages": {"torch": "2.11"}, "config": {"models": [{"class": "M"}], "batch": 4},
    "steps": {"columns": ["step", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "tokens"],
              "rows": [[i, 100, 200, 150, 5] for i in range(20)]},
    "stats": {"allocated_bytes.all.peak": 5}, "rank": 0, "world_size": 2, "outside": [{"time_us": 1, "bytes": 5}],
}  # fmt: skip


@pytest.mark.parametrize("key", SAID_BY_US)
def test_one_odd_value_in_any_place_of_our_own_key(key: str) -> None:
    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        for name in value if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else ():
            yield from places(value[name], (*path, name))

    odd = (None, True, -1, 512.5, "512", 2**62, 2**200, float("nan"), "\ud800", [], {}, [[]], {"a": [{}]}, (1, 2))
    for path in places(SAID_BY_US[key], (key,)):
        for value in odd:
            said: Any = copy.deepcopy(SAID_BY_US)
            inside = said
            for name in path[:-1]:
                inside = inside[name]
            inside[path[-1]] = value
            with suppress(MemtraceError):
                snapshot = from_raw(modern() | {"memtrace": said}, "x")
                report(analyse(build(snapshot, snapshot.devices[0])))
            with suppress(MemtraceError):
                from_snapshot_key(said.get("steps"))


OURS = ("device_total_bytes", "device_free_bytes", "limit_bytes", "rank", "world_size", "version", "pid")


@pytest.mark.parametrize("value", ODD_SIZES, ids=repr)
def test_odd_values_in_our_own_key_end_no_verb(value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = modern()
    raw["device_traces"][0].append(event("oom", value if value is not None else 5, 1 << 30, 9, device_free=value))
    raw["memtrace"] = dict.fromkeys(OURS, value) | {
        "oom": {"requested_bytes": value, "device_free_bytes": value, "message": value, "step": value},
        "labels": [{"address": value, "bytes": value, "category": value, "from_time_us": value}],
        "phases": [{"time_us": value, "name": value, "step": value}],
        "stats": {"allocated_bytes.all.peak": value}, "config": {"models": value, "run": {"seq_len": value}},
        "steps": {"columns": ["step"], "rows": [[value]]}, "packages": {"peft": value}, "gpu": value, "torch": value,
    }  # fmt: skip
    raw["allocator_settings"] = {
        "max_split_size": value, "garbage_collection_threshold": value, "PYTORCH_CUDA_ALLOC_CONF": value,
        "roundup_power2_divisions": {"1": value, "256": value}, "per_process_memory_fraction": value,
        "large_segment_size": value, "max_non_split_rounding_size": value, "expandable_segments": value,
    }  # fmt: skip
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(raw, 4))
    for verb in (
        "report",
        "explain",
        "info",
        "simulate",
        "steps",
        "fragmentation",
        "ranks -j 1",
        "check --max-peak 80GiB",
    ):
        name, *more = verb.split()
        code = main([name, str(path), *more])
        assert code in (0, 1, 3, 4), (verb, code)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl", "deep.log"])
@pytest.mark.parametrize("verb", ["report", "explain", "steps", "info", "scrub --check", "check --baseline"])
def test_json_nested_without_end(name: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_text('{"segments":' + "[" * 200_000 + "]" * 200_000 + "}\n")
    word, *more = verb.split()
    assert main([word, str(path), *more, *([str(path)] if "--baseline" in more else [])]) in (0, 3, 4)
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("\n") <= 1


SMALL_FILES = (
    "check IN --baseline", "report IN --rules", "estimate --gpu rtx-4090 --config",
    "estimate --gpu rtx-4090 --seq-len 9 --model",
    "forecast --model llama2-7b --limit 22GiB --lengths", "forecast --limit 22GiB --lengths 512 --config",
    "fit --model llama2-7b --limit 22GiB --lengths",
)  # fmt: skip


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="no device that never ends")
@pytest.mark.parametrize("words", SMALL_FILES)
def test_a_device_that_never_ends_is_no_file(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.pickle"
    source.write_bytes(pickle.dumps(modern(), 4))
    with time_limit():
        assert main([word.replace("IN", str(source)) for word in words.split()] + ["/dev/zero"]) in (2, 3)
    err = capsys.readouterr().err
    assert err.startswith("memtrace: ") and err.count("\n") == 1


def test_a_notebook_takes_no_more_either(tmp_path: Path) -> None:
    """In a process of its own: what earlier tests freed could be used again, and is beside the bound."""
    notebook = tmp_path / "many.ipynb"
    notebook.write_text('{"cells":[' + "{}," * 2_000_000 + "{}]}")
    code = (
        "import sys; from memtrace.cli import main; from memtrace.explain.inputs import _printed\n"
        "from memtrace.snapshot.decoder import decode\n"
        "decode.half_of_free_memory_bytes = lambda: 64 << 20\n"
        "with open(sys.argv[1], 'rb') as raw:\n"
        "    assert _printed(raw) is raw  # read as the text it is\n"
        "sys.exit(main(['explain', sys.argv[1]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(notebook)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("\n") == 1


RULES = {"deep": "rule = " + "[" * 5000, "digits": "rule = " + "9" * 5000, "not text": "\udcff"}


@pytest.mark.parametrize("name", RULES)
def test_rules_are_one_line_too(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, rules = tmp_path / "in.pickle", tmp_path / "rules.toml"
    source.write_bytes(pickle.dumps(modern(), 4))
    rules.write_bytes(RULES[name].encode(errors="surrogateescape"))
    assert main(["report", str(source), "--rules", str(rules)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("memtrace: ") and err.count("\n") == 1
