"""PyTorch's caching allocator: ``CUDA out of memory. Tried to allocate …`` of every version and device type.

All patterns match text without white space (see clean.py). Three layouts exist: figures in parentheses with
"cached" (up to 1.3), the same with "reserved in total by PyTorch" (1.4-2.0, and Ascend's NPU to this day), and
sentences ("GPU 0 has a total capacity of …", 2.1 and later, also XPU). The parts are looked for one after the other,
so a part that is missing, misspelt or interrupted costs that part and no more.
"""

from __future__ import annotations

import re

from .draft import Draft
from .message import Kind
from .sizes import SIZE
from .versions import EXCEPTIONS, TAILS

_I = re.IGNORECASE
_BACKENDS = "CUDA|HIP|XPU|NPU|MLU|MUSA|GCU|SDAA|MACA|DCU|MPS"
_TORCH_BACKENDS = ("cuda", "hip", None)
HEAD = re.compile(
    rf"(?P<backend>{_BACKENDS})outofmemory[.:,;!]*"
    rf"|(?<!ofmemory)(?<!ofmemory[.:,;!])(?=Triedtoallocate{SIZE}[.(]{{1,2}}(?:GPU|NPU|XPU))",
    _I,
)
"""Where a message begins; the second form is one whose first words were cut off."""
_TRIED = re.compile(rf"(?:[A-Za-z]{{0,30}}Allocator)?Triedtoallocate(?:(?P<huge>morethan1EB)|{SIZE})", _I)
_TRIED_OPEN = re.compile(r"Triedtoallocat?e?", _I)
_PREEMPTIVE = re.compile(r"Allocationwaspreemptivelyrejected", _I)
_REQUESTED = re.compile(rf"Requestedsize:{SIZE}", _I)
_REQUESTED_RAW = re.compile(r"Requestedsize:(\d+)", _I)
_ALLOWED = re.compile(rf"{SIZE}allowed", _I)

_SENTENCES = re.compile(
    rf"(?:GPU(?P<device>\d{{1,4}}|[\x00-\x1f]|\\x[0-9a-f]{{2}}|\\u00[0-9a-f]{{2}})?)?"
    rf"hasatotalcapac(?P<spelling>i?ty)of(?:{SIZE})",
    _I,
)
_FREE_SENTENCE = re.compile(rf"ofwhich{SIZE}isfree", _I)
_PROCESS = re.compile(
    rf"(?:Process(?P<pid>\d{{1,12}})has|(?P<own>Includingnon-PyTorchmemory,thisprocesshas)){SIZE}memoryinuse", _I
)
_ALLOCATED_SENTENCE = re.compile(rf"memory,?{SIZE}isallocatedbyPyTorch", _I)
_POOLS = re.compile(rf"with{SIZE}allocatedinprivatepools", _I)
_SLACK = re.compile(rf"{SIZE}isreservedbyPyTorchbutunallocated", _I)
_SLACK_END = re.compile(r"reservedbyPyTorchbutunallocated", _I)

_LIST = re.compile(rf"\(?(?:GPU|NPU|XPU|MLU|MUSA|GCU|DCU)(?P<device>\d{{1,4}})?[;,:]{SIZE}(?:totalcapacity|total)", _I)
_LIST_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("allocated_bytes", re.compile(rf"{SIZE}(?:alreadyallocated|allocated)", _I)),
    ("free_bytes", re.compile(rf"{SIZE}free", _I)),
    ("limit_bytes", _ALLOWED),
    ("reserved_bytes", re.compile(rf"{SIZE}reserved", _I)),
    ("reserved_unallocated_bytes", re.compile(rf"{SIZE}cached", _I)),
)
_LIST_END = re.compile(r"reservedintotal|cached\)?", _I)

_KNOWN_EXCEPTION = re.compile(
    r"(torch\.cuda\.OutOfMemoryError|torch\.OutOfMemoryError|torch\.AcceleratorError|OutOfMemoryError|RuntimeError):{0,2}$"
)
_EXCEPTION = re.compile(r"((?<![A-Za-z])[A-Z][A-Za-z]{0,40}(?:Error|Exception)):{1,2}$")

