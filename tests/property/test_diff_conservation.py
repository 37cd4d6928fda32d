"""Whatever two recordings hold, no byte is lost between the sites and the totals."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis import Analysis, analyse
from memtrace.answers.diff.diff import diff
from memtrace.answers.diff.match import Side, pair_sites
from memtrace.answers.diff.paths import align
from memtrace.history.timeline import build
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.load import from_raw

FILES = ["train.py", "/home/me/train.py", "site-packages/peft/tuners/lora/bnb.py", "x/modeling_a.py", "??"]
NAMES = ["main", "forward", "backward", "<module>", "torch::autograd::generated::MmBackward0::apply()", "_call_impl"]
BASE, MIB = 0x7F0000000000, 1 << 20

frames = st.builds(
    lambda f, n, name: {"filename": f, "line": n, "name": name},
    st.sampled_from(FILES), st.integers(1, 6), st.sampled_from(NAMES),
)  # fmt: skip
stacks = st.lists(frames, max_size=5)


@st.composite
def recordings(draw: st.DrawFn) -> Analysis:
    """A small sound recording: one segment a tensor, some of them freed, some there before the trace."""
    pool = draw(st.lists(stacks, min_size=1, max_size=6))
    segments: list[dict[str, Any]] = []
    trace: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 12))):
        address, size = BASE + number * 64 * MIB, draw(st.integers(11, 40)) * 2 * MIB
        requested = size - draw(st.integers(0, 511))
        used = draw(st.sampled_from(pool))
        is_early, is_freed = draw(st.booleans()), draw(st.booleans())
        common = {"addr": address, "stream": 0, "time_us": len(trace), "frames": used}
        if not is_early:
            trace.append({"action": "segment_alloc", "size": size, **common})
            trace.append({"action": "alloc", "size": requested, **common})
        if is_freed:
            trace.append({"action": "free_requested", "size": requested, **common})
            trace.append({"action": "free_completed", "size": requested, **common})
        state = "inactive" if is_freed else "active_allocated"
        block = {"address": address, "size": size, "requested_size": requested, "state": state}
        block["frames"] = [] if is_freed else used
        segments.append(
            {
                "device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large",
                "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [block],
            }
        )  # fmt: skip
    raw = {"segments": segments, "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
    snapshot = from_raw(raw, "made up")
    return analyse(build(snapshot, snapshot.devices[0]))


@settings(max_examples=60, deadline=None)
@given(recordings(), recordings())
def test_sites_sum_to_categories_and_those_to_reserved(before: Analysis, after: Analysis) -> None:
    answer = diff(before, after)
    by_sub: Counter[str] = Counter()
    for site in answer.sites:
        by_sub[f"{site.category}/{site.subcategory}"] += site.delta_bytes
    assert {k: v for k, v in by_sub.items() if v} == {k: v for k, v in answer.delta.subcategories.items() if v}
    by_category: Counter[str] = Counter()
    for key, delta in answer.delta.subcategories.items():
        by_category[key.split("/")[0]] += delta
    assert {k: v for k, v in by_category.items() if v} == {k: v for k, v in answer.delta.categories.items() if v}
    assert sum(answer.delta.categories.values()) == answer.after.reserved_bytes - answer.before.reserved_bytes
    assert sum(site.before_bytes for site in answer.sites) == answer.before.reserved_bytes
    assert sum(site.after_bytes for site in answer.sites) == answer.after.reserved_bytes


@settings(max_examples=40, deadline=None)
@given(recordings(), recordings())
def test_the_way_back_is_the_way_there_with_the_sign_turned(before: Analysis, after: Analysis) -> None:
    there, back = diff(before, after).delta, diff(after, before).delta
    assert {k: -v for k, v in there.categories.items()} == dict(back.categories)
    assert there.reserved_bytes == -back.reserved_bytes


@settings(max_examples=30, deadline=None)
@given(recordings())
def test_nothing_differs_from_itself(recording: Analysis) -> None:
    answer = diff(recording, recording)
    assert not any(site.delta_bytes for site in answer.sites)
    assert answer.unmatched == ()


sides = st.builds(
    Side, st.sampled_from(["activations/saved", "lora/grads"]), st.integers(-1, 4), st.booleans(),
    st.sampled_from(["", "mlp"]), st.integers(0, 1 << 40), st.integers(1, 9),
)  # fmt: skip


@given(
    st.lists(stacks, min_size=4, max_size=4), st.lists(stacks, min_size=4, max_size=4), st.lists(sides), st.lists(sides)
)
def test_every_site_is_in_exactly_one_pair(first: Any, second: Any, before: list[Side], after: list[Side]) -> None:
    tables = []
    for made in (first, second):
        interner = StackInterner()
        for stack in made:
            interner.add(stack)
        tables.append(interner.table())
    before = [site for site in before if site.stack < len(tables[0])]
    after = [site for site in after if site.stack < len(tables[1])]
    pairs = pair_sites(before, after, *align(*tables))
    assert sorted(id(site) for pair in pairs for site in pair.before) == sorted(map(id, before))
    assert sorted(id(site) for pair in pairs for site in pair.after) == sorted(map(id, after))
    for pair in pairs:
        assert len({site.purpose for site in (*pair.before, *pair.after)}) == 1
        assert pair.how is not None or not (pair.before and pair.after)
