"""Recording from inside a Transformers or TRL trainer: ``Trainer(…, callbacks=[MemtraceCallback("run.pickle")])``."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from memtrace.errors import MissingDependencyError
from memtrace.record import messages
from memtrace.record.ahead import say_forecast
from memtrace.record.api import Recording, record

try:
    from transformers import TrainerCallback

    _missing = ""
except ImportError as error:  # the class is there all the same: documentation, `from memtrace import *`
    TrainerCallback, _missing = object, str(error)


class MemtraceCallback(TrainerCallback):  # type: ignore[misc]
    """Records from the first training step to the last; takes the arguments of :func:`memtrace.record`.

    Steps are the trainer's own (one an update, whatever the accumulation). The file is written when training ends;
    after an out-of-memory error it holds the state at the error, and the verdict is printed when the program ends.
    ``forecast`` prints one line before the first step: whether the run will fit, by the lengths of the data set.
    Raises MissingDependencyError where Transformers isn't installed.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "memtrace.pickle", *, forecast: bool = False, **options: Any
    ) -> None:
        if _missing:
            raise MissingDependencyError.of_extra(
                f"MemtraceCallback needs transformers, which cannot be imported here ({_missing})", "capture"
            )
        self.path, self.forecast = path, forecast
        self.options = options
        self.recording: Recording | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record."""
        found = {key: kwargs[key] for key in ("model", "optimizer") if kwargs.get(key) is not None}
        if self.forecast:
            with messages.guarded("forecasting the run"):
                say_forecast(kwargs["model"], kwargs.get("optimizer"), args, kwargs.get("train_dataloader"))
        self.recording = record(self.path, **(found | self.options)).__enter__()
        self.recording.count_steps_by_hand()
        atexit.register(self._at_exit)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the trainer's step."""
        if self.recording is not None:
            self.recording.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the file."""
        self._close(None)

    def _at_exit(self) -> None:
        """Training that never ended ran into an error; Python has already shown it."""
        self._close(getattr(sys, "last_value", None))

    def _close(self, error: BaseException | None) -> None:
        if self.recording is not None:
            self.recording.close(error)
            self.recording = None
            atexit.unregister(self._at_exit)
