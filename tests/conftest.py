"""Every run of the tests tries the same examples: what chance finds belongs in a fuzzer, not in a gate."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")
