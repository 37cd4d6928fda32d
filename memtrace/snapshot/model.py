"""The one form every snapshot is turned into: columns (numpy), one row an event, a segment or a block.

Units: sizes in bytes, times in µs since the Unix epoch, events are 0-based positions in one device's trace.
Key meanings follow PyTorch's ``torch.cuda.memory._snapshot`` (see docs/snapshot-format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.frozen import dataclass
from memtrace.snapshot.stacks import StackTable

I8 = NDArray[np.int64]
I4 = NDArray[np.int32]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)


class Action(IntEnum):
    """What one trace entry says happened. ``UNKNOWN`` entries are kept and change no state."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    ANNOTATE = 9
    WORKSPACE_SNAPSHOT = 10
    UNKNOWN = 11


class BlockState(IntEnum):
    """State of a block in the final segments. An unknown state string is read as ``ALLOCATED`` with a warning."""

    INACTIVE = 0
    ALLOCATED = 1
    PENDING_FREE = 2


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """The recorded events of one device, oldest first; every array has one entry an event.

    ``size``: requested bytes for alloc/free, driver bytes for segment events, rounded bytes for ``oom``.
    ``address``: 0 where the event has none (``oom``). ``stream`` indexes ``streams`` (raw handles).
    ``stack`` indexes the snapshot's :class:`StackTable`; -1 means the event carries no ``frames`` key.
    ``context`` numbers the *recorded stack object*: two events with one context came from one call
    (a free that completed at once shares it between ``free_requested`` and ``free_completed``); -1 if unknown.
    ``pool`` indexes ``pools``; -1 means the event does not say (PyTorch before 2.12).
    ``user_metadata`` and ``compile_context`` index ``strings``; 0 is the empty string.
    """

    device: int
    action: U1
    address: I8
    size: I8
    stream: I4
    streams: tuple[int, ...]
    time_us: I8 | None
    stack: I4
    context: I4
    pool: I4
    pools: tuple[PoolId, ...]
    user_metadata: I4
    compile_context: I4
    strings: tuple[str, ...]
    oom_device_free_bytes: Mapping[int, int] = field(default_factory=dict)
    unknown_actions: Mapping[int, str] = field(default_factory=dict)
    forward_frames: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    internal_metadata: Mapping[int, str] = field(default_factory=dict)
    category: I4 | None = None  # profiler-made files only: the profiler's category, indexes ``strings``

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class Segments:
    """The final segments of one device, by address; every array has one entry a segment.

    ``first_block[i]:first_block[i+1]`` are the rows of segment ``i`` in :class:`Blocks` (length n + 1).
    ``stack`` is -1 where unknown.
    """

    address: I8
    total_size: I8
    stream: I8  # raw handles
    is_small: Bool
    is_expandable: Bool
    pool: I4  # indexes ``pools``
    pools: tuple[PoolId, ...]
    stack: I4
    first_block: I8

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The final blocks of one device in address order; ``requested_size`` is 0 unless the block is active."""

    address: I8
    size: I8
    requested_size: I8
    state: U1  # BlockState
    stack: I4
    segment: I4  # row in Segments

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Device:
    """One device's part of a snapshot: trace and final state."""

    device: int
    trace: DeviceTrace
    segments: Segments
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Annotation:
    """One end of a ``record_function`` range: ``stage`` is "START" or "END"."""

    device: int
    time_us: int
    name: str
    stage: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole snapshot file.

    ``settings`` is ``allocator_settings`` as recorded ({} before PyTorch 2.3). ``memtrace`` is the extra key that
    memtrace's own recorder stores ({} in anyone else's file). ``torch_at_least``/``torch_below`` bound the PyTorch
    release by the keys that are present; ``None`` where a bound is open.
    """

    source: str
    devices: tuple[Device, ...]
    stacks: StackTable
    annotations: tuple[Annotation, ...]
    settings: Mapping[str, Any]
    memtrace: Mapping[str, Any]
    keys: tuple[str, ...]
    torch_at_least: str | None
    torch_below: str | None
    host_reserved_bytes: int
    warnings: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """How the program was run, as memtrace's own recorder noted it; {} where it noted nothing."""
        found = self.memtrace.get("config")
        return found if isinstance(found, Mapping) else {}

    @property
    def labels(self) -> list[Mapping[str, Any]]:
        """What memtrace's own recorder knew of tensors, one entry a tensor."""
        found = self.memtrace.get("labels")
        return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []

    @property
    def uses_autocast(self) -> bool:
        """Whether the run was under autocast: as the recorder saw it, or by the decorator that trainers use."""
        return bool(self.config.get("autocast")) or self.stacks.called("amp/autocast_mode.py", "decorate_autocast")

    def noted_bytes(self, key: str) -> int | None:
        """A size that memtrace's own recorder noted (``limit_bytes``, ``device_total_bytes``); None without one."""
        found = self.memtrace.get(key)
        return found if type(found) is int and 0 < found < 1 << 60 else None

    def device(self, ordinal: int) -> Device:
        """The device with that ordinal. Raises KeyError."""
        for dev in self.devices:
            if dev.device == ordinal:
                return dev
        raise KeyError(ordinal)
