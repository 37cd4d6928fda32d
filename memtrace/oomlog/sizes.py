"""Printed sizes: ``15.90 GiB`` -> bytes, with the uncertainty the printed decimals leave.

PyTorch prints sizes with two decimals in the largest unit that keeps the figure above one (never TiB), so a figure
stands for an interval of half a last digit to either side. Two printed values mean "unknown" and are read as such:
anything near 2**64 bytes (``17179869184.00 GiB``, all ones) wherever it stands, and ``0 bytes`` where the figure is
the memory of a process (a driver that can't see into a container).
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from memtrace.units import GIB, KIB, MIB, TIB

_BINARY = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

SENTINEL_BYTES = 1 << 62
"""Figures from here on are a printed all-ones word (or a limit nobody set), not an amount of memory."""

SIZE = r"(\d[\d,]{0,20}(?:\.\d{1,6})?)(bytes?|[KMGT]i?B)"
"""Regular expression of a size in text whose white space has been removed: two groups, figure and unit."""


@dataclass(frozen=True, slots=True)
class Size:
    """A printed size: ``bytes`` is the nearest integer, ``half_unit_bytes`` half of the last printed digit."""

    bytes: int
    half_unit_bytes: float


def unit_bytes(unit: str, *, decimal_units: bool = False) -> int:
    """Bytes in a printed unit.

    ``GB`` counts as GiB unless ``decimal_units``: PyTorch's CUDA texts only ever print GiB, so ``GB`` in one is a
    person's retyping; Metal's older texts do print GB.
    """
    letter = unit[:1].lower()
    if letter in ("", "b"):
        return 1
    table = _DECIMAL if decimal_units and "i" not in unit.lower() else _BINARY
    return table[letter]


def parse_size(figure: str, unit: str, *, decimal_units: bool = False) -> Size | None:
    """``("15.90", "GiB")`` -> ``Size``; None for what can't be read or is a sentinel."""
    try:
        value = Decimal(figure.replace(",", ""))
    except InvalidOperation:
        return None
    factor = unit_bytes(unit, decimal_units=decimal_units)
    amount = int((value * factor).to_integral_value())
    if amount >= SENTINEL_BYTES:
        return None
    decimals = len(figure.partition(".")[2])
    half = 0.0 if factor == 1 else 0.5 * factor / 10**decimals
    return Size(amount, half)
