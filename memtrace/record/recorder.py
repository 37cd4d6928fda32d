"""The recorder: PyTorch's memory history, switched on and off, dumped with everything memtrace adds to it.

One process has at most one recorder at work. Whatever goes wrong inside it ends in one line on stderr, never in the
program's way.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.errors import UsageError
from memtrace.record import backend as backend_module
from memtrace.record import facts, files, messages
from memtrace.record.deep import DeepNames
from memtrace.record.hooks import AutoHooks
from memtrace.record.labels import Contents, Gradient, LabelBook, optimizer_parameters, without_collecting
from memtrace.record.ooms import OomBook, SavedOom, is_oom, verdict_on
from memtrace.record.outside import Readings
from memtrace.record.phases import PhaseLog, now_us
from memtrace.record.steplog import StepLog
from memtrace.writing import draft

DEFAULT_MAX_ENTRIES = 400_000  # about eight steps of a 7B QLoRA run; some 50 MB on disk, a few hundred in memory
STACKS = ("python", "all", "none")
_STOPPED = "the program switched PyTorch's recording off itself: events are missing, or all of them"


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where and what to record. ``steps`` is a window [first, end) of steps counted from 0.

    ``step_log`` also keeps the levels of every step, in the window or not; it resets PyTorch's peak statistics then.
    ``stacks="none"`` records no history until a watcher asks for it. ``live`` lets watchers in; ``on_alarm`` is
    "print", "warn" or a command; ``metrics`` say where a step's numbers go (see memtrace/live/metrics.py).
    """

    folder: Path
    stem: str
    suffix: str = ".pickle"
    stacks: str = "python"
    max_entries: int = DEFAULT_MAX_ENTRIES
    steps: tuple[int, int] | None = None
    deep: bool = False
    force: bool = False
    step_log: bool = False
    live: bool = False
    on_alarm: str = "print"
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stacks not in STACKS:
            raise UsageError(f"stacks must be {', '.join(STACKS[:-1])} or {STACKS[-1]}, not {self.stacks!r}")
        if self.max_entries < 1:
            raise UsageError(f"max_entries must be at least 1, not {self.max_entries}")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise UsageError(f"steps must be FIRST:END with 0 <= FIRST < END, not {self.steps[0]}:{self.steps[1]}")
        if self.on_alarm not in ("print", "warn"):  # an alarm at night is too late to learn that nothing starts
            try:
                command = shlex.split(self.on_alarm)
            except ValueError as error:
                raise UsageError(f"on_alarm: {self.on_alarm!r} is no command: {error}") from None
            if not command or shutil.which(command[0]) is None:
                raise UsageError(f"on_alarm must be print, warn or a command; none is found by {self.on_alarm!r}")


