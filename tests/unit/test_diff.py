"""Differences between real recordings, against themselves and against the truth."""

from __future__ import annotations

from collections import Counter

import pytest
from support import NAMES, analysis, labels

from memtrace.answers.diff.comparison import Difference
from memtrace.answers.diff.diff import diff
from memtrace.explain.causes import compare

GIB = 1 << 30


def check_sums(answer: Difference) -> None:
    """Sites add up to their subcategory, those to their category, and those to the reserved difference."""
    by_sub: Counter[str] = Counter()
    for site in answer.sites:
        assert site.delta_bytes == site.after_bytes - site.before_bytes
        by_sub[f"{site.category}/{site.subcategory}"] += site.delta_bytes
    for key, delta in answer.delta.subcategories.items():
        assert by_sub.get(key, 0) == delta, key
    assert set(by_sub) <= set(answer.delta.subcategories)
    by_category: Counter[str] = Counter()
    for key, delta in answer.delta.subcategories.items():
        by_category[key.split("/")[0]] += delta
    for name, delta in answer.delta.categories.items():
        assert by_category.get(name, 0) == delta, name
    assert sum(answer.delta.categories.values()) == answer.delta.reserved_bytes
    for side in ("before", "after"):
        total = sum(getattr(site, f"{side}_bytes") for site in answer.sites)
        assert total == getattr(answer, side).reserved_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_differs_in_nothing_from_itself(name: str) -> None:
    answer = diff(analysis(name), analysis(name))
    assert not any(site.delta_bytes for site in answer.sites)
    assert not any(answer.delta.categories.values())
    assert not any(answer.delta.subcategories.values())
    assert answer.delta.peak_allocated_bytes == answer.delta.peak_reserved_bytes == answer.delta.reserved_bytes == 0
    assert answer.unmatched == ()
    assert compare(analysis(name), analysis(name)).sentence.startswith("No difference")
    check_sums(answer)


def truth_at(name: str, event: int) -> Counter[str]:
    """Bytes live just after an event by true category, from the labels of every allocation."""
    truth = labels(name)
    label = dict(zip(truth["event_index"], truth["label"], strict=True))
    timeline = analysis(name).timeline
    table, found = timeline.allocations, Counter[str]()
    for key, size in truth["before_recording"].items():
        found[key.split("/")[0]] += size
    for row in timeline.live_rows(event).tolist():
        if table.alloc_event[row] >= 0:
            found[label[int(table.alloc_event[row])].split("/")[0]] += int(table.requested_bytes[row])
    return found


CATEGORIES = ("base_weights", "lora", "activations", "temporary", "runtime")


def check_against(answer: Difference, before: Counter[str], after: Counter[str]) -> None:
    """Each category's delta within 1 % of the true one; small ones within 0.1 % of what the two sides hold."""
    total = max(sum(before.values()), sum(after.values()))
    for name in CATEGORIES:
        true = after[name] - before[name]
        assert answer.delta.categories[name] == pytest.approx(true, rel=0.01, abs=0.001 * total), name


@pytest.mark.parametrize("after", ["llama2-7b_recorded-after-load", "qwen2-7b_large-vocabulary"])
def test_deltas_are_those_of_the_truth(after: str) -> None:
    answer = diff(analysis("llama2-7b_baseline"), analysis(after))
    check_sums(answer)
    true = [truth_at("llama2-7b_baseline", answer.before.at.event), truth_at(after, answer.after.at.event)]
    check_against(answer, *true)


def test_deltas_between_python_and_cpp_stacks_are_those_of_the_truth() -> None:
    """The run with C++ stacks is the baseline's first step: the truth is the baseline's at its peak in that step."""
    baseline, cpp = analysis("llama2-7b_baseline"), analysis("llama2-7b_cpp-stacks")
    answer = diff(baseline, cpp)
    check_sums(answer)
    phases = baseline.attribution.facts.phases
    in_first = slice(0, int(phases.start[:-1][phases.step == 1][0]))
    peak_event = int(baseline.timeline.allocated_bytes[in_first].argmax())
    check_against(
        answer, truth_at("llama2-7b_baseline", answer.before.at.event), truth_at("llama2-7b_baseline", peak_event)
    )


def test_stack_settings_do_not_make_sites_new() -> None:
    """Only what one run has and the other has not yet (the optimizer's states, in step 0) may stay unmatched."""
    answer = diff(analysis("llama2-7b_baseline"), analysis("llama2-7b_cpp-stacks"))
    assert {f"{site.category}/{site.subcategory}" for site in answer.unmatched} == {"lora/optimizer_state"}


def test_memory_without_stacks_answers_to_memory_with_them() -> None:
    answer = diff(analysis("llama2-7b_baseline"), analysis("llama2-7b_recorded-after-load"))
    weights = [site for site in answer.sites if site.category == "base_weights" and site.subcategory == "quantized"]
    assert all(site.match is not None for site in weights)
    assert {site.frame for site in weights} == {"(before the recording)"}
    assert sum(site.before_bytes for site in weights) > 3 * GIB


def test_another_model_of_another_file_is_matched_by_its_functions() -> None:
    answer = diff(analysis("llama2-7b_baseline"), analysis("qwen2-7b_large-vocabulary"))
    inputs = next(site for site in answer.sites if site.subcategory == "checkpoint_input")
    assert "modeling_llama.py" in inputs.frame_before and "modeling_qwen2.py" in inputs.frame
    assert inputs.before_bytes and inputs.after_bytes


def test_fragmentation_is_what_expandable_segments_take_away() -> None:
    answer = diff(analysis("llama2-7b_oom-fragmentation"), analysis("llama2-7b_variable-length-expandable"))
    check_sums(answer)
    largest = max(answer.delta.categories, key=lambda name: abs(answer.delta.categories[name]))
    assert largest == "fragmentation"
    assert answer.delta.categories["fragmentation"] < -1.4 * GIB


def test_a_chosen_event_on_each_side() -> None:
    from memtrace.history.timeline import choose_event

    recording = analysis("tiny-llama_3-steps")
    start, end = choose_event(recording.timeline, "0"), choose_event(recording.timeline, "end")
    answer = diff(recording, recording, start, end)
    check_sums(answer)
    assert answer.before.at.event == 0
    assert answer.delta.reserved_bytes == recording.timeline.curve_at(end.event)[2] - recording.timeline.curve_at(0)[2]
