"""Rules of the user's own, and labels that the recorder stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from strategies import BASE, modern

from memtrace.analysis import Analysis, analyse
from memtrace.answers.report import report
from memtrace.attribution.user_rules import read_rules
from memtrace.errors import UsageError
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw

RULE = """
[[rule]]
id = "ours"
file = "train\\\\.py$"
function = "^step$"
category = "activations"
subcategory = "kv_cache"
"""


def made(raw: object, rules: Path | None = None) -> Analysis:
    snapshot = from_raw(raw, "x")
    return analyse(build(snapshot, snapshot.devices[0]), read_rules(rules) if rules else None)


def test_a_rule_of_ones_own_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULE)
    budget = report(made(modern(), path))
    assert budget.subcategories["activations/kv_cache"] == (5 << 20)
    assert budget.top[0].rule == "ours"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x", "not valid TOML"),
        ("", "one or more"),
        (RULE.replace("activations", "activation"), "'category' must be one of"),
        (RULE.replace("kv_cache", "cache"), "'subcategory' of activations"),
        (RULE.replace("^step$", "(").replace("file", "filename"), "unknown key"),
        (RULE.replace("^step$", "("), "regular expression"),
        ('[[rule]]\ncategory = "lora"\nsubcategory = "params"\n', "give a pattern"),
    ],
)
def test_a_bad_rules_file_is_one_clear_line(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=wanted):
        read_rules(path)


def test_labels_win_and_fit_the_allocation_alive_at_their_time() -> None:
    raw = modern()
    label = {"address": BASE, "bytes": 100, "category": "lora", "subcategory": "params", "name": "w"}
    raw["memtrace"] = {"version": 1, "labels": [label]}
    budget = report(made(raw))
    assert budget.subcategories["lora/params"] == 2 << 20
    assert [site.evidence for site in budget.top if site.category == "lora"] == ["label"]
    raw = modern()
    raw["memtrace"] = {"labels": [{**label, "from_time_us": 0, "until_time_us": 1}]}  # before the allocation was made
    assert "lora/params" not in report(made(raw)).subcategories


def test_malformed_labels_are_ignored() -> None:
    raw = modern()
    raw["memtrace"] = {"labels": [1, {}, {"address": "x"}, {"address": BASE, "category": "lora", "subcategory": "no"}]}
    assert report(made(raw)).categories["lora"] == 0
