"""Kinds of training that ``record_truth.py`` records beside ``programs.py`` and ``more_programs.py``: models without
attention or without layers, gradients of gradients, several models at once.

As there, what stands before the ``yield`` is there before a recording that starts late.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from more_programs import _steps
from programs import Stage, _gpt, _ids, _shape
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Scan(nn.Module):
    """A selective scan as courses write it: one step of the state a token."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.mix = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.select, self.rates = nn.Linear(2 * width, 2 * states + 1), nn.Parameter(torch.randn(2 * width, states))

    def forward(self, x: Any) -> Any:
        inner, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        inner = functional.silu(self.mix(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        pace, into, out = self.select(inner).split([1, self.rates.shape[1], self.rates.shape[1]], dim=-1)
        decay = torch.exp(-functional.softplus(pace)[..., None] * self.rates.exp())
        given = inner[..., None] * into[:, :, None]
        state, seen = torch.zeros_like(given[:, 0]), []
        for token in range(x.shape[1]):
            state = decay[:, token] * state + given[:, token]
            seen.append((state * out[:, token, None]).sum(-1))
        return x + self.leave(torch.stack(seen, dim=1) * functional.silu(gate))


def scan(stage: Stage) -> Iterator[None]:
    """A state-space language model whose loops over tokens are plain PyTorch; gradients are clipped."""
    width, vocab = (64, 256) if stage.small else (1024, 32000)
    parts = nn.ModuleDict({
        "words": nn.Embedding(vocab, width), "blocks": nn.Sequential(*(Scan(width, 8) for _ in range(3))),
        "head": nn.Linear(width, vocab, bias=False),
    }).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-4)
    stage.know(parts, optimizer)
    batch, length = _shape(stage, 8, 64)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, vocab)
        logits = parts["head"](parts["blocks"](parts["words"](ids)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def step() -> None:
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()

    yield from _steps(stage, lost, step, optimizer.zero_grad, batch)


def speech(stage: Stage) -> Iterator[None]:
    """Spectra through convolutions and a GRU, aligned by CTC; SGD with momentum, zeroed gradients that stay."""
    width, bins = (32, 16) if stage.small else (1024, 80)
    hear = nn.Sequential(nn.Conv1d(bins, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
                         nn.Conv1d(width, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU())  # fmt: skip
    parts = nn.ModuleDict({"hear": hear, "follow": nn.GRU(width, width, 2, batch_first=True, bidirectional=True),
                           "spell": nn.Linear(2 * width, 32)}).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    stage.know(parts, optimizer)

    def lost(rows: int, number: int) -> Any:
        heard = parts["hear"](torch.randn(rows, bins, 200 if stage.small else 1600).to(stage.device))
        spelt = parts["spell"](parts["follow"](heard.transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)
        aims = torch.randint(1, 32, (rows, 20), generator=torch.Generator().manual_seed(number))
        lengths = torch.full((rows,), len(spelt)), torch.full((rows,), 20)
        return functional.ctc_loss(spelt, aims.to(stage.device), *(each.to(stage.device) for each in lengths))

    def clear() -> None:
        optimizer.zero_grad(set_to_none=False)

    yield from _steps(stage, lost, optimizer.step, clear, 2 if stage.small else 32)


def detection(stage: Stage) -> Iterator[None]:
    """Three scales with a head each, anchors matched to boxes; images change their size from batch to batch."""
    width, pixels = (8, 64) if stage.small else (128, 512)
    downs = nn.ModuleList(
        nn.Sequential(nn.Conv2d(c, width, 3, 2, 1), nn.BatchNorm2d(width), nn.SiLU()) for c in (3, *[width] * 4)
    )
    ups = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
    heads = nn.ModuleList(nn.Conv2d(width, 3 * 85, 3, padding=1) for _ in range(3))
    parts = nn.ModuleList([downs, ups, heads]).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-4)
    stage.know(parts, optimizer)

    def lost(rows: int, number: int) -> Any:
        side = pixels + 32 * (number % 2)
        x = torch.rand(rows, 3, side, side).to(stage.device)
        levels = [x := down(x) for down in downs][2:]
        total: Any = 0
        for level, (up, head) in enumerate(zip(ups, heads, strict=True)):
            merged = up(levels[level])
            if level < 2:
                merged = merged + functional.interpolate(levels[level + 1], size=merged.shape[-2:])
            found = head(merged).view(rows, 3, 85, -1).transpose(2, 3)
            aims = torch.zeros_like(found[..., 4])
            aims[:, 0, ::7] = 1.0
            hit = aims > 0
            total = total + functional.binary_cross_entropy_with_logits(found[..., 4], aims)
            total = total + functional.smooth_l1_loss(found[hit][:, :4], torch.rand_like(found[hit][:, :4]))
        return total

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, 2 if stage.small else 16)


def meta(stage: Stage) -> Iterator[None]:
    """MAML: two inner steps whose gradients are differentiated, through ``functional_call``."""
    width, batch = (64, 8) if stage.small else (2048, 4096)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))
    net.to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    stage.know(net, optimizer)

    def lost(rows: int, number: int) -> Any:
        total: Any = 0
        for _task in range(2):
            x, aim = torch.randn(rows, width).to(stage.device), torch.randn(rows, 8).to(stage.device)
            fast = dict(net.named_parameters())
            for _inner in range(2):
                inner = functional.mse_loss(torch.func.functional_call(net, fast, (x,)), aim)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.01 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
            total = total + functional.mse_loss(torch.func.functional_call(net, fast, (x,)), aim)
        return total

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


def lbfgs(stage: Stage) -> Iterator[None]:
    """LBFGS calls its closure several times a step, and keeps flat directions."""
    width, batch = (64, 16) if stage.small else (2048, 4096)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    net.to(stage.device)
    x, aim = torch.randn(4 * batch, width).to(stage.device), torch.randn(4 * batch, 1).to(stage.device)
    stage.note([x, aim], "temporary/other")
    stage.mark("adapters")
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, history_size=4)
    stage.know(net, optimizer)
    yield
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch

        def lost(rows: int = rows) -> Any:
            optimizer.zero_grad()
            stage.mark("forward")
            loss = functional.mse_loss(net(x[:rows]), aim[:rows])
            stage.mark("backward")
            loss.backward()
            stage.mark("optimizer")
            return loss

        optimizer.step(lost)
        stage.mark("zero_grad")
    stage.mark("end")


