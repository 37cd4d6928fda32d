"""Growing and shrinking expandable segments: whole pages of a virtual reservation are mapped and unmapped."""

from __future__ import annotations

from memtrace.allocator.driver import Driver
from memtrace.allocator.state import MASK, SHIFT, AllocatorState


def grow(state: AllocatorState, driver: Driver, number: int, size: int) -> int | None:
    """``try_allocate_expandable_block``: key of a free block of at least ``size`` bytes, None if the driver refuses.

    What was mapped before a refusal stays cached, as in PyTorch.
    """
    start = _candidate(state, number, size)
    if start is None:
        base, length = driver.reserve(state, number, size)
        if length < size:
            return None
        state.add_reservation(number, base, length)
        start = base
    if start not in state.free_at:  # the candidate itself is unmapped
        mapped = _map(state, driver, number, start, min(state.unmapped_at[start], size))
        if mapped is None:
            return None
        start = mapped
    while True:
        have = state.free_at[start]
        if have >= size:
            return have << SHIFT | start
        hole = start + have
        mapped = _map(state, driver, number, hole, min(size - have, state.unmapped_at[hole]))
        if mapped is None:
            return None
        start = mapped


def _candidate(state: AllocatorState, number: int, size: int) -> int | None:
    """Start of the first run of free and unmapped blocks that is large enough; None if a reservation is needed."""
    for hole in state.unmapped.get(number, ()):
        before = None if hole in state.bounds else state.free_end.get(hole)
        start = hole if before is None else before
        have, position = 0, start
        while have < size:
            if position != start and position in state.bounds:
                break
            length = state.free_at.get(position) or state.unmapped_at.get(position, 0)
            if not length:
                break
            have += length
            position += length
        if have >= size:
            return start
    return None


def _map(state: AllocatorState, driver: Driver, number: int, address: int, size: int) -> int | None:
    """Map pages from the start of an unmapped block; returns the start of the free block they ended up in."""
    page = state.page_bytes(number)
    length = state.unmapped_at[address]
    mapped = min(-(-size // page) * page, length)
    if not driver.map(number, address, mapped):
        return None
    state.cut_unmapped(number, address)
    if mapped < length:
        state.add_unmapped(number, address + mapped, length - mapped)
    state.grew(number, mapped)
    before = None if address in state.bounds else state.free_end.get(address)
    state.release(number, address, mapped)
    return address if before is None else before


def shrink(state: AllocatorState, driver: Driver, number: int, key: int) -> None:
    """Unmap the whole pages inside a free expandable block; partial pages at its edges stay free blocks."""
    address, size = key & MASK, key >> SHIFT
    reservation = state.reservation_of(number, address)
    if reservation is None:
        return
    page, base = reservation.page_bytes, reservation.base
    low = base + -(-(address - base) // page) * page
    high = base + (address + size - base) // page * page
    if low >= high:
        return
    state.remove(number, key)
    if address < low:
        state.insert(number, address, low - address)
    if high < address + size:
        state.insert(number, high, address + size - high)
    start = state.add_unmapped(number, low, high - low)
    state.grew(number, low - high)
    driver.unmapped(number, low, high - low)
    if start == base and state.unmapped_at[start] == reservation.length:
        state.drop_reservation(number, reservation)
