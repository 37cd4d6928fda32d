"""Sizes to text and back."""

from __future__ import annotations

import pytest

from memtrace.errors import UsageError
from memtrace.units import format_bytes, format_delta, parse_capacity, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("24GiB", 24 << 30), ("512MiB", 512 << 20), ("1e9", 10**9), ("2.5GB", 2_500_000_000), ("7", 7), (" 1 kib ", 1024)],
)
def test_parse(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1 parsec", "-5", "nan", "inf", "1e40"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_capacity_without_a_unit_is_refused() -> None:
    assert parse_capacity("24GiB") == parse_capacity("25769803776") == 24 << 30
    with pytest.raises(UsageError, match="did you mean 24GiB"):
        parse_capacity("24")
    for text in ("0", "24k", "1e3", "-1"):
        with pytest.raises(UsageError):
            parse_capacity(text)


def test_format() -> None:
    assert [format_bytes(n) for n in (0, 511, 1024, 90177536, 23672651776, -(1 << 20))] == [
        "0 B", "511 B", "1.0 KiB", "86.0 MiB", "22.05 GiB", "-1.0 MiB",
    ]  # fmt: skip
    assert [format_delta(n) for n in (0, 2048, -2048)] == ["0 B", "+2.0 KiB", "-2.0 KiB"]