def recommender(stage: Stage) -> Iterator[None]:
    """Large tables with sparse gradients under SparseAdam, a small net on top under Adam."""
    width, rows_of_table = (16, 1000) if stage.small else (128, 1_000_000)
    tables = nn.ModuleList(nn.Embedding(rows_of_table, width, sparse=True) for _ in range(2))
    top = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))
    both = nn.ModuleList([tables, top]).to(stage.device)
    stage.mark("adapters")
    optimizers = [torch.optim.SparseAdam(tables.parameters(), lr=1e-3), torch.optim.Adam(top.parameters(), lr=1e-3)]
    stage.know(both, *optimizers)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, 2, number, rows_of_table)
        score = top(torch.cat([table(ids[:, side]) for side, table in enumerate(tables)], dim=1))
        return functional.binary_cross_entropy_with_logits(score[:, 0], (ids[:, 0] % 2).float())

    def both_do(name: str) -> Callable[[], None]:
        return lambda: [getattr(optimizer, name)() for optimizer in optimizers] and None

    yield from _steps(stage, lost, both_do("step"), both_do("zero_grad"), 64 if stage.small else 65536)


def words_only(stage: Stage) -> Iterator[None]:
    """Only the embedding of a frozen language model is trained, over four batches a step (soft prompts, new tokens)."""
    model, vocab, batch, length = _gpt(stage)
    model.requires_grad_(False).to(stage.device)
    model.tokens.weight.requires_grad_(True)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW([model.tokens.weight], lr=1e-3)
    stage.know(model, optimizer)
    yield
    for step in range(3):
        for micro in range(4):
            rows = 4 * batch if step == 2 and micro == 1 and stage.surprise() else batch
            ids = _ids(stage, rows, length, 4 * step + micro, vocab)
            stage.mark("forward")
            logits = model(ids)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / 4
            stage.mark("backward")
            loss.backward()
            del loss, logits
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    stage.mark("end")


