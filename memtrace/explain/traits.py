"""What a recording shows of how it was run: recorded settings and configuration, else what its tensors give away."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.analysis import Analysis
from memtrace.answers.diff.comparison import RunEnd
from memtrace.answers.gate import died
from memtrace.answers.tokens import tokens_of, vector_bytes
from memtrace.arrays import among, distinct
from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.case import Case
from memtrace.explain.detectors.growth import growth_across_steps, leftovers
from memtrace.explain.detectors.weights import reference_model_copy
from memtrace.explain.snapshot_facts import verdict_at
from memtrace.history.timeline import At
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes

_PASSING = (Purpose.FORWARD, Purpose.BACKWARD, Purpose.SAVED, Purpose.RECOMPUTE)
_WEIGHTS = (Purpose.QUANTIZED, Purpose.QUANT_STATE, Purpose.UNQUANTIZED, Purpose.BUFFER)


class RunSide:
    """One run of a comparison at its peak of allocated memory. Sizes are requested bytes."""

    def __init__(self, analysis: Analysis, until: int | None = None) -> None:
        """``until`` is where to stop looking: the peak is that of the events before it."""
        timeline = analysis.timeline
        self.analysis = analysis
        event = timeline.peaks()[1].event
        if until is not None and until <= event:
            event = int(timeline.allocated_bytes[:until].argmax())
        self.peak_bytes = timeline.curve_at(event)[1]
        at = At("peak", event, timeline.time_us(event))
        self.case = Case(analysis, at, *verdict_at(analysis, at.event))

    @cached_property
    def of_attention(self) -> Bool:
        """Attention matrices, their gradients and copies: what has the size of one, in whatever type."""
        matrices = self.case.kind(Purpose.ATTENTION_MATRIX)
        sizes = distinct(self.case.size[matrices & (self.case.size >= 1 << 20)])
        alike = among(self.case.size, np.concatenate([sizes, sizes * 2, sizes // 2]))
        return matrices | (alike & self.case.kind(*_PASSING))

    def stored(self, *purposes: Category | Purpose) -> int:
        """Bytes of those purposes that are never freed."""
        return int(self.case.size[self.case.kind(*purposes) & self.case.facts.stays].sum())

    @property
    def padding(self) -> int:
        """Bytes that blocks live at the peak hold beyond what was asked for."""
        return int((self.case.table.block_bytes - self.case.size)[self.case.live].sum())

    @cached_property
    def end(self) -> RunEnd:
        """How the run ended."""
        timeline, phases = self.analysis.timeline, self.case.facts.phases
        refused = died(timeline)
        event = timeline.oom_events[-1] if refused and timeline.oom_events else len(timeline) - 1
        at_work = (phases.start[:-1] <= event) & (phases.phase != Phase.BETWEEN) & (phases.step >= 0)
        steps = phases.step[at_work]
        return RunEnd("oom" if refused else "ok", int(steps.max()) if len(steps) else None)

    @cached_property
    def leaked(self) -> Bool:
        """What finished steps left behind, if most of them did."""
        found = leftovers(self.case) if growth_across_steps(self.case) is not None else None
        return found.rows if found is not None else np.zeros(len(self.case.table), dtype=np.bool_)

    @cached_property
    def tokens(self) -> int | None:
        """Tokens of the pass that the peak lies in."""
        here = self.case.here
        if self.case.dims is not None:
            return self.case.dims.tokens
        if here is None:
            return None
        return tokens_of(self.analysis, here.start, here.end, vector_bytes(self.analysis, self.case.passes[0].start))

    @cached_property
    def trained(self) -> int:
        """Bytes of trained parameters."""
        return self.stored(Purpose.PARAMS)

    @cached_property
    def states(self) -> float | None:
        """Bytes of optimizer states for each byte of trained parameters; None before the first step is done."""
        phases = self.case.facts.phases
        stepped = bool((phases.phase[:-1] == Phase.OPTIMIZER).any() or (phases.step > 0).any())
        return self.stored(Purpose.OPTIMIZER_STATE) / self.trained if self.trained and stepped else None

    @cached_property
    def checkpoints(self) -> bool | None:
        """Whether blocks are recomputed; None where no pass was recorded."""
        if not self.case.passes:
            return None
        return bool(self.case.kind(Purpose.CHECKPOINT_INPUT, Purpose.RECOMPUTE).any())

    @cached_property
    def matrices(self) -> bool | None:
        """Whether attention makes tokens x tokens matrices; None where no pass was recorded."""
        return bool(self.case.kind(Purpose.ATTENTION_MATRIX).any()) if self.case.passes else None

    @cached_property
    def logits(self) -> float | None:
        """Bytes of the largest logits tensor, a token of the pass where tokens are known."""
        dims = self.case.dims
        if dims is not None:
            return dims.logits_bytes / dims.tokens if dims.logits_bytes is not None else None
        sizes = self.case.size[self.case.kind(Purpose.LOGITS)]
        return float(sizes.max()) / (self.tokens or 1) if len(sizes) else None

    @cached_property
    def second_model(self) -> bool:
        """Whether the same weights are there twice."""
        return reference_model_copy(self.case) is not None

    @cached_property
    def quantized(self) -> bool:
        """Whether weights are stored in 4 or 8 bits."""
        return self.case.live_total(self.case.kind(Purpose.QUANTIZED)) > 0

    def traits(self) -> dict[str, str]:
        """Everything known of the run, in words; what is not known is left out."""
        snapshot = self.analysis.timeline.snapshot
        limit = snapshot.noted_bytes("limit_bytes")
        found: dict[str, str | None] = {
            "allocator settings": settings_text(self.case.config),
            "PyTorch": _text(snapshot.memtrace.get("torch")),
            "GPU": _text(snapshot.memtrace.get("gpu")),
            "limit": format_bytes(limit) if limit is not None else None,
            "checkpointing": _word(self.checkpoints, "on", "off"),
            "attention matrices": _word(self.matrices, "made", "not made"),
            "tokens of the peak's pass": f"{self.tokens:,}" if self.tokens is not None else None,
            "trained parameters": format_bytes(self.trained) if self.trained else None,
            "optimizer states": f"{self.states:.2f} x the parameters" if self.states is not None else None,
            "weights": format_bytes(self.stored(*_WEIGHTS)),
            "quantised weights": _word(self.quantized, "yes", "no"),
            "second model": _word(self.second_model, "yes", "no"),
        }
        found |= {f"config {key}": _text(value) for key, value in snapshot.config.items() if isinstance(key, str)}
        return {name: value for name, value in found.items() if value is not None}


def _text(value: object) -> str | None:
    return None if value is None else str(value)[:80]


def _word(value: bool | None, yes: str, no: str) -> str | None:
    return None if value is None else yes if value else no


def settings_text(config: AllocatorConfig) -> str:
    """The settings that differ from PyTorch's defaults, as PYTORCH_CUDA_ALLOC_CONF has them."""
    divisions = [*dict.fromkeys(config.roundup_divisions)]
    roundup = f"{divisions[0]}" if len(divisions) == 1 else f"[{','.join(map(str, config.roundup_divisions))}]"
    parts = (
        ("expandable_segments:True", config.expandable_segments),
        (f"max_split_size_mb:{(config.max_split_bytes or 0) >> 20}", config.max_split_bytes is not None),
        (f"garbage_collection_threshold:{config.gc_threshold:g}", config.gc_threshold),
        (f"roundup_power2_divisions:{roundup}", any(divisions)),
        (f"large_segment_size_mb:{config.large_segment_bytes >> 20}",
         config.large_segment_bytes != AllocatorConfig().large_segment_bytes),
        (f"max_non_split_rounding_mb:{config.max_non_split_rounding_bytes >> 20}",
         config.max_non_split_rounding_bytes != config.large_segment_bytes),
    )  # fmt: skip
    return ",".join(text for text, is_set in parts if is_set) or "PyTorch's defaults"
