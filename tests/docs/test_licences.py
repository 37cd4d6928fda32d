"""Every dependency's licence is listed."""

from __future__ import annotations

import re
import tomllib

from support import ROOT

NOT_SHIPPED = {"test"}  # what only the tests of the repository need


def test_every_dependency_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(one for name, each in extras.items() if name not in NOT_SHIPPED for one in each),
    ]
    names = {re.match(r"[\w.-]+", one)[0] for one in wanted}  # type: ignore[index]
    page = (ROOT / "docs" / "licences.md").read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()
