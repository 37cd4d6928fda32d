"""Who called the program, and when its history was dumped, changes nothing: a sample; all of it is
``benchmarks/attribution_accuracy.py --wrapped``."""

from __future__ import annotations

import dataclasses
import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from scoring import meant_by, score
from support import FIELD, LABELLED, STACKS, analysis, labels, timeline, trace_path
from thinned import WAYS, bare, shares
from wrappers import (
    WRAPPERS,
    Fix,
    beside_fetching,
    cleaned_up,
    dumped_late,
    ended,
    program_called,
    ring_of,
    with_allocation_stacks,
    without_stacks,
    wrapped,
)

from memtrace.analysis import analyse
from memtrace.attribution.categories import Category
from memtrace.attribution.classify import Attribution, attribute
from memtrace.attribution.reasons import reason
from memtrace.explain.explain import explain_snapshot
from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.container import open_stream
from memtrace.snapshot.load import from_raw

SAMPLE = ["tiny-llama_3-steps", "mistral-7b_reentrant", "llama_oom-caught-and-retried", "falcon_sdpa-math", "field_oom"]
OUT_OF_MEMORY = ["llama2-7b_oom-first-step", "mistral-7b_oom-late-cpp", "qwen2-7b_oom-backward"]


def _purposes(attribution: Attribution) -> np.ndarray:
    return np.array([str(rule.purpose) for rule in attribution.rules])[attribution.rule]


@pytest.mark.parametrize("name", SAMPLE)
def test_callers_change_nothing(name: str) -> None:
    made = timeline(name)
    plain = attribute(_bare(name))
    for wrapper, fix in WRAPPERS.items():
        inside = attribute(dataclasses.replace(made, snapshot=wrapped(made.snapshot, fix)))
        assert np.array_equal(_purposes(inside), _purposes(plain)), wrapper
        for column in ("start", "phase", "step"):
            ours, theirs = getattr(inside.facts.phases, column), getattr(plain.facts.phases, column)
            assert np.array_equal(ours, theirs), (wrapper, column)


@pytest.mark.parametrize(
    "name", ["from_pretrained", "compute_loss", "eager_attention", "cublasWorkspace", "setup_caches"]
)
def test_what_a_function_that_runs_the_model_is_called_changes_nothing(name: str) -> None:
    made = timeline(SAMPLE[0])
    fix = program_called(made.snapshot.stacks, name)
    inside = attribute(dataclasses.replace(made, snapshot=wrapped(made.snapshot, fix)))
    plain = attribute(dataclasses.replace(made, snapshot=wrapped(made.snapshot, lambda frames: frames)))
    assert np.array_equal(_purposes(inside), _purposes(plain))
    assert np.array_equal(inside.facts.phases.start, plain.facts.phases.start)


def _change(name: str, fix: Fix) -> int:
    """How many allocations come out otherwise."""
    bare = _bare(name)
    changed = attribute(dataclasses.replace(bare, snapshot=wrapped(bare.snapshot, fix)))
    return int((_purposes(changed) != _purposes(attribute(bare))).sum())


def test_a_library_around_a_function_that_calls_several_modules_hides_no_head() -> None:
    assert not _change("scan_oom", WRAPPERS["converted-outputs"])


@pytest.mark.parametrize("wrapper", ["program-named-loss", "program-named-cache"])
def test_what_a_script_without_modules_is_called_changes_nothing(wrapper: str) -> None:
    assert not _change("splats_oom", WRAPPERS[wrapper])


def test_a_last_gradient_of_a_workspaces_size_is_one_whatever_the_function_that_gives_it_up_is_called() -> None:
    name = {"zero_grad": "clear"}
    assert not _change(
        "own-adamw_late", lambda frames: tuple(f._replace(name=name.get(f.name, f.name)) for f in frames)
    )


@pytest.mark.parametrize("name", ["half-precision_late", "half-precision_oom", "sam_oom", "own-adamw_late"])
def test_steps_that_are_not_marked_come_out_as_those_that_are(name: str) -> None:
    """Older releases mark none."""
    bare = _bare(name)
    unmarked = dataclasses.replace(bare, snapshot=dataclasses.replace(bare.snapshot, annotations=()))
    assert score(unmarked, attribute(unmarked), labels(name)).at_peak > 0.999


@pytest.mark.parametrize("name", ["llama_full-finetuning-eager", "tinyllama_full-late", "muon_late", "contrast_late"])
def test_frees_with_the_stacks_of_what_they_free_tell_gradients_all_the_same(name: str) -> None:
    """As ``context="alloc"`` records: in the last step no optimizer asks for anything, and nothing says who freed."""
    snapshot = with_allocation_stacks(_bare(name))
    found = build(snapshot, snapshot.devices[0])
    result = score(found, attribute(found), labels(name))
    assert result.at_peak > 0.999 and result.overall > 0.999


