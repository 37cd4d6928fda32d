"""Filters, sorting and grouping against the obvious way to do them; the call tree; the event log."""

from __future__ import annotations

import re

import numpy as np
import pytest
from browser_cases import CASES, TINY, recording
from memtrace_tui.data.calltree import CallNode, call_tree, icicle, open_hot, visible
from memtrace_tui.data.query import parse
from memtrace_tui.data.rows import GROUPS, AllocationTable, EventLog
from memtrace_tui.views.allocations import ROWS
from memtrace_tui.views.events import COLUMNS

from memtrace.errors import UsageError
from memtrace.snapshot.model import Action


def live(case: str = TINY) -> tuple[AllocationTable, np.ndarray]:
    provider = recording(case).provider()
    return AllocationTable(provider), provider.live(provider.start.event)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("lora", lambda t, r: "lora" in everything(t, r)),
        ("-lora", lambda t, r: "lora" not in everything(t, r)),
        (r"/llama\.py:\d+/", lambda t, r: re.search(r"llama\.py:\d+", everything(t, r)) is not None),
        ("category:base_weights", lambda t, r: t.provider.purposes[t.rule[r]].startswith("base_weights")),
        ("sub:/^params$/", lambda t, r: t.provider.purposes[t.rule[r]].endswith("/params")),
        ("size>1MiB", lambda t, r: t.table.requested_bytes[r] > 1 << 20),
        ("size<=4096 -size<100", lambda t, r: 100 <= t.table.requested_bytes[r] <= 4096),
        ("step:1", lambda t, r: t.facts.step[r] == 1),
        ("pool:small", lambda t, r: bool(t.table.is_small[r])),
        ("stream:0", lambda t, r: t.table.stream[r] == 0),
        ("site:modeling_llama", lambda t, r: "modeling_llama" in t.provider.sites[t.table.stack[r]]),
        ("evidence:frame", lambda t, r: t.rules[t.rule[r]].evidence == "frame"),
    ],
)  # fmt: skip
def test_filters(text: str, fits: object) -> None:
    table, rows = live()
    found = rows[table.fitting(parse(text))[rows]].tolist()
    assert found == [row for row in rows.tolist() if fits(table, row)]  # type: ignore[operator]
    assert 0 < len(found) < len(rows) or text == "stream:0"


def everything(table: AllocationTable, row: int) -> str:
    """The text that a bare word is looked for in; the last frame is the outermost."""
    rule, stack = table.rules[int(table.rule[row])], int(table.table.stack[row])
    purpose = f"{rule.category}/{rule.subcategory} {rule.id} {rule.evidence}"
    return f"{purpose} {table.stack_texts[stack]}"


def test_filters_that_make_no_sense_say_so() -> None:
    for text in ("/(/", "size>much", "site:/[/"):
        with pytest.raises(UsageError):
            parse(text)
    assert parse("") == ()
    assert parse("what:ever")[0].field == "any"  # no such field: a word


@pytest.mark.parametrize("case", ["empty", "no-stacks", "two-devices", TINY])
@pytest.mark.parametrize("column", [column.name for column in ROWS])
def test_sorting(case: str, column: str) -> None:
    table, rows = live(case)
    up, down = table.sorted(rows, column, False), table.sorted(rows, column, True)
    key = table._key(column)
    assert sorted(up.tolist()) == sorted(down.tolist()) == rows.tolist()
    assert (np.diff(key[up].astype(np.int64)) >= 0).all() and (np.diff(key[down].astype(np.int64)) <= 0).all()
    for row in up[:20].tolist():
        text, role = table.cell(row, column)
        assert isinstance(text, str) and role


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by", [group for group in GROUPS if group != "none"])
def test_groups_add_up_and_their_filter_shows_their_rows(case: str, by: str) -> None:
    table, rows = live(case)
    groups = table.grouped(rows, by)
    assert sum(group.bytes for group in groups) == int(table.table.requested_bytes[rows].sum())
    assert sum(group.count for group in groups) == len(rows)
    for group in groups[:6]:
        inside = rows[table.fitting(parse(group.key))[rows]]
        assert len(inside) == group.count, group
        assert int(table.table.requested_bytes[inside].sum()) == group.bytes


def check(node: CallNode) -> None:
    assert node.bytes == node.self_bytes + sum(child.bytes for child in node.children.values())
    assert node.bytes == sum(node.by_category.values())
    for child in node.children.values():
        assert child.depth == node.depth + 1
        check(child)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_call_trees_add_up(case: str, inverted: bool, fold: bool) -> None:
    provider = recording(case).provider()
    rows = provider.live(provider.start.event)
    root = call_tree(provider, rows, inverted, fold)
    assert root.bytes == int(provider.timeline.allocations.requested_bytes[rows].sum())
    assert root.count == len(rows)
    check(root)
    assert next(visible(root, open_hot(root))) is root
    for row in icicle(root, 97, 30):
        right = 0
        for brick in row:
            assert brick.x >= right and brick.x + brick.width <= 97
            right = brick.x + brick.width


@pytest.mark.parametrize("case", CASES)
def test_every_event_can_be_shown(case: str) -> None:
    table, _ = live(case)
    log = EventLog(table)
    for event in range(0, len(log.trace), max(len(log.trace) // 300, 1)):
        for column in COLUMNS:
            text, role = log.cell(event, column.name)
            assert "\x1b" not in text and role
    if len(log.trace):
        last = log.cell(len(log.trace) - 1, "action")[0]
        assert "\x1b" not in last


def test_search_in_the_log() -> None:
    table, _ = live()
    log = EventLog(table)
    allocs = np.flatnonzero(log.trace.action == Action.ALLOC)
    assert log.fitting(parse("/^alloc$/")).sum() == len(allocs)
    address = int(log.trace.address[allocs[5]])
    assert log.fitting(parse(hex(address + 1)))[allocs[5]]
    row = int(log.row_of_event[allocs[5]])
    assert table.table.alloc_event[row] == allocs[5]
    for wrong in ("/(/", "0xzz"):
        with pytest.raises(UsageError):
            parse(wrong)
