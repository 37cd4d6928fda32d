"""Calls of autograd within a forward pass, by a program that goes on with what they find: gradients of gradients,
penalties, adapted weights. They end no pass.

Such a call frees nothing of what the forward pass keeps, which a later call still needs, and what it leaves is gone
before the optimizer's step: an ordinary backward pass frees the graph, and leaves gradients.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, place_of
from memtrace.attribution.blind_phases import Lives
from memtrace.attribution.stack_facts import AUTOGRAD, Kind, Mark, StackFacts
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import DeviceTrace

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_NEARLY_ALL = 32


def without_inner_calls(
    marks: list[Mark], trace: DeviceTrace, stacks: StackFacts, lives: Lives, shared: bool
) -> list[Mark]:
    """The marks without those of such calls. ``lives`` are those of every allocation in the trace; ``shared``: frees
    have the stacks of what they free, so that the code which last made something counts as theirs."""
    calls = _Calls(marks, trace, stacks, lives, shared)
    inner: set[int] = set()
    code = start = 0  # marks: of the code before autograd's, and of autograd's
    for i in range(1, len(marks)):
        if marks[i][1] in AUTOGRAD:
            start = start if marks[i - 1][1] in AUTOGRAD else i
        elif marks[i - 1][1] in AUTOGRAD:
            if calls.is_inner(marks[code][0], marks[start][0], *marks[i]):
                inner.update(range(start, i))
            code = i
    return [mark for i, mark in enumerate(marks) if i not in inner]


class _Calls:
    """Tells which calls of autograd, in order, are such."""

    def __init__(self, marks: list[Mark], trace: DeviceTrace, stacks: StackFacts, lives: Lives, shared: bool) -> None:
        self.trace, self.stacks, self.lives, self.shared = trace, stacks, lives, shared
        self.steps = np.array([event for event, kind in marks if kind is Kind.OPTIMIZER], dtype=np.int64)
        self.outermost = stacks.ends()[1]
        self.callers = {*self.outermost[stacks.kind == Kind.FORWARD].tolist()}
        self.behind: set[int] = set()  # stacks that went on behind such calls
        self.left_bytes = 0  # by the one before, if no other call has been since

    def is_inner(self, code: int, start: int, end: int, kind: Kind | None) -> bool:
        """``code``, ``start``, ``end``: events at which the code before the call, the call, and what is behind it (of
        that kind) begin."""
        before, self.left_bytes = self.left_bytes, 0
        goes_on = int(self.trace.stack[end])
        # Hooks that run on autograd's thread are not called by the program.
        if kind not in (Kind.FORWARD, Kind.OTHER) or int(self.outermost[goes_on]) not in self.callers:
            return False
        graph, left = self._there(code, start, end), self._there(start, end, end)
        kept = graph[self._by_autograd(graph)]
        left_bytes = self._bytes(left)
        if len(kept):
            is_inner = self._bytes(kept) > _NEARLY_ALL * self._gone_bytes(start, end)
            is_inner = is_inner and not self._lasts(left, int(self.lives.died[kept].max()))
            is_inner = is_inner and not self._outlives_a_pass(kept, end)
        elif before:  # a product with the gradients of the one before, which needs the graph no more
            is_inner = left_bytes * 2 > before and len(self.steps) > 0 and not self._lasts(left, end)
        else:  # where the recording stops before that shows, what is called tells, or what goes on behind it
            is_inner = goes_on in self.behind or self._asks_for_gradients(int(self.trace.stack[start]))
            unended = graph[self.lives.died[graph] == NEVER]
            is_inner = is_inner and self._bytes(unended) > _NEARLY_ALL * self._gone_bytes(start, end)
        if is_inner:
            self.behind.add(goes_on)
            self.left_bytes = left_bytes
        return is_inner

    def _outlives_a_pass(self, kept: I8, end: int) -> bool:
        """Whether the graph goes while a later one, which was made meanwhile, stays: it was retained."""
        died = self.lives.died[kept]
        later = self._there(end, int(died.min()), int(died.max()))
        return self._bytes(later[self._by_autograd(later)]) * 2 > self._bytes(kept)

    def _asks_for_gradients(self, stack: int) -> bool:
        """Whether the program calls ``torch.autograd.grad`` rather than ``backward``."""
        table = self.stacks.python
        frames = [table.frames[frame] for frame in table.frame_ids(stack).tolist()] if stack >= 0 else []
        return any(f.filename == "torch/autograd/__init__.py" and f.name == "grad" for f in frames)

    def _there(self, start: int, end: int, event: int) -> I8:
        """What was made from one event to another and is there at a later one."""
        low, high = (place_of(self.lives.born, edge) for edge in (start, end))
        return low + np.flatnonzero(self.lives.died[low:high] > event)

    def _by_autograd(self, rows: I8) -> Bool:
        """Made by other code, and given up by autograd."""
        born, died = self.lives.born[rows], self.lives.died[rows]
        given_up_at = np.minimum(died, len(self.trace) - 1)
        if self.shared:
            given_up_at = self.lives.born[np.searchsorted(self.lives.born, given_up_at) - 1]
        made, given_up = (self.stacks.kind[self.trace.stack[at]] for at in (born, given_up_at))
        return (died < NEVER) & among(given_up, AUTOGRAD) & ~among(made, AUTOGRAD)

    def _gone_bytes(self, start: int, end: int) -> int:
        """What the call frees of the graph."""
        low, high = np.searchsorted(self.lives.died, [start, end], sorter=self._by_death).tolist()
        rows = self._by_death[low:high]
        rows = rows[self.lives.born[rows] < start]
        return self._bytes(rows[self._by_autograd(rows)])

    @cached_property
    def _by_death(self) -> I8:
        return np.argsort(self.lives.died, kind="stable")

    def _lasts(self, left: I8, event: int) -> bool:
        """Whether most of what the call leaves is there when the first step behind an event begins (if any does)."""
        until = int(np.append(self.steps[place_of(self.steps, event) :], event)[0])
        return self._bytes(left[self.lives.died[left] > until]) * 2 > self._bytes(left)

    def _bytes(self, rows: I8) -> int:
        return int(self.lives.size[rows].sum())
