"""``load``: any snapshot file to a :class:`Snapshot`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from memtrace.errors import SnapshotError
from memtrace.snapshot.bounds import Unsupported, refuse_expansion, refuse_sharing
from memtrace.snapshot.container import Source, open_stream
from memtrace.snapshot.decoder.columns import COMPILED, WINDOW_BYTES, ColumnDecoder, TraceColumns
from memtrace.snapshot.decoder.decode import bounded_memory, decode, memory_allowance_bytes, without_gc
from memtrace.snapshot.fields import as_dicts, as_list
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import Annotation, Device, Snapshot
from memtrace.snapshot.segment_columns import read_segments
from memtrace.snapshot.trace_columns import read_trace
from memtrace.snapshot.version import release_range
from memtrace.units import printable, printable_in

_TOP_KEYS = {
    "segments", "device_traces", "allocator_settings", "external_annotations",
    "host_segments", "host_traces", "memtrace",
}  # fmt: skip
_MAX_DEVICES = 4096
_MAX_EVENTS = 1 << 30  # their numbers fit 32 bits, with as many steps
_MAX_WARNINGS = 100
Warn = Callable[[str], None]


def load(
    source: str | os.PathLike[str],
    on_progress: Callable[[float], None] | None = None,
    on_state: Callable[[Snapshot], object] | None = None,
) -> Snapshot:
    """Read a snapshot: pickle (protocols 0 to 5) or JSON, plain or ``.gz``/``.xz``/``.zst``; ``-`` is stdin.

    ``on_progress`` is called with the share of the work done, 0 to 1; ``on_state``, where the compiled decoder reads
    the file, with its segments and no trace as soon as they are known, which is long before the events are. Nothing in
    the file is ever executed.
    Raises SnapshotError (exit code 3) with one clear line for anything that is not a snapshot.
    """
    # While decoding, only the stream knows how far it is. Columns from objects take about as long as decoding does.
    scale = 1.0

    def reading(share: float) -> None:
        if on_progress is not None:
            on_progress(scale * share)

    with decoding(source, reading if on_progress else None) as opened:
        fast = load_fast(opened, on_state=on_state)
        if fast is not None:
            return fast
        scale = 0.5
        raw = decode(opened.rewind(), opened.head, opened.name)
        return from_raw(raw, opened.name, (lambda share: on_progress(0.5 + share / 2)) if on_progress else None)


@contextmanager
def decoding(source: str | os.PathLike[str], on_progress: Callable[[float], None] | None = None) -> Iterator[Source]:
    """The opened file, for decoding it in the block: within its share of memory, and without garbage collection.

    Whatever is wrong with it becomes a SnapshotError of one line that begins with its name.
    """
    with open_stream(source, on_progress) as opened, without_gc():
        try:
            with bounded_memory(memory_allowance_bytes(opened.size_bytes, opened.is_compressed)):
                yield opened
        except SnapshotError as error:
            raise SnapshotError(_named(opened.name, error)) from None
        except MemoryError:
            raise SnapshotError(f"{opened.name}: needs far more memory than a snapshot of its size; damaged") from None
        except RecursionError:
            raise SnapshotError(f"{opened.name}: nested too deeply for a snapshot") from None


def _named(name: str, error: SnapshotError) -> str:
    """The error's line, with the file's name in front unless it is there."""
    text = str(error)
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"


def load_fast(
    opened: Source, window_bytes: int = WINDOW_BYTES, on_state: Callable[[Snapshot], object] | None = None
) -> Snapshot | None:
    """By the compiled decoder; None where there is none, or where only the plain one can say what the file is."""
    if COMPILED is None or opened.head[:1] != b"\x80":
        return None

    def begun(raw: dict[Any, Any]) -> None:
        if on_state is not None:
            with suppress(Unsupported, SnapshotError, MemoryError):  # which reading the rest will meet again
                on_state(from_raw(raw, opened.name))

    decoder = ColumnDecoder(opened.stream, window_bytes, begun)
    try:
        snapshot = from_raw(decoder.load(), opened.name, stacks=decoder.stacks)
    except (Unsupported, UnicodeDecodeError, SnapshotError):
        return None
    return snapshot if decoder.is_used_up() else None


def from_raw(
    raw: Any, name: str, on_progress: Callable[[float], None] | None = None, stacks: StackInterner | None = None
) -> Snapshot:
    """A :class:`Snapshot` from the builtin containers PyTorch dumps.

    Traces may be :class:`TraceColumns` of a decoder that has added to ``stacks``.
    """
    warnings: dict[str, None] = {}  # each distinct line once, in order

    def warn(line: str) -> None:
        if len(warnings) < _MAX_WARNINGS:
            warnings.setdefault(line)

    if isinstance(raw, list):  # torch.cuda.memory_snapshot(), and PyTorch 1.13's _snapshot()
        raw = {"segments": raw}
        is_list = True
    elif type(raw) is dict:
        is_list = False
    else:
        raise SnapshotError(f"a {type(raw).__name__}, not a memory snapshot (a dictionary with 'segments')")
    if "segments" not in raw:
        raise SnapshotError("a dictionary without 'segments', so not a memory snapshot")
    for key in sorted(str(key)[:60] for key in raw if key not in _TOP_KEYS):
        warn(f"unknown top-level key {key!r}: ignored")
    keys = () if is_list else tuple(printable(str(key)[:60]) for key in raw)

    segments = as_dicts(raw["segments"], "segments")
    traces = as_list(raw.get("device_traces") or [], "device_traces")
    if len(traces) > _MAX_DEVICES:
        raise SnapshotError(f"{len(traces)} device traces; no machine has that many devices")
    refuse_sharing(traces)
    refuse_sharing([segments, *(segment.get("blocks") for segment in segments)])
    settings = _dictionary(raw.get("allocator_settings"), "allocator_settings", warn)
    at_least, below = release_range(_samples(None if is_list else raw, segments, traces, settings))
    if is_list and at_least == "2.1":
        below = None  # memory_snapshot() still returns the bare list, without the keys that would tell more

    stacks = stacks or StackInterner()
    devices = _devices(segments, traces, stacks, warn, on_progress)
    host_segments, _ = (as_list(raw.get(key) or [], key) for key in ("host_segments", "host_traces"))
    return Snapshot(
        source=name,
        devices=devices,
        stacks=stacks.table(),
        annotations=_annotations(raw.get("external_annotations"), warn),
        settings=settings,
        memtrace=_dictionary(raw.get("memtrace"), "memtrace", warn),
        keys=keys,
        torch_at_least=at_least,
        torch_below=below,
        host_reserved_bytes=sum(
            segment["total_size"]
            for segment in host_segments
            if isinstance(segment, dict) and isinstance(segment.get("total_size"), int)
        ),
        warnings=tuple(warnings),
    )


def _devices(
    segments: list[dict[str, Any]],
    traces: list[Any],
    stacks: StackInterner,
    warn: Warn,
    on_progress: Callable[[float], None] | None,
) -> tuple[Device, ...]:
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        ordinal = segment.get("device")
        if not isinstance(ordinal, int) or not 0 <= ordinal < _MAX_DEVICES:
            raise SnapshotError("a segment's 'device' is not a device number")
        by_device.setdefault(ordinal, []).append(segment)
    with_data = sorted(set(by_device) | {i for i, trace in enumerate(traces) if trace}) or [0]
    devices = []
    for done, ordinal in enumerate(with_data):
        raw_trace = traces[ordinal] if ordinal < len(traces) else []
        if isinstance(raw_trace, TraceColumns):
            trace = raw_trace.read(ordinal, warn)
        else:
            trace = read_trace(ordinal, raw_trace, stacks, warn)
        if len(trace) > _MAX_EVENTS:
            raise SnapshotError(f"{len(trace)} events of one device; no recording is that long")
        columns = read_segments(by_device.get(ordinal, []), stacks, warn)
        if on_progress is not None:
            on_progress((done + 1) / len(with_data))
        devices.append(Device(ordinal, trace, *columns))
    return tuple(devices)


def _samples(
    top: dict[str, Any] | None, segments: list[dict[str, Any]], traces: list[Any], settings: dict[str, Any]
) -> dict[str, dict[str, Any] | None]:
    """One recorded dictionary of each kind, for judging the release."""
    trace = next((trace for trace in traces if isinstance(trace, (list, TraceColumns)) and trace), [])
    edge = trace.edge_events() if isinstance(trace, TraceColumns) else trace[:200] + trace[-200:]
    events = [event for event in edge if type(event) is dict]
    event = {key: None for event in events for key in event} if events else None
    lists = (s["blocks"] for s in segments if isinstance(s.get("blocks"), list))
    block = next((b for blocks in lists for b in blocks if type(b) is dict), None)
    return {
        "top": top,
        "segment": segments[0] if segments else None,
        "block": block,
        "event": event,
        "settings": settings or None,
    }


def _dictionary(value: Any, what: str, warn: Warn) -> dict[str, Any]:
    if value is None:
        return {}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        refuse_expansion(value, what)
        return printable_in(value)
    warn(f"{what!r} is not a dictionary of names: ignored")
    return {}


def _annotations(value: Any, warn: Warn) -> tuple[Annotation, ...]:
    found = []
    for entry in as_list(value or [], "external_annotations"):
        if type(entry) is dict:
            device, time_us = entry.get("device"), entry.get("time_us")
            name, stage = entry.get("name"), entry.get("stage")
            if (
                isinstance(device, int)
                and isinstance(time_us, int)
                and isinstance(name, str)
                and isinstance(stage, str)
            ):
                found.append(Annotation(device, time_us, printable(name), printable(stage)))
                continue
        warn("malformed entries in 'external_annotations': ignored")
    return tuple(found)
