"""The fast decoder: a snapshot's pickle straight to columns, without a Python object an event.

The pickle machine runs the file; within a trace, runs of events that match a learned template are read by column and
skipped, memo entries and all. Wherever the template breaks (the first use of a frame, the head of a pickle frame, a
rare key, the end of a window), the machine reads on. What neither can do raises :class:`Unsupported`, and the decoder
that builds objects reads the file instead: both give the same snapshot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace import compiled
from memtrace.snapshot.bounds import Damaged
from memtrace.snapshot.decoder import fast_fields as fields
from memtrace.snapshot.decoder.fast_columns import TraceColumns, Values
from memtrace.snapshot.decoder.fast_contexts import Contexts, Unsupported
from memtrace.snapshot.decoder.fast_fields import I8, Sight, Texts
from memtrace.snapshot.decoder.fast_template import TEXTS, Parsed, Template, is_boundary, learn, parse, runs_end
from memtrace.snapshot.decoder.machine import Machine
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import Action
from memtrace.snapshot.trace_columns import ACTIONS, pool_id
from memtrace.snapshot.window import ReadWindow

_COMPILED = compiled.part("decoder")
_MAX_TEMPLATES = 6
_AT_ONCE = 8192  # events that the compiled part reads in one go; a window holds fewer
_FIRST_LOOK = 8  # events not resolved in a window before it is looked at again
_MAX_SLOW_SHARE = 0.2  # of a long trace; above it the C machine is faster
_SLOW_FLOOR = 20_000
_RARE = (int(Action.OOM), int(Action.UNKNOWN))


class _Look:
    """One look at a window with one template: what it found, resolved against the memo as it was then."""

    def __init__(self, parsed: Parsed, values: dict[str, NDArray[Any]], good: NDArray[np.bool_]) -> None:
        self.parsed = parsed
        self.values = values
        self.good = good
        self.resolved = parsed.ok == good
        self.stops = runs_end(parsed, good)
        self.memo_before = np.cumsum(parsed.memoized) - parsed.memoized


class _Compiled:
    """Runs of events through the compiled part; what bytes alone can't tell, it asks here."""

    def __init__(self, decoder: FastDecoder, trace: TraceColumns, bodies: Any) -> None:
        self._decoder, self._trace = decoder, trace
        self._scanner = _COMPILED.Scanner(self, *bodies)
        self._action = np.empty(_AT_ONCE, np.uint8)
        self._wide = np.empty((3, _AT_ONCE), np.int64)
        self._narrow = np.empty((6, _AT_ONCE), np.int32)
        self._slots = np.empty(_COMPILED.MOST_MEMOIZED * _AT_ONCE, np.int32)
        self._stacks = np.empty(_AT_ONCE, np.int32)
        self._shapes: dict[int, tuple[bytes, I8, dict[str, NDArray[Any]]]] = {}

    def take(self, template: Template) -> int:
        """Take the longest run of events of a shape that starts here; how many there were."""
        decoder, window, contexts = self._decoder, self._decoder.window, self._decoder.contexts
        if not decoder.regular:
            raise Unsupported
        contexts.catch_up(decoder.filled)
        keys, slots, columns = self._shape(template)
        count, behind, memoized, made, cuts, ended = self._scanner.take(
            window.data, decoder.position, window.end, window.cuts, keys, slots, decoder.filled,
            contexts.of_slots(), len(contexts), self._action, self._wide, self._narrow, self._slots, self._stacks,
        )  # fmt: skip
        if ended == _COMPILED.ENDED_REFUSED:
            raise Unsupported
        if count:
            contexts.take(self._slots[:memoized], self._stacks[:made])
            self._trace.add_run(template.keys, count, {name: values[:count] for name, values in columns.items()})
            decoder.filled += memoized
            decoder.position = behind
            del window.cuts[:cuts]
        elif ended == _COMPILED.ENDED_OUT_OF_SIGHT and not window.at_end and decoder.position > 0:
            window.move(decoder.position)
            decoder.position = 0
            return self.take(template)
        return count

    def _shape(self, template: Template) -> tuple[bytes, I8, dict[str, NDArray[Any]]]:
        """A template as the scanner reads it: keys, their memo entries, and the columns that they fill."""
        made = self._shapes.get(id(template))
        if made is None:
            names = ["context" if key == "frames" else key for key in template.keys]
            rows = dict(zip(_FIELDS, (self._action, *self._wide, *self._narrow), strict=True))
            keys = bytes(map(_COMPILED.KEYS.index, template.keys))
            made = keys, np.array(template.slots), {name: rows[name] for name in names}
            self._shapes[id(template)] = made
        return made

    # What the scanner asks.

    def action(self, number: int) -> int:
        return self._decoder._action_code(self._decoder.memo.get(number))

    def stream(self, value: int) -> int:
        return self._trace.streams.code(value)

    def text(self, number: int) -> int:
        entry = self._decoder.memo.get(number)
        return self._trace.texts.code(entry) if type(entry) is str else -1

    def written_text(self, text: bytes) -> int:
        code = _decoded(text, self._decoder.written)
        if code == len(self._decoder.written_texts):
            self._decoder.written_texts.append(text.decode("utf-8", "surrogatepass"))
        return code

    def text_written(self, code: int) -> int:
        return self._trace.texts.code(self._decoder.written_texts[code])

    def pool(self, number: int) -> int:
        return _pool_code(self._decoder.memo.get(number), self._trace.pools)

    def written_pool(self, first: int, second: int) -> int:
        return self._trace.pools.code((first, second))

    def context(self, slot: int) -> int:
        return self._decoder.contexts.of_built(slot)

    def next_context(self) -> int:
        return len(self._decoder.contexts)

    def stack(self, body: bytes) -> int:
        return self._decoder.contexts.stack_of_body(body)


