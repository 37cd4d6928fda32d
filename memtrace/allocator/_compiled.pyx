# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=False, cdivision=True
"""The compiled twins of the loops over events: the containers of state.py, flat.run, and lifetimes.match.

Every container behaves like the builtin that it stands for, as far as this package uses it, so that the rare steps stay
in Python. Memory is only touched within ``count`` or ``mask``; arrays from outside are bounds-checked by Cython. On a
trace that contradicts itself this raises KeyError or IndexError where the plain loop does.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memmove

cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef __GLIBC__
    #include <malloc.h>
    static void reuse(void) { mallopt(M_MMAP_MAX, 0); mallopt(M_TRIM_THRESHOLD, -1); }
    #else
    static void reuse(void) {}
    #endif
    """
    void reuse()

cdef uint64_t MASK = 0xFFFFFFFFFFFFFFFF


def reuse_freed_memory():
    """From now on large arrays come from what others gave back, not from the system, whose pages are to be cleared
    first: of a large recording's time a fifth. Where the C library is another one, nothing changes."""
    reuse()


cdef struct Key:
    uint64_t size
    uint64_t address


cdef inline bint is_less(Key a, uint64_t size, uint64_t address) noexcept nogil:
    return a.size < size or (a.size == size and a.address < address)


@cython.final
cdef class KeyList:
    """A sorted list of keys ``size << 64 | address``."""

    cdef Key* keys
    cdef Py_ssize_t count
    cdef Py_ssize_t room

    def __cinit__(self):
        self.room = 16
        self.keys = <Key*>malloc(self.room * sizeof(Key))
        if self.keys == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.keys)

    cdef Py_ssize_t place(self, uint64_t size, uint64_t address) noexcept nogil:
        """Index of the first key that is not below."""
        cdef Py_ssize_t low = 0, high = self.count, middle
        while low < high:
            middle = (low + high) >> 1
            if is_less(self.keys[middle], size, address):
                low = middle + 1
            else:
                high = middle
        return low

    cdef int put(self, Py_ssize_t at, uint64_t size, uint64_t address) except -1:
        """Insert before index ``at``, which is within 0 … count."""
        cdef Key* grown
        if self.count == self.room:
            grown = <Key*>realloc(self.keys, 2 * self.room * sizeof(Key))
            if grown == NULL:
                raise MemoryError
            self.keys = grown
            self.room *= 2
        memmove(self.keys + at + 1, self.keys + at, (self.count - at) * sizeof(Key))
        self.keys[at].size = size
        self.keys[at].address = address
        self.count += 1
        return 0

    cdef int drop(self, Py_ssize_t at) except -1:
        if at < 0 or at >= self.count:
            raise IndexError("free list index out of range")
        self.count -= 1
        memmove(self.keys + at, self.keys + at + 1, (self.count - at) * sizeof(Key))
        return 0

    cdef int replace(self, Py_ssize_t at, uint64_t size, uint64_t address) except -1:
        """Drop index ``at`` and insert a key where it belongs: only what lies in between is moved."""
        if at < 0 or at >= self.count:
            raise IndexError("free list index out of range")
        cdef Py_ssize_t place = self.place(size, address)
        if place <= at:
            memmove(self.keys + place + 1, self.keys + place, (at - place) * sizeof(Key))
        else:
            place -= 1
            memmove(self.keys + at, self.keys + at + 1, (place - at) * sizeof(Key))
        self.keys[place].size = size
        self.keys[place].address = address
        return 0

    cdef object key(self, Py_ssize_t at):
        return (<object>self.keys[at].size) << 64 | self.keys[at].address

    def __len__(self):
        return self.count

    def __getitem__(self, Py_ssize_t at):
        if at < 0:
            at += self.count
        if at < 0 or at >= self.count:
            raise IndexError("free list index out of range")
        return self.key(at)

    def __delitem__(self, Py_ssize_t at):
        self.drop(at)

    def __iter__(self):
        cdef Py_ssize_t i
        return iter([self.key(i) for i in range(self.count)])

    def __contains__(self, key):
        cdef uint64_t size = key >> 64, address = key & MASK
        cdef Py_ssize_t at = self.place(size, address)
        return at < self.count and self.keys[at].size == size and self.keys[at].address == address

    def insert(self, Py_ssize_t at, key):
        """As list.insert; the caller keeps the order."""
        cdef uint64_t size = key >> 64, address = key & MASK
        self.put(min(max(at, 0), self.count), size, address)


