"""Why two runs differ: causes that sum to the byte, the right one first, and how each run ended."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from support import LABELLED, analysis

from memtrace.analysis import analyse
from memtrace.answers.diff.comparison import Story
from memtrace.explain.causes import compare, follows, story_of
from memtrace.history.timeline import build
from memtrace.render.diff_text import render_diff
from memtrace.snapshot.load import load

# (before, after, id of the first cause, its sign); the runs of a pair differ in more than one thing only where it says.
PAIRS = [
    ("llama2-7b_baseline", "llama2-7b_baseline-expandable", "allocator_setting", -1),
    ("llama2-7b_oom-fragmentation", "llama2-7b_variable-length-expandable", "allocator_setting", -1),
    ("llama2-7b_reference-model", "llama2-7b_baseline", "reference_model", -1),
    ("llama2-7b_eager-no-checkpointing", "llama2-7b_eager", "checkpointing", -1),  # at more tokens
    ("ddp_rank0", "ddp_rank1", "tokens", 1),
    ("mistral-7b_autocast-no-checkpointing", "mistral-7b_no-checkpointing", "attention", 1),  # at more tokens
]


def checked(before: str, after: str) -> Story:
    """The story, whose causes must sum to the change; the other way round they change their sign."""
    story, back = (story_of(analysis(a), analysis(b)) for a, b in ((before, after), (after, before)))
    for one in (story, back):
        assert sum(cause.bytes for cause in one.causes) == one.change_bytes
        assert one.causes[-1].id == "unexplained" and not one.causes[-1].bytes
        assert len({cause.id for cause in one.causes}) == len(one.causes)
        for later in (False, True):
            sizes = [abs(cause.bytes) for cause in one.causes[:-1] if follows(cause, one.change_bytes) == later]
            assert sizes == sorted(sizes, reverse=True)
    assert (story.was_bytes, story.now_bytes) == (back.now_bytes, back.was_bytes)
    return story


@pytest.mark.parametrize(("before", "after", "cause", "sign"), PAIRS)
def test_the_first_cause_is_the_right_one(before: str, after: str, cause: str, sign: int) -> None:
    story = checked(before, after)
    assert story.causes[0].id == cause and story.causes[0].bytes * sign > 0
    assert story.causes[0].title.lower() in story.sentence.lower()


@pytest.mark.parametrize(("before", "after"), list(pairwise(sorted(LABELLED)[:12])))
def test_bytes_sum_whatever_is_compared(before: str, after: str) -> None:
    checked(before, after)


def test_a_leak_is_named_though_the_other_run_works_on_longer_sequences() -> None:
    story = checked("llama2-7b_kept-graphs", "llama2-7b_baseline")
    leak = next(cause for cause in story.causes if cause.id == "growth_across_steps")
    assert leak.bytes < -400 << 20 and leak.title.endswith("gone")


def test_a_run_that_died_is_compared_in_the_step_it_died_in() -> None:
    before, after = analysis("llama2-7b_oom-fragmentation"), analysis("llama2-7b_variable-length")
    answer = compare(before, after)
    told = answer.to_json()
    assert told["outcome"] == {"before": "oom", "after": "ok", "before_step": 10, "after_step": 23}
    assert told["compared"]["alike"] and told["compared"]["after"]["step"] == 10
    assert answer.sentence.startswith("Died in step 10, now survives: ")
    here = compare(before, after, at_after=after.at("peak"))
    assert here.after.at.kind == "peak"


def test_what_is_unlike_is_said() -> None:
    story = story_of(analysis("llama2-7b_baseline"), analysis("llama2-7b_baseline-expandable"))
    assert story.unlike["allocator settings"] == ("PyTorch's defaults", "expandable_segments:True")
    assert "checkpointing" in story.alike


def test_a_setting_accounts_for_the_blocks_that_it_rounds_otherwise() -> None:
    """The same tensors under another setting: all of the change is the setting's, with nothing against it."""
    for names in (("baseline", "baseline-expandable"), ("baseline-expandable", "baseline")):
        story = checked(*(f"llama2-7b_{name}" for name in names))
        assert [cause.id for cause in story.causes if cause.bytes] == ["allocator_setting"]


