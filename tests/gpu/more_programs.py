"""Further kinds of training and inference that ``record_truth.py`` records: other optimizers, models and loops.

As in ``programs.py``, what stands before the ``yield`` is there before a recording that starts late; an optimizer with
states of its own has then stepped once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from programs import Stage, _gpt, _ids, _shape
from torch import nn
from torch.nn import functional


def _steps(
    stage: Stage,
    lost: Callable[[int, int], Any],
    step: Callable[[], None],
    clear: Callable[[], None],
    batch: int,
    begin: int = 0,
    steps: int = 3,
) -> Iterator[None]:
    """An ordinary loop: ``lost(rows, number)`` is the forward pass. The recording may begin before step ``begin``."""
    for number in range(steps):
        if number == begin:
            yield
        rows = 4 * batch if number == steps - 1 and stage.surprise() else batch
        stage.mark("forward")
        loss = lost(rows, number)
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        step()
        stage.mark("zero_grad")
        clear()
        del loss
    stage.mark("end")


def _language(stage: Stage) -> tuple[Any, int, Callable[[int, int], Any]]:
    """(a small GPT, its batch, its forward pass and loss)."""
    model, vocab, batch, length = _gpt(stage)
    model.to(stage.device)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, vocab)
        logits = model(ids)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return model, batch, lost


# optimizers
class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: climbs to a neighbour of the weights, and steps with the gradient found there."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()


def sam(stage: Stage) -> Iterator[None]:
    """Two passes a step; the weights are swapped for copies that the first half made."""
    model, batch, lost = _language(stage)
    stage.mark("adapters")
    optimizer = SAM(model.parameters())
    stage.know(model, optimizer.base)
    for number in range(4):
        if number == 1:
            yield
        rows = 4 * batch if number == 3 and stage.surprise() else batch
        for half in (optimizer.climb, optimizer.descend):
            stage.mark("forward")
            loss = lost(rows, number)
            stage.mark("backward")
            loss.backward()
            stage.mark("optimizer")
            half()
            stage.note_model()
            stage.mark("zero_grad")
            del loss
    stage.mark("end")


class Flat:
    """Adam whose states are two flat tensors over all weights."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.states: list[Any] = []

    @torch.no_grad()
    def step(self) -> None:
        grads = torch.cat([p.grad.flatten() for p in self.params])
        if not self.states:
            self.states = [torch.zeros_like(grads), torch.zeros_like(grads)]
        mean, square = self.states
        mean.mul_(0.9).add_(grads, alpha=0.1)
        square.mul_(0.99).addcmul_(grads, grads, value=0.01)
        change = mean / (square.sqrt() + 1e-8)
        for p, part in zip(self.params, change.split([p.numel() for p in self.params]), strict=True):
            p.add_(part.view_as(p), alpha=-1e-4)

    def clear(self) -> None:
        for p in self.params:
            p.grad = None


def flat(stage: Stage) -> Iterator[None]:
    """An optimizer written by hand whose states are flat."""
    model, batch, lost = _language(stage)
    stage.mark("adapters")
    optimizer = Flat(model.parameters())
    stage.know(model, states=lambda: optimizer.states)
    yield from _steps(stage, lost, optimizer.step, optimizer.clear, batch, begin=1)


class Lookahead:
    """Slow copies of the weights, followed every second step."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.params = inner.param_groups[0]["params"]
        self.slow = [p.detach().clone() for p in self.params]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.params, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


def lookahead(stage: Stage) -> Iterator[None]:
    """AdamW within Lookahead."""
    model, batch, lost = _language(stage)
    stage.mark("adapters")
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-4))
    stage.know(model, optimizer.inner, states=lambda: optimizer.slow)
    yield from _steps(stage, lost, optimizer.step, optimizer.inner.zero_grad, batch, steps=4)


class Shampoo(torch.optim.Optimizer):
    """Two preconditioners a matrix and their inverse roots, renewed every second step; a momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["step"], state["momentum"] = 0, torch.zeros_like(p)
                sides = p.shape if p.ndim == 2 and max(p.shape) <= 4096 else ()
                state["factors"] = [torch.zeros(n, n, device=p.device) for n in sides]
                state["roots"] = [torch.eye(n, device=p.device) for n in sides]
            change = p.grad
            for side, factor in enumerate(state["factors"]):
                turned = p.grad if side == 0 else p.grad.t()
                factor.addmm_(turned, turned.t(), beta=0.95)
            if state["factors"]:
                if state["step"] % 2 == 0:
                    state["roots"] = [self.root(factor) for factor in state["factors"]]
                change = state["roots"][0] @ p.grad @ state["roots"][1]
            state["step"] += 1
            state["momentum"].mul_(0.9).add_(change)
            p.add_(state["momentum"], alpha=-1e-4)

    @staticmethod
    def root(factor: Any) -> Any:
        """An inverse root by a few Newton steps."""
        near = factor / (factor.norm() + 1e-6) + 1e-3 * torch.eye(len(factor), device=factor.device)
        result = torch.eye(len(factor), device=factor.device)
        for _ in range(3):
            result = 1.5 * result - 0.5 * result @ near @ result
        return result