cdef class AddressMap:
    """A dict from addresses, 0 … 2**64 - 2, to numbers from 0 on: open addressing, at most half full."""

    cdef uint64_t* slots  # address + 1; 0: empty
    cdef int64_t* values
    cdef uint64_t mask
    cdef Py_ssize_t count

    def __cinit__(self):
        self.mask = 63
        self.slots = <uint64_t*>calloc(self.mask + 1, sizeof(uint64_t))
        self.values = <int64_t*>malloc((self.mask + 1) * sizeof(int64_t))
        if self.slots == NULL or self.values == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.slots)
        free(self.values)

    @cython.final
    cdef inline uint64_t home(self, uint64_t slot) noexcept nogil:
        cdef uint64_t mixed = (slot >> 9 ^ slot) * <uint64_t>0x9E3779B97F4A7C15
        return (mixed >> 32) & self.mask

    @cython.final
    cdef inline uint64_t find(self, uint64_t slot) noexcept nogil:
        """Where the slot is, or the empty place where it would be."""
        cdef uint64_t at = self.home(slot)
        while self.slots[at] != 0 and self.slots[at] != slot:
            at = (at + 1) & self.mask
        return at

    @cython.final
    cdef inline int64_t value(self, uint64_t address) noexcept nogil:
        """The number at an address, -1 if there is none."""
        cdef uint64_t at = self.find(address + 1)
        return self.values[at] if address + 1 != 0 and self.slots[at] != 0 else -1

    @cython.final
    cdef int grow(self) except -1:
        cdef uint64_t* slots = self.slots
        cdef int64_t* values = self.values
        cdef uint64_t size = self.mask + 1, i, at
        cdef uint64_t* more = <uint64_t*>calloc(2 * size, sizeof(uint64_t))
        cdef int64_t* room = <int64_t*>malloc(2 * size * sizeof(int64_t))
        if more == NULL or room == NULL:
            free(more)
            free(room)
            raise MemoryError
        self.slots, self.values, self.mask = more, room, 2 * size - 1
        for i in range(size):
            if slots[i] != 0:
                at = self.find(slots[i])
                self.slots[at] = slots[i]
                self.values[at] = values[i]
        free(slots)
        free(values)
        return 0

    @cython.final
    cdef int put(self, uint64_t address, int64_t value) except -1:
        if address + 1 == 0 or value < 0:
            raise KeyError(address)
        cdef uint64_t at = self.find(address + 1)
        if self.slots[at] == 0:
            if 2 * <uint64_t>(self.count + 1) > self.mask:
                self.grow()
                at = self.find(address + 1)
            self.slots[at] = address + 1
            self.count += 1
        self.values[at] = value
        return 0

    @cython.final
    cdef int64_t take(self, uint64_t address) except -2:
        """Remove an address; its number, -1 if it was not there."""
        cdef uint64_t at = self.find(address + 1), hole, wanted
        if address + 1 == 0 or self.slots[at] == 0:
            return -1
        cdef int64_t value = self.values[at]
        self.count -= 1
        hole = at
        while True:  # move what would no longer be found across the hole
            at = (at + 1) & self.mask
            if self.slots[at] == 0:
                break
            wanted = self.home(self.slots[at])
            if ((at - wanted) & self.mask) >= ((at - hole) & self.mask):
                self.slots[hole] = self.slots[at]
                self.values[hole] = self.values[at]
                hole = at
        self.slots[hole] = 0
        return value

    def __len__(self):
        return self.count

    def __contains__(self, uint64_t address):
        return self.value(address) >= 0

    def __getitem__(self, uint64_t address):
        cdef int64_t value = self.value(address)
        if value < 0:
            raise KeyError(address)
        return value

    def __setitem__(self, uint64_t address, int64_t value):
        self.put(address, value)

    def __delitem__(self, uint64_t address):
        if self.take(address) < 0:
            raise KeyError(address)

    def get(self, uint64_t address, default=None):
        """As dict.get."""
        cdef int64_t value = self.value(address)
        return default if value < 0 else value

    def pop(self, uint64_t address):
        """As dict.pop without a default."""
        cdef int64_t value = self.take(address)
        if value < 0:
            raise KeyError(address)
        return value

    def items(self):
        """Pairs in order of address."""
        cdef uint64_t i
        return sorted([(self.slots[i] - 1, self.values[i]) for i in range(self.mask + 1) if self.slots[i] != 0])


cdef class AddressSet(AddressMap):
    """A set of addresses."""

    def add(self, uint64_t address):
        """As set.add."""
        self.put(address, 0)

    def discard(self, uint64_t address):
        """As set.discard."""
        self.take(address)

    def __iter__(self):
        return iter([address for address, _ in self.items()])


