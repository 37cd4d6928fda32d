"""Long training runs under a limit, on memtrace's model of the allocator: those that leak, fragment, or are healthy.

A step allocates as one of a small transformer does: activations layer by layer, temporaries between them, logits,
gradients; the backward pass frees in reverse order. What makes a run die is a kind of its own, never a size alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from allocator_machine import MIB, Machine

from memtrace.allocator.config import AllocatorConfig
from memtrace.live.alarms import FreePieces

LAYERS, VOCABULARY_MIB = 12, 40
LEAKS = ("graph every step", "metrics", "every fifth step", "growing cache", "one layer's outputs")
FRAGMENTS = ("pinned halves", "pinned rows", "growing pieces", "replaced buffers", "two sizes")
PREFILLED = {"pinned halves": 160, "growing pieces": 60, "replaced buffers": 120, "two sizes": 50}
FIXED = ("fixed lengths", "graph every step", "growing cache", "late buffers", "evaluation now and then")
HEALTHY = ("fixed lengths", "varying lengths", "longer and longer", "evaluation now and then", "late buffers")


@dataclass
class MadeRun:
    """Rows as a step log has them, the pieces after each step, and the step that was refused memory."""

    rows: list[dict[str, int]]
    pieces: list[FreePieces]
    capacity_bytes: int
    died: int | None


def made_run(kind: str, seed: int, steps: int = 500, capacity_mib: int = 6144) -> MadeRun:
    """One run of a kind; it ends when a request is refused."""
    machine = Machine(AllocatorConfig(limit_bytes=capacity_mib * MIB))
    found = MadeRun([], [], capacity_mib * MIB, None)
    program = _Program(machine, random.Random(seed), kind)
    try:
        program.load()
        for step in range(steps):
            tokens = program.step(step)
            found.rows.append(program.row(step, tokens))
            found.pieces.append(program.pieces())
    except MemoryError:
        found.died = len(found.rows)
    return found


class _Program:
    def __init__(self, machine: Machine, dice: random.Random, kind: str) -> None:
        self.machine, self.dice, self.kind = machine, dice, kind
        self.allocated = self.peak = self.largest = 0
        self.kept: list[int] = []
        self.cache: int | None = None
        self.leak_mib = dice.uniform(4, 12)
        self.base_tokens = dice.choice((512, 1024, 2048))

    def get(self, mib: float) -> int:
        name = self.machine.alloc(mib)
        if name is None:
            raise MemoryError
        self.largest = max(self.largest, round(mib * MIB))
        self.allocated += self.machine.block(name)
        self.peak = max(self.peak, self.allocated)
        return name

    def drop(self, name: int) -> None:
        self.allocated -= self.machine.block(name)
        self.machine.free(name)

    def load(self) -> None:
        self.weights = [self.get(mib) for _ in range(LAYERS) for mib in (24, 8, 64, 32)] + [self.get(VOCABULARY_MIB)]
        self.states: list[int] = []
        if self.kind in FRAGMENTS:  # what is replaced later is there, side by side
            self.kept = [self.get(1.2) for _ in range(PREFILLED.get(self.kind, 0))]

    def tokens(self, step: int) -> int:
        if self.kind in FIXED:
            return self.base_tokens
        if self.kind == "longer and longer":
            return min(200 + 4 * step, 2048)
        return self.dice.randint(self.base_tokens // 4, self.base_tokens)

    def step(self, step: int) -> int:
        self.largest = 0
        tokens = self.tokens(step)
        self.forward_backward(tokens, step, is_training=True)
        if self.kind == "evaluation now and then" and step % 50 == 49:
            self.forward_backward(tokens * 2, step, is_training=False)
        if not self.states:
            self.states = [self.get(4) for _ in range(2 * LAYERS)]
        if self.kind == "late buffers" and step in (3, 30, 31, 120):
            self.kept.append(self.get(48))
        return tokens

    def forward_backward(self, tokens: int, step: int, is_training: bool) -> None:
        live: list[list[int]] = []
        for layer in range(LAYERS):
            per = tokens / 1024
            temporary = self.get(12 * per)
            live.append([self.get(8 * per), self.get(22 * per), self.get(8 * per)])
            self.drop(temporary)
            if is_training:
                self.leave_behind(step, layer, per)
            if not is_training:
                for name in live.pop():
                    self.drop(name)
        logits = [self.get(tokens / 1024 * 125), self.get(tokens / 1024 * 250)]
        gradients = []
        for name in logits:
            self.drop(name)
        while live:
            temporary = self.get(22 * tokens / 1024)
            for name in reversed(live.pop()):
                self.drop(name)
            gradients += [self.get(4)]
            self.drop(temporary)
        for name in gradients:
            self.drop(name)

    def leave_behind(self, step: int, layer: int, per: float) -> None:
        """What this kind of run does wrong, if anything, within a forward pass."""
        kind, dice, last = self.kind, self.dice, layer == LAYERS - 1
        if kind == "graph every step" and last:
            self.kept.append(self.get(self.leak_mib))
        elif kind == "metrics" and last:
            self.kept += [self.get(self.leak_mib / 8) for _ in range(8)]
        elif kind == "every fifth step" and last and step % 5 == 4:
            self.kept.append(self.get(self.leak_mib * 5))
        elif kind == "growing cache" and last:
            old, self.cache = self.cache, self.get(20 + self.leak_mib * step)
            if old is not None:
                self.drop(old)
        elif kind == "one layer's outputs" and layer == 5:
            self.kept.append(self.get(8 * per))
        elif kind == "pinned halves" and layer % 3 == 1:  # a small tensor of constant total, always somewhere else
            self.replace(1.2, 160)
        elif kind == "pinned rows" and layer == 6:
            self.kept.append(self.get(1.1))
        elif kind == "growing pieces" and last:
            for number in range(4):
                self.replace(2 + (step * 4 + number) * 0.01, 60)
        elif kind == "replaced buffers" and layer % 4 == 0:
            self.replace(dice.uniform(1.1, 9), 120)
        elif kind == "two sizes" and layer % 6 == 0:
            self.replace(dice.choice((1.5, 18)) + step * 0.02, 50)

    def replace(self, mib: float, most: int) -> None:
        self.kept.append(self.get(mib))
        if len(self.kept) > most:
            self.drop(self.kept.pop(self.dice.randrange(len(self.kept))))

    def row(self, step: int, tokens: int) -> dict[str, int]:
        peak, self.peak = self.peak, self.allocated
        reserved = self.machine.state.total_bytes
        return {
            "step": step, "time_us": step * 1_000_000, "allocated_bytes": self.allocated, "reserved_bytes": reserved,
            "peak_allocated_bytes": peak, "peak_reserved_bytes": reserved, "tokens": tokens, "longest_tokens": tokens,
            "holes_bytes": reserved - self.allocated - self.cached(), "retries": self.machine.retries,
        }  # fmt: skip

    def cached(self) -> int:
        whole = self.machine.state.whole
        return sum(size for address, size in self.machine.free_blocks() if whole.get(address) == size)

    def pieces(self) -> FreePieces:
        """After the step: its largest request, the largest free block, and what the driver would still give."""
        free = max((size for _, size in self.machine.free_blocks()), default=0)
        limit = self.machine.config.limit_bytes or 0
        return FreePieces(self.largest, free, limit - self.machine.state.total_bytes + self.cached())
