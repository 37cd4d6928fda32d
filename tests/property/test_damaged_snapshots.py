"""Two thousand damaged snapshots: each ends in an answer or one clear line, never a traceback, a hang or a flood.

Structure-aware damage (keys dropped, wrong types, huge numbers, deep nesting, events repeated or reordered) and bytes
flipped, cut and repeated; seeded, so that a failure can be repeated.
"""

from __future__ import annotations

import copy
import pickle
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from strategies import BASE, MIB, event, legacy_20, modern

from memtrace.analysis import analyse
from memtrace.answers.curves import category_curves
from memtrace.answers.fragmentation import measure
from memtrace.answers.graph import build_graph
from memtrace.answers.info import describe
from memtrace.answers.report import report
from memtrace.answers.segment_map import segment_map
from memtrace.errors import MemtraceError
from memtrace.history.timeline import build, choose_event
from memtrace.render.report_text import render_report
from memtrace.render.segments_text import render_segments
from memtrace.snapshot.load import load

_SECONDS = 10
_PER_SHARE = 200
_SHARES = 10
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1.5, float("nan"), float("inf"), "", "x" * 100, "\0",
    "alloc", [], {}, [[]], (1, 2), b"bytes", [1, "a", None], BASE, BASE + 512, MIB, "inactive", 2**60, -(2**62),
)  # fmt: skip


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from walk(inner, (*path, key))


def parent_of(raw: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        raw = raw[key]
    return raw


def drop(raw: Any, rng: random.Random) -> None:
    path = rng.choice(list(walk(raw)))
    del parent_of(raw, path)[path[-1]]


def replace(raw: Any, rng: random.Random) -> None:
    path = rng.choice(list(walk(raw)))
    parent_of(raw, path)[path[-1]] = copy.deepcopy(rng.choice(_ODD))


def deepen(raw: Any, rng: random.Random) -> None:
    path = rng.choice(list(walk(raw)))
    nested: Any = []
    for _ in range(rng.choice((10, 150))):
        nested = [nested] if rng.random() < 0.5 else {"frames": nested}
    parent_of(raw, path)[path[-1]] = nested


def shuffle_events(raw: Any, rng: random.Random) -> None:
    if isinstance(raw, dict) and isinstance(raw.get("device_traces"), list):
        for trace in raw["device_traces"]:
            if isinstance(trace, list):
                rng.shuffle(trace)


def add_events(raw: Any, rng: random.Random) -> None:
    if isinstance(raw, dict) and isinstance(raw.get("device_traces"), list) and raw["device_traces"]:
        trace = raw["device_traces"][0]
        if isinstance(trace, list):
            for _ in range(rng.randint(1, 30)):
                action = rng.choice(
                    ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
                     "segment_unmap", "oom", "snapshot", "annotate")
                )  # fmt: skip
                address = BASE + rng.choice((0, 512, MIB, 2 * MIB, 20 * MIB, 1 << 30, -MIB))
                size = rng.choice((0, 1, 512, MIB, 2 * MIB, 20 * MIB, 1 << 40))
                made = event(action, address, size, rng.randint(0, 9))
                trace.insert(rng.randint(0, len(trace)), copy.deepcopy(made))  # its frame may be damaged next


def repeat_part(raw: Any, rng: random.Random) -> None:
    if isinstance(raw, dict):
        for key in ("segments", "device_traces"):
            if isinstance(raw.get(key), list) and raw[key] and rng.random() < 0.7:
                raw[key] += copy.deepcopy(raw[key]) * rng.randint(1, 3)


STRUCTURAL: tuple[Callable[[Any, random.Random], None], ...] = (
    drop, replace, replace, deepen, shuffle_events, add_events, repeat_part,
)  # fmt: skip


def damage_bytes(data: bytearray, rng: random.Random) -> bytearray:
    how = rng.randrange(5)
    if how == 0:
        return data[: rng.randrange(len(data))]
    if how == 1:
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return data
    if how == 2:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.choice((1, 4, 9))) + data[at:]
    if how == 3:  # opcodes that ask for memory: huge memo indices, long integers, long strings
        at = rng.randrange(2, len(data))
        hostile = rng.choice(
            (b"r\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8)
        )
        return data[:at] + hostile + data[at:]
    at, length = rng.randrange(len(data)), rng.randrange(1, 64)
    return data[:at] + data[at : at + length] * 3 + data[at + length :]


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def ask_everything(path: Path) -> bool:
    """Ask every question of a file; True if it could be read at all."""
    try:
        snapshot = load(path)
        describe(snapshot)
        for device in snapshot.devices:
            made = analyse(build(snapshot, device))
            at = choose_event(made.timeline, None)
            budget = report(made, at)
            assert sum(budget.categories.values()) == budget.reserved_bytes
            list(render_report(budget))
            measure(made.timeline, made.attribution, at)
            list(render_segments(segment_map(made, at), made.attribution.lora_meaning))
            build_graph(made, at.event)
            category_curves(made)
    except MemtraceError as error:
        line = str(error)
        assert line and "\n" not in line and len(line) < 500
        return False
    return True


@pytest.mark.parametrize("share", range(_SHARES))
def test_damaged_snapshots(tmp_path: Path, share: int) -> None:
    rng = random.Random(share)
    path = tmp_path / "damaged.pickle"
    readable = 0
    for number in range(_PER_SHARE):
        raw = copy.deepcopy(rng.choice((modern, legacy_20))())
        if rng.random() < 0.6:
            for _ in range(rng.randint(1, 4)):
                try:
                    rng.choice(STRUCTURAL)(raw, rng)
                except (IndexError, RecursionError):
                    break
        try:
            data = bytearray(pickle.dumps(raw, rng.choice((2, 4, 5))))
        except RecursionError:
            continue
        if rng.random() < 0.6:
            data = damage_bytes(data, rng)
        path.write_bytes(data)
        with time_limit():
            try:
                readable += ask_everything(path)
            except Exception as error:
                raise AssertionError(f"share {share}, snapshot {number}: {error!r}") from error
    assert readable > _PER_SHARE // 20  # the damage must not be so coarse that nothing past the loader is reached
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_kib < 2 << 20


def test_deeply_nested_files(tmp_path: Path) -> None:
    for name, content in {
        "lists.pickle": b"\x80\x04" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
        "marks.pickle": b"\x80\x04" + b"(" * 3_000_000,
        "lists.json": b"[" * 2_000_000 + b"]" * 2_000_000,
        "dicts.json": b'{"segments":' * 200_000,
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with time_limit():
            assert not ask_everything(path)
