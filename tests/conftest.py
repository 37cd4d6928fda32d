"""Every run of the tests tries the same examples: what chance finds belongs in a fuzzer, not in a gate. And the width
of the terminal that the tests run in does not change what they see, nor whether they run in the background.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background: its children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_known_width() -> None:
    """Test runners that start workers tell them the width of their terminal."""
    os.environ.pop("COLUMNS", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one recording follow one another, so that each is read and replayed once (see support.py)."""
    from support import LABELLED, NAMES

    place = {name: number for number, name in enumerate(dict.fromkeys([*NAMES, *LABELLED]), 1)}

    def recording(item: pytest.Item) -> int:
        call = getattr(item, "callspec", None)
        return place.get(call.params.get("name"), 0) if call is not None and "/unit/" in item.nodeid else 0

    items.sort(key=recording)
