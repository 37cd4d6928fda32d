"""What takes seconds to begin and is the same for many tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Dry runs of scripts, forked from one process (dry_runs.py)."""
    from dry_runs import DryRuns

    from tests.gpu.check_dryrun_scripts import environment

    made = DryRuns(tmp_path_factory.mktemp("runs"), environment())
    yield made
    made.close()
