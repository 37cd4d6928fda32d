"""What takes seconds to begin and is the same for many tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Dry runs of scripts: ``runs(WORDS…)`` is ``memtrace dryrun WORDS…``."""
    from forked import Forked

    from tests.gpu.check_dryrun_scripts import environment

    made = Forked("dryrun", tmp_path_factory.mktemp("runs"), environment())
    yield partial(made, "dryrun")
    made.close()
