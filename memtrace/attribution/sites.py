"""Where in the program: a short name for each stack, the call site that people recognise, and the module it serves."""

from __future__ import annotations

import re

from memtrace.attribution.frame_tags import Tag, frame_tags
from memtrace.attribution.head import head_stacks
from memtrace.attribution.origin import package_of
from memtrace.attribution.stack_facts import StackFacts
from memtrace.frozen import dataclass
from memtrace.snapshot.stacks import Frame, StackTable

# Frames that say how Python or PyTorch got there, not where "there" is.
_PLUMBING = re.compile(
    r"torch/(nn/modules/module|_ops|library|_compile|utils/_contextlib|utils/checkpoint|_tensor|overrides|_jit_internal)\.py$"
    r"|torch/(_dynamo|_inductor/runtime|autograd)/|torch/nn/(functional|modules/\w+)\.py$|contextlib\.py$|functools\.py$"
    r"|transformers/utils/(generic|output_capturing)\.py$|bitsandbytes/(backends|_ops|functional|nn)|memtrace/record/|^<frozen"
    r"|^\?\?$|\.(cpp|cc|c|h|hpp|cu|cuh)$|^$"
)
_CPP_NAME = re.compile(r"::|^_*Py|^unwind|^<unknown")
_SITE_PACKAGES = re.compile(r"^.*?(?:site-packages|dist-packages)/")
NO_STACK, BEFORE_RECORDING = "(no stack recorded)", "(before the recording)"  # where there is no call site to show


@dataclass(frozen=True, slots=True)
class Sites:
    """Per stack: ``frame`` (index of the frame to show, -1 none) and ``module`` ("attention", "mlp", … or "")."""

    table: StackTable
    frame: tuple[int, ...]
    module: tuple[str, ...]

    def label(self, stack: int) -> str:
        """``llama/modeling_llama.py:175 forward``; empty where no stack was recorded."""
        if stack < 0 or self.frame[stack] < 0:
            return ""
        return frame_label(self.table.frames[self.frame[stack]])


def short_path(filename: str) -> str:
    """The path without what lies in front of ``site-packages``, at most its last two parts."""
    path = _SITE_PACKAGES.sub("", filename.replace("\\", "/"))
    return "/".join(path.split("/")[-2:])


def frame_label(frame: Frame) -> str:
    """``llama/modeling_llama.py:175 forward``."""
    return f"{short_path(frame.filename)}:{frame.line} {frame.name}"


def is_plumbing(frame: Frame) -> bool:
    """Whether a frame only passes the call on (module dispatch, autograd, decorators, C++)."""
    return bool(_PLUMBING.search(frame.filename.replace("\\", "/")) or _CPP_NAME.search(frame.name))


def find_sites(table: StackTable, facts: StackFacts) -> Sites:
    """Choose the frame to show for every stack and name its module."""
    plain = [not is_plumbing(frame) for frame in table.frames]
    chosen = []
    for stack in range(len(table)):
        frames = table.frame_ids(stack).tolist()
        chosen.append(next((frame for frame in frames if plain[frame]), frames[0] if frames else -1))
    return Sites(table, tuple(chosen), tuple(_modules(facts)))


_DIRECT: tuple[tuple[Tag, str], ...] = (
    (Tag.LORA, "lora"),
    (Tag.NORM, "norm"),
    (Tag.EMBEDDING, "embedding"),
    (Tag.ATTENTION | Tag.ROPE, "attention"),
    (Tag.ACT, "mlp"),
)


def _modules(facts: StackFacts) -> list[str]:
    """Module of each stack. Attention and MLP share a file and a function name (``forward``) in most models; they are
    told apart by what else the same call, seen from outside, runs: rotary embeddings, or an activation function."""
    table = facts.python
    heads, _ = head_stacks(facts)
    is_code = [
        not (frame_tags(f.filename, f.name) & Tag.CALL) and package_of(f.filename) != "torch" for f in table.frames
    ]
    function = {frame: (f.filename, f.name) for frame, f in enumerate(table.frames)}
    role: dict[tuple[int, tuple[str, str]], str] = {}
    chains: list[list[tuple[int, tuple[str, str]]]] = []
    direct: list[str] = []
    for stack in range(len(table)):
        outer, keys = 0, []
        for frame in reversed(table.frame_ids(stack).tolist()):
            if is_code[frame]:
                keys.append((outer, function[frame]))
            outer = hash((outer, frame))
        chains.append(keys)
        tags = int(facts.tags[stack])
        name = next((name for tag, name in _DIRECT if tags & int(tag)), "")
        direct.append("head" if heads[stack] else "loss" if facts.is_loss[stack] else name)
        if tags & int(Tag.ATTENTION | Tag.ROPE | Tag.ACT):
            # The function that calls the telling one is the module's own forward.
            owner = next((key for key in reversed(keys) if key[1][1] == "forward"), None)
            if owner is not None:
                role.setdefault(owner, "mlp" if tags & int(Tag.ACT) else "attention")
    names = []
    for keys, name in zip(chains, direct, strict=True):
        names.append(name or next((role[key] for key in reversed(keys) if key in role), ""))
    return names
