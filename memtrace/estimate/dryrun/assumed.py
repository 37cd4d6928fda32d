"""What a dry run takes for granted where a program asks for what nobody can know without data.

Each assumption has a name (``--assume NAME=VALUE`` changes it, ``--assume FILE:LINE=VALUE`` at one place only) and is
listed once, with how often it was asked for and where first.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from memtrace.errors import UsageError
from memtrace.estimate.dryrun.stacks import caller, followed

KINDS = ("float", "integer", "boolean", "share")
_FALL = 1e-3
_SAID = {
    "float": "a number is {value:g} (a loss, a norm, a metric)",
    "integer": "an integer is {value:g}",
    "boolean": "a condition on values is {answer}, and no value is infinite or NaN",
    "share": "of a mask's elements {value:.0%} are true, of values as many distinct ones as there may be: the most",
}


@dataclass(slots=True)
class Assumption:
    """``said`` is one line for people; ``count`` how often it decided, ``first`` where first."""

    name: str
    said: str
    first: str
    count: int = 1


@dataclass(slots=True)
class Assumptions:
    """The answers of one run; ``given`` are those of the user, by name or ``FILE:LINE``."""

    given: dict[str, float] = field(default_factory=dict)
    listed: dict[str, Assumption] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """The answer, for the code that runs now; counted."""
        if name == "float" and followed("torch/amp/grad_scaler.py"):
            return 0.0  # no gradient is infinite
        place = caller()
        known = _library_answer()
        if known is not None:
            return known
        given = next((v for key, v in self.given.items() if ":" in key and place.endswith(key)), self.given.get(name))
        value = 1.0 if given is None else given
        said = _SAID[name].format(value=value, answer="true" if value else "false")
        if given is None and name == "float":
            value, said = self._falling(), f"{said} at first, and less each time: nothing has converged"
        self.note(name if place not in self.given else place, said, place)
        return value

    def _falling(self) -> float:
        """From 1 towards a half, so that what stops once its loss stands still goes on."""
        asked = self.listed["float"].count if "float" in self.listed else 0
        return 0.5 + 0.5 / (1 + _FALL * asked)

    def note(self, name: str, said: str, place: str | None = None) -> None:
        """Something else that was taken for granted."""
        known = self.listed.get(name)
        if known is not None:
            known.count += 1
        else:
            self.listed[name] = Assumption(name, said, place or caller())


def parse(given: list[str]) -> dict[str, float]:
    """``NAME=VALUE`` of the command line. Raises UsageError."""
    found = {}
    for text in given:
        name, _, value = text.rpartition("=")
        if name not in KINDS and not name.rpartition(":")[2].isdigit():
            raise UsageError(f"--assume {text}: give {', '.join(KINDS)} or FILE:LINE, then =VALUE")
        words = {"true": 1.0, "false": 0.0}
        try:
            found[name] = words[value.lower()] if value.lower() in words else float(value)
        except ValueError:
            raise UsageError(f"--assume {text}: {value!r} is no number") from None
    return found


def _longer_than_original(frame: FrameType) -> bool:
    """``if seq_len > original_max_position_embeddings`` of rotary embeddings that grow: positions are 0 … s − 1."""
    positions = frame.f_locals["position_ids"]
    module = frame.f_locals.get("self")
    limit = frame.f_locals.get("original_max_position_embeddings", getattr(module, "max_seq_len_cached", None))
    return limit is not None and bool(positions.shape[-1] > limit)


def _slope_of_descent(frame: FrameType) -> float:
    """What ``torch.optim.LBFGS`` is told of the slope along its own direction: negative until it has converged."""
    if not frame.f_code.co_filename.endswith("torch/optim/lbfgs.py"):
        raise KeyError("another step")
    if "gtd >" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        raise KeyError("another question")
    return -1.0


#: Functions of libraries whose question has one answer in training on whole sequences.
_ANSWERS: dict[str, Callable[[FrameType], float]] = {
    "find_packed_sequence_indices": lambda _frame: True,  # "all positions follow on": one sequence a row
    "longrope_frequency_update": _longer_than_original,
    "dynamic_frequency_update": _longer_than_original,
    "has_overflow": lambda _frame: False,  # of gradients: DeepSpeed would skip the step
    "is_invalid_grad_norm": lambda _frame: False,
    "step": _slope_of_descent,
}


def _library_answer() -> float | None:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return None
        if frame.f_code.co_name in _ANSWERS:
            with contextlib.suppress(KeyError, AttributeError):
                return float(_ANSWERS[frame.f_code.co_name](frame))
        frame = frame.f_back
    return None
