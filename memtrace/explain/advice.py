"""Changes to recommend: how each is put, with what it would save and what that rests on before it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrace.explain.answer import Advice, Basis
from memtrace.explain.case import Case
from memtrace.explain.proof import Proposal
from memtrace.explain.setting import RunSetting
from memtrace.explain.spelling import spelled
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes as size

LARGE_BLOCKS = "max_split_size_mb:128"


def rule(change: str) -> Advice:
    """Advice without a number: on recording, or on what lies outside the run."""
    return Advice(change, None, Basis.RULE)


def formula(case: Case, change: str, rows: Bool, share: float = 1.0, less_bytes: int = 0, **options: Any) -> Proposal:
    """A change after which ``rows`` are ``share`` smaller, less what the change itself costs.

    ``change`` may be a key of :mod:`~memtrace.explain.spelling`; ``options`` are those of ``memtrace estimate``.
    """
    saves = max(0, case.saving(rows, share) - less_bytes)
    live = int((rows & case.live).sum())
    terms = f"{live} tensors of {size(case.live_total(rows))}"
    terms += f" × {share:.3g}" if share < 1 else ""
    terms += f" - {size(less_bytes)}" if less_bytes else ""
    terms += " at the refusal" if case.is_oom else " at the peak"
    return Proposal(words(case, change), saves, Basis.FORMULA, terms, rows, share, options=options)


def words(case: Case, change: str) -> str:
    """A change in the words of the run's trainer, where there is a table of them."""
    try:
        return spelled(change, case.setting.trainer)
    except KeyError:
        return change


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


def attention_backends(case: Case) -> str:
    """The attention implementation to ask for on this GPU."""
    capability = case.timeline.snapshot.memtrace.get("capability")
    old = isinstance(capability, (list, tuple)) and [*capability][:1] < [8]
    if old:
        return 'attn_implementation="sdpa" (FlashAttention needs an Ampere GPU or later)'
    return 'attn_implementation="sdpa", or "flash_attention_2" on Ampere or later with 16-bit tensors'


def uses_autocast(case: Case) -> bool:
    """Whether the forward pass ran under autocast: as the recorder saw it, or by the decorator that trainers use."""
    config = case.timeline.snapshot.memtrace.get("config")
    seen = isinstance(config, Mapping) and bool(config.get("autocast"))
    return seen or case.timeline.snapshot.stacks.called("amp/autocast_mode.py", "decorate_autocast")
