"""Worked examples of the allocator's rules; sizes in MiB unless a unit is given."""

from __future__ import annotations

import pytest
from allocator_machine import MIB, Machine

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import round_size, segment_size


def machine(**settings: object) -> Machine:
    config: dict[str, object] = {}
    for name, value in settings.items():
        if name in ("limit", "max_split", "non_split"):
            field = {
                "limit": "limit_bytes",
                "max_split": "max_split_bytes",
                "non_split": "max_non_split_rounding_bytes",
            }
            config[field[name]] = round(float(value) * MIB)  # type: ignore[arg-type]
        else:
            config[name] = value
    return Machine(AllocatorConfig(**config))  # type: ignore[arg-type]


def filled(m: Machine, *sizes: float, stream: int = 0) -> list[int]:
    names = [m.alloc(size, stream) for size in sizes]
    assert None not in names
    return names  # type: ignore[return-value]


def cached(m: Machine, *sizes: float, stream: int = 0) -> None:
    for name in filled(m, *sizes, stream=stream):
        m.free(name)


def test_cached_small_segments_do_not_serve_larger_requests() -> None:
    m = machine()
    cached(m, *[16] * 8)
    assert m.reserved == 128
    filled(m, *[32] * 4)
    assert m.reserved == 256
    assert len(m.state.whole) == 12


def test_cached_large_segments_serve_smaller_requests() -> None:
    m = machine()
    cached(m, *[32] * 4)
    filled(m, *[16] * 8)
    assert (m.reserved, len(m.state.whole)) == (128, 4)


def test_expandable_segments_grow_by_pages_and_join() -> None:
    m = machine(expandable_segments=True)
    reserved = []
    names = []
    for _ in range(8):
        names += filled(m, 16)
        reserved.append(m.reserved)
    assert reserved == [20, 40, 60, 80, 80, 100, 120, 140]
    for name in names:
        m.free(name)
    filled(m, *[32] * 4)
    assert m.reserved == 140


def test_expandable_segments_do_not_join_what_lives_between() -> None:
    m = machine(expandable_segments=True)
    names = filled(m, *[16] * 4)
    assert m.reserved == 80
    m.free(names[0])
    m.free(names[2])
    filled(m, 32)
    assert m.reserved == 100


def test_medium_requests_share_one_large_segment_exactly() -> None:
    m = machine()
    filled(m, 9, 9, 2)
    assert (m.reserved, m.allocated, m.free_blocks()) == (20, 20 * MIB, [])


@pytest.mark.parametrize(
    ("requested", "segment"), [(10 * MIB, 10), (10 * MIB - 1, 10), (10 * MIB - 512, 20), (MIB, 2), (MIB + 1, 20)]
)
def test_segment_sizes_at_the_boundaries(requested: int, segment: int) -> None:
    config = AllocatorConfig()
    assert segment_size(round_size(requested, config), config) == segment * MIB


def test_a_remainder_of_one_mib_is_not_split_off() -> None:
    m = machine()
    (name,) = filled(m, 19)
    assert (m.reserved, m.block(name), m.allocated) == (20, 20 * MIB, 20 * MIB)
    m = machine()
    name = m.alloc(19 * MIB - 512, unit=1)
    assert name is not None
    assert m.block(name) == 19 * MIB - 512


def test_the_small_limit_is_inclusive_and_tested_after_rounding() -> None:
    m = machine()
    small, large = m.alloc(1), m.alloc(MIB + 1, unit=1)
    assert small is not None and large is not None
    assert m.events() == [("alloc", 2), ("alloc", 20)]
    assert m.block(large) == 1_049_088
    assert m.allocated == 2_097_664


def test_small_blocks_are_multiples_of_512() -> None:
    m = machine()
    names = [m.alloc(size, unit=1) for size in (1, 512, 513)]
    assert [m.block(n) for n in names if n is not None] == [512, 512, 1024]
    base = m.address(0)
    assert [m.address(n) - base for n in names if n is not None] == [0, 512, 1024]


def test_max_split_keeps_large_blocks_for_large_requests() -> None:
    m = machine(max_split=128)
    cached(m, 200)
    filled(m, 64)
    assert m.reserved == 264
    (name,) = filled(m, 185)
    assert (m.reserved, m.block(name) // MIB, m.allocated // MIB) == (264, 200, 264)


def test_max_split_refuses_a_block_that_is_too_much_larger() -> None:
    m = machine(max_split=128)
    cached(m, 200)
    filled(m, 180)  # 200 is not below 180 + 20
    assert m.reserved == 380


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        (4, 1200, 1536), (4, 2048, 2048), (4, 2049, 2560), (4, 84 * MIB, 96 * MIB), (8, 3 * MIB + 1, 3_407_872),
        (2, 400, 512), (1, 3 * MIB + 1, 3_146_240), (2, 800 * 1024, MIB), (2, 1_150_000, 3 * MIB // 2),
    ],
)  # fmt: skip
def test_power_of_two_rounding(divisions: int, requested: int, rounded: int) -> None:
    config = AllocatorConfig(roundup_divisions=(divisions,) * 16)
    assert round_size(requested, config) == rounded
    assert round_size(rounded, config) == rounded


