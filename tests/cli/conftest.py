"""Commands that run in this process share the repository's recordings: each is read and replayed once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import shared_recordings


@pytest.fixture(autouse=True)
def recordings_are_read_once() -> Iterator[None]:
    """Tests of reading itself use files of their own, or a process of its own."""
    with shared_recordings():
        yield
