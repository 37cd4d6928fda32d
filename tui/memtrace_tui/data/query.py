"""The filter language of the tables.

Words narrow down, all of them must fit: ``lora`` (anywhere in purpose, module, site or stack), ``/regex/``,
``category:lora`` ``sub:saved`` ``site:modeling`` ``module:mlp`` ``phase:forward`` ``rule:gradient`` ``evidence:shape``
``step:3`` ``stream:0`` ``pool:small`` ``size>1MiB`` ``size<4KiB`` ``size=512``, and ``-word`` for what must not fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memtrace.errors import UsageError
from memtrace.units import parse_size

FIELDS = ("category", "sub", "site", "module", "phase", "rule", "evidence", "step", "stream", "pool")
_SHORT = {"cat": "category", "subcategory": "sub", "frame": "site"}
_SIZE = re.compile(r"(size|block)(<=|>=|<|>|=)(.+)")
_TOKEN = re.compile(r'-?/(?:[^/\\]|\\.)*/|"[^"]*"|\S+')


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: ``field`` is "any", a name of ``FIELDS``, "size" or "block"; ``pattern`` or ``operator size``."""

    field: str
    negated: bool = False
    pattern: re.Pattern[str] | None = None
    operator: str = ""
    size_bytes: int = 0


def parse(text: str) -> tuple[Term, ...]:
    """The terms of a filter. Raises UsageError with what is wrong with it."""
    terms = []
    for token in _TOKEN.findall(text):
        negated = token.startswith("-") and len(token) > 1
        word = token[1:] if negated else token
        size = _SIZE.fullmatch(word)
        if size is not None:
            terms.append(Term(size[1], negated, None, size[2], parse_size(size[3])))
            continue
        field, colon, rest = word.partition(":")
        field = _SHORT.get(field, field)
        if colon and field in FIELDS and rest:
            terms.append(Term(field, negated, _pattern(rest, exact=field in ("step", "stream"))))
        else:
            terms.append(Term("any", negated, _pattern(word)))
    return tuple(terms)


def _pattern(word: str, exact: bool = False) -> re.Pattern[str]:
    if len(word) > 2 and word.startswith("/") and word.endswith("/"):
        try:
            return re.compile(word[1:-1], re.IGNORECASE)
        except re.error as error:
            raise UsageError(f"not a regular expression: {word} ({error})") from None
    text = re.escape(word.strip('"'))
    return re.compile(f"^{text}$" if exact else text, re.IGNORECASE)
