# ruff: noqa: E501  (messages stand as they are printed)
"""The verdict from a text: what each sum decides, and what stays a guess."""

from __future__ import annotations

import pytest
from support import parse_log

from memtrace.explain.log_answer import TextAnswer, verdict_from_log


def judge(log: str) -> TextAnswer:
    return verdict_from_log(parse_log(log))


def text(
    tried: str,
    total: str,
    free: str,
    allocated: str,
    slack: str,
    *,
    processes: str = "",
    allowed: str = "",
    gpu: int = 0,
) -> str:
    limit = f"{allowed} allowed; " if allowed else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU {gpu} has a total capacity of {total} of "
        f"which {free} is free. {processes}{limit}Of the allocated memory {allocated} is allocated by PyTorch, and {slack} "
        "is reserved by PyTorch but unallocated.\n"
    )


def test_no_message() -> None:
    answer = judge("all went well\n")
    assert (answer.verdict, answer.confidence, answer.oom) == ("unknown", "guess", None)


@pytest.mark.parametrize(
    ("log", "verdict", "confidence"),
    [
        # in pieces: enough, clearly
        (text("1.00 GiB", "24.00 GiB", "10.00 MiB", "18.00 GiB", "4.00 GiB"), "fragmentation", "derived"),
        # the pieces decide it only together with free memory
        (text("1.00 GiB", "24.00 GiB", "500.00 MiB", "21.00 GiB", "900.00 MiB"), "fragmentation", "guess"),
        # the printed digits leave it open
        (text("1.00 GiB", "24.00 GiB", "0 bytes", "21.00 GiB", "1.00 GiB"), "fragmentation", "guess"),
        (text("1.01 GiB", "24.00 GiB", "0 bytes", "21.00 GiB", "1.00 GiB"), "budget", "guess"),
        # not enough in any case
        (text("2.00 GiB", "24.00 GiB", "10.00 MiB", "21.00 GiB", "1.00 GiB"), "budget", "derived"),
        # pieces below two percent
        (text("20.00 MiB", "24.00 GiB", "10.00 MiB", "22.50 GiB", "200.00 MiB"), "budget", "derived"),
        # larger than the card, allocated more than the card
        (text("30.00 GiB", "24.00 GiB", "20.00 GiB", "1.00 GiB", "0 bytes"), "budget", "derived"),
        (text("1.00 GiB", "8.00 GiB", "0 bytes", "9.00 GiB", "3.00 GiB"), "budget", "derived"),
        # free memory exceeds the request
        (text("20.00 MiB", "24.00 GiB", "10.00 GiB", "12.00 GiB", "1.00 GiB"), "limit", "derived"),
        (text("7.90 GiB", "24.00 GiB", "8.00 GiB", "12.00 GiB", "1.00 GiB"), "limit", "guess"),
        # the process's own limit: capacity is the limit
        (text("2.00 GiB", "80.00 GiB", "60.00 GiB", "9.00 GiB", "100.00 MiB", allowed="10.00 GiB"), "budget", "derived"),
        (text("2.00 GiB", "80.00 GiB", "60.00 GiB", "6.00 GiB", "3.90 GiB", allowed="10.00 GiB"), "fragmentation", "derived"),
        (text("1.00 GiB", "80.00 GiB", "60.00 GiB", "3.00 GiB", "0 bytes", allowed="10.00 GiB"), "limit", "derived"),
        (text("11.00 GiB", "80.00 GiB", "60.00 GiB", "3.00 GiB", "0 bytes", allowed="10.00 GiB"), "budget", "derived"),
    ],
)  # fmt: skip
def test_sums(log: str, verdict: str, confidence: str) -> None:
    answer = judge(log)
    assert (answer.verdict, answer.confidence) == (verdict, confidence), answer.because


def own(size: str) -> str:
    return f"Including non-PyTorch memory, this process has {size} memory in use. "


def test_memory_of_other_processes() -> None:
    others = "Process 12 has 18.00 GiB memory in use. "
    answer = judge(text("1.00 GiB", "24.00 GiB", "0 bytes", "5.00 GiB", "0 bytes", processes=others + own("5.50 GiB")))
    assert (answer.verdict, answer.confidence) == ("not_this_process", "derived")
    assert any("Process 12 holds 18.00 GiB" in fact for fact in answer.worth_saying)


def test_one_of_several_processes_may_be_this_one() -> None:
    others = "Process 12 has 18.00 GiB memory in use. Process 13 has 5.50 GiB memory in use. "
    answer = judge(text("1.00 GiB", "24.00 GiB", "0 bytes", "5.00 GiB", "0 bytes", processes=others))
    (told,) = (fact for fact in answer.worth_saying if "this very process" in fact)
    assert "one of them may be" in told


def test_memory_of_another_library_in_this_process() -> None:
    answer = judge(text("1.00 GiB", "24.00 GiB", "0 bytes", "5.00 GiB", "0 bytes", processes=own("23.00 GiB")))
    assert (answer.verdict, answer.confidence) == ("not_pytorch", "derived")


def test_memory_of_nobody_named() -> None:
    answer = judge(text("1.00 GiB", "24.00 GiB", "0 bytes", "5.00 GiB", "0 bytes"))
    assert (answer.verdict, answer.confidence) == ("not_this_process", "guess")


def test_lone_process_line_is_recognised_as_this_process() -> None:
    answer = judge(
        text(
            "9.00 GiB",
            "24.00 GiB",
            "1.00 GiB",
            "20.00 GiB",
            "1.00 GiB",
            processes="Process 77 has 22.50 GiB memory in use. ",
        )
    )
    assert answer.facts is not None
    assert answer.facts.own_pid == 77


def test_two_possible_processes_stay_unnamed() -> None:
    lines = "Process 1 has 10.00 GiB memory in use. Process 2 has 10.00 GiB memory in use. "
    answer = judge(text("9.00 GiB", "24.00 GiB", "3.00 GiB", "8.00 GiB", "1.00 GiB", processes=lines))
    assert answer.facts is not None
    assert answer.facts.own_pid is None


def test_same_request_on_every_rank() -> None:
    log = "".join(
        f"[rank{i}]: " + text("2.00 GiB", "24.00 GiB", "1.00 MiB", "22.00 GiB", f"{300 + i}.00 MiB", gpu=i)
        for i in range(4)
    )
    assert any("4 ranks or devices failed at the same request" in fact for fact in judge(log).worth_saying)


def test_limit_that_old_versions_do_not_print_is_suspected() -> None:
    log = text("20.00 MiB", "4.00 GiB", "2.00 GiB", "800.00 MiB", "10.00 MiB").replace("torch.Out", "torch.cuda.Out")
    assert any("set_per_process_memory_fraction" in fact for fact in judge(log).worth_saying)
    recent = text("20.00 MiB", "4.00 GiB", "2.00 GiB", "800.00 MiB", "10.00 MiB")
    assert not any("set_per_process_memory_fraction" in fact for fact in judge(recent).worth_saying)


def test_a_log_that_keeps_looking_like_messages_is_still_read() -> None:
    noise = "we ran out of memory budget again, skipping batch 12 of 100\n" * 60_000
    (message,) = parse_log(noise + text("2.00 GiB", "24.00 GiB", "1.00 MiB", "22.00 GiB", "1.00 GiB"))
    assert message.line == 60_001
