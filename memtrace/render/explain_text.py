"""An explanation as text that fits one screen (20 lines of 80 columns), and as Markdown for an issue thread."""

from __future__ import annotations

import textwrap
from pathlib import PurePath
from typing import TYPE_CHECKING

from memtrace._version import __version__
from memtrace.attribution.categories import category_name, category_words
from memtrace.explain.answer import Advice, Explanation, Finding, When
from memtrace.render.words import moment_name, verdict_meaning, verdict_name
from memtrace.units import format_bytes, format_delta

if TYPE_CHECKING:
    from memtrace.explain.overheads import Overheads

WIDTH = 80
LINES = 20
_INDENT = 15
_WHY_LINES = 7
_THIRD_LINES = 3
_SINCE = "Since the same point of the pass before"


def _when_text(when: When) -> str:
    parts = [f"{when.phase.replace('_', ' ')}"] if when.phase != "unknown" else []
    if when.step is not None:
        nth = {True: " (the first)", False: "", None: " of the recording"}[when.first_step]
        parts.append(f"step {when.step}{nth}")
    where = "" if when.kind in ("oom", "log") else {"peak": "peak in ", "end": "end in "}.get(when.kind, "at ")
    return where + ", ".join(parts) if parts else ""


def _headline(answer: Explanation) -> str:
    parts = [f"{verdict_name(answer.verdict)}, {answer.confidence}: {verdict_meaning(answer.verdict)}"]
    if answer.when is not None and (text := _when_text(answer.when)):
        parts.append(text)
    return " · ".join(parts)


def _size(finding: Finding) -> str:
    if finding.bytes is None:
        return ""
    return format_bytes(finding.bytes) + ("/step" if finding.per_step else "")


def _saving(advice: Advice) -> str:
    return f"saves {format_bytes(advice.saves_bytes)} ({advice.basis})" if advice.saves_bytes is not None else ""


def _wrap(text: str, first: str, rest: str) -> list[str]:
    """Greedy lines of at most ``WIDTH`` columns.

    Code stays such that it can be copied: a word goes to a line of its own before it is broken, and is broken where
    Python lets a line end.
    """
    lines, line, empty = [], first, True
    for word in text.split():
        while word:
            room = WIDTH - len(line) - (0 if empty else 1)
            if len(word) <= room:
                line += word if empty else f" {word}"
                word, empty = "", False
                continue
            at = 0
            if len(word) > WIDTH - len(rest):
                at = _break(word, room) or (max(room, 1) if empty else 0)
                if at:
                    line += word[:at] if empty else f" {word[:at]}"
                    word = word[at:]
            lines.append(line)
            line, empty = rest, True
    return [*lines, line]


def _cut(text: str, first: str, rest: str, most: int) -> list[str]:
    """At most so many lines; what they can't hold is left out."""
    return textwrap.TextWrapper(WIDTH, first, rest, max_lines=most, placeholder=" …", break_on_hyphens=False).wrap(
        " ".join(text.split())
    )


def _break(word: str, room: int) -> int:
    """Where in the first ``room`` characters of a long word a line may end: after an opening bracket, or after a comma
    inside brackets; 0 where nowhere."""
    depth, at = 0, 0
    for place, mark in enumerate(word[: max(room, 0)], 1):
        depth += (mark in "([{") - (mark in ")]}")
        if mark in "([{" or (mark == "," and depth > 0):
            at = place
    return at


def _head(finding: Finding) -> str:
    head = f"{_size(finding):>{_INDENT - 2}}  {finding.id}" + (f" + {finding.beside}" if finding.beside else "")
    if finding.advice and (saving := _saving(finding.advice[0])):
        head += f" · {saving}"
    return head[:WIDTH]


def _brief(finding: Finding) -> str:
    """One line for a finding that has no more room: without a saving, the id alone would say too little."""
    head = _head(finding)
    if finding.advice and _saving(finding.advice[0]):
        return head
    return _cut(f"{finding.id} · {finding.title}", head[: -len(finding.id)], "", 1)[0]