def shampoo(stage: Stage) -> Iterator[None]:
    """Preconditioners as states."""
    model, batch, lost = _language(stage)
    stage.mark("adapters")
    optimizer = Shampoo(model.parameters())
    stage.know(model, optimizer)
    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch, begin=1)


class Lion(torch.optim.Optimizer):
    """The sign of a running mean, many tensors at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        for p in params:
            if "mean" not in self.state[p]:
                self.state[p]["mean"] = torch.zeros_like(p)
        means = [self.state[p]["mean"] for p in params]
        changes = torch._foreach_lerp(means, grads, 0.1)
        torch._foreach_sign_(changes)
        torch._foreach_mul_(params, 1 - 1e-5)
        torch._foreach_add_(params, changes, alpha=-1e-4)
        torch._foreach_lerp_(means, grads, 0.01)


def half_precision(stage: Stage) -> Iterator[None]:
    """An encoder in 16 bits with masters in 32, accumulated over two batches, clipped, and Lion on the masters."""
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(**(small if stage.small else {"hidden_size": 1024, "num_hidden_layers": 6,
                        "num_attention_heads": 16, "intermediate_size": 4096}))  # fmt: skip
    model = BertForSequenceClassification(config).to(stage.device, torch.bfloat16)
    stage.mark("adapters")
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = Lion(masters, {})
    stage.know(model, optimizer, states=lambda: masters)
    batch, length = _shape(stage, 16, 256)
    for number in range(3):
        if number == 1:
            yield
        rows = 4 * batch if number == 2 and stage.surprise() else batch
        for half in range(2):
            ids = _ids(stage, rows, length, 2 * number + half, config.vocab_size)
            stage.mark("forward")
            loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss / 2
            stage.mark("backward")
            loss.backward()
            del loss
        stage.mark("optimizer")
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        stage.note([m.grad for m in masters if m.grad is not None], "lora/grad")
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        stage.mark("zero_grad")
        model.zero_grad()
        optimizer.zero_grad()
    stage.mark("end")


# loops
def distillation(stage: Stage) -> Iterator[None]:
    """A frozen teacher, a student half as deep, both in autocast with a gradient scaler."""
    student, vocab, batch, length = _gpt(stage)
    teacher = copy.deepcopy(student).requires_grad_(False).eval().to(stage.device)
    del student.blocks[len(student.blocks) // 2 :]
    student.to(stage.device)
    both = nn.ModuleDict({"student": student, "teacher": teacher, "head": student.head})
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    stage.know(both, optimizer)
    kind = stage.device.partition(":")[0]

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, vocab)
        with torch.autocast(kind, dtype=torch.bfloat16):
            with torch.no_grad():
                aim = functional.softmax(teacher(ids) / 2, dim=-1)
            return functional.kl_div(functional.log_softmax(student(ids) / 2, dim=-1), aim, reduction="batchmean")

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


def averaged_vision(stage: Stage) -> Iterator[None]:
    """A vision transformer and a running average of it, which is evaluated; stochastic depth, mixed images."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
             "image_size": 32, "patch_size": 8} if stage.small else {"num_hidden_layers": 6}  # fmt: skip
    config = ViTConfig(**sizes, num_labels=1000)
    model = ViTForImageClassification(config).to(stage.device)
    stage.mark("adapters")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.requires_grad_(False)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4)
    stage.know(nn.ModuleList([model, average.module]), optimizer)
    yield
    batch = 2 if stage.small else 32
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        images = torch.rand(rows, 3, config.image_size, config.image_size).to(stage.device)
        kinds = torch.randint(0, 1000, (rows,)).to(stage.device)
        stage.mark("forward")
        images = 0.7 * images + 0.3 * images.flip(0)
        loss = functional.cross_entropy(model(images).logits, kinds, label_smoothing=0.1)
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad(set_to_none=False)
        average.update_parameters(model)
        stage.mark("eval")
        with torch.no_grad():
            average.module.eval()(images).logits.argmax(-1).eq(kinds).float().mean()
        stage.mark("between")
        del loss
    stage.mark("end")


