"""A message while it is being read: figures arrive one by one, then ``build`` freezes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .message import Kind, OomMessage
from .sizes import parse_size
from .versions import Range, intersect


@dataclass
class Draft:
    """Mutable twin of OomMessage."""

    kind: Kind
    is_gpu_oom: bool = True
    backend: str | None = None
    device: int | None = None
    component: str | None = None
    what: str = ""
    exception: str | None = None
    figures: dict[str, int] = field(default_factory=dict)
    half_units: dict[str, float] = field(default_factory=dict)
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    versions: Range = (None, None)
    cut_short: bool = False
    damaged: bool = False
    notes: list[str] = field(default_factory=list)
    consumed: int = 0
    """Characters of the body that belong to the message."""

    def put(self, name: str, figure: str, unit: str = "bytes", *, decimal_units: bool = False) -> None:
        """Record figure ``name``; sentinels leave it unknown, and a first reading is never overwritten."""
        size = parse_size(figure, unit, decimal_units=decimal_units)
        if size is None:
            self.note(f"{name.removesuffix('_bytes').replace('_', ' ')} printed as {figure} {unit}: means unknown")
            return
        if name not in self.figures:
            self.figures[name] = size.bytes
            self.half_units[name] = size.half_unit_bytes

    @property
    def has_layout(self) -> bool:
        """Whether the text got as far as the figures of the device."""
        return "total_bytes" in self.figures or "tried_bytes" in self.figures

    def note(self, text: str) -> None:
        """Remember something about the reading that a person should know."""
        if text not in self.notes:
            self.notes.append(text)

    def implies(self, versions: Range) -> None:
        """Narrow the range of PyTorch versions; a contradiction is ignored (the first evidence stays)."""
        self.versions = intersect(self.versions, versions) or self.versions

    def build(self, *, line: int, rank: int | None, text: str) -> OomMessage:
        """The finished message."""
        values: dict[str, Any] = dict(self.figures)
        return OomMessage(
            is_gpu_oom=self.is_gpu_oom,
            kind=self.kind,
            backend=self.backend,
            device=self.device,
            component=self.component,
            what=self.what,
            exception=self.exception,
            other_processes=tuple(self.processes),
            half_unit_bytes=MappingProxyType(dict(self.half_units)),
            torch_at_least=self.versions[0],
            torch_below=self.versions[1],
            cut_short=self.cut_short,
            damaged=self.damaged,
            notes=tuple(self.notes),
            line=line,
            rank=rank,
            text=text,
            **values,
        )
