"""The allocator's memory: segments, free lists and reservations, and the moves that change them.

Free blocks of one free list (pool, small or large, stream) are kept as sorted integers ``size << 64 | address``:
one bisection finds the best fit with the lowest address on ties, which is PyTorch's order. Live blocks are not
stored here; their owners know address and size. Addresses and sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, NamedTuple

from memtrace import compiled
from memtrace.allocator.config import AllocatorConfig

SHIFT = 64
MASK = (1 << SHIFT) - 1
SMALL_SPLIT_BYTES = 512
LARGE_SPLIT_BYTES = 1 << 20  # a remainder must be larger than this to be split off
SMALL_PAGE_BYTES = 2 << 20


_COMPILED = compiled.part("allocator")


class ListId(NamedTuple):
    """What a free list belongs to. ``pool`` indexes the owner's pool ids; ``stream`` is the handle as unsigned."""

    pool: int
    small: bool
    stream: int


@dataclass(slots=True)
class Reservation:
    """One expandable segment: a virtual range of which whole pages are mapped."""

    base: int
    length: int
    page_bytes: int


class AllocatorState:
    """Everything that is not live: free blocks, segments, unmapped ranges. Moves keep all tables consistent.

    ``total_bytes`` is what the allocator holds in all pools and ``peak_bytes`` its highest value so far.
    ``whole[address]`` is the size of an ordinary segment, ``bounds`` the addresses where a segment or reservation
    starts, across which blocks never merge. By free list: ``expands`` says whether it grows by expandable segments,
    ``fine`` whether any remainder of 512 bytes is split off.
    """

    def __init__(self, config: AllocatorConfig) -> None:
        self.config = config
        # Compiled containers behave as the builtin ones do, and flat.run is fast on them. Ages are kept in Python,
        # which is faster on its own containers.
        part = None if config.gc_active else _COMPILED
        self.is_compiled = part is not None
        self._list: Any = part.KeyList if part else list
        table: Any = part.AddressMap if part else dict
        self.lists: list[list[int]] = []
        self.ids: list[ListId] = []
        self.index: dict[ListId, int] = {}
        self.expands: list[bool] = []
        self.fine: list[bool] = []
        self.free_at: dict[int, int] = table()  # start -> size
        self.free_end: dict[int, int] = table()  # end -> start
        self.whole: dict[int, int] = {}
        self.owner: dict[int, int] = {}  # ordinary segment or reservation base -> free list
        self.bounds: set[int] = part.AddressSet() if part else set()
        self.reservations: dict[int, list[Reservation]] = {}  # free list -> live reservations
        self.unmapped: dict[int, list[int]] = {}  # free list -> sorted starts
        self.unmapped_at: dict[int, int] = table()  # start -> size
        self.unmapped_end: dict[int, int] = table()  # end -> start
        self.total_bytes = self.peak_bytes = 0
        self.searches: dict[tuple[int, bool], int] = {}  # (pool, small) -> searches so far, for GC ages
        self.born: dict[int, int] = {}  # free block start -> searches when it entered its free list

    def list_of(self, pool: int, small: bool, stream: int) -> int:
        """The number of a free list, made on first use."""
        name = ListId(pool, small, stream & MASK)
        number = self.index.get(name)
        if number is None:
            number = self.index[name] = len(self.lists)
            self.lists.append(self._list())
            self.ids.append(name)
            config = self.config
            expands = config.expandable_segments and (pool == 0 or config.private_pools_expand)
            self.expands.append(expands)
            self.fine.append(small or expands or (config.expandable_segments and config.split_looks_at_flag))
        return number

    def page_bytes(self, number: int) -> int:
        """Page of expandable segments behind a free list."""
        return SMALL_PAGE_BYTES if self.ids[number].small else self.config.large_segment_bytes

    # Free blocks -----------------------------------------------------------------------------------------

    def insert(self, number: int, address: int, size: int) -> None:
        """Put a block into its free list as it is, without merging."""
        key = size << SHIFT | address
        insort(self.lists[number], key)
        self.free_at[address] = size
        self.free_end[address + size] = address
        if self.config.gc_active:
            name = self.ids[number]
            self.born[address] = self.searches.get((name.pool, name.small), 0)

    def remove(self, number: int, key: int) -> tuple[int, int]:
        """Take a block out of its free list; returns (address, size)."""
        free = self.lists[number]
        del free[bisect_left(free, key)]
        address, size = key & MASK, key >> SHIFT
        del self.free_at[address]
        del self.free_end[address + size]
        self.born.pop(address, None)
        return address, size

    def release(self, number: int, address: int, size: int) -> None:
        """A block becomes free: it merges with free neighbours of its segment and enters the free list."""
        end = address + size
        behind = self.free_at.get(end)
        if behind is not None and end not in self.bounds:
            size += self.remove(number, behind << SHIFT | end)[1]
        start = self.free_end.get(address)
        if start is not None and address not in self.bounds:
            size += self.remove(number, self.free_at[start] << SHIFT | start)[1]
            address = start
        self.insert(number, address, size)

    def search(self, number: int, size: int) -> int | None:
        """Key of the free block that a rounded request takes, or None. Only the best fit is ever considered."""
        config = self.config
        if config.gc_active:
            name = self.ids[number]
            self.searches[name.pool, name.small] = self.searches.get((name.pool, name.small), 0) + 1
        free = self.lists[number]
        position = bisect_left(free, size << SHIFT)
        if number in self.reservations:
            found = self._search_expandable(number, position)
            if found is None:
                return None
            position = found
        if position == len(free):
            return None
        key = free[position]
        limit = config.max_split_bytes
        if limit is not None:
            found_size = key >> SHIFT
            if size < limit:
                if found_size >= limit:
                    return None
            elif found_size >= size + config.max_non_split_rounding_bytes:
                return None
        return key

    def _search_expandable(self, number: int, position: int) -> int | None:
        free = self.lists[number]
        if not self.expands[number]:
            while position < len(free) and self.reservation_of(number, free[position] & MASK):
                position += 1
            return position
        while position + 1 < len(free) and self.reservation_of(number, free[position] & MASK):
            if self._extent(free[position + 1]) >= self._extent(free[position]):
                break
            position += 1
        return position

    def _extent(self, key: int) -> int:
        size = key >> SHIFT
        return size + self.unmapped_at.get((key & MASK) + size, 0)

    def take(self, number: int, key: int, size: int) -> tuple[int, int]:
        """Hand out a free block for a rounded request, splitting the rest off; returns (address, block bytes)."""
        config = self.config
        address, have = self.remove(number, key)
        rest = have - size
        if self.fine[number]:
            split = rest >= SMALL_SPLIT_BYTES
        else:
            limit = config.max_split_bytes
            split = rest > LARGE_SPLIT_BYTES and (limit is None or size < limit)
        if split:
            self.insert(number, address + size, rest)
        else:
            size = have
        return address, size

    def is_whole(self, key: int) -> bool:
        """Whether a free block is an ordinary segment that nothing else shares."""
        return self.whole.get(key & MASK) == key >> SHIFT

    # Segments --------------------------------------------------------------------------------------------

    def add_segment(self, number: int, address: int, size: int) -> None:
        """Book an ordinary segment; its blocks are put in by the caller."""
        self.whole[address] = size
        self.owner[address] = number
        self.bounds.add(address)
        self.grew(number, size)

    def grew(self, number: int, size: int) -> None:
        """Reserved memory grew by one call of the driver, or shrank (negative size)."""
        self.total_bytes += size
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes

    def drop_segment(self, number: int, key: int) -> tuple[int, int]:
        """Give a whole free segment back to the driver; returns (address, size)."""
        address, size = self.remove(number, key)
        del self.whole[address]
        del self.owner[address]
        self.bounds.discard(address)
        self.grew(number, -size)
        return address, size

    def is_idle(self, pool: int) -> bool:
        """Whether nothing is live in a pool: all its memory lies in its free lists."""
        numbers = {n for n, name in enumerate(self.ids) if name.pool == pool}
        free = sum(key >> SHIFT for n in numbers for key in self.lists[n])
        held = sum(size for address, size in self.whole.items() if self.owner[address] in numbers)
        for n in numbers:
            held += sum(reservation.length for reservation in self.reservations.get(n, ()))
            held -= sum(self.unmapped_at[start] for start in self.unmapped.get(n, ()))
        return free == held

    # Expandable segments ---------------------------------------------------------------------------------

    def reservation_of(self, number: int, address: int) -> Reservation | None:
        """The reservation of that free list that covers an address."""
        for reservation in self.reservations.get(number, ()):
            if reservation.base <= address < reservation.base + reservation.length:
                return reservation
        return None

    def add_reservation(self, number: int, base: int, length: int) -> Reservation:
        """A new virtual range, all unmapped."""
        reservation = Reservation(base, length, self.page_bytes(number))
        self.reservations.setdefault(number, []).append(reservation)
        self.bounds.add(base)
        self.owner[base] = number
        self.add_unmapped(number, base, length)
        return reservation

    def add_unmapped(self, number: int, address: int, size: int) -> int:
        """Note an unmapped range and merge it with its unmapped neighbours; returns the start of the result."""
        starts = self.unmapped.setdefault(number, [])
        end = address + size
        if end not in self.bounds and end in self.unmapped_at:
            size += self.cut_unmapped(number, end)
        before = self.unmapped_end.get(address)
        if before is not None and address not in self.bounds:
            size += self.cut_unmapped(number, before)
            address = before
        insort(starts, address)
        self.unmapped_at[address] = size
        self.unmapped_end[address + size] = address
        return address

    def make_room(self, base: int, length: int) -> int:
        """Bytes free for a reservation at ``base``, ``length`` at most; 0 where live pages are in the way.

        The true length of a reservation is not recorded: one whose unmapped tail reaches over ``base`` ends there.
        """
        for number, group in self.reservations.items():
            for live in group:
                if live.base >= base:
                    length = min(length, live.base - base)
                elif base < live.base + live.length:
                    start = self.unmapped_end.get(live.base + live.length)
                    if start is None or start > base:
                        return 0
                    self.cut_unmapped(number, start)
                    live.length = base - live.base
                    if start < base:
                        self.add_unmapped(number, start, base - start)
        return length

    def cut_unmapped(self, number: int, address: int) -> int:
        """Forget an unmapped range; returns its size."""
        starts = self.unmapped[number]
        del starts[bisect_left(starts, address)]
        size = self.unmapped_at.pop(address)
        del self.unmapped_end[address + size]
        return size

    def drop_reservation(self, number: int, reservation: Reservation) -> None:
        """Give a wholly unmapped range back."""
        self.cut_unmapped(number, reservation.base)
        live = self.reservations[number]
        live.remove(reservation)
        if not live:
            del self.reservations[number]
        self.bounds.discard(reservation.base)
        self.owner.pop(reservation.base, None)
