"""Corner cases of the allocator's rules; sizes in MiB unless a unit is given."""

from __future__ import annotations

import numpy as np
import pytest
from allocator_machine import MIB, Machine

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.replay import flushes
from memtrace.allocator.rounding import round_size, round_sizes
from memtrace.allocator.whatif.addresses import Policy
from memtrace.snapshot.model import Action


def filled(m: Machine, *sizes: float, stream: int = 0, pool: int = 0) -> list[int]:
    names = [m.alloc(size, stream, pool) for size in sizes]
    assert None not in names
    return names  # type: ignore[return-value]


@pytest.mark.parametrize(("rest", "split"), [(MIB, False), (MIB + 512, True)])
def test_large_remainders(rest: int, split: bool) -> None:
    m = Machine()
    name = m.alloc(20 * MIB - rest, unit=1)
    assert name is not None
    # 20 MiB - rest is at least 10 MiB, so the segment is its own size rounded to 2 MiB: 20 MiB.
    assert (len(m.free_blocks()) == 1) is split


def test_small_remainder_of_512_is_split() -> None:
    m = Machine()
    filled(m, 1)
    name = m.alloc(MIB - 512, unit=1)
    assert name is not None
    assert m.free_blocks() == [(m.address(name) + MIB - 512, 512)]


def test_rounding_up_can_change_the_pool_and_the_segment() -> None:
    m = Machine(AllocatorConfig(roundup_divisions=(2,) * 16))
    m.alloc(0.8)
    assert m.events() == [("alloc", 2)]
    m.alloc(1.1)
    assert m.events() == [("alloc", 20)]
    m = Machine(AllocatorConfig(roundup_divisions=(2,) * 16))
    m.alloc(9.5)  # becomes 12 MiB and gets a segment of its own
    assert m.events() == [("alloc", 12)]


@pytest.mark.parametrize(("request_mib", "takes_cached"), [(64, True), (63, False)])
def test_a_request_of_exactly_max_split_counts_as_oversize(request_mib: int, takes_cached: bool) -> None:
    m = Machine(AllocatorConfig(max_split_bytes=64 * MIB))
    (name,) = filled(m, 70)
    m.free(name)
    m.events()
    filled(m, request_mib)
    assert (m.events() == []) is takes_cached


def test_a_perfect_fit_on_another_stream_is_not_used() -> None:
    m = Machine()
    (name,) = filled(m, 30, stream=7)
    m.free(name)
    filled(m, 30, stream=8)
    assert m.reserved == 60


def test_streams_release_in_order_of_their_unsigned_handles() -> None:
    m = Machine()
    names = [m.alloc(size, stream) for size, stream in ((12, -1), (14, 5), (16, 0))]
    for name in names:
        assert name is not None
        m.free(name)
    m.events()
    m.empty_cache()
    assert m.events() == [("free", 16), ("free", 14), ("free", 12)]


