"""Set operations against numpy's own."""

from __future__ import annotations

import numpy as np
import pytest

from memtrace.arrays import among, distinct, narrowed, places

RANDOM = np.random.default_rng(7)
WANTED = {
    "none": [],
    "few": [3, 3, 5],
    "few, far apart": [3, 1 << 40, -7],
    "many close together": list(range(2, 60, 3)),
    "many far apart": [number << 30 for number in range(-20, 20)],
    "the last numbers there are": [-(1 << 63), (1 << 63) - 1, *range(30)],
}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_among_is_numpys_isin(wanted: list[int], dtype: type) -> None:
    ends = [np.iinfo(dtype).min, np.iinfo(dtype).max]
    inside = [number for number in wanted if ends[0] <= number <= ends[1]]
    values = np.array([*RANDOM.integers(0, 70, 300).tolist(), *ends, *inside], dtype=dtype)
    expected = np.isin(values, np.array(wanted, dtype=np.int64))
    for asked in (wanted, np.array(wanted, dtype=np.int64)):
        assert (among(values, asked) == expected).all()
    assert not len(among(values[:0], wanted))


@pytest.mark.parametrize("bounds", [[], [-1], [3], [0, 2, 2, 5, 9]])
@pytest.mark.parametrize("values", [[], [2], [-1, -1, 0, 2, 2, 3, 9, 40]])
def test_places_are_numpys_searchsorted(bounds: list[int], values: list[int]) -> None:
    for side in ("left", "right"):
        found = places(np.array(bounds, np.int64), np.array(values, np.int64), side)
        assert found.tolist() == np.searchsorted(np.array(bounds), values, side).tolist()


@pytest.mark.parametrize("values", [[], [4], [3, 1, 3, -2, 1]])
def test_distinct_is_numpys_unique(values: list[int]) -> None:
    assert (distinct(np.array(values, dtype=np.int64)) == np.unique(values)).all()


@pytest.mark.parametrize("values", [[], [3], [3, 3, 3], [3, 4, 3]])
def test_what_is_alike_takes_the_room_of_one(values: list[int]) -> None:
    found = narrowed(np.array(values, np.int32))
    assert found.tolist() == values and found.dtype == np.int32
    assert len(values) < 2 or (found.strides == (0,)) == (len(set(values)) == 1)