def self_taught(stage: Stage) -> Iterator[None]:
    """A student learns from a running average of itself on two views (BYOL); that is updated by hand."""
    width, pixels, batch = (16, 32, 4) if stage.small else (256, 64, 64)
    student = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.GELU(),
                            nn.Conv2d(width, 4 * width, 3, 2, 1), nn.GroupNorm(4, 4 * width), nn.GELU(),
                            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * width, 512))  # fmt: skip
    teacher = copy.deepcopy(student).requires_grad_(False).to(stage.device)
    guess = nn.Linear(512, 512).to(stage.device)
    student.to(stage.device)
    stage.mark("adapters")
    trained = nn.ModuleList([student, guess])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    stage.know(nn.ModuleList([student, guess, teacher]), optimizer)

    def lost(rows: int, number: int) -> Any:
        images = torch.rand(rows, 3, pixels, pixels).to(stage.device)
        views = images, images.flip(-1)
        with torch.no_grad():
            aims = [functional.normalize(teacher(view), dim=-1) for view in views]
        said = [functional.normalize(guess(student(view)), dim=-1) for view in views]
        return 4 - 2 * (said[0] * aims[1]).sum(-1).mean() - 2 * (said[1] * aims[0]).sum(-1).mean()

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        for slow, p in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(p, 0.01)

    yield from _steps(stage, lost, step, optimizer.zero_grad, batch)


def policy(stage: Stage) -> Iterator[None]:
    """PPO over a small net: a rollout without gradients is stored on the GPU, then three epochs over its parts."""
    seen, width, long = (16, 64, 32) if stage.small else (512, 2048, 8192)
    net = nn.ModuleDict({
        "body": nn.Sequential(nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
        "act": nn.Linear(width, 16), "value": nn.Linear(width, 1),
    }).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, eps=1e-5)
    stage.know(net, optimizer)
    yield
    for update in range(3):
        rows = 4 * long if update == 2 and stage.surprise() else long
        stage.mark("eval")
        stored: list[tuple[Any, ...]] = []
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(rows, seen).to(stage.device)
                body = net["body"](x)
                chance = torch.distributions.Categorical(logits=net["act"](body))
                action = chance.sample()
                stored.append((x, action, chance.log_prob(action), net["value"](body)[:, 0]))
                del body, chance, x, action
        stage.mark("between")
        kept = [torch.cat(column) for column in zip(*stored, strict=True)]
        stage.note(kept, "temporary/other")
        del stored
        gain = torch.randn_like(kept[3]) - kept[3]
        for _epoch in range(3):
            for part in torch.randperm(len(gain)).to(stage.device).chunk(2):
                stage.mark("forward")
                body = net["body"](kept[0][part])
                chance = torch.distributions.Categorical(logits=net["act"](body))
                ratio = (chance.log_prob(kept[1][part]) - kept[2][part]).exp()
                loss = -torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part]).mean()
                loss = loss + (net["value"](body)[:, 0] - gain[part]).square().mean() - chance.entropy().mean() / 100
                stage.mark("backward")
                loss.backward()
                del body, chance, ratio
                stage.mark("optimizer")
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                stage.mark("zero_grad")
                optimizer.zero_grad()
                del loss
    stage.mark("end")


