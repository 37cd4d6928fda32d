"""A short run of the mutations in fuzz/: the decoders agree, and every input ends in an answer or in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
SHARES, PER_SHARE = 4, 75
FOUND = (56717, 58619)  # seeds of long runs that once were a failure


@pytest.mark.parametrize("share", range(SHARES))
def test_mutations(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUZZ))
    from check import check
    from mutate import damaged

    readable = sum(check(damaged(seed)) for seed in range(share * PER_SHARE, (share + 1) * PER_SHARE))
    assert readable > PER_SHARE // 10  # the damage must not be so coarse that nothing gets past the decoders
    for name in ("check", "mutate"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("seed", FOUND)
def test_what_long_runs_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUZZ))
    from check import check
    from mutate import damaged

    check(damaged(seed))
    for name in ("check", "mutate"):
        sys.modules.pop(name, None)
