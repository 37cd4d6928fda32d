"""Where no adapters are in play, no text for people calls what is trained after an adapter; JSON keeps its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from support import analysis, shared_recordings, trace_path

from memtrace.answers.report import report
from memtrace.answers.steps import StepSeries
from memtrace.attribution.categories import category_name
from memtrace.cli import main
from memtrace.explain.overheads import overheads
from memtrace.history.timeline import choose_event
from memtrace.live.state import Growing, LiveView
from memtrace.ranks.compare import compare_ranks
from memtrace.ranks.summary import Rank, summarise
from memtrace.render.explain_text import render_overheads
from memtrace.render.live_text import live_text
from memtrace.render.ranks_text import render_ranks

FULL, OTHER, ADAPTED = "llama_full-finetuning-eager", "tinyllama_full", "tiny-llama_3-steps"
TEXTS = (
    "report", "report --why lora", "report --why trained", "explain", "explain --all", "explain --md",
    "explain --lang zh", "explain --overheads", "fragmentation", "segments", "info", "simulate",
    "export --format html",
)  # fmt: skip
_WORD = re.compile(r"\blora\b", re.IGNORECASE)  # not qlora.py, a file of the recorded program


def for_people(text: str) -> str:
    """A page without its tags' names of colours; any other text as it is."""
    page = re.sub(r"<style>.*?</style>|class=\"[^\"]*\"", "", text, flags=re.DOTALL)
    return page.replace(".lora", "")


@pytest.fixture(autouse=True)
def _shared() -> Iterator[None]:
    with shared_recordings():
        yield


@pytest.mark.parametrize("verb", TEXTS)
def test_no_text_names_adapters(verb: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([*verb.split(), str(trace_path(FULL))]) == 0
    text = for_people(capsysbinary.readouterr().out.decode())
    assert len(text) > 100
    assert not _WORD.search(text)


@pytest.mark.parametrize("other", [FULL, OTHER])
@pytest.mark.parametrize("form", ["", "--md"])
def test_no_comparison_names_adapters(other: str, form: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["diff", *form.split(), str(trace_path(other)), str(trace_path(FULL))]) == 0
    text = capsysbinary.readouterr().out.decode()
    assert "trained" in text
    assert not _WORD.search(text)


def test_with_adapters_they_are_named(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["diff", str(trace_path(FULL)), str(trace_path(ADAPTED))]) == 0
    text = capsysbinary.readouterr().out.decode()
    assert "lora " in text
    assert "trained/" not in text


@cache
def rank(name: str) -> Rank:
    found = summarise(str(trace_path(name)), use_index=False)
    assert isinstance(found, Rank)
    return found


def test_ranks() -> None:
    ranks = [replace(rank(name), rank=number) for number, name in enumerate((FULL, OTHER, OTHER))]
    answer = compare_ranks(ranks)
    text = "\n".join(line.plain for line in render_ranks(answer, 300))
    assert text.count("trained") >= 3  # the column, its imbalance, and why the first is the odd one out
    assert not _WORD.search(text)
    assert "lora" in answer.compared[0].categories
    mixed = compare_ranks([*ranks, replace(rank(ADAPTED), rank=3)])
    assert "lora" in "\n".join(line.plain for line in render_ranks(mixed, 300))


def test_live() -> None:
    made = analysis(FULL)
    budget = report(made, choose_event(made.timeline, None))
    empty = StepSeries.__new__(StepSeries)
    growing = [Growing("lora", "grads", "a.py:1 f", 1.0, 1)]
    view = LiveView(1, "a", {}, {}, 1, "forward", empty, [], 0, None, None, None, budget, "peak", 1, growing, [], [],
                    False)  # fmt: skip
    text = live_text(view, 100)
    assert "trained/grads" in text
    assert not _WORD.search(text)


def test_overheads_of_adapters() -> None:
    made = analysis(ADAPTED)
    assert "lora/optimizer_state" in "\n".join(render_overheads(overheads(made), made.attribution.lora_meaning))


def test_keys_stay(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["report", "--json", str(trace_path(FULL))]) == 0
    answer = json.loads(capsysbinary.readouterr().out)
    assert answer["lora"] == {"meaning": "trained"}
    assert answer["categories"]["lora"] > 0
    assert "lora/params" in answer["subcategories"]


def test_names() -> None:
    assert category_name("lora", "trained") == "trained"
    assert category_name("lora/grads", "trained") == "trained/grads"
    assert category_name("lora/grads", "adapters") == "lora/grads"
    assert category_name("temporary/other", "trained") == "temporary/other"
