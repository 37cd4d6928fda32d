"""Words: the harmless ones stay, any other becomes ``word_1``, the same one the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from memtrace.scrub.words import FORMS, GPU, WORDS

_TOKEN = re.compile(
    r"https://(?:docs\.)?pytorch\.org/docs/(?:stable|main)/notes/cuda\.html#(?:memory-management|environment-variables"
    r"|optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    r"|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)"  # a host's address
    r"|\w+|[^\w]"
)
_NO_WORD = re.compile(r"[ \n.,:;()\[\]{}<>=*&#%/|+'\"-]")
_LONGEST_TEXT = 20_000
_LONGEST_NUMBER = 6
_ELLIPSES = re.compile(r"…(?:[^\w…]*…)+")


@dataclass(frozen=True, slots=True)
class ScrubOptions:
    """``keep_names``: base names of project files stay. ``functions``: names of the project's functions go as well.

    ``hide``: words that nothing which stays may contain (compared without case).
    """

    keep_names: bool = False
    functions: bool = False
    hide: tuple[str, ...] = ()


class Hiding:
    """Decides about words and counts what is gone. ``people`` are names that no kept text may hold as a word."""

    def __init__(self, options: ScrubOptions) -> None:
        self.options = options
        self.people: frozenset[str] = frozenset()
        self._asked = tuple(word.lower() for word in options.hide if word)
        self._removed: dict[str, dict[Hashable, int]] = {}
        self._kept: dict[str, dict[str, None]] = {}

    def number(self, kind: str, thing: Hashable) -> int:
        """The number, from 1, of a distinct thing among those of its kind that are gone."""
        seen = self._removed.setdefault(kind, {})
        return seen.setdefault(thing, len(seen) + 1)

    remove = number  # where the number does not matter: the same thing twice counts once

    def keep(self, kind: str, text: str) -> None:
        """Note a text that a reader may recognise."""
        self._kept.setdefault(kind, {})[text] = None

    @property
    def removed(self) -> dict[str, int]:
        """Kind -> number of distinct things that are gone."""
        return {kind: len(seen) for kind, seen in self._removed.items()}

    @property
    def kept(self) -> dict[str, list[str]]:
        """Kind -> texts that a reader may recognise, sorted."""
        return {kind: sorted(texts) for kind, texts in self._kept.items()}

    def names(self, text: str) -> bool:
        """Whether a text names a person whose home folder was seen, or holds a word that was asked to be hidden."""
        return self._is_asked(text) or not self.people.isdisjoint(re.split(r"[^a-z0-9]+", text.lower()))

    def words(self, text: str, any_number: bool = False, gpu: bool = False) -> str:
        """A text without the words that are not known to be harmless.

        ``any_number``: long numbers are sizes here, and a text whose every word counts, not a name: what is hidden
        leaves an ellipsis.
        """
        words = [self._word(token, any_number, gpu) for token in _TOKEN.findall(text[:_LONGEST_TEXT])]
        result = "".join(words)
        if any_number:
            result = _ELLIPSES.sub("…", result)
        return self._instead(text) if self._is_asked(result) else result

    def is_harmless(self, text: str) -> bool:
        """Whether every word of a text is one that everybody's snapshots hold."""
        return not self._is_asked(text) and all(map(self._is_known, _TOKEN.findall(text)))

    def _word(self, token: str, any_number: bool, gpu: bool) -> str:
        known = self._is_known(token) or (any_number and token.isdecimal()) or (gpu and GPU.fullmatch(token))
        if known and not self._is_asked(token):
            return token
        if any_number:
            self.remove("words of messages", token)
            return "…"
        pieces = ["" if self._is_asked(token) or not self._is_known(piece) else piece for piece in token.split("_")]
        pieces[pieces.index("")] = self._instead(token)
        return "_".join(filter(None, pieces))

    def _instead(self, text: str) -> str:
        return f"word_{self.number('words', text)}"

    def _is_known(self, token: str) -> bool:
        """Whether a token is harmless, or all its parts between underscores are."""
        if _NO_WORD.fullmatch(token) or token.startswith("https:"):
            return True
        return all(not piece or piece in WORDS or _is_form(piece) for piece in token.split("_"))

    def _is_asked(self, text: str) -> bool:
        low = text.lower()
        return any(word in low for word in self._asked)


def _is_form(piece: str) -> bool:
    if piece.isascii() and piece.isdecimal():
        return len(piece) <= _LONGEST_NUMBER
    return FORMS.fullmatch(piece) is not None
