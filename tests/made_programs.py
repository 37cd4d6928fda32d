"""Small programs written down event by event, each with one allocation whose purpose one rule alone can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wrappers import frames_of

from memtrace.attribution.categories import Purpose

KIB, MIB = 1 << 10, 1 << 20
Texts = tuple[str, ...]

MAIN: Texts = ("~/train.py:main", "~/train.py:<module>")
CALL = "torch/nn/modules/module.py:_call_impl"
FORWARD: Texts = ("~/model.py:forward", CALL, *MAIN)
AUTOGRAD: Texts = ()
STEP: Texts = ("torch/optim/adam.py:adam", "torch/optim/adam.py:step", "torch/optim/optimizer.py:wrapper", *MAIN)
ZERO_GRAD: Texts = ("torch/optim/optimizer.py:zero_grad", *MAIN)
LOAD: Texts = ("torch/nn/modules/module.py:_apply", "torch/nn/modules/module.py:to", *MAIN)
UNKNOWN_LOADER: Texts = ("~/weights.py:read", *MAIN)
CHECKPOINT: Texts = ("~/model.py:forward", CALL, "torch/utils/checkpoint.py:checkpoint", "~/model.py:run", CALL, *MAIN)
RECOMPUTE: Texts = ("~/model.py:forward", CALL, "torch/utils/checkpoint.py:unpack_hook")


def _frames(texts: Texts) -> list[dict[str, Any]]:
    return [{"filename": f.filename, "line": f.line, "name": f.name} for f in frames_of(texts)]


@dataclass
class Program:
    """Allocations and frees in order. A name stands for an address; what was there ``before`` has no alloc event."""

    events: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    live: dict[str, Texts] = field(default_factory=dict)

    def _place(self, name: str, size: int) -> tuple[int, int]:
        used = max((address + size for address, size in self.places.values()), default=1 << 40)
        return self.places.setdefault(name, (-(-used // (2 * MIB)) * 2 * MIB, size))

    def _add(self, action: str, name: str, texts: Texts) -> None:
        address, size = self.places[name]
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "frames": _frames(texts),
                "time_us": len(self.events),
            }
        )

    def before(self, name: str, size: int, texts: Texts = ()) -> None:
        """Its stack is known where it is still there and a ring has lost only the event."""
        self._place(name, size)
        self.live[name] = texts

    def alloc(self, name: str, size: int, texts: Texts) -> None:
        self._place(name, size)
        self._add("alloc", name, texts)
        self.live[name] = texts

    def free(self, name: str, texts: Texts) -> None:
        for action in ("free_requested", "free_completed"):
            self._add(action, name, texts)
        del self.live[name]

    def passes(self, count: int = 2, size: int = 64 * KIB, step: bool = True) -> None:
        """Training passes with one gradient of ``size``."""
        for _ in range(count):
            number = len(self.events)
            self.alloc(f"activation{number}", 96 * KIB, FORWARD)
            self.alloc(f"gradient{number}", size, AUTOGRAD)
            self.free(f"activation{number}", AUTOGRAD)
            if step:
                self.alloc(f"update{number}", 32 * KIB, STEP)
                self.free(f"update{number}", STEP)
            self.free(f"gradient{number}", ZERO_GRAD)

    def snapshot(self) -> dict[str, Any]:
        """In PyTorch's format: every block that is live has a segment of its own."""
        segments = []
        for name, texts in self.live.items():
            address, size = self.places[name]
            rounded = -(-size // 512) * 512
            block = {
                "address": address,
                "size": rounded,
                "requested_size": size,
                "state": "active_allocated",
                "frames": _frames(texts),
            }
            segments.append(
                {
                    "device": 0, "address": address, "total_size": rounded, "allocated_size": rounded,
                    "active_size": rounded, "requested_size": size, "stream": 0, "segment_type": "large",
                    "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [block],
                }
            )  # fmt: skip
        return {
            "segments": segments,
            "device_traces": [self.events],
            "allocator_settings": {},
            "external_annotations": [],
        }


Made = Callable[[Program], None]


def communication(p: Program) -> None:
    p.passes(1)
    p.alloc("asked", MIB, ("torch/distributed/distributed_c10d.py:all_gather_into_tensor", *MAIN))
    p.free("asked", MAIN)


def gradient_bucket(p: Program) -> None:
    helper = "torch/nn/parallel/distributed.py:_ddp_init_helper"
    p.alloc("asked", 2 * MIB, (helper, "torch/nn/parallel/distributed.py:__init__", *MAIN))
    p.passes()


def replaced_weight(p: Program) -> None:
    p.alloc("weight", 64 * KIB, LOAD)
    p.alloc("activation", 96 * KIB, FORWARD)
    p.alloc("gradient", 64 * KIB, AUTOGRAD)
    p.free("activation", AUTOGRAD)
    p.alloc("asked", 64 * KIB, STEP)
    p.free("weight", STEP)
    p.free("gradient", ZERO_GRAD)
    p.passes(1, step=False)


def state_ahead(p: Program) -> None:
    p.alloc("weight", 64 * KIB, LOAD)
    p.alloc("asked", 64 * KIB, MAIN)
    p.passes()


def quantized(p: Program) -> None:
    loader: Texts = (
        "bitsandbytes/functional.py:quantize_4bit",
        "transformers/modeling_utils.py:from_pretrained",
        *MAIN,
    )
    p.alloc("asked", 4 * MIB, loader)
    p.alloc("scales", 128 * KIB, ("bitsandbytes/functional.py:double_quant", *loader[1:]))
    p.passes()


def recompute_unfinished(p: Program) -> None:
    p.passes(1)
    p.alloc("input", 96 * KIB, CHECKPOINT)
    p.alloc("loss gradient", 96 * KIB, AUTOGRAD)
    p.alloc("asked", 128 * KIB, RECOMPUTE)


def checkpoint_input(p: Program) -> None:
    p.alloc("asked", 96 * KIB, CHECKPOINT)
    p.alloc("loss gradient", 96 * KIB, AUTOGRAD)
    p.free("asked", AUTOGRAD)


def early_state(p: Program) -> None:
    p.before("weight", 64 * KIB)
    p.before("asked", 64 * KIB)
    p.alloc("activation", 96 * KIB, FORWARD)
    p.alloc("gradient", 64 * KIB, AUTOGRAD)
    p.free("activation", AUTOGRAD)
    p.alloc("state", 64 * KIB, STEP)
    p.free("asked", STEP)
    p.alloc("update", 32 * KIB, STEP)
    p.free("update", STEP)
    p.free("gradient", ZERO_GRAD)
    p.passes()


def early_gradient(p: Program) -> None:
    p.before("weight", 64 * KIB)
    p.before("asked", 64 * KIB)
    p.alloc("update", 32 * KIB, STEP)
    p.free("update", STEP)
    p.free("asked", MAIN)
    p.passes()


def early_activation(p: Program) -> None:
    p.before("asked", 80 * KIB)
    p.passes(1)
    p.alloc("activation", 96 * KIB, FORWARD)
    p.alloc("loss gradient", 96 * KIB, AUTOGRAD)
    p.free("asked", AUTOGRAD)
    p.alloc("other", 32 * KIB, AUTOGRAD)


def early_made(p: Program) -> None:
    p.before("asked", 160 * KIB, FORWARD)
    p.alloc("other", 96 * KIB, FORWARD)


def early_workspace(p: Program) -> None:
    p.before("asked", 8_519_680)
    p.passes()


def lives_through(p: Program) -> None:
    p.alloc("asked", 2 * MIB, UNKNOWN_LOADER)
    p.passes()


def loaded_unseen(p: Program) -> None:
    p.alloc("weight", 2 * MIB, LOAD)
    p.alloc("asked", 2 * MIB, AUTOGRAD)
    p.alloc("another", 3 * MIB, LOAD)


def loading_unseen(p: Program) -> None:
    p.alloc("weight", 2 * MIB, LOAD)
    p.alloc("asked", MIB, AUTOGRAD)
    p.free("asked", AUTOGRAD)
    p.alloc("another", 2 * MIB, LOAD)
    p.passes()


def other(p: Program) -> None:
    p.passes(1)
    p.alloc("metric", 512, MAIN)
    p.alloc("asked", MIB, AUTOGRAD)
    p.free("asked", AUTOGRAD)
    p.passes(1)


def offloaded_weight(p: Program) -> None:
    hook: Texts = ("accelerate/utils/modeling.py:set_module_tensor_to_device", "accelerate/hooks.py:pre_forward")
    p.alloc("embedded", MIB, FORWARD)
    p.alloc("asked", 2 * MIB, (*hook, "accelerate/hooks.py:new_forward", CALL, *MAIN))
    p.alloc("output", MIB, FORWARD)
    p.free("asked", ("accelerate/hooks.py:post_forward", "accelerate/hooks.py:new_forward", CALL, *MAIN))
    p.alloc("next output", MIB, FORWARD)


MADE: dict[str, tuple[Made, Purpose]] = {
    "communication": (communication, Purpose.COMMUNICATION),
    "gradient-bucket": (gradient_bucket, Purpose.GRADS),
    "replaced-weight": (replaced_weight, Purpose.PARAMS),
    "state-ahead": (state_ahead, Purpose.OPTIMIZER_STATE),
    "quantized": (quantized, Purpose.QUANTIZED),
    "recompute-unfinished": (recompute_unfinished, Purpose.RECOMPUTE),
    "checkpoint-input": (checkpoint_input, Purpose.CHECKPOINT_INPUT),
    "early-state": (early_state, Purpose.OPTIMIZER_STATE),
    "early-gradient": (early_gradient, Purpose.GRADS),
    "early-activation": (early_activation, Purpose.SAVED),
    "early-made": (early_made, Purpose.SAVED),
    "early-workspace": (early_workspace, Purpose.CUBLAS_WORKSPACE),
    "offloaded-weight": (offloaded_weight, Purpose.UNQUANTIZED),
    "lives-through": (lives_through, Purpose.UNQUANTIZED),
    "loaded-unseen": (loaded_unseen, Purpose.UNQUANTIZED),
    "loading-unseen": (loading_unseen, Purpose.LOADING),
    "other": (other, Purpose.OTHER),
}