LABELS = (
    re.compile(r"alreadyallocated", _I),
    re.compile(r"[BS]free;", _I),
    re.compile(r"reservedintotal", _I),
    re.compile(r"ofwhich", _I),
    re.compile(r"isallocatedbyPyTorch", _I),
    re.compile(r"reservedbyPyTorchbutunallocated", _I),
)
"""Words that stand once in a message; twice means that two messages are mixed up."""

GAP = 500
"""Characters (white space not counted) that may stand between two parts of one message."""
BODY = 2600
"""Characters a message may span at most."""


def exception_before(text: str, place: int, line_start: int = 0) -> str | None:
    """Name of the exception printed directly before ``place``, if any.

    White space is gone, so an unfamiliar name is looked for on the line alone, which begins at ``line_start``.
    """
    found = _KNOWN_EXCEPTION.search(text[max(0, place - 80) : place])
    found = found or _EXCEPTION.search(text[max(line_start, place - 80) : place])
    return found[1] if found else None


def read_allocator(head: re.Match[str], body: str, exception: str | None) -> Draft | None:
    """Read what follows ``head``; ``body`` is the text up to the next message. None if this is no message.

    A head without any of the layout's parts ("CUDA out of memory" in a sentence) gives a draft without figures;
    whether that counts is for the caller, who knows the line it stands on.
    """
    backend = head["backend"]
    draft = Draft(Kind.ALLOCATOR, backend=backend.lower() if backend else None, exception=exception)
    if exception in EXCEPTIONS and draft.backend in _TORCH_BACKENDS:
        draft.implies(EXCEPTIONS[exception])
    if _PREEMPTIVE.match(body):
        return _read_preemptive(draft, body)
    tried = _TRIED.match(body)
    if tried is None:
        if _TRIED_OPEN.match(body):
            rest = _TRIED_OPEN.sub("", body, count=1)
            if rest[:1] in ('"', "'", "{", "%", "<", "\\"):
                return None  # the source code of such a message
            draft.cut_short = True
        draft.what = "PyTorch's allocator reported an out-of-memory error without figures"
        return draft
    if tried["huge"]:
        draft.what = "a tensor of more than 1 EB was asked for"
        draft.note("a request of more than 1 EB is an overflowed or negative size, never a real need")
        return draft
    draft.put("tried_bytes", tried[2], tried[3])
    draft.consumed = tried.end()
    draft.what = "PyTorch's caching allocator could not get memory from the driver"
    body = body[tried.end() :]
    sentences = _SENTENCES.search(body, 0, GAP)
    listed = _LIST.search(body, 0, GAP)
    if listed and (sentences is None or listed.start() < sentences.start()):
        _read_list(draft, body, listed)
    elif sentences:
        _read_sentences(draft, body, sentences)
    else:
        draft.cut_short = True
        if body[:4].upper() == ".GPU":
            draft.implies(("2.1", None))
            draft.note("the text ends at the device number: PyTorch 2.3 writes it as a raw byte, and GPU 0 ends it")
    return draft


def _read_preemptive(draft: Draft, body: str) -> Draft:
    draft.implies(("2.12", None))
    draft.what = "PyTorch rejected the request because it would exceed the per-process memory fraction"
    draft.note("rejected before asking the driver: set_per_process_memory_fraction is in force")
    size = _REQUESTED.search(body, 0, GAP)
    raw = _REQUESTED_RAW.search(body, 0, GAP)
    if size:
        draft.put("tried_bytes", size[1], size[2])
    elif raw:
        draft.put("tried_bytes", raw[1])
    else:
        draft.cut_short = True
    for name, pattern in (
        ("limit_bytes", r"(?:limit|allowed|allowedmemory)(?:is)?[:=]"),
        ("allocated_bytes", r"allocated(?:memory)?[:=]"),
        ("reserved_bytes", r"reserved(?:memory)?[:=]"),
        ("total_bytes", r"(?:total(?:capacity|memory)?|capacity)[:=]"),
        ("free_bytes", r"free(?:memory)?[:=]"),
    ):
        found = re.compile(rf"{pattern}{SIZE}", _I).search(body, 0, GAP)
        if found:
            draft.put(name, found[1], found[2])
    return draft


class _Reader:
    """Finds the parts in order and notices when something stood between them."""

    def __init__(self, draft: Draft, body: str, place: int) -> None:
        self.draft, self.body, self.place = draft, body, place

    def find(self, pattern: re.Pattern[str], slack: int = 4) -> re.Match[str] | None:
        found = pattern.search(self.body, self.place, self.place + GAP)
        if found:
            if found.start() > self.place + slack:
                self.draft.damaged = True
            self.place = found.end()
        return found


