"""Names that a newcomer can guess: no public class name twice, no file name more than three times."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("memtrace/**/*.py"), *ROOT.glob("tui/memtrace_tui/**/*.py")])
MOST_ALIKE = 3


def test_a_public_class_name_means_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(ROOT)))
    assert len(homes) > 100
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_a_file_name_is_used_three_times_at_most() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        if not file.stem.startswith("__"):
            homes[file.stem].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > MOST_ALIKE} == {}
