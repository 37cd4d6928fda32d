"""Keep what truth labels were derived from, so that they can be derived anew without a GPU."""

from __future__ import annotations

import json
import lzma
from typing import Any

from tools.labelling.rows import Run, Trace, site, stamp

_COLUMNS = ("action", "addr", "size", "time_us", "user_metadata", "site")


def pack_stamps(clean: Run, stamped: Run, log: dict[str, Any], vocab: int, before: dict[int, int]) -> bytes:
    """Compressed JSON of a stamped run's events, operators and identities, and of the clean run's identities."""
    asked = {stamp(entry).number for entry in stamped.trace}
    operators = [row if number in asked else None for number, row in enumerate(log["operators"])]
    document = {
        "events": _columns(stamped.trace),
        "marks": stamped.marks,
        "identity": stamped.identity,
        "log": log | {"operators": operators},
        "vocab": vocab,
        "clean_marks": clean.marks,
        "clean_identity": clean.identity,
        "before": list(before.items()),
    }
    return lzma.compress(json.dumps(document, separators=(",", ":")).encode())


def unpack_stamps(data: bytes, clean_trace: Trace) -> tuple[Run, Run, dict[str, Any], int, dict[int, int]]:
    """The arguments of :func:`tools.labelling.labels.truth`, given the clean run's trace."""
    document = json.loads(lzma.decompress(data))
    events = document["events"]
    names: dict[str, list[str]] = events["names"]
    trace = []
    for values in zip(*(events[column] for column in _COLUMNS), strict=True):
        entry = dict(zip(_COLUMNS, values, strict=True))
        for column, texts in names.items():
            entry[column] = texts[entry[column]]
        trace.append(entry)
    stamped = Run(trace, document["marks"], document["identity"])
    clean = Run(clean_trace, document["clean_marks"], document["clean_identity"])
    return clean, stamped, document["log"], document["vocab"], dict(document["before"])


def _columns(trace: Trace) -> dict[str, Any]:
    """The events by column; texts are numbers into ``names``."""
    codes: dict[str, dict[str, int]] = {"action": {}, "user_metadata": {}, "site": {}}
    columns: dict[str, Any] = {column: [] for column in _COLUMNS}
    for entry in trace:
        texts = {"action": entry["action"], "user_metadata": entry.get("user_metadata") or "", "site": ""}
        if entry["action"] == "alloc":
            texts["site"] = site(entry)
        for column, text in texts.items():
            columns[column].append(codes[column].setdefault(text, len(codes[column])))
        for column in ("addr", "size", "time_us"):
            columns[column].append(entry.get(column, 0))
    return columns | {"names": {column: list(known) for column, known in codes.items()}}
