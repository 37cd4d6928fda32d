"""Every form a snapshot can have, and the one clear line for what is none."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from strategies import BASE, MIB, event, legacy_20, legacy_113, modern, without

from memtrace.errors import SnapshotError
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw, load
from memtrace.snapshot.model import Action, BlockState


def write(path: Path, raw: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(raw, protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    snapshot = load(write(tmp_path / "s.pickle", modern(), protocol))
    assert len(snapshot.devices[0].trace) == 7
    assert (snapshot.torch_at_least, snapshot.torch_below) == ("2.10", "2.12")


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, lzma.compress, lambda data: zstandard.ZstdCompressor().compress(data)],
    ids=["gz", "xz", "zst"],
)
def test_compression_is_seen_by_content_not_by_name(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "named-wrongly.json"
    path.write_bytes(compress(pickle.dumps(modern(), 4)))
    assert len(load(path).devices[0].trace) == 7


def test_json_dump_gives_the_same_columns(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(modern()))
    from_json, from_pickle = load(path), load(write(tmp_path / "s.pickle", modern()))
    for column in ("action", "address", "size", "time_us", "stack"):
        left, right = (getattr(s.devices[0].trace, column) for s in (from_json, from_pickle))
        assert np.array_equal(left, right), column
    assert from_json.stacks.stack(1) == from_pickle.stacks.stack(1)


def test_a_pickle_named_json_and_trailing_bytes(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(pickle.dumps(modern(), 4) + b"\0\0\0")
    assert len(load(path).devices[0].trace) == 7


def test_pytorch_2_0(tmp_path: Path) -> None:
    snapshot = load(write(tmp_path / "s.pickle", legacy_20()))
    device = snapshot.devices[0]
    assert (snapshot.torch_at_least, snapshot.torch_below) == ("2.0", "2.1")
    assert device.trace.time_us is None
    assert device.blocks.address[0] == BASE
    assert device.blocks.address[1] == BASE + 2 * MIB
    assert snapshot.stacks.stack(int(device.blocks.stack[0]))[0].name == "step"
    assert build(snapshot, device).replay.exact


def test_pytorch_1_13_bare_list(tmp_path: Path) -> None:
    snapshot = load(write(tmp_path / "s.pickle", legacy_113()))
    device = snapshot.devices[0]
    assert (snapshot.torch_at_least, snapshot.torch_below) == ("1.13", "2.0")
    assert len(device.trace) == 0
    assert device.blocks.requested_size.tolist() == [2 * MIB, 0, 100, 0]


def test_bare_list_of_a_new_release() -> None:
    snapshot = from_raw(modern()["segments"], "x")
    assert (snapshot.torch_at_least, snapshot.torch_below) == ("2.1", None)
    timeline = build(snapshot, snapshot.devices[0])
    assert timeline.curve_at(-1) == (2 * MIB + 100, 2 * MIB + 512, 22 * MIB)


def test_inactive_requested_sizes_are_stale() -> None:
    raw = modern()
    raw["segments"][0]["blocks"][1]["requested_size"] = 99 << 40
    device = from_raw(raw, "x").devices[0]
    assert device.blocks.requested_size[1] == 0


def test_newest_keys() -> None:
    raw = modern()
    for entry in raw["device_traces"][0]:
        entry["pool_id"] = [0, 0]
    raw["device_traces"][0][1] |= {
        "user_metadata": "layer.0", "forward_frames": ["a", "b"], "internal_metadata": "mallocWithAddress",
        "compile_context": "N/A",
    }  # fmt: skip
    raw["device_traces"][0][2]["user_metadata"] = "N/A"  # a text like any other, but where PyTorch says "no region"
    raw["device_traces"][0].append(event("annotate", BASE, 2 * MIB, 7, user_metadata="weight", pool_id=(0, 0)))
    raw["allocator_settings"] |= {"max_round_threshold": -1}
    raw |= {"host_segments": [{"device": -1, "total_size": 4096}], "host_traces": [{"action": "alloc"}]}
    snapshot = from_raw(raw, "x")
    trace = snapshot.devices[0].trace
    assert snapshot.torch_at_least == "2.15"
    assert snapshot.warnings == ()
    assert snapshot.host_reserved_bytes == 4096
    assert [trace.strings[number] for number in trace.user_metadata[:4]] == ["", "layer.0", "N/A", ""]
    assert not trace.compile_context.any()
    assert trace.forward_frames == {1: ("a", "b")}
    assert trace.internal_metadata == {1: "mallocWithAddress"}
    assert trace.action[7] == Action.ANNOTATE
    assert build(snapshot, snapshot.devices[0]).replay.exact


def test_vendor_build_mixes_keys_and_prepends_a_workspace_trace() -> None:
    raw = without(
        modern(),
        "allocator_settings",
        "external_annotations",
        trace_keys=("time_us", "compile_context", "user_metadata"),
    )
    for entry in raw["device_traces"][0]:
        entry["pool_id"] = (0, 0)
    raw["device_traces"][0].insert(0, {"action": "workspace_snapshot", "addr": 0, "size": 0, "stream": 0})
    snapshot = from_raw(raw, "x")
    assert (snapshot.torch_at_least, snapshot.torch_below) == (None, None)
    assert snapshot.devices[0].trace.action[0] == Action.WORKSPACE_SNAPSHOT


def test_unknown_things_are_kept_and_named_once() -> None:
    raw = modern()
    raw["new_key"] = 1
    raw["device_traces"][0] += [event("defragment", 0, 0, 9), event("defragment", 0, 0, 10)]
    raw["device_traces"][0][0]["colour"] = "red"
    raw["segments"][0]["blocks"][0]["state"] = "active_moving"
    snapshot = from_raw(raw, "x")
    assert snapshot.devices[0].trace.unknown_actions == {7: "defragment", 8: "defragment"}
    assert snapshot.devices[0].blocks.state[0] == BlockState.ALLOCATED
    assert sum("defragment" in line for line in snapshot.warnings) == 1
    assert any("new_key" in line for line in snapshot.warnings)
    assert any("colour" in line for line in snapshot.warnings)
    assert any("active_moving" in line for line in snapshot.warnings)


def test_several_devices_with_empty_traces() -> None:
    raw = modern()
    raw["device_traces"] = [[], raw["device_traces"][0], []]
    for segment in raw["segments"]:
        segment["device"] = 1
    assert [device.device for device in from_raw(raw, "x").devices] == [1]


def test_fx_frames() -> None:
    raw = modern()
    raw["device_traces"][0][1]["frames"] = [
        {"filename": "fx_generated_0.py", "line": 3, "name": "forward", "fx_node_op": "call_function",
         "fx_node_name": "mm", "fx_node_target": "aten.mm", "fx_original_trace": "model.py"}
    ]  # fmt: skip
    table = from_raw(raw, "x").stacks
    frame = next(i for i, f in enumerate(table.frames) if f.filename.startswith("fx_"))
    assert table.fx[frame]["fx_node_target"] == "aten.mm"


def test_events_out_of_order_are_sorted_by_time() -> None:
    raw = modern()
    trace = raw["device_traces"][0]
    raw["device_traces"][0] = trace[4:] + trace[:4]
    for i, entry in enumerate(trace):
        entry["time_us"] = i
    snapshot = from_raw(raw, "x")
    assert snapshot.devices[0].trace.time_us is not None
    assert snapshot.devices[0].trace.time_us.tolist() == list(range(7))
    assert any("time order" in line for line in snapshot.warnings)


def _checkpoint() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model/data.pkl", b"x")
    return buffer.getvalue()


NOT_SNAPSHOTS = {
    "empty": (b"", "empty"),
    "checkpoint": (_checkpoint(), "checkpoint"),
    "old checkpoint": (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps({}, 2), "checkpoint"),
    "global": (pickle.dumps(OrderedDict(a=1), 4), "collections.OrderedDict"),
    "sqlite": (b"SQLite format 3\0" + b"\0" * 100, "SQLite"),
    "html": (b"<!DOCTYPE html><html><script>init([{'base64':'gASV'}])</script>", "HTML"),
    "truncated": (pickle.dumps(modern(), 4)[:-40], "cut short"),
    "truncated xz": (lzma.compress(pickle.dumps(modern(), 4))[:-30], "cut short"),
    "damaged gz": (gzip.compress(b"x" * 1000)[:20] + b"\xff" * 40, "unpacked"),
    "truncated json": (json.dumps(modern())[:-9].encode(), "cut short"),
    "other pickle": (pickle.dumps({"a": 1}, 4), "segments"),
    "number": (pickle.dumps(7, 4), "int"),
    "text": (b"hello, world\n", "neither a pickle nor JSON"),
    "persistent id": (b"\x80\x02X\x01\x00\x00\x00aQ.", "storage"),
}


@pytest.mark.parametrize("name", NOT_SNAPSHOTS)
def test_what_is_no_snapshot_gets_its_own_line(tmp_path: Path, name: str) -> None:
    content, wanted = NOT_SNAPSHOTS[name]
    path = tmp_path / "file.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    line = str(caught.value)
    assert wanted in line
    assert "\n" not in line
    assert caught.value.exit_code == 3


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made-by-the-pickle"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (target,))

    with pytest.raises(SnapshotError, match="nothing was executed"):
        load(write(tmp_path / "s.pickle", {"segments": Evil()}))
    assert not target.exists()


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.xz"
    compressor = lzma.LZMACompressor(preset=0)
    start = compressor.compress(b"[" + b" " * (1 << 24))
    path.write_bytes(start + b"".join(compressor.compress(b" " * (1 << 24)) for _ in range(20)) + compressor.flush())
    with pytest.raises(SnapshotError, match="unpacks to more than"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [("size", "big", "expected an integer"), ("size", -5, "not a size"), ("size", 1 << 70, "64 bits"),
     ("addr", -1, "not a device address"), ("frames", 3, "frames"), ("action", ["alloc"], "action")],
)  # fmt: skip
def test_wrong_values_name_the_entry(key: str, value: Any, wanted: str) -> None:
    raw = modern()
    raw["device_traces"][0][2][key] = value
    with pytest.raises(SnapshotError, match=wanted):
        from_raw(raw, "x")
