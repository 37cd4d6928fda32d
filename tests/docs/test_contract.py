"""The contract's page against the commands: every key that it promises is in the JSON, every verb is on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_commands import TINY, Session
from doc_pages import DOCS, spans

from memtrace.attribution.categories import Purpose
from memtrace.attribution.rules import RULES
from memtrace.cli import VERBS
from memtrace.estimate.presets import gpu_names, model_names

OOM = "sample_traces/llama2-7b_oom-first-step.pickle.xz"
ASKED = {
    "info": f"info {TINY} --json",
    "report": f"report {OOM} --json",
    "fragmentation": f"fragmentation {OOM} --json",
    "explain": f"explain {OOM} --json",
    "diff": f"diff {TINY} {TINY} --json",
    "simulate": f"simulate {TINY} --conf expandable_segments:True --json",
    "estimate": f"estimate --model tiny-llama --seq-len 256 --no-checkpointing --against {TINY} --json",
}

NOWHERE = {"reason", "owner"}  # of unattributed bytes, and of rows outside the allocator: bundled recordings have none


def promised(verb: str) -> set[str]:
    """Keys in the JSON notation that follows ``memtrace VERB`` on the page: words in quotes behind ``{`` or ``,``."""
    text = (DOCS / "contract.md").read_text()
    start = text.index("{", text.index("{", text.index(f"`memtrace {verb} ")))
    depth, end = 0, start
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            break
    return set(re.findall(r"(?<=[{,])\s*\"(\w+)\"", text[start:end]))


def keys(value: Any) -> Iterator[str]:
    """All keys in a JSON value."""
    if isinstance(value, dict):
        yield from value
        for part in value.values():
            yield from keys(part)
    elif isinstance(value, list):
        for part in value:
            yield from keys(part)


@pytest.mark.parametrize("verb", ASKED)
def test_promised_keys_are_there(verb: str, tmp_path: Path) -> None:
    session = Session(tmp_path)
    answer = json.loads("\n".join(session.run(f"memtrace {ASKED[verb]}")))
    wanted = promised(verb)
    assert len(wanted) >= 8
    assert not wanted - set(keys(answer)) - NOWHERE


def test_every_verb_is_on_the_page() -> None:
    text = (DOCS / "contract.md").read_text()
    assert not [verb for verb in VERBS if f"memtrace {verb}" not in text]


def test_every_subcategory_is_defined() -> None:
    _, *parts = re.split(r"^## ", (DOCS / "categories.md").read_text(), flags=re.MULTILINE)
    named = {(part.split()[0], row) for part in parts for row in re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)}
    rules = {rule.purpose for rule in RULES} - {Purpose.UNATTRIBUTED}  # what is unusable comes from the replay
    assert named >= {(p.category, p.subcategory) for p in rules}


def test_every_preset_is_documented() -> None:
    named = set(spans((DOCS / "estimate.md").read_text()))
    assert named >= {*model_names(), *gpu_names()}
