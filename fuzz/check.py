"""What every input must satisfy, whatever it holds: asked by the mutations, by atheris and by the tests."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

from compiled_and_plain import assert_same_replay, twice  # noqa: E402
from snapshot_equal import assert_same  # noqa: E402

from memtrace.allocator.replay.replay import replay_device  # noqa: E402
from memtrace.analysis import analyse  # noqa: E402
from memtrace.answers.report import report  # noqa: E402
from memtrace.errors import MemtraceError, SnapshotError  # noqa: E402
from memtrace.explain.explain import explain_log  # noqa: E402
from memtrace.explain.log_answer import principal  # noqa: E402
from memtrace.explain.traceback import lines_around  # noqa: E402
from memtrace.history.timeline import build  # noqa: E402
from memtrace.oomlog import read_log  # noqa: E402
from memtrace.render.explain_text import render_explanation  # noqa: E402
from memtrace.snapshot.container import Source  # noqa: E402
from memtrace.snapshot.decoder.decode import decode  # noqa: E402
from memtrace.snapshot.load import from_raw, load, load_fast  # noqa: E402
from memtrace.snapshot.model import Snapshot  # noqa: E402

MAX_EVENTS_REPLAYED = 20_000
_PIECE_BYTES = 4096  # as much as tells the encoding


def check_file(data: bytes) -> bool:
    """The same for what only a file can be: JSON and containers; True if it is a snapshot."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            snapshot = load(file.name)
        except SnapshotError as error:
            assert "\n" not in str(error)
            return False
    _answers(snapshot)
    return True


class _InPieces(io.BytesIO):
    """Gives fewer bytes than it is asked for, as a pipe does."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(_PIECE_BYTES)


def check_log(data: bytes) -> bool:
    """A log is read to its end, to the same messages however its reads are cut, and explained; True if it has one."""
    reading = read_log(io.BytesIO(data))
    assert read_log(_InPieces(data)) == reading
    if not reading.messages:
        return False
    near = lines_around(data.splitlines(keepends=True), principal(reading.messages).line)
    render_explanation(explain_log(reading, ["x.log"], *near), everything=True)
    return True


def _answers(snapshot: Snapshot) -> None:
    """The main question about every device ends in a budget that adds up, or in one line; compiled or not, the
    allocator's replay is the same."""
    for device in snapshot.devices:
        if len(device.trace) > MAX_EVENTS_REPLAYED:
            continue
        try:
            budget = report(analyse(build(snapshot, device)))
        except MemtraceError:
            continue
        assert sum(budget.categories.values()) == budget.reserved_bytes
        assert_same_replay(*twice(lambda device=device: replay_device(device, snapshot.settings)))


def check(data: bytes, window_bytes: int = 4096) -> bool:
    """Read ``data`` by both decoders and answer the main question; True if it is a snapshot.

    Raises AssertionError where the decoders disagree, and lets anything but a MemtraceError through: both are bugs.
    """
    if not data:
        return False
    fast = load_fast(
        Source(io.BytesIO(data), data[:4096], "x", len(data), False, lambda: io.BytesIO(data)),
        window_bytes,
        on_state=lambda state: [len(device.blocks) for device in state.devices],
    )
    try:
        snapshot = from_raw(decode(io.BytesIO(data), data[:4096], "x"), "x")
    except SnapshotError as error:
        assert fast is None, "only the fast decoder reads it"
        assert "\n" not in str(error)
        return False
    if fast is not None:
        assert_same(fast, snapshot)
    _answers(snapshot)
    return True
