"""What to change so that a run fits: cheapest change first, each re-estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.estimate import Estimate
from memtrace.estimate.options import ALL_LINEAR, RunOptions
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.source import ShapeSource
from memtrace.estimate.stream import EMPTY_CACHE, Stream


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
    source = estimate.source
    if estimate.fit.fits or not isinstance(source, ShapeSource):
        return ()
    loss = estimate.peak_reserved_bytes / estimate.peak_requested_bytes  # what the allocator adds
    found = []
    for change, flag, cost, options in _candidates(estimate.options, source.shape):
        peak = requested_peak(source, options, estimate.gpu.device)
        if peak < estimate.peak_requested_bytes:
            found.append(_change(estimate, loss, change, flag, cost, peak, options))
    if not any(entry.sufficient for entry in found):
        together = _together(estimate, source, loss)
        if together is not None:
            found.append(together)
    shorter = _longest(estimate, source, loss)
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


def _together(estimate: Estimate, source: ShapeSource, loss: float) -> Change | None:
    """No single change suffices: the shortest run of them, in order of cost, that does (training unchanged)."""
    options, flags = estimate.options, list[str]()
    budget = estimate.fit.capacity_bytes - estimate.outside_bytes
    best = estimate.peak_requested_bytes
    for name, flag, cost, _ in _candidates(estimate.options, source.shape):
        if cost == "other training":
            break
        changed = next((after for other, _, _, after in _candidates(options, source.shape) if other == name), None)
        if changed is None:
            continue
        peak = requested_peak(source, changed, estimate.gpu.device)
        if peak >= best:
            continue
        options, best = changed, peak
        flags.append(flag)
        if round(peak * loss) <= budget and len(flags) > 1:
            change = f"{len(flags)} changes together"
            return _change(estimate, loss, change, " ".join(flags), "the sum of theirs", peak, options)
    return None


def _candidates(options: RunOptions, shape: ModelShape) -> Iterator[tuple[str, str, str, RunOptions]]:
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
    if options.targets == (ALL_LINEAR,) and not shape.fused_projections:
        narrow = replace(options, targets=("q_proj", "v_proj"))
        yield "adapt only q and v", "--targets q_proj,v_proj", "other training", narrow
    if options.rank > 8:
        yield "half the rank", f"--rank {options.rank // 2}", "other training", replace(options, rank=options.rank // 2)


def _longest(estimate: Estimate, source: ShapeSource, loss: float) -> Change | None:
    """The longest sequence that fits, a multiple of 64, by bisection on re-estimates started from the affine form."""
    options, budget = estimate.options, estimate.fit.capacity_bytes - estimate.outside_bytes
    low, high = 0, options.sequence // 64
    guess = _guess(estimate, budget / loss)
    while low + 1 < high:
        middle = guess if low < guess < high else (low + high) // 2
        guess = 0
        peak = requested_peak(source, replace(options, sequence=64 * middle), estimate.gpu.device)
        if round(peak * loss) <= budget:
            low = middle
            guess = low + 1 if low + 1 < high else 0
        else:
            high = middle
    if not low:
        return None
    shorter = replace(options, sequence=64 * low)
    peak = requested_peak(source, shorter, estimate.gpu.device)
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


# ---- the peak of a deep model from two shallow ones ------------------------------------------------------------------
_EXTRAPOLATED = ("inputs", "optimizer", "zero_grad")  # one loop over all layers: only their highest point counts


def requested_peak(source: ShapeSource, options: RunOptions, device: KernelDevice) -> int:
    """Highest requested bytes of a training step, the second one (loading is left out), exactly, in little time.

    Between two models that differ only in depth, each point of the step in the first two layers, the last layer or
    outside the layers differs by a fixed number of bytes a layer, and a peak is never in a middle layer only: what is
    held grows or shrinks steadily with the layers. The second layer counts for itself: where the embeddings need no
    gradient, the first layer's backward passes none on, and the second is the last that holds one. So two shallow runs
    give the peak of any depth.
    """
    shape = source.shape
    small = 4 if shape.layers % 2 == 0 else 3  # keeps the parity of alternating layers
    large = small + 2
    if shape.layers <= large:
        return max(_points(source.stream(options, device), shape.layers))
    runs = [source.stream(options, device, layers=layers) for layers in (small, large)]
    low, high = _points(runs[0], small), _points(runs[1], large)
    extra = shape.layers - small
    return max(a + (b - a) * extra // (large - small) for a, b in zip(low, high, strict=True))


def _points(stream: Stream, layers: int) -> list[int]:
    """Live bytes after each allocation of the last step outside middle layers; one maximum for some phases."""
    last_step = max(mark.step for mark in stream.marks)
    marks = {mark.event: mark for mark in stream.marks}
    current, counting, single = 0, False, False
    points: list[int] = []
    best = 0
    sizes, where = stream.sizes, stream.layers
    for event, entry in enumerate(stream.events):
        mark = marks.get(event)
        if mark is not None:
            if single:
                points.append(best)
            counting = mark.step == last_step and mark.name != "end"
            single, best = counting and mark.name in _EXTRAPOLATED, 0
        if entry < 0:
            current -= sizes[~entry]
        elif entry < EMPTY_CACHE:
            current += sizes[entry]
            if single:
                best = max(best, current)
            elif counting and where[entry] in (-1, 0, 1, layers - 1):
                points.append(current)
    return points