_FIELDS = (
    "action", "addr", "size", "time_us", "stream", "context", "pool_id", "user_metadata", "compile_context", "category",
)  # fmt: skip


class FastDecoder(Machine):
    """Decodes one file. In the result, a :class:`TraceColumns` stands for each trace that was read by column."""

    def __init__(self, window: ReadWindow, stacks: StackInterner) -> None:
        super().__init__(window)
        self.contexts = Contexts(stacks, self.memo)
        self._traces: list[TraceColumns] = []
        self._lent = 0  # placeholders given to the machine
        self._templates: list[Template] = []
        self._looks: list[_Look] = []
        self._patience = 0  # unresolved events until the next look
        self._unresolved = 0
        self._compiled: _Compiled | None = None
        self._bodies = (_COMPILED.Bodies(), _COMPILED.Bodies()) if _COMPILED else None  # frames, texts
        self.written = Values()  # texts of skipped events, and the same by code
        self.written_texts: list[str] = []
        window.on_move = self._moved

    def _moved(self) -> None:
        self._looks = []
        self._unresolved = 0

    def load(self) -> Any:
        """The file's object. Raises Unsupported, or what the machine raises."""
        raw = super().load()
        if type(raw) is not dict or not self._traces:
            raise Unsupported
        outer = raw.get("device_traces")
        if type(outer) is not list:
            raise Unsupported
        by_list = {id(trace.late): trace for trace in self._traces}
        raw["device_traces"] = traces = [by_list.get(id(entry), entry) for entry in outer]
        used = [trace for trace in traces if type(trace) is TraceColumns]
        if len(used) != len(self._traces) or len(set(map(id, used))) != len(used):
            raise Unsupported
        for trace in used:
            trace.seal()
        returned = sum(trace.placeholders() for trace in used)
        if returned != self._lent:
            raise Unsupported  # a skipped list is used for something else than frames
        return raw

    # Hooks of the machine.

    def missing(self, number: int) -> Any:
        entry = self.contexts.at_slot(number)
        if entry is not None:
            self._lent += 1
            return entry
        text = self.contexts.text_at_slot(number)
        if text is not None:
            return self.written_texts[text]
        if 0 <= number < self.filled:
            raise Unsupported  # something within a skipped event
        raise Damaged("refers to an object it has not stored")

    def before_change(self, target: Any) -> None:
        if id(target) in self.contexts.settled:
            raise Unsupported

    def _frame(self, start: int, size: int) -> None:
        raise Unsupported  # the window has taken out all frames that follow one another

    def _rare(self, op: int) -> None:
        if op == 0x32:  # DUP: a second reference that the memo does not know of
            raise Unsupported
        super()._rare(op)

    def on_mark(self) -> bool:
        target: list[Any] = self.stack[-1]
        slot = self.filled - 1
        if target or not self.regular or self.memo.get(slot) is not target or not self._is_trace():
            return False
        del self.memo[slot]  # the list stays empty: nothing else may refer to it
        trace = TraceColumns(target)
        self._traces.append(trace)
        self._compiled = _Compiled(self, trace, self._bodies) if _COMPILED else None
        self._read_trace(trace)
        return True

    def _is_trace(self) -> bool:
        """Whether the list on top is an inner list of ``device_traces``."""
        stack, marks = self.stack, self.marks
        if len(marks) == 1:
            outer = len(stack) - 2
        elif len(marks) == 2:
            outer = marks[1] - 1
            if any(type(entry) is not list for entry in stack[marks[1] :]):
                return False
        else:
            return False
        return (
            outer > marks[0]
            and type(stack[outer]) is list
            and stack[outer - 1] == "device_traces"
            and type(stack[0]) is dict
        )

    # Traces.

    def _read_trace(self, trace: TraceColumns) -> None:
        """From the MARK of a trace's first batch to behind its last one."""
        window, stack, marks = self.window, self.stack, self.marks
        height = len(stack)
        is_open = False
        depth = len(marks)
        while True:
            if self.position >= window.end - 16 and not window.at_end:
                window.move(self.position)
                self.position = 0
            if is_open and self._take_run(trace):
                continue
            if self.position >= window.end:
                return  # the machine says what is wrong
            if window.cuts and window.cuts[0] <= self.position and window.cuts.pop(0) < self.position:
                raise Damaged("a frame begins within an opcode")
            op = window.data[self.position]
            if not is_open:
                if op != 0x28 or len(stack) != height:
                    return
                marks.append(height)
                self.position += 1
                is_open = True
            elif op == 0x65:  # APPENDS
                marks.pop()
                self.position += 1
                is_open = False
            elif op == 0x7D:  # EMPTY_DICT
                self.run(height + 1)
                if len(marks) != depth + 1 or len(stack) != height + 1 or type(stack[-1]) is not dict:
                    raise Unsupported
                self._learn(stack[-1])
                trace.add_event(stack.pop())
                if len(trace.slow) > _SLOW_FLOOR + _MAX_SLOW_SHARE * len(trace):
                    raise Unsupported
            else:
                raise Unsupported

    def _learn(self, event: dict[str, Any]) -> None:
        keys = tuple(event)
        if len(self._templates) < _MAX_TEMPLATES and all(keys != known.keys for known in self._templates):
            made = learn(event, self.memo)
            if made is not None:
                self._templates.append(made)
                self._looks = []

    def _take_run(self, trace: TraceColumns) -> bool:
        """Take the longest run of events that starts here. False if the machine must read the next one."""
        if not self._templates:
            return False
        if self._compiled is not None:
            return any(map(self._compiled.take, self._templates))
        if not self._looks or self._unresolved >= self._patience:
            self._look(trace)
        window = self.window
        for look in self._looks:
            start = look.parsed.start
            index = int(np.searchsorted(start, self.position))
            if index == len(start) or int(start[index]) != self.position:
                continue
            if not look.good[index]:
                if index == len(start) - 1 and not window.at_end and self.position > 0:
                    window.move(self.position)  # its end was out of sight
                    self.position = 0
                    return True
                self._unresolved += not look.resolved[index]
                continue
            stop = int(look.stops[np.searchsorted(look.stops, index)]) + 1
            if self._take_events(trace, look, index, stop):
                return True
        return False

    def _look(self, trace: TraceColumns) -> None:
        sight = Sight(self.window.data)
        self._looks = []
        for template in self._templates:
            parsed = parse(template, sight, self.position, self.window.end)
            good = parsed.ok.copy()
            values = self._resolve(parsed, good, trace)
            self._looks.append(_Look(parsed, values, good))
        self._patience = max(_FIRST_LOOK, 4 * self._unresolved)

    def _resolve(self, parsed: Parsed, good: NDArray[np.bool_], trace: TraceColumns) -> dict[str, NDArray[Any]]:
        """Codes of actions, streams, texts and pools; clears ``good`` where something is not known yet."""
        chosen = np.flatnonzero(good)
        values: dict[str, NDArray[Any]] = dict(parsed.integers)
        action = self._coded(parsed.action, chosen, self._action_code)
        good &= action >= 0
        values["action"] = action
        if "stream" in values:
            values["stream"] = _coded_values(values["stream"], chosen, trace.streams)
        for name in TEXTS:
            if name in parsed.texts:
                values[name] = self._text_codes(parsed.texts[name], chosen, trace.texts)
                good &= values[name] >= 0
        if parsed.pool is not None:
            values["pool_id"] = self._pool_codes(parsed.pool, chosen, trace.pools)
            good &= values["pool_id"] >= 0
        return values

    def _coded(self, numbers: I8, chosen: I8, code: Any) -> NDArray[np.int32]:
        """A code for each memo index; -1 where not chosen or not known."""
        codes = np.full(len(numbers), -1, dtype=np.int32)
        if len(chosen):
            wanted = numbers[chosen]
            found, inverse = _distinct(wanted)
            codes[chosen] = np.array([code(self.memo.get(number)) for number in found], dtype=np.int32)[inverse]
        return codes

    @staticmethod
    def _action_code(entry: Any) -> int:
        code = ACTIONS.get(entry, -1) if type(entry) is str else -1
        return -1 if code in _RARE else code

    def _text_codes(self, texts: Texts, chosen: I8, known: Values) -> NDArray[np.int32]:
        fetched = chosen[texts.reference[chosen] >= 0]
        codes = self._coded(texts.reference, fetched, lambda entry: known.code(entry) if type(entry) is str else -1)
        written = chosen[texts.reference[chosen] < 0]
        if not len(written):
            return codes
        data = self.window.data
        short = written[texts.word[written] != 0]
        if len(short):
            found, inverse = _distinct(texts.word[short].view(np.int64))
            numbers = [_decoded((n & (1 << 64) - 1).to_bytes(8, "little")[: n >> 56 & 0xFF], known) for n in found]
            codes[short] = np.array(numbers, dtype=np.int32)[inverse]
        long = written[texts.word[written] == 0]
        if len(long):
            start = texts.start[long].tolist()
            size = texts.size[long].tolist()
            cache: dict[bytes, int] = {}
            numbers = []
            for at, length in zip(start, size, strict=True):
                text = data[at : at + length]
                number = cache.get(text)
                if number is None:
                    number = cache[text] = _decoded(text, known)
                numbers.append(number)
            codes[long] = numbers
        return codes

    def _pool_codes(self, pool: tuple[I8, I8, I8], chosen: I8, known: Values) -> NDArray[np.int32]:
        number, first, second = pool
        fetched = chosen[number[chosen] >= 0]
        codes = self._coded(number, fetched, lambda entry: _pool_code(entry, known))
        written = chosen[number[chosen] < 0]
        if len(written):
            pairs = np.stack([first[written], second[written]], axis=1)
            if (pairs == pairs[0]).all():
                codes[written] = known.code((int(pairs[0, 0]), int(pairs[0, 1])))
            else:
                codes[written] = [known.code((a, b)) for a, b in pairs.tolist()]
        return codes

    def _take_events(self, trace: TraceColumns, look: _Look, start: int, stop: int) -> bool:
        """Take events ``start`` to before ``stop`` of a look, or as many of them as can be; False if none."""
        if not self.regular:
            raise Unsupported
        parsed, contexts = look.parsed, self.contexts
        stacks: list[int] = []
        written = np.zeros(0, dtype=np.int64)
        if parsed.stacks is not None:
            written = np.flatnonzero(parsed.stacks.kind[start:stop] == fields.WRITTEN)
            stacks = contexts.of_bodies(
                self.window.data,
                parsed.stacks.start[start:stop][written].tolist(),
                parsed.stacks.stop[start:stop][written].tolist(),
            )
            if len(stacks) < len(written):
                stop = start + int(written[len(stacks)])
                written = written[: len(stacks)]
            if stop == start:
                return False
        memoized = look.memo_before[start:stop] - look.memo_before[start] + parsed.memoized[start:stop]
        arrays = {name: values[start:stop] for name, values in look.values.items()}
        contexts.catch_up(self.filled)
        contexts.skip(int(memoized[-1]))
        if parsed.stacks is not None:
            last_slot = self.filled + memoized - 1  # a written list is the last that its event memoizes
            context = np.empty(stop - start, dtype=np.int32)
            context[written] = contexts.add(last_slot[written], stacks)
            fetched = np.flatnonzero(parsed.stacks.kind[start:stop] == fields.FETCHED)
            wanted = parsed.stacks.reference[start:stop][fetched]
            if (wanted > last_slot[fetched]).any():
                raise Unsupported  # fetched before it is stored
            context[fetched] = contexts.fetch(wanted)
            if (context < 0).any():
                raise Unsupported
            arrays["context"] = context
        trace.add_run(parsed.template.keys, stop - start, arrays)
        self._check_cuts(look, start, stop)
        self.filled += int(memoized[-1])
        self.position = int(parsed.end[stop - 1])
        return True

    def _check_cuts(self, look: _Look, start: int, stop: int) -> None:
        """Refuse events whose opcodes span the place of a frame's head."""
        cuts, parsed = self.window.cuts, look.parsed
        end = int(parsed.end[stop - 1])
        while cuts and cuts[0] < end:
            cut = cuts.pop(0)
            event = int(np.searchsorted(parsed.start, cut, side="right")) - 1
            at = int(parsed.start[event])
            if event < start or cut >= int(parsed.end[event]):
                continue  # between two events every opcode is one byte
            if not is_boundary(self.window.data, at, cut):
                raise Unsupported


