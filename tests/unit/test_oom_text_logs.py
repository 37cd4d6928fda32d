# ruff: noqa: E501  (messages stand as they are printed)
"""What surrounds a message in a log: interleaving, doubling, encodings, warnings, talk about memory."""

from __future__ import annotations

import io
import textwrap

import pytest
from support import parse_log, read_text

from memtrace.oomlog import MessageKind, read_log, windows
from memtrace.oomlog.scan import MAX_MESSAGES

LIST = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 79.15 GiB total capacity; "
    "77.13 GiB already allocated; 355.31 MiB free; 78.21 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management "
    "and PYTORCH_CUDA_ALLOC_CONF"
)
OTHER_LIST = LIST.replace("GPU 3", "GPU 0").replace("355.31", "307.31")
SENTENCES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.68 GiB. GPU 0 has a total capacity of 79.21 GiB of "
    "which 259.19 MiB is free. Including non-PyTorch memory, this process has 78.44 GiB memory in use. Of the allocated "
    "memory 70.48 GiB is allocated by PyTorch, and 6.78 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
GIB = 1 << 30


def test_a_setting_is_told_whole_wherever_a_block_of_the_log_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    log = f"{'x' * 3000}\n{'y' * 150}\nPYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\n{'z' * 900}\n{LIST}\n".encode()
    whole = read_log(io.BytesIO(log)).settings
    assert whole == ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",)
    for size in range(3000, 3600, 7):
        monkeypatch.setattr(windows, "BLOCK_BYTES", size)
        assert read_log(io.BytesIO(log)).settings == whole


def test_two_ranks_with_tags_line_by_line() -> None:
    pairs = zip(textwrap.wrap(SENTENCES, 60), textwrap.wrap(LIST + " " * 3 + "x" * 40, 45), strict=False)
    first, second = parse_log("".join(f"[rank0]: {a}\n[rank3]: {b}\n" for a, b in pairs))
    assert (first.rank, first.device, first.reserved_unallocated_bytes) == (0, 0, round(6.78 * GIB))
    assert (second.rank, second.device, second.reserved_bytes) == (3, 3, round(78.21 * GIB))


def test_two_ranks_without_tags_line_by_line() -> None:
    pairs = zip(textwrap.wrap(LIST, 60), textwrap.wrap(OTHER_LIST, 60), strict=True)
    first, second = parse_log("".join(f"{a}\n{b}\n" for a, b in pairs))
    assert (first.device, second.device) == (3, 0)
    assert first.free_bytes == round(355.31 * (1 << 20))
    assert second.free_bytes == round(307.31 * (1 << 20))
    assert "alternate" in first.notes[0]


def test_mixed_up_messages_leave_figures_unknown() -> None:
    lines = textwrap.wrap(LIST, 100)
    others = textwrap.wrap(OTHER_LIST, 100)
    log = "\n".join([lines[0], others[0], others[1], lines[1], lines[2], *others[2:]])
    messages = parse_log(log)
    assert messages
    assert all(m.free_bytes in (None, round(355.31 * (1 << 20)), round(307.31 * (1 << 20))) for m in messages)


def test_a_message_inside_another_on_one_line() -> None:
    first, second = parse_log(LIST[:110] + OTHER_LIST + LIST[110:])
    assert (first.device, first.free_bytes) == (3, round(355.31 * (1 << 20)))
    assert (second.device, second.free_bytes) == (0, round(307.31 * (1 << 20)))


def test_foreign_line_inside_a_message() -> None:
    lines = textwrap.wrap(LIST, 60)
    (message,) = parse_log("\n".join([*lines[:2], "{'loss': 2.1, 'lr': 1e-4}", *lines[2:]]))
    assert message.damaged
    assert message.allocated_bytes == round(77.13 * GIB)
    assert message.reserved_bytes == round(78.21 * GIB)


def test_doubles_are_counted_once() -> None:
    log = "2024-08-21 22:56:04 ERROR trainer - " + LIST.split(": ", 1)[1] + "\n" + "x\n" * 5000 + "[rank3]: " + LIST
    (message,) = parse_log(log)
    assert message.times_printed == 2
    assert (message.line, message.rank, message.exception) == (1, 3, "torch.cuda.OutOfMemoryError")


def test_warning_lines_give_exact_bytes() -> None:
    warning = (
        "[rank0]:[W910 23:40:43.144601916 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 "
        "while trying to allocate 1803550720 bytes (free: {free}, total: 85051089879).\n"
    )
    text = SENTENCES.replace("expandable_segments:True to avoid fragmentation.", "")
    (message,) = parse_log(warning.format(free=1) + warning.format(free=271780000) + "[rank0]: " + text)
    assert message.kind is MessageKind.ALLOCATOR
    assert (message.tried_bytes, message.total_bytes, message.free_bytes) == (1803550720, 85051089879, 271780000)
    assert message.half_unit_bytes["tried_bytes"] == 0
    assert message.torch_at_least == "2.13"


