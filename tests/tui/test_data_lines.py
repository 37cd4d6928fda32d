"""Text helpers: safe to print, exact widths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from memtrace_tui.data.lines import line, stacked, wrap

from memtrace.render.words import bar, clip
from memtrace.units import printable


@given(st.text())
def test_nothing_from_a_file_can_drive_the_terminal(text: str) -> None:
    safe = printable(text)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u2028\u2029\ufeff" for c in safe)


def test_clean_leaves_words_alone() -> None:
    assert printable("models/llama.py:17 forward") == "models/llama.py:17 forward"
    assert printable("名前 é") == "名前 é"
    assert printable("\x1b[31mred\x07") == r"\x1b[31mred\x07"


@given(st.floats(-1, 2), st.integers(0, 200))
def test_bars_fit_and_show_something_where_there_is_something(share: float, width: int) -> None:
    drawn = bar(share, width)
    assert len(drawn) <= width
    assert bool(drawn) == (share > 0 and width > 0)


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9), st.integers(1, 200))
def test_stacked_bars_never_overflow_and_show_every_part_there_is_room_for(sizes: list[int], width: int) -> None:
    total = sum(sizes)
    spans = stacked([(size, str(i)) for i, size in enumerate(sizes)], total, width)
    cells = sum(len(text) for text, _ in spans)
    present = sum(size > 0 for size in sizes)
    assert cells <= max(width, present)
    if total and width >= present:
        assert cells == width
        assert len(spans) == present


@given(st.lists(st.tuples(st.text("ab c", max_size=30), st.just("text")), max_size=5), st.integers(4, 30))
def test_wrapping_keeps_every_word_and_the_width(spans: list[tuple[str, str]], width: int) -> None:
    lines = wrap(spans, width, 2)
    assert all(len(each.plain) <= width for each in lines)
    kept = "".join(each.plain for each in lines).replace(" ", "")
    assert kept == "".join(text for text, _ in spans).replace(" ", "")


def test_clip() -> None:
    assert clip("abcdef", 4) == "abc…"
    assert clip("abcdef", 4, keep_end=True) == "…def"
    assert clip("abc", 3) == "abc"
    assert clip("abc", 0) == ""
    assert line("a", ("b", "dim")).plain == "ab"
