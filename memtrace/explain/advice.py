"""Changes to recommend: how each is put, with what it would save and what that rests on before it is tried.

Names of arguments were checked against transformers 5.24, PEFT 0.21, TRL 1.16 and bitsandbytes 0.50.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memtrace.explain.answer import Advice, Basis
from memtrace.explain.case import Case
from memtrace.explain.proof import Proposal
from memtrace.explain.setting import RunSetting
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes as size

LARGE_BLOCKS = "max_split_size_mb:128"

Change = Callable[[Case], Proposal]
"""A change for a case, worked out where a finding comes of it."""

# One change, as the program that the user writes arguments for spells it.
_SPELLINGS: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("spellings.json").read_text(encoding="utf-8")
)
_LIKE = {"trl": "transformers", "llamafactory": "transformers"}


def rule(change: str) -> Advice:
    """Advice without a number: on recording, or on what lies outside the run."""
    return Advice(change, None, Basis.RULE)


def formula(
    change: str, rows: Bool, share: float = 1.0, less_bytes: int = 0, with_asked: bool = False, **options: Any
) -> Change:
    """A change after which ``rows`` are ``share`` smaller, less what the change itself costs. ``with_asked``: and so is
    the refused request, which is one more of them.

    ``change`` may be a key of the table above; ``options`` are those of ``memtrace estimate``.
    """

    def worked_out(case: Case) -> Proposal:
        asked = case.refusal.asked_bytes if with_asked and case.refusal is not None else 0
        saves = max(0, case.saving(rows, share) + round(asked * share) - less_bytes)
        terms = f"{(rows & case.live).sum()} tensors of {size(case.live_total(rows))}"
        terms += f" × {share:.3g}" if share < 1 else ""
        terms += f" + the refused {size(asked)}" if asked else ""
        terms += f" - {size(less_bytes)}" if less_bytes else ""
        terms += " at the refusal" if case.is_oom else " at the peak"
        asks = max(less_bytes, round(asked * (1 - share)), 1) if asked else None
        return Proposal(words(case, change), saves, Basis.FORMULA, terms, rows, share, asks, options=options)

    return worked_out


def words(case: Case, change: str) -> str:
    """A change as the run's trainer spells it, see :func:`spelled`."""
    return spelled(change, case.setting)


def spelled(change: str, setting: RunSetting) -> str:
    """A change as the run's trainer spells it, or else its base, or plain PyTorch; as it is where no table has it."""
    table, trainer = _SPELLINGS.get(change, {"plain": change}), setting.trainer
    if setting.has_dtensors and "dtensor" in table:
        return table["dtensor"]
    if setting.shards_weights and "sharded" in table:
        return table["sharded"]
    return table.get(trainer) or table.get(_LIKE.get(trainer, "plain")) or table["plain"]


def against_pieces(setting: RunSetting) -> list[tuple[str, str]]:
    """(change, settings string): what keeps free memory in one piece, as back end, release and platform spell it."""
    found = []
    if setting.may_expand:
        change = f"{setting.variable}=expandable_segments:True in the environment before Python starts"
        found.append((f"{change} (not with vLLM's sleep mode)", "expandable_segments:True"))
    if setting.may_split:
        change = f"{setting.variable}={LARGE_BLOCKS} in the environment before Python starts"
        found.append((f"{change}: large blocks are kept whole for large requests", LARGE_BLOCKS))
    return found


def settings_to_try(case: Case) -> list[Proposal]:
    """Allocator settings, each to be replayed."""
    return [Proposal(change, None, Basis.REPLAY, conf=conf) for change, conf in against_pieces(case.setting)]
