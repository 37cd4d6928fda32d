"""What each option of a configuration adds to the smallest one: a fair share each, summing to the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from math import factorial

from memtrace.estimate.depth import requested_peak
from memtrace.estimate.estimate import kernels_of
from memtrace.estimate.forecast import Progress
from memtrace.estimate.moves import few_targets
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.source import ShapeSource

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


def ladder(
    source: ShapeSource, options: RunOptions, gpu: GpuPreset | None = None, on_progress: Progress | None = None
) -> tuple[Rung, ...]:
    """The smallest configuration of a model and each option's fair share of the rest; they sum to the requested peak.

    A share is the mean of what the option adds over all orders of adding the options one by one (Shapley), from exact
    estimates of every combination, rounded so that nothing is lost. Source: L. S. Shapley, A value for n-person games,
    1953.
    """
    smallest = replace(_LEAST, targets=few_targets(source))
    least = {name: getattr(smallest, name) for names in _THINGS.values() for name in names}
    bottom = replace(options, **least, accumulation=1)
    things = [name for name, fields in _THINGS.items() if any(getattr(options, f) != least[f] for f in fields)]
    device = kernels_of(gpu).device
    peaks: dict[frozenset[str], int] = {}
    subsets = [frozenset(chosen) for count in range(len(things) + 1) for chosen in combinations(things, count)]
    for done, chosen in enumerate(subsets):
        fields = {field: getattr(options, field) for name in chosen for field in _THINGS[name]}
        peaks[chosen] = requested_peak(source, replace(bottom, **fields), device)
        if on_progress is not None:
            on_progress((done + 1) / len(subsets))
    count = len(things)
    whole = factorial(count)
    shares: dict[str, int] = dict.fromkeys(things, 0)  # times count!
    for chosen, peak in peaks.items():
        for name in things:
            if name not in chosen:
                weight = factorial(len(chosen)) * factorial(count - len(chosen) - 1)
                shares[name] += weight * (peaks[chosen | {name}] - peak)
    rungs = {name: share // whole for name, share in shares.items()}
    short = peaks[frozenset(things)] - peaks[frozenset()] - sum(rungs.values())
    for name in sorted(things, key=lambda name: -(shares[name] % whole))[:short]:
        rungs[name] += 1
    order = sorted(things, key=lambda name: -rungs[name])
    return (Rung("smallest configuration", peaks[frozenset()]), *(Rung(name, rungs[name]) for name in order))
