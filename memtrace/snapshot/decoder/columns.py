"""A snapshot's pickle straight to columns: what the compiled reader asks, and the trace that it fills.

The reader (``_reader.pyx``) runs the whole pickle, of any protocol that PyTorch's dumps use. Within a trace it writes
each event into columns as it reads it; the few events of a rare kind (a refusal, a key that is not known) are built and
read by the functions that read dictionaries. What it is not sure of raises Unsupported, and the plain decoder reads the
file: both give the same snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from memtrace import compiled
from memtrace.snapshot.bounds import Unsupported
from memtrace.snapshot.fields import addresses, integers, sizes
from memtrace.snapshot.intern import ListRef, StackInterner
from memtrace.snapshot.model import Action, DeviceTrace, PoolId
from memtrace.snapshot.trace_columns import ACTIONS, TEXTS, finished, pool_id, shown_name

COMPILED = compiled.part("decoder")
WINDOW_BYTES = 512 << 10  # with its columns, what stays in a processor's cache
_MAX_RARE_SHARE = 0.2  # of a long trace; above it objects are as fast
_RARE_FLOOR = 20_000
_ASKED = (int(Action.OOM), int(Action.UNKNOWN))  # read as dictionaries


class TraceColumns:
    """One trace while it is read. ``coded`` are the columns of streams, pools and texts: None while all codes are 0."""

    def __init__(self, decoder: ColumnDecoder, stand_in: list[Any]) -> None:
        self._decoder = decoder
        self.stand_in = stand_in  # the pickle's own list, which stays empty
        self.action = np.empty(0, np.uint8)
        self.wide = [np.empty(0, np.int64) for _ in range(3)]  # address, size, time
        self.lists, self.stacks = np.empty(0, np.int32), np.empty(0, np.int32)
        self.coded: list[NDArray[np.int32] | None] = [None] * 5
        self._values: list[dict[Any, int]] = [{} for _ in self.coded]  # by code, in order of appearance
        self._rare: dict[int, dict[str, Any]] = {}
        self._unknown: dict[int, str] = {}
        self._lacks_size = False
        self.first_keys: list[str] = []
        self.first_masks = 0
        self._edge_keys: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    # What the reader asks.

    def grow(self, room: int) -> int:
        """Make room for so many events; growing moves pages, not bytes, where the system can."""
        for column in (self.action, *self.wide, self.lists, self.stacks, *self.coded):
            if column is not None:
                column.resize(room, refcheck=False)
        return room

    def spread(self, column: int) -> None:
        """Write a coded column out."""
        self.coded[column] = np.zeros(len(self.action), np.int32)

    def stream_code(self, value: int) -> int:
        return _code(self._values[0], value)

    def pool_code(self, value: Any) -> int:
        return _code(self._values[1], pool_id(value))

    def text_code(self, column: int, text: str) -> int:
        return _code(self._values[2 + column], text)

    def rare(self, at: int, event: dict[str, Any]) -> tuple[Any, ...]:
        """The columns of an event that was built."""
        name, stream, texts = event.get("action"), event.get("stream", 0), [event.get(key, "") for key in TEXTS]
        if type(name) is not str or type(stream) is not int or any(type(text) is not str for text in texts):
            raise Unsupported("an odd event")
        code = ACTIONS.get(name, int(Action.UNKNOWN))
        if code == Action.UNKNOWN:
            self._unknown[at] = shown_name(name)
        self._lacks_size |= event.get("size") is None
        if not at:
            self.first_keys = list(event)
        self._rare[at] = event
        if len(self._rare) > _RARE_FLOOR + _MAX_RARE_SHARE * at:
            raise Unsupported("too many odd events")
        return (
            code, addresses([event], "addr", "", 0)[0], sizes([event], "size", "", 0)[0],
            integers([event], "time_us", "", 0)[0], self._decoder.context_of(event.get("frames")),
            self.stream_code(stream), self.pool_code(event.get("pool_id")), *map(self.text_code, range(3), texts),
        )  # fmt: skip

    def close(self, count: int, last_masks: list[int]) -> None:
        """The trace is read. ``last_masks`` are the keys of its last events, one bit each."""
        self.grow(count)
        self._count = count
        self._edge_keys = self.keys_of(reduce(or_, last_masks, self.first_masks))

    @staticmethod
    def keys_of(mask: int) -> list[str]:
        """The keys that a mask has a bit for."""
        return [key for i, key in enumerate(COMPILED.KEYS) if mask >> i & 1]

    # What it comes to.

    def edge_events(self) -> list[dict[str, Any]]:
        """Keys of the first and last events, as dictionaries."""
        edge = COMPILED.EDGE_EVENTS
        rare = [event for at, event in self._rare.items() if at < edge or at >= self._count - edge]
        return [dict.fromkeys(self._edge_keys), *rare] if self._count else []

    def read(self, device: int, warn: Any) -> DeviceTrace:
        """The finished trace; may be called once. ``warn`` is called with one line for each oddity."""
        if self._lacks_size and not self._unknown:
            raise Unsupported("an event without a size")
        address, size, time_us = self.wide
        nothing = np.empty(0, np.int32)
        return finished(
            self._rare,
            warn,
            self.first_keys,
            [(nothing if codes is None else codes, list(v)) for codes, v in zip(self.coded, self._values, strict=True)],
            device=device,
            action=self.action,
            address=address,
            size=size,
            time_us=time_us if "time_us" in self.first_keys else None,
            stack=self.stacks,
            context=self.lists,
            unknown_actions=self._unknown,
        )


def _code(codes: dict[Any, int], value: Any) -> int:
    return codes.setdefault(value, len(codes))


class ColumnDecoder:
    """Reads one file. In the result, a :class:`TraceColumns` stands for each trace that was read by column.

    ``on_traces`` is called where the first trace begins, with what the outer dictionary holds so far.
    """

    def __init__(
        self,
        stream: BinaryIO,
        window_bytes: int = WINDOW_BYTES,
        on_traces: Callable[[dict[Any, Any]], object] | None = None,
    ) -> None:
        self.stacks = StackInterner()
        self.pairs: list[PoolId] = []  # pool ids that are stored
        self._pair_numbers: dict[PoolId, int] = {}
        self.lent = 0  # stand-ins for lists that were not built
        self.of_list: dict[int, tuple[int, int]] = {}  # by id of a list of frames: number and stack
        self.settled: set[int] = set()  # ids of lists and frames that were read and must not change any more
        self._traces: list[TraceColumns] = []
        self._on_traces = on_traces
        self._reader = COMPILED.Reader(self, stream, window_bytes)

    def load(self) -> Any:
        """The file's object. Raises Unsupported."""
        try:
            raw = self._reader.load()
        finally:
            self._reader = None  # its tables are as large as the columns, and it refers to this
        outer = raw.get("device_traces") if type(raw) is dict else []
        read, self._traces = self._traces, []  # which refer to this: they are to go with what they became
        if read:
            if type(outer) is not list:
                raise Unsupported("traces elsewhere")
            by_list = {id(trace.stand_in): trace for trace in read}
            raw["device_traces"] = traces = [by_list.get(id(entry), entry) for entry in outer]
            used = [trace for trace in traces if type(trace) is TraceColumns]
            if len(used) != len(by_list) or len(set(map(id, used))) != len(used) or any(t.stand_in for t in used):
                raise Unsupported("a trace used twice")
        return raw

    def is_used_up(self) -> bool:
        """Whether every list that was not built was asked for as the frames of something."""
        return self.lent == self.stacks.returned

    def context_of(self, frames: Any) -> tuple[int, int]:
        """(number, stack) of the frames of an event that was built; -1 for None."""
        if frames is None:
            return -1, -1
        if type(frames) is ListRef:
            return frames.context, self.stacks.add(frames)
        if type(frames) is not list:
            raise Unsupported("frames that are not a list")
        found: tuple[int, int] = self._reader.known(frames)
        return found

    # What the reader asks.

    def action(self, text: str) -> int:
        """The number of an action; -1 for other texts and for rare ones."""
        code = ACTIONS.get(text, -1)
        return -1 if code in _ASKED else code

    def pair(self, value: PoolId) -> int:
        """The number of a pool id in ``pairs``."""
        number = self._pair_numbers.setdefault(value, len(self.pairs))
        if number == len(self.pairs):
            self.pairs.append(value)
        return number

    def stack(self, frames: list[Any]) -> int:
        """The stack of a list of frames."""
        self.settled.update(map(id, frames))
        return self.stacks.add(frames)

    def new_trace(self, stand_in: list[Any]) -> TraceColumns:
        """A trace begins."""
        self._traces.append(TraceColumns(self, stand_in))
        return self._traces[-1]

    def is_trace(self, stack: list[Any], marks: list[int]) -> bool:
        """Whether the list on top is an inner list of ``device_traces``."""
        if len(marks) == 1:
            outer = len(stack) - 2
        elif len(marks) == 2 and all(type(entry) is list for entry in stack[marks[1] :]):
            outer = marks[1] - 1
        else:
            return False
        found = (
            outer > marks[0]
            and type(stack[outer]) is list
            and stack[outer - 1] == "device_traces"
            and type(stack[0]) is dict
        )
        if found and self._on_traces is not None:
            tell, self._on_traces = self._on_traces, None
            items = stack[marks[0] : outer - 1]
            tell({key: value for key, value in zip(items[::2], items[1::2], strict=False) if type(key) is str})
        return found
