"""The settings worth trying, and one way to rank them."""

from __future__ import annotations

from collections.abc import Iterable

from memtrace.allocator.config import AllocatorConfig, Version
from memtrace.allocator.whatif.addresses import Policy
from memtrace.allocator.whatif.program import Program
from memtrace.allocator.whatif.whatif import Simulation, simulate
from memtrace.frozen import dataclass

BRACKET = (Policy.FALLING, Policy.RISING, Policy.DRIVER)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One settings string with its outcome; ``spread`` holds the runs under other address assumptions."""

    conf: str
    run: Simulation
    spread: tuple[Simulation, ...] = ()

    @property
    def lowest_peak_bytes(self) -> int:
        """Lowest peak reserved under any address assumption that was tried."""
        return min(run.peak_reserved_bytes for run in (self.run, *self.spread))

    @property
    def highest_peak_bytes(self) -> int:
        """Highest peak reserved under any address assumption that was tried."""
        return max(run.peak_reserved_bytes for run in (self.run, *self.spread))

    @property
    def fits_always(self) -> bool:
        """Whether the run fits under every address assumption that was tried."""
        return all(run.fits for run in (self.run, *self.spread))


def sensible_confs(version: Version, has_limit: bool) -> tuple[str, ...]:
    """Settings strings that a person could reasonably try in that release, simplest first."""
    confs = [""]
    if version >= (2, 1):
        confs.append("expandable_segments:True")
    confs += [f"max_split_size_mb:{size}" for size in (64, 128, 256, 512)]
    confs += [f"roundup_power2_divisions:{n}" for n in (4, 8, 16)]
    if version >= (2, 1):
        confs.append("expandable_segments:True,roundup_power2_divisions:16")
    if has_limit:  # without a limit, garbage collection never runs
        confs += [f"garbage_collection_threshold:{share}" for share in (0.6, 0.8)]
        confs.append("max_split_size_mb:128,garbage_collection_threshold:0.8")
    return tuple(confs)


def run_conf(
    program: Program, conf: str, config: AllocatorConfig, *, spread: bool = True, known: Simulation | None = None
) -> Candidate:
    """One candidate. With ``spread`` it also runs under other assumptions about addresses, where they can matter.

    ``known`` is a run with recorded addresses, taken if it is of this program and these settings.
    """
    is_same = known is not None and known.program is program and known.config == config
    run = known if known is not None and is_same else simulate(program, config, Policy.RECORDED)
    others: tuple[Simulation, ...] = ()
    if spread and not _insensitive(run):
        others = tuple(simulate(program, config, policy) for policy in BRACKET)
    return Candidate(conf, run, others)


def _insensitive(run: Simulation) -> bool:
    """With one reservation per pool and stream, no two free blocks tie by size and lie in different segments."""
    return run.config.expandable_segments and all(run.state.expands) and not run.state.whole


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Best first: runs that fit, by peak reserved memory in steps of 1 % of the lowest, then by driver calls, which
    cost time. Runs that fail come last, the better the later they fail."""
    found = list(candidates)
    best = min((candidate.run.peak_reserved_bytes for candidate in found if candidate.run.fits), default=1) or 1

    def key(candidate: Candidate) -> tuple[bool, int, int, int]:
        run = candidate.run
        calls = run.segment_allocs + run.segment_frees
        if run.first_oom_event is not None:
            return True, -run.first_oom_event, calls, run.peak_reserved_bytes
        return False, 100 * (run.peak_reserved_bytes - best) // best, calls, run.peak_reserved_bytes

    return sorted(found, key=key)
