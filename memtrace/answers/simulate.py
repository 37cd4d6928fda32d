"""Would it have fit? One recorded program under other settings, limits and edits, as one answer.

The program is replayed through the allocator model (:mod:`memtrace.allocator`). Behaviour is taken to stay the same:
same order of requests, same streams, same timing of other streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memtrace.allocator.bounds import LowerBounds, lower_bounds
from memtrace.allocator.conf_hints import conf_hint
from memtrace.allocator.conf_text import ConfError, parse_conf
from memtrace.allocator.config import (
    INTERVALS,
    AllocatorConfig,
    Version,
    conf_string,
    fraction_limit,
    from_snapshot,
    release_of,
)
from memtrace.allocator.replay.evidence import gather
from memtrace.allocator.whatif.program import Program, extract
from memtrace.allocator.whatif.search import Candidate, ranked, run_conf, sensible_confs
from memtrace.allocator.whatif.selfcheck import Limit, recorded_limit, settle
from memtrace.allocator.whatif.whatif import Simulation
from memtrace.answers.simulate_edits import Edit, apply
from memtrace.attribution.classify import Attribution
from memtrace.errors import NoAnswerError
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Snapshot


@dataclass(frozen=True, slots=True)
class SelfCheckAnswer:
    """Whether the model reproduces the recording (``exact``), and whether it predicts it untold (``predicted``).

    ``limit_source`` is given, recorded, inferred or none; an inferred limit lies between the two bounds.
    """

    exact: bool
    diverged_at: int | None
    why: str | None
    predicted: bool | None
    predicted_why: str | None
    limit_bytes: int | None
    limit_source: str
    limit_at_least_bytes: int | None
    limit_below_bytes: int | None


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


@dataclass(frozen=True, slots=True)
class Answer:
    """``runs[0]`` is the recorded program under the recorded settings; the others are the what-ifs, as asked or ranked.

    ``simulations`` holds the runs themselves, in the same order, for layouts and export (not in the JSON).
    """

    file: str
    device: int
    torch: str
    self_check: SelfCheckAnswer
    recorded: RecordedPeaks
    runs: tuple[Run, ...]
    lower_bounds: LowerBounds
    """What no setting can go below, for the program that was asked about: the edited one where there are edits."""
    notes: tuple[str, ...]
    simulations: tuple[Simulation, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        """The answer in builtin containers, with the keys of the contract."""
        names = [name for name in self.__dataclass_fields__ if name != "simulations"]
        return {name: getattr(self, name) for name in names}


def device_total(snapshot: Snapshot) -> int | None:
    """Memory of the card in bytes, where memtrace's own recorder noted it."""
    value = snapshot.memtrace.get("device_total_bytes")
    return value if isinstance(value, int) and value > 0 else None


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate. ``confs`` are PyTorch settings strings; ``capacity_bytes`` is the limit on reserved memory."""

    confs: Sequence[str] = ()
    capacity_bytes: int | None = None
    search: bool = False
    edits: Sequence[Edit] = ()
    version: Version | None = None
    addresses: bool = True  # also run under other assumptions about driver addresses


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
    total = device_total(snapshot)
    configs = [(conf, _config(conf, version, total)) for conf in question.confs]  # refuse bad strings first
    if any(config.backend != "native" for _, config in configs):
        raise NoAnswerError("the cudaMallocAsync back end leaves placement to the driver, which is not modelled")
    program = extract(gather(device, from_snapshot(snapshot.settings, version)))
    limit = _limit(snapshot, timeline, version)
    check = settle(program, timeline.replay, limit)
    limit = check.limit
    edited, labels = program, tuple(edit.label for edit in question.edits)
    if attribution is not None:
        edited = apply(program, attribution, question.edits)

    capacity = question.capacity_bytes if question.capacity_bytes is not None else limit.size_bytes
    own = program.evidence.config
    if question.search:
        confs = sensible_confs(version, capacity is not None)
        for conf in confs:
            parsed = parse_conf(conf, version, total)
            # Without edits, the first run is that of the recorded settings already.
            as_recorded = not labels and replace(parsed, padding_bytes=own.padding_bytes).places_like(own)
            if conf not in question.confs and not as_recorded:
                configs.append((conf, parsed))
    jobs: list[tuple[str, AllocatorConfig, Program, tuple[str, ...]]] = [
        (conf_string(snapshot.settings), own.with_limit(capacity), program, ())
    ]
    if labels and not configs:
        jobs.append((conf_string(snapshot.settings), own.with_limit(capacity), edited, labels))
    for conf, parsed in configs:
        config = replace(parsed, padding_bytes=own.padding_bytes)
        if question.capacity_bytes is not None or config.limit_bytes is None:
            config = config.with_limit(capacity)
        jobs.append((conf, config, edited, labels))

    done: list[tuple[Run, Candidate]] = []
    for conf, config, code, changes in jobs:
        candidate = run_conf(code, conf, config, spread=question.addresses)
        done.append((_run(candidate, changes), candidate))
        if progress is not None:
            progress(len(done) / len(jobs))
    if question.search:
        order = {id(candidate): place for place, candidate in enumerate(ranked(c for _, c in done[1:]))}
        done[1:] = sorted(done[1:], key=lambda pair: order[id(pair[1])])
    _, allocated, reserved = timeline.peaks()
    return Answer(
        file=snapshot.source,
        device=device.device,
        torch=f"{version[0]}.{version[1]}",
        self_check=SelfCheckAnswer(
            check.exact, check.diverged_at, check.why, check.predicted, check.predicted_why,
            limit.size_bytes, limit.source, limit.at_least_bytes, limit.below_bytes,
        ),
        recorded=RecordedPeaks(allocated.size_bytes, reserved.size_bytes, len(timeline.oom_events)),
        runs=tuple(run for run, _ in done),
        lower_bounds=lower_bounds(edited, replace(own, roundup_divisions=(0,) * INTERVALS, roundup_bypass_bytes=None)),
        notes=tuple(_notes(timeline, program, limit, question, done[0][1].run)),
        simulations=tuple(candidate.run for _, candidate in done),
    )  # fmt: skip


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
    noted = snapshot.memtrace.get("limit_bytes")
    if isinstance(noted, int) and noted > 0:
        return recorded_limit(timeline.replay, noted)
    fraction, total = from_snapshot(snapshot.settings, version).memory_fraction, device_total(snapshot)
    if fraction is not None and total is not None:
        return recorded_limit(timeline.replay, fraction_limit(fraction, total, version))
    return recorded_limit(timeline.replay)


def _run(candidate: Candidate, edits: tuple[str, ...]) -> Run:
    run = candidate.run
    return Run(
        conf=candidate.conf,
        edits=edits,
        capacity_bytes=run.config.limit_bytes,
        peak_allocated_bytes=run.peak_allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        peak_reserved_low_bytes=candidate.lowest_peak_bytes,
        peak_reserved_high_bytes=candidate.highest_peak_bytes,
        end_reserved_bytes=run.end_reserved_bytes,
        end_allocated_bytes=run.end_allocated_bytes,
        num_alloc_retries=run.num_alloc_retries,
        num_ooms=len(run.refused),
        first_oom_event=run.first_oom_event,
        refused_bytes=run.refused[0].size_bytes if run.refused else None,
        segment_allocs=run.segment_allocs,
        segment_frees=run.segment_frees,
        fits=run.fits,
        fits_always=candidate.fits_always,
        survived_oom_events=tuple(spared.event for spared in run.spared),
        ends_at_recorded_oom=run.program.ends_refused,
        lower_bounds=lower_bounds(run.program, run.config),
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