class Rays(nn.Module):
    """A field of colours, asked at points along rays, in checkpointed pieces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, width) for n in (60, width, width, width))
        self.shade = nn.Linear(width, 4)

    def piece(self, points: Any) -> Any:
        x = torch.cat([f(points * 2**k) for k in range(10) for f in (torch.sin, torch.cos)], dim=-1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.shade(x)

    def forward(self, points: Any, pieces: int) -> Any:
        found = [checkpoint(self.piece, part, use_reentrant=False) for part in points.chunk(pieces)]
        rgb, dense = torch.cat(found).split([3, 1], dim=-1)
        alpha = 1 - torch.exp(-functional.softplus(dense))
        weight = alpha * torch.cumprod(1 - alpha + 1e-6, dim=1)
        return (weight * rgb).sum(1)


def field(stage: Stage) -> Iterator[None]:
    """A radiance field: no layers to speak of, many points, checkpointed by hand."""
    net = Rays(64 if stage.small else 256).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    stage.know(net, optimizer)

    def lost(rows: int, number: int) -> Any:
        points = torch.rand(rows, 32, 3).to(stage.device)
        return (net(points, 4) - torch.rand(rows, 3).to(stage.device)).square().mean()

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, 32 if stage.small else 8192)


def replay(stage: Stage) -> Iterator[None]:
    """DQN: a store of samples made ahead on the GPU, a target network that is overwritten now and then."""
    seen, width, store, batch = (16, 64, 256, 32) if stage.small else (1024, 2048, 65536, 4096)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(seen, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))

    net, target = make().to(stage.device), make().to(stage.device)
    target.load_state_dict(net.state_dict())
    target.requires_grad_(False)
    kept = [torch.zeros(store, seen, device=stage.device), torch.zeros(store, seen, device=stage.device)]
    stage.note(kept, "temporary/other")
    stage.mark("adapters")
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    stage.know(nn.ModuleList([net, target]), optimizer)

    def lost(rows: int, number: int) -> Any:
        if number:
            stage.mark("between")
            with torch.no_grad():
                at = torch.randint(0, store, (batch,), device=stage.device)
                kept[0][at] = torch.randn(batch, seen, device=stage.device)
                kept[1][at] = kept[0][at] + net(kept[0][at]).mean()
            stage.mark("forward")
        part = torch.randint(0, store, (rows,), device=stage.device)
        with torch.no_grad():
            aim = 1 + 0.9 * target(kept[1][part]).max(1).values
        return functional.smooth_l1_loss(net(kept[0][part]).max(1).values, aim)

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch, steps=4)


def queue(stage: Stage) -> Iterator[None]:
    """MoCo: a key encoder that follows the query's, a queue of keys as a buffer, convolutions in autocast."""
    width, pixels, long, batch = (16, 32, 64, 4) if stage.small else (128, 128, 65536, 128)
    query = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                          nn.Conv2d(width, 4 * width, 3, 2, 1), nn.BatchNorm2d(4 * width), nn.ReLU(inplace=True),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 128))  # fmt: skip
    query.to(stage.device)
    key = copy.deepcopy(query).requires_grad_(False)
    query.register_buffer("queue", functional.normalize(torch.randn(128, long, device=stage.device), dim=0))
    stage.mark("adapters")
    optimizer = torch.optim.SGD(query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    stage.know(nn.ModuleList([query, key]), optimizer)
    kind = stage.device.partition(":")[0]

    def lost(rows: int, number: int) -> Any:
        images = torch.rand(rows, 3, pixels, pixels).to(stage.device)
        with torch.autocast(kind, dtype=torch.bfloat16):
            q = functional.normalize(query(images), dim=1)
            with torch.no_grad():
                for slow, p in zip(key.parameters(), query.parameters(), strict=True):
                    slow.mul_(0.999).add_(p, alpha=0.001)
                k = functional.normalize(key(images.flip(-1)), dim=1)
            scores = torch.cat([(q * k).sum(1, keepdim=True), q @ query.queue.clone().detach()], dim=1) / 0.07
            loss = functional.cross_entropy(scores, torch.zeros(rows, dtype=torch.long, device=stage.device))
        query.queue[:, number * batch % long :][:, :rows] = k.t()[:, : long - number * batch % long].float()
        return loss

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


def private(stage: Stage) -> Iterator[None]:
    """DP-SGD: a gradient for each sample by ``vmap``, clipped, summed and noised by hand."""
    width, batch = (64, 8) if stage.small else (1024, 64)
    net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    net.to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    stage.know(net, optimizer)
    yield

    def one(params: Any, x: Any, aim: Any) -> Any:
        return functional.cross_entropy(torch.func.functional_call(net, params, (x[None],)), aim[None])

    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        x, aim = torch.randn(rows, width).to(stage.device), torch.randint(0, 10, (rows,)).to(stage.device)
        stage.mark("forward")
        params = {name: p.detach() for name, p in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(params, x, aim)
        stage.mark("backward")
        norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in each.values()]).norm(dim=0)
        share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in net.named_parameters():
            p.grad = torch.einsum("n,n...->...", share, each[name]) / rows + 0.01 * torch.randn_like(p)
        del each
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    stage.mark("end")