cdef object covering(list reservations, uint64_t address):
    """The reservation that covers an address, or None."""
    for reservation in reservations:
        if reservation.base <= address < reservation.base + reservation.length:
            return reservation
    return None


cdef Py_ssize_t passed_over(state, KeyList keys, Py_ssize_t number, Py_ssize_t at, AddressMap unmapped) except -2:
    """AllocatorState._search_expandable: where the choice ends that begins at index ``at``."""
    cdef list reservations = state.reservations[number]
    cdef uint64_t here, behind
    cdef int64_t more
    if not state.expands[number]:
        while at < keys.count and covering(reservations, keys.keys[at].address) is not None:
            at += 1
        return at
    while at + 1 < keys.count and covering(reservations, keys.keys[at].address) is not None:
        here = keys.keys[at].size
        more = unmapped.value(keys.keys[at].address + here)
        if more > 0:
            here += <uint64_t>more
        behind = keys.keys[at + 1].size
        more = unmapped.value(keys.keys[at + 1].address + behind)
        if more > 0:
            behind += <uint64_t>more
        if behind >= here:
            break
        at += 1
    return at


def run(state, const int64_t[::1] ops, requests, int64_t[::1] address_of, int64_t[::1] size_of, miss, step):
    """flat.run over compiled containers."""
    cdef const int64_t[:, ::1] kinds = requests.kinds
    cdef const int32_t[::1] row_of = requests.row_of
    cdef list lists = state.lists
    cdef AddressMap free_at = state.free_at, free_end = state.free_end, unmapped = state.unmapped_at
    cdef AddressSet bounds = state.bounds
    cdef dict reservations = state.reservations
    cdef list expands = state.expands
    cdef KeyList keys
    cdef Py_ssize_t i, row, at, number
    cdef int64_t op, handle, known, handles = row_of.shape[0]
    cdef uint64_t size, have, address, end, start
    for i in range(ops.shape[0]):
        op = ops[i]
        if op >= handles:
            step(op - handles)
        elif op >= 0:
            row = row_of[op]
            number = kinds[row, 0]
            size = <uint64_t>kinds[row, 1]
            keys = lists[number]
            at = keys.place(size, 0)
            if at < keys.count and number in reservations:
                address, have = keys.keys[at].address, keys.keys[at].size
                if unmapped.value(address + have) >= 0 or not expands[number]:
                    at = passed_over(state, keys, number, at, unmapped)
            if at == keys.count:
                miss(op, number, <int64_t>size)
                continue
            address, have = keys.keys[at].address, keys.keys[at].size
            if have >= <uint64_t>kinds[row, 3]:
                miss(op, number, <int64_t>size)
                continue
            if free_at.take(address) < 0:
                raise KeyError(address)
            address_of[op] = <int64_t>address
            if have < <uint64_t>kinds[row, 2]:
                keys.drop(at)
                if free_end.take(address + have) < 0:
                    raise KeyError(address + have)
                size_of[op] = <int64_t>have
            else:
                size_of[op] = <int64_t>size
                start = address + size
                free_end.put(address + have, <int64_t>start)
                have -= size
                free_at.put(start, <int64_t>have)
                keys.replace(at, have, start)
        else:
            handle = -1 - op
            keys = lists[kinds[row_of[handle], 0]]
            address = <uint64_t>address_of[handle]
            end = address + <uint64_t>size_of[handle]
            at = -1  # of a key that the new one replaces
            known = free_at.value(end)
            if known >= 0 and bounds.value(end) < 0:
                free_at.take(end)
                at = keys.place(<uint64_t>known, end)
                end += <uint64_t>known
            known = free_end.value(address)
            if known >= 0 and bounds.value(address) < 0:
                free_end.take(address)
                start = <uint64_t>known
                known = free_at.value(start)
                if known < 0:
                    raise KeyError(start)
                if at >= 0:
                    keys.drop(at)
                at = keys.place(<uint64_t>known, start)
                address = start
            have = end - address
            free_at.put(address, <int64_t>have)
            free_end.put(end, <int64_t>address)
            if at >= 0:
                keys.replace(at, have, address)
            else:
                keys.put(keys.place(have, address), have, address)


