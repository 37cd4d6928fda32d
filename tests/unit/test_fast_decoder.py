"""The compiled decoder gives the same snapshot as the plain one: every recording and form, any window."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_equal import assert_same
from strategies import BASE, FRAME, MIB, event, legacy_20, modern, without
from support import TRACES, TRUTH, trace_path

from memtrace.errors import SnapshotError
from memtrace.snapshot.container import Source, open_stream
from memtrace.snapshot.decoder.decode import decode
from memtrace.snapshot.load import from_raw, load, load_fast
from memtrace.snapshot.model import Snapshot

if os.environ.get("MEMTRACE_COMPILE") != "1":
    pytest.importorskip("memtrace.snapshot.decoder._reader")

# One of each kind: stacks of Python, of C++ and none, several ranks, a ring, mapped segments, a late start, trainers.
_KINDS = (
    "tiny-llama_3-steps", "llama2-7b_oom-first-step", "llama2-7b_ring-truncated", "llama2-7b_baseline-expandable",
    "llama2-7b_cpp-stacks", "llama2-7b_recorded-after-load", "ddp_rank0", "mistral-7b_oom-late-cpp",
    "mistral-7b_accumulation-evaluation", "tinyllama_trl", "tinyllama_full-late",
)  # fmt: skip
_FUZZ = sorted(path for path in (TRUTH / "fuzz").glob("*.xz"))


def source(data: bytes) -> Source:
    """An opened file of these bytes."""
    return Source(io.BytesIO(data), data[:4096], "x", len(data), False, lambda: io.BytesIO(data))


def both(data: bytes, window_bytes: int = 1 << 16) -> tuple[Snapshot | None, Snapshot]:
    """Read by the fast decoder and by the other one."""
    return load_fast(source(data), window_bytes), from_raw(decode(io.BytesIO(data), data[:4096], "x"), "x")


def check(data: bytes, window_bytes: int = 1 << 16) -> Snapshot:
    fast, other = both(data, window_bytes)
    assert fast is not None
    assert_same(fast, other)
    return fast


def unpacked(path: Path) -> bytes:
    with open_stream(path) as opened:
        return opened.stream.read()


@pytest.mark.parametrize("longer", [1001, 1500, 2000, 2500])
@pytest.mark.parametrize("is_longer_first", [False, True])
def test_stacks_that_pickle_writes_in_parts(longer: int, is_longer_first: bool) -> None:
    """A thousand frames a part: the first part of one stack is written as another stack is whole."""
    frames = [{"filename": "a.py", "line": line, "name": "f"} for line in range(longer)]
    lengths = [longer, *((longer, 1000) if is_longer_first else (1000, longer)) * 2, 999, longer]
    events = [
        event("alloc", number * MIB, 512, number) | {"frames": frames[:length]}
        for number, length in enumerate(lengths, 1)
    ]
    for protocol in (2, 4, 5):
        snapshot = check(pickle.dumps(modern() | {"device_traces": [events]}, protocol), 1 << 20)
        stacks = snapshot.devices[0].trace.stack.tolist()
        assert [len(snapshot.stacks.frame_ids(stack)) for stack in stacks] == lengths


@pytest.mark.parametrize("name", _KINDS)
def test_recordings(name: str) -> None:
    check(unpacked(trace_path(name)), 4 << 20)


@pytest.mark.parametrize("name", _KINDS)
def test_the_state_is_told_before_the_events_are_read(name: str) -> None:
    states: list[Snapshot] = []
    snapshot = load(trace_path(name), on_state=states.append)
    (state,) = states
    for mine, whole in zip(state.devices, snapshot.devices, strict=True):
        assert mine.device == whole.device and not len(mine.trace)
        for column in ("address", "total_size", "first_block"):
            assert np.array_equal(getattr(mine.segments, column), getattr(whole.segments, column))
        for column in ("address", "size", "requested_size", "state"):
            assert np.array_equal(getattr(mine.blocks, column), getattr(whole.blocks, column))


@pytest.mark.parametrize("segments", [7, None, [7], [{"total_size": "x"}], [{}, None], [{"device": 0, "blocks": 3}]])
def test_segments_that_are_none_are_no_state(segments: Any) -> None:
    states: list[Snapshot] = []
    data = pickle.dumps(long(modern()) | {"segments": segments}, 4)
    assert load_fast(source(data), on_state=states.append) is None and not states


@pytest.mark.parametrize("path", _FUZZ, ids=[path.name.split(".")[0] for path in _FUZZ])
def test_allocator_fuzz_recordings(path: Path) -> None:
    check(unpacked(path))


@pytest.mark.parametrize("window_bytes", [600, 4099, 20_011, 1 << 17])
def test_any_window(window_bytes: int) -> None:
    check(unpacked(TRACES / "tiny-llama_3-steps.pickle.xz"), window_bytes)


def long(raw: dict[str, Any], repeats: int = 60, share: bool = True) -> dict[str, Any]:
    """The same with a longer trace: allocations and frees, each with objects of its own as PyTorch makes them."""
    made = copy.deepcopy(raw)
    trace = made["device_traces"][0]
    frames = [dict(FRAME, line=line) for line in range(5)]
    template = trace[-1]
    keys = list(template)
    at = template.get("time_us", 0)
    extra = []
    for number in range(repeats):
        stack = [frames[(number + i) % 5] for i in range(number % 7)]
        for action in ("alloc", "free_requested", "free_completed"):
            entry = dict(template) | {
                "action": action, "addr": BASE + 4 * MIB + 512 * (number % 3), "size": (1 << number % 40) + number,
                "stream": 0, "frames": stack if share and action != "alloc" else list(stack),
            }  # fmt: skip
            if "time_us" in entry:
                at += number * 997
                entry["time_us"] = at
            if "compile_context" in entry:
                entry["compile_context"] = "".join(["N/", "A"])  # a new object each time
            extra.append({key: entry[key] for key in keys})
    trace += extra
    return made


FORMS: dict[str, Any] = {
    "modern": lambda: long(modern()),
    "one list an event": lambda: long(modern(), share=False),
    "2.0": lambda: long(legacy_20()),
    "2.2": lambda: long(without(modern(), "allocator_settings", trace_keys=("compile_context", "user_metadata"))),
    "no frames": lambda: without(long(modern()), trace_keys=("frames",)),
    "many": lambda: long(modern(), 900),
    "1001 entries": lambda: long_of(1001),
    "2000 entries": lambda: long_of(2000),
    "pool ids": lambda: with_pools(long(modern())),
    "metadata": lambda: with_metadata(long(modern())),
    "streams": lambda: with_streams(long(modern())),
    "two devices": lambda: two_devices(),
    "rare keys": lambda: with_rare(long(modern())),
    "out of order": lambda: out_of_order(long(modern())),
    "frames first": lambda: reordered(long(modern(), share=False)),
    "pools first": lambda: reordered(with_pools(long(modern()))),
    "no stream": lambda: without(long(modern()), trace_keys=("stream",)),
    "cut by a script": lambda: cut(long(modern(), 900)),
    "merged": lambda: merged(),
    "read again": lambda: pickle.loads(pickle.dumps(long(modern(), share=False))),
}


def long_of(count: int) -> dict[str, Any]:
    raw = long(modern(), count)
    del raw["device_traces"][0][count:]
    return raw


def reordered(raw: dict[str, Any]) -> dict[str, Any]:
    """Frames before other keys, of one, two or no frames: an empty list is followed by a key, not by what it holds."""
    for number, entry in enumerate(raw["device_traces"][0]):
        entry["frames"] = entry["frames"][: number % 3]
        raw["device_traces"][0][number] = dict(sorted(entry.items(), key=lambda item: item[0] != "frames"))
    return raw


def cut(raw: dict[str, Any]) -> dict[str, Any]:
    raw["device_traces"][0] = raw["device_traces"][0][500:2000]
    return raw


def merged() -> dict[str, Any]:
    """Two files' traces joined by a script: equal texts and frames that are not the same objects."""
    raw, other = (pickle.loads(pickle.dumps(long(modern(), count), 4)) for count in (50, 70))
    raw["device_traces"][0] += other["device_traces"][0]
    return raw


