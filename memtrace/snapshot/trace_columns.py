"""One device's recorded events to a :class:`DeviceTrace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from memtrace.errors import SnapshotError
from memtrace.snapshot.fields import addresses, as_dicts, integers, interned, kind_of, sizes
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import DEFAULT_POOL, Action, DeviceTrace, PoolId
from memtrace.units import printable

ACTIONS = {action.name.lower(): int(action) for action in Action if action is not Action.UNKNOWN}
KNOWN_KEYS = {
    "action", "addr", "device_free", "size", "stream", "time_us", "compile_context", "user_metadata",
    "internal_metadata", "pool_id", "frames", "forward_frames", "cpp_frames", "category",
}  # fmt: skip
_COLUMNS = ("action", "address", "size", "stream", "stack", "context", "pool", "user_metadata", "compile_context")


def read_trace(device: int, raw: Any, stacks: StackInterner, warn: Any) -> DeviceTrace:
    """Columns of one inner list of ``device_traces``. ``warn`` is called with one line for each oddity."""
    what = f"device_traces[{device}]"
    entries = as_dicts(raw, what)
    names = [entry.get("action") for entry in entries]
    try:
        codes = [ACTIONS.get(name, int(Action.UNKNOWN)) for name in names]  # type: ignore[arg-type]
    except TypeError:
        raise SnapshotError(f"{what}: an entry's 'action' is not a text") from None
    action = np.array(codes, dtype=np.uint8)
    unknown = {int(i): shown_name(names[i]) for i in np.flatnonzero(action == Action.UNKNOWN)}
    size_default = 0 if unknown else None
    stream, stream_values = interned(entries, "stream", 0)
    frames = [entry.get("frames") for entry in entries]
    stack, context = stacks.column(frames)
    strings: tuple[str, ...] = ("",)
    user_metadata, strings = interned(entries, "user_metadata", "", strings)
    compile_context, strings = interned(entries, "compile_context", "", strings)
    category = None
    if entries and "category" in entries[0]:
        category, strings = interned(entries, "category", "", strings)
    strings = tuple(text if isinstance(text, str) else "" for text in strings)
    if "N/A" in strings:  # what PyTorch writes for "no compiled region"
        compile_context[compile_context == strings.index("N/A")] = 0
    pool, pools = _pools(entries)
    return finished(
        entries,
        warn,
        device=device,
        action=action,
        address=addresses(entries, "addr", what, 0),
        size=sizes(entries, "size", what, size_default),
        stream=stream,
        streams=stream_values,
        time_us=integers(entries, "time_us", what, 0) if entries and "time_us" in entries[0] else None,
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


def finished(
    entries: Sequence[dict[str, Any]] | Mapping[int, dict[str, Any]], warn: Any, **columns: Any
) -> DeviceTrace:
    """The trace of these columns, with what is rare read from the entries: all of them, or by event those that have it.

    ``streams`` are values as recorded. Events are sorted where the ring was rotated wrongly.
    """

    def numbered() -> Iterable[tuple[int, dict[str, Any]]]:
        return entries.items() if isinstance(entries, Mapping) else enumerate(entries)

    for name in sorted(set(columns["unknown_actions"].values())):
        warn(f"unknown action {name!r} in the trace: kept, and ignored for the state of memory")
    looked_at = sampled(len(columns["action"]))
    if isinstance(entries, Mapping):
        keys = {key for i, entry in entries.items() if i in looked_at for key in entry}
    else:
        keys = set().union(*(entries[i] for i in looked_at))
    for key in sorted(map(str, keys - KNOWN_KEYS)):
        warn(f"unknown key {key[:60]!r} in trace entries: ignored")
    columns["strings"] = tuple(map(printable, columns["strings"]))
    columns["streams"] = tuple(stream_handle(value) for value in columns["streams"])
    trace = DeviceTrace(
        oom_device_free_bytes={
            i: device_free(entries[i]) for i in np.flatnonzero(columns["action"] == Action.OOM).tolist()
        },
        forward_frames=forward_frames(numbered()),
        internal_metadata=internal_metadata(numbered()),
        **columns,
    )
    return in_time_order(trace, warn)


def shown_name(value: Any) -> str:
    """A recorded name that is safe to print; anything but a text is named by its kind."""
    return printable(value[:200]) if isinstance(value, str) else kind_of(value)


def sampled(count: int) -> range:
    """Positions to look at for unknown keys: all of a short trace, some of a long one."""
    return range(0, count, max(1, count // 2000))


def stream_handle(value: Any) -> int:
    """A stream handle as signed 64 bits; 0 (the default stream) for anything that is none."""
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else 0


def device_free(entry: dict[str, Any]) -> int:
    value = entry.get("device_free")
    return value if isinstance(value, int) and 0 <= value < 1 << 60 else -1


def pool_id(value: Any) -> PoolId:
    """A recorded pool id (a tuple, or a list after a JSON round trip); the default pool for anything else."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        first, second = value
        if isinstance(first, int) and isinstance(second, int) and abs(first) < 1 << 63 and abs(second) < 1 << 63:
            return int(first), int(second)
    return DEFAULT_POOL


def _pools(entries: list[dict[str, Any]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], tuple[PoolId, ...]]:
    if not entries or "pool_id" not in entries[0]:
        return np.full(len(entries), -1, dtype=np.int32), (DEFAULT_POOL,)
    codes: dict[PoolId, int] = {DEFAULT_POOL: 0}
    column = [codes.setdefault(pool_id(entry.get("pool_id")), len(codes)) for entry in entries]
    return np.array(column, dtype=np.int32), tuple(codes)


def forward_frames(entries: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, tuple[str, ...]]:
    """``forward_frames`` of the numbered entries that have them."""
    found: dict[int, tuple[str, ...]] = {}
    for i, entry in entries:
        if "forward_frames" in entry:
            value = entry["forward_frames"]
            if isinstance(value, list) and all(isinstance(line, str) for line in value):
                found[i] = tuple(map(printable, value))
    return found


def internal_metadata(entries: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, str]:
    """``internal_metadata`` of the numbered entries that have it, as text."""
    return {i: _short(entry["internal_metadata"]) for i, entry in entries if "internal_metadata" in entry}


def _short(value: Any) -> str:
    """A text of bounded cost: writing out lists that share lists could take forever."""
    return printable(str(value)[:200]) if isinstance(value, (str, int, float, type(None))) else type(value).__name__


def in_time_order(trace: DeviceTrace, warn: Any) -> DeviceTrace:
    """List order is the true order, except after ``max_entries`` was lowered: the ring is then rotated wrongly."""
    time_us = trace.time_us
    if time_us is None or len(time_us) < 2 or not (np.diff(time_us) < 0).any():
        return trace
    warn("events are not in time order (max_entries was probably lowered while recording): sorted by time")
    order = np.argsort(time_us, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    columns = {name: getattr(trace, name)[order] for name in _COLUMNS}

    def moved(sparse: Any) -> Any:
        return {int(place[i]): value for i, value in sparse.items()}

    return DeviceTrace(
        device=trace.device,
        time_us=time_us[order],
        streams=trace.streams,
        pools=trace.pools,
        strings=trace.strings,
        oom_device_free_bytes=moved(trace.oom_device_free_bytes),
        unknown_actions=moved(trace.unknown_actions),
        forward_frames=moved(trace.forward_frames),
        internal_metadata=moved(trace.internal_metadata),
        category=None if trace.category is None else trace.category[order],
        **columns,
    )