def match(const uint8_t[::1] action, const int64_t[::1] address, const int64_t[::1] active):
    """lifetimes.match: one pass with a table of who holds which address."""
    import numpy as np  # here, so that asking whether this part is there takes no time

    cdef Py_ssize_t count = action.shape[0], allocs = 0, freed = 0, i
    for i in range(count):
        allocs += action[i] == 0
    made = np.full(count, -1, np.int32)
    # By owner: allocations first to last; behind them the owners from before the trace, as they are met, which go in
    # front of the others in the end.
    cdef Py_ssize_t room = count - allocs + active.shape[0]
    bounds, following = np.empty((2, room + allocs), np.int32), np.empty(room + allocs, np.int32)
    bounds[:, room:] = following[room:] = -1
    early = np.empty((4, count - allocs), np.int64)
    cdef int32_t[::1] handle = made
    cdef int32_t[:, :] late_rows = bounds[:, room:]
    cdef int32_t[::1] again = following[room:]
    cdef int64_t[:, ::1] early_rows = early
    cdef AddressMap holders = AddressMap()
    cdef int64_t owner, k = 0, unmatched = 0
    cdef uint8_t kind
    for i in range(count):
        kind = action[i]
        if kind > 2:
            continue
        owner = holders.value(<uint64_t>address[i])
        if kind == 0:
            if owner >= allocs:
                early_rows[2, owner - allocs] = i
            elif owner >= 0:
                again[owner] = <int32_t>i
            owner = k
            k += 1
            holders.put(<uint64_t>address[i], owner)
            handle[i] = <int32_t>owner
            continue
        if owner < 0:
            owner = allocs + freed
            early_rows[0, freed] = early_rows[1, freed] = early_rows[2, freed] = -1
            early_rows[3, freed] = address[i]
            freed += 1
            holders.put(<uint64_t>address[i], owner)
        if owner >= allocs:
            if early_rows[kind - 1, owner - allocs] < 0:
                early_rows[kind - 1, owner - allocs] = i
                handle[i] = <int32_t>owner
            else:
                unmatched += 1
        elif late_rows[kind - 1, owner] < 0:
            late_rows[kind - 1, owner] = <int32_t>i
            handle[i] = <int32_t>owner
        else:
            unmatched += 1
    early = early[:, :freed]
    untouched = [active[i] for i in range(active.shape[0]) if holders.value(<uint64_t>active[i]) < 0]
    first = np.sort(np.concatenate([early[3], np.array(untouched, np.int64)]))
    rank = np.searchsorted(first, early[3])
    cdef Py_ssize_t start = room - len(first)
    bounds[:, start:room] = following[start:room] = -1
    bounds[:, start + rank], following[start + rank] = early[:2], early[2]
    cdef const int64_t[::1] place = rank
    cdef int64_t shift = len(first)
    for i in range(count):
        owner = handle[i]
        if owner >= allocs:
            handle[i] = <int32_t>place[owner - allocs]
        elif owner >= 0:
            handle[i] = <int32_t>(owner + shift)
    requested, completed = bounds[:, start:]
    return made, first, requested, completed, following[start:], int(unmatched)


def distinct(const int64_t[::1] values):
    """(where each distinct value is met first, for each value its number in that order). Values are 0 or more."""
    import numpy as np

    cdef AddressMap known = AddressMap()
    numbers, firsts = np.empty(values.shape[0], np.int32), np.empty(values.shape[0], np.int64)
    cdef int32_t[::1] number = numbers
    cdef int64_t[::1] first = firsts
    cdef int64_t count = 0, found
    cdef Py_ssize_t i
    for i in range(values.shape[0]):
        found = known.value(<uint64_t>values[i])
        if found < 0:
            known.put(<uint64_t>values[i], count)
            first[count] = i
            found = count
            count += 1
        number[i] = <int32_t>found
    return firsts[:count].copy(), numbers


def plan(const uint8_t[::1] action, const int32_t[::1] handle, int completes, int64_t handles):
    """rerun.plan: (operations, and by rare step the events it begins and ends with)."""
    import numpy as np

    cdef Py_ssize_t count = action.shape[0], start = 0, made = 0, i, j
    ops = np.empty(count + 1, np.int32)
    cdef int32_t[::1] op = ops
    cdef list steps = []
    cdef bint rare = False
    cdef uint8_t kind
    for i in range(count + 1):
        if i < count:
            kind = action[i]
            rare |= 3 <= kind <= 6 or kind == 8
            if kind != 0 and kind != 1 and kind != 8:
                continue
        if rare:  # the events between two anchors, and the second one
            op[made] = <int32_t>(handles + len(steps))
            made += 1
            steps.append((start, i))
            start = i if completes == 1 and i < count and action[i] == 1 else i + 1
        for j in range(start, min(i + 1, count)):
            if action[j] == 0 or (action[j] == completes and handle[j] >= 0):
                op[made] = handle[j] if action[j] == 0 else -1 - handle[j]
                made += 1
        start, rare = i + 1, False
    return ops[:made], steps
