"""A trace collected as columns while it is decoded, and its end result: the same :class:`DeviceTrace` as from objects.

Runs of events arrive as arrays; the few events that only the pickle machine could read stay dictionaries and are
filled in at the end by the functions that read dictionaries, so that both kinds mean the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.snapshot.decoder.fast_contexts import Column, ContextRef, Contexts, Unsupported
from memtrace.snapshot.fields import addresses, sizes
from memtrace.snapshot.fields import integers as read_integers
from memtrace.snapshot.model import DEFAULT_POOL, Action, DeviceTrace, PoolId
from memtrace.snapshot.trace_columns import (
    ACTIONS,
    finished,
    pool_id,
    shown_name,
)

I4 = NDArray[np.int32]
_MAX_SIZE_BYTES = 1 << 60
_MAX_ADDRESS = 1 << 62
_EDGE = 200  # events at either end that tell the release


class Values:
    """Distinct values in order of arrival, by code."""

    def __init__(self, first: Sequence[Hashable] = ()) -> None:
        self.codes: dict[Any, int] = {value: code for code, value in enumerate(first)}

    def code(self, value: Hashable) -> int:
        """The value's code."""
        return self.codes.setdefault(value, len(self.codes))


class TraceColumns:
    """One trace while it is decoded."""

    def __init__(self, late: list[Any]) -> None:
        self.late = late  # the pickle's own list: what the machine adds behind the runs
        self.streams, self.pools = Values(), Values((DEFAULT_POOL,))
        self.texts = Values(("",))
        self.columns = {
            "action": Column(np.uint8), "addr": Column(np.int64), "size": Column(np.int64), "time_us": Column(np.int64),
            "stream": Column(np.int32), "context": Column(np.int32), "pool_id": Column(np.int32),
            "user_metadata": Column(np.int32), "compile_context": Column(np.int32), "category": Column(np.int32),
        }  # fmt: skip
        self.slow: list[tuple[int, dict[str, Any]]] = []
        self.runs: list[tuple[int, int, tuple[str, ...]]] = []  # first event, events, their keys

    def __len__(self) -> int:
        return len(self.columns["action"]) + len(self.late)

    def add_run(self, keys: tuple[str, ...], count: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Append events as arrays; fields that their keys lack get what a missing key means."""
        self.runs.append((len(self.columns["action"]), count, keys))
        for name, column in self.columns.items():
            values = arrays.get(name)
            if values is not None:
                column.extend(values)
            else:
                column.fill(self._missing(name), count)

    def _missing(self, name: str) -> int:
        if name == "context":
            return -1
        return self.streams.code(0) if name == "stream" else 0

    def add_event(self, event: dict[str, Any]) -> None:
        """Append one event as the machine built it."""
        self.slow.append((len(self.columns["action"]), event))
        for column in self.columns.values():
            column.fill(0, 1)

    def edge_events(self) -> list[dict[str, Any]]:
        """Keys of the first and last events, as dictionaries without values."""
        count = len(self.columns["action"])
        found = [
            dict.fromkeys(keys) for start, many, keys in self.runs if start < _EDGE or start + many > count - _EDGE
        ]
        return found + [event for at, event in self.slow if at < _EDGE or at >= count - _EDGE]

    def seal(self) -> None:
        """Take over what the machine added behind the runs. Raises Unsupported if that is not an event."""
        late, self.late = self.late, []
        for event in late:
            if type(event) is not dict:
                raise Unsupported
            self.add_event(event)

    def placeholders(self) -> int:
        """How many of the machine's events have frames that were skipped."""
        return sum(type(event.get("frames")) is ContextRef for _, event in self.slow)

    def _first_keys(self) -> tuple[str, ...]:
        if self.runs and self.runs[0][0] == 0:
            return self.runs[0][2]
        return tuple(self.slow[0][1]) if self.slow else ()

    def read(self, device: int, contexts: Contexts, warn: Any) -> DeviceTrace:
        """The finished trace; may be called once. ``warn`` is called with one line for each oddity."""
        columns, slow = self.columns, self.slow
        what = f"device_traces[{device}]"
        at = np.array([i for i, _ in slow], dtype=np.int64)
        events = [event for _, event in slow]
        unknown = self._fill_in(at, events, contexts, what)
        action = columns["action"].array()
        count = len(action)
        address, size = columns["addr"].array(), columns["size"].array()
        if count and (
            min(int(address.min()), int(size.min())) < 0
            or int(address.max()) > _MAX_ADDRESS
            or int(size.max()) >= _MAX_SIZE_BYTES
        ):
            raise Unsupported  # the other decoder names the entry
        first_keys = self._first_keys()
        stream, stream_values = by_appearance(columns["stream"].array(), list(self.streams.codes), ())
        strings: tuple[Any, ...] = ("",)
        texts = list(self.texts.codes)
        user_metadata, strings = by_appearance(columns["user_metadata"].array(), texts, strings)
        compile_context, strings = by_appearance(columns["compile_context"].array(), texts, strings)
        category = None
        if "category" in first_keys:
            category, strings = by_appearance(columns["category"].array(), texts, strings)
        if "N/A" in strings:  # what PyTorch writes for "no compiled region"
            compile_context = _replaced(compile_context, strings.index("N/A"), 0)
        pools: tuple[PoolId, ...] = (DEFAULT_POOL,)
        pool: I4 = np.broadcast_to(np.int32(-1), (count,))
        if "pool_id" in first_keys:
            pool, pools = by_appearance(columns["pool_id"].array(), list(self.pools.codes), pools)
        context = columns["context"].array()
        stack = contexts.stacks(context)
        _number_from_zero(context, len(contexts))
        time_us = columns["time_us"].array() if "time_us" in first_keys else None
        self.columns = {}
        return finished(
            dict(slow),
            warn,
            device=device,
            action=action,
            address=address,
            size=size,
            stream=stream,
            streams=stream_values,
            time_us=time_us,
            stack=stack,
            context=context,
            pool=pool,
            pools=pools,
            user_metadata=user_metadata,
            compile_context=compile_context,
            strings=strings,
            unknown_actions=unknown,
            category=category,
        )

    def _fill_in(self, at: Any, events: list[dict[str, Any]], contexts: Contexts, what: str) -> dict[int, str]:
        """Write the machine's events into the columns; returns the unknown actions by event."""
        columns = self.columns
        names = [event.get("action") for event in events]
        if not all(type(name) is str for name in names):
            raise Unsupported
        codes = [ACTIONS.get(str(name), int(Action.UNKNOWN)) for name in names]
        unknown = {
            int(i): shown_name(name)
            for i, name, code in zip(at, names, codes, strict=True)
            if code == int(Action.UNKNOWN)
        }
        if not events:
            return unknown
        columns["action"].view()[at] = codes
        columns["addr"].view()[at] = addresses(events, "addr", what, 0)
        columns["size"].view()[at] = sizes(events, "size", what, 0 if unknown else None)
        columns["time_us"].view()[at] = read_integers(events, "time_us", what, 0)
        columns["stream"].view()[at] = [self.streams.code(_exactly(int, e.get("stream", 0))) for e in events]
        columns["pool_id"].view()[at] = [self.pools.code(pool_id(e.get("pool_id"))) for e in events]
        for name in ("user_metadata", "compile_context", "category"):
            columns[name].view()[at] = [self.texts.code(_exactly(str, e.get(name, ""))) for e in events]
        columns["context"].view()[at] = [contexts.of_frames(event.get("frames")) for event in events]
        return unknown


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Unsupported
    return value


def _replaced(codes: I4, old: int, new: int) -> I4:
    """``codes`` with one value replaced; arrays of one value stay as small as they are."""
    if not codes.flags.writeable:
        return np.broadcast_to(np.int32(new), codes.shape) if len(codes) and codes[0] == old else codes
    codes[codes == old] = new
    return codes


def _number_from_zero(context: I4, count: int) -> None:
    """Renumber in place, order kept, so that a trace's contexts start at 0; -1 stays."""
    used = np.zeros(count + 1, dtype=np.bool_)
    used[context] = True  # -1 marks the spare last one
    used[-1] = False
    lut = np.cumsum(used, dtype=np.int32) - 1
    lut[-1] = -1
    context[:] = lut[context]


_PIECE = 1 << 20


def by_appearance(codes: I4, values: list[Any], first: tuple[Any, ...]) -> tuple[I4, tuple[Any, ...]]:
    """Codes and values numbered as they appear, behind the values ``first``; unused values are dropped."""
    count = len(codes)
    seen = np.full(len(values), count, dtype=np.int64)
    for start in reversed(range(0, count, _PIECE)):
        piece = codes[start : start + _PIECE][::-1]
        seen[piece] = np.arange(start + len(piece) - 1, start - 1, -1)  # of equal codes the last one written stays
    order = [code for code in np.argsort(seen, kind="stable").tolist() if seen[code] < count]
    result = {value: code for code, value in enumerate(first)}
    lut = np.zeros(max(len(values), 1), dtype=np.int32)
    for code in order:
        lut[code] = result.setdefault(values[code], len(result))
    if count and len(order) == 1:
        return np.broadcast_to(lut[order[0]], (count,)), tuple(result)
    codes[:] = lut[codes]
    return codes, tuple(result)
