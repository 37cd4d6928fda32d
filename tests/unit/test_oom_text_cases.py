"""Real reports: every field a person read off them must come out of the log reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import parse_log

from memtrace.explain.log_answer import verdict_from_log
from memtrace.oomlog import CONTRACT_KEYS, OomMessage

TRUTH = Path(__file__).parent.parent / "truth" / "oom_messages.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in TRUTH.read_text().splitlines()]
BY_ID = {case["id"]: case for case in CASES}


def read(name: str) -> OomMessage:
    return parse_log(BY_ID[name]["log"])[0]


def agrees(message: OomMessage, key: str, wanted: object) -> bool:
    value = getattr(message, key)
    if key.endswith("_bytes") and isinstance(wanted, int):
        return value is not None and abs(value - wanted) <= message.half_unit_bytes.get(key, 0) + 1
    return bool(value == wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_expected_fields(case: dict[str, Any]) -> None:
    message = parse_log(case["log"])[0]
    wrong = {k: (w, getattr(message, k)) for k, w in case["expected"].items() if not agrees(message, k, w)}
    assert not wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_one_report_is_one_message(case: dict[str, Any]) -> None:
    assert len(parse_log(case["log"])) == (2 if "interleaved" in case["format"] else 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_same_deep_inside_a_log(case: dict[str, Any]) -> None:
    noise = "{'loss': 1.25, 'epoch': 0.5}\nstep 12 | 3 out of 20 | max_memory_allocated: 70.1 GiB\n" * 300
    (alone, *_), (buried, *_) = parse_log(case["log"]), parse_log(noise + case["log"] + "\n" + noise)
    assert buried.contract() == alone.contract()
    assert buried.line == alone.line + 600


@pytest.mark.parametrize(
    ("name", "at_least", "below"),
    [
        ("M001", None, "1.4"), ("M006", "1.4", "2.1"), ("M007", "1.13", "2.1"), ("M026", "2.1", "2.2"),
        ("M031", "2.2", "2.5"), ("M040", "2.5", "2.11"), ("M047", "2.5", "2.11"), ("M088", "2.1", "2.14"),
    ],
)  # fmt: skip
def test_version_range(name: str, at_least: str | None, below: str | None) -> None:
    message = read(name)
    assert (message.torch_at_least, message.torch_below) == (at_least, below)


def test_contract_keys() -> None:
    assert tuple(read("M042").contract()) == CONTRACT_KEYS


def test_two_ranks_on_one_line() -> None:
    first, second = parse_log(BY_ID["M012"]["log"])
    assert (first.device, second.device) == (0, 3)
    assert first.free_bytes != second.free_bytes


def test_process_lines() -> None:
    assert read("M042").other_processes == ((43872, round(4.97 * 2**30)),)
    assert read("M038").process_bytes is None
    assert read("M064").limit_bytes is None


def test_private_pools_and_limit() -> None:
    message = read("M047")
    assert message.private_pools_bytes == 17 * 2**20
    assert message.limit_bytes == round(1.05 * 2**30)


def test_precision_is_half_the_last_printed_digit() -> None:
    message = read("M001")
    assert message.half_unit_bytes["total_bytes"] == pytest.approx(0.005 * 2**30)
    assert message.half_unit_bytes["reserved_unallocated_bytes"] == pytest.approx(0.005 * 2**10)
    assert message.interval("limit_bytes") is None


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("M001", "budget"), ("M004", "limit"), ("M007", "not_this_process"), ("M011", "budget"), ("M012", "budget"),
        ("M016", "fragmentation"), ("M019", "fragmentation"), ("M020", "fragmentation"), ("M022", "budget"),
        ("M025", "fragmentation"), ("M026", "fragmentation"), ("M029", "limit"), ("M030", "limit"), ("M031", "budget"),
        ("M033", "unknown"), ("M037", "fragmentation"), ("M038", "budget"), ("M040", "fragmentation"),
        ("M041", "fragmentation"), ("M042", "fragmentation"), ("M043", "budget"), ("M045", "unknown"),
        ("M048", "not_this_process"), ("M050", "limit"), ("M052", "limit"), ("M053", "limit"), ("M058", "budget"),
        ("M063", "not_pytorch"), ("M066", "unknown"), ("M074", "not_pytorch"), ("M082", "not_gpu_memory"),
        ("M085", "not_gpu_memory"), ("M086", "not_pytorch"), ("M091", "not_gpu_memory"),
    ],
)  # fmt: skip
def test_verdict(name: str, verdict: str) -> None:
    assert verdict_from_log(parse_log(BY_ID[name]["log"])).verdict == verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_verdicts_use_the_words_of_the_contract(case: dict[str, Any]) -> None:
    answer = verdict_from_log(parse_log(case["log"]))
    assert answer.verdict in {
        "fragmentation", "budget", "limit", "not_this_process", "not_gpu_memory", "not_pytorch", "no_oom", "unknown",
    }  # fmt: skip
    assert answer.confidence in {"derived", "guess"}
    assert all(sentence.endswith((".", ")")) for sentence in (*answer.because, *answer.worth_saying))
    if not case["expected"]["is_gpu_oom"]:
        assert answer.verdict == "not_gpu_memory"
