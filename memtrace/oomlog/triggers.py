"""Where in a log an out-of-memory text may stand: a search for fixed words at C speed.

A training log of hundreds of megabytes holds a handful of messages, so everything costly runs only near a trigger.
The words are chosen so that a line break or a colour code anywhere inside a message leaves at least one of them
whole: "out of memory" broken in two still shows "out of" or "f memory".

Every pattern begins with a literal, which Python's matcher looks for with its fast search (about 1 GB/s); what makes
the literal meaningful, before it or after it, is checked only where it occurs. One pass over the text a pattern.
"""

from __future__ import annotations

import re

_TRIGGERS: tuple[re.Pattern[bytes], ...] = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # out of memory, out of device memory, out of resource; broken over lines or boxed
        rb"out of(?=[^\n\r]{0,24}(?:mem|resource)|[^a-z]{1,120}m|[^a-z0-9]{0,160}[\n\r]|[\\\x1b])",
        rb"mem(?:(?<=f mem)|(?<=outofmem)|(?<=f_mem)|(?<=ice_mem)|(?<=low on mem)|(?<=enough mem)|(?<=cache mem)"
        rb"|(?<=status_mem)|oryerror|oryallocation|ory_utiliz"
        rb"|ory (?:summary, dev|for the cache|utiliz|segment|object|\(shm))",
        # to allocate, unable to allocate, allocation on device, ALLOC_FAILED, bad_alloc, CUDACachingAllocator.cpp
        rb"alloc(?:at(?:e(?![drs])|ing|ion (?:on d|fail|was p)|or\.cpp)|_?failed| async|\W)",
        rb"total capac",
        rb"oom(?:(?<=with oom)|[-_ ]?kill|_reaper)",
        rb"kill(?:(?<=sigkill)|ed(?=\s|$|\W))",
        rb"exit ?(?:code|status)\W{0,12}(?:-9|137)\b",
        rb"_not_initialized",
        rb"valid cudnn algo",
        rb"resource(?:(?<=of_resource)|(?<=ofresource))",
        rb"nvml_success",
        rb"invalid buffer size",
        rb"paging file is too small",
    )
)

MARGIN = 160
"""Bytes past a hit that deciding about it may need."""


def find_triggers(block: bytes, start: int, end: int, *, at_end: bool) -> list[int]:
    """Positions in ``block[start:end]`` at which a message may be, ascending.

    ``end`` should leave MARGIN bytes of the block after it unless ``at_end`` says that there is no more text.
    """
    low = block.lower()
    reach = len(low) if at_end else min(len(low), end + MARGIN)
    found: list[int] = []
    for trigger in _TRIGGERS:
        for match in trigger.finditer(low, start, reach):
            at = match.start()
            if at >= end:
                break
            found.append(at)
    found.sort()
    return found


_WHITE_SPACE = bytes(range(9, 14)) + b" "


def _behind(stem: str, *befores: str, after: str = "") -> bytes:
    """Pattern of ``stem`` with one of ``befores`` in front of it, or followed by ``after``."""
    looks = [f"(?<={re.escape(before + stem)})" for before in befores] + ([after] if after else [])
    return f"{stem}(?:{'|'.join(looks)})".encode()


_PLAIN = tuple(
    re.compile(pattern)
    for pattern in (
        _behind("outofmemory", "cuda", "hip", "xpu", "npu", "mlu", "musa", "backend", "error:", "'", "(2):", "=2:",
                "]:", "failed:", "failure", "exhausted:", "heap", after="error|atline|:kill"),
        _behind("allocate", "triedto", "unableto", "failedto", "cannot"),
        _behind("alloc", "bad_", "cudac", after="_failed|ationondevice|ationfailedforsize|atingtensor"),
        rb"out_of_(?:mem|device)",
        rb"memory(?:error(?<!outofmemoryerror)|allocation|summary,dev|forthecache)|notenoughmemory:",
        rb"totalcapac",
        rb"alreadyallocated",
        rb"bypytorch",
        rb"nvml_success==",
        rb"withoomondevice",
        rb"outofresource:",
        rb"killedprocess",
        rb"exitcode:-9",
        rb"_not_initialized",
    )
)  # fmt: skip


def is_plain(data: bytes) -> bool:
    """Whether a stretch holds the words of a message unbroken but for white space.

    For logs in which ordinary lines keep looking like broken messages: there, only such stretches are read.
    """
    joined = data.lower().translate(None, _WHITE_SPACE)
    return any(words.search(joined) for words in _PLAIN)
