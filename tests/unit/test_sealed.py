"""Sealed files: any stretch is read as it was written, and damage is noticed where it is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.cache import sealed
from memtrace.cache.sealed import Broken, Sealed, sealed_bytes, write_sealed
from memtrace.snapshot.store import Stored, Unfit, pack

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "_PIECE_BYTES", 64)


def written(folder: Path, parts: list[bytes], mark: bytes = b"mark") -> Path:
    path = folder / "sealed"
    with path.open("wb") as out:
        write_sealed(out, KEY, mark, parts)
    assert path.stat().st_size == sealed_bytes(mark, parts)
    return path


@given(st.lists(st.binary(max_size=200), max_size=6), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_stretch_is_what_was_written(tmp_path: Path, parts: list[bytes], data: st.DataObject) -> None:
    path, whole = written(tmp_path, parts), b"".join(parts)
    first = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(first, len(whole)))
    opened = Sealed(path, KEY)
    assert opened.mark == b"mark"
    assert bytes(opened.read(first, stop)) == whole[first:stop]
    with pytest.raises(Broken):
        opened.read(first, len(whole) + 1)
    opened.close()


def test_damage_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, [bytes(1000)])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    opened = Sealed(path, KEY)
    assert not any(opened.read(0, 900))
    with pytest.raises(Broken, match="damaged"):
        opened.read(990, 1000)


@pytest.mark.parametrize("place", [0, 20, 50, 60, 70])
def test_a_damaged_head(tmp_path: Path, place: int) -> None:
    path = written(tmp_path, [bytes(300)])
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Broken):
        Sealed(path, KEY)


def test_another_key_and_other_lengths(tmp_path: Path) -> None:
    path = written(tmp_path, [bytes(300)])
    with pytest.raises(Broken, match="key"):
        Sealed(path, b"x" * 32)
    for content in (path.read_bytes()[:-1], path.read_bytes() + b"x", b"", b"memtrace index 2\n"):
        path.write_bytes(content)
        with pytest.raises(Broken):
            Sealed(path, KEY)


def test_parts_of_stored_arrays() -> None:
    value = ({"a": np.arange(1000), "same": np.broadcast_to(np.int32(7), (50,)), "none": None}, [1, 2])
    data = memoryview(b"".join(pack(value, {})))
    reads: list[tuple[int, int]] = []

    def read(first: int, stop: int) -> memoryview:
        reads.append((first, stop))
        return data[first:stop]

    root = Stored(read, {}).root
    first, second = root.fields().values()
    parts = first.fields()
    reads.clear()
    assert parts["a"].part(10, 20).tolist() == list(range(10, 20))
    assert parts["a"].part(10, 20).dtype == np.int64
    assert sum(stop - start for start, stop in reads) == 2 * 10 * 2  # stored as 16 bits
    assert parts["same"].part(3, 6).tolist() == [7, 7, 7] and parts["same"].count() == 50
    assert parts["none"].is_none() and not parts["none"].is_array() and parts["a"].is_array()
    assert second.value() == [1, 2]
    for bad in ((5, 1001), (-1, 3), (4, 3)):
        with pytest.raises(Unfit):
            parts["a"].part(*bad)
