"""The compiled parts and their plain twins give the same: containers, lifetimes, replays, what-if runs.

``MEMTRACE_COMPILE=1`` (as CI sets it) makes a missing compiled part a failure; without a compiler these tests skip.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allocator_damage import KINDS, damage
from allocator_recordings import device, recording
from compiled_and_plain import assert_same_replay, twice
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace import compiled
from memtrace.allocator.config import from_snapshot
from memtrace.allocator.flat import distinct
from memtrace.allocator.replay import lifetimes, rerun
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.replay.replay import replay_device
from memtrace.allocator.whatif.program import extract
from memtrace.allocator.whatif.whatif import simulate

if os.environ.get("MEMTRACE_COMPILE") == "1":
    import memtrace.allocator._compiled as part
else:
    part = pytest.importorskip("memtrace.allocator._compiled")

few = st.integers(0, 40)
addresses = st.one_of(few, st.integers(0, (1 << 63) - 1))


def test_a_source_that_changed_since_it_was_compiled_is_not_trusted(tmp_path: Path) -> None:
    binary, source = tmp_path / "_part.abi3.so", tmp_path / "_part.pyx"
    binary.touch()
    assert not compiled.is_outdated(str(binary))  # installed: no source beside it
    source.touch()
    for age_s, outdated in ((-10, False), (10, True)):
        os.utime(source, (binary.stat().st_mtime + age_s,) * 2)
        assert compiled.is_outdated(str(binary)) is outdated


def test_what_is_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.described() == "compiled"
    monkeypatch.setenv("MEMTRACE_PLAIN", "1")
    assert compiled.part("allocator") is None
    assert compiled.described() == "plain Python (MEMTRACE_PLAIN is set)"


@given(st.lists(st.tuples(st.integers(0, 4), addresses, st.integers(0, (1 << 63) - 1)), max_size=300))
def test_an_address_map_is_a_dict(steps: list[tuple[int, int, int]]) -> None:
    ours, plain = part.AddressMap(), dict[int, int]()
    for kind, address, value in steps:
        if kind <= 1:
            ours[address] = plain[address] = value
        elif kind == 2 and address in plain:
            assert ours.pop(address) == plain.pop(address)
        elif kind == 3:
            with nullcontext() if address in plain else pytest.raises(KeyError):
                del ours[address]
            plain.pop(address, None)
        assert ours.get(address, "none") == plain.get(address, "none")
        assert (address in ours) == (address in plain)
    assert ours.items() == sorted(plain.items())
    assert len(ours) == len(plain)
    with pytest.raises(KeyError):
        ours.pop(next(i for i in range(len(plain) + 1) if i not in plain))


@pytest.mark.parametrize("address", [-1, 1 << 64, (1 << 64) - 1])
def test_what_is_no_address_is_refused(address: int) -> None:
    with pytest.raises((OverflowError, KeyError)):
        part.AddressMap()[address] = 1


@given(st.lists(st.tuples(st.booleans(), few, addresses), max_size=300))
def test_a_key_list_is_a_sorted_list(steps: list[tuple[bool, int, int]]) -> None:
    ours, plain = part.KeyList(), list[int]()
    for adds, size, address in steps:
        key = size << 64 | address
        place = bisect_left(plain, key)
        assert bisect_left(ours, key) == place
        assert (key in ours) == (key in plain)
        if adds:
            insort(ours, key)
            insort(plain, key)
        elif place < len(plain):
            del ours[place], plain[place]
        else:
            with pytest.raises(IndexError):
                del ours[place]
    assert list(ours) == plain == [ours[i] for i in range(len(plain))]
    if plain:
        assert ours[-1] == plain[-1]
    with pytest.raises(IndexError):
        ours[len(plain)]


@given(st.data())
def test_lifetimes(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    action = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), np.uint8)
    address = np.array(data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)), np.int64)
    active = np.array(sorted(data.draw(st.sets(st.integers(0, 9)))), np.int64)
    for ours, plain in zip(part.match(action, address, active), lifetimes.match(action, address, active), strict=True):
        np.testing.assert_array_equal(ours, plain)


@given(st.lists(st.integers(0, 11), max_size=60), st.booleans())
def test_plan(kinds: list[int], completes: bool) -> None:
    action = np.array(kinds, np.uint8)
    handle = np.where(action <= 2, np.arange(len(action)) % 7 - 1, -1).astype(np.int32)
    handle[action == 0] += 1
    for ours, theirs in zip(
        part.plan(action, handle, 1 + completes, 9), rerun.plan(action, handle, 1 + completes, 9), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@given(st.lists(addresses, max_size=100))
def test_distinct(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    for ours, theirs in zip(distinct(values), np.unique(values, return_index=True, return_inverse=True), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["fuzz_default_0", "fuzz_expand_cap_0", "fuzz_split64_cap_0", "fuzz_gc_0"]),
    kinds=st.lists(st.integers(0, KINDS - 1), max_size=2),
    seed=st.integers(0, 2**32 - 1),
    other=st.sampled_from([{}, {"expandable_segments": True}, {"max_split_size": 64 << 20}]),
    limit_mib=st.sampled_from([200, 1000, 4096]),
)
def test_replays_and_runs(name: str, kinds: list[int], seed: int, other: dict[str, Any], limit_mib: int) -> None:
    rng = np.random.default_rng(seed)
    dev, stored = device(name), recording(name).settings
    for kind in kinds:
        dev = damage(dev, kind, rng)
    assert_same_replay(*twice(lambda: replay_device(dev, stored)))
    program = extract(gather(dev, from_snapshot(stored)))
    assert_same_replay(*twice(lambda: simulate(program, from_snapshot(other).with_limit(limit_mib << 20))))


@pytest.mark.parametrize("name", ["llama2-7b_baseline-expandable", "llama2-7b_oom-first-step", "qwen2-7b_late-cpp"])
def test_recordings(name: str) -> None:
    from support import snapshot

    loaded = snapshot(name)
    ours, plain = twice(lambda: replay_device(loaded.devices[0], loaded.settings))
    assert ours.exact
    assert_same_replay(ours, plain)
