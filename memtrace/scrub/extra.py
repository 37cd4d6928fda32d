"""memtrace's own key of a snapshot: what the recorder noted about process, run and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memtrace.attribution.categories import SUBCATEGORIES, Category
from memtrace.scrub import texts
from memtrace.scrub.ledger import Ledger
from memtrace.scrub.vocabulary import CONFIG_KEYS, PACKAGES, PHASES, STATISTIC, VALUES

_NUMBERS = (
    "version", "device", "device_total_bytes", "device_free_bytes", "limit_bytes", "rank", "world_size", "predicted",
    "capability",
)  # fmt: skip
_OOM_NUMBERS = ("time_us", "device", "requested_bytes", "device_in_use_bytes", "device_free_bytes", "step")
_LABEL_NUMBERS = ("address", "bytes", "from_time_us", "until_time_us")
_STEP_COLUMNS = frozenset({
    "step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "tokens",
    "longest_tokens",
})  # fmt: skip
_DEEPEST = 8


def is_number(value: Any) -> bool:
    """Whether a value can carry no text: a number, a flag, null."""
    return value is None or type(value) in (int, float, bool)


def scrub_extra(extra: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The same facts without names, paths, command line and messages; keys that aren't known are left out."""
    known: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(_NUMBERS, _numbers),
        "pid": lambda value: _gone("the process's own id", value, ledger),
        "torch": lambda value: texts.version(value) if isinstance(value, str) else None,
        "cuda": lambda value: texts.version(value) if isinstance(value, str) else None,
        "by": lambda value: value if isinstance(value, str) and value.removeprefix("memtrace ")[:1].isdigit() else None,
        "gpu": lambda value: texts.gpu(value) if isinstance(value, str) else None,
        "packages": lambda value: _packages(value, ledger),
        "stats": lambda value: {k: v for k, v in _items(value) if STATISTIC.fullmatch(k) and is_number(v)},
        "phases": lambda value: [_phase(row, ledger) for row in _rows(value)],
        "labels": lambda value: [_label(row, ledger) for row in _rows(value)],
        "oom": lambda value: _oom(value, ledger) if isinstance(value, Mapping) else None,
        "steps": _steps,
        "config": lambda value: _config(value, ledger),
        "recording": lambda value: _config(value, ledger),
        "reason": lambda value: value if isinstance(value, str) and value in VALUES else None,
        "problems": lambda value: _gone("recorder's messages", value, ledger, []),
    }
    result = {}
    for key, value in extra.items():
        if key in known:
            result[key] = known[key](value)
        else:
            ledger.remove("unknown keys", ("memtrace", key))
    return result


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(key, part) for key, part in value.items() if isinstance(key, str)] if isinstance(value, Mapping) else []


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, (list, tuple)) else []


def _numbers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [part for part in value if is_number(part)]
    return value if is_number(value) else None


def _gone(kind: str, value: Any, ledger: Ledger, instead: Any = None) -> Any:
    if value not in (None, [], ""):
        ledger.remove(kind, str(value) if isinstance(value, (int, str)) else id(value))
    return instead


def _packages(value: Any, ledger: Ledger) -> dict[str, str | None]:
    kept: dict[str, str | None] = {}
    for name, installed in _items(value):
        if name.replace("-", "_") in PACKAGES and isinstance(installed, str):
            kept[name] = texts.version(installed)
        else:
            ledger.remove("entries of the configuration", name)
    return kept


def _phase(row: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    name = row.get("name")
    if isinstance(name, str) and name not in PHASES:
        name = f"phase_{ledger.number('phases', name)}"
    numbers = {key: row[key] for key in ("time_us", "step") if key in row and is_number(row[key])}
    return numbers | ({"name": name} if isinstance(name, str) else {})


def _label(row: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    kept = {key: row[key] for key in _LABEL_NUMBERS if key in row and is_number(row[key])}
    category, subcategory, name = row.get("category"), row.get("subcategory"), row.get("name")
    if isinstance(category, str) and category in list(Category):
        kept["category"] = category
        if isinstance(subcategory, str) and subcategory in SUBCATEGORIES[Category(category)]:
            kept["subcategory"] = subcategory
    if isinstance(name, str):
        kept["name"] = texts.module_name(name, ledger)
    return kept


def _oom(value: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    kept: dict[str, Any] = {key: value[key] for key in _OOM_NUMBERS if key in value and is_number(value[key])}
    message, phase = value.get("message"), value.get("phase")
    if isinstance(message, str):
        kept["message"] = texts.oom_message(message, ledger)
    if isinstance(phase, str):
        kept["phase"] = phase if phase in PHASES else f"phase_{ledger.number('phases', phase)}"
    return kept


def _steps(value: Any) -> dict[str, Any]:
    """The per-step log: column names that the recorder writes, rows of numbers."""
    columns = value.get("columns") if isinstance(value, Mapping) else None
    if not isinstance(columns, list) or not all(isinstance(c, str) and c in _STEP_COLUMNS for c in columns):
        return {"columns": [], "rows": []}
    rows = value.get("rows")
    kept = [list(row) for row in rows if isinstance(row, (list, tuple)) and all(map(is_number, row))] if rows else []
    return {"columns": columns, "rows": kept}


def _config(value: Any, ledger: Ledger, depth: int = 0) -> Any:
    """Known keys only, with numbers, flags, and words that public configurations hold."""
    if is_number(value):
        return value
    if isinstance(value, str):
        if value in VALUES:
            return value
    elif depth < _DEEPEST and isinstance(value, Mapping):
        kept = {}
        for key, part in _items(value):
            is_adapter = depth > 0 and key == "default"
            if key in CONFIG_KEYS or is_adapter:
                kept[key] = _config(part, ledger, depth + 1)
            else:
                ledger.remove("entries of the configuration", key)
        return kept
    elif depth < _DEEPEST and isinstance(value, (list, tuple)):
        return [_word(part, ledger) if isinstance(part, str) else _config(part, ledger, depth + 1) for part in value]
    ledger.remove("entries of the configuration", value if isinstance(value, str) else id(value))
    return None


def _word(text: str, ledger: Ledger) -> str:
    """A word of a list; lists keep their length, so that what reads them sees that something is missing."""
    return text if text in VALUES else f"word_{ledger.number('entries of the configuration', text)}"
