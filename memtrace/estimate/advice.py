"""What to change so that a run fits: cheapest change first, each re-estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memtrace.estimate.estimate import Estimate
from memtrace.estimate.options import ALL_LINEAR, RunOptions
from memtrace.estimate.quick import requested_peak


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the options: how it is made, what it costs, and what it saves.

    All sizes are of device memory, which decides: ``saves_bytes`` is what the device would hold less of and
    ``margin_bytes`` what would be left on it, if the share of memory lost to the allocator stays as it is, so that what
    is missing now plus the margin is the saving. ``saves_requested_bytes`` is the difference of the re-estimated peaks
    of requested bytes, which is exact. ``sufficient``: the margin is not negative.
    """

    change: str
    flag: str
    cost: str
    saves_bytes: int
    saves_requested_bytes: int
    margin_bytes: int
    sufficient: bool
    options: RunOptions


def advise(estimate: Estimate) -> tuple[Change, ...]:
    """Changes that save memory, sufficient ones first, in order of what they cost. Empty if the run fits."""
    if estimate.fit.fits:
        return ()
    loss = estimate.peak_reserved_bytes / estimate.peak_requested_bytes  # what the allocator adds
    found = []
    for change, flag, cost, options in _candidates(estimate.options, estimate):
        peak = requested_peak(estimate.shape, options, estimate.gpu.device)
        if peak < estimate.peak_requested_bytes:
            found.append(_change(estimate, loss, change, flag, cost, peak, options))
    if not any(entry.sufficient for entry in found):
        together = _together(estimate, loss)
        if together is not None:
            found.append(together)
    shorter = _longest(estimate, loss)
    if shorter is not None:
        found.append(shorter)
    return tuple(sorted(found, key=lambda entry: not entry.sufficient))


def _change(
    estimate: Estimate, loss: float, change: str, flag: str, cost: str, peak_requested_bytes: int, options: RunOptions
) -> Change:
    """A change that brings the peak of requested bytes to ``peak_requested_bytes``."""
    reserved = round(peak_requested_bytes * loss)
    margin = estimate.fit.capacity_bytes - estimate.outside_bytes - reserved
    saves = estimate.fit.device_bytes - estimate.outside_bytes - reserved
    requested = estimate.peak_requested_bytes - peak_requested_bytes
    return Change(change, flag, cost, saves, requested, margin, margin >= 0, options)


def _together(estimate: Estimate, loss: float) -> Change | None:
    """No single change suffices: the shortest run of them, in order of cost, that does (training unchanged)."""
    options, flags = estimate.options, list[str]()
    budget = estimate.fit.capacity_bytes - estimate.outside_bytes
    best = estimate.peak_requested_bytes
    for name, flag, cost, _ in _candidates(estimate.options, estimate):
        if cost == "other training":
            break
        changed = next((after for other, _, _, after in _candidates(options, estimate) if other == name), None)
        if changed is None:
            continue
        peak = requested_peak(estimate.shape, changed, estimate.gpu.device)
        if peak >= best:
            continue
        options, best = changed, peak
        flags.append(flag)
        if round(peak * loss) <= budget and len(flags) > 1:
            change = f"{len(flags)} changes together"
            return _change(estimate, loss, change, " ".join(flags), "the sum of theirs", peak, options)
    return None


def _candidates(options: RunOptions, estimate: Estimate) -> Iterator[tuple[str, str, str, RunOptions]]:
    """Changes in order of cost: free, a little time, more time, other training."""
    if options.keep_logits:
        yield "don't hold the logits during backward", "--drop-logits", "free", replace(options, keep_logits=False)
    if options.attention == "eager":
        yield "use PyTorch's attention", "--attn sdpa", "free, faster", replace(options, attention="sdpa")
    if options.quant in ("none", "int8"):
        yield "4-bit base weights", "--quant nf4-dq", "slower products", replace(options, quant="nf4-dq")
    if options.quant == "nf4":
        yield "quantise the scales too", "--quant nf4-dq", "free", replace(options, quant="nf4-dq")
    if options.loss != "fused":
        fused = replace(options, loss="fused", keep_logits=False)
        yield "fused loss: no logits in memory", "--loss fused", "needs TRL ≥ 1", fused
    if not options.optimizer.startswith(("paged", "sgd")):
        paged = replace(options, optimizer="paged_adamw_8bit")
        yield "paged 8-bit AdamW", "--optim paged_adamw_8bit", "about the same time", paged
    if options.prepare_kbit:
        plain = replace(options, prepare_kbit=False)
        yield "16-bit hidden states, norms and head", "--no-prepare-kbit", "less stable, faster", plain
    if not options.checkpointing:
        checkpointing = replace(options, checkpointing=True)
        yield "gradient checkpointing", "--checkpointing", "about a third more time", checkpointing
    if options.batch > 1:
        smaller = replace(options, batch=1, accumulation=options.accumulation * options.batch)
        flag = f"--batch 1 --accumulation {smaller.accumulation}"
        yield "micro-batches of one sequence, accumulated", flag, "slower steps", smaller
    if options.targets == (ALL_LINEAR,) and not estimate.shape.fused_projections:
        narrow = replace(options, targets=("q_proj", "v_proj"))
        yield "adapt only q and v", "--targets q_proj,v_proj", "other training", narrow
    if options.rank > 8:
        yield "half the rank", f"--rank {options.rank // 2}", "other training", replace(options, rank=options.rank // 2)


def _longest(estimate: Estimate, loss: float) -> Change | None:
    """The longest sequence that fits, a multiple of 64, by bisection on re-estimates started from the affine form."""
    options, budget = estimate.options, estimate.fit.capacity_bytes - estimate.outside_bytes
    low, high = 0, options.sequence // 64
    guess = _guess(estimate, budget / loss)
    while low + 1 < high:
        middle = guess if low < guess < high else (low + high) // 2
        guess = 0
        peak = requested_peak(estimate.shape, replace(options, sequence=64 * middle), estimate.gpu.device)
        if round(peak * loss) <= budget:
            low = middle
            guess = low + 1 if low + 1 < high else 0
        else:
            high = middle
    if not low:
        return None
    shorter = replace(options, sequence=64 * low)
    peak = requested_peak(estimate.shape, shorter, estimate.gpu.device)
    change = f"sequences of at most {shorter.sequence} tokens"
    return _change(estimate, loss, change, f"--seq-len {shorter.sequence}", "shorter texts", peak, shorter)


def _guess(estimate: Estimate, requested_budget: float) -> int:
    """Sequence length in units of 64 at which the affine form reaches the budget."""
    form, batch = estimate.affine, estimate.options.batch
    low, high = 0, estimate.options.sequence * batch
    while low + 1 < high:
        middle = (low + high) // 2
        if form.at(middle) <= requested_budget:
            low = middle
        else:
            high = middle
    return low // (64 * batch)
