"""The memory of a card that is not there: the allocator model, one call at a time, with PyTorch's books about it.

Requests come from the allocator of the dry device as the program runs, so a request that the card could not serve is
refused where the run would die. Sizes are bytes, times are µs of the wall clock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memtrace.allocator.config import AllocatorConfig, fraction_limit
from memtrace.allocator.export import segments_of, settings_of
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, segment_size
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.state import AllocatorState
from memtrace.allocator.whatif.addresses import CardDriver
from memtrace.estimate.dryrun.elsewhere import Elsewhere
from memtrace.estimate.dryrun.stacks import DryStacks
from memtrace.estimate.dryrun.streams import Moment, Streams
from memtrace.estimate.presets import GpuPreset
from memtrace.units import GIB, KIB, MIB

#: What CUDA's context leaves free below the first segment: of 47 recorded programs those that outgrew it had put 336
#: MiB there in the median (88 to 540), from below, and went 1.7 GiB lower then.
_FIRST_GAP_BYTES = 384 * MIB
_POOLS = ("small_pool", "large_pool")
_COUNTED = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes", "allocation", "active", "segment")
_REFUSED = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of which {free} is free. "
    "{allowed}Including non-PyTorch memory, this process has {used} memory in use. Of the allocated memory {allocated} "
    "is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#"
    "optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


@dataclass(frozen=True, slots=True)
class _Held:
    """A block that was given up while other streams may still use it."""

    address: int
    number: int
    block: int
    requested: int
    stack: int
    pool: int
    until: tuple[tuple[int, Moment], ...]


class _Driver(CardDriver):
    """The driver of a fresh process, whose first segments fill a gap from below, and which a flush makes wait."""

    def __init__(self, config: AllocatorConfig, complete: Callable[[], None]) -> None:
        super().__init__(config)
        self._complete = complete
        gap = self.space.place(_FIRST_GAP_BYTES - 2 * MIB, 0)
        self.space.place(2 * MIB, 0)  # the context's own, which keeps the gap
        self.space.give_back(gap)

    def complete_pending(self, state: AllocatorState) -> None:
        self._complete()


class DryMemory:
    """Memory of ``gpu``: ``total_bytes`` in all, of which the process holds ``outside_bytes`` beside the allocator."""

    def __init__(self, gpu: GpuPreset, total_bytes: int, config: AllocatorConfig) -> None:
        self.gpu, self.total_bytes, self.outside_bytes = gpu, total_bytes, gpu.outside_bytes
        self.config = config.with_limit(max(0, total_bytes - gpu.outside_bytes))
        self.fraction = 1.0 if config.memory_fraction is None else config.memory_fraction
        self.stacks = DryStacks()
        self.drain: Callable[[], None] = lambda: None  # has deaths told that wait for their time
        self.resize: Callable[[int, int], int] = lambda _storage, _bytes: 0  # a storage's, in place; 0 if it is refused
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.follower: Any = None  # is told of births and deaths
        self.elsewhere: list[Elsewhere] = []  # the run under other addresses
        self.refusal = ""
        self.refused: tuple[int, int] | None = None  # bytes and stack of the last request that was refused
        self.streams = Streams()
        self._uses: defaultdict[int, set[int]] = defaultdict(set)  # by other streams than a block's own
        self._held: list[_Held] = []
        self._driver = _Driver(self.config, self._wait_for_all)
        self._allocator = Allocator(self.config, self._driver)
        self._live: dict[int, tuple[int, int, int, int, int]] = {}  # address: free list, block, request, stack, pool
        self._levels: dict[str, list[int]] = {}  # current, peak, allocated, freed
        self._trace: deque[tuple[str, int, int, int, int, int, str]] = deque(maxlen=0)
        self._local = threading.local()
        self._lock = threading.RLock()
        self.is_recording = False
        self.course = 0  # a number for the births and deaths since it was last set to 0, in order
        self.most = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes"), 0)  # never reset
        for name in _COUNTED:
            for pool in ("all", *_POOLS):
                self._levels[f"{name}.{pool}"] = [0, 0, 0, 0]
        self.set_fraction(self.fraction)

    @property
    def stream(self) -> int:
        """The calling thread's current stream."""
        return getattr(self._local, "stream", 0)

    @stream.setter
    def stream(self, number: int) -> None:
        self._local.stream = number

    # ---- requests ------------------------------------------------------------------------------------------------
    def allocate(self, size: int) -> int:
        """Address of a new block; 0 if the card has no room, with the reason in ``refusal``."""
        with self._lock:
            self._complete()
            rounded = round_size(size, self.config)
            is_small = rounded <= SMALL_LIMIT_BYTES
            number = self._allocator.state.list_of(0, is_small, self.stream)
            stack = self.stacks.here()
            served = self._allocator.malloc(number, rounded)
            self._note_segments(stack)
            if served is None:
                self._refuse(size, segment_size(rounded, self.config), stack, number)
                return 0
            address, block = served
            self._live[address] = number, block, size, stack, int(not is_small)
            for other in self.elsewhere:
                other.born(address, rounded, self.stream)
            self.course = hash((self.course, size))
            pool = int(not is_small)
            self._count(pool, allocated_bytes=block, requested_bytes=size, active_bytes=block, allocation=1, active=1)
            if self.follower is not None:
                self.follower.born(address, size, stack)
            self._note("alloc", address, size, stack, number)
            return address

    def use(self, address: int, stream: int) -> None:
        """``record_stream``: the block must outlast what ``stream`` was asked until it is given up."""
        with self._lock:
            if address in self._live and self._allocator.state.ids[self._live[address][0]].stream != stream:
                self._uses[address].add(stream)

    def wait(self) -> None:
        """The host waits for the current stream."""
        with self._lock:
            self.streams.wait(self.streams.moment(self.stream))

    def release(self, address: int) -> None:
        """The block at ``address`` is free again, at once or when the streams that use it are through."""
        with self._lock:
            number, block, size, _, pool = self._live.pop(address)
            self.course = hash((self.course, -size))
            self._count(pool, allocated_bytes=-block, allocation=-1)
            for other in self.elsewhere:
                if other.keeps_up:
                    other.freed(address)
            if self.follower is not None:
                self.follower.gone(address)
            stack = self.stacks.here() if self.is_recording else 0
            self._note("free_requested", address, size, stack, number)
            uses = self._uses.pop(address, ())
            until = tuple((one, self.streams.moment(one)) for one in uses) if self.streams.is_ahead else ()
            held = _Held(address, number, block, size, stack, pool, until)
            if until:
                self._held.append(held)
            else:
                self._free(held)

    def _complete(self) -> None:
        """Free what no stream uses any more."""
        for held in list(self._held):
            if all(self.streams.is_over(one, moment) for one, moment in held.until):
                self._held.remove(held)
                self._free(held)

    def _free(self, held: _Held) -> None:
        self._allocator.state.release(held.number, held.address, held.block)
        for other in self.elsewhere:
            other.freed(held.address)
        self._count(held.pool, requested_bytes=-held.requested, active_bytes=-held.block, active=-1)
        self._note("free_completed", held.address, held.requested, held.stack, held.number)

    def _wait_for_all(self) -> None:
        self.streams.wait_for_all()
        self._complete()

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``."""
        self.drain()
        with self._lock:
            self._allocator.flush()
            for other in self.elsewhere:
                other.flush()
            if self.follower is not None:
                self.follower.tape.empty_cache()
            self._note_segments(self.stacks.here())

    def _note_segments(self, stack: int) -> None:
        for change in self._driver.log:
            sign = -1 if change.freed else 1
            self._count(int(change.size > 2 * MIB), reserved_bytes=sign * change.size, segment=sign)
            self._note(change.action.name.lower(), change.address, change.size, stack, change.number)
        self._driver.log.clear()

    def _refuse(self, size: int, segment: int, stack: int, number: int) -> None:
        free, held = self.free_bytes, self._levels["reserved_bytes.all"][0]
        allocated = self._levels["allocated_bytes.all"][0]
        limit = "" if self.fraction >= 1 else f"{_text(int(self.fraction * self.total_bytes))} allowed; "
        self.refusal = _REFUSED.format(
            tried=_text(segment), total=_text(self.total_bytes), free=_text(free), allowed=limit,
            used=_text(held + self.outside_bytes), allocated=_text(allocated), cached=_text(held - allocated),
        )  # fmt: skip
        self.refused = segment, stack
        self._note("oom", free, size, stack, number)
        for observer in self.observers:
            observer(0, segment, self.total_bytes, free)

    def set_fraction(self, fraction: float) -> None:
        """``set_per_process_memory_fraction``."""
        self.fraction = fraction
        most = fraction_limit(fraction, self.total_bytes, self.config.version)
        room = max(0, self.total_bytes - self.outside_bytes)
        limited = self.config.with_limit(room if most is None else min(room, most))
        self.config = self._driver.config = self._allocator.config = self._allocator.state.config = limited
        for other in self.elsewhere:
            other.limit(limited)

    # ---- books ---------------------------------------------------------------------------------------------------
    @property
    def free_bytes(self) -> int:
        """What the device has left."""
        return max(0, self.total_bytes - self.outside_bytes - self._levels["reserved_bytes.all"][0])

    def _count(self, pool: int, **changes: int) -> None:
        for name, change in changes.items():
            for which in ("all", _POOLS[pool]):
                level = self._levels[f"{name}.{which}"]
                level[0] += change
                level[1] = max(level[1], level[0])
            if name in self.most:
                self.most[name] = max(self.most[name], self._levels[f"{name}.all"][0])
                level[2 if change > 0 else 3] += abs(change)

    def stats(self) -> dict[str, Any]:
        """What ``torch.cuda.memory_stats_as_nested_dict`` takes from the allocator."""
        self.drain()
        nested: dict[str, Any] = {}
        for name, level in self._levels.items():
            key, _, pool = name.partition(".")
            nested.setdefault(key, {})[pool] = dict(zip(("current", "peak", "allocated", "freed"), level, strict=True))
        state = self._allocator.state
        idle = sum(size for start, size in state.free_at.items() if start not in state.whole)
        empty = {pool: {"current": 0, "peak": 0, "allocated": 0, "freed": 0} for pool in ("all", *_POOLS)}
        split = {pool: dict(entry) for pool, entry in empty.items()}
        split["all"]["current"] = idle
        allocator = self._allocator
        return nested | {
            "inactive_split": empty,
            "inactive_split_bytes": split,
            "oversize_allocations": empty["all"],
            "oversize_segments": empty["all"],
            "max_split_size": -1 if self.config.max_split_bytes is None else self.config.max_split_bytes,
            "num_alloc_retries": allocator.num_alloc_retries,
            "num_ooms": allocator.num_ooms + allocator.num_oom_rejections,
            "num_sync_all_streams": allocator.num_flushes,
            "num_device_alloc": self._driver.segment_allocs,
            "num_device_free": self._driver.segment_frees,
        }

    def reset_peaks(self) -> None:
        """``reset_peak_memory_stats``."""
        for level in self._levels.values():
            level[1] = level[0]

    def record(self, max_entries: int | None) -> None:
        """Keep the newest ``max_entries`` events from now on; None stops."""
        self.is_recording = max_entries is not None
        self._trace = deque(maxlen=max_entries or 0)

    def set_metadata(self, text: str) -> None:
        """Stamp the calling thread's next events."""
        self._local.metadata = text

    def _note(self, action: str, address: int, size: int, stack: int, number: int) -> None:
        if self.is_recording:
            now_us, stream = time.time_ns() // 1000, self._allocator.state.ids[number].stream
            self._trace.append((action, address, size, stream, now_us, stack, getattr(self._local, "metadata", "")))

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns."""
        self.drain()
        with self._lock:
            events, live = list(self._trace), list(self._live.items())  # a collection on the way may free blocks
            frames = self.stacks.frames()
            trace = []
            for action, address, size, stream, time_us, stack, metadata in events:
                where = "device_free" if action == "oom" else "addr"
                entry = {"action": action, where: address, "size": size, "stream": stream, "time_us": time_us}
                trace.append(entry | {"frames": frames[stack], "user_metadata": metadata})
            used = [(at, block, size, "active_allocated", frames[stack]) for at, (_, block, size, stack, _) in live]
            used += [(x.address, x.block, x.requested, "active_pending_free", frames[x.stack]) for x in self._held]
            return {
                "segments": segments_of(self._allocator.state, used),
                "device_traces": [trace],
                "allocator_settings": settings_of(self.config),
                "external_annotations": [],
            }


def _text(size: int) -> str:
    """A size as PyTorch prints it (``format_size``)."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