def translation(stage: Stage) -> Iterator[None]:
    """An encoder and a decoder (T5), checkpointed, with dropout and RAdam."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "d_kv": 32} if stage.small else {
        "d_model": 1024, "d_ff": 4096, "num_layers": 4, "num_heads": 16, "d_kv": 64}  # fmt: skip
    config = T5Config(**sizes, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(stage.device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    stage.mark("adapters")
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-4)
    stage.know(model, optimizer)
    batch, length = _shape(stage, 8, 256)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, config.vocab_size)
        return model(input_ids=ids, labels=ids[:, : length // 2].contiguous()).loss

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


def contrast(stage: Stage) -> Iterator[None]:
    """Two encoders, compared all with all (CLIP), one of them convolutional."""
    width = 64 if stage.small else 512
    towers = nn.ModuleDict({
        "seen": nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                              nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "read": nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), 4),
        "words": nn.Embedding(1000 if stage.small else 32000, width),
    }).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-4, fused=not stage.small)
    stage.know(towers, optimizer)
    pixels = 32 if stage.small else 128

    def lost(rows: int, number: int) -> Any:
        images = torch.rand(rows, 3, pixels, pixels).to(stage.device)
        ids = _ids(stage, rows, 64, number, 1000)
        seen = functional.normalize(towers["seen"](images), dim=-1)
        read = functional.normalize(towers["read"](towers["words"](ids)).mean(1), dim=-1)
        scores, diagonal = seen @ read.t() * 10, torch.arange(rows, device=stage.device)
        return functional.cross_entropy(scores, diagonal) + functional.cross_entropy(scores.t(), diagonal)

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, 4 if stage.small else 256)


def recurrent(stage: Stage) -> Iterator[None]:
    """A language model of LSTMs whose state goes from batch to batch, with Adagrad."""
    width, vocab = (64, 128) if stage.small else (1024, 32000)
    parts = nn.ModuleDict({"words": nn.Embedding(vocab, width), "cells": nn.LSTM(width, width, 2, batch_first=True),
                           "head": nn.Linear(width, vocab)}).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = torch.optim.Adagrad(parts.parameters(), lr=0.01)
    stage.know(parts, optimizer)
    batch, length = _shape(stage, 32, 128)
    kept: list[Any] = [None]

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, vocab)
        if kept[0] is not None and kept[0][0].shape[1] != rows:
            kept[0] = None
        out, state = parts["cells"](parts["words"](ids), kept[0])
        kept[0] = tuple(part.detach() for part in state)
        return functional.cross_entropy(parts["head"](out).flatten(0, 1), ids.flatten())

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()

    yield from _steps(stage, lost, step, optimizer.zero_grad, batch)


def penalty(stage: Stage) -> Iterator[None]:
    """A critic with a gradient penalty: a backward pass within the forward pass, differentiated once more."""
    width, pixels, batch = (8, 16, 2) if stage.small else (128, 64, 32)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU()]
    critic = nn.Sequential(*layers, nn.Conv2d(width, 1, pixels), nn.Flatten()).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, amsgrad=True)
    stage.know(critic, optimizer)

    def lost(rows: int, number: int) -> Any:
        images = torch.rand(rows, 3, pixels, pixels).to(stage.device).requires_grad_()
        scores = critic(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return scores.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


def prompts(stage: Stage) -> Iterator[None]:
    """IA3 on a frozen 16-bit model with an 8-bit optimizer; saved tensors go to the host."""
    from peft import IA3Config, get_peft_model
    from programs import _pretrained, _train

    base = _pretrained(stage)
    base.config.use_cache = False
    stage.mark("adapters")
    model = get_peft_model(base, IA3Config(task_type="CAUSAL_LM"))
    if stage.small:
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    else:
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad])
    stage.know(model, optimizer)
    yield
    with torch.autograd.graph.save_on_cpu():
        _train(stage, model, optimizer, 4, 512)


def features(stage: Stage) -> Iterator[None]:
    """Inference: embeddings of many batches by a frozen encoder, kept in a list on the GPU, compared at the end."""
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(**(small if stage.small else {"num_hidden_layers": 6}))
    model = BertModel(config).to(stage.device, torch.float16 if not stage.small else torch.float32).eval()
    stage.mark("adapters")
    stage.know(model)
    yield
    batch, length = _shape(stage, 64, 256)
    found = []
    with torch.inference_mode():
        for number in range(6):
            rows = 4 * batch if number == 5 and stage.surprise() else batch
            ids = _ids(stage, rows, length, number, config.vocab_size)
            stage.mark("eval")
            hidden = model(input_ids=ids).last_hidden_state
            stage.mark("between")
            found.append(hidden)
            del hidden
    stage.mark("end")


def graph(stage: Stage) -> Iterator[None]:
    """Message passing over one graph by hand: gather, scatter, all nodes in every step; Rprop."""
    width, nodes = (16, 64) if stage.small else (256, 100_000)
    layers = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)]).to(stage.device)
    known = torch.randn(nodes, width).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.Rprop(layers.parameters(), lr=1e-3)
    stage.know(layers, optimizer)
    stage.note([known], "temporary/other")

    def lost(rows: int, number: int) -> Any:
        edges = torch.randint(0, nodes, (2, rows * nodes), generator=torch.Generator().manual_seed(number))
        start, end = edges.to(stage.device)
        x = known
        for layer in layers:
            sent = torch.zeros_like(x).index_add_(0, end, x[start])
            x = functional.elu(layer(torch.cat([x, sent], dim=1)))
        return (x - known).square().mean()

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, 4)


MORE: dict[str, Callable[[Any], Iterator[None]]] = {
    program.__name__: program
    for program in (
        *(sam, flat, lookahead, shampoo, half_precision, distillation, averaged_vision, translation, contrast),
        *(recurrent, penalty, prompts, features, graph),
    )
}
