"""PyTorch's caching allocator: ``CUDA out of memory. Tried to allocate …`` of every version and device type.

All patterns match text without white space (see clean.py). Three layouts exist: figures in parentheses with
"cached" (up to 1.3), the same with "reserved in total by PyTorch" (1.4-2.0, and Ascend's NPU to this day), and
sentences ("GPU 0 has a total capacity of …", 2.1 and later, also XPU). One table of parts serves all three: the parts
are looked for one after the other, so a part that is missing, misspelt or interrupted costs that part and no more.

A message is read from the text between its first words and the next message's. If parts are missing, three repairs
are tried, and each is kept only if it makes the message fuller: leaving out lines that another writer put inside;
reading on behind a message that interrupts; taking every other line where two messages alternate. What can't be told
apart stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memtrace.oomlog.clean import TextFlow
from memtrace.oomlog.message import SIZE, MessageKind, OomMessage, Range

_I = re.IGNORECASE
_TORCH_BACKENDS = ("cuda", "hip", None)
_HEAD = re.compile(
    r"(?P<backend>CUDA|HIP|XPU|NPU|MLU|MUSA|GCU|SDAA|MACA|DCU|MPS)outofmemory[.:,;!]*"
    rf"|(?<!ofmemory)(?<!ofmemory[.:,;!])(?=Triedtoallocate{SIZE}[.(]{{1,2}}(?:GPU|NPU|XPU))",
    _I,
)
"""Where a message begins; the second form is one whose first words were cut off."""
_TRIED = re.compile(rf"(?:[A-Za-z]{{0,30}}Allocator)?Triedtoallocate(?:(?P<huge>morethan1EB)|{SIZE})", _I)
_TRIED_OPEN = re.compile(r"Triedtoallocat?e?", _I)
_PREEMPTIVE = re.compile(r"Allocationwaspreemptivelyrejected", _I)
_SENTENCES = re.compile(
    rf"(?:GPU(?P<device>\d{{1,4}}|[\x00-\x1f])?)?hasatotalcapac(?P<spelling>i?ty)of{SIZE}", _I
)  # fmt: skip
_LIST = re.compile(rf"\(?(?:GPU|NPU|XPU|MLU|MUSA|GCU|DCU)(?P<device>\d{{1,4}})?[;,:]{SIZE}(?:totalcapacity|total)", _I)
_PROCESS = re.compile(
    rf"(?:Process(?P<pid>\d{{1,12}})has|(?P<own>Includingnon-PyTorchmemory,thisprocesshas)){SIZE}memoryinuse", _I
)
Parts = tuple[tuple[str, str, int, Range | None], ...]
_ALLOWED: Parts = ((rf"{SIZE}allowed", "limit_bytes", 40, ("2.5", None)),)
# (pattern, figure, characters that may stand before it without being damage, what it says of the version)
_LIST_PARTS: Parts = (
    (rf"{SIZE}(?:alreadyallocated|allocated)", "allocated_bytes", 40, None),
    (rf"{SIZE}free", "free_bytes", 40, None),
    (rf"{SIZE}allowed", "limit_bytes", 40, None),
    (rf"{SIZE}reserved", "reserved_bytes", 40, None),
    (rf"{SIZE}cached", "reserved_unallocated_bytes", 40, None),
)
_SENTENCE_PARTS: Parts = (
    (rf"memory,?{SIZE}isallocatedbyPyTorch", "allocated_bytes", 24, None),
    (rf"with{SIZE}allocatedinprivatepools", "private_pools_bytes", 4, ("2.4", None)),
    (rf"{SIZE}isreserv(?P<whole>edbyPyTorchbutunallocated)?", "reserved_unallocated_bytes", 32, None),
)
_FREE: Parts = ((rf"ofwhich{SIZE}isfree", "free_bytes", 4, None),)
_SLACK_END = re.compile(r"reservedbyPyTorchbutunallocated", _I)
_LIST_END = re.compile(r"reservedintotal|cached\)?", _I)
_LABELS = tuple(
    re.compile(word, _I)
    for word in ("alreadyallocated", "[BS]free;", "reservedintotal", "ofwhich", "isallocatedbyPyTorch",
                 "reservedbyPyTorchbutunallocated")
)  # fmt: skip
"""Words that stand once in a message; twice means that two messages are mixed up."""
_KNOWN_EXCEPTION = re.compile(
    r"(torch\.(?:cuda\.)?OutOfMemoryError|torch\.AcceleratorError|OutOfMemoryError|RuntimeError):{0,2}$"
)
_EXCEPTION = re.compile(r"((?<![A-Za-z])[A-Z][A-Za-z]{0,40}(?:Error|Exception)):{1,2}$")
_QUOTED_TEST = re.compile(r"[\"'`]\)?(?:in|==|not)[a-z(]", _I)
_PROSE_BEFORE = re.compile(r"\b(?:except|raise|if|avoid|prevent|when|in case|isinstance|may|might|could)\b", _I)
_ERROR_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
_GAP = 500  # characters (white space not counted) that may stand between two parts of one message
_BODY = 2600  # characters a message may span at most
_MAX_SPLICED_LINES = 16

# Exceptions as they changed class; the bound between 2.4 and 2.5 is known from logs only. RuntimeError (1.12 and
# earlier) says nothing, for programs raise it again with the old text in it.
_EXCEPTIONS: dict[str, Range] = {
    "torch.cuda.OutOfMemoryError": ("1.13", "2.5"),
    "torch.OutOfMemoryError": ("2.5", None),
    "torch.AcceleratorError": ("2.8", None),
}

# Wording after the figures (white space removed), most specific first.
_TAILS: tuple[tuple[re.Pattern[str], Range], ...] = tuple(
    (re.compile(pattern, _I), versions)
    for pattern, versions in (
        (r"expandable_segmentsisenabled\.Ifinsteadtheprocess", ("2.15", None)),
        (r"exceedstheexpandable-segmentreserve", ("2.15", None)),
        (r"customallocatorbackingthisMemPool", ("2.15", None)),
        (r"PYTORCH_ALLOC_CONF=", ("2.10", "2.11")),
        (r"#optimizing-memory-usage-with-pytorch-cuda-alloc-conf", ("2.8", None)),
        (r"unallocatedmemoryislargetrysettingmax_split_size_mb", ("2.1", "2.2")),
        (r"unallocatedmemoryislargetrysettingPYTORCH_\w+_CONF=expandable", ("2.2", None)),
        (r"notes/cuda\.html#environment-variables", ("2.2", "2.11")),
        (r">>allocatedmemorytrysettingmax_split_size_mb", ("1.10", "2.1")),
    )
)

Found = tuple[re.Match[str], OomMessage]


def allocator_drafts(flow: TextFlow) -> Iterator[Found]:
    """Every message of the caching allocator in a flow, with the match of its first words."""
    low = flow.text.lower()
    if "outofmemory" not in low and "triedtoallocate" not in low:
        return
    heads = [head for head in _HEAD.finditer(flow.text) if not is_code(flow, head.start(), head.end())]
    names = [exception_before(flow, head.start()) for head in heads]
    begins = [head.start() - (len(name) + 1 if name else 0) for head, name in zip(heads, names, strict=True)]
    ends = [min(head.end() + _BODY, stop) for head, stop in zip(heads, [*begins[1:], len(flow.text)], strict=False)]
    ready: dict[int, OomMessage] = {}  # messages already read together with the one before them
    for index, (head, name) in enumerate(zip(heads, names, strict=True)):
        draft = ready.get(index)
        if draft is None:
            pieces = flow.pieces(head.end(), ends[index])
            draft = _read(head, "".join(pieces), name)
            if draft is None:
                continue
            if index + 1 < len(heads) and ends[index] == begins[index + 1] and not draft.is_whole:
                following = flow.pieces(heads[index + 1].end(), ends[index + 1])
                draft, second = _mixed(heads[index : index + 2], pieces, following, name, draft)
                if second is not None:
                    ready[index + 1] = second
            if not draft.is_whole and not draft.notes:
                draft = _without_intruders(head, pieces, name, draft)
        if draft.figures or draft.cut_short or draft.notes or _counts(flow, head, name):
            yield head, draft


def exception_before(flow: TextFlow, place: int) -> str | None:
    """Name of the exception printed directly before ``place``, if any.

    White space is gone, so an unfamiliar name is looked for on the line alone.
    """
    found = _KNOWN_EXCEPTION.search(flow.text[max(0, place - 80) : place])
    found = found or _EXCEPTION.search(flow.text[max(flow.line_start(place), place - 80) : place])
    return found[1] if found else None


def is_code(flow: TextFlow, start: int, end: int) -> bool:
    """Whether the words stand in a line of source code that tests for them."""
    return flow.text[max(0, start - 1) : start] in ('"', "'", "`") and bool(_QUOTED_TEST.match(flow.text, end))


def _read(head: re.Match[str], body: str, exception: str | None) -> OomMessage | None:
    """Read what follows ``head``; ``body`` is the text up to the next message. None if this is not a message.

    A head without any of the layout's parts ("CUDA out of memory" in a sentence) gives a draft without figures;
    whether that counts is for the caller, who knows the line it stands on.
    """
    backend = head["backend"]
    draft = OomMessage(MessageKind.ALLOCATOR, backend=backend.lower() if backend else None, exception=exception)
    if exception in _EXCEPTIONS and draft.backend in _TORCH_BACKENDS:
        draft.implies(_EXCEPTIONS[exception])
    if _PREEMPTIVE.match(body):
        return _read_preemptive(draft, body)
    tried = _TRIED.match(body)
    if tried is None:
        if found := _TRIED_OPEN.match(body):
            if body[found.end() : found.end() + 1] in ('"', "'", "{", "%", "<", "\\"):
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
    sentences = _SENTENCES.search(body, 0, _GAP)
    listed = _LIST.search(body, 0, _GAP)
    if listed and (sentences is None or listed.start() < sentences.start()):
        place = _read_list(draft, body, listed)
    elif sentences:
        place = _read_sentences(draft, body, sentences)
    else:
        draft.cut_short = True
        if re.match(r"\.GPU(?!ha[ds])", body, re.IGNORECASE):
            draft.implies(("2.1", None))
            draft.note("the text ends at the device number: PyTorch 2.3 writes it as a raw byte, and GPU 0 ends it")
        return draft
    draft.consumed += place
    if draft.backend in _TORCH_BACKENDS:  # Ascend's and others' forks keep old wording
        for pattern, versions in _TAILS:
            if pattern.search(body[place : place + 900]):
                draft.implies(versions)
    return draft


def _read_preemptive(draft: OomMessage, body: str) -> OomMessage:
    draft.implies(("2.12", None))
    draft.what = "PyTorch rejected the request because it would exceed the per-process memory fraction"
    draft.note("rejected before asking the driver: set_per_process_memory_fraction is in force")
    for name, label in (
        ("tried_bytes", "Requestedsize"),
        ("limit_bytes", "(?:limit|allowed|allowedmemory)(?:is)?"),
        ("allocated_bytes", "allocated(?:memory)?"),
        ("reserved_bytes", "reserved(?:memory)?"),
        ("total_bytes", "(?:total(?:capacity|memory)?|capacity)"),
        ("free_bytes", "free(?:memory)?"),
    ):
        found = re.compile(rf"{label}[:=](\d[\d,.]*)(bytes?|[KMGT]i?B)?", _I).search(body, 0, _GAP)
        if found:
            draft.put(name, found[1].rstrip(".,"), found[2] or "bytes")
    draft.cut_short = "tried_bytes" not in draft.figures
    return draft


def _parts(draft: OomMessage, body: str, place: int, parts: Parts) -> int:
    """Find the parts in order, noticing when something stood between them; where the last one ended."""
    for pattern, name, slack, versions in parts:
        found = re.compile(pattern, _I).search(body, place, place + _GAP)
        if found is None:
            continue
        draft.damaged |= found.start() > place + slack
        draft.put(name, found[1], found[2])
        if versions is not None:
            draft.implies(versions)
        place = found.end()
    return place


def _read_list(draft: OomMessage, body: str, first: re.Match[str]) -> int:
    draft.put_device(first["device"])
    draft.put("total_bytes", first[2], first[3])
    if draft.backend is None:
        name = first[0].lstrip("(")[:3].lower()
        draft.backend = "cuda" if name == "gpu" else name
    place = _parts(draft, body, first.end(), _LIST_PARTS)
    if "reserved_unallocated_bytes" in draft.figures:
        draft.implies((None, "1.4"))
    elif draft.backend in _TORCH_BACKENDS:
        draft.implies(("1.4" if "reserved_bytes" in draft.figures else None, "2.1"))
    if not _LIST_END.search(body, first.end(), place + _GAP):
        draft.cut_short = True
    elif not {"reserved_bytes", "reserved_unallocated_bytes"} & draft.figures:
        draft.damaged = True
    return place


def _read_sentences(draft: OomMessage, body: str, first: re.Match[str]) -> int:
    draft.put_device(first["device"])
    if draft.notes:
        draft.implies(("2.3", "2.4"))
    draft.put("total_bytes", first[3], first[4])
    if draft.backend in _TORCH_BACKENDS:
        draft.implies(("2.1", "2.2") if first["spelling"].lower() == "ty" else ("2.2", None))
    place = _parts(draft, body, first.end(), _FREE)
    while process := _PROCESS.search(body, place, place + _GAP):
        draft.damaged |= process.start() > place + 4
        place = process.end()
        _put_process(draft, process)
    if re.compile(_ALLOWED[0][0], _I).search(body, place, place + 40):
        place = _parts(draft, body, place, _ALLOWED)
    place = _parts(draft, body, place, _SENTENCE_PARTS)
    if not _SLACK_END.search(body, max(0, place - 40), place + _GAP):
        draft.cut_short = True
    elif "reserved_unallocated_bytes" not in draft.figures:
        draft.damaged = True
    return place


def _put_process(draft: OomMessage, process: re.Match[str]) -> None:
    figure, unit = process[3], process[4]
    if process["own"]:
        if figure.strip("0.") == "":
            draft.note("this process's memory printed as 0 bytes: the driver can't see into the container")
        else:
            draft.put("process_bytes", figure, unit)
        return
    probe = OomMessage(draft.kind)
    probe.put("process_bytes", figure, unit)
    amount = probe.process_bytes or None
    draft.other_processes += ((int(process["pid"]), amount),)
    if amount is None:
        draft.note("the memory of a process is printed as unknown (a container hides it)")


def _mixed(
    heads: list[re.Match[str]], pieces: list[str], following: list[str], exception: str | None, draft: OomMessage
) -> tuple[OomMessage, OomMessage | None]:
    """Two messages, the first cut by the second: (first, second if it had to be read specially)."""
    body, rest = "".join(pieces), "".join(following)
    doubled = any(len(label.findall(rest)) > 1 for label in _LABELS)
    if not doubled and not (draft.has_figures and any(label.search(rest) for label in _LABELS)):
        return draft, None
    second = _read(heads[1], rest, None)
    if second is not None and second.is_whole:
        first = _read(heads[0], body + rest[second.consumed :], exception)
        if first is not None and first.has_figures and not first.cut_short and len(first.figures) > len(draft.figures):
            first.damaged = True
            first.note("another message stands in the middle of this one")
            return first, second
    if not doubled:
        return draft, None
    first = _read(heads[0], body + "".join(following[1::2]), exception)
    second = _read(heads[1], "".join(following[0::2]), None)
    if first is not None and second is not None and first.is_whole and second.is_whole:
        for one in (first, second):
            one.note("two messages alternate line by line here; they were taken apart by that")
        return first, second
    second = _read(heads[1], following[0], None)
    for mixed in (draft, second):
        if mixed is not None:
            mixed.note("two messages are mixed up here: figures after the first line can't be told apart")
    return draft, second


def _without_intruders(head: re.Match[str], pieces: list[str], exception: str | None, draft: OomMessage) -> OomMessage:
    """Read again with a line or three left out, in case another writer's lines stand inside the message."""
    best = draft
    count = min(len(pieces), _MAX_SPLICED_LINES)
    for first in range(1, count):
        for last in range(first + 1, min(first + 4, count)):
            other = _read(head, "".join(pieces[:first] + pieces[last:]), exception)
            if other is not None and len(other.figures) > len(best.figures):
                best = other
                best.damaged = True
    return best


def _counts(flow: TextFlow, head: re.Match[str], exception: str | None) -> bool:
    """Whether "CUDA out of memory" without any figure is a message rather than talk about one."""
    line = flow.line_at(head.start())
    words = re.search(rf"{head['backend']}\s+out\s+of\s+memory", line.text, _I) if head["backend"] else None
    before = line.text[: words.start()] if words else line.text
    after = line.text[words.end() :] if words else ""
    if _PROSE_BEFORE.search(before):
        return False
    if exception is not None:
        return True
    if before.strip(" -:|*#>\"'"):
        return False
    return not after.strip(" .!:;\"'") or bool(_ERROR_LEVEL.search(line.prefix))
