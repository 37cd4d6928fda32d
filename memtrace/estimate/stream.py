"""The stream of a predicted run: every allocation and free in order, with what it is for and where it came from.

Sizes are requested bytes. An allocation is known by its index (0, 1, 2, …); an event is that index, or its
bitwise complement (``~index``) for the free. Labels are ``category/subcategory``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field

from memtrace.attribution.categories import Purpose
from memtrace.frozen import dataclass

#: Micro-batches of a step that are simulated. The third and later ones find the memory that the one before found (the
#: gradients exist since the first, cached segments fit since the second), so that more of them change no phase's peak.
MICRO_BATCHES = 3
#: Event that stands for ``torch.cuda.empty_cache()``: releases cached segments, frees nothing.
EMPTY_CACHE = 1 << 40


@dataclass(frozen=True, slots=True)
class StreamMark:
    """From event position ``event`` on, phase ``name`` of step ``step`` runs (step -1: before the first step)."""

    event: int
    name: str
    step: int

    @property
    def phase(self) -> str:
        """What people call it: bringing in a batch belongs to the forward pass, zeroing gradients to the optimizer."""
        return {"inputs": "forward", "zero_grad": "optimizer"}.get(self.name, self.name)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's collector rests: predicted runs make no reference cycles, and looking for them only costs time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class Tape:
    """Records a predicted run. Lists are parallel, one entry an allocation, except ``events`` and ``marks``."""

    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    marks: list[StreamMark] = field(default_factory=list)
    default_label: str = Purpose.LOADING
    site: str = ""
    layer: int = -1
    step: int = -1

    def mark(self, name: str) -> None:
        """Begin phase ``name`` here."""
        self.marks.append(StreamMark(len(self.events), name, self.step))

    def empty_cache(self) -> None:
        """Record a call of ``torch.cuda.empty_cache()``."""
        self.events.append(EMPTY_CACHE)

    def relabel(self, indices: Iterable[int], old: str, new: str) -> None:
        """Give label ``new`` to those of ``indices`` that carry label ``old``."""
        labels = self.labels
        for index in indices:
            if labels[index] == old:
                labels[index] = new

    def relabel_since(self, event: int, new: str) -> None:
        """Give label ``new`` to what a forward pass made at or after event position ``event`` and still lives."""
        self.relabel(alive(self.events[event:]), Purpose.FORWARD, new)

    def stream(self, managed_bytes: int, kernel: str) -> Stream:
        """What was recorded so far; call it before the tensors that still live die."""
        return Stream(
            list(self.events), list(self.sizes), list(self.labels), self.ops, self.sites, self.layers, self.marks,
            managed_bytes, kernel,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stream:
    """The allocations and frees of a predicted run.

    ``events``: an allocation's index, its complement for the free, or ``EMPTY_CACHE``. The other tuples have one
    entry an allocation: requested bytes, ``category/subcategory``, operator, module, layer (-1 outside layers).
    ``managed_bytes``: optimizer states outside the allocator.
    """

    events: list[int]
    sizes: list[int]
    labels: list[str]
    ops: list[str]
    sites: list[str]
    layers: list[int]
    marks: list[StreamMark]
    managed_bytes: int
    kernel: str

    def where(self, index: int) -> str:
        """Layer, module and operator of an allocation, for people."""
        layer = f"layers.{self.layers[index]}." if self.layers[index] >= 0 else ""
        return f"{layer}{self.sites[index] or 'model'}: {self.ops[index]}"

    def key(self, index: int) -> tuple[str, str, str, int]:
        """What allocations of the same kind in different layers have in common."""
        return self.ops[index], self.sites[index], self.labels[index], self.sizes[index]


def live_at(stream: Stream, event: int) -> list[int]:
    """Allocations alive just after stream event ``event``, in order of birth."""
    return alive(stream.events[: event + 1])


def alive(events: list[int]) -> list[int]:
    """Allocations that these events leave alive, in order of birth."""
    live: dict[int, None] = {}
    for entry in events:
        if entry < 0:
            live.pop(~entry, None)
        elif entry < EMPTY_CACHE:
            live[entry] = None
    return list(live)
