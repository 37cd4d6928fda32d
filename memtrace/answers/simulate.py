"""Would it have fit? One recorded program under other settings, limits and edits, as one answer.

The program is replayed through the allocator model (:mod:`memtrace.allocator`). Behaviour is taken to stay the same:
same order of requests, same streams, same timing of other streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, fields, replace
from typing import Any

import numpy as np

from memtrace.allocator.bounds import LowerBounds, Packing, lower_bounds, pack
from memtrace.allocator.conf_text import ConfError, conf_hint, parse_conf
from memtrace.allocator.config import (
    INTERVALS,
    AllocatorConfig,
    Version,
    conf_string,
    from_snapshot,
    release_of,
)
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.whatif.program import Program, extract
from memtrace.allocator.whatif.search import Candidate, ranked, run_conf, sensible_confs
from memtrace.allocator.whatif.selfcheck import Limit, SelfCheck, recorded_limit, settle
from memtrace.allocator.whatif.whatif import Simulation
from memtrace.attribution.categories import Category
from memtrace.attribution.classify import Attribution
from memtrace.attribution.sites import frame_label
from memtrace.errors import NoAnswerError, UsageError
from memtrace.frozen import dataclass
from memtrace.history.refusals import refusals, stated_limit_bytes
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Bool, Snapshot


@dataclass(frozen=True, slots=True)
class RecordedPeaks:
    """What the recording itself shows, in bytes."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_ooms: int


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated run. Sizes in bytes, events of the recorded trace.

    ``fits``: no request was refused. ``peak_reserved_low_bytes`` to ``peak_reserved_high_bytes`` is the range over
    assumptions about driver addresses, ``fits_always`` whether it fits under each of them. ``segment_allocs`` and
    ``segment_frees`` are calls to the driver. ``survived_oom_events``: where the recorded run was refused and this one
    was not. ``ends_at_recorded_oom``: the recording ends with a refusal, so what would have come after is unknown.
    """

    conf: str
    edits: tuple[str, ...]
    capacity_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_reserved_low_bytes: int
    peak_reserved_high_bytes: int
    end_reserved_bytes: int
    end_allocated_bytes: int
    num_alloc_retries: int
    num_ooms: int
    first_oom_event: int | None
    refused_bytes: int | None
    segment_allocs: int
    segment_frees: int
    fits: bool
    fits_always: bool
    survived_oom_events: tuple[int, ...]
    ends_at_recorded_oom: bool
    lower_bounds: LowerBounds

    @property
    def outcome(self) -> str:
        """``fits``, in words for people. Past the recorded OOM nothing is known."""
        if self.first_oom_event is not None:
            where = "before the trace" if self.first_oom_event < 0 else f"event {self.first_oom_event:,}"
            return f"OOM at {where}"
        passed = "passes the OOM" if self.survived_oom_events else "fits"
        return passed if self.fits_always else f"{passed}, by luck of addresses"


_AS_SIMULATED = (
    "peak_allocated_bytes", "peak_reserved_bytes", "end_reserved_bytes", "end_allocated_bytes", "num_alloc_retries",
    "first_oom_event", "segment_allocs", "segment_frees", "fits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """``runs[0]`` is the recorded program under the recorded settings; the others are the what-ifs, as asked or ranked.

    ``simulations`` holds the runs themselves, in the same order, for layouts and export (not in the JSON).
    """

    file: str
    device: int
    torch: str
    self_check: SelfCheck
    recorded: RecordedPeaks
    runs: tuple[Run, ...]
    lower_bounds: LowerBounds
    """What no setting can go below, for the program that was asked about: the edited one where there are edits."""
    packing: Packing | None
    """What placement could reach at best if it knew the future, of the same program; None for long ones."""
    notes: tuple[str, ...]
    simulations: tuple[Simulation, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        """The answer in builtin containers, with the keys of the contract."""
        check, limit = self.self_check, self.self_check.limit
        told = {field.name: getattr(check, field.name) for field in fields(check) if field.name not in ("limit", "run")}
        told |= {"limit_bytes": limit.size_bytes, "limit_source": limit.source}
        told |= {"limit_at_least_bytes": limit.at_least_bytes, "limit_below_bytes": limit.below_bytes}
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "simulations"}
        return kept | {"self_check": told}


@dataclass(frozen=True, slots=True)
class Edit:
    """``what``: a category, ``category/subcategory`` or part of a call site; ``factor`` 0 leaves it out."""

    what: str
    factor: float

    @property
    def label(self) -> str:
        """``without logits`` or ``0.5 × logits``."""
        return f"without {self.what}" if self.factor == 0 else f"{self.factor:g} × {self.what}"


def parse_edits(without: Sequence[str], scale: Sequence[str]) -> tuple[Edit, ...]:
    """Edits from the values of ``--without WHAT`` and ``--scale WHAT=FACTOR``. Raises UsageError."""
    edits = [Edit(what, 0.0) for what in without]
    for text in scale:
        what, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not what or not 0 <= factor < 1e6:
            raise UsageError(f"--scale takes WHAT=FACTOR with a factor of 0 or more, as in logits=0.5, not {text!r}")
        edits.append(Edit(what, factor))
    if any(not edit.what.strip() for edit in edits):
        raise UsageError("--without takes a category, category/subcategory or part of a call site")
    return tuple(edits)


def select(attribution: Attribution, what: str) -> Bool:
    """Rows of ``Timeline.allocations`` that ``what`` names. Raises NoAnswerError if it names none.

    Tried in this order: a category, ``category/subcategory``, a subcategory by itself, part of the call site shown in
    reports (``modeling_llama.py:175 forward``), part of any frame of the stack.
    """
    wanted = what.strip()
    rules = attribution.rules
    for part in ("category", "purpose", "subcategory"):
        rows = np.array([getattr(rule, part) == wanted for rule in rules], dtype=np.bool_)[attribution.rule]
        if rows.any():
            return rows
    stacks = attribution.facts.timeline.snapshot.stacks
    stack = attribution.facts.timeline.allocations.stack
    shown = [wanted in attribution.sites.label(i) for i in range(len(stacks))]
    if not any(shown):
        frames = [wanted in frame_label(frame) or wanted in frame.filename for frame in stacks.frames]
        shown = [any(frames[f] for f in stacks.frame_ids(i).tolist()) for i in range(len(stacks))]
    rows = np.array([*shown, False], dtype=np.bool_)[stack]  # stack -1: the entry added at the end
    if not rows.any():
        known = ", ".join(Category)
        raise NoAnswerError(
            f"no allocation is of {what!r}: no category or subcategory ({known}, temporary/logits, …) and no call site"
        )
    return rows


def _edited(program: Program, attribution: Attribution, edits: Sequence[Edit]) -> Program:
    """The program with all edits made, in order."""
    for edit in edits:
        marked = select(attribution, edit.what)
        program = program.without(marked) if edit.factor == 0 else program.scaled(marked, edit.factor)
    return program


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate. ``confs`` are PyTorch settings strings; ``capacity_bytes`` is the limit on reserved memory."""

    confs: Sequence[str] = ()
    capacity_bytes: int | None = None
    search: bool = False
    edits: Sequence[Edit] = ()
    version: Version | None = None
    addresses: bool = True  # also run under other assumptions about driver addresses
    packing: bool = False  # pack long programs, too