@pytest.mark.parametrize("name", ["falcon_sdpa-math", "dora_late", "mistral-7b_oom-late-cpp", "int8_oom"])
def test_where_stacks_are_missing_little_is_wrong(name: str) -> None:
    """A tenth of all events lost theirs: what is said is right, what cannot be known is unattributed."""
    made = timeline(name)
    torn = without_stacks(made, np.random.default_rng(7).random(len(made.trace)) < 0.1)
    found = attribute(torn)
    result = score(torn, found, labels(name))
    assert 1 - result.at_peak - result.unattributed_at_peak < 0.01
    lost = np.flatnonzero(found.rows_of(Category.UNATTRIBUTED))
    assert "missing" in reason(found.facts, found.rules[-1], lost)


@pytest.mark.parametrize(
    ("name", "way", "right"),
    [
        ("adversarial_late", "no modules", 0.99),  # its forward pass is found by what autograd gives up
        ("dpo_oom", "no modules", 0.99),  # all of the model inside the loss function
        ("recommender_oom", "two training threads", 0.8),  # of two equal models each pass trains one
        ("detection_oom", "30 % of the stacks missing", 0.5),  # many short passes, behind which nothing is gone
        ("compiled-loss_oom", "stacks of the final state", 0.0),
        ("llama_oom-caught-and-retried", "no stacks", 0.0),
    ],
)
def test_of_thin_evidence_little_is_wrong(name: str, way: str, right: float) -> None:
    whole = bare(timeline(name))
    thinned = WAYS[way](whole)
    assert thinned is not None
    found = shares(thinned, attribute(thinned.timeline), whole, labels(name))
    assert found.wrong < 0.03 and found.right >= right


@pytest.mark.parametrize("name", ["closure_oom", "interrupted", "offload-to-host_late", "tinyllama_full-late"])
def test_a_thread_that_fetches_batches_changes_nothing(name: str) -> None:
    raw = _raw(name)
    places = beside_fetching(raw, 40)
    snapshot, made = from_raw(raw, name), timeline(name)
    beside = build(snapshot, snapshot.devices[0])
    plain, found = attribute(dataclasses.replace(made, snapshot=wrapped(made.snapshot, lambda f: f))), attribute(beside)
    theirs = np.append(places, -1)[made.allocations.alloc_event]
    rows = np.searchsorted(beside.allocations.alloc_event, theirs[theirs >= 0])
    wanted = _purposes(plain)[theirs >= 0]
    right = _purposes(found)[rows] == wanted
    assert made.allocations.requested_bytes[theirs >= 0][~right].sum() < 1 << 20
    batches = np.setdiff1d(np.flatnonzero(beside.allocations.alloc_event >= 0), rows)
    assert (found.categories()[batches] == Category.TEMPORARY).mean() > 0.95
    assert found.facts.phases.step.max() == plain.facts.phases.step.max()
    assert len(found.facts.phases) == len(plain.facts.phases)


def test_each_device_is_judged_by_its_own_stacks() -> None:
    """Adapters are trained on one device, whole shards on the other."""
    one, other = _raw("mixtral_lora_late"), _raw("fsdp2_oom")
    for segment in other["segments"]:
        segment["device"] = 1
    both = {**one, "device_traces": [one["device_traces"][0], other["device_traces"][0]]}
    both["segments"] = one["segments"] + other["segments"]
    snapshot = from_raw(both, "both")
    for device, name in zip(snapshot.devices, ("mixtral_lora_late", "fsdp2_oom"), strict=True):
        alone = from_raw(_raw(name) | {"external_annotations": both.get("external_annotations", [])}, name)
        plain = attribute(build(alone, alone.devices[0]))
        assert np.array_equal(_purposes(attribute(build(snapshot, device))), _purposes(plain))


def _pairs(names: list[str], each: int) -> list[tuple[str, str]]:
    """Every recording with ``each`` wrappers, so that all wrappers come up in turn."""
    every = list(WRAPPERS)
    return [(name, every[(each * i + k) % len(every)]) for i, name in enumerate(names) for k in range(each)]


def _bare(name: str) -> Timeline:
    """A recording without the recorder's own marks and labels."""
    made = timeline(name)
    return dataclasses.replace(made, snapshot=dataclasses.replace(made.snapshot, memtrace={}))


def _inside(name: str, wrapper: str) -> Timeline:
    made = timeline(name)
    return dataclasses.replace(made, snapshot=wrapped(made.snapshot, WRAPPERS[wrapper]))


# What each wrapper is compared with.
_attributed_bare = lru_cache(maxsize=1)(lambda name: attribute(_bare(name)))
_explained_bare = lru_cache(maxsize=1)(lambda name: explain_snapshot(analyse(_bare(name))))


