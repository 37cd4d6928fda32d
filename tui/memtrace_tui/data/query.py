"""The filter language that allocations, stacks, segments and events share.

Words narrow down, all of them must fit: ``adamw`` (anywhere in purpose, module, site or stack), ``/regex/``,
``category:runtime`` ``sub:saved`` ``site:modeling`` ``stack:forward`` ``module:mlp`` ``layer:7`` ``phase:forward``
``rule:gradient`` ``evidence:shape`` ``step:3`` ``stream:0`` ``pool:small`` ``action:oom`` ``0x7f00`` ``size>1MiB``
``size<4KiB`` ``block=512`` ``life>1000``, and ``-word`` for what must not fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from memtrace.attribution.categories import Category, Evidence, category_name
from memtrace.attribution.phases import Phase
from memtrace.errors import UsageError
from memtrace.snapshot.model import Action
from memtrace.units import parse_size, printable

KNOWN: dict[str, list[str]] = {  # the words of fields that take no others
    "category": [*map(str, Category), category_name(Category.LORA, "trained")],
    "phase": [phase.label for phase in Phase],
    "evidence": [str(evidence) for evidence in Evidence],
    "action": [action.name.lower() for action in Action],
}
FIELDS = (*KNOWN, "sub", "site", "stack", "module", "rule", "layer", "step", "stream", "pool")
_SHORT = {"cat": "category", "subcategory": "sub", "frame": "stack"}
_NUMBER = re.compile(r"(size|block|life|born|freed)(<=|>=|<|>|=)(.*)")
_TOKEN = re.compile(r'-?/(?:[^/\\]|\\.)*/|-?(?:\w+:)?"[^"]*"|\S+')


@dataclass(frozen=True, slots=True)
class FilterTerm:
    """One condition: ``field`` is "any", "address", a name of ``FIELDS`` or a number's; ``pattern``, or ``operator``
    and ``value`` (bytes, events, or the address)."""

    field: str
    negated: bool = False
    pattern: re.Pattern[str] | None = None
    operator: str = ""
    value: int = 0


def parse(text: str) -> tuple[FilterTerm, ...]:
    """The terms of a filter. Raises UsageError with what is wrong with it, and what may have been meant."""
    return tuple(_term(token) for token in _TOKEN.findall(text))


def _term(token: str) -> FilterTerm:
    negated = token.startswith("-") and len(token) > 1
    word = token[1:] if negated else token
    number = _NUMBER.fullmatch(word)
    if number is not None:
        return FilterTerm(number[1], negated, None, number[2], _number(number[1], number[3]))
    if word.lower().startswith("0x"):
        if not re.fullmatch("0[xX][0-9a-fA-F]+", word):
            raise UsageError(f"not an address: {word}")
        return FilterTerm("address", negated, None, "", int(word, 16))
    name, colon, rest = word.partition(":")
    field = _SHORT.get(name, name)
    if not colon or word.startswith(('"', "/")):
        return FilterTerm("any", negated, _pattern(word))
    if field not in FIELDS:
        meant = get_close_matches(name, FIELDS, 1, 0.7)
        if meant:
            raise UsageError(f"no such field: {name}; did you mean {meant[0]}:{rest}?")
        return FilterTerm("any", negated, _pattern(word))  # llama.py:12, at::empty
    if not rest:
        raise UsageError(f"{name}: takes a word or a /regular expression/")
    pattern = _pattern(rest, exact=field in ("layer", "step", "stream"))
    known = KNOWN.get(field, [])
    if known and not any(pattern.search(each) for each in known):
        meant = get_close_matches(rest.lower(), known, 1, 0.6)
        hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(known)}"
        raise UsageError(f"no {field} has {rest} in it; {hint}")
    return FilterTerm(field, negated, pattern)


def _number(field: str, text: str) -> int:
    if field in ("size", "block"):
        return parse_size(text)
    if not re.fullmatch(r"-?[\d,]+", text):
        raise UsageError(f"{field} takes a number of events, not {text!r}")
    return int(text.replace(",", ""))


def _pattern(word: str, exact: bool = False) -> re.Pattern[str]:
    if len(word) > 2 and word.startswith("/") and word.endswith("/"):
        try:
            return re.compile(word[1:-1], re.IGNORECASE)
        except re.error as error:
            raise UsageError(f"not a regular expression: {word} ({error})") from None
    text = re.escape(word.strip('"'))
    return re.compile(f"^{text}$" if exact else text, re.IGNORECASE)


def exactly(text: str) -> str:
    """For between slashes in a filter: blanks would end the word, so they become ``\\s``."""
    return re.escape(text).replace("\\ ", "\\s").replace("/", "\\/")


def site_words(category: str, subcategory: str = "", frame: str | None = None) -> str:
    """The filter that keeps a category, a subcategory, and a call site ("" for allocations without a stack)."""
    words = [f"category:{category}", f"sub:/^{subcategory}$/" if subcategory else ""]
    words.append("" if frame is None else f"site:/^{exactly(printable(frame))}$/")
    return " ".join(word for word in words if word)