def answer(
    timeline: Timeline,
    question: Question,
    attribution: Attribution | None = None,
    progress: Callable[[float], None] | None = None,
) -> Answer:
    """Simulate; ``attribution`` is needed for edits. Without settings to try, edits run under the recorded ones.

    Raises ConfError for a settings string that PyTorch would refuse, NoAnswerError without a trace or where an edit
    names nothing.
    """
    snapshot, device = timeline.snapshot, timeline.device
    if not len(device.trace):
        raise NoAnswerError("the snapshot has no trace of events, so there is no program to replay")
    version = question.version or release_of(snapshot)
    total = snapshot.noted_bytes("device_total_bytes")
    asked = [(conf, _config(conf, version, total)) for conf in question.confs]  # bad strings first
    if any(config.backend != "native" for _, config in asked):
        raise NoAnswerError("the cudaMallocAsync back end leaves placement to the driver, which is not modelled")
    recorded = replace(from_snapshot(snapshot.settings, version), padding_bytes=timeline.replay.padding_bytes)
    program = extract(gather(device, recorded))
    check = settle(program, timeline.replay, _limit(snapshot, timeline, version))
    own = program.evidence.config
    edited = _edited(program, attribution, question.edits) if attribution is not None else program
    jobs = _jobs(question, asked, check.limit.size_bytes, snapshot, program, edited)
    done: list[Candidate] = []
    for conf, config, code in jobs:
        done.append(run_conf(code, conf, config, spread=question.addresses, known=check.run))
        if progress is not None:
            progress(len(done) / len(jobs))
    first = done[0].run
    if question.search:
        done[1:] = ranked(done[1:])
    labels = tuple(edit.label for edit in question.edits)
    plain = replace(own, roundup_divisions=(0,) * INTERVALS, roundup_bypass_bytes=None)
    known: dict[tuple[int, AllocatorConfig], LowerBounds] = {}  # many settings round alike

    def bounds(code: Program, config: AllocatorConfig) -> LowerBounds:
        table, bypass = config.roundup_divisions, config.roundup_bypass_bytes
        rounding = replace(plain, roundup_divisions=table, roundup_bypass_bytes=bypass)
        if (id(code), rounding) not in known:
            known[id(code), rounding] = lower_bounds(code, rounding)
        return known[id(code), rounding]

    _, allocated, reserved = timeline.peaks()
    return Answer(
        file=snapshot.source,
        device=device.device,
        torch=f"{version[0]}.{version[1]}",
        self_check=check,
        recorded=RecordedPeaks(allocated.size_bytes, reserved.size_bytes, len(timeline.oom_events)),
        runs=tuple(
            _run(each, () if each.run.program is program else labels, bounds(each.run.program, each.run.config))
            for each in done
        ),
        lower_bounds=bounds(edited, plain),
        packing=pack(edited, plain, None) if question.packing else pack(edited, plain),
        notes=tuple(_notes(timeline, program, check.limit, question, first)),
        simulations=tuple(candidate.run for candidate in done),
    )


