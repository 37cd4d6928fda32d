"""Damage for snapshots (their structure, their pickle opcodes, their bytes) and for logs. Seeded: failures repeat."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
import pickle
import pickletools
import random
from functools import lru_cache
from typing import Any

FRAME = {"filename": "/home/me/train.py", "line": 12, "name": "step"}
BASE, MIB = 0x7F0000000000, 1 << 20
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot", "annotate", "defragment",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63 - 1, 2**63, 2**64, 10**60, 1.5, float("nan"), "", "x" * 300, "\ud800", "alloc", [],
    {}, [[]], (1, 2), ((1, 2), 3), b"bytes", BASE, MIB, "inactive", 2**60, -(2**62),
)  # fmt: skip
HOSTILE = (
    b"r\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x85" * 50,
    b"2\x86" * 40, b"(" * 40, b"\x95" + b"\xff" * 8, b"\x95\x05" + bytes(7), b"\x8f(K\x01\x90", b"cos\nsystem\n",
    b"0", b"1",
)  # fmt: skip
_OPCODES = [
    (opcode.code.encode("latin-1"), opcode.arg.n if opcode.arg is not None else 0) for opcode in pickletools.opcodes
]
_LENGTH_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4U: 4}  # of those with a length
_MESSAGES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU {} has a total capacity of 23.65 GiB of "
    "which {} MiB is free. Process {} has {} GiB memory in use. Of the allocated memory {} GiB is allocated by "
    "PyTorch, and {} MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    "RuntimeError: CUDA out of memory. Tried to allocate {}.00 MiB (GPU {}; {}.78 GiB total capacity; {}.00 GiB "
    "already allocated; {}.19 MiB free; {}.50 GiB reserved in total by PyTorch)",
    "RuntimeError: MPS backend out of memory (MPS allocated: {} GB, other allocations: {} MB, max allowed: {} GB).",
    "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other call",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {} bytes.",
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId={}.0. Some of your processes may have been killed.",
    'Traceback (most recent call last):\n  File "/home/me/train.py", line {}, in step\n    loss.backward()',
    "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:{},garbage_collection_threshold:0.{}",
    "step {}/{} loss 0.{}",
)
_AROUND = ("", "[rank{}]: ", "\x1b[31m", "E   ", "2026-11-30 12:00:{} | ", "{}: ", "node-{}:\t", "\r 1%|█| ")


def sound(rng: random.Random) -> dict[str, Any]:
    """A sound snapshot of a few dozen to a few hundred events, with the sharing of objects that PyTorch's have."""
    frames = [dict(FRAME, line=line) for line in range(6)]
    pools = rng.random() < 0.3
    trace: list[dict[str, Any]] = []
    live: list[tuple[int, int]] = []
    at = 0
    for number in range(rng.choices((8, 24, 60, 400), (3, 3, 3, 1))[0]):
        stack = [frames[(number + i) % 6] for i in range(number % 5)]
        if live and rng.random() < 0.45:
            addr, size = live.pop(rng.randrange(len(live)))
            actions: tuple[str, ...] = ("free_requested", "free_completed")
        else:
            size = rng.choice((100, 512, 4096, 70_000, MIB, 3 * MIB))
            addr, actions = BASE + at * MIB, ("alloc",)
            at += 1 + size // MIB
            live.append((addr, size))
        for action in actions:
            made: dict[str, Any] = {
                "action": action, "addr": addr, "size": size, "stream": rng.choice((0, 0, 7, 1 << 40)),
                "time_us": 10**15 + 7 * number, "compile_context": "".join(("N/", "A")),
                "user_metadata": rng.choice(("", "layer.1", "a longer label")),
            }  # fmt: skip
            if pools:
                made["pool_id"] = (0, number % 2)
            made["frames"] = stack
            trace.append(made)
    blocks = [
        {
            "address": BASE + i * MIB,
            "size": MIB,
            "requested_size": MIB - i,
            "state": "active_allocated",
            "frames": stack,
        }
        for i in range(at)
    ]  # fmt: skip
    segment = {
        "device": 0, "address": BASE, "total_size": at * MIB, "allocated_size": at * MIB, "active_size": at * MIB,
        "requested_size": at * MIB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


@lru_cache(maxsize=8)
def _sound_pickle(number: int) -> bytes:
    return pickle.dumps(sound(random.Random(f"sound {number}")), 5)


def _sound_of(seed: int) -> Any:
    """A sound snapshot to damage: neighbouring seeds have the same one, for making it takes longer than damaging it."""
    return pickle.loads(_sound_pickle(seed // 32))


def _place(raw: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """A container and one of its keys, found by going down from the top; None if there is nothing to change."""
    place, value = None, raw
    for _ in range(12):  # a container may hold itself
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        if not keys or (place and rng.random() < 0.2):
            break
        place = (value, rng.choice(keys))
        value = value[place[1]]
    return place


def structure(raw: dict[str, Any], rng: random.Random) -> None:
    """One change of the containers, in place."""
    found = _place(raw, rng)
    if found is None:
        return
    parent, key = found
    how = rng.randrange(7)
    if how == 0:
        del parent[key]
    elif how in (1, 2):
        parent[key] = copy.deepcopy(rng.choice(ODD))
    elif how == 3:  # share with another place, or hold itself
        other, place = _place(raw, rng) or found
        parent[key] = other[place]
    elif how == 4:
        traces = raw.get("device_traces")
        if isinstance(traces, list) and traces and isinstance(traces[0], list):
            rng.shuffle(traces[0])
    elif how == 5 and isinstance(parent, dict):
        parent[rng.choice(("frames", "colour", "addr", "pool_id", "forward_frames", "device_free"))] = rng.choice(ODD)
    elif how == 6:
        traces = raw.get("device_traces")
        if isinstance(traces, list) and traces and isinstance(traces[0], list):
            event = {"action": rng.choice(ACTIONS), "addr": BASE, "size": MIB, "stream": 0, "frames": []}
            traces[0].insert(rng.randint(0, len(traces[0])), event)


def content(data: bytearray, rng: random.Random) -> bytearray:
    """One change of the bytes."""
    how, at = rng.randrange(6), rng.randrange(max(1, len(data)))
    if how == 0:
        return data[:at]
    if how == 1:
        for _ in range(rng.choice((1, 1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == 2:
        data[at:at] = rng.randbytes(rng.choice((1, 4, 9)))
    elif how == 3:
        data[at:at] = rng.choice((rng.choice(HOSTILE), _opcode(rng)))
    elif how == 4:
        length = rng.randrange(1, 200)
        data[at:at] = data[at : at + length] * rng.choice((1, 3))
    else:
        other, length = rng.randrange(len(data)), rng.randrange(1, 100)
        data[at : at + length] = data[other : other + length]
    return data


def _opcode(rng: random.Random) -> bytes:
    """Any opcode of CPython's tables, with an operand of the right form."""
    code, size = rng.choice(_OPCODES)
    if size >= 0:
        return code + rng.choice((bytes(size), rng.randbytes(size)))
    if size == pickletools.UP_TO_NEWLINE:
        return code + rng.choice((b"1\n", b"0x\n", b"-0L\n", b"'a'\n", b"nan\n", b"9" * 5000 + b"\n"))
    length = rng.choice((0, 1, 3))
    return code + length.to_bytes(_LENGTH_BYTES.get(size, 8), "little") + rng.randbytes(length)


def log(seed: int) -> bytes:
    """A damaged log of a seed: messages with odd figures, prefixes, colours, cut and joined lines, any encoding."""
    rng = random.Random(f"log {seed}")
    lines = []
    for _ in range(rng.choices((1, 3, 12, 40), (4, 4, 2, 1))[0]):
        text = rng.choice(_AROUND) + rng.choice(_MESSAGES)
        figures = [rng.choice((0, 1, 7, 512, 23.65, -1, "1,024", "9" * 30, "", 10**40, "nan")) for _ in range(9)]
        lines.append(text.format(*figures))
    if rng.random() < 0.3:
        width = rng.choice((20, 80))
        lines = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    if rng.random() < 0.1:
        lines *= rng.choice((3, 20))
    text = rng.choice(("\n", "\n", "\r\n", "\r", " ", "\x00")).join(lines)
    data = text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-16-be", "utf-32")))
    for _ in range(rng.choice((0, 1, 3))):
        if data:
            data = bytes(content(bytearray(data), rng))
    return data


def packed(seed: int) -> bytes:
    """A damaged snapshot of a seed as JSON, or in a container, whose bytes are damaged as well."""
    rng = random.Random(f"packed {seed}")
    raw = _sound_of(seed)
    for _ in range(rng.randint(0, 3)):
        structure(raw, rng)
    try:
        data = (
            json.dumps(raw, default=str, skipkeys=True).encode("utf-8", "surrogatepass")
            if rng.random() < 0.5
            else pickle.dumps(raw, 4)
        )
    except (RecursionError, ValueError):
        return b""
    if rng.random() < 0.6:
        data = rng.choice((_gzip, _xz, _zstandard))(data)
    for _ in range(rng.choice((0, 1, 1, 2))):
        if data:
            data = bytes(content(bytearray(data), rng))
    return data


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def _xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


def _zstandard(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def damaged(seed: int) -> bytes:
    """The damaged snapshot of a seed."""
    rng = random.Random(seed)
    raw = _sound_of(seed)
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 4)):
            structure(raw, rng)
    try:
        data = bytearray(pickle.dumps(raw, rng.choice((2, 4, 4, 4, 5))))
    except RecursionError:
        return b""
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        if data:
            data = content(data, rng)
    return bytes(data)
