"""The language-model head, found by where it stands in the model rather than by name.

A model's outermost ``forward`` calls the stack of layers and, beside it, the head. So a linear module is the head if
the function that calls it also calls something at least three modules deeper (model, layer, block).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.frame_tags import Tag, frame_tags
from memtrace.attribution.origin import package_of
from memtrace.attribution.stack_facts import Kind, StackFacts
from memtrace.snapshot.stacks import StackTable

Bool = NDArray[np.bool_]
_DEEPER, _DEEPER_IF_SMALL = 3, 2
_LIBRARY = {"torch", "peft", "bitsandbytes", "accelerate", "deepspeed", "lightning", "lightning_fabric"}


def head_stacks(facts: StackFacts) -> tuple[Bool, Bool]:
    """Per stack (plus the entry for "none"): does it allocate inside the head, and inside that of a small model?

    Small models are less deep; where there is none, such rules find projections of blocks.
    """
    table = facts.python
    tags = [int(frame_tags(f.filename, f.name)) for f in table.frames]
    is_library = [package_of(f.filename) in _LIBRARY for f in table.frames]
    is_container = [f.filename == "torch/nn/modules/container.py" for f in table.frames]
    code = _function_ids(table)
    forward_fn = int(Tag.FORWARD_FN)  # plain numbers: flags take ten times as long
    deepest: dict[tuple[int, int], int] = {}
    linear: list[tuple[int, list[tuple[int, int]]]] = []
    for stack in np.flatnonzero(facts.kind[:-1] == Kind.FORWARD).tolist():
        callers: list[tuple[int, int]] = []  # functions of the model's own code, outermost first
        chain, last_nested, in_model = 0, 0, False
        segments = _between_calls(table.frame_ids(stack).tolist()[::-1], tags)
        for nested, frames in zip(range(len(segments) - 1, -1, -1), segments, strict=True):
            is_program = frames is segments[0]
            forward = 0 if is_program else next((i for i, f in enumerate(frames) if tags[f] & forward_fn), 0)
            for place, frame in enumerate(frames):
                # Between a module call and the module's own forward stand hooks and decorators; the innermost segment
                # is the layer at work.
                is_model = is_container[frame] and not in_model  # a container that the program itself calls
                if nested and place >= forward and (is_model or not is_library[frame]):
                    key = (chain, code[frame])
                    deepest[key] = max(deepest.get(key, 0), nested)
                    callers = [key] if is_model else [*callers, key]
                    last_nested = nested
                    in_model |= not is_program
                chain = hash((chain, code[frame]))
        if callers and last_nested <= 2 and facts.tags[stack] & int(Tag.LINEAR | Tag.QUANT_MODULE):
            linear.append((stack, callers))
    results = np.zeros((2, len(table) + 1), dtype=np.bool_)
    for result, deeper in zip(results, (_DEEPER, _DEEPER_IF_SMALL), strict=True):
        heads = {callers[-1] for _, callers in linear if deepest[callers[-1]] >= deeper}
        for stack, callers in linear:
            # Only the outermost such function: a block may call a projection of its own beside its parts.
            result[stack] = callers[-1] in heads and not heads.intersection(callers[:-1])
    return results[0], results[1]


def _between_calls(frames: list[int], tags: list[int]) -> list[list[int]]:
    """Frames (outermost first) cut at module calls: the program, the module it calls, the module that calls, …"""
    segments: list[list[int]] = [[]]
    in_call, call = False, int(Tag.CALL)
    for frame in frames:
        if tags[frame] & call:
            if not in_call:
                segments.append([])
            in_call = True
        else:
            segments[-1].append(frame)
            in_call = False
    return segments


def _function_ids(table: StackTable) -> list[int]:
    """A number for each frame's function (file and name, whatever the line)."""
    ids: dict[tuple[str, str], int] = {}
    return [ids.setdefault((f.filename, f.name), len(ids)) for f in table.frames]