def functional_style(stage: Stage) -> Iterator[None]:
    """As in JAX: weights are plain tensors in a dictionary, each step makes new ones and new moments."""
    width, batch = (64, 8) if stage.small else (2048, 4096)
    weights = [torch.randn(width, width, device=stage.device) / width**0.5 for _ in range(4)]
    means = [torch.zeros_like(w) for w in weights]
    stage.mark("adapters")
    stage.note(weights, "lora/param")
    stage.note(means, "lora/optstate")
    yield

    def loss_of(weights: list[Any], x: Any) -> Any:
        y = x
        for w in weights:
            y = torch.tanh(y @ w)
        return (y - x).square().mean()

    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        x = torch.randn(rows, width).to(stage.device)
        leaves = [w.requires_grad_() for w in weights]
        stage.mark("forward")
        loss = loss_of(leaves, x)
        stage.mark("backward")
        slopes = torch.autograd.grad(loss, leaves)
        stage.note(list(slopes), "lora/grad")
        stage.mark("optimizer")
        with torch.no_grad():
            means = [0.9 * mean + 0.1 * slope for mean, slope in zip(means, slopes, strict=True)]
            weights = [w - 0.01 * mean for w, mean in zip(weights, means, strict=True)]
        stage.note(weights, "lora/param")
        stage.note(means, "lora/optstate")
        del leaves
        stage.mark("zero_grad")
        del slopes, loss
    stage.mark("end")


