"""One device's recorded events to a :class:`DeviceTrace`."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from memtrace.errors import SnapshotError
from memtrace.snapshot.fields import addresses, as_dicts, integers, kind_of, numbered, sizes, values_of
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import DEFAULT_POOL, I4, Action, DeviceTrace, PoolId
from memtrace.units import printable

ACTIONS = {action.name.lower(): int(action) for action in Action if action is not Action.UNKNOWN}
KNOWN_KEYS = {
    "action", "addr", "device_free", "size", "stream", "time_us", "compile_context", "user_metadata",
    "internal_metadata", "pool_id", "frames", "forward_frames", "cpp_frames", "category",
}  # fmt: skip
TEXTS = ("user_metadata", "compile_context", "category")  # columns that index ``strings``
Coded = tuple[I4, Sequence[Any]]  # a column of codes, and the values they stand for in order of appearance


def read_trace(device: int, raw: Any, stacks: StackInterner, warn: Any) -> DeviceTrace:
    """Columns of one inner list of ``device_traces``. ``warn`` is called with one line for each oddity."""
    what = f"device_traces[{device}]"
    entries = as_dicts(raw, what)
    first_keys = entries[0] if entries else {}
    names = values_of(entries, "action", None)
    try:
        codes = {name: ACTIONS.get(name, int(Action.UNKNOWN)) for name in dict.fromkeys(names)}
    except TypeError:
        raise SnapshotError(f"{what}: an entry's 'action' is not a text") from None
    action = np.fromiter(map(codes.__getitem__, names), np.uint8, len(names))
    unknown = {int(i): shown_name(names[i]) for i in np.flatnonzero(action == Action.UNKNOWN)}
    stack, context = stacks.column(values_of(entries, "frames", None))
    pools = [pool_id(pool) for pool in values_of(entries, "pool_id", None)] if "pool_id" in first_keys else []
    return finished(
        entries,
        warn,
        first_keys,
        [numbered(values_of(entries, "stream", 0)), numbered(pools)]
        + [numbered(values_of(entries, key, "") if key in first_keys or key != "category" else []) for key in TEXTS],
        device=device,
        action=action,
        address=addresses(entries, "addr", what, 0),
        size=sizes(entries, "size", what, 0 if unknown else None),
        time_us=integers(entries, "time_us", what, 0) if "time_us" in first_keys else None,
        stack=stack,
        context=context,
        unknown_actions=unknown,
    )


def finished(
    entries: Sequence[dict[str, Any]] | Mapping[int, dict[str, Any]],
    warn: Any,
    first_keys: Container[str],
    coded: Sequence[Coded],
    **columns: Any,
) -> DeviceTrace:
    """The trace of these columns, with what is rare read from the entries: all of them, or by event those that have it.

    ``coded`` are streams, pools and the three :data:`TEXTS`, as recorded; what the first event lacks, a trace has not.
    """
    count = len(columns["action"])
    numbers = entries if isinstance(entries, Mapping) else range(count)
    for name in sorted(set(columns["unknown_actions"].values())):
        warn(f"unknown action {name!r} in the trace: kept, and ignored for the state of memory")
    keys = {key for i in sampled(count) if i in numbers for key in entries[i]}
    for key in sorted(map(str, keys - KNOWN_KEYS)):
        warn(f"unknown key {key[:60]!r} in trace entries: ignored")
    streams, pools, strings = dict[Any, int](), {DEFAULT_POOL: 0}, {"": 0}
    columns["stream"] = _renumbered(coded[0], streams, count)
    columns["pool"] = _renumbered(coded[1], pools, count) if "pool_id" in first_keys else _constant(-1, count)
    for name, (codes, values) in zip(TEXTS, coded[2:], strict=True):
        texts = codes, [value if isinstance(value, str) else "" for value in values]
        is_there = name != "category" or name in first_keys
        none = "N/A" if name == "compile_context" else ""  # what PyTorch writes for "no compiled region"
        columns[name] = _renumbered(texts, strings, count, none) if is_there else None
    rare = [(i, entries[i]) for i in numbers if "forward_frames" in entries[i] or "internal_metadata" in entries[i]]
    sparse: dict[str, Any] = {
        "unknown_actions": columns.pop("unknown_actions"),
        "oom_device_free_bytes": {
            i: device_free(entries[i]) for i in np.flatnonzero(columns["action"] == Action.OOM).tolist()
        },
        "forward_frames": {i: tuple(map(printable, e["forward_frames"])) for i, e in rare if _has_lines(e)},
        "internal_metadata": {i: _short(e["internal_metadata"]) for i, e in rare if "internal_metadata" in e},
    }
    time_us = columns["time_us"]
    if time_us is not None and (time_us[1:] < time_us[:-1]).any():
        # List order is the true order, except after max_entries was lowered: the ring is then rotated wrongly.
        warn("events are not in time order (max_entries was probably lowered while recording): sorted by time")
        order = np.argsort(time_us, kind="stable")
        place = np.argsort(order).tolist()
        columns = {name: part[order] if isinstance(part, np.ndarray) else part for name, part in columns.items()}
        sparse = {name: {place[i]: value for i, value in part.items()} for name, part in sparse.items()}
    return DeviceTrace(
        streams=tuple(map(stream_handle, streams)),
        pools=tuple(pools),
        strings=tuple(map(printable, strings)),
        **columns,
        **sparse,
    )


def _renumbered(coded: Coded, known: dict[Any, int], count: int, none: str = "") -> I4:
    """A coded column with its values numbered behind those ``known``; the text ``none`` counts as the first."""
    codes, values = coded
    numbers = [known.setdefault(value, len(known)) for value in values]
    if none:
        numbers = [0 if value == none else number for value, number in zip(values, numbers, strict=True)]
    if len(numbers) < 2:
        return _constant(numbers[0] if numbers else 0, count)
    if numbers != list(range(len(numbers))):
        codes[:] = np.array(numbers, np.int32)[codes]
    return codes


def _constant(number: int, count: int) -> I4:
    return np.broadcast_to(np.int32(number), (count,))


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


def _has_lines(entry: dict[str, Any]) -> bool:
    lines = entry.get("forward_frames")
    return isinstance(lines, list) and all(isinstance(line, str) for line in lines)


def _short(value: Any) -> str:
    """A text of bounded cost: writing out lists that share lists could take forever."""
    return printable(str(value)[:200]) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
