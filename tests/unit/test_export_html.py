"""The page stands alone, closes every tag, and shows what a file says as text, never as markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from strategies import modern
from support import analysis

from memtrace.analysis import analyse
from memtrace.answers.report import report
from memtrace.explain.causes import story_of
from memtrace.export.html.charts import timeline_data
from memtrace.export.html.page import html_report
from memtrace.history.timeline import At, build, choose_event
from memtrace.snapshot.load import from_raw
from memtrace.units import format_bytes

NAMES = [
    "llama2-7b_oom-fragmentation",
    "llama2-7b_oom-at-load",
    "llama2-7b_ring-truncated",
    "llama2-7b_baseline-expandable",
]
VOID = {"meta", "br", "line", "rect", "path"}
LOADS = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}


class Page(HTMLParser):
    """Checks nesting and collects text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tables: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "br", "wbr", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(name: str) -> tuple[str, Page]:
    recording = analysis(name)
    text = html_report(recording, choose_event(recording.timeline, None))
    return text, Page(text)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_whole_and_loads_nothing(name: str) -> None:
    text, page = page_of(name)
    assert not [found for found in page.attributes if found[1] in LOADS]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    policy = next(
        value
        for tag, key, value in page.attributes
        if tag == "meta" and key == "content" and "default" in (value or "")
    )
    assert policy is not None and policy.startswith("default-src 'none'")
    assert len(text) < 4_000_000


@pytest.mark.parametrize("name", NAMES)
def test_it_shows_the_budget_of_the_report(name: str) -> None:
    recording = analysis(name)
    budget = report(recording)
    text = " ".join(page_of(name)[1].text)
    assert format_bytes(budget.reserved_bytes) in text
    for category, size in budget.categories.items():
        if size:
            assert category.replace("_", " ") in text and format_bytes(size) in text
    for line in budget.warnings:
        assert line in text


def test_an_oom_has_verdict_findings_and_map() -> None:
    text, page = page_of("llama2-7b_oom-fragmentation")
    words = " ".join(" ".join(page.text).split())
    assert "fragmentation: there was room, but in pieces (measured)" in words and "What to change first" in words
    drawn = [value for tag, key, value in page.attributes if tag == "rect" and key == "class"]
    assert {"activations", "base_weights", "free frame"} <= set(drawn)
    assert text.count("<svg") == 2


def test_hostile_names_stay_text() -> None:
    raw: dict[str, Any] = modern()
    bad = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&"
    frames = [{"filename": bad, "line": 1, "name": bad}]
    for event in raw["device_traces"][0]:
        event["frames"] = frames
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            block["frames"] = frames if "active" in block["state"] else []
    raw[bad] = 1
    raw["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = bad
    snapshot = from_raw(raw, bad)
    recording = analyse(build(snapshot, snapshot.devices[0]))
    text = html_report(recording, choose_event(recording.timeline, "end"))
    page = Page(text)
    assert text.count("<script") == 1 and "<img" not in text
    assert not [found for found in page.attributes if found[1].startswith("on")]
    assert bad in " ".join(page.text)


def test_two_recordings_stand_side_by_side() -> None:
    sides = [analysis(name) for name in (NAMES[0], NAMES[3])]
    first, second = ((side, choose_event(side.timeline, None)) for side in sides)
    text = html_report(*first, second)
    page = Page(text)
    words = " ".join(page.text)
    assert text.count("<svg") == 4 and text.count('<div class="pair">') == 7 and text.count("<script") == 1
    for side, at in (first, second):
        assert format_bytes(report(side, at).reserved_bytes) in words
    sentence = story_of(*sides).sentence
    assert sentence and sentence in words  # what changed, and why
    highest = max(report(side, at).peaks["reserved_bytes"] for side, at in (first, second))
    assert words.count(format_bytes(highest * 3 // 4)) >= 2, "one scale for both timelines"


def test_the_pointer_reads_out_what_the_curves_say() -> None:
    recording = analysis(NAMES[0])
    data = timeline_data(recording)
    events, sizes = data["event"], data["bytes"]
    assert isinstance(events, list) and isinstance(sizes, dict) and len(events) > 500
    for number in range(0, len(events), 97):
        budget = report(recording, At("event", events[number], None))
        assert {name.replace(" ", "_"): column[number] for name, column in sizes.items()} == budget.categories


def test_a_bare_list_of_segments_has_a_page_too() -> None:
    snapshot = from_raw(modern()["segments"], "bare")
    recording = analyse(build(snapshot, snapshot.devices[0]))
    page = Page(html_report(recording, choose_event(recording.timeline, "end")))
    assert "No trace was recorded" in " ".join(page.text)
