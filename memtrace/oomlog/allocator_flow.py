"""The allocator's messages in the lines of one process, also where two of them or other lines are mixed up.

A message is read from the text between its first words and the next message's. If parts are missing, three repairs
are tried, and each is kept only if it makes the message fuller: leaving out lines that another writer put inside;
reading on behind a message that interrupts; taking every other line where two messages alternate. What can't be told
apart stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .allocator_text import BODY, HEAD, LABELS, exception_before, read_allocator
from .clean import Flow
from .draft import Draft

_QUOTED_TEST = re.compile(r"[\"'`]\)?(?:in|==|not)[a-z(]", re.IGNORECASE)
_PROSE_BEFORE = re.compile(
    r"\b(?:except|raise|if|avoid|prevent|when|in case|isinstance|may|might|could)\b", re.IGNORECASE
)
_ERROR_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
_MAX_SPLICED_LINES = 16

Found = tuple[re.Match[str], Draft]


def allocator_drafts(flow: Flow) -> Iterator[Found]:
    """Every message of the caching allocator in a flow, with the match of its first words."""
    heads = [head for head in HEAD.finditer(flow.text) if not is_code(flow, head.start(), head.end())]
    begins = [_begin(flow, head) for head in heads]
    ends = [min(head.end() + BODY, stop) for head, stop in zip(heads, [*begins[1:], len(flow.text)], strict=False)]
    ready: dict[int, Draft] = {}  # messages already read together with the one before them
    for index, head in enumerate(heads):
        exception = exception_before(flow.text, head.start(), flow.line_start(head.start()))
        draft = ready.get(index)
        if draft is None:
            pieces = flow.pieces(head.end(), ends[index])
            plain = read_allocator(head, "".join(pieces), exception)
            if plain is None:
                continue
            draft = plain
            if index + 1 < len(heads) and ends[index] == begins[index + 1] and not _is_whole(draft):
                following = flow.pieces(heads[index + 1].end(), ends[index + 1])
                draft, second = _mixed(heads[index : index + 2], pieces, following, exception, draft)
                if second is not None:
                    ready[index + 1] = second
            if not _is_whole(draft) and not draft.notes:
                draft = _without_intruders(head, pieces, exception, draft)
        if draft.figures or draft.cut_short or draft.notes or _counts(flow, head, exception):
            yield head, draft


def _begin(flow: Flow, head: re.Match[str]) -> int:
    """Where a message begins, its exception's name included."""
    exception = exception_before(flow.text, head.start(), flow.line_start(head.start()))
    return head.start() - (len(exception) + 1 if exception else 0)


def _is_whole(draft: Draft) -> bool:
    return draft.has_layout and not draft.cut_short and not draft.damaged


def _mixed(
    heads: list[re.Match[str]], pieces: list[str], following: list[str], exception: str | None, draft: Draft
) -> tuple[Draft, Draft | None]:
    """Two messages, the first cut by the second: (first, second if it had to be read specially)."""
    body, rest = "".join(pieces), "".join(following)
    doubled = any(len(label.findall(rest)) > 1 for label in LABELS)
    if not doubled and not (draft.has_layout and any(label.search(rest) for label in LABELS)):
        return draft, None
    second = read_allocator(heads[1], rest, None)
    if second is not None and _is_whole(second):
        first = read_allocator(heads[0], body + rest[second.consumed :], exception)
        if first is not None and first.has_layout and not first.cut_short and len(first.figures) > len(draft.figures):
            first.damaged = True
            first.note("another message stands in the middle of this one")
            return first, second
    if not doubled:
        return draft, None
    first = read_allocator(heads[0], body + "".join(following[1::2]), exception)
    second = read_allocator(heads[1], "".join(following[0::2]), None)
    if first is not None and second is not None and _is_whole(first) and _is_whole(second):
        for one in (first, second):
            one.note("two messages alternate line by line here; they were taken apart by that")
        return first, second
    second = read_allocator(heads[1], following[0], None)
    for mixed in (draft, second):
        if mixed is not None:
            mixed.note("two messages are mixed up here: figures after the first line can't be told apart")
    return draft, second


def _without_intruders(head: re.Match[str], pieces: list[str], exception: str | None, draft: Draft) -> Draft:
    """Read again with a line or three left out, in case another writer's lines stand inside the message."""
    best = draft
    count = min(len(pieces), _MAX_SPLICED_LINES)
    for first in range(1, count):
        for last in range(first + 1, min(first + 4, count)):
            other = read_allocator(head, "".join(pieces[:first] + pieces[last:]), exception)
            if other is not None and len(other.figures) > len(best.figures):
                best = other
    if best is not draft:
        best.damaged = True
    return best


def _counts(flow: Flow, head: re.Match[str], exception: str | None) -> bool:
    """Whether "CUDA out of memory" without any figure is a message rather than talk about one."""
    line = flow.line_at(head.start())
    words = re.search(rf"{head['backend']}\s+out\s+of\s+memory", line.text, re.IGNORECASE) if head["backend"] else None
    before = line.text[: words.start()] if words else line.text
    after = line.text[words.end() :] if words else ""
    if _PROSE_BEFORE.search(before):
        return False
    if exception is not None:
        return True
    if before.strip(" -:|*#>\"'"):
        return False
    return not after.strip(" .!:;\"'") or bool(_ERROR_LEVEL.search(line.prefix))


def is_code(flow: Flow, start: int, end: int) -> bool:
    """Whether the words stand in a line of source code that tests for them."""
    return flow.text[max(0, start - 1) : start] in ('"', "'", "`") and bool(_QUOTED_TEST.match(flow.text, end))