@pytest.mark.parametrize(("name", "wrapper"), _pairs([*FIELD[::3], *STACKS[::3]], 2))
def test_callers_change_nothing_of_what_other_people_run(name: str, wrapper: str) -> None:
    ours, theirs = attribute(_inside(name, wrapper)), _attributed_bare(name)
    assert np.array_equal(_purposes(ours), _purposes(theirs))
    assert np.array_equal(ours.facts.phases.phase, theirs.facts.phases.phase)
    assert np.array_equal(ours.facts.phases.start, theirs.facts.phases.start)


DIED = [name for name in [*LABELLED, *FIELD, *STACKS] if "oom" in name][1::2]


@pytest.mark.parametrize(("name", "wrapper"), _pairs(DIED, 2))
def test_callers_change_neither_verdict_nor_findings(name: str, wrapper: str) -> None:
    ours, theirs = explain_snapshot(analyse(_inside(name, wrapper))), _explained_bare(name)
    assert ours.verdict == theirs.verdict
    assert [(f.id, f.bytes) for f in ours.findings] == [(f.id, f.bytes) for f in theirs.findings]


def _raw(name: str) -> dict[str, Any]:
    with open_stream(trace_path(name)) as opened:
        raw = pickle.loads(opened.stream.read())
    raw.pop("memtrace", None)
    return raw


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_a_dump_after_the_stack_has_unwound_changes_nothing(name: str, interrupted: bool) -> None:
    snapshot = from_raw(dumped_late(_raw(name), interrupted), name)
    late = build(snapshot, snapshot.devices[0])
    ours = attribute(late)
    result = score(late, ours, labels(name))
    assert result.at_peak >= 0.998 and result.overall >= 0.999 and result.purpose_at_peak >= 0.998
    if not interrupted:
        assert np.array_equal(_purposes(ours), _purposes(analysis(name).attribution))


@pytest.mark.parametrize("name", ["flat_oom", "closure_oom", "lightning_oom", "dumped-in-except_late"])
@pytest.mark.parametrize("way", [cleaned_up, ended])
def test_a_dump_after_the_program_gave_up_its_model_changes_nothing(name: str, way: Any) -> None:
    snapshot = from_raw(way(_raw(name)), name)
    ours, theirs = attribute(build(snapshot, snapshot.devices[0])), attribute(_bare(name))
    assert np.array_equal(_purposes(ours), _purposes(theirs))
    assert np.array_equal(ours.facts.phases.phase, theirs.facts.phases.phase)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("zero-states_oom", 0.6),  # a pass cut short in its second layer, with no whole one before
        ("int8_oom", 0.6),  # inputs of blocks from before the ring begins
        ("closure_oom", 0.8),  # nothing but states tells what is trained; activations of a workspace's size
        ("mistral-7b_accumulation-evaluation", 0.8),  # gradients from before the ring begins
        ("llama_generate_own-recorder", 0.8),  # one token at a time
        ("compiled_oom", 0.4),  # a workspace of autograd's thread
        ("scan_late", 0.6),  # begins in a backward pass without frames, behind marks of steps that are lost
        ("zero-states_late", 0.85),
        ("own-adamw_late", 0.3),  # begins in a step written by hand, which only later steps tell
    ],
)
def test_a_ring_that_lost_its_beginning_tells_what_the_rest_shows(name: str, lost: float) -> None:
    raw, truth, whole = _raw(name), labels(name), timeline(name).allocations
    begin = int(len(raw["device_traces"][0]) * lost)
    ring = from_raw(ring_of(raw, len(raw["device_traces"][0]) - begin), name)
    made = build(ring, ring.devices[0])
    label = dict(zip(truth["event_index"], truth["label"], strict=True))
    left = (whole.alloc_event < begin) & ((whole.free_completed_event < 0) | (whole.free_completed_event >= begin))
    older = {int(whole.address[row]): label.get(int(whole.alloc_event[row])) for row in np.flatnonzero(left)}
    table = made.allocations
    wanted = [
        older.get(address) if born < 0 else label.get(born + begin)
        for born, address in zip(table.alloc_event.tolist(), table.address.tolist(), strict=True)
    ]
    events = np.where(table.alloc_event < 0, 0, table.alloc_event)
    level = np.bincount(events, table.requested_bytes, len(made.trace) + 1)
    freed = table.free_completed_event >= 0
    level -= np.bincount(table.free_completed_event[freed], table.requested_bytes[freed], len(made.trace) + 1)
    peak = int(np.cumsum(level).argmax())
    at_peak = (table.alloc_event <= peak) & (~freed | (table.free_completed_event > peak))
    said = attribute(made).categories()
    rows = [row for row in np.flatnonzero(at_peak).tolist() if wanted[row] is not None]
    right = [row for row in rows if meant_by(str(wanted[row]))[0].category == said[row]]
    assert table.requested_bytes[right].sum() >= 0.99 * table.requested_bytes[rows].sum()
