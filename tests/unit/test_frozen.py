"""Frozen dataclasses defined quickly behave as the standard library's do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from memtrace import frozen


def classes(dataclass: Any) -> tuple[type, type, type]:
    @dataclass(frozen=True, slots=True)
    class Whole:
        """With every kind of field."""

        size: int
        name: str = "x"
        parts: list[int] = dataclasses.field(default_factory=list)
        hidden: int = dataclasses.field(default=3, repr=False, compare=False)
        later: list[int] = dataclasses.field(default_factory=list, init=False)
        fixed: int = dataclasses.field(default=4, init=False)
        last: int = dataclasses.field(default=0, kw_only=True)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("negative")

    @dataclass(frozen=True, slots=True)
    class More(Whole):
        """With a field of its own."""

        extra: int = 9

    @dataclass(frozen=True)
    class Open:
        """Without slots."""

        size: int = 1

    for kind in (Whole, More, Open):
        kind.__qualname__ = kind.__name__
    return Whole, More, Open


OURS, THEIRS = classes(frozen.dataclass), classes(dataclasses.dataclass)
Whole = OURS[0]  # where pickle finds it


@pytest.mark.parametrize(("ours", "theirs"), zip(OURS, THEIRS, strict=True))
def test_it_is_the_librarys_to_look_at(ours: Any, theirs: Any) -> None:
    mine, others = (inspect.signature(kind).parameters for kind in (ours, theirs))
    assert [(p.name, p.kind, p.annotation) for p in mine.values()] == [
        (p.name, p.kind, p.annotation) for p in others.values()
    ]
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
    assert ours.__match_args__ == theirs.__match_args__
    assert getattr(ours, "__slots__", None) == getattr(theirs, "__slots__", None)
    assert repr(ours(1)) == repr(theirs(1))
    assert dataclasses.asdict(ours(2)) == dataclasses.asdict(theirs(2))


@pytest.mark.parametrize("kinds", [OURS, THEIRS], ids=["ours", "theirs"])
def test_it_behaves_as_the_librarys_does(kinds: tuple[Any, Any, Any]) -> None:
    whole, more, free = kinds
    one = whole(1, "y", [2], last=5)
    assert (one.size, one.name, one.parts, one.hidden, one.later, one.fixed, one.last) == (1, "y", [2], 3, [], 4, 5)
    assert one == whole(1, "y", [2], 7, last=5) != whole(1, "y", [3], last=5)
    assert one != more(1, "y", [2], last=5)
    assert more(1, extra=2) == dataclasses.replace(more(1), extra=2)
    assert hash(free(4)) == hash(free(4))
    assert whole(1).parts is not whole(1).parts
    for wrong in (lambda: whole(), lambda: whole(1, "y", [], 0, 0), lambda: whole(1, fixed=2), lambda: hash(one)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="negative"):
        dataclasses.replace(one, size=-1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'size'"):
        one.size = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'size'"):
        del free(1).size
    assert copy.copy(one) == copy.deepcopy(one) == one


def test_it_goes_through_pickle() -> None:
    assert pickle.loads(pickle.dumps(Whole(3, "z"))) == Whole(3, "z")
