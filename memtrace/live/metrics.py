"""A step's numbers to other tools: ``KIND:WHERE``, each kind's package imported when it is asked for.

``tensorboard:DIR``, ``prometheus:FILE`` (text for node_exporter's textfile collector), ``wandb`` (the run that is going
on; its own step count is left alone), ``mlflow[:RUN_ID]`` and ``otel`` (gauges of the meter provider that is set up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError, UsageError
from memtrace.writing import whole_file

GAUGES: Mapping[str, str] = {
    "step": "optimizer steps so far",
    "allocated_bytes": "bytes allocated after the step",
    "reserved_bytes": "bytes reserved after the step",
    "peak_allocated_bytes": "highest allocated bytes",
    "peak_reserved_bytes": "highest reserved bytes",
    "holes_bytes": "free bytes in segments that are partly in use",
    "tokens": "tokens of the step's largest pass",
}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sink:
    """``write`` takes the rows of the step log that are new, and the latest counters; ``close`` ends it."""

    write: Callable[[Sequence[Row], Row], None]
    close: Callable[[], None] = lambda: None


def open_sink(spec: str) -> Sink:
    """A sink by its name. Raises UsageError for an unknown one, MissingDependencyError without its package."""
    kind, _, where = spec.partition(":")
    if kind not in _KINDS:
        raise UsageError(f"no metrics go to {kind!r}; known: {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](where)
    except ImportError as error:
        raise MissingDependencyError(f"metrics to {kind} need a package that is not here ({error})") from None


def _values(row: Row) -> Iterable[tuple[str, float]]:
    return ((name, float(row[name])) for name in GAUGES if name in row)


def prometheus_text(row: Row, labels: Mapping[str, object]) -> str:
    """One sample a gauge in Prometheus's text format."""
    escaped = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})  # as the format says
    inside = ",".join(f'{name}="{str(value).translate(escaped)}"' for name, value in labels.items())
    lines = []
    for name, value in _values(row):
        lines += [f"# HELP memtrace_{name} {GAUGES[name]}", f"# TYPE memtrace_{name} gauge"]
        lines.append(f"memtrace_{name}{{{inside}}} {value:.0f}")
    return "\n".join(lines) + "\n"


def _prometheus(where: str) -> Sink:
    if not where:
        raise UsageError("prometheus needs a file: prometheus:/var/lib/node_exporter/memtrace.prom")

    def write(rows: Sequence[Row], now: Row) -> None:
        latest = dict(rows[-1]) if rows else dict(now)
        with whole_file(Path(where)) as out:
            out.write(prometheus_text(latest, {"device": now.get("device", 0)}).encode())

    return Sink(write)


def _tensorboard(where: str) -> Sink:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(where or "runs")

    def write(rows: Sequence[Row], now: Row) -> None:
        for row in rows:
            values = [Summary.Value(tag=f"memtrace/{name}", simple_value=value) for name, value in _values(row)]
            at = {"wall_time": float(row["time_us"]) / 1e6, "step": int(row["step"])}
            writer.add_event(Event(summary=Summary(value=values), **at))
        writer.flush()

    return Sink(write, writer.close)


def _wandb(where: str) -> Sink:
    import wandb

    run = wandb.run or wandb.init(dir=where or None)
    run.define_metric("memtrace/step")
    run.define_metric("memtrace/*", step_metric="memtrace/step")

    def write(rows: Sequence[Row], now: Row) -> None:
        for row in rows[-1:]:  # goes out with the program's own next log: W&B has one row a call
            said = {f"memtrace/{name}": value for name, value in _values(row)}
            run.log(said, commit=False)

    return Sink(write)


def _mlflow(where: str) -> Sink:
    import mlflow

    client = mlflow.MlflowClient()
    active = mlflow.active_run()
    run_id = where or (active.info.run_id if active is not None else mlflow.start_run().info.run_id)

    def write(rows: Sequence[Row], now: Row) -> None:
        metrics = [
            mlflow.entities.Metric(f"memtrace/{name}", value, int(row["time_us"]) // 1000, int(row["step"]))
            for row in rows
            for name, value in _values(row)
        ]
        for first in range(0, len(metrics), 900):  # MLflow takes a thousand at once
            client.log_batch(run_id, metrics=metrics[first : first + 900])

    return Sink(write)


def _otel(where: str) -> Sink:
    from opentelemetry import metrics

    meter = metrics.get_meter("memtrace")
    gauges = {name: meter.create_gauge(f"memtrace.{name}", description=text) for name, text in GAUGES.items()}

    def write(rows: Sequence[Row], now: Row) -> None:
        for row in rows[-1:]:
            for name, value in _values(row):
                gauges[name].set(value, {"device": int(now.get("device", 0))})

    return Sink(write)


_KINDS: Mapping[str, Callable[[str], Sink]] = {
    "tensorboard": _tensorboard,
    "prometheus": _prometheus,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "otel": _otel,
}
