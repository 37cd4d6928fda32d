"""Any sequence of requests under any settings: memory is conserved, nothing overlaps, free neighbours are joined."""

from __future__ import annotations

from allocator_machine import MIB, Machine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.export import mapped_ranges
from memtrace.allocator.whatif.addresses import Policy

SIZES = st.one_of(
    st.sampled_from(
        [1, 511, 512, 513, MIB - 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB]
    ),
    st.integers(1, 4 * MIB),
    st.integers(1, 200 * MIB),
)
CONFIGS = st.builds(
    AllocatorConfig,
    version=st.sampled_from([(2, 0), (2, 4), (2, 9), (2, 15)]),
    max_split_bytes=st.sampled_from([None, None, 21 * MIB, 64 * MIB]),
    max_non_split_rounding_bytes=st.sampled_from([20 * MIB, 40 * MIB]),
    gc_threshold=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
    roundup_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (1,) * 16]),
    expandable_segments=st.booleans(),
    limit_bytes=st.sampled_from([None, 300 * MIB, 1000 * MIB]),
)


class Allocating(RuleBasedStateMachine):
    @initialize(config=CONFIGS, policy=st.sampled_from(list(Policy)))
    def start(self, config: AllocatorConfig, policy: Policy) -> None:
        if config.version <= (2, 0) and 1 in config.roundup_divisions:
            config = AllocatorConfig()  # that release leaves sizes unaligned
        self.m = Machine(config, policy, pools=2)

    @rule(size=SIZES, stream=st.sampled_from([0, 0, 0, 7]), pool=st.sampled_from([0, 0, 0, 1]))
    def alloc(self, size: int, stream: int, pool: int) -> None:
        ooms = self.m.allocator.num_ooms
        name = self.m.alloc(size, stream, pool, unit=1)
        assert (name is None) == (self.m.allocator.num_ooms > ooms)
        if name is not None:
            assert self.m.block(name) >= size

    @precondition(lambda self: self.m.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.m.free(data.draw(st.sampled_from(sorted(self.m.live))))

    @precondition(lambda self: self.m.live)
    @rule(data=st.data())
    def defer(self, data: st.DataObject) -> None:
        self.m.defer(data.draw(st.sampled_from(sorted(self.m.live))))

    @precondition(lambda self: self.m.pending)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.m.complete(data.draw(st.sampled_from(sorted(self.m.pending))))

    @rule()
    def empty_cache(self) -> None:
        self.m.empty_cache()
        assert not self.m.pending

    @rule()
    def graph_is_destroyed(self) -> None:
        self.m.last_use[1] = -2

    @invariant()
    def segments_are_tiled(self) -> None:
        if not hasattr(self, "m"):
            return
        m = self.m
        free = dict(m.free_blocks())
        used = {address: size for _, address, size, _ in [*m.live.values(), *m.pending.values()]}
        assert not free.keys() & used.keys()
        blocks = sorted({**free, **used}.items())
        at = total = 0
        for address, size, number, _ in mapped_ranges(m.state):
            position, was_free = address, False
            while position < address + size:
                assert at < len(blocks) and blocks[at][0] == position, "a gap, or an overlap"
                is_free = position in free
                # Ranges of one reservation that touch were joined into one, so neighbours are real neighbours.
                assert not (was_free and is_free), "free neighbours that were not joined"
                if is_free:
                    key = free[position] << 64 | position
                    assert key in m.state.lists[number]
                was_free = is_free
                position += blocks[at][1]
                at += 1
            assert position == address + size
            total += size
        assert at == len(blocks)
        assert total == m.state.total_bytes
        assert sum(len(keys) for keys in m.state.lists) == len(free)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "m"):
            return
        config = self.m.config
        if config.limit_bytes is not None:
            page = config.large_segment_bytes if config.expandable_segments else 0
            assert self.m.state.total_bytes < config.limit_bytes + max(page, 1)
        table = self.m.counters.table()
        assert table["reserved_bytes.all.current"] == self.m.state.total_bytes
        assert table["allocated_bytes.all.current"] == self.m.allocated
        assert table["reserved_bytes.all.peak"] == self.m.state.peak_bytes

    @invariant()
    def inactive_splits_are_counted(self) -> None:
        if not hasattr(self, "m"):
            return
        state = self.m.state
        split = [
            key >> 64
            for number, keys in enumerate(state.lists)
            for key in keys
            if not state.is_whole(key) and state.reservation_of(number, key & ((1 << 64) - 1)) is None
        ]
        table = self.m.counters.table()
        assert table["inactive_split.all.current"] == len(split)
        assert table["inactive_split_bytes.all.current"] == sum(split)


TestAllocating = Allocating.TestCase
TestAllocating.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
