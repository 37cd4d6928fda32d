"""Pair the call sites of two recordings, most specific evidence first, and lose none.

Sites are paired only within one purpose (category/subcategory), so that the differences of its sites add up to the
purpose's own difference. Where several sites share a key at some level, all of them become one pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from memtrace.answers.diff.paths import CallPaths
from memtrace.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """Live bytes of one purpose from one stack of one recording; ``is_early``: there before the recording began."""

    purpose: str
    stack: int
    is_early: bool
    module: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Sites that are one and the same, and what showed it; one side is empty where nothing in it matches.

    ``how``: ``line`` (same call path, aligned lines), ``function`` (same functions on the call path, or at its
    inner end), ``caller`` (the allocating functions differ, what called them is the same), ``operator`` (same autograd
    node), ``no stack`` (neither side has one), ``purpose`` (one side has none), None if unmatched.
    """

    before: tuple[Side, ...]
    after: tuple[Side, ...]
    how: str | None


Key = Callable[[CallPaths, Side], Hashable | None]


def _if_common(key: Callable[[CallPaths, Side], Hashable]) -> Key:
    """Only for sites whose own function is in both recordings."""

    def checked(paths: CallPaths, site: Side) -> Hashable | None:
        return key(paths, site) if paths.starts_common(site.stack) else None

    return checked


LEVELS: tuple[tuple[str, Key], ...] = (
    ("line", lambda p, s: p.whole(s.stack) or None),
    ("line", _if_common(lambda p, s: p.places(s.stack))),
    ("line", _if_common(lambda p, s: p.places(s.stack, 5))),
    ("function", _if_common(lambda p, s: p.functions(s.stack))),
    ("function", _if_common(lambda p, s: p.functions(s.stack, 6))),
    ("function", _if_common(lambda p, s: (s.module, p.functions(s.stack, 3)))),
    ("function", _if_common(lambda p, s: (s.module, p.functions(s.stack, 1)))),
    ("caller", lambda p, s: p.functions(s.stack) or None),
    ("operator", lambda p, s: None if p.has_landmarks(s.stack) else p.node(s.stack) or None),
    ("no stack", lambda p, s: None if p.has_landmarks(s.stack) else s.is_early),
)


def pair_sites(
    before: Sequence[Side], after: Sequence[Side], paths_before: CallPaths, paths_after: CallPaths
) -> list[Pair]:
    """Every site of both sides in exactly one pair."""
    pairs: list[Pair] = []
    left, right = list(before), list(after)
    for how, key in LEVELS:
        ours, theirs = _grouped(left, paths_before, key), _grouped(right, paths_after, key)
        common = [k for k in ours if k in theirs]
        pairs += [Pair(tuple(ours[k]), tuple(theirs[k]), how) for k in common]
        left = _without(left, (site for k in common for site in ours[k]))
        right = _without(right, (site for k in common for site in theirs[k]))
    for purpose in dict.fromkeys(site.purpose for site in [*left, *right]):
        ours_left = [site for site in left if site.purpose == purpose]
        theirs_left = [site for site in right if site.purpose == purpose]
        pairs += _by_purpose(ours_left, theirs_left, paths_before, paths_after)
    return pairs


def _grouped(sites: Iterable[Side], paths: CallPaths, key: Key) -> dict[tuple[str, Hashable], list[Side]]:
    groups: dict[tuple[str, Hashable], list[Side]] = {}
    for site in sites:
        value = key(paths, site)
        if value is not None:
            groups.setdefault((site.purpose, value), []).append(site)
    return groups


def _without(sites: list[Side], taken: Iterable[Side]) -> list[Side]:
    gone = {id(site) for site in taken}
    return [site for site in sites if id(site) not in gone]


def _by_purpose(ours: list[Side], theirs: list[Side], before: CallPaths, after: CallPaths) -> list[Pair]:
    """The rest of one purpose: memory without a stack on one side answers to all that has one on the other."""
    bare_ours = [site for site in ours if not before.has_landmarks(site.stack)]
    bare_theirs = [site for site in theirs if not after.has_landmarks(site.stack)]
    pairs = []
    if bare_ours and theirs:
        pairs.append(Pair(tuple(bare_ours), tuple(theirs), "purpose"))
        ours, theirs = _without(ours, bare_ours), []
    elif bare_theirs and ours:
        pairs.append(Pair(tuple(ours), tuple(bare_theirs), "purpose"))
        ours, theirs = [], _without(theirs, bare_theirs)
    pairs += [Pair((site,), (), None) for site in ours]
    pairs += [Pair((), (site,), None) for site in theirs]
    return pairs