def with_pools(raw: dict[str, Any]) -> dict[str, Any]:
    for number, entry in enumerate(raw["device_traces"][0]):
        entry["pool_id"] = (number // 50 % 3, 0)
        entry["frames"] = entry.pop("frames")
    return raw


def with_metadata(raw: dict[str, Any]) -> dict[str, Any]:
    for number, entry in enumerate(raw["device_traces"][0]):
        entry["user_metadata"] = f"layer.{number % 11}.{'attention' * (number % 3)}é"
        entry["compile_context"] = ["N/A", "0/0", "graph_break in a long name"][number % 3]
    return raw


def with_streams(raw: dict[str, Any]) -> dict[str, Any]:
    for number, entry in enumerate(raw["device_traces"][0]):
        entry["stream"] = [0, 7, 94_000_000_000_000, -1, 1 << 40][number % 5 if number > 9 else 0]
    return raw


def two_devices() -> dict[str, Any]:
    raw, other = long(modern()), long(modern(), 40)
    raw["device_traces"] = [raw["device_traces"][0], [], other["device_traces"][0]]
    return raw


def with_rare(raw: dict[str, Any]) -> dict[str, Any]:
    trace = raw["device_traces"][0]
    trace[20] |= {"forward_frames": ["a", "b"], "internal_metadata": "mallocWithAddress"}
    trace[30]["colour"] = "red"
    trace.insert(40, {"action": "oom", "device_free": 5, "size": 512, "stream": 0, "time_us": 9, "frames": [FRAME]})
    trace.insert(60, event("defragment", 0, 0, 9))
    trace.insert(70, {**event("oom", 0, 512, 9)})
    trace[50].pop("compile_context")
    return raw


def out_of_order(raw: dict[str, Any]) -> dict[str, Any]:
    trace = raw["device_traces"][0]
    trace[3]["time_us"] = 10**9
    return raw


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, protocol: int) -> None:
    data = pickle.dumps(FORMS[form](), protocol)
    for window_bytes in (700, 1 << 20):
        check(data, window_bytes)