def _change(change: str) -> list[str]:
    """A change after its arrow, whole: it is there to be copied."""
    return _wrap(change, f"{' ' * _INDENT}→ ", f"{' ' * (_INDENT + 2)}")


def _short(finding: Finding) -> list[str]:
    """The first line and the best change; for a finding without one what it is."""
    if not finding.advice:
        return [_brief(finding)]
    return [_head(finding), *_change(finding.advice[0].change)]


def _block(finding: Finding, everything: bool = False) -> list[str]:
    pad = " " * _INDENT
    best = finding.advice[0] if finding.advice else None
    lines = [_head(finding), *_cut(finding.title, pad, pad, 1)]
    if not everything:
        return [*lines, *(_change(best.change) if best is not None else ())]
    for advice in finding.advice:
        note = f" [{_saving(advice)}]" if _saving(advice) and advice is not best else ""
        lines += _change(advice.change + note)
    lines += _wrap(finding.evidence, f"{pad}because ", f"{pad}  ")
    for tried in finding.tried:
        lines += _wrap(f"no advice: {tried.change}: {tried.proof}", f"{pad}", f"{pad}  ")
    return lines


def _why(answer: Explanation, most: int | None = None) -> list[str]:
    """The sentences, wrapped; with ``most``, as many whole ones as that many lines hold (the first in any case)."""
    lines: list[str] = []
    for sentence in [*answer.because, *answer.worth_saying, *answer.sizes]:
        wrapped = _wrap(sentence, "  ", "  ")
        if most is not None and lines and len(lines) + len(wrapped) > most:
            break
        lines += wrapped
    return lines if most is None else lines[: LINES - 4]


def _together(answer: Explanation) -> list[str]:
    """What all changes come to at once, and which of them are enough."""
    whole = answer.together
    if whole is None:
        return []
    does = "fits" if whole.fits else "does not fit"
    peak, capacity = format_bytes(whole.peak_bytes), format_bytes(whole.capacity_bytes)
    if not whole.fits and whole.peak_bytes <= whole.capacity_bytes:
        return [f"together: a request is refused all the same under {capacity} ({whole.basis})"]
    enough = f"; enough: {', '.join(whole.enough)}" if whole.enough else ""
    if whole.tokens_share is not None:
        share = f"{whole.tokens_share:.0%}"
        return [f"together: {peak} of {capacity}, does not fit ({whole.basis}), would with {share} of its tokens"]
    return _cut(f"together: peak {peak} of {capacity}, {does} ({whole.basis}){enough}", "", "  ", 2)


def render_explanation(answer: Explanation, everything: bool = False) -> list[str]:
    """Lines of at most 80 columns: 20 at most, or with ``everything`` as many as it takes."""
    head = _cut(_headline(answer), "", "  ", 2)
    warnings = [f"warning: {line}" for line in answer.warnings]
    if everything:
        lines = [*head, *_why(answer)]
        for finding in answer.findings:
            lines += ["", *_block(finding, everything=True)]
        lines += ["", *_together(answer)] if answer.together is not None else []
        for warning in warnings:
            lines += _wrap(warning, "", "  ")
        return lines
    foot = _cut(warnings[0], "", "  ", 1) if warnings else []
    all_of_it = _together(answer)
    room = LINES - len(head) - len(foot) - len(all_of_it) - 1
    # Changes are shown whole or not at all. The first findings come with theirs, however much there is to say before.
    blocks = [(_block(finding), _short(finding), [_brief(finding)]) for finding in answer.findings]
    kept = [len(_short(finding)) for finding in answer.findings[:3]]
    if len(kept) == 3 and kept[2] > _THIRD_LINES:  # sentences come before a third change that is long
        kept[2] = 1
    reserved = sum(kept) + bool(kept)
    spare = room - sum(len(whole) for whole, _, _ in blocks)
    why = _why(answer, max(3, spare, min(_WHY_LINES, room - reserved)))
    room -= len(why)
    shown: list[str] = []
    count = 0
    for number, forms in enumerate(blocks):
        later = sum(kept[number + 1 :])
        form = next((form for form in forms if len(form) <= room - (later if number and form is forms[0] else 0)), None)
        if form is None:
            break
        shown += form
        room -= len(form)
        count += 1
    left = [finding.id for finding in answer.findings[count:]]
    more = []
    if left:
        more = _cut(f"and {len(left)} more (--all): {', '.join(left)}", "", "  ", 1)
    elif answer.findings or len(why) < len(_why(answer)):
        more = ["all of it, with the evidence: --all; as Markdown for an issue thread: --md"]
    return [*head, *why, *shown, *all_of_it, *more, *foot]


