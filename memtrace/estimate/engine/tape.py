"""The stream an engine writes: every allocation and free in order, with what it is for and where it came from.

Sizes are requested bytes. An allocation is known by its index (0, 1, 2, …); an event is that index, or its
bitwise complement (``~index``) for the free. Labels are ``category/subcategory``.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.attribution.categories import Purpose

FORWARD = Purpose.FORWARD
BACKWARD = Purpose.BACKWARD
OPTIMIZER = Purpose.OPTIMIZER
LOADING = Purpose.LOADING
SAVED = Purpose.SAVED
HELD = Purpose.SAVED  # alive when the forward ends, though autograd does not hold it
CHECKPOINT_INPUT = Purpose.CHECKPOINT_INPUT
RECOMPUTE = Purpose.RECOMPUTE

#: Index in ``events`` that stands for ``torch.cuda.empty_cache()``: releases cached segments, frees nothing.
EMPTY_CACHE = 1 << 40


@dataclass(frozen=True, slots=True)
class Mark:
    """From event position ``event`` on, phase ``name`` of step ``step`` runs (step -1: before the first step)."""

    event: int
    name: str
    step: int


class Tape:
    """Records a predicted run. Lists are parallel, one entry an allocation, except ``events`` and ``marks``."""

    __slots__ = (
        "default_label",
        "events",
        "labels",
        "layer",
        "layers",
        "marks",
        "ops",
        "site",
        "sites",
        "sizes",
        "step",
    )

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.labels: list[str] = []
        self.ops: list[str] = []
        self.sites: list[str] = []
        self.layers: list[int] = []
        self.marks: list[Mark] = []
        self.default_label = LOADING
        self.site = ""
        self.layer = -1
        self.step = -1

    def mark(self, name: str) -> None:
        """Begin phase ``name`` here."""
        self.marks.append(Mark(len(self.events), name, self.step))

    def empty_cache(self) -> None:
        """Record a call of ``torch.cuda.empty_cache()``."""
        self.events.append(EMPTY_CACHE)

    def live_since(self, event: int) -> list[int]:
        """Allocations made at or after event position ``event`` that are still alive."""
        live: dict[int, None] = {}
        for entry in self.events[event:]:
            if entry < 0:
                live.pop(~entry, None)
            elif entry != EMPTY_CACHE:
                live[entry] = None
        return list(live)

    def relabel(self, indices: list[int], old: str, new: str) -> None:
        """Give label ``new`` to those of ``indices`` that carry label ``old``."""
        labels = self.labels
        for index in indices:
            if labels[index] == old:
                labels[index] = new
