"""Bytes to text and back. Binary units only: 1 KiB = 1024 bytes."""

from __future__ import annotations

import re
from typing import Any

from memtrace.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SUFFIX = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": KIB, "kib": KIB, "mi": MIB, "mib": MIB, "gi": GIB, "gib": GIB, "ti": TIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from ``24GiB``, ``512 MiB``, ``1e9``, ``2.5GB``. Raises UsageError on anything else."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _SUFFIX:
        raise UsageError(f"not a size: {text!r} (write 24GiB, 512MiB or a number of bytes)")
    size = float(match[1]) * _SUFFIX[match[2].lower()]
    if not size < 2**63:
        raise UsageError(f"size too large: {text!r}")
    return round(size)


def parse_capacity(text: str) -> int:
    """Bytes of a device's memory or of a limit on it. Raises UsageError as :func:`parse_size` and below 1 MiB, where
    somebody left out the unit."""
    size_bytes = parse_size(text)
    if size_bytes < MIB:
        number = text.strip()
        meant = f"did you mean {number}GiB?" if size_bytes > 0 and number[-1:] in "0123456789." else "write 24GiB, say"
        raise UsageError(f"{text!r} is {format_bytes(size_bytes)} of memory; {meant}")
    return size_bytes


def format_bytes(size_bytes: int) -> str:
    """``5.38 GiB``, ``86.0 MiB``, ``512 B``; three significant digits or so, sign kept."""
    magnitude = abs(size_bytes)
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if magnitude >= unit:
            return f"{size_bytes / unit:.{digits}f} {name}"
    return f"{size_bytes} B"


def format_delta(size_bytes: int) -> str:
    """Like :func:`format_bytes` with the sign always shown; zero has none."""
    return ("+" if size_bytes > 0 else "") + format_bytes(size_bytes)


def printable(text: str) -> str:
    """The text with control characters, lone surrogates and the like written as escapes, safe for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Like :func:`printable`, line by line."""
    return text if text.replace("\n", "").isprintable() else "\n".join(map(printable, text.split("\n")))


def printable_in(value: Any, key: object = "") -> Any:
    """A copy of builtin containers in which every text is :func:`printable`; a ``message`` keeps its lines."""
    if isinstance(value, str):
        return printable_lines(value) if key == "message" else printable(value)
    if isinstance(value, dict):
        return {printable_in(name): printable_in(part, name) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([printable_in(part, key) for part in value])
    return value


def json_text(text: str) -> str:
    """JSON in which characters that are not printable stand as JSON's own escapes; it means the same."""
    import json

    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def spreadsheet_text(text: str) -> str:
    """A text that a spreadsheet shows instead of running it as a formula."""
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


def format_count(count: int) -> str:
    """``564,327``."""
    return f"{count:,}"


def counted(count: int, thing: str) -> str:
    """``1 piece``, ``510 pieces``, ``1,024 segments``."""
    return f"{format_count(count)} {thing}{'' if count == 1 else 's'}"
