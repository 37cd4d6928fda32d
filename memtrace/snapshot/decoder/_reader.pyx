# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=False, cdivision=True
"""A pickle machine that reads a snapshot's traces straight into columns, without a Python object an event.

Everything else becomes the containers, texts and numbers that it stands for. Files come from strangers: before an opcode
is looked at, ``peek`` makes sure that it and its operands are in sight (``PADDING`` zeros follow the end), longer operands
ask ``need``, and what is written to a column is within ``room``. What is not certainly a snapshot raises Unsupported, and
the plain decoder, which knows what is wrong, reads the file.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from struct import unpack

from memtrace.snapshot.bounds import Unsupported
from memtrace.snapshot.intern import ListRef

cdef enum:
    PADDING = 32  # zeros behind the window
    IN_SIGHT = 16  # more than any opcode with operands of fixed size
    EDGE = 200  # events at either end of a trace whose keys tell the release
    NOT_ASKED = -2
    NO_KEY = 255
    MOST_FRAMES = 10_000
    NO_FRAMES = 0  # the empty stack

cdef enum:  # keys of events
    ADDR = 0  # integers
    SIZE = 1
    TIME = 2
    STREAM = 3  # coded columns
    POOL = 4
    USER_METADATA = 5
    COMPILE_CONTEXT = 6
    CATEGORY = 7
    ACTION = 8
    FRAMES = 9

KEYS = ("addr", "size", "time_us", "stream", "pool_id", "user_metadata", "compile_context", "category", "action", "frames")
EDGE_EVENTS = EDGE
cdef enum:
    CODED = 5  # columns from STREAM on

cdef enum:  # of memo entries, in the lowest two bits; the number is above. A negative entry is nothing to be fetched.
    OBJECT = 0
    TEXT = 1
    LIST = 2  # a list of frames, by its context
    PAIR = 3  # a pool id

cdef int64_t MAX_ADDRESS = <int64_t>1 << 62, MAX_SIZE = <int64_t>1 << 60


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


cdef void* grown(void* data, Py_ssize_t count, Py_ssize_t* room, Py_ssize_t item) except NULL:
    """``data`` with room for more than ``count`` items."""
    if count < room[0]:
        return data
    cdef Py_ssize_t wanted = 2 * count + 1024
    data = realloc(data, wanted * item)
    if data == NULL:
        raise MemoryError
    room[0] = wanted
    return data


@cython.final  # so that calls are direct
cdef class Reader:
    """Reads one file. ``owner`` is the :class:`columns.ColumnDecoder` that is asked what the bytes alone don't tell."""

    cdef object owner, stream
    cdef Py_ssize_t room_bytes
    # The window: data[at:end] is in sight. Nothing behind ``keep`` (unless -1) is let go.
    cdef bytearray window
    cdef uint8_t* data
    cdef Py_ssize_t at, end, keep
    cdef uint64_t base, frames_end  # where the window begins in the file, and where the frames claim to end
    cdef bint at_end
    # The machine.
    cdef list stack, marks, objects
    cdef bint fresh  # whether the top of the stack is a list just made
    cdef int32_t* memo
    cdef Py_ssize_t filled, memo_room
    # Texts by number, with what they mean as a key, as an action and as a value of the three text columns.
    cdef list texts
    cdef Bodies text_table
    cdef int32_t* meanings  # five a text: key, action, three codes
    cdef Py_ssize_t meanings_room
    cdef int32_t no_text
    cdef uint64_t short_size, short_word
    cdef int32_t short_text
    # Lists of frames.
    cdef Bodies list_table
    cdef int32_t* stack_of  # by context
    cdef Py_ssize_t contexts, contexts_room
    # The trace under way.
    cdef object trace
    cdef Py_ssize_t count, room
    cdef uint8_t* action
    cdef int64_t* wide[3]
    cdef int32_t* stacks
    cdef int32_t* lists
    cdef int32_t* coded[CODED]  # NULL while all codes are 0
    cdef uint16_t masks[EDGE]
    cdef int64_t number, last_stream, pool_first, pool_second
    cdef int32_t last_stream_code, pool_code, context, stack_number

    def __cinit__(self, owner, stream, Py_ssize_t window_bytes):
        self.owner, self.stream = owner, stream
        self.keep = -1
        self.make_window(window_bytes)
        self.stack, self.marks, self.objects, self.texts = [], [], [], []
        self.text_table, self.list_table = Bodies(), Bodies()
        self.no_text = self.interned(self.data, 0)

    def __dealloc__(self):
        free(self.memo)
        free(self.meanings)
        free(self.stack_of)

    # The window.

    cdef int more(self, Py_ssize_t wanted) except -1:
        """Move on until ``wanted`` bytes behind ``at`` are in sight, or all that are left."""
        if self.at_end:
            return 0
        cdef Py_ssize_t start = self.keep if self.keep >= 0 else self.at
        memmove(self.data, self.data + start, self.end - start)
        self.base += start
        self.at -= start
        self.end -= start
        if self.keep >= 0:
            self.keep = 0
        while self.end < self.at + wanted and not self.at_end:
            if self.end == self.room_bytes:  # twice as much, never as much as a stranger's length claims
                self.make_window(2 * self.room_bytes)
            got = self.stream.readinto(memoryview(self.window)[self.end : self.room_bytes])
            self.at_end = not got
            self.end += got
        memset(self.data + self.end, 0, PADDING)
        return 0

    cdef int make_window(self, Py_ssize_t size) except -1:
        """Room for ``size`` bytes and the padding; what is in sight stays."""
        cdef bytearray window = bytearray(size + PADDING)
        cdef uint8_t* data = <uint8_t*><char*>window
        if self.end:
            memcpy(data, self.data, self.end)
        self.window, self.data, self.room_bytes = window, data, size
        return 0

    cdef inline int need(self, Py_ssize_t size) except -1:
        """``size`` bytes behind ``at``."""
        if size > self.end - self.at:
            self.more(size)
            if size > self.end - self.at:
                raise Unsupported("cut short")
        return 0

    cdef inline int peek(self) except -1:
        """The next opcode. Frames, which may begin before any, are passed over."""
        if self.end - self.at >= IN_SIGHT and self.data[self.at] != 0x95:
            return self.data[self.at]
        return self.moved_on()

    cdef int moved_on(self) except -1:
        """The next opcode, where a frame begins or the window ends."""
        cdef uint64_t size
        while True:
            if self.end - self.at < IN_SIGHT:
                self.more(IN_SIGHT)
                if self.at >= self.end:
                    raise Unsupported("cut short")
            if self.data[self.at] != 0x95:
                return self.data[self.at]
            memcpy(&size, self.data + self.at + 1, 8)
            self.at += 9
            if size > <uint64_t>1 << 62:
                raise Unsupported("a frame without end")
            self.frames_end = max(self.frames_end, self.base + <uint64_t>self.at + size)

    cdef inline int next(self) except -1:
        """The next opcode, which is taken."""
        cdef int op = self.peek()
        self.at += 1
        return op

    # Operands. ``at`` is behind the opcode.

    cdef inline bint integer(self, int op) noexcept:
        """An integer of up to 64 bits: ``number``. False for another opcode."""
        cdef int32_t narrow
        cdef uint64_t word
        cdef int size
        if op == 0x4B:  # BININT1
            self.number = self.data[self.at]
            self.at += 1
        elif op == 0x4D:  # BININT2
            self.number = self.data[self.at] | <int64_t>self.data[self.at + 1] << 8
            self.at += 2
        elif op == 0x4A:  # BININT
            memcpy(&narrow, self.data + self.at, 4)
            self.number = narrow
            self.at += 4
        elif op == 0x8A and 1 <= self.data[self.at] <= 8:  # LONG1
            size = self.data[self.at]
            memcpy(&word, self.data + self.at + 1, 8)
            self.number = <int64_t>(word << (64 - 8 * size)) >> (64 - 8 * size)
            self.at += 1 + size
        else:
            return False
        return True

    cdef inline int32_t fetched(self, int op) except? -1:
        """The memo entry that BINGET or LONG_BINGET names."""
        cdef uint32_t slot = self.data[self.at]
        if op == 0x6A:
            memcpy(&slot, self.data + self.at, 4)
        self.at += 1 if op == 0x68 else 4
        if slot >= <uint64_t>self.filled:
            raise Unsupported("refers to an object it has not stored")
        return self.memo[slot]

    cdef inline bint stores(self) except -1:
        """Whether the next opcode stores the top of the stack in the memo's next entry; it is taken then."""
        cdef int op = self.peek()
        cdef uint32_t slot
        if op == 0x94:  # MEMOIZE
            self.at += 1
            return True
        if op != 0x71 and op != 0x72:  # BINPUT, LONG_BINPUT
            return False
        slot = self.data[self.at + 1]
        if op == 0x72:
            memcpy(&slot, self.data + self.at + 1, 4)
        if slot != <uint64_t>self.filled:
            raise Unsupported("memo entries out of order")
        self.at += 2 if op == 0x71 else 5
        return True

    cdef inline int store(self, int32_t entry) except -1:
        """The next memo entry."""
        self.memo = <int32_t*>grown(self.memo, self.filled, &self.memo_room, sizeof(int32_t))
        self.memo[self.filled] = entry
        self.filled += 1
        return 0

    cdef int32_t interned(self, const uint8_t* start, Py_ssize_t size) except -1:
        """The number of a text."""
        cdef uint64_t mixed = mixed_of(start, size)
        cdef Py_ssize_t place = self.text_table.find(mixed, start, size)
        cdef int32_t number
        cdef int i
        if self.text_table.slots[place].mixed != 0:
            return self.text_table.slots[place].number
        number = <int32_t>len(self.texts)
        if number >= 1 << 28:
            raise Unsupported("too many texts")
        text = (<const char*>start)[:size].decode("utf-8", "surrogatepass")
        self.texts.append(text)
        self.text_table.put(mixed, start, size, number)
        self.meanings = <int32_t*>grown(self.meanings, number, &self.meanings_room, 5 * sizeof(int32_t))
        self.meanings[5 * number] = KEYS.index(text) if text in KEYS else NO_KEY
        self.meanings[5 * number + 1] = self.owner.action(text)
        for i in range(2, 5):
            self.meanings[5 * number + i] = NOT_ASKED
        return number

    cdef inline int32_t text(self, int op) except -2:
        """The number of a text that is fetched, or written and perhaps stored; -1 for anything else."""
        cdef int32_t entry
        if op == 0x68 or op == 0x6A:
            entry = self.fetched(op)
            return entry >> 2 if entry >= 0 and entry & 3 == TEXT else -1
        return self.written_text(op)

    cdef int32_t written_text(self, int op) except -2:
        cdef int32_t entry
        cdef uint32_t narrow
        cdef uint64_t size, word = 0
        if op == 0x8C:  # SHORT_BINUNICODE
            size = self.data[self.at]
            self.at += 1
        elif op == 0x58:  # BINUNICODE
            memcpy(&narrow, self.data + self.at, 4)
            size = narrow
            self.at += 4
        elif op == 0x8D:  # BINUNICODE8
            memcpy(&size, self.data + self.at, 8)
            self.at += 8
            if size > <uint64_t>1 << 62:
                raise Unsupported("a text without end")
        else:
            return -1
        self.need(<Py_ssize_t>size)
        if size <= 8:  # the same short text again, as in most events
            memcpy(&word, self.data + self.at, size)
        if 0 < size <= 8 and size == self.short_size and word == self.short_word:
            entry = self.short_text
        else:
            entry = self.interned(self.data + self.at, <Py_ssize_t>size)
            self.short_size, self.short_word, self.short_text = size, word, entry
        self.at += <Py_ssize_t>size
        if self.stores():
            self.store(entry << 2 | TEXT)
        return entry

    # The machine.

    def load(self):
        """The file's object."""
        self.run(-1)
        if self.marks or len(self.stack) != 1:
            raise Unsupported("ends at an open container")
        while not self.at_end and self.base + <uint64_t>self.end < self.frames_end:
            self.at = self.end
            self.more(1)
        if self.base + <uint64_t>self.end < self.frames_end:
            raise Unsupported("cut short")
        return self.stack[0]

    cdef int run(self, Py_ssize_t height) except -1:
        """Until STOP, or until SETITEM or SETITEMS leave the stack ``height`` high."""
        cdef list stack = self.stack, items
        cdef int op
        cdef int32_t entry
        cdef bint fresh
        while True:
            op = self.next()
            fresh, self.fresh = self.fresh, False
            if op == 0x68 or op == 0x6A:
                entry = self.fetched(op)
                if entry < 0:
                    raise Unsupported("something within an event")
                if entry & 3 == OBJECT:
                    stack.append(self.objects[entry >> 2])
                elif entry & 3 == TEXT:
                    stack.append(self.texts[entry >> 2])
                elif entry & 3 == PAIR:
                    stack.append(self.owner.pairs[entry >> 2])
                else:
                    self.owner.lent += 1
                    stack.append(ListRef(entry >> 2, self.stack_of[entry >> 2]))
            elif op == 0x94 or op == 0x71 or op == 0x72:
                self.at -= 1
                self.stores()
                self.fresh = fresh
                self.objects.append(self.top())
                self.store(self.object_entry(len(self.objects) - 1))
            elif op == 0x8C or op == 0x58 or op == 0x8D:
                stack.append(self.texts[self.text(op)])
            elif self.integer(op):
                stack.append(self.number)
            elif op == 0x8A:  # LONG1, longer than 64 bits
                self.need(1 + self.data[self.at])
                stack.append(int.from_bytes(self.window[self.at + 1 : self.at + 1 + self.data[self.at]], "little", signed=True))
                self.at += 1 + self.data[self.at]
            elif op == 0x28:  # MARK
                if not (fresh and self.read_trace()):
                    self.marks.append(len(stack))
            elif op == 0x7D:
                stack.append({})
            elif op == 0x5D:
                stack.append([])
                self.fresh = True
            elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
                items = self.from_mark() if op == 0x75 else self.taken(2)
                self.set_items(items)
                if len(stack) == height:
                    return 0
            elif op == 0x65 or op == 0x61:  # APPENDS, APPEND
                items = self.from_mark() if op == 0x65 else self.taken(1)
                target = self.top()
                if type(target) is not list or id(target) in self.owner.settled:
                    raise Unsupported("appends to something that is not a list")
                (<list>target).extend(items)
            elif op == 0x86 or op == 0x74:  # TUPLE2, TUPLE
                items = self.from_mark() if op == 0x74 else self.taken(2)
                if len(items) != 2 or type(items[0]) is not int or type(items[1]) is not int:
                    raise Unsupported("another tuple than a pool id")
                stack.append(tuple(items))
            elif op == 0x4E:
                stack.append(None)
            elif op == 0x88 or op == 0x89:
                stack.append(op == 0x88)
            elif op == 0x47:  # BINFLOAT
                stack.append(unpack(">d", self.window[self.at : self.at + 8])[0])
                self.at += 8
            elif op == 0x80:  # PROTO
                if not 2 <= self.data[self.at] <= 5:
                    raise Unsupported("a pickle protocol that does not exist yet")
                self.at += 1
            elif op == 0x2E:
                return 0
            else:
                raise Unsupported("another opcode")

    cdef inline Py_ssize_t bottom(self) except -1:
        """What lies below belongs to another container."""
        return self.marks[len(self.marks) - 1] if self.marks else 0

    cdef object top(self):
        if len(self.stack) <= self.bottom():
            raise Unsupported("takes from an empty stack")
        return self.stack[len(self.stack) - 1]

    cdef list taken(self, Py_ssize_t count):
        """The uppermost ``count`` objects."""
        cdef Py_ssize_t start = len(self.stack) - count
        if start < self.bottom():
            raise Unsupported("takes from an empty stack")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    cdef list from_mark(self):
        """What lies above the last mark, which goes."""
        cdef Py_ssize_t start = self.bottom()
        if not self.marks or start > len(self.stack):
            raise Unsupported("closes a container that was not opened")
        items = self.stack[start:]
        del self.stack[start:]
        self.marks.pop()
        return items

    cdef int set_items(self, list items) except -1:
        target = self.top()
        if type(target) is not dict or len(items) % 2 or id(target) in self.owner.settled:
            raise Unsupported("sets items of something that is not a dictionary")
        cdef Py_ssize_t i
        for i in range(0, len(items), 2):
            if type(items[i]) is not str and type(items[i]) is not int:
                raise Unsupported("a key that is neither text nor number")
            if items[i] in <dict>target:  # what it was before may have been counted already
                raise Unsupported("a key set twice")
            (<dict>target)[items[i]] = items[i + 1]
        return 0

    cdef bint holds(self, Py_ssize_t number, object made) except -1:
        """Whether the memo's entry of this number is there, and is this object."""
        if number >= self.filled or self.memo[number] < 0 or self.memo[number] & 3 != OBJECT:
            return False
        return self.objects[self.memo[number] >> 2] is made

    cdef int32_t object_entry(self, Py_ssize_t number) except -1:
        if number >= 1 << 28:
            raise Unsupported("too many objects")
        return <int32_t>number << 2

    # Traces.

    cdef bint read_trace(self) except -1:
        """At the MARK behind a new list: read it as a trace, to behind its last batch, if it is one."""
        cdef int op
        cdef Py_ssize_t height = len(self.stack), depth = len(self.marks)
        if depth > 2 or self.trace is not None or not self.owner.is_trace(self.stack, self.marks):
            return False
        target = self.stack[height - 1]
        if self.filled and self.holds(self.filled - 1, target):
            self.memo[self.filled - 1] = -1  # the list stays empty: nothing else may refer to it
        self.trace = self.owner.new_trace(target)
        self.count = self.room = 0
        self.last_stream_code = self.pool_code = -1
        for op in range(CODED):
            self.coded[op] = NULL
        for op in range(<int>len(self.texts)):
            self.meanings[5 * op + 2] = self.meanings[5 * op + 3] = self.meanings[5 * op + 4] = NOT_ASKED
        while True:
            op = self.next()
            if op == 0x7D:
                self.any_event(height, depth)
            elif op == 0x65:  # APPENDS
                op = self.peek()
                if op == 0x28:
                    self.at += 1
                elif op == 0x7D:  # a last one alone, APPEND
                    self.at += 1
                    self.any_event(height, depth)
                    if self.next() != 0x61:
                        raise Unsupported("something else than an event")
                    break
                else:
                    break
            else:
                raise Unsupported("something else than an event")
        self.trace.close(self.count, [self.masks[i] for i in range(min(self.count, EDGE))])
        self.trace = None
        return True

    cdef inline int any_event(self, Py_ssize_t height, Py_ssize_t depth) except -1:
        """An event, behind its EMPTY_DICT."""
        self.keep = self.at - 1
        if self.event():
            self.keep = -1
            return 0
        self.keep = -1
        return self.slow_event(height, depth)

    cdef int slow_event(self, Py_ssize_t height, Py_ssize_t depth) except -1:
        """An event that has to be looked at as a dictionary; ``at`` is before it."""
        cdef int i
        cdef Py_ssize_t first = self.filled
        self.marks.append(height)
        self.run(height + 1)
        if len(self.stack) != height + 1 or len(self.marks) != depth + 1 or type(self.stack[height]) is not dict:
            raise Unsupported("an event in several parts")
        if self.holds(first, self.stack[height]):
            self.memo[first] = -1  # as of usual events: nothing else may refer to it
        self.marks.pop()
        if self.count == self.room:
            self.grow()
        values = self.trace.rare(self.count, self.stack.pop())
        self.action[self.count] = values[0]
        for i in range(3):
            self.wide[i][self.count] = values[1 + i]
        self.lists[self.count], self.stacks[self.count] = values[4]
        for i in range(CODED):
            self.put_code(i, values[5 + i])
        self.masks[self.count % EDGE] = 0
        self.count += 1
        return 0

    cdef int grow(self) except -1:
        """Room for more events."""
        cdef uint8_t[::1] bytes_
        cdef int64_t[::1] words
        cdef int32_t[::1] numbers
        cdef int i
        self.room = self.trace.grow(max(1024, 3 * self.room // 2))
        bytes_ = self.trace.action
        self.action = &bytes_[0]
        for i in range(3):
            words = self.trace.wide[i]
            self.wide[i] = &words[0]
        numbers = self.trace.lists
        self.lists = &numbers[0]
        numbers = self.trace.stacks
        self.stacks = &numbers[0]
        for i in range(CODED):
            self.point_at_codes(i)
        return 0

    cdef int point_at_codes(self, int column) except -1:
        cdef int32_t[::1] numbers
        self.coded[column] = NULL
        if self.trace.coded[column] is not None:
            numbers = self.trace.coded[column]
            if numbers.shape[0] < self.room:
                raise IndexError
            self.coded[column] = &numbers[0]
        return 0

    cdef inline int put_code(self, int column, int32_t code) except -1:
        """The code of event ``count`` in a column that exists from its first code other than 0 on."""
        if self.coded[column] == NULL:
            if code == 0:
                return 0
            self.trace.spread(column)
            self.point_at_codes(column)
        self.coded[column][self.count] = code
        return 0

    cdef bint event(self) except -1:
        """An event, behind its EMPTY_DICT. False, and all as before, if it is not of the usual kind."""
        cdef Py_ssize_t start = self.at - 1, filled = self.filled
        cdef int64_t base = <int64_t>self.base
        if self.usual():
            return True
        self.at = <Py_ssize_t>(start + base - <int64_t>self.base)
        self.filled = filled
        return False

    cdef bint usual(self) except -1:
        cdef int64_t values[3]
        cdef int32_t texts[3]
        cdef int op, key, action = 0
        cdef int32_t name, stream = -1, pool = -1
        cdef unsigned int seen = 0
        cdef int i
        values[0] = values[1] = values[2] = 0
        texts[0] = texts[1] = texts[2] = self.no_text
        self.context = self.stack_number = -1
        if self.stores():
            self.store(-1)
        if self.next() != 0x28:
            return False
        while True:
            op = self.next()
            if op == 0x75:
                break
            name = self.text(op)
            if name < 0:
                return False
            key = self.meanings[5 * name]
            if key == NO_KEY or seen >> key & 1:
                return False
            seen |= 1 << key
            op = self.next()
            if key <= TIME:
                if not self.integer(op):
                    return False
                values[key] = self.number
            elif key == ACTION:
                name = self.text(op)
                if name < 0 or self.meanings[5 * name + 1] < 0:
                    return False
                action = self.meanings[5 * name + 1]
            elif key == FRAMES:
                if not self.frames(op):
                    return False
            elif key == STREAM:
                if not self.integer(op):
                    return False
                stream = self.code_of_stream(self.number)
            elif key == POOL:
                pool = self.pair(op)
                if pool < 0:
                    return False
            else:
                texts[key - USER_METADATA] = self.text(op)
                if texts[key - USER_METADATA] < 0:
                    return False
        if not (seen >> ACTION & 1 and seen >> SIZE & 1):
            return False
        if values[ADDR] < 0 or values[ADDR] > MAX_ADDRESS or values[SIZE] < 0 or values[SIZE] >= MAX_SIZE:
            return False
        if self.count == self.room:
            self.grow()
        self.action[self.count] = <uint8_t>action
        for i in range(3):
            self.wide[i][self.count] = values[i]
        self.lists[self.count], self.stacks[self.count] = self.context, self.stack_number
        self.put_code(0, stream if stream >= 0 else self.code_of_stream(0))
        self.put_code(1, pool if pool >= 0 else self.code_of_pair(0, 0))
        for i in range(3):
            if self.meanings[5 * texts[i] + 2 + i] == NOT_ASKED:
                self.meanings[5 * texts[i] + 2 + i] = self.trace.text_code(i, self.texts[texts[i]])
            if self.coded[2 + i] != NULL or self.meanings[5 * texts[i] + 2 + i]:
                self.put_code(2 + i, self.meanings[5 * texts[i] + 2 + i])
        self.masks[self.count % EDGE] = <uint16_t>seen
        if self.count == 0:
            self.trace.first_keys = self.trace.keys_of(seen)
        if self.count < EDGE:
            self.trace.first_masks |= seen
        self.count += 1
        return True

    cdef inline int32_t code_of_stream(self, int64_t number) except -1:
        if self.last_stream_code < 0 or number != self.last_stream:
            self.last_stream_code = self.trace.stream_code(number)
            self.last_stream = number
        return self.last_stream_code

    cdef inline int32_t code_of_pair(self, int64_t first, int64_t second) except -1:
        if self.pool_code < 0 or first != self.pool_first or second != self.pool_second:
            self.pool_code = self.trace.pool_code((first, second))
            self.pool_first, self.pool_second = first, second
        return self.pool_code

    cdef int32_t pair(self, int op) except -2:
        """The code of a pool id: fetched, or two numbers; -1 for anything else."""
        cdef int32_t entry
        cdef int64_t first
        cdef bint marked = op == 0x28
        if op == 0x68 or op == 0x6A:
            entry = self.fetched(op)
            if entry >= 0 and entry & 3 == PAIR:
                return self.trace.pool_code(self.owner.pairs[entry >> 2])
            return -1
        if not self.integer(self.next() if marked else op):
            return -1
        first = self.number
        if not self.integer(self.next()) or self.next() != (0x74 if marked else 0x86):
            return -1
        entry = self.code_of_pair(first, self.number)
        if self.stores():
            self.store(self.object_entry(self.owner.pair((first, self.pool_second))) | PAIR)
        return entry

    cdef bint frames(self, int op) except -1:
        """The frames of an event, fetched or written: ``context`` and ``stack_number``."""
        cdef int32_t entry
        cdef Py_ssize_t slot = -1, start, size, place
        cdef uint64_t mixed = 0, base
        if op == 0x68 or op == 0x6A:
            entry = self.fetched(op)
            if entry >= 0 and entry & 3 == LIST:
                self.context, self.stack_number = entry >> 2, self.stack_of[entry >> 2]
                return True
            if entry < 0 or entry & 3 != OBJECT or type(self.objects[entry >> 2]) is not list:
                return False
            self.context, self.stack_number = self.known(self.objects[entry >> 2])
            return True
        if op != 0x5D:
            return False
        if self.stores():
            slot = self.filled
            self.store(-1)
        # Memo entries don't change: a list of frames that are all fetched is known by how it is written.
        start, base = self.at, self.base
        size = self.fetches()
        if size and self.goes_on(start + size):  # it is written in parts: a pickler's have a thousand items
            size = 0
        place = -1
        if size:
            mixed = mixed_of(self.data + start, size)
            place = self.list_table.find(mixed, self.data + start, size)
        if size and self.list_table.slots[place].mixed != 0:
            self.stack_number = self.list_table.slots[place].number
            self.at += size
        elif not self.read_frames():
            return False
        elif size and base == self.base:  # the window has not moved
            self.list_table.put(mixed, self.data + start, size, self.stack_number)
        self.context = self.new_context(self.stack_number)
        if slot >= 0:
            self.memo[slot] = self.context << 2 | LIST
        return True

    cdef inline Py_ssize_t fetches(self) noexcept nogil:
        """How many bytes behind ``at`` are MARK, fetches and APPENDS, all in sight, and the opcode behind them; 0:
        something else is there."""
        cdef Py_ssize_t at = self.at + 1
        if self.end - at < 0 or self.data[self.at] != 0x28:
            return 0
        while at < self.end:  # zeros follow the end
            if self.data[at] == 0x6A:
                at += 5
            elif self.data[at] == 0x68:
                at += 2
            elif self.data[at] == 0x65:
                return at + 1 - self.at if at + 6 <= self.end else 0
            else:
                break
        return 0

    cdef bint goes_on(self, Py_ssize_t at) except -1:
        """Whether frames are appended there to the list that was read so far."""
        cdef int op = self.data[at]
        cdef Py_ssize_t before = self.at
        if op != 0x68 and op != 0x6A:
            return op == 0x28 or op == 0x7D
        self.at = at
        answer = self.fetches_object()
        self.at = before
        return answer

    cdef bint read_frames(self) except -1:
        """The frames of a list, behind its EMPTY_LIST: ``stack_number``."""
        cdef int32_t entry
        cdef int op
        cdef list frames = []
        while True:
            op = self.peek()
            if op == 0x28:  # MARK … APPENDS
                self.at += 1
                op = self.next()
                while op != 0x65:
                    entry = self.frame(op)
                    if entry < 0:
                        return False
                    frames.append(self.objects[entry])
                    op = self.next()
            elif op == 0x7D or ((op == 0x68 or op == 0x6A) and self.fetches_object()):  # one frame, APPEND
                self.at += 1
                entry = self.frame(op)
                if entry < 0 or self.next() != 0x61:
                    return False
                frames.append(self.objects[entry])
            else:
                break
        if len(frames) > MOST_FRAMES:
            return False
        self.stack_number = self.owner.stack(frames) if frames else NO_FRAMES
        return True

    cdef bint fetches_object(self) except -1:
        """Whether the next opcode fetches something that was built: after a list a frame to append, not a key."""
        cdef Py_ssize_t at = self.at
        self.at += 1
        cdef int32_t entry = self.fetched(self.data[at])
        self.at = at
        return entry >= 0 and entry & 3 == OBJECT

    cdef inline int32_t frame(self, int op) except -2:
        """The number of a frame's object, fetched or written; -1 for anything else."""
        cdef int32_t entry
        if op == 0x68 or op == 0x6A:
            entry = self.fetched(op)
            return entry >> 2 if entry >= 0 and entry & 3 == OBJECT else -1
        return self.written_frame() if op == 0x7D else -1

    cdef int32_t written_frame(self) except -2:
        cdef Py_ssize_t height = len(self.stack), depth = len(self.marks), before = self.filled
        self.at -= 1
        self.marks.append(height)
        self.run(height + 1)
        if len(self.stack) != height + 1 or len(self.marks) != depth + 1:
            raise Unsupported("a frame in several parts")
        self.marks.pop()
        made = self.stack.pop()
        if self.holds(before, made):
            return self.memo[before] >> 2
        self.objects.append(made)
        return self.object_entry(len(self.objects) - 1) >> 2

    cdef inline int32_t new_context(self, int32_t stack_number) except -1:
        if self.contexts >= 1 << 28:
            raise Unsupported("too many stacks")
        self.stack_of = <int32_t*>grown(self.stack_of, self.contexts, &self.contexts_room, sizeof(int32_t))
        self.stack_of[self.contexts] = stack_number
        self.contexts += 1
        return <int32_t>(self.contexts - 1)

    def known(self, list frames):
        """(context, stack) of a list that was built."""
        found = self.owner.of_list.get(id(frames))
        if found is None:
            stack = self.owner.stack(frames)
            found = self.owner.of_list[id(frames)] = (self.new_context(stack), stack)
            self.owner.settled.add(id(frames))
        return found