def test_warning_alone_is_a_warning() -> None:
    (message,) = parse_log(
        "expandable_segments: memory mapping failed with OOM on device 1 while trying to map 20971520 bytes "
        "(free: 20250624, total: 51043958784)"
    )
    assert (message.kind, message.device, message.free_bytes) == (MessageKind.WARNING, 1, 20250624)


def test_warning_of_another_request_stays() -> None:
    warning = "memory allocation failed with OOM on device 0 while trying to allocate 4096 bytes (free: 1, total: 2).\n"
    first, second = parse_log(warning + SENTENCES)
    assert first.kind is MessageKind.WARNING
    assert second.tried_bytes == round(1.68 * GIB)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "latin-1", "utf-8-sig"])
def test_encodings(encoding: str) -> None:
    (message,) = parse_log(("démarrage\r\n" + SENTENCES + "\r\n").encode(encoding))
    assert message.allocated_bytes == round(70.48 * GIB)
    assert message.line == 2


def test_no_log_at_all() -> None:
    assert parse_log(b"") == ()


@pytest.mark.parametrize(
    "log",
    [
        "If you get CUDA out of memory errors, lower the batch size.",
        "To avoid CUDA out of memory, use gradient checkpointing.",
        "this may cause CUDA out of memory",
        "CUDA out of memory can happen with long sequences",
        "    except torch.cuda.OutOfMemoryError:",
        "    except torch.cuda.OutOfMemoryError as error:",
        "    if 'CUDA out of memory' in str(e):",
        '    if "CUDA error: out of memory" in str(e):',
        '    raise RuntimeError("CUDA out of memory")',
        'TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(n));',
        "saved 12 out of 20 checkpoints, memory: 3.4 GiB",
        "max_memory_allocated: 70 GiB, memory_reserved: 71 GiB, out of 80 GiB memory",
        "exit code 0\nexitcode: 1\nkilled by user\nnothing was killed",
        '"Status": "exited",\n"OOMKilled": false,\n"ExitCode": 1',
    ],
)
def test_talk_and_code_are_no_messages(log: str) -> None:
    assert parse_log(log) == ()


@pytest.mark.parametrize(
    "log",
    [
        "RuntimeError: CUDA out of memory.\n",
        "CUDA out of memory.\n",
        "2024-01-01 10:00:00 ERROR CUDA out of memory here",
    ],
)
def test_messages_without_figures(log: str) -> None:
    (message,) = parse_log(log)
    assert message.is_gpu_oom
    assert message.tried_bytes is None


def test_bare_mention_next_to_the_full_text_is_dropped() -> None:
    (message,) = parse_log("RuntimeError: CUDA out of memory.\n" + SENTENCES)
    assert message.line == 2


@pytest.mark.parametrize("number", range(1, 9))
def test_device_as_raw_byte(number: int) -> None:
    (message,) = parse_log(SENTENCES.replace("GPU 0 ", f"GPU {chr(number)} ").encode())
    assert message.device == number
    assert message.total_bytes == round(79.21 * GIB)


def test_text_ending_at_a_nul() -> None:
    (message,) = parse_log(b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 314.00 MiB. GPU \n\nx")
    assert (message.tried_bytes, message.device, message.total_bytes) == (314 << 20, None, None)
    assert message.cut_short


def test_more_messages_than_are_kept() -> None:
    log = "\n".join(SENTENCES.replace("1.68", f"{1 + i / 100:.2f}") for i in range(MAX_MESSAGES + 500))
    reading = read_text(log)
    assert MAX_MESSAGES <= len(reading.messages) < MAX_MESSAGES + 500
    assert reading.stopped_early


def test_neighbouring_messages_keep_their_figures() -> None:
    log = "\n".join(SENTENCES.replace("1.68", f"{1 + i / 100:.2f}") for i in range(700))
    messages = parse_log(log)
    assert [m.tried_bytes for m in messages] == [round((100 + i) * GIB / 100) for i in range(700)]
    assert all(m.reserved_unallocated_bytes == round(6.78 * GIB) and not m.cut_short for m in messages)
    assert [m.line for m in messages] == list(range(1, 701))


def test_dense_logs_are_cut_between_messages() -> None:
    short = SENTENCES.split(" If reserved")[0]
    log = "\n".join(f"[rank1]: {short}".replace("1.68", f"{1 + i / 100:.2f}") for i in range(1500))
    messages = parse_log(log)
    assert [m.line for m in messages] == list(range(1, 1501))
    assert all(m.reserved_unallocated_bytes == round(6.78 * GIB) and m.rank == 1 for m in messages)
