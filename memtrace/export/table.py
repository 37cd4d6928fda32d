"""Allocations and curves as tables: CSV, JSON (a list of rows) and Parquet, written in blocks of rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.curves import Curves
from memtrace.answers.report import LEVELS
from memtrace.attribution.categories import Category
from memtrace.attribution.phases import Phase
from memtrace.errors import MissingDependencyError
from memtrace.units import spreadsheet_text

Column = NDArray[Any]
_BLOCK_ROWS = 20_000


def allocation_columns(analysis: Analysis, rows: NDArray[np.int64]) -> dict[str, Column]:
    """The columns of the contract for these rows. Events are -1 where they never happened."""
    timeline, attribution = analysis.timeline, analysis.attribution
    table, facts = timeline.allocations, attribution.facts

    def of_rule(values: list[str]) -> Column:
        return np.array(values, dtype=object)[attribution.rule[rows]]

    pools = np.array([str(pool) for pool in timeline.pools] or ["(0, 0)"], dtype=object)
    sites = np.array([attribution.sites.label(i) for i in range(len(timeline.snapshot.stacks))] + [""], dtype=object)
    labels = np.array([phase.label for phase in Phase], dtype=object)
    return {
        "alloc_event": table.alloc_event[rows].astype(np.int64),
        "free_event": table.free_completed_event[rows].astype(np.int64),
        "address": table.address[rows],
        "requested_bytes": table.requested_bytes[rows],
        "block_bytes": table.block_bytes[rows],
        "stream": table.stream[rows],
        "pool": pools[np.maximum(table.pool[rows], 0)],
        "category": of_rule([str(rule.category) for rule in attribution.rules]),
        "subcategory": of_rule([rule.subcategory for rule in attribution.rules]),
        "phase": labels[facts.phase[rows]],
        "step": facts.step[rows],
        "evidence": of_rule([f"{rule.evidence}:{rule.id}" for rule in attribution.rules]),
        "frame": sites[table.stack[rows]],
    }


def curve_columns(analysis: Analysis, curves: Curves, events: NDArray[np.int64]) -> dict[str, Column]:
    """``event, time_us``, the three levels and one column a category, at the given events."""
    times = analysis.timeline.trace.time_us
    place = events - curves.first
    levels = {f"{level}_bytes": getattr(curves, f"{level}_bytes")[place] for level in LEVELS}
    parts = {str(category): curves.categories[number, place] for number, category in enumerate(Category)}
    return {"event": events, "time_us": np.full(len(events), -1) if times is None else times[events], **levels, **parts}


def _blocks(columns: dict[str, Column]) -> Iterator[list[list[Any]]]:
    count = len(next(iter(columns.values())))
    for low in range(0, count, _BLOCK_ROWS):
        yield [column[low : low + _BLOCK_ROWS].tolist() for column in columns.values()]


def write_table(columns: dict[str, Column], kind: str, out: IO[bytes]) -> None:
    """The columns as ``csv``, ``json`` or ``parquet``. Raises MissingDependencyError for Parquet without pyarrow."""
    {"csv": _write_csv, "json": _write_json, "parquet": _write_parquet}[kind](columns, out)


def _write_csv(columns: dict[str, Column], out: IO[bytes]) -> None:
    """A header and one line a row."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for block in _blocks(columns):
        shown = [map(spreadsheet_text, part) if part and isinstance(part[0], str) else part for part in block]
        writer.writerows(zip(*shown, strict=True))
    text.flush()
    text.detach()


def _write_json(columns: dict[str, Column], out: IO[bytes]) -> None:
    """A list of objects, one a line."""
    import orjson

    separator = b"[\n"
    for block in _blocks(columns):
        for row in zip(*block, strict=True):
            out.write(separator + orjson.dumps(dict(zip(columns, row, strict=True))))
            separator = b",\n"
    out.write(b"\n]\n" if separator == b",\n" else b"[\n]\n")


def _write_parquet(columns: dict[str, Column], out: IO[bytes]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError.of_extra("Parquet needs pyarrow", "parquet") from None
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: pyarrow.array(col) for name, col in columns.items()}), buffer)
    out.write(buffer.getvalue())
