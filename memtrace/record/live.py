"""The program's side of ``memtrace live``: one thread that reads counters, judges alarms and serves watchers.

The training thread does no more than the step log's one reading a step, and, when somebody asked to look at the blocks,
one reading of them at the moment asked for, so rarely that it takes a two-hundredth of the time at most. All the rest
happens here: sockets never block, what a slow watcher does not take is dropped or waits, and a watcher that hangs or
dies costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memtrace.errors import MemtraceError
from memtrace.live import protocol
from memtrace.live.metrics import Sink, open_sink
from memtrace.record import facts, files, messages
from memtrace.record.labels import Gradient, is_own_thread
from memtrace.record.phases import BACKWARD, now_us
from memtrace.record.steplog import COLUMNS, StepLog

if TYPE_CHECKING:  # numpy waits until the program has imported what it wants, in the order it wants
    from memtrace.live.alarms import Alarm
    from memtrace.record.recorder import Recorder

MAX_WATCHERS = 16
_TICK_S = 0.25
_QUEUE_BYTES = 4 * protocol.MAX_LINE_BYTES  # said to a watcher and not taken yet; more is dropped
_ROWS_AT_ONCE = 2_000
_JUDGED_ROWS = 5_000
_MOST_FAILURES = 3  # in a row: after an error of the device every further reading may fail
_JUDGE_EVERY_S = 5.0
_SHARE = 200  # looking at the blocks takes at most this part of the time
_LEAST_S, _OWN_S = 2.0, 60.0  # between two looks: asked for, and for the alarms' own use


class MemoryAlarm(UserWarning):
    """What ``on_alarm="warn"`` warns with."""


@dataclass
class _Watcher:
    socket: socket.socket
    reader: protocol.LineReader = field(default_factory=lambda: protocol.LineReader(protocol.MAX_ORDER_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    next_row: int = 0
    dropped: int = 0


class _Look(NamedTuple):
    """The blocks and gradients that were seen at a moment of a step."""

    moment: str
    step: int
    took_us: int
    blocks: dict[str, Any]
    gradients: list[Gradient]


class LiveServer:
    """Serves the watchers of one recorder."""

    def __init__(self, recorder: Recorder, steps: StepLog) -> None:
        self.recorder, self.steps = recorder, steps
        self.place: Path | None = None
        self.folder: Path | None = None  # for the socket, if not the usual one
        self.on_detach: Callable[[], None] | None = None  # ends a recording that was begun by memtrace attach
        self._sinks: list[Sink] = []
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._watchers: list[_Watcher] = []
        self._wanted: str | None = None  # the moment at which to look at the blocks
        self._raw: _Look | None = None
        self._seen: dict[str, Any] = {"type": "blocks"}
        self._not_before = self._own_at = 0.0
        self._alarms: dict[str, Alarm] = {}
        self._judged = self._written = 0
        self._judge_at = 0.0
        self._last_second = 0.0
        self._largest = 0
        self._pieces: tuple[int, int, int] | None = None  # the numbers of FreePieces
        self._phases_of = -1  # the step whose phases are looked at: one a second
        self._phase_levels: dict[str, tuple[int, int]] = {}  # (allocated at its end, peak so far), while watched

    def start(self) -> None:
        """Listen, and begin to serve. Where that fails one line says why, and the run goes on unwatched."""
        if self._thread is not None:
            return
        try:
            self._socket, self.place = protocol.listen(os.getpid(), self.folder)
        except (OSError, MemtraceError) as error:
            messages.say(f"not live: {getattr(error, 'strerror', None) or error}")
        for spec in self.recorder.options.metrics:
            with messages.guarded(f"metrics to {spec}"):
                self._sinks.append(open_sink(spec))
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="memtrace-live", daemon=True)
        self._thread.start()
        if self.place is not None:
            messages.say(f"live: memtrace live {os.getpid()}")

    def stop(self) -> None:
        """Say goodbye and leave nothing behind. Waits two seconds at most for what is under way."""
        self._stopping = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        if self.place is not None:
            protocol.remove(self.place)

    def forked(self) -> None:
        """In a forked child: the parent's sockets are not ours, and its thread is not here."""
        self._close_sockets()
        self._thread = self.place = None
        self._sinks = []

    def _close_sockets(self) -> None:
        for each in (self._socket, *(watcher.socket for watcher in self._watchers)):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()
        self._watchers, self._socket = [], None

    # in the program's own threads
    def entered(self, ending: str, beginning: str) -> None:
        """A phase begins: note the levels now and then while watched, and look at the blocks if this is the moment."""
        if self._watchers and self.steps.device is not None and self.recorder.log.step == self._phases_of:
            with contextlib.suppress(RuntimeError, AttributeError):
                allocated, _, peak, *_ = self.recorder.backend.levels(self.steps.device)
                self._phase_levels[ending] = allocated, peak
        if self._wanted == "backward" and beginning == BACKWARD:
            self._look("backward")

    def stepped(self) -> None:
        """A step has ended. Phases are followed in the steps that matter; most steps are spared the calls."""
        if self._wanted == "step":
            self._look("step")
        elif self._wanted is None and self.recorder.log.step > self._phases_of:
            self.recorder.log.on_enter = None

    def _look(self, moment: str) -> None:
        self._wanted = None
        with messages.guarded("looking at the blocks"):
            begun = time.perf_counter()
            raw = self.recorder.backend.blocks()
            gradients = self.recorder.labels.gradients() if self._watchers and not is_own_thread() else []
            took_us = round((time.perf_counter() - begun) * 1e6)
            self._raw = _Look(moment, self.recorder.log.step, took_us, raw, gradients)

    # in the thread of its own
    def _serve(self) -> None:
        try:
            failures = 0
            while not self._stopping and failures < _MOST_FAILURES:
                failures += 1
                with messages.guarded("serving watchers"):
                    failures = 0 if self._turn() else failures - 1
            self._tell({"type": "bye"})
            self._flush()
        finally:
            self._close_sockets()
            for sink in self._sinks:
                with messages.guarded("closing metrics"):
                    sink.close()
            self._sinks = []

    def _turn(self) -> bool:
        """Whatever is due; whether the device was asked and answered."""
        listening = [self._socket] if self._socket is not None else []
        readers = [*listening, *(watcher.socket for watcher in self._watchers)]
        ready = select.select(readers, [], [], _TICK_S)[0]
        if self._socket in ready:
            self._accept()
        for watcher in [each for each in self._watchers if each.socket in ready]:
            self._listen_to(watcher)
        now = time.monotonic()
        is_due = now - self._last_second >= 1
        if is_due:
            self._last_second = now
            self._second(now)
        if self._raw is not None:
            self._hand_out()
        for watcher in self._watchers:
            if not watcher.unsent:  # else rows wait in the log
                rows, following = self.steps.since(watcher.next_row, _ROWS_AT_ONCE)
                if rows:
                    self._say(watcher, {"type": "rows", "rows": rows})
                    watcher.next_row = following
        self._flush()
        return is_due

    def _accept(self) -> None:
        assert self._socket is not None
        while True:
            try:
                made, _ = self._socket.accept()
            except OSError:  # nobody else is waiting
                return
            if len(self._watchers) >= MAX_WATCHERS or not protocol.is_own(made):
                made.close()
                continue
            made.setblocking(False)
            watcher = _Watcher(made, next_row=max(0, self.steps.since(0, 0)[1] + len(self.steps) - 3_600))
            self._watchers.append(watcher)
            self._say(watcher, self._hello())

    def _listen_to(self, watcher: _Watcher) -> None:
        try:
            data = watcher.socket.recv(protocol.MAX_ORDER_BYTES)
            orders = watcher.reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, orders = b"", []
        if not data:
            self._drop(watcher)
        for order in orders:
            reply: dict[str, Any] = {"type": "done", "do": str(order.get("do"))[:40]}
            try:
                reply |= self._obey(reply["do"], order)
            except Exception as error:
                reply["error"] = f"{type(error).__name__}: {error}"[:300]
            self._say(watcher, reply)

    def _drop(self, watcher: _Watcher) -> None:
        self._watchers.remove(watcher)
        with contextlib.suppress(OSError):
            watcher.socket.close()

    def _obey(self, what: str, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out a watcher's order; returns what there is to say of it."""
        if what == "snapshot":
            file = self.recorder.save("-live", "request", mode=0o600)
            return {"file": str(file)} if file is not None else {"error": "could not be written"}
        if what == "stacks":
            self.recorder.switch_stacks(order.get("on") is True)
            return {"stacks": self.recorder.recording}
        if what == "phase":
            self.recorder.log.enter(str(order.get("name"))[:60])
            return {"phase": self.recorder.log.name}
        if what == "blocks":
            return self._want_blocks(order.get("at"))
        if what != "detach":
            return {"error": "no such order"}
        if self.on_detach is None:
            return {"error": "the program records itself; it was not attached to"}
        threading.Thread(target=self.on_detach, name="memtrace-detach", daemon=True).start()
        return {}

    def _want_blocks(self, moment: Any) -> dict[str, Any]:
        if moment not in protocol.MOMENTS:
            return {"error": f"at is one of {', '.join(protocol.MOMENTS)}"}
        wait = self._not_before - time.monotonic()
        if wait > 0:  # what was seen last is young enough
            self._tell(self._seen)
            return {"wait_s": round(wait, 1)}
        self._wanted, self.recorder.log.on_enter = moment, self.entered
        if moment == "now":
            self._look("now")
        return {}

    # what is said
    def _hello(self) -> dict[str, Any]:
        about = facts.process_facts(self.recorder.backend, self._device())
        kept = ("torch", "gpu", "device", "device_total_bytes", "limit_bytes", "pid", "rank", "world_size")
        return {key: about[key] for key in kept} | {
            "type": "hello",
            "version": protocol.VERSION,
            "columns": COLUMNS,
            "argv": [str(word)[:200] for word in sys.argv[:20]],
            "started_us": self.recorder.started_us,
            "peaks_are_of_steps": self.steps.resets,
        }

    def _device(self) -> int:
        return self.steps.device if self.steps.device is not None else self.recorder.device

    def _second(self, now: float) -> None:
        """Once a second: the counters, and what they and the new steps mean."""
        device, backend = self._device(), self.recorder.backend
        stats = backend.stats(device)
        free, total = backend.memory_info(device)
        reserved = int(stats.get("reserved_bytes.all.current", 0))
        limit = backend.limit_bytes(device)
        capacity = free + reserved if limit is None else min(limit, free + reserved)
        names = ("requested", "allocated", "reserved", "active", "inactive_split")
        says: dict[str, Any] = {f"{name}_bytes": int(stats.get(f"{name}_bytes.all.current", 0)) for name in names}
        says |= {"type": "now", "time_us": now_us(), "step": self.recorder.log.step, "phase": self.recorder.log.name}
        says |= {f"peak_{name}_bytes": int(stats.get(f"{name}_bytes.all.peak", 0)) for name in names[:3]}
        says |= {
            "device_free_bytes": free,
            "device_total_bytes": total,
            "limit_bytes": limit,
            "capacity_bytes": capacity,
        }
        says |= {"stacks": self.recorder.recording, "retries": int(stats.get("num_alloc_retries", 0))}
        self._phases_of = self.recorder.log.step + 1
        says["phases"] = [
            {"name": name, "end_bytes": a, "peak_bytes": p} for name, (a, p) in self._phase_levels.items()
        ]
        self._judge(capacity)
        says["alarms"] = [asdict(alarm) for alarm in self._alarms.values()]
        self._tell(says)
        self._write_metrics(says)
        if self._wanted is None and now >= max(self._own_at, self._not_before) and len(self.steps) > 2:
            self._own_at = now + _OWN_S
            self._wanted = "step" if self._largest else "backward"
        if self._watchers or self._wanted is not None:
            self.recorder.log.on_enter = self.entered

    def _judge(self, capacity: int) -> None:
        rows, following = self.steps.since(max(0, self._judged - _JUDGED_ROWS), _JUDGED_ROWS * 2)
        begun = time.monotonic()
        if following == self._judged or begun < self._judge_at:
            return
        from memtrace.answers.steps import read_series
        from memtrace.live.alarms import FreePieces, judge

        self._judged = following
        series = read_series([dict(zip(COLUMNS, row, strict=True)) for row in rows[-_JUDGED_ROWS:]])
        pieces = FreePieces(*self._pieces) if self._pieces is not None else None
        holding = {alarm.id: alarm for alarm in judge(series, capacity, pieces)}
        self._judge_at = time.monotonic() + max(_JUDGE_EVERY_S, _SHARE * (time.monotonic() - begun))
        new = [alarm for name, alarm in holding.items() if name not in self._alarms]
        self._alarms = holding
        for alarm in new:
            self._tell({"type": "alarm"} | asdict(alarm))
            with messages.guarded("sounding an alarm"):
                self._sound(alarm)

    def _sound(self, alarm: Alarm) -> None:
        """Say it, and keep the events around it where there are any."""
        on_alarm = self.recorder.options.on_alarm
        if on_alarm == "warn":
            warnings.warn(f"memtrace: {alarm.id}: {alarm.line}", MemoryAlarm, stacklevel=1)
        else:
            messages.say(f"alarm: {alarm.id}: {alarm.line}")
        if on_alarm not in ("print", "warn"):
            command = subprocess.Popen(
                shlex.split(on_alarm), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
            assert command.stdin is not None
            with contextlib.suppress(OSError), command.stdin as said:
                said.write(json.dumps(asdict(alarm)).encode() + b"\n")
        if self.recorder.recording:
            self.recorder.save(f"-alarm-{alarm.id}", "alarm")

    def _write_metrics(self, says: dict[str, Any]) -> None:
        if self._sinks:
            rows, self._written = self.steps.since(self._written)
            for sink in list(self._sinks):
                try:
                    sink.write([dict(zip(COLUMNS, row, strict=True)) for row in rows], says)
                except Exception as error:
                    self._sinks.remove(sink)
                    messages.say(f"metrics stopped ({type(error).__name__}: {error})")

    def _hand_out(self) -> None:
        """Write down the blocks that were seen, with what is known of them, for watchers to read."""
        assert self._raw is not None
        (moment, step, took_us, raw, gradients), self._raw = self._raw, None
        begun = time.perf_counter()
        self._note_pieces(moment, raw)
        if self._watchers and self.place is not None:
            snapshot = self.recorder.take("live", self._device(), raw=raw, gradients=gradients)
            snapshot["device_traces"] = _as_if_recorded(snapshot, self._device())
            file = files.write_snapshot(snapshot, protocol.sample_place(self.place), force=True, mode=0o600)
            self._seen = {"type": "blocks", "file": str(file), "at": moment, "step": step, "time_us": now_us()}
            self._tell(self._seen)
        cost_s = took_us / 1e6 + time.perf_counter() - begun
        self._not_before = time.monotonic() + max(_LEAST_S, _SHARE * cost_s)

    def _note_pieces(self, moment: str, raw: dict[str, Any]) -> None:
        """The largest block in use before a backward pass is taken for the largest request of its step."""
        device, backend = self._device(), self.recorder.backend
        segments = [segment for segment in raw["segments"] if segment.get("device") == device]
        blocks = [block for segment in segments for block in segment["blocks"]]
        if moment == "backward":
            used = (block.get("requested_size") or block["size"] for block in blocks if block["state"] != "inactive")
            self._largest = max(used, default=0)
        elif moment == "step" and self._largest:
            free = max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
            cached = sum(segment["total_size"] for segment in segments if not segment.get("active_size"))
            room, limit = backend.memory_info(device)[0], backend.limit_bytes(device)
            if limit is not None:
                room = min(room, limit - sum(segment["total_size"] for segment in segments))
            self._pieces = self._largest, free, room + cached
            self._largest = 0

    # sending
    def _tell(self, message: dict[str, Any]) -> None:
        for watcher in self._watchers:
            self._say(watcher, message)

    def _say(self, watcher: _Watcher, message: dict[str, Any]) -> None:
        line = protocol.encode(message | {"dropped": watcher.dropped} if watcher.dropped else message)
        if len(watcher.unsent) + len(line) > _QUEUE_BYTES:
            watcher.dropped += 1
        else:
            watcher.unsent += line

    def _flush(self) -> None:
        for watcher in [each for each in self._watchers if each.unsent]:
            try:
                del watcher.unsent[: watcher.socket.send(watcher.unsent)]
            except BlockingIOError:
                continue
            except OSError:
                self._drop(watcher)


def let_watchers_in(recorder: Recorder) -> Recorder:
    """Give a recorder its server, if its options ask for one."""
    if recorder.options.live and recorder.steps is not None:
        recorder.live = LiveServer(recorder, recorder.steps)
        recorder.in_child.append(recorder.live.forked)
    return recorder


def _as_if_recorded(snapshot: dict[str, Any], device: int) -> list[list[dict[str, Any]]]:
    """The blocks that have a stack and no label as allocations of the present phase, so that attribution sees them.

    Their order is not known; that of their addresses is used.
    """
    now, labels = now_us(), {row["address"] for row in snapshot["memtrace"]["labels"]}
    events = []
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"] if segment.get("device") == device else ():
            address = block.get("address", address)
            if block["state"] != "inactive" and block.get("frames") and address not in labels:
                size = block.get("requested_size") or block["size"]
                event = {"action": "alloc", "addr": address, "size": size, "stream": segment.get("stream", 0)}
                events.append(event | {"time_us": now, "frames": block["frames"]})
            address += block["size"]
    return [[] for _ in range(device)] + [events]
