"""Why two runs differ: outcome, what is unlike in them, and causes whose bytes sum to the change of the peak.

A run is looked at where it held most. What was live there is grouped by what makes it come and go (weights, what is
trained, saved activations, logits and loss, …); the change of each group goes to what is unlike in the two runs and
decides that group, else it stands under the group's own name. Fewer or more tokens account for their share of what is
proportional to them first. Nothing is counted twice, and what no group holds is ``unexplained``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.whatif.program import extract
from memtrace.allocator.whatif.whatif import simulate
from memtrace.analysis import Analysis
from memtrace.answers.diff.comparison import Cause, Difference, RunEnd, Story
from memtrace.answers.diff.diff import diff
from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.traits import RunSide, settings_text
from memtrace.history.timeline import At
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes, format_delta

_LEAST_BYTES, _LEAST_SHARE = 8 << 20, 0.002  # a smaller change of the allocated peak is not the story
_AT = "at the peaks"
_RATIO = 1.1  # states, logits: a larger change is another optimizer or loss
_REPLAY_EVENTS = 3_000_000
_BARS, _COLUMNS = "▁▂▃▄▅▆▇█", 60
_WORTH_NAMING = 0.25  # of the largest cause
_CONSEQUENCES = ("moment", "rounding", "fragmentation", "later_steps", "runtime", "copies", "passing")

# What comes and goes together: name, in words, purposes. The first seven are there only within a step.
_GROUPS: dict[str, tuple[str, tuple[Category | Purpose, ...]]] = {
    "saved": ("saved activations", (Purpose.SAVED, Purpose.CHECKPOINT_INPUT, Purpose.RECOMPUTE)),
    "attention": ("attention matrices", (Purpose.ATTENTION_MATRIX,)),
    "loss": ("logits and loss", (Purpose.LOGITS, Purpose.LOSS)),
    "cache": ("cached keys and values", (Purpose.KV_CACHE,)),
    "passing": ("short-lived tensors", (Purpose.FORWARD, Purpose.BACKWARD, Purpose.OTHER, Purpose.OPTIMIZER)),
    "copies": ("copies of weights", (Purpose.DEQUANT, Purpose.LOADING)),
    "gradients": ("gradients", (Purpose.GRADS,)),
    "states": ("optimizer states", (Purpose.OPTIMIZER_STATE,)),
    "trained": ("trained parameters", (Purpose.PARAMS,)),
    "weights": ("weights", (Purpose.QUANTIZED, Purpose.QUANT_STATE, Purpose.UNQUANTIZED, Purpose.BUFFER)),
    "runtime": ("workspaces", (Category.RUNTIME,)),
}
_WITHIN_A_STEP = tuple(_GROUPS)[:7]
_BY_TOKENS = ("saved", "attention", "loss", "passing")


def compare(before: Analysis, after: Analysis, at_before: At | None = None, at_after: At | None = None) -> Difference:
    """AFTER minus BEFORE with its story. Events that are not given are each run's own (the last OOM, else the peak) or,
    where one died in a step that the other passed, the highest point of that step in the other."""
    first, second = RunSide(before), RunSide(after)
    at_before = at_before or _like_moment(first, second)
    at_after = at_after or _like_moment(second, first)
    return replace(diff(before, after, at_before, at_after), story=_story(first, second))


def story_of(before: Analysis, after: Analysis) -> Story:
    """Why two runs differ, whatever events are looked at."""
    return _story(RunSide(before), RunSide(after))


def _like_moment(side: RunSide, other: RunSide) -> At | None:
    """The highest event of the step that the other run died in, within one phase where that step has it."""
    if other.end.outcome != "oom" or side.end.outcome != "ok" or other.end.step is None:
        return None
    phases, level = side.case.facts.phases, side.analysis.timeline.allocated_bytes
    here = [i for i in range(len(phases)) if phases.step[i] == other.end.step]
    here = [i for i in here if phases.phase[i] == other.case.phase] or here
    events = [e for i in here for e in range(int(phases.start[i]), min(int(phases.start[i + 1]), len(level)))]
    if not events:
        return None
    event = events[int(level[events].argmax())]
    return At("event", event, side.analysis.timeline.time_us(event))


def _story(first: RunSide, second: RunSide) -> Story:
    ours, theirs = first.traits(), second.traits()
    # What a run did after the step that the other died in is told apart.
    first, second = _up_to_death_of(second, first), _up_to_death_of(first, second)
    names = dict.fromkeys([*ours, *theirs])
    unlike = {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}
    comparison = _Comparison(first, second)
    held = [*comparison.causes(), comparison.rounding()]
    peaks = [side.analysis.timeline.peaks() for side in (first, second)]
    allocated, reserved = ((peaks[0][i].size_bytes, peaks[1][i].size_bytes) for i in (1, 2))
    change = allocated[1] - allocated[0]
    held.append(_unexplained(second.peak_bytes - first.peak_bytes - sum(cause.bytes for cause in held)))
    longer, died = (second, first) if allocated[1] > second.peak_bytes else (first, second)
    went_on = f"{'AFTER' if longer is second else 'BEFORE'} went on, to a higher peak"
    why = f"the other died in step {died.end.step}; up to there its peak is {format_bytes(longer.peak_bytes)}"
    held.append(Cause("later_steps", went_on, change - (second.peak_bytes - first.peak_bytes), why))
    settings, rounded = _setting(first, second)
    explains, (was, now) = "peak_allocated_bytes", allocated
    if settings is not None or abs(change) < max(_LEAST_BYTES, _LEAST_SHARE * max(allocated)):
        explains, (was, now) = "peak_reserved_bytes", reserved
        held = [replace(cause, bytes=cause.bytes - rounded) if cause.id == "rounding" else cause for cause in held]
        held += [settings] if settings is not None else []
        rest = now - was - sum(cause.bytes for cause in held)  # reserved, and not what peaks of allocated account for
        unused = (was - allocated[0], now - allocated[1])
        why = f"peak reserved less peak allocated: {format_bytes(unused[0])} → {format_bytes(unused[1])}"
        if rest != unused[1] - unused[0]:
            elsewhere = format_delta(unused[1] - unused[0] - rest)
            why += f", {format_delta(unused[1] - unused[0])}; {elsewhere} of it stands under the allocator settings"
        held.append(Cause("fragmentation", f"{'more' if rest > 0 else 'less'} reserved and not in use", rest, why))
    causes = _ranked(held, now - was)
    return Story(
        before=first.end,
        after=second.end,
        unlike=unlike,
        alike={name: value for name, value in ours.items() if name not in unlike},
        explains=explains,
        was_bytes=was,
        now_bytes=now,
        causes=causes,
        events=(first.case.at.event, second.case.at.event),
        curves=(_curve(first.analysis, max(allocated)), _curve(second.analysis, max(allocated))),
        sentence=_sentence(first.end, second.end, explains, was, now, causes),
    )


def _unexplained(size: int) -> Cause:
    return Cause("unexplained", "unexplained", size, "no group of allocations accounts for it")


def _up_to_death_of(other: RunSide, side: RunSide) -> RunSide:
    """The run up to the end of the step that the other died in, if it went further."""
    step, phases = other.end.step, side.case.facts.phases
    if other.end.outcome != "oom" or step is None or side.end.step is None or side.end.step <= step:
        return side
    spans = [i for i in range(len(phases)) if phases.step[i] == step]
    return RunSide(side.analysis, int(phases.start[spans[-1] + 1])) if spans else side


def _ranked(causes: list[Cause], change: int) -> tuple[Cause, ...]:
    """Causes, largest first; then what follows from them; ``unexplained`` last. What comes to nothing is left out.

    A group that nothing unlike decides and that went the other way follows from the peak's having moved.
    """
    told = [cause for cause in causes if cause.bytes and cause.id != "unexplained"]
    rest = sum(cause.bytes for cause in causes if cause.id == "unexplained")
    return (*sorted(told, key=lambda cause: (follows(cause, change), -abs(cause.bytes))), _unexplained(rest))


def follows(cause: Cause, change: int) -> bool:
    """Whether it follows from the causes instead of being one."""
    is_group = cause.was is not None and cause.was.endswith("tensors")
    return cause.id in _CONSEQUENCES or (is_group and cause.bytes * change < 0)


def _setting(before: RunSide, after: RunSide) -> tuple[Cause | None, int]:
    """Other allocator settings, measured by replaying BEFORE under AFTER's; None where they place blocks alike.

    And how much of their change is of blocks that are rounded otherwise: the same tensors, in other blocks.
    """
    config, other = before.case.config, after.case.config
    if config.places_like(other):
        return None, 0
    was, now, timeline = settings_text(config), settings_text(other), before.analysis.timeline
    size, rounded, evidence = 0, 0, "BEFORE can't be replayed, so what they change is not known"
    if 0 < len(timeline) <= _REPLAY_EVENTS and timeline.replay.exact:
        limited = other.with_limit(timeline.snapshot.noted_bytes("limit_bytes"))
        run = simulate(extract(gather(timeline.device, config)).to_run(), limited)
        size = run.peak_reserved_bytes - timeline.peaks()[2].size_bytes
        if not run.spared and run.stopped_at is None:
            rounded = run.peak_allocated_bytes - timeline.peaks()[1].size_bytes
        fits = " and gets past its refused request" if run.spared else ""
        evidence = f"BEFORE, replayed under AFTER's settings, reserves {format_bytes(run.peak_reserved_bytes)}{fits}"
    return Cause("allocator_setting", f"allocator settings: {now}", size, evidence, was, now), rounded


@dataclass
class _Comparison:
    """Deals out the change of each group; ``left`` is what no cause has taken yet."""

    before: RunSide
    after: RunSide
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def causes(self) -> Iterator[Cause]:
        """Every cause, in the order in which they take what is theirs."""
        yield from self._growth()
        for name in _GROUPS:
            was, now = (side.case.live_total(self._rows(side, name)) for side in (self.before, self.after))
            self.held[name], self.left[name] = (was, now), now - was
        yield from self._evaluation()
        yield from self._weights()
        options = list(self._options())
        yield from self._tokens({group for groups, *_ in options for group in groups})
        for groups, *cause in options:
            yield from self._take(groups, *cause)
        yield from self._moment(bool(options))
        for name in _GROUPS:
            yield from self._by_name(name)

    @staticmethod
    def _rows(side: RunSide, name: str) -> Bool:
        """Rows of a group: what leaks, and what has the size of attention matrices, belongs to those."""
        if name == "attention":
            return side.of_attention & ~side.leaked
        return side.case.kind(*_GROUPS[name][1]) & ~side.of_attention & ~side.leaked

    def rounding(self) -> Cause:
        """What blocks hold beyond what was asked for."""
        was, now = self.before.padding, self.after.padding
        title = f"blocks are rounded up {'more' if now > was else 'less'}"
        evidence = f"{_AT}: beyond what was asked for, {format_bytes(was)} → {format_bytes(now)}"
        return Cause("rounding", title, now - was, evidence)

    def _take(
        self, groups: Sequence[str], name: str, title: str, was: str | None = None, now: str | None = None
    ) -> Iterator[Cause]:
        """The cause with all that is left of the groups; none if that comes to nothing."""
        parts = {group: self.left[group] for group in groups}
        self.left.update(dict.fromkeys(groups, 0))
        size = sum(parts.values())
        if size:
            yield Cause(name, title, size, self._sizes(parts), was, now)

    def _sizes(self, parts: Mapping[str, int]) -> str:
        """What the groups held; where several causes share a group's change, the bytes that are this cause's."""
        told = []
        for name, part in parts.items():
            was, now = self.held[name]
            share = f" (here {format_delta(part)})" if format_delta(part) != format_delta(now - was) else ""
            if part:
                told.append(f"{_GROUPS[name][0]} {format_bytes(was)} → {format_bytes(now)}{share}")
        return f"{_AT}: " + ", ".join(told)

    def _growth(self) -> Iterator[Cause]:
        size = [side.case.live_total(side.leaked) for side in (self.before, self.after)]
        was, now = map(format_bytes, size)
        if any(size):
            title = "memory that every step leaves behind"
            title += "" if all(size) else ", new" if size[1] else ", gone"
            evidence = f"left by finished steps and alive at the peak: {was} before, {now} after"
            yield Cause("growth_across_steps", title, size[1] - size[0], evidence, was, now)

    def _evaluation(self) -> Iterator[Cause]:
        """The peak lies in an evaluation on one side alone, or on both with other sizes."""
        was, now = (bool(side.case.in_evaluation) for side in (self.before, self.after))
        if not was and not now:
            return
        title = (
            f"evaluation {'no longer ' if was else ''}sets the peak" if was != now else "evaluation: its peak changed"
        )
        where = [
            "in evaluation" if side.case.in_evaluation else f"in training ({side.case.phase.label})"
            for side in (self.before, self.after)
        ]
        yield from self._take(_WITHIN_A_STEP[:5], "eval_peak", title, *where)

    def _weights(self) -> Iterator[Cause]:
        before, after = self.before, self.after
        if before.second_model != after.second_model:
            title = "a second copy of the model" if after.second_model else "no second copy of the model"
            copies = _turned(after.second_model, "two copies", "one copy")
            yield from self._take(("weights",), "reference_model", title, *copies)
        elif before.quantized != after.quantized:
            title = f"weights stored in {'4 or 8' if after.quantized else '16 or 32'} bits"
            bits = _turned(after.quantized, "4 or 8 bits", "16 or 32 bits")
            yield from self._take(("weights",), "quantization", title, *bits)
        elif self._same_weights():
            along = self.left["weights"]
            title = f"the same weights in {'larger' if along > 0 else 'smaller'} types (a cast)"
            same = before.checkpoints == after.checkpoints and before.tokens == after.tokens
            moved = ("saved", "loss", "attention", "passing", "copies") if same else ()
            yield from self._take(("weights", *(name for name in moved if self.left[name] * along > 0)), "cast", title)

    def _same_weights(self) -> bool:
        """Whether as many weights are there, some in another type."""
        stored = (Purpose.QUANTIZED, Purpose.UNQUANTIZED)
        was, now = (
            int((side.case.kind(*stored) & side.case.live & (side.case.size >= 1 << 16)).sum())
            for side in (self.before, self.after)
        )
        return bool(self.left["weights"]) and was == now > 0

    def _options(self) -> Iterator[tuple[tuple[str, ...], str, str, str, str]]:
        """Options that are unlike in the two runs: the groups that each decides, its name, title, before and after."""
        before, after = self.before, self.after
        checkpoints = None not in (before.checkpoints, after.checkpoints) and before.checkpoints != after.checkpoints
        if checkpoints:
            was, now = _turned(after.checkpoints, "on", "off")
            yield ("saved",), "checkpointing", f"gradient checkpointing {now}", was, now
        if None not in (before.matrices, after.matrices) and before.matrices != after.matrices:
            title = f"attention's token × token matrices are {'made' if after.matrices else 'no longer made'}"
            also = () if checkpoints else ("saved",)
            yield ("attention", *also), "attention", title, *_turned(after.matrices, "made", "not made")
        if _ratio(before.logits, after.logits) > _RATIO:
            title = f"{_larger(before.logits, after.logits)} tensors of logits (chunks, type, or not made at all)"
            unit = " a token" if before.tokens and after.tokens else ""
            was, now = (format_bytes(round(x or 0)) + unit for x in (before.logits, after.logits))
            yield ("loss",), "loss", title, was, now
        other_optimizer = _ratio(before.states, after.states) > _RATIO
        if other_optimizer:
            title = f"an optimizer with {_larger(before.states, after.states)} states"
            was, now = (f"{x or 0:.2f} bytes a byte of parameters" for x in (before.states, after.states))
            yield ("states",), "optimizer", title, was, now
        if before.trained != after.trained and min(before.trained, after.trained) > 0:
            adapted = before.case.attribution.trains_adapters or after.case.attribution.trains_adapters
            what = "rank, targets" if adapted else "number of parameters"
            title = f"{after.trained / before.trained:.2g} times as much is trained ({what} or type)"
            also = () if other_optimizer else ("states",)
            yield (
                ("trained", "gradients", *also),
                "adapters",
                title,
                format_bytes(before.trained),
                format_bytes(after.trained),
            )

    def _tokens(self, decided: set[str]) -> Iterator[Cause]:
        """What other sequence lengths, batches or padding account for: all of a group that nothing else decides."""
        was, now = self.before.tokens, self.after.tokens
        if was is None or now is None or was == now:
            return
        parts = {}
        for name in _BY_TOKENS:
            part = round(self.held[name][0] * (now / was - 1)) if name in decided else self.left[name]
            if part * (now - was) > 0:
                self.left[name] -= part
                parts[name] = part
        size = sum(parts.values())
        if size:
            title = f"{'more' if now > was else 'fewer'} tokens a pass (length, batch or padding)"
            evidence = f"{was:,} → {now:,} tokens in the pass of the peak; {self._sizes(parts)}"
            yield Cause("tokens", title, size, evidence, f"{was:,}", f"{now:,}")

    def _moment(self, decided: bool) -> Iterator[Cause]:
        """The peaks lie in different phases, or before and after the first optimizer step. Where an option is unlike,
        whatever else is there only within a step follows from the peak's having moved."""
        phases = [side.case.phase for side in (self.before, self.after)]
        died = "oom" in (self.before.end.outcome, self.after.end.outcome)
        moving = _WITHIN_A_STEP if decided else ("passing", "copies", "gradients", *(("loss",) if died else ()))
        groups = list(moving) if phases[0] is not phases[1] else []
        if 0 in self.held["states"] and all(side.states for side in (self.before, self.after)):
            groups.append("states")
        where = [phase.label if phase is not Phase.UNKNOWN else "an unknown phase" for phase in phases]
        title = f"the peak lies in {where[1]} instead of {where[0]}" if where[0] != where[1] else "another step"
        yield from self._take(groups, "moment", title, *where)

    def _by_name(self, name: str) -> Iterator[Cause]:
        was, now = (int((self._rows(side, name) & side.case.live).sum()) for side in (self.before, self.after))
        grew = self.left[name] > 0
        word = ("larger" if grew else "smaller") if (now > was) != grew or now == was else "more" if grew else "fewer"
        yield from self._take((name,), name, f"{word} {_GROUPS[name][0]}", f"{was:,} tensors", f"{now:,} tensors")