@pytest.mark.parametrize("form", FORMS)
def test_written_without_a_memo(form: str) -> None:
    """As PyTorch's C++ pickler writes lists and dictionaries: nothing shared, keys written out each time."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 2)
    pickler.fast = True
    pickler.dump(FORMS[form]())
    check(out.getvalue(), 900)


@pytest.mark.parametrize("key", ["addr", "size", "stream", "time_us", "frames", "action", "pool_id", "user_metadata"])
def test_odd_values_give_the_same_or_are_left_to_the_other_loader(key: str) -> None:
    odd: tuple[Any, ...] = (None, True, -1, 1.0, 1 << 63, 1 << 70, "", "x" * 300, [], (0, 1), {}, [1], 2**60 + 1)
    for value in odd:
        raw = long(modern())
        raw["device_traces"][0][30][key] = value
        data = pickle.dumps(raw, 4)
        fast = load_fast(source(data))
        if fast is not None:
            assert_same(fast, from_raw(decode(io.BytesIO(data), data, "x"), "x"))


def test_bytes_flipped() -> None:
    """Whatever a flipped byte does: the fast decoder agrees with the other one, or leaves the file to it."""
    rng = random.Random(7)
    sound = pickle.dumps(with_metadata(with_pools(long(modern(), 30))), 4)
    agreed = 0
    for _ in range(500):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data))
            data[at] = rng.randrange(256) if rng.random() < 0.5 else data[at] ^ 1 << rng.randrange(8)
        fast = load_fast(source(bytes(data)), 2048)
        if fast is not None:
            assert_same(fast, from_raw(decode(io.BytesIO(data), bytes(data[:4096]), "x"), "x"))
            agreed += 1
    assert agreed > 30


def test_a_skipped_list_used_elsewhere_is_left_to_the_other_loader() -> None:
    raw = long(modern())
    raw["memtrace"] = {"stolen": raw["device_traces"][0][40]["frames"]}
    fast, other = both(pickle.dumps(raw, 4))
    assert fast is None
    assert other.memtrace["stolen"] is not None


@pytest.mark.parametrize("key", ["allocator_settings", "memtrace"])
@pytest.mark.parametrize("place", [lambda entry: entry, lambda entry: {"deep": [1, (entry,)]}], ids=["itself", "deep"])
def test_an_event_used_elsewhere_is_read_the_same(key: str, place: Callable[[Any], Any]) -> None:
    raw = long(modern())
    before, entry = raw["device_traces"][0][39:41]
    entry |= {"pool_id": 1 << 60, "frames": before["frames"]}  # an odd value: such an event is kept as it is
    raw[key] = place(entry)
    fast, other = both(pickle.dumps(raw, 4))
    if fast is not None:
        assert_same(fast, other)


@pytest.mark.parametrize("key", ["stream", "frames", "user_metadata"])
def test_a_key_set_twice_counts_as_it_was_set_last(key: str) -> None:
    raw = long(modern())
    other = [dict(FRAME, line=99)] if key == "frames" else 77 if key == "stream" else "x"
    odd = key[:-1] + "_"
    raw["device_traces"][0][40] = {odd: other} | raw["device_traces"][0][40]
    data = pickle.dumps(raw, 4)
    assert data.count(odd.encode()) == 1
    fast, plain = both(data.replace(odd.encode(), key.encode()))
    if fast is not None:
        assert_same(fast, plain)


def test_a_frame_that_ends_within_an_opcode_is_read_the_same() -> None:
    raw = modern() | {"allocator_settings": {"much": 1 << 75}}  # more bytes than the quick look knows
    data = pickle.dumps(raw, 4)
    size = int.from_bytes(data[3:11], "little")
    for less in range(-3, 90):
        changed = data[:3] + (size - less).to_bytes(8, "little") + data[11:]
        fast = load_fast(source(changed))
        try:
            plain = from_raw(decode(io.BytesIO(changed), changed[:4096], "x"), "x")
        except SnapshotError:
            assert fast is None and less < 0
        else:
            assert fast is None or assert_same(fast, plain) is None


def test_a_trace_used_twice_is_left_to_the_other_loader() -> None:
    raw = long(modern())
    raw["device_traces"] *= 2
    assert load_fast(source(pickle.dumps(raw, 4))) is None


def test_a_frame_head_within_an_opcode_is_left_to_the_other_loader() -> None:
    """A head is one where an opcode may begin, and nowhere else."""
    sound = pickle.dumps(long(modern(), 900), 4)
    assert sound[2] == 0x95
    size = int.from_bytes(sound[3:11], "little")
    body = sound[2 + 9 :]
    for cut in range(size - 60, size - 20):
        moved = body[:cut] + sound[2 + 9 + size : 2 + 18 + size] + body[cut:size] + body[size + 9 :]
        data = sound[:3] + cut.to_bytes(8, "little") + moved
        fast = load_fast(source(data), 4096)
        try:
            other = from_raw(decode(io.BytesIO(data), data[:4096], "x"), "x")
        except SnapshotError:
            assert fast is None
        else:
            if fast is not None:
                assert_same(fast, other)


@pytest.mark.parametrize("appends", [b"(e", b"(e(e"])
def test_a_list_extended_by_nothing_is_an_empty_trace(appends: bytes) -> None:
    """No pickler writes it, and every unpickler takes it."""
    written = pickle.dumps({"segments": [], "device_traces": [[]]}, 4)
    empty = written.rindex(b"]\x94")  # EMPTY_LIST, MEMOIZE: the trace's own
    data = written[:empty] + b"]\x94" + appends + written[empty + 2 :]
    unframed = data[:2] + data[11:]  # the frame's length is no longer right
    assert pickle.loads(unframed) == pickle.loads(written)
    fast, other = both(unframed)
    assert_same(other, both(written)[1])
    if fast is not None:
        assert_same(fast, other)
