"""What each option of a configuration adds to the smallest one: a fair share each, summing to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from math import factorial

from memtrace.estimate.estimate import kernels_of
from memtrace.estimate.forecast import Progress
from memtrace.estimate.moves import few_targets
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.source import ShapeSource
from memtrace.frozen import dataclass

_LEAST = RunOptions(
    sequence=128, batch=1, rank=8, targets=("q_proj", "v_proj"), optimizer="paged_adamw_8bit", loss="chunked",
    prepare_kbit=False, adapter_dtype="bf16",
)  # fmt: skip
# What is one thing to decide about: name -> the fields that it sets.
_THINGS: dict[str, tuple[str, ...]] = {
    "length": ("sequence",),
    "batch": ("batch",),
    "no checkpointing": ("checkpointing", "reentrant"),
    "attention": ("attention",),
    "whole logits": ("loss", "keep_logits", "chunk_tokens"),
    "optimizer": ("optimizer",),
    "quantization": ("quant",),
    "precision": ("prepare_kbit", "autocast"),
    "adapters": ("rank", "targets", "adapter_dtype", "dropout"),
}


@dataclass(frozen=True, slots=True)
class Rung:
    """What an option adds to the smallest configuration."""

    option: str
    adds_bytes: int


def rungs_of(options: RunOptions, targets: tuple[str, ...] = _LEAST.targets) -> dict[frozenset[str], RunOptions]:
    """The options with every choice of things added to the smallest configuration, fewest first; ``targets`` are the
    fewest layers that get adapters."""
    smallest = replace(_LEAST, targets=targets)
    least = {name: getattr(smallest, name) for names in _THINGS.values() for name in names}
    bottom = replace(options, **least, accumulation=1)
    things = [name for name, fields in _THINGS.items() if any(getattr(options, f) != least[f] for f in fields)]
    return {
        frozenset(chosen): replace(bottom, **{f: getattr(options, f) for name in chosen for f in _THINGS[name]})
        for count in range(len(things) + 1)
        for chosen in combinations(things, count)
    }


def shares(peaks: Mapping[frozenset[str], int]) -> tuple[Rung, ...]:
    """The smallest peak and each thing's fair share of the rest; they sum to the peak of all things.

    A share is the mean of what the thing adds over all orders of adding the things one by one (Shapley), rounded so
    that nothing is lost. Source: L. S. Shapley, A value for n-person games, 1953.
    """
    things = frozenset[str]().union(*peaks)
    count = len(things)
    whole = factorial(count)
    found = dict.fromkeys(sorted(things), 0)  # times count!
    for chosen, peak in peaks.items():
        for name in things - chosen:
            weight = factorial(len(chosen)) * factorial(count - len(chosen) - 1)
            found[name] += weight * (peaks[chosen | {name}] - peak)
    rungs = {name: share // whole for name, share in found.items()}
    short = peaks[things] - peaks[frozenset()] - sum(rungs.values())
    for name in sorted(found, key=lambda name: -(found[name] % whole))[:short]:
        rungs[name] += 1
    order = sorted(rungs, key=lambda name: -rungs[name])
    return (Rung("smallest configuration", peaks[frozenset()]), *(Rung(name, rungs[name]) for name in order))


def ladder(
    source: ShapeSource, options: RunOptions, gpu: GpuPreset | None = None, on_progress: Progress | None = None
) -> tuple[Rung, ...]:
    """What each option adds to the requested peak of a training step, from exact estimates of every combination."""
    device = kernels_of(gpu).device
    peaks: dict[frozenset[str], int] = {}
    combined = rungs_of(options, few_targets(source))
    for chosen, changed in combined.items():
        peaks[chosen] = source.requested_peak(changed, device)
        if on_progress is not None:
            on_progress(len(peaks) / len(combined))
    return shares(peaks)
