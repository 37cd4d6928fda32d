"""Makes a recording of any length out of a real one: its steady steps, repeated, byte for byte as PyTorch pickles them.

    python benchmarks/big_recording.py OUT.pickle [--events 7000000] [--from RECORDING.pickle.xz]

A span of the real trace that ends in exactly the memory it began with (same blocks at the same addresses) can follow
itself any number of times: the result is a sound trace, which the allocator replay confirms. Only times move on.
"""

from __future__ import annotations

import argparse
import io
import lzma
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Action

DEFAULT = Path(__file__).parents[1] / "sample_traces" / "llama2-7b_variable-length.pickle.xz"
_FRAME_BYTES = 64 << 10
_BATCH = 1000


def _mixed(*columns: Any) -> Any:
    """A 64-bit hash of each row."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
    return mixed


def steady_span(timeline: Timeline) -> tuple[int, int]:
    """(first event, event behind the last) of the longest span that leaves memory as it was."""
    table, action = timeline.allocations, timeline.trace.action
    state = np.zeros(len(timeline), np.uint64)
    blocks = _mixed(table.address, table.block_bytes, table.requested_bytes)
    for events in (table.alloc_event, table.free_completed_event):
        np.bitwise_xor.at(state, events[events >= 0], blocks[events >= 0])
    segments = (action >= Action.SEGMENT_ALLOC) & (action <= Action.SEGMENT_UNMAP)
    state[segments] ^= _mixed(timeline.trace.address, timeline.trace.size)[segments]
    state = np.bitwise_xor.accumulate(state)
    order = np.argsort(state, kind="stable")
    first = np.flatnonzero(np.append(True, np.diff(state[order]) != 0))
    last = np.append(first[1:], len(order)) - 1
    longest = int(np.argmax(order[last] - order[first]))
    return int(order[first[longest]]) + 1, int(order[last[longest]]) + 1


def _fetch(number: int) -> bytes:
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")


def _integer(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


class _Emitter:
    """Pickles events like the C pickler would go on, given its memo."""

    def __init__(self, memo: dict[int, tuple[int, Any]]) -> None:
        self.memo = memo
        self.next = len(memo)

    def plan(self, events: list[dict[str, Any]]) -> list[tuple[bytes, int, bytes, int, int, bool]]:
        """For each event: bytes before the time, the time, bytes behind it, memo entries, its list's, and whose."""
        plan = []
        place: dict[int, int] = {}
        at = 0
        for event in events:
            entries, at_list, is_local = 1, -1, False
            parts: list[bytes] = [b"}\x94("]
            before = b""
            for key, value in event.items():
                parts.append(_fetch(self.memo[id(key)][0]))
                if key == "time_us":
                    before, parts = b"".join(parts), []
                elif isinstance(value, int):
                    parts.append(_integer(value))
                elif isinstance(value, str) and key == "compile_context":
                    parts.append(b"\x8c%c" % len(value) + value.encode() + b"\x94")
                    entries += 1
                elif isinstance(value, str):
                    parts.append(_fetch(self.memo[id(value)][0]))
                elif id(value) in place:
                    at_list, is_local = place[id(value)], True
                elif event["action"] == "free_completed":  # shared with a free before the span
                    parts.append(_fetch(self.memo[id(value)][0]))
                else:
                    body = b"".join(_fetch(self.memo[id(frame)][0]) for frame in value)
                    one = len(value) == 1
                    parts.append(b"]\x94" + (b"" if not body else body + b"a" if one else b"(" + body + b"e"))
                    place[id(value)] = at + entries
                    entries += 1
            plan.append((before, event["time_us"], b"".join(parts), entries, at_list, is_local))
            at += entries
        return plan

    def emit(
        self, plan: list[tuple[bytes, int, bytes, int, int, bool]], shift_us: int
    ) -> Iterator[tuple[bytes, bytes]]:
        """Two parts of each event."""
        base = self.next
        for before, time_us, behind, entries, at_list, is_local in plan:
            now = time_us + shift_us
            tail = behind + _fetch(base + at_list) + b"u" if is_local else behind + b"u"
            yield before, b"\x8a\x07" + now.to_bytes(7, "little") + tail
            self.next += entries


def write(source: Path, out: IO[bytes], events: int) -> tuple[int, int]:
    """Write a recording of about ``events`` events; returns (events, bytes)."""
    data = lzma.decompress(source.read_bytes()) if source.suffix == ".xz" else source.read_bytes()
    snapshot = load(source)
    start, stop = steady_span(build(snapshot, snapshot.devices[0]))
    raw = pickle.loads(data)
    del data
    (trace,) = raw.pop("device_traces")
    span, rest = trace[start:stop], trace[stop:]
    repeats = max(0, round((events - len(trace)) / len(span)))
    raw["device_traces"] = [trace[:stop]]
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.dump(raw)
    head = bytearray(buffer.getvalue())
    emitter = _Emitter(pickler.memo.copy())
    if head[-4:] != b"eau.":
        raise SystemExit("this recording's trace ends in a batch of one event; choose another")
    at = 2
    while at + 9 + int.from_bytes(head[at + 1 : at + 9], "little") < len(head):
        at += 9 + int.from_bytes(head[at + 1 : at + 9], "little")
    del head[-4:]
    head[at + 1 : at + 9] = (len(head) - at - 9).to_bytes(8, "little")
    out.write(head)
    written = len(head)
    period_us = span[-1]["time_us"] - span[0]["time_us"] + 1000
    plan = emitter.plan(span)
    frame = bytearray()
    in_batch = len(trace[:stop]) % _BATCH

    def flush() -> None:
        nonlocal written
        out.write(b"\x95" + len(frame).to_bytes(8, "little") + frame)
        written += 9 + len(frame)
        frame.clear()

    runs = [(plan, number * period_us) for number in range(1, repeats + 1)] + [(None, (repeats + 1) * period_us)]
    for planned, shift_us in runs:
        for before, behind in emitter.emit(planned if planned is not None else emitter.plan(rest), shift_us):
            if in_batch == _BATCH:
                frame += b"e("
                in_batch = 0
            in_batch += 1
            frame += before
            if len(frame) >= _FRAME_BYTES:
                flush()  # PyTorch's frames end within an event as well
            frame += behind
    frame += b"eau."
    flush()
    return len(trace) + repeats * len(span), written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=int, default=7_000_000)
    parser.add_argument("--from", dest="source", type=Path, default=DEFAULT)
    args = parser.parse_args()
    with args.out.open("wb") as out:
        events, size_bytes = write(args.source, out, args.events)
    print(f"{args.out}: {events:,} events, {size_bytes / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
