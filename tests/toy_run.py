"""Made-up training runs as real snapshots: a program of allocations through the allocator model, with stacks.

The model is a toy of a few layers; what the tests vary is how it is trained. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from allocator_machine import Machine
from strategies import SETTINGS

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.whatif.addresses import Policy
from memtrace.analysis import Analysis, analyse
from memtrace.history.timeline import build
from memtrace.snapshot.load import from_raw
from memtrace.snapshot.model import Action

MIB = 1 << 20
Frames = list[dict[str, Any]]
_KINDS = {Action.SEGMENT_ALLOC: "segment_alloc", Action.SEGMENT_FREE: "segment_free"}
TRAIN = "/home/me/train.py"


def frames(*places: str) -> Frames:
    """``file:line name`` each, innermost first."""
    made = []
    for place in places:
        where, name = place.split(" ")
        filename, line = where.rsplit(":", 1)
        made.append({"filename": filename, "line": int(line), "name": name})
    return made


CALL = ("/x/site-packages/torch/nn/modules/module.py:1790 _call_impl",
        "/x/site-packages/torch/nn/modules/module.py:1779 _wrapped_call_impl")  # fmt: skip
MODEL = "/x/site-packages/transformers/models/toy/modeling_toy.py"
LOADER = "/x/site-packages/transformers/modeling_utils.py:4313 from_pretrained"
COPY = "/x/site-packages/transformers/core_model_loading.py:1240 _materialize_copy"
PACK = "/x/site-packages/bitsandbytes/functional.py:939 quantize_4bit"
PREPARE = "/x/site-packages/peft/utils/other.py:209 prepare_model_for_kbit_training"
ADAPTER = "/x/site-packages/peft/tuners/lora/layer.py:180 update_layer"
ADAM = "/x/site-packages/torch/optim/adam.py:178 _init_group"
CHECKPOINT = "/x/site-packages/torch/utils/checkpoint.py:500 checkpoint"
LOSS = "/x/site-packages/transformers/loss/loss_utils.py:40 fixed_cross_entropy"
DROPOUT = "/x/site-packages/torch/nn/functional.py:1443 dropout"
LORA = "/x/site-packages/peft/tuners/lora/bnb.py:549 forward"
LINEAR = "/x/site-packages/torch/nn/modules/linear.py:130 forward"
EMBED = "/x/site-packages/torch/nn/modules/sparse.py:190 forward"
EAGER = f"{MODEL}:60 eager_attention_forward"
ROTARY = f"{MODEL}:50 apply_rotary_pos_emb"
EVALUATE = "/x/site-packages/transformers/trainer.py:4000 prediction_step"


def root(line: int = 10) -> tuple[str, ...]:
    return (f"{TRAIN}:{line} step", f"{TRAIN}:99 <module>")


class Run:
    """Allocations one after another; ``limit`` is the process's, ``card_free`` what an OOM event reports."""

    def __init__(self, limit: int | None = None, card_free: int = 64 << 30) -> None:
        self.machine = Machine(AllocatorConfig(limit_bytes=limit), Policy.DRIVER)
        self.events: list[dict[str, Any]] = []
        self.stack_of: dict[int, Frames] = {}
        self.card_free = card_free
        self.time_us = 1_000_000
        self.settings: dict[str, Any] = {**SETTINGS, "graph_capture_record_stream_reuse": False}
        self.extra: dict[str, Any] = {}

    def _note(self, action: str, address: int, size: int, stack: Frames, **more: Any) -> None:
        self.time_us += 1
        self.events.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.time_us,
             "compile_context": "N/A", "user_metadata": "", "frames": stack, **more}
        )  # fmt: skip

    def alloc(self, size: int, *places: str) -> int:
        """An allocation; raises MemoryError after noting the ``oom`` event."""
        stack = frames(*places)
        before = len(self.machine.world.log)
        name = self.machine.alloc(size, unit=1)
        for _, action, address, bytes_, _ in self.machine.world.log[before:]:
            self._note(_KINDS[Action(action)], address, bytes_, stack)
        if name is None:
            self._note("oom", 0, -(-size // 512) * 512, stack, device_free=self.card_free)
            raise MemoryError
        self._note("alloc", self.machine.live[name][1], size, stack)
        self.stack_of[name] = stack
        return name

    def free(self, *names: int, at: tuple[str, ...] = ()) -> None:
        for name in names:
            _, address, _, size = self.machine.live[name]
            stack = frames(*at)
            self._note("free_requested", address, size, stack)
            self._note("free_completed", address, size, stack)
            self.machine.free(name)

    def raw(self) -> dict[str, Any]:
        """The snapshot as PyTorch dumps it."""
        spans: dict[int, int] = {}
        for _, action, address, size, _ in self.machine.world.log:
            if action == Action.SEGMENT_ALLOC:
                spans[address] = size
            else:
                del spans[address]
        blocks = {a: (b, r, self.stack_of[n]) for n, (_, a, b, r) in self.machine.live.items()}
        segments = []
        for start, size in sorted(spans.items()):
            made, at = [], start
            for address in [*sorted(a for a in blocks if start <= a < start + size), start + size]:
                if address > at:
                    made.append({"address": at, "size": address - at, "requested_size": 0, "state": "inactive",
                                 "frames": []})  # fmt: skip
                if address < start + size:
                    block, requested, stack = blocks[address]
                    made.append({"address": address, "size": block, "requested_size": requested,
                                 "state": "active_allocated", "frames": stack})  # fmt: skip
                    at = address + block
            active = sum(b["size"] for b in made if b["state"] != "inactive")
            segments.append(
                {"device": 0, "address": start, "total_size": size, "allocated_size": active, "active_size": active,
                 "requested_size": sum(b["requested_size"] for b in made), "stream": 0,
                 "segment_type": "small" if size == 2 * MIB else "large", "segment_pool_id": (0, 0),
                 "is_expandable": False, "frames": [], "blocks": made}
            )  # fmt: skip
        made_raw = {"segments": segments, "device_traces": [list(self.events)], "allocator_settings": self.settings,
                    "external_annotations": []}  # fmt: skip
        return made_raw | ({"memtrace": self.extra} if self.extra else {})

    def analysis(self) -> Analysis:
        snapshot = from_raw(self.raw(), "toy.pickle")
        timeline = build(snapshot, snapshot.devices[0])
        assert timeline.replay.exact, timeline.replay.why
        return analyse(timeline)


@dataclass
class Toy:
    """How the toy is trained. A layer keeps three activations (and adapter copies) unless checkpointed."""

    layers: int = 6
    quantized: bool = True
    upcast: bool = False
    checkpointing: bool = False
    eager: bool = False
    matrix: float = 4.0
    """Attention's matrices are so many times as large as its output."""
    dropout: bool = False
    reference: bool = False
    keep_loss: bool = False
    keep_logits: bool = False
    hidden: int = 8 * MIB
    logits: int = 24 * MIB
    adapter: int = 2 * MIB
    optimizer: bool = True
    run: Run = field(default_factory=Run)
    params: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def load(self, line: int = 5) -> Toy:
        run = self.run
        for count in [1, *[2] * self.layers, 1]:
            matrix = 16 * MIB if count == 2 else 24 * MIB
            for _ in range(count):
                source = run.alloc(matrix, COPY, LOADER, *root(line))
                if self.quantized and count == 2:
                    run.alloc(matrix // 4, PACK, LOADER, *root(line))
                    run.alloc(matrix // 128, PACK, LOADER, *root(line))
                    run.free(source, at=(LOADER, *root(line)))
                elif self.upcast and count == 1:
                    run.alloc(matrix * 2, PREPARE, *root(line))
                    run.free(source, at=(PREPARE, *root(line)))
        return self

    def adapters(self) -> Toy:
        for _ in range(2 * self.layers):
            self.params.append(self.run.alloc(self.adapter, ADAPTER, *root(6)))
        return self

    def _layer(self, inner: tuple[str, ...], scale: float) -> tuple[list[int], int]:
        run, size = self.run, round(self.hidden * scale)
        wrapper = (CHECKPOINT,) if self.checkpointing else ()
        outer = (*CALL, f"{MODEL}:320 forward", *CALL, *wrapper, f"{MODEL}:403 forward", *CALL, f"{MODEL}:467 forward",
                 *CALL)  # fmt: skip
        where = (*outer, *inner, *root())
        attention, mlp = f"{MODEL}:254 forward", f"{MODEL}:175 forward"
        saved = [run.alloc(size, ROTARY, attention, *where), run.alloc(size, attention, *where)]
        if self.eager:
            matrices = [run.alloc(round(self.matrix * size), EAGER, attention, *where) for _ in range(2)]
            run.free(matrices[0], at=where)
            saved.append(matrices[1])
        if self.dropout:
            for part in (size, size // 4):
                saved.append(run.alloc(part, DROPOUT, *CALL, LORA, *CALL, mlp, *where))
        saved.append(run.alloc(2 * size, "/x/site-packages/torch/nn/functional.py:2000 silu", mlp, *where))
        short = run.alloc(size, mlp, *where)
        run.free(short, at=where)
        return saved, run.alloc(size, f"{MODEL}:323 forward", *where)

    def forward(self, scale: float = 1.0, inner: tuple[str, ...] = ()) -> tuple[list[int], list[int], int]:
        """(activations, loss tensors, logits)."""
        run = self.run
        where = (*CALL, f"{MODEL}:356 forward", *CALL, f"{MODEL}:467 forward", *CALL, *inner, *root())
        held = [run.alloc(round(self.hidden * scale), EMBED, *where)]
        for _ in range(self.layers):
            saved, out = self._layer(inner, scale)
            if self.checkpointing:
                run.free(*saved, at=root())
                saved = []
            held += [*saved, out]
        size = round(self.logits * scale)
        logits = run.alloc(size, LINEAR, *CALL, f"{MODEL}:480 forward", *CALL, *inner, *root())
        loss = [run.alloc(size, LOSS, f"{MODEL}:485 forward", *CALL, *inner, *root())]
        return held, loss, logits

    def step(self, scale: float = 1.0) -> Toy:
        run = self.run
        held, loss, logits = self.forward(scale)
        if not self.keep_logits:
            run.free(logits, at=root())
        size = round(self.logits * scale)
        grads = [run.alloc(size), run.alloc(size)]  # autograd's thread leaves no stack
        run.free(*loss)
        run.free(*grads)
        if self.keep_logits:
            short = run.alloc(4 * size)
            run.free(short)
        keep = held[:2] if self.keep_loss else []
        run.free(*[name for name in reversed(held) if name not in keep])
        self.kept += keep
        made = [run.alloc(self.adapter) for _ in self.params]
        if self.keep_logits:
            run.free(logits, at=root())
        if self.optimizer:
            if not self.states:
                self.states = [run.alloc(self.adapter, ADAM, *root(12)) for _ in range(2 * len(self.params))]
            else:
                short = run.alloc(self.adapter, ADAM.replace("_init_group", "_multi_tensor_adamw"), *root(12))
                run.free(short, at=root(12))
        run.free(*made, at=root(13))
        ids = run.alloc(64, *root(14))
        run.free(ids, at=root(14))
        return self

    def evaluate(self, batches: int) -> Toy:
        """Forward passes without gradients that keep their logits, as a trainer's evaluation does."""
        run, inner = self.run, (EVALUATE,)
        for _ in range(batches):
            held, loss, _ = self.forward(inner=inner)
            run.free(*held, *loss, at=(*inner, *root(20)))
        return self


def trained(steps: int = 2, **how: Any) -> Toy:
    """A toy, loaded, with adapters, after some steps."""
    toy = Toy(**how).load()
    if toy.reference:
        toy.load(line=7)
    toy.adapters()
    for _ in range(steps):
        toy.step()
    return toy
