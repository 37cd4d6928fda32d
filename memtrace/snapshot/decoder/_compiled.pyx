# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=False, cdivision=True
"""The compiled twin of fast_template.py and fast_fields.py: events of one shape, read one after the other from the bytes.

Files come from strangers. Before every read, ``room`` keeps it below ``end``; every write goes into a typed memoryview,
whose index Cython checks. What is not exactly such an event is left to the pickle machine.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy

cdef enum Key:
    ACTION = 0
    ADDR = 1
    SIZE = 2
    STREAM = 3
    TIME = 4
    USER_METADATA = 5
    COMPILE_CONTEXT = 6
    CATEGORY = 7
    POOL = 8
    FRAMES = 9

cdef enum Outcome:
    SOUND = 0
    OTHER = 1  # the machine reads this event
    OUT_OF_SIGHT = 2  # goes on behind the window
    REFUSED = 3  # not for the fast decoder

KEYS = ("action", "addr", "size", "stream", "time_us", "user_metadata", "compile_context", "category", "pool_id", "frames")
ENDED_OUT_OF_SIGHT, ENDED_REFUSED = OUT_OF_SIGHT, REFUSED
MOST_MEMOIZED = 6  # entries that one event adds to the memo: itself, three texts, a pair, a list
cdef enum Slot:  # as fast_contexts.py has them
    UNBUILT = -1
    BUILT = -2
    TEXT = -3  # and below: a written text



cdef struct Body:
    uint64_t mixed  # 0: empty
    Py_ssize_t start
    Py_ssize_t size
    int32_t number


@cython.final  # so that calls are direct
cdef class Bodies:
    """Numbers of written texts, or lists of frames, by their bytes: a hash table that compares what it finds."""

    cdef Body* slots
    cdef Py_ssize_t mask
    cdef Py_ssize_t count
    cdef uint8_t* text
    cdef Py_ssize_t used
    cdef Py_ssize_t room

    def __cinit__(self):
        self.mask = 1023
        self.slots = <Body*>calloc(self.mask + 1, sizeof(Body))
        if self.slots == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.slots)
        free(self.text)

    cdef Py_ssize_t find(self, uint64_t mixed, const uint8_t* body, Py_ssize_t size) noexcept nogil:
        """Where a list is, or the empty place where it would be."""
        cdef Py_ssize_t at = <Py_ssize_t>(mixed & <uint64_t>self.mask)
        while self.slots[at].mixed != 0:
            if self.slots[at].mixed == mixed and self.slots[at].size == size and (
                size == 0 or memcmp(self.text + self.slots[at].start, body, size) == 0
            ):
                break
            at = (at + 1) & self.mask
        return at

    cdef int put(self, uint64_t mixed, const uint8_t* body, Py_ssize_t size, int32_t number) except -1:
        cdef Body* slots = self.slots
        cdef Body* more
        cdef uint8_t* grown
        cdef Py_ssize_t i, at, places = self.mask + 1
        if 2 * (self.count + 1) > places:
            more = <Body*>calloc(2 * places, sizeof(Body))
            if more == NULL:
                raise MemoryError
            for i in range(places):
                if slots[i].mixed != 0:
                    at = <Py_ssize_t>(slots[i].mixed & <uint64_t>(2 * places - 1))
                    while more[at].mixed != 0:
                        at = (at + 1) & (2 * places - 1)
                    more[at] = slots[i]
            free(slots)
            self.slots, self.mask = more, 2 * places - 1
        if self.used + size > self.room:
            grown = <uint8_t*>realloc(self.text, 2 * (self.used + size) + 4096)
            if grown == NULL:
                raise MemoryError
            self.text, self.room = grown, 2 * (self.used + size) + 4096
        at = self.find(mixed, body, size)
        self.slots[at].mixed, self.slots[at].start = mixed, self.used
        self.slots[at].size, self.slots[at].number = size, number
        if size:
            memcpy(self.text + self.used, body, size)
        self.used += size
        self.count += 1
        return 0


cdef uint64_t mixed_of(const uint8_t* body, Py_ssize_t size) noexcept nogil:
    """A hash, never 0."""
    cdef uint64_t mixed = <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>size, word
    cdef Py_ssize_t at = 0
    while at < size:
        word = 0
        memcpy(&word, body + at, 8 if size - at >= 8 else size - at)
        mixed = (mixed ^ word) * <uint64_t>0xBF58476D1CE4E5B9
        mixed ^= mixed >> 29
        at += 8
    return mixed | 1


@cython.final  # so that calls are direct
cdef class Known:
    """Codes of memo entries or numbers that were asked for lately; :meth:`of` asks ``ask`` for others."""

    cdef int64_t numbers[256]
    cdef int32_t codes[256]
    cdef object ask

    def __cinit__(self, ask):
        cdef int i
        self.ask = ask
        for i in range(256):
            self.codes[i] = -1

    cdef int32_t of(self, int64_t number) except -2:
        """The code, -1 where there is none (yet)."""
        cdef int place = <int>(number & 255)
        if self.codes[place] >= 0 and self.numbers[place] == number:
            return self.codes[place]
        cdef int32_t code = self.ask(number)
        if code >= 0:
            self.numbers[place], self.codes[place] = number, code
        return code if code >= 0 else -1


@cython.final  # so that calls are direct
cdef class Scanner:
    """Reads the events of one trace. ``source`` answers what bytes alone can't tell; see ``fast_decode._Source``."""

    cdef object source
    cdef Bodies bodies, written
    cdef Known actions, streams, texts, written_texts, pools
    cdef const uint8_t* data
    cdef Py_ssize_t end, at, cut, cut_at
    cdef object cuts
    cdef int64_t number, first, second  # of the field read last
    cdef int64_t pool_first, pool_second
    cdef int32_t pool_code
    cdef const int32_t[::1] of_slot
    cdef int32_t[::1] slots
    cdef int64_t filled, memoized  # memo entries before this run, and in it

    def __cinit__(self, source, Bodies bodies, Bodies written):
        self.source = source
        self.bodies, self.written = bodies, written
        self.pool_code = -1
        self.actions, self.streams = Known(source.action), Known(source.stream)
        self.texts, self.pools = Known(source.text), Known(source.pool)
        self.written_texts = Known(source.text_written)

    # Single fields. Each moves ``at`` behind what it has read.

    cdef inline bint room(self, Py_ssize_t size) noexcept nogil:
        """Whether ``size`` more bytes are in sight."""
        return size <= self.end - self.at

    cdef inline int boundary(self) except -1:
        """At the beginning of an opcode: whether none before it spans the place where a frame began."""
        return SOUND if self.cut > self.at else self.cross()

    cdef int cross(self) except -1:
        if self.cut < self.at:
            return REFUSED
        while self.cut == self.at:
            self.cut_at += 1
            self.cut = self.cuts[self.cut_at] if self.cut_at < len(self.cuts) else self.end + 1
        return SOUND

    cdef inline int expect(self, uint8_t wanted) noexcept nogil:
        """One opcode without operands."""
        if not self.room(1):
            return OUT_OF_SIGHT
        if self.data[self.at] != wanted:
            return OTHER
        self.at += 1
        return SOUND

    cdef inline int fetch(self, int64_t wanted) noexcept nogil:
        """The memo entry that holds a key."""
        cdef int outcome = self.reference()
        return OTHER if outcome == SOUND and self.number != wanted else outcome

    cdef inline int reference(self) noexcept nogil:
        """A fetched memo entry: ``number``."""
        cdef uint32_t wide
        if not self.room(5):
            return OUT_OF_SIGHT
        if self.data[self.at] == 0x68:
            self.number = self.data[self.at + 1]
            self.at += 2
        elif self.data[self.at] == 0x6A:
            memcpy(&wide, self.data + self.at + 1, 4)
            self.number = wide
            self.at += 5
        else:
            return OTHER
        return SOUND

    cdef inline int integer(self) noexcept nogil:
        """An integer of up to 64 bits: ``number``."""
        cdef uint8_t op
        cdef Py_ssize_t size, i
        cdef uint64_t value = 0
        if not self.room(10):
            return OUT_OF_SIGHT
        op = self.data[self.at]
        self.at += 1
        if op == 0x4B:
            self.number = self.data[self.at]
            self.at += 1
        elif op == 0x4D:
            self.number = self.data[self.at] | <int64_t>self.data[self.at + 1] << 8
            self.at += 2
        elif op == 0x4A or op == 0x8A:
            size = 4
            if op == 0x8A:
                size = self.data[self.at]
                self.at += 1
                if size < 1 or size > 8:
                    return OTHER
            for i in range(size):
                value |= <uint64_t>self.data[self.at + i] << (8 * i)
            if size < 8 and self.data[self.at + size - 1] & 0x80:
                value |= ~<uint64_t>0 << (8 * size)
            self.number = <int64_t>value
            self.at += size
        else:
            return OTHER
        return SOUND

    cdef int32_t text(self, int* outcome) except -2:
        """The code of a text that is fetched, or written and memoized."""
        cdef int32_t code = UNBUILT
        cdef Py_ssize_t start, size
        if not self.room(2):
            outcome[0] = OUT_OF_SIGHT
            return -1
        if self.data[self.at] != 0x8C:
            outcome[0] = self.reference()
            if outcome[0] != SOUND:
                return -1
            if self.number < self.filled:
                code = self.of_slot[self.number]
            elif self.number < self.filled + self.memoized:
                code = self.slots[self.number - self.filled]
            return self.written_texts.of(TEXT - code) if code <= TEXT else self.texts.of(self.number)
        size = self.data[self.at + 1]
        start = self.at + 2
        if not self.room(size + 3):
            outcome[0] = OUT_OF_SIGHT
            return -1
        self.at = start + size
        outcome[0] = OTHER if size == 0 else self.boundary()
        if outcome[0] == SOUND:
            outcome[0] = self.expect(0x94)
        if outcome[0] != SOUND:
            return -1
        code = self.known(self.written, start, start + size, self.source.written_text)
        if code < 0:
            return -1
        self.memoize(TEXT - code)
        return self.written_texts.of(code)

    cdef int memoize(self, int32_t what) except -1:
        self.slots[self.memoized] = what
        self.memoized += 1
        return 0

    cdef int32_t pair(self, int* outcome) except -2:
        """The code of a pool id: fetched, or two numbers and memoized."""
        outcome[0] = self.reference()
        if outcome[0] == SOUND:
            return self.pools.of(self.number)
        if outcome[0] != OTHER:
            return -1
        outcome[0] = self.integer()
        if outcome[0] != SOUND:
            return -1
        self.first = self.number
        outcome[0] = self.boundary()
        if outcome[0] == SOUND:
            outcome[0] = self.integer()
        if outcome[0] != SOUND:
            return -1
        self.second = self.number
        outcome[0] = self.boundary()
        if outcome[0] == SOUND:
            outcome[0] = self.expect(0x86)
        if outcome[0] == SOUND:
            outcome[0] = self.boundary()
        if outcome[0] == SOUND:
            outcome[0] = self.expect(0x94)
        if outcome[0] != SOUND:
            return -1
        self.memoize(UNBUILT)
        if self.pool_code < 0 or self.first != self.pool_first or self.second != self.pool_second:
            self.pool_code = self.source.written_pool(self.first, self.second)
            self.pool_first, self.pool_second = self.first, self.second
        return self.pool_code

    cdef int32_t known(self, Bodies table, Py_ssize_t start, Py_ssize_t stop, ask) except -2:
        """The number of a piece of the data; ``ask`` is asked about one that is new, and answers -1 if it has none."""
        cdef uint64_t mixed = mixed_of(self.data + start, stop - start)
        cdef Py_ssize_t place = table.find(mixed, self.data + start, stop - start)
        if table.slots[place].mixed != 0:
            return table.slots[place].number
        cdef int32_t found = ask((<const char*>self.data)[start:stop])
        if found >= 0:
            table.put(mixed, self.data + start, stop - start, found)
        return found

    # Events.

    def take(
        self,
        const uint8_t[::1] data,
        Py_ssize_t at,
        Py_ssize_t end,
        cuts,
        const uint8_t[::1] keys,
        const int64_t[::1] fetches,
        int64_t filled,
        const int32_t[::1] of_slot,
        int32_t context,
        uint8_t[::1] action,
        int64_t[:, ::1] wide,
        int32_t[:, ::1] narrow,
        int32_t[::1] slots,
        int32_t[::1] stacks,
    ):
        """Read events from ``at`` on, as many as fit the shape, the window and the arrays.

        ``filled`` counts memo entries, ``of_slot`` has the context of those, ``context`` is the next one's number.
        Filled are ``action``; the rows addr, size, time of ``wide``; stream, context, pool, three texts of ``narrow``;
        by new memo entry its context in ``slots``; by new context its stack in ``stacks``. Returns (events, position
        behind them, new memo entries, new contexts, cuts passed, what stopped it).
        """
        if end > data.shape[0] or at < 0 or at > end or not keys.shape[0] or fetches.shape[0] != keys.shape[0]:
            raise ValueError("the window is smaller than it claims")
        self.data = &data[0]
        self.end, self.at = end, at
        self.cuts = cuts
        self.cut_at = 0
        self.cut = cuts[0] if cuts else end + 1
        self.of_slot, self.slots = of_slot, slots
        self.filled, self.memoized = filled, 0
        cdef Py_ssize_t count = 0, behind = at, most = action.shape[0], i, body, passed = 0
        cdef int64_t memoized = 0
        cdef int32_t made = 0, code, number
        cdef int outcome = SOUND
        cdef uint8_t key
        while count < most:
            # Between two events: nothing, or a new batch. Its opcodes are one byte each, so no cut can be within one.
            if count and self.room(3) and self.data[self.at] == 0x65 and self.data[self.at + 1] == 0x28:
                self.at += 2
                while self.cut < self.at:
                    self.cut_at += 1
                    self.cut = cuts[self.cut_at] if self.cut_at < len(cuts) else end + 1
            outcome = self.boundary()
            if outcome == SOUND:
                outcome = self.expect(0x7D)
            if outcome == SOUND:
                outcome = self.boundary()
            if outcome == SOUND:
                outcome = self.expect(0x94)
            if outcome == SOUND:
                outcome = self.boundary()
            if outcome == SOUND:
                outcome = self.expect(0x28)
            if outcome != SOUND:
                break
            self.memoize(UNBUILT)  # the dictionary itself
            for i in range(keys.shape[0]):
                key = keys[i]
                outcome = self.boundary()
                if outcome == SOUND:
                    outcome = self.fetch(fetches[i])
                if outcome == SOUND:
                    outcome = self.boundary()
                if outcome != SOUND:
                    break
                if key == ACTION:
                    outcome = self.reference()
                    if outcome != SOUND:
                        break
                    code = self.actions.of(self.number)
                    if code < 0:
                        outcome = OTHER
                        break
                    action[count] = <uint8_t>code
                elif key == ADDR or key == SIZE or key == TIME or key == STREAM:
                    outcome = self.integer()
                    if outcome != SOUND:
                        break
                    if key == STREAM:
                        narrow[0, count] = self.streams.of(self.number)
                    else:
                        wide[0 if key == ADDR else 1 if key == SIZE else 2, count] = self.number
                elif key == POOL:
                    code = self.pair(&outcome)
                    if outcome == SOUND and code < 0:
                        outcome = OTHER
                    if outcome != SOUND:
                        break
                    narrow[2, count] = code
                elif key == FRAMES:
                    outcome = self.frames(&context, &made, stacks, &number)
                    if outcome != SOUND:
                        break
                    narrow[1, count] = number
                else:
                    code = self.text(&outcome)
                    if outcome == SOUND and code < 0:
                        outcome = OTHER
                    if outcome != SOUND:
                        break
                    narrow[3 + key - USER_METADATA, count] = code
            if outcome == SOUND:
                outcome = self.boundary()
            if outcome == SOUND:
                outcome = self.expect(0x75)
            if outcome != SOUND:
                break
            count += 1
            memoized = self.memoized
            behind = self.at
            passed = self.cut_at
        self.data = NULL
        self.cuts = self.of_slot = self.slots = None
        # Of an event that was not finished nothing counts; a list that it wrote was the last thing it did.
        return count, behind, memoized, self.contexts_of(slots, memoized), passed, outcome

    cdef int contexts_of(self, int32_t[::1] slots, int64_t memoized) except -1:
        """How many of the new memo entries are lists of frames."""
        cdef int found = 0
        cdef int64_t i
        for i in range(memoized):
            found += slots[i] >= 0
        return found

    cdef int frames(self, int32_t* context, int32_t* made, int32_t[::1] stacks, int32_t* known) except -1:
        """The frames of an event: fetched, or written out and memoized."""
        cdef int outcome = self.reference()
        cdef Py_ssize_t start, stop
        cdef int32_t found
        if outcome == SOUND:
            if self.number >= self.filled + self.memoized:
                return REFUSED  # fetched before it is stored
            if self.number >= self.filled:
                known[0] = self.slots[self.number - self.filled]
            else:
                known[0] = self.of_slot[self.number]
                if known[0] == BUILT:
                    if made[0]:
                        return OTHER  # a new context comes behind those that wait to be taken over: look again then
                    known[0] = self.source.context(self.number)
                    context[0] = self.source.next_context()
            return SOUND if known[0] >= 0 else REFUSED
        if outcome != OTHER:
            return outcome
        outcome = self.expect(0x5D)
        if outcome == SOUND:
            outcome = self.boundary()
        if outcome == SOUND:
            outcome = self.expect(0x94)
        if outcome == SOUND:
            outcome = self.boundary()
        if outcome != SOUND:
            return outcome
        if not self.room(1):
            return OUT_OF_SIGHT
        if self.data[self.at] == 0x28:  # MARK … APPENDS
            self.at += 1
            start = self.at
            outcome = self.boundary()
            while outcome == SOUND:
                outcome = self.reference()
                if outcome == SOUND:
                    outcome = self.boundary()
            if outcome != OTHER:
                return outcome
            stop = self.at
            outcome = self.expect(0x65) if stop > start else OTHER
        elif self.data[self.at] == 0x75:  # empty
            start = stop = self.at
            outcome = SOUND
        else:  # one frame, APPEND
            start = self.at
            outcome = self.reference()
            stop = self.at
            if outcome == SOUND:
                outcome = self.boundary()
            if outcome == SOUND:
                outcome = self.expect(0x61)
        if outcome != SOUND:
            return outcome
        found = self.known(self.bodies, start, stop, self.source.stack)
        if found < 0:
            return OTHER
        stacks[made[0]] = found
        known[0] = context[0] + made[0]
        self.memoize(known[0])
        made[0] += 1
        return SOUND
