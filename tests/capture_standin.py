"""A stand-in for ``torch.cuda.memory`` on a CPU build: real tensors, watched by a dispatch mode.

It behaves like the allocator as far as a recorder can tell: events (alloc, free_requested, free_completed, oom) with
stacks, a bounded ring, segments and blocks, statistics, a limit with an out-of-memory error, observers called before it
unwinds, and per-thread metadata. Every storage gets a segment of its own.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class StandIn(TorchDispatchMode):
    """A recording backend. Enter it (``with StandIn() as backend``) to watch the block's allocations."""

    device_type = "cpu"

    def __init__(self, capacity: int = 1 << 40, unwinder_fails: bool = False) -> None:
        super().__init__()
        self.capacity = capacity
        self.fraction: float | None = None
        self.unwinder_fails = unwinder_fails
        self.recording: str | None = None
        self.on_stopped: Any = None
        self.ring: deque[dict[str, Any]] = deque()
        self.live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self.observers: list[Any] = []
        self.peak = self.allocated = 0
        self.num_ooms = 0
        self.started = 0
        self.lock = threading.RLock()
        self.local = threading.local()
        self.refs: dict[int, Any] = {}
        self._ids = itertools.count()

    # the allocator
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        try:
            address, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # a tensor that only wraps others
            return
        with self.lock:
            if not address or not size or address in self.live:
                return
            limit = self.capacity if self.fraction is None else int(self.capacity * self.fraction)
            if self.allocated + size > limit:
                self._refuse(size)
            frames = self._frames()
            self.live[address] = (size, frames)
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            self._record("segment_alloc", address, size, frames)
            self._record("alloc", address, size, frames)
            self.refs[address] = weakref.ref(storage, lambda _ref, a=address: self._gone(a))

    def _gone(self, address: int) -> None:
        with self.lock:
            self.refs.pop(address, None)
            known = self.live.pop(address, None)
            if known is None:
                return
            self.allocated -= known[0]
            frames = self._frames()
            for action in ("free_requested", "free_completed", "segment_free"):
                self._record(action, address, known[0], frames)

    def _refuse(self, size: int) -> None:
        self.num_ooms += 1
        free = self.capacity - self.allocated
        self._record("oom", None, size, self._frames(), device_free=free)
        for observer in self.observers:
            observer(0, size, self.allocated, free)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")

    def _frames(self) -> list[dict[str, Any]]:
        frame, found = sys._getframe(2), []
        while frame is not None and len(found) < 40:
            code = frame.f_code
            if code.co_filename != __file__:
                found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            frame = frame.f_back
        return found

    def _record(self, action: str, address: int | None, size: int, frames: Any, **more: Any) -> None:
        if self.recording is None:
            return
        entry = {"action": action, "size": size, "stream": 0, "time_us": time.time_ns() // 1000, "frames": frames}
        entry["user_metadata"] = getattr(self.local, "metadata", "")
        if address is not None:
            entry["addr"] = address
        self.ring.append(entry | more)

    # what a recorder asks for
    def precheck(self) -> None:
        pass

    def when_ready(self, begin: Any) -> None:
        begin()

    def require(self) -> None:
        pass

    def start(self, stacks: str, max_entries: int, on_stopped: Any = None) -> str:
        self.on_stopped = on_stopped
        self.recording = "python" if self.unwinder_fails else stacks
        self.ring = deque(maxlen=max_entries)
        self.started += 1
        return self.recording

    def stop(self) -> None:
        self.recording = self.on_stopped = None
        self.ring.clear()

    def is_recording(self) -> bool:
        return self.recording is not None

    def snapshot(self) -> dict[str, Any]:
        with self.lock:
            segments = []
            for address in sorted(self.live):
                size, frames = self.live[address]
                block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
                segment = {"device": 0, "address": address, "total_size": size, "allocated_size": size}
                segment |= {"active_size": size, "requested_size": size, "stream": 0, "segment_type": "large"}
                segment |= {"segment_pool_id": (0, 0), "is_expandable": False, "frames": []}
                segments.append(segment | {"blocks": [block | {"frames": frames}]})
            settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1}
            return {
                "segments": segments,
                "device_traces": [list(self.ring)],
                "allocator_settings": settings,
                "external_annotations": [],
            }

    def stats(self, device: int) -> dict[str, Any]:
        names = ("requested_bytes", "allocated_bytes", "reserved_bytes", "active_bytes")
        stats = {f"{name}.all.current": self.allocated for name in names}
        stats |= {f"{name}.all.peak": self.peak for name in names}
        return stats | {"num_ooms": self.num_ooms, "num_alloc_retries": self.num_ooms}

    def levels(self, device: int) -> tuple[int, int, int, int, int, int]:
        return self.allocated, self.allocated, self.peak, self.peak, 0, self.num_ooms

    def blocks(self) -> dict[str, Any]:
        return self.snapshot() | {"device_traces": []}

    def reset_peaks(self, device: int) -> None:
        self.peak = self.allocated

    def memory_info(self, device: int) -> tuple[int, int]:
        return self.capacity - self.allocated, self.capacity

    def limit_bytes(self, device: int) -> int | None:
        return None if self.fraction is None else int(self.capacity * self.fraction)

    def limit(self, size_bytes: int) -> None:
        self.fraction = size_bytes / self.capacity

    def attach_oom_observer(self, observer: Any) -> None:
        self.observers.append(observer)

    def set_metadata(self, text: str) -> None:
        self.local.metadata = text

    def has_metadata(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_facts(self, device: int) -> dict[str, Any]:
        return {"gpu": "stand-in", "capability": [9, 0]}

    def synchronize(self) -> None:
        pass
