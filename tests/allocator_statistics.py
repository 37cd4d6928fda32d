"""PyTorch's memory statistics over a recorded window, from the columns of an exact replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memtrace.allocator.config import NEWEST
from memtrace.allocator.replay.evidence import TraceEvidence
from memtrace.allocator.replay.replay import evidence_of
from memtrace.allocator.replay.rerun import Rerun, rerun
from memtrace.snapshot.model import I8, Action, Device


def family(name: str, start: int, changes: I8) -> dict[str, int]:
    """current, peak, allocated and freed of one counter that starts at ``start`` and changes by ``changes``."""
    level = np.cumsum(changes)
    grown = int(changes[changes > 0].sum())
    return {
        f"{name}.current": start + (int(level[-1]) if len(level) else 0),
        f"{name}.peak": start + max(int(level.max()) if len(level) else 0, 0),
        f"{name}.allocated": start + grown,
        f"{name}.freed": grown - (int(level[-1]) if len(level) else 0),
    }


def statistics_of_replay(device: Device, settings: Mapping[str, Any]) -> dict[str, int]:
    """Of one device's trace under the recorded settings; empty where the replay is not exact."""
    evidence = evidence_of(device, settings, NEWEST)
    outcome = rerun(evidence)
    return window_statistics(evidence, outcome) if outcome.diverged_at is None else {}


def window_statistics(evidence: TraceEvidence, outcome: Rerun) -> dict[str, int]:
    """Counters of ``torch.cuda.memory_stats`` (``all`` pools); what was live before the trace counts as allocated."""
    trace, life = evidence.device.trace, evidence.life
    count = len(trace)
    first = slice(0, life.initial)
    alive_first = int(life.initial)

    def changes(amount: I8, ended: I8) -> I8:
        delta = np.zeros(count, dtype=np.int64)
        events = life.alloc_event[life.initial :]
        delta[events] = amount[life.initial :]
        done = ended >= 0
        np.subtract.at(delta, ended[done], amount[done])
        return delta

    one = np.ones(life.count, dtype=np.int64)
    pending = np.flatnonzero(evidence.beginning.pending)
    held = life.free_requested_event.copy()
    held[pending] = -1  # freed by the owner before the trace
    owned = np.ones(life.count, dtype=np.int64)
    owned[pending] = 0
    block, requested = outcome.block_bytes, evidence.requested
    stats: dict[str, int] = {}
    stats |= family("allocation.all", int(owned[first].sum()), changes(owned, held))
    stats |= family("allocated_bytes.all", int((block * owned)[first].sum()), changes(block * owned, held))
    stats |= family("active.all", alive_first, changes(one, life.free_completed_event))
    stats |= family("active_bytes.all", int(block[first].sum()), changes(block, life.free_completed_event))
    stats |= family("requested_bytes.all", int(requested[first].sum()), changes(requested, life.free_completed_event))

    action, size = trace.action, trace.size
    grew = (action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP)
    shrank = (action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP)
    segments = evidence.history.initial
    stats |= family(
        "reserved_bytes.all", int(segments.total_size.sum()), np.where(grew, size, np.where(shrank, -size, 0))
    )
    ordinary = (action == Action.SEGMENT_ALLOC).astype(np.int64) - (action == Action.SEGMENT_FREE)
    stats |= family("segment.all", int((~segments.is_expandable).sum()), ordinary)
    stats["num_alloc_retries"] = outcome.num_alloc_retries
    stats["num_ooms"] = int((action == Action.OOM).sum())
    stats["num_device_alloc"] = int(grew.sum())
    stats["num_device_free"] = int(shrank.sum())
    return stats
