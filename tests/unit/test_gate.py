"""Limits on growth, and what a baseline file may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.answers.gate import CONDITIONS, differences, judge, judge_peaks, parse_growth, read_baseline
from memtrace.errors import SnapshotError, UsageError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "baseline", "allowed"),
    [
        ("2%", 1000, 20),
        ("0.5 %", 1000, 5),
        ("0%", 1000, 0),
        ("200MiB", 5, 200 * MIB),
        ("0", 7, 0),
        ("1e7", 7, 10**7),
        ("5B", 7, 5),
    ],
)
def test_a_limit_is_a_share_or_a_size(text: str, baseline: int, allowed: int) -> None:
    assert parse_growth(text).allowed_bytes(baseline) == allowed


@pytest.mark.parametrize("text", ["2", "2.", "1e3", "200", " 5 "])
def test_a_number_that_lacks_its_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="did you mean"):
        parse_growth(text)


@pytest.mark.parametrize("text", ["", "two", "-2%", "2%%", "-5MiB", "%", "5 parsecs"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a limit"):
        parse_growth(text)


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 100))
def test_a_byte_above_the_limit_fails_and_the_limit_itself_passes(baseline: int, current: int, percent: int) -> None:
    growth = parse_growth(f"{percent}%")
    limit = baseline + growth.allowed_bytes(baseline)
    assert judge("peak", baseline, current, growth).passed == (current <= limit)
    assert judge("peak", baseline, limit, growth).passed
    assert not judge("peak", baseline, limit + 1, growth).passed


def test_both_peaks_are_judged() -> None:
    before, after = {"allocated_bytes": 100, "reserved_bytes": 100}, {"allocated_bytes": 101, "reserved_bytes": 110}
    assert [v.passed for v in judge_peaks(before, after, parse_growth("5%"))] == [True, False]
    assert [v.what for v in judge_peaks(before, after, parse_growth("5%"), ["allocated"])] == ["peak allocated"]


def test_the_sentence_has_the_numbers() -> None:
    verdict = judge("peak reserved", 100 * MIB, 150 * MIB, parse_growth("10%"))
    assert verdict.sentence == "peak reserved: 100.0 MiB → 150.0 MiB (+50.0 MiB, +50.0%), limit 110.0 MiB: FAILED"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"\x80\x04}", "check RECORDING --write BASE.json makes one"),
        (b"[]", "not a memtrace report"),
        (b"{}", "no 'peaks'"),
        (b'{"peaks": {"allocated_bytes": 1}}', "no 'reserved_bytes'"),
        (b'{"peaks": {"allocated_bytes": "1", "reserved_bytes": 2}, "categories": {}}', "not a size"),
        (b'{"peaks": {"allocated_bytes": true, "reserved_bytes": 2}, "categories": {}}', "not a size"),
        (b'{"peaks": {"allocated_bytes": -1, "reserved_bytes": 2}, "categories": {}}', "not a size"),
        (b'{"peaks": {"allocated_bytes": 1, "reserved_bytes": 2}}', "no 'categories'"),
    ],
)
def test_a_baseline_that_is_none_says_why_in_one_line(data: bytes, why: str) -> None:
    with pytest.raises(SnapshotError, match=why) as caught:
        read_baseline(data, "base.json")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("base.json: ")


def test_a_baseline_of_a_later_version_may_know_more() -> None:
    data = (
        b'{"peaks": {"allocated_bytes": 1, "reserved_bytes": 2, "x_bytes": 3}, "categories": {"lora": 4, "new": "?"}}'
    )
    assert read_baseline(data, "b").categories == {"lora": 4}


@pytest.mark.parametrize(("percent", "found"), [(0, []), (0.9, []), (-0.9, []), (1.1, ["model"]), (-1.1, ["model"])])
def test_another_model_is_one_whose_base_weights_differ_by_more_than_a_hundredth(
    percent: float, found: list[str]
) -> None:
    conditions = dict.fromkeys(CONDITIONS)
    baseline = SimpleNamespace(device=0, event="peak", conditions=conditions, categories={"base_weights": 10_000})
    now = SimpleNamespace(
        device=0, at=SimpleNamespace(kind="peak"), categories={"base_weights": int(10_000 * (1 + percent / 100))}
    )
    assert [each.what for each in differences(baseline, conditions, now, ())] == found  # type: ignore[arg-type]
