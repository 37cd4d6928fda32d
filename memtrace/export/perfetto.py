"""Perfetto's own format (protobuf): one counter track a category, phases, ranges, OOMs, nanoseconds since the epoch.

Written by hand from ``perfetto_trace.proto``, of which it needs a dozen fields, so that no package is required.
Traces of several ranks opened together line up, since all use the clock of the recordings.
"""

from __future__ import annotations

from typing import IO

from memtrace.export.tracks import Slice, Tracks

# Field numbers of perfetto/trace/perfetto_trace.proto.
_TRACE_PACKET = 1
_PACKET_TIMESTAMP, _PACKET_SEQUENCE, _PACKET_EVENT, _PACKET_FLAGS, _PACKET_DESCRIPTOR = 8, 10, 11, 13, 60
_TRACK_UUID, _TRACK_NAME, _TRACK_PROCESS, _TRACK_PARENT, _TRACK_COUNTER = 1, 2, 3, 5, 8
_PROCESS_PID, _PROCESS_NAME = 1, 6
_COUNTER_UNIT, _UNIT_BYTES = 3, 3
_EVENT_ANNOTATION, _EVENT_TYPE, _EVENT_TRACK, _EVENT_CATEGORIES, _EVENT_NAME, _EVENT_COUNTER = 4, 9, 11, 22, 23, 30
_ANNOTATION_INT, _ANNOTATION_NAME = 4, 10
_SLICE_BEGIN, _SLICE_END, _INSTANT, _COUNTER = 1, 2, 3, 4
_SEQUENCE = 1
_STATE_CLEARED = 1
_VARINT, _BYTES = 0, 2


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative int64 values are stored as their two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _message(field: int, content: bytes | str) -> bytes:
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return _varint(field << 3 | _BYTES) + _varint(len(data)) + data


class _Writer:
    """Packets to a stream. Track 1 is the device's process; others are its children."""

    def __init__(self, tracks: Tracks, name: str, out: IO[bytes]) -> None:
        self._out = out
        self._root = 1 + (tracks.device << 16)
        self._next = self._root
        process = _number(_PROCESS_PID, tracks.device + 1) + _message(_PROCESS_NAME, f"{tracks.device_name}: {name}")
        descriptor = _number(_TRACK_UUID, self._root) + _message(_TRACK_PROCESS, process)
        self._packet(_message(_PACKET_DESCRIPTOR, descriptor) + _number(_PACKET_FLAGS, _STATE_CLEARED))

    def track(self, name: str, counter: bool = False) -> int:
        """A new track's uuid."""
        self._next += 1
        descriptor = _number(_TRACK_UUID, self._next) + _message(_TRACK_NAME, name)
        descriptor += _number(_TRACK_PARENT, self._root)
        if counter:
            descriptor += _message(_TRACK_COUNTER, _number(_COUNTER_UNIT, _UNIT_BYTES))
        self._packet(_message(_PACKET_DESCRIPTOR, descriptor))
        return self._next

    def event(self, time_ns: int, content: bytes) -> None:
        """One track event."""
        self._packet(_number(_PACKET_TIMESTAMP, time_ns) + _message(_PACKET_EVENT, content))

    def slices(self, name: str, category: str, slices: tuple[Slice, ...]) -> None:
        """A track of slices, each ended before what comes after it and after what lies in it."""
        if not slices:
            return
        uuid = self.track(name)
        end = _number(_EVENT_TYPE, _SLICE_END) + _number(_EVENT_TRACK, uuid)
        open_ns: list[int] = []
        pieces = list(slices[::-1])  # of those that begin and end together, the outer one is told last
        pieces.sort(key=lambda piece: (piece.start_ns, -piece.end_ns))
        for piece in pieces:
            while open_ns and open_ns[-1] <= piece.start_ns and piece.end_ns > open_ns[-1]:
                self.event(open_ns.pop(), end)
            content = _number(_EVENT_TYPE, _SLICE_BEGIN) + _number(_EVENT_TRACK, uuid)
            content += _message(_EVENT_CATEGORIES, category) + _message(_EVENT_NAME, piece.name)
            for key, value in (("step", piece.step), ("event", piece.event)):
                content += b"" if value is None else _argument(key, value)
            self.event(piece.start_ns, content)
            open_ns.append(piece.end_ns)
        while open_ns:
            self.event(open_ns.pop(), end)

    def _packet(self, content: bytes) -> None:
        self._out.write(_message(_TRACE_PACKET, content + _number(_PACKET_SEQUENCE, _SEQUENCE)))


def _argument(name: str, value: int) -> bytes:
    return _message(_EVENT_ANNOTATION, _message(_ANNOTATION_NAME, name) + _number(_ANNOTATION_INT, value))


def write_perfetto(tracks: Tracks, name: str, out: IO[bytes]) -> None:
    """Write the trace. A counter has a sample only where its value changes."""
    writer = _Writer(tracks, name, out)
    writer.slices("phases", "phase", tracks.phases)
    writer.slices("recorded ranges", "range", tracks.ranges)
    if tracks.ooms:
        uuid = writer.track("out of memory")
        for time_ns, event, asked_bytes in tracks.ooms:
            content = _number(_EVENT_TYPE, _INSTANT) + _number(_EVENT_TRACK, uuid)
            content += _message(_EVENT_NAME, "out of memory")
            content += _argument("asked_bytes", asked_bytes) + _argument("event", event)
            writer.event(time_ns, content)
    for title, curve in (*tracks.levels.items(), *tracks.categories.items()):
        uuid = writer.track(title, counter=True)
        head = _number(_EVENT_TYPE, _COUNTER) + _number(_EVENT_TRACK, uuid)
        for time_ns, (value,) in tracks.changes(curve):
            writer.event(time_ns, head + _number(_EVENT_COUNTER, value))
