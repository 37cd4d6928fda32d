"""Recording from inside a Transformers or TRL trainer: ``Trainer(…, callbacks=[MemtraceCallback("run.pickle")])``."""

from __future__ import annotations

import os
from typing import Any

from memtrace.errors import MissingDependencyError
from memtrace.record import messages
from memtrace.record.ahead import say_forecast
from memtrace.record.api import OfTraining

try:
    from transformers import TrainerCallback

    _missing = ""
except ImportError as error:  # the class is there all the same: documentation, `from memtrace import *`
    TrainerCallback, _missing = object, str(error)


class MemtraceCallback(OfTraining, TrainerCallback):  # type: ignore[misc]
    """Records from the first training step to the last; takes the arguments of :func:`memtrace.record`.

    Steps are the trainer's own (one an update, whatever the accumulation). ``forecast`` prints one line before the
    first step: whether the run will fit, by the lengths of the data set.
    Raises MissingDependencyError where Transformers isn't installed.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "memtrace.pickle", *, forecast: bool = False, **options: Any
    ) -> None:
        if _missing:
            raise MissingDependencyError.of_extra(
                f"MemtraceCallback needs transformers, which cannot be imported here ({_missing})", "capture"
            )
        super().__init__(path, **options)
        self.forecast = forecast

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record."""
        if self.forecast:
            with messages.guarded("forecasting the run"):
                say_forecast(kwargs["model"], kwargs.get("optimizer"), args, kwargs.get("train_dataloader"))
        self.begin(model=kwargs.get("model"), optimizer=kwargs.get("optimizer"))
        if self.recording is not None:
            self.recording.count_steps_by_hand()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the trainer's step."""
        if self.recording is not None:
            self.recording.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the file."""
        self.close()