SIZE, SIGNED = r"([\d.,]+ \w+)", r"[-+][\d.,]+ \w+"
SHARED = [*PAIRS, ("llama2-7b_oom-first-step", "llama2-7b_baseline", "tokens", -1)]


def size_of(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


@pytest.mark.parametrize(("before", "after"), [pair[:2] for pair in SHARED])
def test_evidence_and_bytes_of_a_cause_are_of_the_same_moment(before: str, after: str) -> None:
    """What each line tells of groups adds up to the cause's bytes, and what all tell of a group to its change."""
    for names in ((before, after), (after, before)):
        story = checked(*names)
        whole: dict[str, float] = {}
        for cause in story.causes:
            if cause.id in ("fragmentation", "unexplained"):
                parts = re.fullmatch(rf"peak reserved less peak allocated: {SIZE} → {SIZE}(.*)", cause.evidence)
                if parts is not None and not parts[3]:
                    change = size_of(parts[2]) - size_of(parts[1])
                    assert change == pytest.approx(cause.bytes, rel=0.02, abs=12 << 20)
                continue
            told = 0.0
            line = cause.evidence.partition("at the peaks: ")[2].removeprefix("beyond what was asked for, ")
            for one in re.finditer(rf"([a-z ]*?){SIZE} → {SIZE}(?: \(here ({SIGNED})\))?", line):
                part = size_of(one[4].lstrip("+")) if one[4] else size_of(one[3]) - size_of(one[2])
                told += part
                group = one[1].strip()
                whole[group] = whole.get(group, size_of(one[2]) - size_of(one[3])) + part  # comes to nothing
            if line:
                assert told == pytest.approx(cause.bytes, rel=0.02, abs=12 << 20), cause
        assert all(abs(rest) < 12 << 20 for rest in whole.values()), whole


def test_the_moment_of_the_causes_is_said_where_the_table_is_of_another() -> None:
    before, after = analysis("llama2-7b_oom-first-step"), analysis("llama2-7b_baseline")
    answer = compare(before, after)
    story = answer.story
    assert story is not None and story.events[1] != answer.after.at.event
    text = " ".join(" ".join(line.plain for line in render_diff(answer)).split())
    assert f"event {story.events[0]:,} before, {story.events[1]:,} after; the table below is of events" in text
    assert answer.to_json()["causes_at"] == {"before": story.events[0], "after": story.events[1]}
    alike = " ".join(line.plain for line in render_diff(compare(after, analysis("llama2-7b_reference-model"))))
    assert "peaks of allocated memory: event" in alike and "the table below" not in alike


FIXES = Path(__file__).parents[1] / "truth" / "fix_pairs"
# Runs of which the second has one thing fixed, recorded by PyTorch alone on an H200 (tests/gpu/record_fix_pairs.py).
FIRST = {
    "leak-hidden": "growth_across_steps", "checkpointing": "checkpointing", "checkpointing-full": "checkpointing",
    "max-split": "allocator_setting", "loss-chunked": "loss", "optimizer-sgd": "optimizer",
    "optimizer-adafactor": "optimizer", "rank": "adapters", "targets": "adapters", "padding": "tokens",
    "length": "tokens", "micro-batch": "tokens", "reference": "reference_model", "attention": "attention",
    "attention-checkpointed": "attention", "eval-batch": "eval_peak", "cast-model": "cast", "cast-head": "cast",
}  # fmt: skip


@pytest.mark.parametrize(("name", "cause"), FIRST.items())
def test_the_thing_that_was_fixed_is_named_first(name: str, cause: str) -> None:
    sides = [load(FIXES / f"{name}.{side}.pickle.xz") for side in ("before", "after")]
    story = story_of(*(analyse(build(side, side.devices[0])) for side in sides))
    assert story.causes[0].id == cause and story.causes[0].bytes < 0
    assert sum(one.bytes for one in story.causes) == story.change_bytes < 0
