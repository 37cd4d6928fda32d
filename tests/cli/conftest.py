"""Commands that run in this process share the repository's recordings: each is read and replayed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support import shared_recordings

from memtrace.ranks import workers


@pytest.fixture(autouse=True)
def recordings_are_read_once() -> Iterator[None]:
    """Tests of reading itself use files of their own, or a process of its own."""
    with shared_recordings():
        yield


@pytest.fixture
def ranks_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are summarised here, where it is no matter that workers do so: starting two takes longer than the rest."""

    def run(batch: Sequence[str], device: int | None, _: int, task: Any, answers: Any, on_done: Any) -> list[str]:
        answers.update({source: task(source, device) for source in batch})
        return []

    monkeypatch.setattr(workers, "_run_pool", run)
