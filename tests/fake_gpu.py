"""A GPU for tests of the pytest plugin: an allocator that only keeps books, behind memtrace's recording backend."""

from __future__ import annotations

import sys
from typing import Any

from memtrace.errors import MissingDependencyError

MIB = 1 << 20


class FakeGpu:
    """One segment a tensor; sizes are multiples of 2 MiB, as large segments are."""

    device_type = "cuda"

    def __init__(self, present: bool = True) -> None:
        self.present = present
        self.recording = False
        self.starts = 0
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, int] = {}
        self.next_address = 0x7F0000000000

    # what a test does
    def allocate(self, size_mib: int) -> int:
        address, size = self.next_address, size_mib * MIB
        self.next_address += (size_mib + 64) * MIB
        self.live[address] = size
        self._note("segment_alloc", address, size)
        self._note("alloc", address, size)
        return address

    def free(self, address: int) -> None:
        size = self.live.pop(address)
        for action in ("free_requested", "free_completed", "segment_free"):
            self._note(action, address, size)

    def run_out(self, size_mib: int) -> None:
        self.events.append(
            {"action": "oom", "size": size_mib * MIB, "stream": 0, "time_us": len(self.events), "device_free": 0}
        )
        raise MemoryError("CUDA out of memory")

    def _note(self, action: str, address: int, size: int) -> None:
        if self.recording:
            frame = sys._getframe(2)
            frames = [{"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name}]
            time_us = len(self.events)
            self.events.append(
                {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": frames}
            )

    # what a recorder asks for
    def require(self) -> None:
        if not self.present:
            raise MissingDependencyError("PyTorch finds no usable GPU")

    def start(self, stacks: str, max_entries: int, context: str = "all") -> str:
        self.recording, self.events = True, []
        self.starts += 1
        return stacks

    def stop(self) -> None:
        self.recording = False

    def snapshot(self) -> dict[str, Any]:
        return {
            "segments": [self._segment(address, size) for address, size in sorted(self.live.items())],
            "device_traces": [list(self.events)],
            "allocator_settings": {},
            "external_annotations": [],
        }

    @staticmethod
    def _segment(address: int, size: int) -> dict[str, Any]:
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
        return {
            "device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [block],
        }  # fmt: skip
