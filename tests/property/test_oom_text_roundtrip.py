# ruff: noqa: E501  (messages stand as they are printed)
"""Messages written by each version's grammar, buried in logs the way launchers and terminals bury them, read back."""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support import parse_log, read_text

from memtrace.explain.log_answer import verdict_from_log
from memtrace.oomlog import OomMessage, read_log

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def printed(size: int) -> tuple[str, float]:
    """PyTorch's format_size, and half of the last digit in bytes."""
    if size <= KIB:
        return f"{size} bytes", 0
    for limit, unit, name in ((MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if size <= limit:
            return f"{size / unit:.2f} {name}", 0.005 * unit
    return f"{size / GIB:.2f} GiB", 0.005 * GIB


@dataclass(frozen=True)
class Case:
    """A message and what must be read from it: figures with their tolerance, other fields exactly."""

    text: str
    figures: dict[str, tuple[int, float]]
    exact: dict[str, object]


sizes = st.one_of(
    st.integers(2 * MIB, 200 * GIB), st.integers(512, 4 * MIB), st.sampled_from([MIB, GIB, 20 * MIB, 2 * MIB])
)
devices = st.integers(0, 15)
HINT_OLD = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  "
    "See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT_21 = (
    " If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  "
    "See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT_22 = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
HINT_211 = HINT_22.replace(
    "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables",
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
)


@st.composite
def in_parentheses(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["cached", "reserved", "hint", "npu"]))
    device = draw(devices)
    figures: dict[str, tuple[int, float]] = {}

    def size(name: str) -> str:
        value = draw(sizes)
        text, half = printed(value)
        figures[name] = (value, half)
        return text

    backend = "NPU" if kind == "npu" else draw(st.sampled_from(["CUDA", "HIP"]))
    label = "NPU" if kind == "npu" else "GPU"
    text = f"{backend} out of memory. Tried to allocate {size('tried_bytes')} ({label} {device}; "
    text += f"{size('total_bytes')} total capacity; {size('allocated_bytes')} already allocated; "
    if kind == "npu":
        text += f"{printed(draw(sizes))[0]} current active; "
    text += f"{size('free_bytes')} free; "
    if kind != "cached" and draw(st.booleans()):
        text += f"{size('limit_bytes')} allowed; "
    if kind == "cached":
        text += f"{size('reserved_unallocated_bytes')} cached)"
    else:
        text += f"{size('reserved_bytes')} reserved in total by PyTorch)"
    if kind in ("hint", "npu"):
        text += HINT_OLD
    prefix = draw(st.sampled_from(["RuntimeError: ", "torch.cuda.OutOfMemoryError: ", ""]))
    return Case(prefix + text, figures, {"backend": backend.lower(), "device": device, "is_gpu_oom": True})


@st.composite
def in_sentences(draw: st.DrawFn) -> Case:
    version = draw(st.sampled_from(["2.1", "2.2", "2.4", "2.5", "2.11", "xpu"]))
    device = draw(devices)
    figures: dict[str, tuple[int, float]] = {}
    exact: dict[str, object] = {"device": device, "is_gpu_oom": True}

    def size(name: str) -> str:
        value = draw(sizes)
        text, half = printed(value)
        figures[name] = (value, half)
        return text

    backend = "XPU" if version == "xpu" else draw(st.sampled_from(["CUDA", "HIP"]))
    exact["backend"] = backend.lower()
    capacity = "capacty" if version == "2.1" else "capacity"
    text = f"{backend} out of memory. Tried to allocate {size('tried_bytes')}. GPU {device} has a total {capacity} of "
    text += f"{size('total_bytes')} of which {size('free_bytes')} is free. "
    if version != "xpu":
        others = []
        for _ in range(draw(st.integers(0, 3))):
            pid, value = draw(st.integers(1, 4_000_000)), draw(sizes)
            others.append(pid)
            text += f"Process {pid} has {printed(value)[0]} memory in use. "
        own = draw(st.sampled_from(["none", "known", "hidden", "zero"]))
        if own == "known":
            text += f"Including non-PyTorch memory, this process has {size('process_bytes')} memory in use. "
        elif own != "none":
            shown = "17179869184.00 GiB" if own == "hidden" else "0 bytes"
            text += f"Including non-PyTorch memory, this process has {shown} memory in use. "
            exact["process_bytes"] = None
        exact["pids"] = others
    if version in ("2.5", "2.11", "xpu") and draw(st.booleans()):
        text += f"{size('limit_bytes')} allowed; "
    text += f"Of the allocated memory {size('allocated_bytes')} is allocated by PyTorch, "
    if version in ("2.4", "2.5", "2.11") and draw(st.booleans()):
        graphs = "HIP" if backend == "HIP" else "CUDA"
        text += f"with {size('private_pools_bytes')} allocated in private pools (e.g., {graphs} Graphs), "
    text += f"and {size('reserved_unallocated_bytes')} is reserved by PyTorch but unallocated."
    hints = {
        "2.1": HINT_21,
        "2.11": HINT_211,
        "xpu": " Please use `empty_cache` to release all unoccupied cached memory.",
    }
    text += hints.get(version, HINT_22)
    exception = "torch.OutOfMemoryError" if version in ("2.5", "2.11", "xpu") else "torch.cuda.OutOfMemoryError"
    exact["exception"] = exception
    exact["reserved_bytes"] = None
    return Case(f"{exception}: {text}", figures, exact)


@st.composite
def of_other_back_ends(draw: st.DrawFn) -> Case:
    figures: dict[str, tuple[int, float]] = {}

    def size(name: str) -> str:
        value = draw(sizes)
        text, half = printed(value)
        figures[name] = (value, half)
        return text

    if draw(st.booleans()):
        text = (
            f"RuntimeError: MPS backend out of memory (MPS allocated: {size('allocated_bytes')}, other allocations: "
            f"{size('other_allocations_bytes')}, max allowed: {size('limit_bytes')}). Tried to allocate "
            f"{size('tried_bytes')} on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit "
            "for memory allocations (may cause system failure)."
        )
        return Case(text, figures, {"backend": "mps", "device": None, "is_gpu_oom": True})
    device = draw(devices)
    text = (
        f"Allocation on device {device} would exceed allowed memory. (out of memory)\nCurrently allocated     : "
        f"{size('allocated_bytes')}\nRequested               : {size('tried_bytes')}\nDevice limit            : "
        f"{size('total_bytes')}\nFree (according to CUDA): {size('free_bytes')}\nPyTorch limit (set by user-supplied "
        "memory fraction)\n                        : 17179869184.00 GiB"
    )
    return Case(text, figures, {"backend": "cuda", "device": device, "limit_bytes": None, "is_gpu_oom": True})


cases = st.one_of(in_parentheses(), in_sentences(), of_other_back_ends())
allocator_cases = st.one_of(in_parentheses(), in_sentences())

NOISE = [
    "{'loss': 1.2345, 'grad_norm': 0.5, 'learning_rate': 1.99e-05, 'epoch': 0.12}",
    "2024-08-21 22:56:04,123 - INFO - trainer - step 12 | max_memory_allocated: 70.12 GiB | 3 out of 20 done",
    "Training:  45%|████▌     | 450/1000 [12:34<15:22,  1.68s/it]\rTraining:  46%|████▌     | 451/1000 [12:35<15:21]",
    '  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1532, in _wrapped_call_impl',
    "",
]


def check(message: OomMessage, case: Case) -> None:
    for name, (value, half) in case.figures.items():
        read = getattr(message, name)
        assert read is not None, name
        assert abs(read - value) <= half + 1, name
        low, high = message.interval(name) or (0, 0)
        assert low - 1 <= value <= high + 1
    for name, wanted in case.exact.items():
        if name == "pids":
            assert [pid for pid, _ in message.other_processes] == wanted
        else:
            assert getattr(message, name) == wanted, name


@given(cases)
def test_plain(case: Case) -> None:
    (message,) = parse_log(case.text)
    check(message, case)
    assert not message.cut_short
    assert not message.damaged


@st.composite
def buried(draw: st.DrawFn, source: st.SearchStrategy[Case]) -> tuple[Case, str]:
    """A case as some terminal, launcher or logger would show it, with other lines around it."""
    case = draw(source)
    lines = case.text.split("\n")
    wrap = draw(st.sampled_from(["none", "hard", "words", "rich"]))
    width = draw(st.integers(24, 160))
    if wrap == "hard":
        lines = [line[i : i + width] for line in lines for i in range(0, len(line), width)]
    elif wrap in ("words", "rich"):
        lines = [part for line in lines for part in textwrap.wrap(line, width)]
    if wrap == "rich":
        lines = ["│ " + line.ljust(width) + " │" for line in lines]
        lines = ["╭" + "─" * width + "╮", *lines, "╰" + "─" * width + "╯"]
    bars = draw(st.sampled_from(["", NOISE[2]])) if wrap != "rich" else ""
    prefix = draw(
        st.sampled_from(
            [
                "",
                "[rank3]: ",
                "(RayTrainWorker pid=123, ip=10.0.0.1) ",
                "[default3]:",
                "2024-08-21T22:56:04.123Z ",
                "3: ",
            ]
        )
    )
    colour = draw(st.sampled_from(["", "\x1b[31m", r"\u001b[0;31m"]))
    reset = {"": "", "\x1b[31m": "\x1b[0m", r"\u001b[0;31m": r"\u001b[0m"}[colour]
    shown = []
    for line in lines:
        shown.append(f"{prefix}{colour}{line}{reset}")
        if bars:
            shown.append(bars)
    before = draw(st.lists(st.sampled_from(NOISE), max_size=6))
    after = draw(st.lists(st.sampled_from(NOISE), max_size=6))
    return case, "\n".join([*before, *shown, *after]) + "\n"


@settings(max_examples=250, deadline=None)
@given(buried(allocator_cases))
def test_buried_in_a_log(pair: tuple[Case, str]) -> None:
    case, log = pair
    messages = parse_log(log.encode())
    assert len(messages) == 1
    check(messages[0], case)


@settings(deadline=None)
@given(st.lists(buried(allocator_cases), min_size=1, max_size=5), st.data())
def test_any_chunking_reads_the_same(pairs: list[tuple[Case, str]], data: st.DataObject) -> None:
    log = ("\n".join(NOISE) * 40 + "\n").join(text for _, text in pairs).encode()

    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(
                data.draw(st.sampled_from([1, 7, 300, 5000, 20000]) if self.tell() < 20000 else st.just(9000))
            )

    whole = read_text(log)
    assert read_log(Trickle(log)) == whole
    assert len(whole.messages) == len({m.text for m in whole.messages})


@settings(deadline=None)
@given(allocator_cases, st.data())
def test_a_cut_text_never_gives_a_wrong_figure(case: Case, data: st.DataObject) -> None:
    text = case.text[: data.draw(st.integers(1, len(case.text)))]
    for message in parse_log(text):
        for name in ("tried_bytes", "total_bytes", "free_bytes", "allocated_bytes", "reserved_bytes", "limit_bytes"):
            read = getattr(message, name)
            if read is not None:
                value, half = case.figures[name]
                assert abs(read - value) <= half + 1, name


@given(st.lists(buried(allocator_cases), min_size=2, max_size=4, unique_by=lambda p: p[0].text))
@settings(deadline=None)
def test_several_messages_come_in_order(pairs: list[tuple[Case, str]]) -> None:
    messages = parse_log("\n".join(text for _, text in pairs))
    assert [m.line for m in messages] == sorted(m.line for m in messages)
    figures = [{n: v[0] for n, v in case.figures.items()} for case, _ in pairs]
    assert len(messages) == len(figures)
    for message, (case, _) in zip(messages, pairs, strict=True):
        check(message, case)


pieces = st.sampled_from(
    [
        b"CUDA out of memory. ", b"Tried to allocate ", b"2.00 GiB", b" (GPU 0; ", b"total capacity; ", b"GPU 1 has a total",
        b" capacity of ", b"Of the allocated memory ", b"99999999999999999999999 GiB", b"\x00", b"\r", b"\n", b"\x1b[31m",
        b"out of ", b"memory", b"[rank", b"]: ", b"RESOURCE_EXHAUSTED: Out of memory", b"Killed\n", b"allocated; ",
        b"Allocation on device ", b" would exceed allowed memory", b"MPS backend out of memory (MPS allocated: 1.2.3 GB",
        b"NVML_SUCCESS == r INTERNAL ASSERT FAILED", b"exitcode: -9", b"\xff\xfe", "│".encode(), b"0 bytes is free",
        b"1,,,.5 GiB",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.binary(max_size=600), st.lists(st.one_of(pieces, st.binary(max_size=6)), max_size=40).map(b"".join))
)
def test_no_input_raises(data: bytes) -> None:
    reading = read_text(data)
    verdict = verdict_from_log(reading.messages)
    assert verdict.because
    assert verdict.confidence in ("derived", "guess")
    for message in reading.messages:
        assert message.line >= 1
        assert all(isinstance(value, int | str | bool | None) for value in message.contract().values())
