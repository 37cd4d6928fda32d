"""What a snapshot file holds, before any question is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memtrace.analysis import PREDICTED, is_predicted, is_truncated
from memtrace.arrays import distinct
from memtrace.frozen import dataclass
from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.model import Action, BlockState, Device, Snapshot


@dataclass(frozen=True, slots=True)
class Format:
    """Which PyTorch wrote the file, judged by its keys: at least this release, below that one (None: open)."""

    torch_at_least: str | None
    torch_below: str | None
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: sizes are those of the final state. ``truncated`` is None where a late start explains it as well."""

    device: int
    device_name: str
    events: int
    actions: Mapping[str, int]
    segments: int
    blocks: int
    reserved_bytes: int
    allocated_bytes: int
    has_oom: bool
    truncated: bool | None
    streams: int
    pools: tuple[str, ...]
    stacks: int
    duration_us: int | None
    replay_exact: bool
    replay_why: str | None


@dataclass(frozen=True, slots=True)
class Info:
    """The whole file."""

    file: str
    format: Format
    devices: tuple[DeviceInfo, ...]
    settings: Mapping[str, Any]
    annotations: int
    host_reserved_bytes: int
    recorded_by_memtrace: bool
    warnings: tuple[str, ...]


def describe(snapshot: Snapshot, timeline_of: Callable[[Device], Timeline] | None = None) -> Info:
    """Describe a snapshot; every device's trace is replayed to see whether it can be trusted.

    ``timeline_of`` gives timelines that are known already.
    """
    devices = []
    for device in snapshot.devices:
        timeline = timeline_of(device) if timeline_of is not None else build(snapshot, device)
        trace, times = device.trace, device.trace.time_us
        counts = np.bincount(trace.action, minlength=len(Action))
        allocated = device.blocks.state == BlockState.ALLOCATED
        pools = {str(device.segments.pools[number]) for number in distinct(device.segments.pool).tolist()}
        devices.append(
            DeviceInfo(
                device=device.device,
                device_name=timeline.device_name,
                events=len(trace),
                actions={action.name.lower(): int(counts[action]) for action in Action if counts[action]},
                segments=len(device.segments),
                blocks=len(device.blocks),
                reserved_bytes=int(device.segments.total_size.sum()),
                allocated_bytes=int(device.blocks.size[allocated].sum()),
                has_oom=bool((trace.action == Action.OOM).any()),
                truncated=is_truncated(timeline),
                streams=len(set(trace.streams) | set(device.segments.stream.tolist())),
                pools=tuple(sorted(pools)),
                stacks=len(distinct(trace.stack)) if len(trace) else 0,
                duration_us=int(times[-1]) - int(times[0]) if times is not None and len(times) else None,
                replay_exact=timeline.replay.exact,
                replay_why=timeline.replay.why,
            )
        )
    return Info(
        file=snapshot.source,
        format=Format(snapshot.torch_at_least, snapshot.torch_below, snapshot.keys),
        devices=tuple(devices),
        settings=snapshot.settings,
        annotations=len(snapshot.annotations),
        host_reserved_bytes=snapshot.host_reserved_bytes,
        recorded_by_memtrace=bool(snapshot.memtrace) and not is_predicted(snapshot),
        warnings=((PREDICTED,) if is_predicted(snapshot) else ()) + snapshot.warnings,
    )