def test_pending_blocks_do_not_merge_with_their_neighbours() -> None:
    m = Machine()
    a, b, c = filled(m, 4, 4, 4)
    m.defer(b)
    m.free(a)
    m.free(c)  # merges with the rest of the segment
    assert [size // MIB for _, size in m.free_blocks()] == [4, 12]
    m.complete(b)
    assert [size // MIB for _, size in m.free_blocks()] == [20]


def test_a_flush_completes_pending_frees() -> None:
    m = Machine()
    (name,) = filled(m, 30)
    m.defer(name)
    m.empty_cache()
    assert m.reserved == 0
    m.complete(name)  # already done
    assert m.free_blocks() == []


def test_garbage_collection_spares_split_segments_and_young_ones() -> None:
    m = Machine(AllocatorConfig(limit_bytes=400 * MIB, gc_threshold=0.5))
    big, _small = filled(m, 60, 8)
    m.free(big)
    filled(m, 0.5)
    other = m.alloc(150)
    assert other is not None
    m.events()
    filled(m, 90)
    # 60 is the only whole free segment of the large pool; the 20 that holds 8 is split.
    assert m.events() == [("free", 60), ("alloc", 90)]


def test_a_small_miss_collects_large_garbage() -> None:
    m = Machine(AllocatorConfig(limit_bytes=100 * MIB, gc_threshold=0.5))
    (name,) = filled(m, 60)
    m.free(name)
    m.events()
    filled(m, 0.5)
    assert m.events() == [("free", 60), ("alloc", 2)]


def test_no_garbage_collection_without_a_limit() -> None:
    m = Machine(AllocatorConfig(gc_threshold=0.01))
    (name,) = filled(m, 60)
    m.free(name)
    filled(m, 70)
    assert m.reserved == 130


def test_garbage_collection_takes_a_second_pass_while_above_the_threshold() -> None:
    m = Machine(AllocatorConfig(limit_bytes=400 * MIB, gc_threshold=0.5))
    for size in (10, 20, 220):
        (name,) = filled(m, size)
        m.free(name)
    m.events()
    m.alloc(300)
    # 50 are too much: the two older segments give 30, the second pass takes the last one.
    assert m.events() == [("free", 10), ("free", 20), ("free", 220), ("alloc", 300)]


def test_growth_of_the_last_free_block_in_an_expandable_segment() -> None:
    m = Machine(AllocatorConfig(expandable_segments=True))
    a, b = filled(m, 16, 16)
    base = m.address(a)
    m.free(b)
    (c,) = filled(m, 44)  # 24 are free at the end of the 40 mapped
    assert m.address(c) == base + 16 * MIB
    assert m.reserved == 60


def test_a_wholly_unmapped_reservation_is_destroyed() -> None:
    m = Machine(AllocatorConfig(expandable_segments=True))
    (name,) = filled(m, 40)
    m.free(name)
    m.empty_cache()
    assert m.reserved == 0
    assert not m.state.reservations
    assert not m.state.unmapped_at


def test_mapping_may_fail_midway_and_what_was_mapped_stays_cached() -> None:
    m = Machine(AllocatorConfig(expandable_segments=True))
    names = filled(m, *[20] * 5)
    m.free(names[1])
    m.free(names[3])
    m.empty_cache()  # two holes of one page
    m.free(names[2])
    granted = [True, False, False]
    m.world.map = lambda number, address, size: granted.pop(0)  # type: ignore[method-assign]
    assert m.reserved == 60
    assert m.alloc(60) is None
    assert granted == []
    # The first half of the growth stayed cached until the flush, which unmapped it with the rest.
    assert [(e[1], e[3] // MIB) for e in m.world.log[-1:]] == [(Action.SEGMENT_UNMAP, 40)]
    assert m.reserved == 40


def test_expandable_blocks_are_passed_over_once_the_flag_is_off() -> None:
    m = Machine(AllocatorConfig(expandable_segments=True))
    (name,) = filled(m, 40)
    m.free(name)
    m.state.expands[:] = [False] * len(m.state.expands)
    m.state.fine[:] = [False] * len(m.state.fine)
    m.events()
    filled(m, 30)
    assert m.events() == [("alloc", 30)]


def test_private_pools_keep_their_memory_until_they_are_given_up() -> None:
    m = Machine(pools=2)
    (name,) = filled(m, 30, pool=1)
    m.free(name)
    m.empty_cache()
    assert m.reserved == 30  # the graph may still need it
    filled(m, 30)
    assert m.reserved == 60  # and the default pool can't use it
    m.last_use[1] = -2
    m.empty_cache()
    assert m.reserved == 30


def test_private_pools_expand_only_from_2_5() -> None:
    for version, kind in (((2, 4), "alloc"), ((2, 5), "map")):
        m = Machine(AllocatorConfig(version=version, expandable_segments=True), pools=2)
        filled(m, 30, pool=1)
        assert m.events()[0][0] == kind


def test_until_2_9_the_flag_alone_decides_how_finely_private_pools_split() -> None:
    for version, blocks in (((2, 4), 1), ((2, 10), 0)):
        config = AllocatorConfig(version=version, expandable_segments=True)
        m = Machine(config, pools=2)
        m.state.list_of(1, False, 0)
        if version >= (2, 10):
            m.state.expands[0], m.state.fine[0] = False, False  # a pool with its own allocator
        filled(m, 19.5, pool=1)
        assert len(m.free_blocks()) == blocks


def test_a_retry_without_anything_to_free_still_counts() -> None:
    m = Machine(AllocatorConfig(limit_bytes=10 * MIB))
    assert m.alloc(20) is None
    assert (m.retries, m.allocator.num_ooms, m.allocator.num_flushes) == (1, 1, 1)


def test_preemptive_rejection_reclaims_nothing_and_is_no_oom() -> None:
    m = Machine(AllocatorConfig(preempt_bytes=50 * MIB))
    (name,) = filled(m, 30)
    m.free(name)
    assert m.alloc(40) is None
    assert (m.reserved, m.retries, m.allocator.num_ooms, m.allocator.num_oom_rejections) == (30, 0, 0, 1)


def test_frees_of_a_retry_do_not_inflate_the_peak() -> None:
    m = Machine(AllocatorConfig(limit_bytes=100 * MIB))
    (name,) = filled(m, 60)
    m.free(name)
    filled(m, 70)
    assert m.state.peak_bytes == 70 * MIB
    assert m.counters.table()["reserved_bytes.all.peak"] == 70 * MIB


def test_three_way_merge_in_any_order() -> None:
    layouts = set()
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        m = Machine()
        names = filled(m, 4, 4, 4)
        base = m.address(names[0])
        for i in order:
            m.free(names[i])
        layouts.add(tuple((address - base, size) for address, size in m.free_blocks()))
    assert layouts == {((0, 20 * MIB),)}


def test_neighbouring_segments_do_not_merge() -> None:
    m = Machine(policy=Policy.RISING)
    names = filled(m, 30, 30)
    assert m.address(names[1]) == m.address(names[0]) + 30 * MIB
    for name in names:
        m.free(name)
    assert [size // MIB for _, size in m.free_blocks()] == [30, 30]


def test_ties_go_to_the_lowest_address() -> None:
    for policy in (Policy.RISING, Policy.FALLING, Policy.DRIVER):
        m = Machine(policy=policy)
        names = filled(m, 30, 30, 30)
        lowest = min(m.address(name) for name in names)
        for name in names:
            m.free(name)
        (again,) = filled(m, 30)
        assert m.address(again) == lowest


def test_a_failed_oversize_release_stays_released() -> None:
    m = Machine(AllocatorConfig(max_split_bytes=64 * MIB, limit_bytes=220 * MIB))
    keep, name = filled(m, 60, 100)
    m.free(name)
    m.events()
    assert m.alloc(200) is None
    assert m.events() == [("free", 100)]
    assert m.retries == 1
    m.free(keep)


def test_empty_cache_with_nothing_to_release() -> None:
    m = Machine()
    m.empty_cache()
    m.empty_cache()
    assert m.events() == []
    assert m.allocator.num_flushes == 2


def test_version_2_0_leaves_sizes_alone_with_one_division() -> None:
    assert round_size(3 * MIB + 1, AllocatorConfig(version=(2, 0), roundup_divisions=(1,) * 16)) == 3 * MIB + 1
    assert round_size(3 * MIB + 1, AllocatorConfig(version=(2, 1), roundup_divisions=(1,) * 16)) == 3_146_240


def test_bypass_threshold_of_1_13() -> None:
    config = AllocatorConfig(version=(1, 13), roundup_divisions=(4,) * 16, roundup_bypass_bytes=50 * MIB)
    assert round_size(84 * MIB, config) == 84 * MIB
    assert round_size(42 * MIB, config) == 48 * MIB


def test_requests_near_the_largest() -> None:
    assert round_size(0, AllocatorConfig()) == 512
    assert round_size((1 << 60) - 1, AllocatorConfig()) == 1 << 60
    sizes = np.array([0, 1, 1 << 60, (1 << 60) - 5], dtype=np.int64)
    assert round_sizes(sizes, AllocatorConfig()).tolist() == [512, 512, 1 << 60, 1 << 60]


def test_driver_like_addresses_share_what_a_reservation_leaves_unused() -> None:
    m = Machine(policy=Policy.DRIVER)
    a, b = filled(m, 12, 14)
    assert m.address(b) == m.address(a) + 12 * MIB
    (c,) = filled(m, 40)
    assert m.address(c) < m.address(a)
    assert m.address(c) % (32 * MIB) == 0


@pytest.mark.parametrize("part", [1, 3, 7, 1 << 18])
def test_the_next_anchor_however_the_trace_is_cut(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushes, "_PART", part)
    action = np.random.default_rng(part).integers(0, len(Action), 40).astype(np.uint8)
    action[-5:] = Action.FREE_COMPLETED
    anchors = [i for i, kind in enumerate(action.tolist()) if kind in (Action.ALLOC, Action.FREE_REQUESTED, Action.OOM)]
    for rows in (np.arange(40), np.array([0, 17, 39]), np.zeros(0, np.int64)):
        expected = [min([i for i in anchors if i >= row], default=40) for row in rows.tolist()]
        assert flushes.next_anchor(action, rows).tolist() == expected


def test_many_sizes_are_rounded_as_one_is() -> None:
    config = AllocatorConfig()
    sizes = [0, 1, 511, 512, 513, 1024, 3_764_387_840, (1 << 40) + 1]
    assert round_sizes(np.array(sizes, np.int64), config).tolist() == [max(round_size(n, config), 512) for n in sizes]
