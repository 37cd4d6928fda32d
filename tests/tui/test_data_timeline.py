"""Columns of the timeline never lose an extreme, whatever the window and the width."""

from __future__ import annotations

import numpy as np
import pytest
from browser_cases import CASES, TINY, recording
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace_tui.data.buckets import EMPTY, FADED, UNUSED, columns, overlay, raster, ticks

from memtrace.answers.curves import category_curves
from memtrace.attribution.categories import Category

REST = list(Category).index(Category.FRAGMENTATION)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_every_extreme_is_kept(data: st.DataObject) -> None:
    provider = recording(TINY).provider()
    start = data.draw(st.integers(0, provider.count - 1))
    stop = data.draw(st.integers(start + 1, provider.count))
    width = data.draw(st.integers(1, 220))
    found = columns(provider, start, stop, width, data.draw(st.booleans()))
    curves = category_curves(provider.analysis)
    live = (curves.reserved_bytes - curves.categories[REST])[start:stop]
    assert found.high.max() == live.max() and found.low.min() == live.min()
    assert found.reserved.max() == curves.reserved_bytes[start:stop].max()
    assert (found.layers == np.delete(curves.categories, REST, 0)[:, found.high_event]).all()
    assert (found.layers.sum(axis=0) == found.high).all() and (found.low <= found.high).all()
    assert ((found.high_event >= start) & (found.high_event < stop)).all()
    assert (found.start[1:] >= found.start[:-1]).all()
    event = data.draw(st.integers(start, stop - 1))
    column = found.column_of(event)
    assert column is not None and found.start[column] <= event


@given(st.integers(1, 60), st.integers(1, 120))
@settings(deadline=None, max_examples=40)
def test_the_raster_is_as_high_as_the_data(height: int, width: int) -> None:
    provider = recording(TINY).provider()
    data = columns(provider, 0, provider.count, width)
    top = int(data.reserved.max())
    cells = raster(data, height, top)
    assert cells.under.shape == (height, width)
    assert set(np.unique(cells.under)) <= {*range(6), *range(FADED, FADED + 6), UNUSED, EMPTY}
    highest = int(data.reserved.argmax())
    assert cells.over[-1, highest] != EMPTY  # the highest column reaches the upper edge
    filled = (cells.under[:, highest] != EMPTY) & (cells.eighths[:, highest] > 0)
    assert filled.all()


@given(st.integers(1, 1 << 45), st.integers(1, 80))
def test_ticks_are_round_few_and_inside(top: int, height: int) -> None:
    found = ticks(top, height)
    assert len(found) <= max(height // 4, 1)
    assert all(0 < tick <= top for tick in found)
    assert not found or found[0] & (found[0] - 1) == 0


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("empty", "no-trace")])
def test_overlays_of_a_recording_with_itself_show_no_difference(case: str) -> None:
    provider = recording(case).provider()
    _, _, cells, _ = overlay(provider, provider, 60, 10)
    assert set(np.unique(cells.under)) <= {0, 3, 6}
