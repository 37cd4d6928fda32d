"""Recording from inside Lightning and accelerate; each class is made from their own base when it is asked for.

``Trainer(…, callbacks=[memtrace.LightningCallback("run.pickle")])``, and
``Accelerator(log_with=memtrace.AccelerateTracker("run.pickle"))``. Both take the arguments of :func:`memtrace.record`;
steps are calls of ``optimizer.step``. Where the trainer isn't installed, asking for its class raises
MissingDependencyError.
"""

from __future__ import annotations

from typing import Any

from memtrace.errors import MissingDependencyError
from memtrace.record.api import OfTraining


def _lightning() -> type[OfTraining]:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback  # type: ignore[assignment,unused-ignore]

    class LightningCallback(OfTraining, Callback):  # type: ignore[misc,unused-ignore]
        """Records from the start of training to its end, or to the exception that ends it."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.begin(model=pl_module, optimizer=list(trainer.optimizers))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.close(exception)

    return LightningCallback


def _accelerate() -> type[OfTraining]:
    from accelerate.tracking import GeneralTracker

    class AccelerateTracker(OfTraining, GeneralTracker):  # type: ignore[misc]
        """Records from ``init_trackers`` to ``end_training``, every rank into a file of its own."""

        name = "memtrace"
        requires_logging_directory = main_process_only = False

        @property
        def tracker(self) -> object:
            return self.recording

        def start(self) -> None:
            self.begin()

        def finish(self) -> None:
            self.close()

    return AccelerateTracker


_MADE_BY = {"LightningCallback": _lightning, "AccelerateTracker": _accelerate}


def __getattr__(name: str) -> Any:
    if name not in _MADE_BY:
        raise AttributeError(name)
    try:
        made = globals()[name] = _MADE_BY[name]()
    except ImportError as error:
        raise MissingDependencyError(f"memtrace.{name} needs its trainer, which can't be imported ({error})") from None
    made.__qualname__ = name  # where pickle finds it: a trainer may hand its callbacks to processes that it spawns
    return made
