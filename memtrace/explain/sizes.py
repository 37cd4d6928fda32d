"""What a refused request may have been, by its size: always a possibility, never a finding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memtrace.arrays import distinct
from memtrace.attribution.categories import Purpose
from memtrace.explain.case import Case
from memtrace.units import format_bytes as size

if TYPE_CHECKING:
    from memtrace.oomlog import OomMessage

_KINDS: tuple[tuple[Purpose, str], ...] = (
    (Purpose.LOGITS, "the logits"),
    (Purpose.LOSS, "a tensor of the loss"),
    (Purpose.ATTENTION_MATRIX, "an attention matrix"),
    (Purpose.DEQUANT, "a dequantised weight"),
    (Purpose.SAVED, "an activation"),
    (Purpose.RECOMPUTE, "a recomputed activation"),
    (Purpose.CHECKPOINT_INPUT, "a layer's input"),
    (Purpose.OPTIMIZER_STATE, "an optimizer state"),
    (Purpose.GRADS, "a gradient"),
)
_SMALLEST_BYTES = 1 << 20
_MODEL_BYTES = 1 << 30


def asked_at(case: Case) -> tuple[str, ...]:
    """The sentence on who made the refused request; none where no stack tells."""
    refusal = case.refusal
    if refusal is None:
        return ()
    stack = int(case.timeline.trace.stack[case.at.event])
    label = case.attribution.sites.label(stack)
    if not label:
        return ()
    module = case.attribution.sites.module[stack]
    place = f"{label} ({module})" if module else label
    return (f"{size(refusal.asked_bytes)} was asked for at {place}.",)


def possibilities(case: Case) -> tuple[str, ...]:
    """Sentences on the refused request: what was of that size before, how it divides by the tokens."""
    refusal = case.refusal
    if refusal is None or refusal.asked_bytes < _SMALLEST_BYTES:
        return ()
    asked = refusal.asked_bytes
    found = []
    rounded = -(-case.size // 512) * 512 == asked
    counts = {name: int((rounded & case.kind(purpose)).sum()) for purpose, name in _KINDS}
    alike = [f"{name} ({count} before)" for name, count in counts.items() if count][:2]
    packed = distinct(case.size[case.kind(Purpose.QUANTIZED) & case.facts.stays])
    bits = next((bits for bits in (16, 32) if (packed * (bits // 4) == asked).any()), None)
    if alike:
        found.append(f"{asked:,} bytes is the size of {' or '.join(alike)}, so it may be one more.")
    elif bits is not None:
        what = f"{bits}-bit copy of a 4-bit weight"
        found.append(f"{asked:,} bytes is the {what} that is stored here: it may be a dequantised weight.")
    return (*found, *_per_token(case, asked))


def possible_models(message: OomMessage | None) -> tuple[str, ...]:
    """From a log: the published model whose weights are as large as the request, if the printed digits leave one."""
    found = message.interval("tried_bytes") if message is not None and message.is_gpu_oom else None
    if found is None or found[0] < _MODEL_BYTES:
        return ()
    # What is printed is the driver's share of the request, rounded up to 2 MiB.
    known = published_model(found[0] - (2 << 20), found[1])
    if known is None:
        return ()
    name, bits = known
    return (f"{size(round(sum(found) / 2))} is the size of {name} in {bits} bits, so it may be a whole model.",)


def published_model(low_bytes: float, high_bytes: float) -> tuple[str, int] | None:
    """(preset, bits) of a model whose weights have a size in that range: 16 or 32 bits throughout, or 4 bits an element
    of the linear layers and 16 of the rest, as a loader counts them. None if no model or several do."""
    from memtrace.estimate.presets import model_names, model_preset

    found = set()
    for name in model_names():
        shape = model_preset(name)
        linear = shape.linear_parameters
        four = linear // 2 + 2 * (shape.parameters - linear)
        for bits, expected in ((16, 2 * shape.parameters), (32, 4 * shape.parameters), (4, four)):
            if low_bytes <= expected <= high_bytes:
                found.add((name, bits))
    return found.pop() if len(found) == 1 else None


def _per_token(case: Case, asked: int) -> Iterator[str]:
    dims = case.dims
    if dims is None or dims.tokens < 16 or asked % dims.tokens:
        return
    a_token = asked // dims.tokens
    widths = {a_token // element: element for element in (4, 2) if a_token % element == 0}
    if widths and min(widths) >= 16:
        text = " or ".join(f"{width:,} values of {8 * element} bits" for width, element in widths.items())
        yield f"It is {dims.tokens:,} tokens × {a_token:,} bytes: {text} a token."