def render_top(answer: Explanation) -> list[str]:
    """The verdict, what it rests on most, and the first change."""
    lines = _cut(_headline(answer), "", "  ", 2)
    for sentence in answer.because[:1]:
        lines += _wrap(sentence, "  ", "  ")
    return lines + [line for finding in answer.findings[:1] for line in _block(finding)]


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is: dunder names are not bold, ``<module>`` is not a tag."""
    return text.replace("__", r"\_\_").replace("<", "&lt;").replace("*", r"\*")


def render_markdown(answer: Explanation) -> list[str]:
    """The whole answer as Markdown; nothing in it but file names and what stacks name."""
    lines = [f"### {_headline(answer)}", ""]
    if answer.files:
        names = ", ".join(f"`{PurePath(file).name}`" for file in answer.files)
        lines += [f"From {names} by memtrace {__version__}.", ""]
    lines += [f"- {_plain(sentence)}" for sentence in [*answer.because, *answer.worth_saying, *answer.sizes]]
    said = any(_SINCE in sentence for sentence in answer.because)
    if answer.when is not None and answer.when.grew_bytes and not said:
        meaning, most = answer.when.lora["meaning"], list(answer.when.grew_bytes.items())[:5]
        grown = ", ".join(f"{category_words(key, meaning)} {format_delta(size)}" for key, size in most)
        lines.append(f"- {_SINCE}: {grown}.")
    if answer.findings:
        lines += ["", "| finding | bytes | best change saves |", "| --- | ---: | --- |"]
        for finding in answer.findings:
            saving = _saving(finding.advice[0]).removeprefix("saves ") if finding.advice else ""
            lines.append(f"| `{finding.id}` | {_size(finding)} | {saving} |")
    for finding in answer.findings:
        lines += ["", f"**{finding.title}** (`{finding.id}`{', ' + _size(finding) if finding.bytes else ''})", ""]
        where = f" Made at `{finding.frame}`." if finding.frame else ""
        lines.append(f"{_plain(finding.evidence[:1].upper() + finding.evidence[1:])}{where}")
        lines.append("")
        for advice in finding.advice:
            saving = f" (**{_saving(advice)}**)" if _saving(advice) else ""
            lines.append(f"- {_plain(advice.change)}{saving}")
    if answer.together is not None:
        lines += ["", " ".join(_together(answer)).replace("together:", "**Together:**")]
    if answer.warnings:
        lines += ["", *[f"> {warning}" for warning in answer.warnings]]
    return lines


def render_overheads(found: Overheads, meaning: str) -> list[str]:
    """One line an overhead: its bytes, what would be left without it and those above it, and what it is.

    ``meaning``: the report's, of the category ``lora``.
    """
    lines = [f"{format_bytes(found.reserved_bytes)} reserved at the {moment_name(found.at)}", ""]
    lines.append(f"{'overhead':>12}  {'left without':>12}  what it is")
    for row in found.overheads:
        what = f"{category_name(row.purpose, meaning)}: {row.meaning}"
        line = f"{format_bytes(row.bytes):>12}  {format_bytes(row.left_bytes):>12}  {what}"
        lines.append(line if len(line) <= 118 else f"{line[:117]}…")
    lines.append(f"{format_bytes(found.naive_bytes):>12}  {'':>12}  parameters × bytes: the naive figure")
    return lines
