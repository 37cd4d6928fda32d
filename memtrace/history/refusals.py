"""Refused requests of a recording, and what each says of the memory there was."""

from __future__ import annotations

from memtrace.allocator.config import Version, fraction_limit, from_snapshot, release_of
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_size, segment_size
from memtrace.frozen import dataclass
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Snapshot


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request. ``asked_bytes`` is rounded; ``need_bytes`` is what the driver would have been asked for."""

    event: int
    asked_bytes: int
    need_bytes: int
    reserved_bytes: int
    device_free_bytes: int | None
    is_small: bool
    stream: int

    @property
    def card_bytes(self) -> int | None:
        """What this process could have had of a full card: what it held and what was free. None if the card had room
        or nothing tells."""
        free = self.device_free_bytes
        return self.reserved_bytes + free if free is not None and free < self.need_bytes else None


def refusals(timeline: Timeline) -> list[Refusal]:
    """Every ``oom`` event with what it needed; the rules of sizes are the allocator's."""
    trace, config = timeline.trace, timeline.config
    found = []
    for event in timeline.oom_events:
        asked = round_size(int(trace.size[event]), config)
        free = trace.oom_device_free_bytes.get(event)
        stream = int(trace.stream[event])
        found.append(
            Refusal(
                event=event,
                asked_bytes=asked,
                need_bytes=segment_size(asked, config),
                reserved_bytes=timeline.curve_at(event)[2],
                device_free_bytes=free if free is not None and free >= 0 else None,
                is_small=asked <= SMALL_LIMIT_BYTES,
                stream=trace.streams[stream] if 0 <= stream < len(trace.streams) else 0,
            )
        )
    return found


def stated_limit_bytes(snapshot: Snapshot, version: Version | None = None) -> int | None:
    """The limit of the process that the file itself states: memtrace's recorder notes it, or it is a fraction in the
    settings string with the card's size beside it. ``version`` is the release's unless given."""
    if (noted := snapshot.noted_bytes("limit_bytes")) is not None:
        return noted
    version = version or release_of(snapshot)
    fraction, total = from_snapshot(snapshot.settings).memory_fraction, snapshot.noted_bytes("device_total_bytes")
    return fraction_limit(fraction, total, version) if fraction is not None and total is not None else None
