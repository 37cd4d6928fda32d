"""Every run of the tests tries the same examples: what chance finds belongs in a fuzzer, not in a gate. And the width
of the terminal that the tests run in does not change what they see.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def no_known_width() -> None:
    """Test runners that start workers tell them the width of their terminal."""
    os.environ.pop("COLUMNS", None)
