"""What is written twice for a release is the same in both places."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from memtrace import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_stands_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert f'version: "{__version__}"' in recipe
    assert f"\n## [{__version__}] - " in changes


def test_the_conda_recipe_needs_what_the_wheel_needs() -> None:
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    run = recipe[recipe.index("  run:") : recipe.index("tests:")]
    needed = {line.strip("- ").replace(" ", "") for line in run.splitlines()[1:] if line.strip()}
    assert needed - {f"python{PROJECT['requires-python']}"} == set(PROJECT["dependencies"])
    assert all(f"- {name} = {entry}" in recipe for name, entry in PROJECT["scripts"].items())


def test_the_release_tries_every_python_that_the_package_names() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    named = {part for line in PROJECT["classifiers"] if (part := line.rpartition(" :: ")[2]).startswith("3.")}
    tried = set(re.findall(r"\d\.\d\d", workflow[workflow.index("        python: [") :].splitlines()[0]))
    assert tried == named
