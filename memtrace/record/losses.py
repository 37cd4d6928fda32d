"""The loss of a step: all logits at once, chunks of tokens under checkpointing, or TRL's fused head."""

from __future__ import annotations

from typing import Any

from memtrace.errors import MissingDependencyError

CHUNK_TOKENS = 1024
_TILE_COLUMNS = 32768  # TRL's own constant
_IGNORED = -100


def loss_and_output(model: Any, ids: Any, how: str, chunk_tokens: int = CHUNK_TOKENS, **inputs: Any) -> tuple[Any, Any]:
    """(mean loss over the tokens, the model's output with its logits or ``None``) of one micro-batch."""
    if how == "full":
        output = model(input_ids=ids, labels=ids, **inputs)
        return output.loss, output
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = causal.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    head = causal.get_output_embeddings()
    if how == "chunked":
        return _chunked(hidden, head, ids, chunk_tokens), None
    return _fused(hidden, head, ids, getattr(causal.config, "final_logit_softcapping", None)), None


def _chunked(hidden: Any, head: Any, ids: Any, chunk_tokens: int) -> Any:
    """The logits of ``chunk_tokens`` tokens at a time, made again in the backward pass."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    def chunk_loss(states: Any, labels: Any) -> Any:
        return functional.cross_entropy(head(states).float(), labels, ignore_index=_IGNORED, reduction="sum")

    labels = functional.pad(ids, (0, 1), value=_IGNORED)[:, 1:].reshape(-1)
    states = hidden.reshape(-1, hidden.shape[-1])
    total = None
    for part, target in zip(torch.split(states, chunk_tokens), torch.split(labels, chunk_tokens), strict=True):
        loss = checkpoint(chunk_loss, part, target, use_reentrant=False)
        total = loss if total is None else total + loss
    return total / (ids.numel() - ids.shape[0])


def _fused(hidden: Any, head: Any, ids: Any, softcap: float | None) -> Any:
    """What TRL's trainer does: scored tokens alone, folded tile by tile into their log-probabilities."""
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError as error:
        raise MissingDependencyError(f"--loss fused needs trl 1.0 or newer ({error})") from None
    states, labels = hidden[:, :-1], ids[:, 1:]
    mask = labels != _IGNORED
    scored = ChunkedLogProbFunction.apply(
        states[mask], head.weight, head.bias, labels[mask], 1.0, _TILE_COLUMNS, softcap, 1.0, ()
    )
    log_probabilities = scored[0].new_zeros(mask.shape).masked_scatter(mask, scored[0])
    return -log_probabilities.sum() / mask.sum().clamp(min=1)