def test_the_limit_makes_malloc_flush_and_retry() -> None:
    m = machine(limit=100)
    first, _ = filled(m, 40, 40)
    m.free(first)
    m.events()
    filled(m, 60)
    assert m.events() == [("free", 40), ("alloc", 60)]
    assert m.retries == 1


def test_garbage_of_equal_age_goes_all_at_once() -> None:
    m = machine(limit=400, gc_threshold=0.5)
    names = filled(m, 60, 70, 80)
    for name in names:
        m.free(name)
    m.events()
    filled(m, 90)
    assert m.events() == [("free", 60), ("free", 70), ("free", 80), ("alloc", 90)]
    assert (m.reserved, m.retries) == (90, 0)


def test_garbage_goes_by_age() -> None:
    m = machine(limit=400, gc_threshold=0.5)
    for size in (60, 70, 80):
        cached_one = m.alloc(size)
        assert cached_one is not None
        m.free(cached_one)
    # Each request missed the smaller segments cached before it.
    assert m.reserved == 210
    m.events()
    filled(m, 90)
    assert m.events() == [("free", 60), ("free", 70), ("alloc", 90)]
    assert (m.reserved, m.retries) == (170, 0)


def test_pools_do_not_share() -> None:
    m = machine()
    filled(m, 2, 0.5)
    assert m.reserved == 22
    m = machine()
    filled(m, 2, 2)
    assert m.reserved == 20


def test_oversize_release_is_no_retry() -> None:
    m = machine(max_split=64, limit=300)
    for name in filled(m, 100, 80):
        m.free(name)
    m.events()
    filled(m, 160)
    assert m.events() == [("free", 100), ("free", 80), ("alloc", 160)]
    assert m.retries == 0


def test_oversize_release_that_does_not_reach_is_followed_by_a_flush() -> None:
    m = machine(max_split=64, limit=300)
    for name in filled(m, 100, 80):
        m.free(name)
    m.events()
    filled(m, 200)
    assert m.events() == [("free", 100), ("free", 80), ("alloc", 200)]
    assert m.retries == 1


def test_no_search_after_the_flush() -> None:
    m = machine(limit=40)
    a, _, _ = filled(m, 6, 6, 8)
    filled(m, 18)
    m.defer(a)
    assert m.alloc(6) is None  # the flush completes a, the limit refuses another segment, and nobody looks again
    reserved = m.reserved
    assert m.alloc(6) is not None
    assert m.reserved == reserved


def test_the_limit_may_be_reached_exactly() -> None:
    m = machine(limit=40)
    filled(m, 20, 20)
    assert m.alloc(512, unit=1) is None
    assert m.retries == 1


def test_expandable_pages_may_overshoot_the_limit() -> None:
    m = machine(expandable_segments=True, limit=35)
    filled(m, 16, 11)
    assert m.reserved == 40


def test_the_limit_check_counts_the_whole_segment_even_where_a_page_would_do() -> None:
    m = machine(expandable_segments=True, limit=70)
    filled(m, 21)
    assert m.reserved == 40
    assert m.alloc(39) is None


def test_pending_memory_is_not_reused() -> None:
    m = machine()
    (first,) = filled(m, 5)
    base = m.address(first)
    m.defer(first)
    (second,) = filled(m, 5)
    assert m.address(second) - base == 5 * MIB


def test_the_search_does_not_look_behind_a_refused_candidate() -> None:
    m = machine(max_split=64)
    for name in filled(m, 70, 64):
        m.free(name)
    (name,) = filled(m, 64)
    assert m.block(name) == 64 * MIB
    m.events()
    filled(m, 50)
    assert m.events() == [("alloc", 50)]


@pytest.mark.parametrize(("requested", "reserved"), [(71, 100), (70, 170)])
def test_non_split_rounding(requested: int, reserved: int) -> None:
    m = machine(max_split=64, non_split=30)
    cached(m, 100)
    (name,) = filled(m, requested)
    assert m.reserved == reserved
    assert m.block(name) == (100 if reserved == 100 else 70) * MIB


def test_unmapping_leaves_partial_pages_that_serve_again() -> None:
    m = machine(expandable_segments=True)
    names = filled(m, *[16] * 5)
    assert m.reserved == 80
    base = m.address(names[0])
    for name in names[1:4]:
        m.free(name)
    m.events()
    m.empty_cache()
    assert m.events() == [("unmap", 40)]
    assert m.free_blocks() == [(base + 16 * MIB, 4 * MIB), (base + 60 * MIB, 4 * MIB)]
    (name,) = filled(m, 30)
    assert m.address(name) == base + 16 * MIB
    assert m.events() == [("map", 40)]


def test_release_order() -> None:
    m = machine()
    names = filled(m, 30, 12, 1) + filled(m, 12, stream=5)
    for name in names:
        m.free(name)
    m.events()
    m.empty_cache()
    assert m.events() == [("free", 12), ("free", 30), ("free", 12), ("free", 2)]


def test_a_flush_covers_all_streams() -> None:
    m = machine(limit=60)
    cached(m, 40, stream=1)
    m.events()
    filled(m, 30, stream=2)
    assert m.events() == [("free", 40), ("alloc", 30)]
    assert m.retries == 1