def _ratio(a: float | None, b: float | None) -> float:
    """How many times the larger of two figures is the smaller; 1 where either is unknown, large where one is 0."""
    if a is None or b is None:
        return 1.0
    low, high = sorted((a, b))
    return high / low if low > 0 else (1.0 if high == 0 else 1e9)


def _larger(was: float | None, now: float | None) -> str:
    return "smaller" if (now or 0) < (was or 0) else "larger"


def _turned(is_now: bool | None, yes: str, no: str) -> tuple[str, str]:
    """(before, after) of what one run has and the other has not."""
    return (no, yes) if is_now else (yes, no)


def _sentence(before: RunEnd, after: RunEnd, explains: str, was: int, now: int, causes: tuple[Cause, ...]) -> str:
    """What the author of the change would write: how it ended, the main cause, and the peak."""
    what = "reserved" if explains == "peak_reserved_bytes" else "allocated"
    figures = f"peak {what} {format_bytes(was)} → {format_bytes(now)}"
    told = [cause for cause in causes if cause.id != "unexplained" and cause.bytes]
    worth = [cause for cause in told if abs(cause.bytes) >= _WORTH_NAMING * abs(told[0].bytes)]
    worth = [cause for cause in worth if not follows(cause, now - was)][:3] or worth[:1]
    reasons = "; ".join(f"{cause.title} ({format_delta(cause.bytes)})" for cause in worth)
    start = _ends(before, after)
    if worth:
        text = f"{start}: {reasons}; {figures}." if start else f"{reasons}; {figures}."
    else:
        alike = was == now and before == after
        text = f"no difference: {figures}." if alike else f"{start or 'no cause found'}: {figures}."
    return text[0].upper() + text[1:]


def _ends(before: RunEnd, after: RunEnd) -> str:
    place = ["" if side.step is None else f" in step {side.step}" for side in (before, after)]
    if before.outcome == after.outcome == "ok":
        return ""
    if after.outcome == "ok":
        return f"died{place[0]}, now survives"
    if before.outcome == "ok":
        return f"survived, now dies{place[1]}"
    if before.step == after.step:
        return f"dies{place[1]} as before"
    later = (after.step or 0) > (before.step or 0)
    return f"dies {'later' if later else 'earlier'}, in step {after.step} instead of {before.step}"


def _curve(analysis: Analysis, highest: int) -> str:
    """Highest allocated bytes of each sixtieth of a run as a row of bars; "" without history."""
    level = analysis.timeline.allocated_bytes
    parts = np.array_split(level, min(_COLUMNS, len(level))) if len(level) else []
    return "".join(_BARS[min(int(part.max()) * len(_BARS) // max(highest + 1, 1), len(_BARS) - 1)] for part in parts)