def _read_list(draft: Draft, body: str, first: re.Match[str]) -> None:
    draft.device = int(first["device"]) if first["device"] else None
    draft.put("total_bytes", first[2], first[3])
    if draft.backend is None:
        draft.backend = {"G": "cuda"}.get(first[0].lstrip("(")[:1].upper(), first[0].lstrip("(")[:3].lower())
    reader = _Reader(draft, body, first.end())
    for name, pattern in _LIST_PARTS:
        found = reader.find(pattern, slack=40)
        if found:
            draft.put(name, found[1], found[2])
    if "reserved_unallocated_bytes" in draft.figures:
        draft.implies((None, "1.4"))
    elif draft.backend in _TORCH_BACKENDS:
        draft.implies(("1.4" if "reserved_bytes" in draft.figures else None, "2.1"))
    if not _LIST_END.search(body, first.end(), reader.place + GAP):
        draft.cut_short = True
    elif not {"reserved_bytes", "reserved_unallocated_bytes"} & draft.figures.keys():
        draft.damaged = True
    draft.consumed += reader.place
    _read_tail(draft, body, reader.place)


def _read_sentences(draft: Draft, body: str, first: re.Match[str]) -> None:
    draft.device = _device(draft, first)
    draft.put("total_bytes", first[3], first[4])
    if draft.backend in _TORCH_BACKENDS:
        draft.implies(("2.1", "2.2") if first["spelling"].lower() == "ty" else ("2.2", None))
    reader = _Reader(draft, body, first.end())
    free = reader.find(_FREE_SENTENCE)
    if free:
        draft.put("free_bytes", free[1], free[2])
    while process := _PROCESS.search(body, reader.place, reader.place + GAP):
        if process.start() > reader.place + 4:
            draft.damaged = True
        reader.place = process.end()
        _put_process(draft, process)
    allowed = _ALLOWED.search(body, reader.place, reader.place + 40)
    if allowed:
        draft.put("limit_bytes", allowed[1], allowed[2])
        draft.implies(("2.5", None))
        reader.place = allowed.end()
    allocated = reader.find(_ALLOCATED_SENTENCE, slack=24)
    if allocated:
        draft.put("allocated_bytes", allocated[1], allocated[2])
    pools = reader.find(_POOLS)
    if pools:
        draft.put("private_pools_bytes", pools[1], pools[2])
        draft.implies(("2.4", None))
    slack = reader.find(_SLACK, slack=32)
    if slack:
        draft.put("reserved_unallocated_bytes", slack[1], slack[2])
    elif _SLACK_END.search(body, reader.place, reader.place + GAP):
        draft.damaged = True
    else:
        partial = re.compile(rf"{SIZE}isreserv", _I).search(body, reader.place, reader.place + 40)
        if partial:
            draft.put("reserved_unallocated_bytes", partial[1], partial[2])
        draft.cut_short = True
    draft.consumed += reader.place
    _read_tail(draft, body, reader.place)


def _device(draft: Draft, found: re.Match[str]) -> int | None:
    written = found["device"]
    if written is None:
        return None
    if written.isdigit():
        return int(written)
    draft.implies(("2.3", "2.4"))
    draft.note("the device number is a raw byte (PyTorch 2.3)")
    return ord(written) if len(written) == 1 else int(written[2:], 16)


def _put_process(draft: Draft, process: re.Match[str]) -> None:
    figure, unit = process[3], process[4]
    if process["own"]:
        if figure.strip("0.") == "":
            draft.note("this process's memory printed as 0 bytes: the driver can't see into the container")
        else:
            draft.put("process_bytes", figure, unit)
        return
    probe = Draft(draft.kind)
    probe.put("process_bytes", figure, unit)
    amount = probe.figures.get("process_bytes") or None
    draft.processes.append((int(process["pid"]), amount))
    if amount is None:
        draft.note("the memory of a process is printed as unknown (a container hides it)")


def _read_tail(draft: Draft, body: str, place: int) -> None:
    if draft.backend not in _TORCH_BACKENDS:
        return  # Ascend's and others' forks keep old wording
    tail = body[place : place + 900]
    for pattern, versions in TAILS:
        if pattern.search(tail):
            draft.implies(versions)