class Curved(torch.optim.Optimizer):
    """A step scaled by an estimate of the curvature's diagonal (Sophia, AdaHessian)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"], state["curve"] = torch.zeros_like(p), torch.zeros_like(p)
            state["mean"].lerp_(p.grad, 0.1)
            p.sub_(state["mean"] / state["curve"].clamp(min=1e-3), alpha=1e-5)

    def curvature(self, loss: Any) -> None:
        params = self.param_groups[0]["params"]
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        signs = [torch.randint_like(slope, 0, 2) * 2 - 1 for slope in slopes]
        bent = torch.autograd.grad(slopes, params, grad_outputs=signs)
        for p, sign, bend in zip(params, signs, bent, strict=True):
            if self.state[p]:
                self.state[p]["curve"].lerp_(sign * bend, 0.01)


def curved(stage: Stage) -> Iterator[None]:
    """A second-order optimizer: a Hessian's product with random signs every second step."""
    width, vocab, batch = (64, 128, 8) if stage.small else (1024, 16384, 2048)
    net = nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
                        nn.LayerNorm(width), nn.Linear(width, vocab)).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = Curved(net.parameters(), {})
    stage.know(net, optimizer)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, 2, number, vocab)
        if number == 1:
            optimizer.curvature(functional.cross_entropy(net(ids[: rows // 4, 0]), ids[: rows // 4, 1]))
        return functional.cross_entropy(net(ids[:, 0]), ids[:, 1])

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


def two_losses(stage: Stage) -> Iterator[None]:
    """One trunk, two losses, each with a backward pass of its own over a retained graph; the running average is a
    dictionary of clones."""
    width, pixels, batch = (16, 32, 4) if stage.small else (192, 96, 64)
    trunk = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU(),
                          nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU())  # fmt: skip
    heads = nn.ModuleDict({"kind": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)),
                           "depth": nn.Conv2d(width, 1, 1), "big": nn.Linear(pixels * pixels, 1024)})  # fmt: skip
    net = nn.ModuleDict({"trunk": trunk, "heads": heads}).to(stage.device)
    stage.mark("adapters")
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    stage.know(net, optimizer, states=lambda: list(average.values()))
    yield
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        images = torch.rand(rows, 3, pixels, pixels).to(stage.device)
        stage.mark("forward")
        seen = trunk(images)
        first = functional.cross_entropy(heads["kind"](seen), torch.zeros(rows, dtype=torch.long, device=stage.device))
        depth = heads["depth"](seen)
        second = heads["big"](depth.flatten(1)).square().mean() + depth.abs().mean()
        stage.mark("backward")
        first.backward(retain_graph=True)
        second.backward()
        del seen, first, second, depth
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in net.named_parameters():
                average[name].lerp_(p, 0.01)
    stage.mark("end")


def pieces(stage: Stage) -> Iterator[None]:
    """A language model whose loss is computed piece by piece, each with a backward pass to the hidden states."""
    model, vocab, batch, length = _gpt(stage)
    model.to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    stage.know(model, optimizer)
    yield
    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        ids = _ids(stage, rows, length, step, vocab)
        stage.mark("forward")
        x = model.tokens(ids) + model.places(torch.arange(length, device=ids.device))
        for block in model.blocks:
            x = block(x)
        hidden = model.norm(x)
        loose = hidden.detach().requires_grad_()
        for part, aim in zip(loose[:, :-1].chunk(4, dim=1), ids[:, 1:].chunk(4, dim=1), strict=True):
            stage.mark("forward")
            loss = (
                functional.cross_entropy(model.head(part).flatten(0, 1), aim.flatten(), reduction="sum") / ids.numel()
            )
            stage.mark("backward")
            loss.backward()
            del loss
        hidden.backward(loose.grad)
        del hidden, loose, x
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    stage.mark("end")


def boxes(stage: Stage) -> Iterator[None]:
    """torchvision's Faster R-CNN: proposals, pooled regions, four losses in a dictionary."""
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    sizes = {"min_size": 64, "max_size": 96} if stage.small else {"min_size": 512, "max_size": 768}
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=10, **sizes)
    model.to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    stage.know(model, optimizer)
    side = 64 if stage.small else 512

    def lost(rows: int, number: int) -> Any:
        images = [torch.rand(3, side, side).to(stage.device) for _ in range(rows)]
        corners = torch.tensor([[4.0, 4.0, side / 2, side / 2], [side / 4, side / 4, side - 4.0, side - 4.0]])
        aims = [{"boxes": corners.to(stage.device), "labels": torch.tensor([1, 2]).to(stage.device)} for _ in images]
        return sum(model(images, aims).values())

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, 1 if stage.small else 4)


def molecules(stage: Stage) -> Iterator[None]:
    """PyTorch Geometric's layers over batches of small graphs, pooled."""
    from torch_geometric.nn import GATv2Conv, GINConv, global_add_pool

    width, nodes = (16, 64) if stage.small else (512, 20000)
    mixed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    net = nn.ModuleList([
        nn.Embedding(100, width), GINConv(mixed),
        GATv2Conv(width, width // 4, heads=4), nn.Linear(width, 1),
    ]).to(stage.device)  # fmt: skip
    stage.mark("adapters")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    stage.know(net, optimizer)

    def lost(rows: int, number: int) -> Any:
        made = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 100, (rows * nodes,), generator=made).to(stage.device)
        edges = torch.randint(0, rows * nodes, (2, 4 * rows * nodes), generator=made).to(stage.device)
        x = net[0](ids)
        x = functional.relu(net[1](x, edges))
        x = functional.elu(net[2](x, edges))
        found = net[3](global_add_pool(x, torch.arange(rows * nodes, device=stage.device) // 20))
        return found.square().mean()

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, 4)


RARE: dict[str, Callable[[Any], Iterator[None]]] = {
    program.__name__: program
    for program in (
        *(scan, speech, detection, meta, lbfgs, recommender, words_only, self_taught, policy, field),
        *(replay, queue, private, functional_style, curved, two_losses, pieces, boxes, molecules),
    )
}