def _distinct(values: I8) -> tuple[list[int], NDArray[np.int64] | NDArray[np.int32]]:
    """The distinct values, ascending, and where each of ``values`` stands among them."""
    low, high = int(values.min()), int(values.max())
    if low == high:
        return [low], np.zeros(len(values), dtype=np.int64)
    if high - low < 4 * len(values) + 1024:
        place = values - low
        found = np.flatnonzero(np.bincount(place, minlength=high - low + 1))
        number = np.zeros(high - low + 1, dtype=np.int32)
        number[found] = np.arange(len(found), dtype=np.int32)
        return (found + low).tolist(), number[place]
    unique, inverse = np.unique(values, return_inverse=True)
    return unique.tolist(), inverse


def _coded_values(values: I8, chosen: I8, known: Values) -> NDArray[np.int32]:
    codes = np.zeros(len(values), dtype=np.int32)
    if len(chosen):
        found, inverse = _distinct(values[chosen])
        codes[chosen] = np.array([known.code(value) for value in found], dtype=np.int32)[inverse]
    return codes


def _decoded(text: bytes, known: Values) -> int:
    try:
        return known.code(text.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return -1


def _pool_code(entry: Any, known: Values) -> int:
    if type(entry) is tuple and len(entry) == 2 and type(entry[0]) is int and type(entry[1]) is int:
        return known.code(pool_id(entry))
    return -1
