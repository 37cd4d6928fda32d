"""Texts that a model generates: no value says which token ends one, so they grow to their greatest length: the most."""

from __future__ import annotations

from typing import Any

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.record.launcher import after_import


def without_end(assumed: Assumptions) -> None:
    """Have Transformers' ``generate`` stop at its greatest length only, once it is imported."""
    after_import("transformers.generation.utils", lambda: _replace(assumed))


def _replace(assumed: Assumptions) -> None:
    import torch
    from transformers.generation import stopping_criteria
    from transformers.generation.utils import GenerationMixin

    def ends(_self: Any, tokens: Any, *_args: Any, **_kwargs: Any) -> Any:
        assumed.note("generation", "no token ends a text that a model generates before its greatest length")
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    def goes_on(_improves: Any, _finished: Any, stops: Any, _early: Any) -> Any:
        return ~torch.all(stops)

    stopping_criteria.EosTokenCriteria.__call__ = ends
    GenerationMixin._beam_search_has_unfinished_sequences = staticmethod(goes_on)