class Recorder:
    """Records one process. Made by :func:`memtrace.record`, by the launcher or by the trainer callback."""

    def __init__(self, options: RecordOptions, model: Any = None, optimizer: Any = None) -> None:
        self.options = options
        self.backend = backend_module.get()
        self.log = PhaseLog()
        self.labels = LabelBook(self.backend.device_type)
        self.ooms = OomBook()
        self.outside = Readings(self.backend)
        self.steps = StepLog(self.backend, options.step_log) if options.step_log or options.live else None
        self.live: Any = None  # a memtrace.record.live.LiveServer, which lets watchers in
        self.device = 0  # the one in use when the recording began
        self.hooks = AutoHooks(
            self.log, self._know_model, self._called, self._after_backward, self._before_step, self._after_step
        )
        self.deep = DeepNames(self.backend) if options.deep else None
        self.is_child = False  # forked or spawned by the process that memtrace was started in
        self.in_child: list[Callable[[], None]] = [self.forked]  # called in a forked child
        self.process = os.getpid()
        self.stacks = options.stacks
        self.started_us: int | None = None
        self.recording = self.finished = self.window_done = self.stopped_by_program = False
        self.paused = options.stacks == "none"
        self.last_file: Path | None = None
        self._model, self._optimizer = model, optimizer
        self._folder: Path | None = None
        self._hooked = False
        self._remembered: set[int] = set()  # optimizers whose first step was looked at
        self._backward_passes = 0
        self._config: dict[str, Any] = {}
        self._lock = threading.RLock()
        _made.add(self)

    # life
    def follow(self) -> None:
        """Follow the program's models and optimizers (needs PyTorch, but no GPU yet)."""
        if not self._hooked and not self.finished:
            self._hooked = True
            self.hooks.install()
            if self.deep is not None:
                self.deep.install()
            for model in _several(self._model):
                self.hooks.watch(model)
            for optimizer in _several(self._optimizer):
                self.labels.add_optimizer(optimizer)

    def begin(self) -> None:
        """Record from now on, or from the window's first step on. The GPU must be usable."""
        with self._lock:
            if self.finished:
                return
            self.follow()
            self._folder, problem = files.writable_folder(self.options.folder)
            if problem is not None:
                messages.say(f"{problem}; recordings go to {self._folder}")
            _observe(self.backend, self)
            self.device = self.backend.current_device()
            self.outside.read("start", self.device)
            self._move_window()
        if self.live is not None:
            self.live.start()

    def switch_stacks(self, on: bool) -> None:
        """Record history from now on, or no longer; what was recorded until then is written to a file first."""
        with self._lock:
            self.paused = not on
            if on and not self.recording and not self.finished:
                self._start_history()
            elif not on and self.recording:
                self.save("-stopped", "request")
                self._stop_history()

    def _start_history(self) -> None:
        self.recording = True
        self.started_us = now_us()
        wanted = "python" if self.options.stacks == "none" else self.options.stacks
        self.stacks = self.backend.start(wanted, self.options.max_entries, self._stopped_by_program)
        if self.stacks != wanted:
            messages.say("C++ stacks can't be unwound here; recording Python stacks only")

    def _stop_history(self) -> None:
        if self.recording:
            self.recording = False
            self.backend.stop()

    def _stopped_by_program(self) -> None:
        """The program is about to switch PyTorch's recording off itself: keep what there is."""
        with self._lock:
            if self.recording and not self.finished:
                file = self.save("", "end")
                self.recording, self.window_done, self.stopped_by_program = False, True, True
                kept = f"what was recorded until then is in {file}" if file is not None else "nothing could be kept"
                messages.say(f"the program stopped the recording itself (_record_memory_history); {kept}")

    def end(self) -> None:
        """Switch recording off, remove every hook. Safe to call twice."""
        if self.live is not None:
            with messages.guarded("ending the live view"):
                self.live.stop()
        with self._lock:
            self.finished = True
            if self in _observing:
                _observing.remove(self)
            if self._hooked:
                self._hooked = False
                self.hooks.remove()
                if self.deep is not None:
                    self.deep.remove()
            with messages.guarded("switching the recording off"):
                self._stop_history()
            if self.steps is not None:
                with messages.guarded("writing the step log"):
                    self._write_steps()

    def conclude(self, error: BaseException | None) -> None:
        """Write what remains to be written when a recorded program or block ends, and switch everything off."""
        with messages.guarded("ending the recording"):
            if self.ooms.last is not None and (is_oom(error) or self.ooms.pending(self.log.completed)):
                self.ooms.failed(error)
            else:
                self.ooms.set_aside(self.path("-oom"), self.options.force)
                self._write_end()
        self.end()

    def _write_end(self) -> None:
        window = self.options.steps
        if self.started_us is None and window is not None:
            never = f"before step {window[0]}: nothing was recorded"
            messages.say(f"the program ended in step {self.log.step}, {never}")
        if self.recording:
            self.save("" if window is None else f"-steps{window[0]}-{window[1]}", "end")
        if self.last_file is not None:
            messages.say(f"recorded to {self.last_file}; next: memtrace report {self.last_file}")

    # steps and phases
    def _know_model(self, model: Any) -> None:
        self.labels.add_model(model)
        if self.started_us is not None:
            self.outside.read("model", self.device)

    def _called(self, rows: int, length: int) -> None:
        if self.steps is not None:
            self.steps.called(rows, length)

    def _write_steps(self) -> None:
        if self.options.step_log and self.steps and self._folder is not None:
            wanted = self.path(".steps").with_suffix(".jsonl")
            with draft(self._folder) as made:
                made.out.writelines(self.steps.as_json_lines())
                _ = made.replace(wanted) if self.options.force else made.take_free_name(wanted)

    def _note_step(self) -> None:
        if self.steps is not None:
            self.steps.note(self.log.step - 1)
        if self.live is not None:
            self.live.stepped()
        self._move_window()

    def _before_step(self, optimizer: Any) -> None:
        self.labels.add_optimizer(optimizer)
        if self.recording:
            self.labels.note_gradients(optimizer_parameters([optimizer]), now_us())

    def _after_backward(self) -> None:
        """Gradients of programs with an optimizer of their own have no other time at which they are surely there.

        Whether it has one shows at the second pass, before which PyTorch's would have stepped.
        """
        self._backward_passes += 1
        self.outside.read("backward", self.device)
        if self.recording and self._backward_passes > 1 and not self.labels.knows_optimizers:
            models, _ = self.labels.alive()
            self.labels.note_gradients([p for model in models for _, p in model.parameters], now_us())

    def _after_step(self, optimizer: Any) -> None:
        self.outside.read("step", self.device)
        if self.recording and id(optimizer) not in self._remembered:
            self._remembered.add(id(optimizer))
            with without_collecting():
                models, optimizers = self.labels.alive()  # while they are: a script's objects are often gone at its end
                self.labels.remember(models, optimizers, now_us())
                self._config = facts.run_config(models, optimizers)
        if self.log.next_step(by_program=False):
            self._note_step()

    def _config_of(self, models: list[Contents], optimizers: list[Any]) -> dict[str, Any]:
        """What the living objects tell, else what they told after the first step."""
        config = facts.run_config(models, optimizers)
        earlier = self._config.get("models", [])
        if any("config" in model for model in earlier) and not any("config" in model for model in config["models"]):
            config["models"] = earlier  # what is left of a model may outlive it, layers that a cache holds, say
        config["models"] = config["models"] or earlier
        config["optimizers"] = config["optimizers"] or self._config.get("optimizers", [])
        config["autocast"] = self.log.autocast
        config["run"] = dict(self.log.run)
        return config

    def step(self) -> None:
        """Count a step. The automatic count, one a call of ``optimizer.step``, stops with the first call."""
        if self.log.next_step(by_program=True):
            self._note_step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the program by name; the phase before it goes on afterwards."""
        before = self.log.name
        self.log.enter(name)
        yield
        self.log.enter(before)  # not after an error: the phase stays what it was when it failed

    def _move_window(self) -> None:
        """Start or stop the history where the window of steps says so."""
        if self.finished or self.window_done or self.paused:
            return
        window = self.options.steps
        if window is None or window[0] <= self.log.step < window[1]:
            if not self.recording:
                with messages.guarded("starting the recording"):
                    self._start_history()
        elif self.log.step >= window[1]:
            self.window_done = True
            if self.recording:
                self.save(f"-steps{window[0]}-{window[1]}", "steps")
                with messages.guarded("switching the recording off"):
                    self._stop_history()

    # dumps
    def path(self, kind: str = "") -> Path:
        """Wanted name of a file: folder, stem, rank where there are several, kind."""
        rank, world_size = facts.rank_and_world_size()
        mark = f"-rank{rank}" if world_size > 1 else ""
        if self.is_child and not facts.distributed_is_up():
            mark += f"-pid{os.getpid()}"
        return (self._folder or self.options.folder) / f"{self.options.stem}{mark}{kind}{self.options.suffix}"

    def dump(self, path: str | os.PathLike[str] | None = None) -> Path | None:
        """Write the state and history so far; returns the file, or ``None`` after one line on stderr."""
        return self.save("-request", "request", Path(path) if path is not None else None)

    def save(self, kind: str, reason: str, path: Path | None = None, mode: int = 0o666) -> Path | None:
        """Take and write a snapshot; never raises."""
        with self._lock, messages.guarded("taking a snapshot"):
            snapshot = self.take(reason)
            return self.write(snapshot, path or self.path(kind), mode=mode)
        return None

    def take(
        self,
        reason: str,
        device: int | None = None,
        oom: dict[str, Any] | None = None,
        raw: dict[str, Any] | None = None,
        gradients: Sequence[Gradient] = (),
    ) -> dict[str, Any]:
        """PyTorch's snapshot with the extra key ``memtrace``; ``raw`` is one that was taken already, and quickly, so
        that models are not searched for, and ``gradients`` those that were there then."""
        device = self.backend.current_device() if device is None else device
        extra = facts.process_facts(self.backend, device)
        snapshot = self.backend.snapshot() if raw is None else raw
        traces = snapshot.get("device_traces", [])
        since = min((trace[0].get("time_us", 0) for trace in traces if trace), default=0 if raw is None else now_us())
        problems: list[str] = []
        if self.stopped_by_program or (self.recording and not self.backend.is_recording()):
            problems.append(_STOPPED)
            if self.recording:
                messages.say(_STOPPED)
        models, optimizers = _attempt(problems, ([], []), lambda: self.labels.alive(search=raw is None))
        labels = _attempt(problems, [], lambda: self.labels.collect(models, optimizers, since, gradients))
        config: dict[str, Any] = _attempt(problems, {}, lambda: self._config_of(models, optimizers))
        overflowed = any(len(trace) >= self.options.max_entries for trace in traces)
        extra |= {
            "reason": reason,
            "phases": self.log.rows(since),
            "labels": labels,
            "oom": oom,
            "outside": self.outside.rows(device),
            "config": config,
            "recording": {
                "stacks": self.stacks if self.recording else None,
                "max_entries": self.options.max_entries,
                "started_us": self.started_us,
                "overflowed": overflowed,
                "deep": self.options.deep,
            },
            "problems": problems,
        }
        if self.steps is not None and raw is None:
            extra["steps"] = self.steps.rows()
        snapshot["memtrace"] = extra
        if overflowed:
            messages.say(
                f"the ring of {self.options.max_entries} events overflowed: the oldest are lost; "
                "record fewer steps (--steps) or more events (--max-entries)"
            )
        return snapshot

    def write(self, snapshot: dict[str, Any], path: Path, force: bool | None = None, mode: int = 0o666) -> Path | None:
        """Write one snapshot; on failure one line on stderr and ``None``."""
        try:
            written = files.write_snapshot(snapshot, path, self.options.force if force is None else force, mode)
        except OSError as error:
            messages.say(f"cannot write {path}: {error.strerror or error}; nothing was left behind")
            return None
        self.last_file = written
        return written

    def on_oom(self, device: int, requested_bytes: int, in_use_bytes: int, free_bytes: int) -> None:
        """The allocator's observer: save the state before anything unwinds. Never raises."""
        with messages.guarded("saving the state of an out-of-memory error"), self._lock:
            if self.finished or os.getpid() != self.process or self.ooms.is_known(requested_bytes, self.log):
                return
            oom = {
                "message": "",  # known only when the error arrives somewhere
                "time_us": now_us(),
                "device": device,
                "requested_bytes": requested_bytes,
                "device_in_use_bytes": in_use_bytes,
                "device_free_bytes": free_bytes,
                "phase": self.log.name,
                "step": self.log.step,
            }
            snapshot = self.take("oom", device, oom)
            older = self.ooms.last.file if self.ooms.last is not None else None  # that of one that was handled
            file = self.write(snapshot, older or self.path(), True if older else None) or older
            events = sum(len(trace) for trace in snapshot["device_traces"])
            extra, completed = snapshot["memtrace"], self.log.completed
            self.ooms.last = SavedOom(extra, completed, file, events, verdict_on(snapshot))

    def forked(self) -> None:
        """Forget the parent's state in a forked child; its own CUDA start-up may begin a recording of its own."""
        self._lock = threading.RLock()
        self.is_child, self.process = True, os.getpid()
        self.recording = self.window_done = False
        self.started_us = None
        self.ooms = OomBook()
        self.last_file = None


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _attempt(problems: list[str], default: Any, job: Callable[[], Any]) -> Any:
    """Other people's objects are asked here: what fails is noted in the file instead of losing the file."""
    try:
        return job()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
        return default


_made: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _forked() -> None:
    for recorder in list(_made):
        for tell in list(recorder.in_child):
            tell()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

_observing: list[Recorder] = []
_observed_backends: list[Any] = []


def _observe(backend: Any, recorder: Recorder) -> None:
    """PyTorch can't detach an observer, so one is attached for good and passes on to whoever records."""
    _observing.append(recorder)
    if backend not in _observed_backends:
        _observed_backends.append(backend)
        backend.attach_oom_observer(_on_oom)


def _on_oom(device: int, requested_bytes: int, in_use_bytes: int, free_bytes: int) -> None:
    for recorder in list(_observing):
        recorder.on_oom(device, requested_bytes, in_use_bytes, free_bytes)


def active() -> Recorder | None:
    """The recorder at work in this process."""
    return _observing[-1] if _observing else None
