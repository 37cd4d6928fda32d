"""The driver of a replay under the recorded settings: it hands out what the trace recorded and checks what happens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from memtrace.allocator.replay.initial import RESERVATION_BYTES
from memtrace.allocator.state import MASK, SHIFT, AllocatorState
from memtrace.snapshot.model import Action

_NAMES = {
    Action.SEGMENT_ALLOC: "segment_alloc",
    Action.SEGMENT_FREE: "segment_free",
    Action.SEGMENT_MAP: "segment_map",
    Action.SEGMENT_UNMAP: "segment_unmap",
}


class Divergence(Exception):
    """The model and the recording part ways at ``event``; ``why`` is one sentence."""

    def __init__(self, event: int, why: str) -> None:
        super().__init__(why)
        self.event = event
        self.why = why


class RecordedDriver:
    """Hands out recorded addresses, and checks each segment event that the model predicts against the trace.

    The recorded events of one step are ``queue`` (action, address, size, event); ``at`` is the next one not yet
    consumed and ``anchor`` the event of the step itself. Growth is admitted exactly where the trace shows growth, and
    garbage collected where exactly its victims were released; ``threshold_from`` ≤ GC threshold < ``threshold_below``
    is what that says about the threshold in bytes, ``admitted_bytes`` ≤ limit < ``refused_bytes`` what growth says
    about the limit on reserved memory.
    """

    def __init__(self, release_completed: Callable[[int], None]) -> None:
        self.queue: list[tuple[int, int, int, int]] = []
        self.at = 0
        self.anchor = 0
        self.refused = False  # whether the step is a recorded ``oom``
        self.threshold_from, self.threshold_below = 0, 1 << 62
        self.admitted_bytes, self.refused_bytes = 0, 1 << 62
        self._release_completed = release_completed

    def begin(self, queue: list[tuple[int, int, int, int]], anchor: int) -> None:
        """Start a step with its collected events."""
        self.queue, self.at, self.anchor = queue, 0, anchor

    def next_action(self) -> int:
        """Action of the next recorded event of this step, -1 if none is left."""
        return self.queue[self.at][0] if self.at < len(self.queue) else -1

    def _expect(self, action: Action, address: int, size: int) -> None:
        if self.at == len(self.queue):
            raise Divergence(self.anchor, f"the model expects {_NAMES[action]} of {size} bytes, and none is recorded")
        kind, found, length, event = self.queue[self.at]
        if kind != action or found != address or length != size:
            name = _NAMES.get(Action(kind), "another event")
            raise Divergence(
                event,
                f"the model expects {_NAMES[action]} of {size} bytes at {address:#x}; "
                f"recorded is {name} of {length} bytes at {found:#x}",
            )
        self.at += 1

    def admits(self, total_bytes: int, segment_bytes: int) -> bool:
        if not self.queue and not self.refused:
            raise Divergence(self.anchor, "no free block of the model fits this request, and no growth is recorded")
        admitted = self.next_action() in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
        if admitted:
            self.admitted_bytes = max(self.admitted_bytes, total_bytes + segment_bytes)
        else:
            self.refused_bytes = min(self.refused_bytes, total_bytes + segment_bytes)
        return admitted

    def wants_garbage(self, total_bytes: int, victims: list[int]) -> bool:
        ahead = self.queue[self.at : self.at + len(victims)]
        wanted = [(int(Action.SEGMENT_FREE), address) for address in victims]
        passed = [(kind, address) for kind, address, _, _ in ahead] == wanted
        if passed:
            self.threshold_below = min(self.threshold_below, total_bytes)
        else:
            self.threshold_from = max(self.threshold_from, total_bytes)
        return passed

    def place(self, number: int, size: int) -> int | None:
        if self.next_action() != Action.SEGMENT_ALLOC:
            return None
        address = self.queue[self.at][1]
        self._expect(Action.SEGMENT_ALLOC, address, size)
        return address

    def reserve(self, state: AllocatorState, number: int, size: int) -> tuple[int, int]:
        if self.next_action() != Action.SEGMENT_MAP:
            return 0, 0
        return self.queue[self.at][1], RESERVATION_BYTES

    def map(self, number: int, address: int, size: int) -> bool:
        if self.next_action() != Action.SEGMENT_MAP:
            return False
        self._expect(Action.SEGMENT_MAP, address, size)
        return True

    def segment_freed(self, number: int, address: int, size: int) -> None:
        self._expect(Action.SEGMENT_FREE, address, size)

    def unmapped(self, number: int, address: int, size: int) -> None:
        self._expect(Action.SEGMENT_UNMAP, address, size)

    def complete_pending(self, state: AllocatorState) -> None:
        while self.next_action() == Action.FREE_COMPLETED:
            event = self.queue[self.at][3]
            self.at += 1
            self._release_completed(event)

    def may_release(self, state: AllocatorState, pool: int) -> bool:
        """A private pool was given up if this flush is recorded to release some of its memory."""
        released = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
        starts = sorted(address for kind, address, _, _ in self.queue[self.at :] if kind in released)
        for number, name in enumerate(state.ids):
            if name.pool == pool:
                for key in state.lists[number]:
                    low, size = key & MASK, key >> SHIFT
                    place = bisect_left(starts, low)
                    if place < len(starts) and starts[place] < low + size:
                        return True
        return False