def _jobs(
    question: Question,
    asked: list[tuple[str, AllocatorConfig]],
    limit_bytes: int | None,
    snapshot: Snapshot,
    program: Program,
    edited: Program,
) -> list[tuple[str, AllocatorConfig, Program]]:
    """(settings string, settings, program) of every run: the recorded ones, then what was asked for."""
    own, recorded = program.evidence.config, conf_string(snapshot.settings)
    capacity = question.capacity_bytes if question.capacity_bytes is not None else limit_bytes
    tried = [(conf, replace(config, padding_bytes=own.padding_bytes)) for conf, config in asked]
    for conf in sensible_confs(own.version, capacity is not None) if question.search else ():
        config = parse_conf(conf, own.version, snapshot.noted_bytes("device_total_bytes"))
        config = replace(config, padding_bytes=own.padding_bytes)
        # Without edits, the first run is that of the recorded settings already.
        if conf not in question.confs and (question.edits or not config.places_like(own)):
            tried.append((conf, config))
    jobs = [(recorded, own.with_limit(capacity), program)]
    if question.edits and not tried:
        jobs.append((recorded, own.with_limit(capacity), edited))
    for conf, config in tried:
        limited = question.capacity_bytes is None and config.limit_bytes is not None
        jobs.append((conf, config if limited else config.with_limit(capacity), edited))
    return jobs


def _config(conf: str, version: Version, total_bytes: int | None) -> AllocatorConfig:
    """The settings asked for. Raises ConfError with the string, PyTorch's words and what may have been meant."""
    try:
        return parse_conf(conf, version, total_bytes)
    except ConfError as error:
        hint = conf_hint(conf)
        words = str(error).rstrip(". ") if hint else str(error)
        raise ConfError(f"{conf!r}: {words}{hint}") from None


def _limit(snapshot: Snapshot, timeline: Timeline, version: Version) -> Limit:
    """The limit the recorded run had: noted by a recorder, set by a recorded fraction, or shown by the trace."""
    if (stated := stated_limit_bytes(snapshot, version)) is not None:
        return recorded_limit(timeline.replay, stated)
    card = [refusal.card_bytes for refusal in refusals(timeline) if refusal.card_bytes is not None]
    if card:  # a full card: what the process held then and what was free
        return Limit(card[-1], "card")
    return recorded_limit(timeline.replay)


def _run(candidate: Candidate, edits: tuple[str, ...], bounds: LowerBounds) -> Run:
    run = candidate.run
    return Run(
        conf=candidate.conf,
        edits=edits,
        capacity_bytes=run.config.limit_bytes,
        peak_reserved_low_bytes=candidate.lowest_peak_bytes,
        peak_reserved_high_bytes=candidate.highest_peak_bytes,
        num_ooms=len(run.refused),
        refused_bytes=run.refused[0].size_bytes if run.refused else None,
        fits_always=candidate.fits_always,
        survived_oom_events=tuple(spared.event for spared in run.spared),
        ends_at_recorded_oom=run.program.ends_refused,
        lower_bounds=bounds,
        **{name: getattr(run, name) for name in _AS_SIMULATED},
    )


def _notes(timeline: Timeline, program: Program, limit: Limit, question: Question, first: Simulation) -> list[str]:
    notes = []
    replay = timeline.replay
    if not replay.exact:
        notes.append(
            f"the model and the recording part at event {replay.diverged_at:,}: {replay.why}; "
            "take the what-ifs as estimates"
        )
    if limit.source == "inferred" and question.capacity_bytes is None:
        notes.append(
            "the limit is not recorded; what was granted and refused puts it between "
            f"{(limit.at_least_bytes or 0) / 2**30:.2f} and {(limit.below_bytes or 0) / 2**30:.2f} GiB, "
            f"and the runs use {(limit.size_bytes or 0) / 2**30:.2f} GiB"
        )
    if program.ends_refused:
        notes.append("the recording ends with a refused request: a run that gets past it is not known to get further")
    if program.initial and not first.keeps_layout:
        notes.append("what was live before the trace is put in afresh, in order of address, since its order is unknown")
    elif program.initial and (question.confs or question.search):
        notes.append("under other settings, what was live before the trace is put in afresh in order of address")
    if len(program.evidence.history.pools) > 1:
        notes.append("private pools are released once nothing will ask for them again; a snapshot does not tell when")
    return notes
