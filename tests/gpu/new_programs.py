"""Kinds of training that ``record_truth.py`` records beside ``rare_programs.py``: models that grow, that are trained
without backward passes, or whose backward passes are programs of their own.

As there, what stands before the ``yield`` is there before a recording that starts late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from more_programs import _steps
from programs import Stage, _gpt, _ids
from torch import nn
from torch.nn import functional


def splats(stage: Stage) -> Iterator[None]:
    """Gaussian splatting: points are split after each step, so weights and Adam's states are put together anew."""
    count, side = (256, 16) if stage.small else (200_000, 64)
    wide = {"place": 2, "size": 2, "colour": 48, "dense": 1}
    points = {name: nn.Parameter(torch.randn(count, n, device=stage.device)) for name, n in wide.items()}
    stage.mark("adapters")
    optimizer = torch.optim.Adam([{"params": [p], "name": name} for name, p in points.items()], lr=1e-3, eps=1e-15)
    net = nn.ParameterDict(points)
    stage.know(net, optimizer)
    yield
    for step in range(4):
        rows = 4 * side if step == 3 and stage.surprise() else side
        stage.mark("forward")
        seen = torch.zeros(rows, 3, device=stage.device)
        for row in torch.linspace(-1, 1, rows, device=stage.device).split(8):
            near = torch.exp(-((points["place"][:, :1] - row) ** 2) * points["size"][:, :1].exp())
            near = near * torch.sigmoid(points["dense"])
            seen = seen + functional.pad(near.t() @ points["colour"][:, :3], (0, 0, 0, rows - len(row)))
        loss = (seen - torch.rand(rows, 3, device=stage.device)).abs().mean() + points["colour"].square().mean()
        stage.mark("backward")
        loss.backward()
        del loss, seen, near
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad(set_to_none=True)
        stage.mark("between")
        chosen = torch.arange(0, len(points["place"]), 8, device=stage.device)
        for group in optimizer.param_groups:
            old, name = group["params"][0], group["name"]
            state = optimizer.state.pop(old)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][chosen])])
            points[name] = nn.Parameter(torch.cat([old.detach(), old.detach()[chosen]]))
            net[name] = points[name]
            group["params"][0] = points[name]
            optimizer.state[points[name]] = state
            del old, state
        stage.know(net)
    stage.mark("end")


def zeroth(stage: Stage) -> Iterator[None]:
    """MeZO: two forward passes a step under ``no_grad``; weights move along seeded noise, and no gradient exists."""
    model, vocab, batch, length = _gpt(stage)
    model.requires_grad_(False).to(stage.device)
    stage.mark("adapters")
    stage.know(model)
    yield

    def move(seed: int, scale: float) -> None:
        made = torch.Generator(stage.device).manual_seed(seed)
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=made, device=p.device), alpha=scale)

    for step in range(3):
        rows = 4 * batch if step == 2 and stage.surprise() else batch
        ids = _ids(stage, rows, length, step, vocab)
        found = []
        for scale in (1e-3, -2e-3):
            move(step, scale)
            stage.mark("eval")
            logits = model(ids)
            found.append(functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
            del logits
            stage.mark("between")
        move(step, 1e-3 - 1e-2 * float(found[0] - found[1]))
        del ids, found
    stage.mark("end")


def sparse_codes(stage: Stage) -> Iterator[None]:
    """A sparse autoencoder learns from a frozen language model's hidden states, which a store on the GPU holds; the
    decoder's columns are normalised by hand."""
    model, vocab, batch, length = _gpt(stage)
    model.requires_grad_(False).to(stage.device)
    width, wide = (64, 256) if stage.small else (1024, 16384)
    codes = nn.ModuleDict({"enter": nn.Linear(width, wide), "leave": nn.Linear(wide, width)}).to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.Adam(codes.parameters(), lr=1e-4, betas=(0.0, 0.999))
    stage.know(nn.ModuleList([codes, model]), optimizer)
    yield
    for step in range(4):
        if step % 2 == 0:
            stage.mark("eval")
            kept = []
            with torch.no_grad():
                for part in range(4):
                    x = model.tokens(_ids(stage, batch, length, 4 * step + part, vocab))
                    for block in list(model.blocks)[:2]:
                        x = block(x)
                    kept.append(x.flatten(0, 1))
                del x
            stage.mark("between")
            store = torch.cat(kept)
            del kept
            stage.note([store], "temporary/other")
        rows = 4 * batch * length if step == 3 and stage.surprise() else batch * length
        stage.mark("forward")
        x = store[torch.randint(0, len(store), (rows,), device=stage.device)]
        best = functional.relu(codes["enter"](x - codes["leave"].bias)).topk(32, dim=-1)
        sparse = torch.zeros(rows, wide, device=stage.device).scatter(-1, best.indices, best.values)
        loss = (codes["leave"](sparse) - x).square().sum(-1).mean()
        stage.mark("backward")
        loss.backward()
        del x, best, sparse, loss
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
        with torch.no_grad():
            codes["leave"].weight.div_(codes["leave"].weight.norm(dim=0, keepdim=True))
    stage.mark("end")


class LowRank(nn.Module):
    """A weight that is computed: the frozen one and a product."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(8, columns) / 8), nn.Parameter(torch.zeros(rows, 8))

    def forward(self, weight: Any) -> Any:
        return weight + self.up @ self.down


def parametrised(stage: Stage) -> Iterator[None]:
    """LoRA by ``torch.nn.utils.parametrize``: each call of a layer computes its whole weight."""
    from torch.nn.utils import parametrize

    model, vocab, batch, length = _gpt(stage)
    model.requires_grad_(False)
    for layer in [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]:
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    for part in [m for m in model.modules() if isinstance(m, LowRank)]:
        part.requires_grad_(True)
    model.to(stage.device)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    stage.know(model, optimizer)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, vocab)
        logits = model(ids)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


class Adjoint(torch.autograd.Function):
    """Euler's steps of a differential equation; backward integrates back, with gradients of its own at each step."""

    @staticmethod
    def forward(ctx: Any, x: Any, change: Any, *params: Any) -> Any:
        ctx.change = change
        with torch.no_grad():
            for _ in range(8):
                x = x + change(x) / 8
        ctx.save_for_backward(x, *params)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        x, *params = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in params]
        for _ in range(8):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                moved = ctx.change(x) / 8
                found = torch.autograd.grad(moved, [x, *params], slope)
            x, slope = x - moved.detach(), slope + found[0]
            for total, more in zip(sums, found[1:], strict=True):
                total.add_(more)
        return slope, None, *sums


def ode(stage: Stage) -> Iterator[None]:
    """A neural differential equation whose gradients come from a second one (the adjoint's method)."""
    width, batch = (64, 8) if stage.small else (2048, 4096)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(stage.device)
    head = nn.Linear(width, 10).to(stage.device)
    stage.mark("adapters")
    both = nn.ModuleList([net, head])
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-4)
    stage.know(both, optimizer)

    def lost(rows: int, number: int) -> Any:
        x = torch.randn(rows, width).to(stage.device)
        aim = torch.randint(0, 10, (rows,)).to(stage.device)
        return functional.cross_entropy(head(Adjoint.apply(x, net, *net.parameters())), aim)

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


class Projected(torch.optim.Optimizer):
    """GaLore: gradients of matrices go to a few directions, which a decomposition finds anew now and then."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state, slope = self.state[p], p.grad
            is_matrix = p.ndim == 2 and min(p.shape) > 64
            if is_matrix:
                if state.get("count", 0) % 2 == 0:
                    state["directions"] = torch.svd_lowrank(slope.float(), 32)[0].contiguous()
                state["count"] = state.get("count", 0) + 1
                slope = state["directions"].t() @ slope
            if "mean" not in state:
                state["mean"], state["square"] = torch.zeros_like(slope), torch.zeros_like(slope)
            state["mean"].lerp_(slope, 0.1)
            state["square"].lerp_(slope * slope, 0.01)
            change = state["mean"] / (state["square"].sqrt() + 1e-8)
            p.sub_(state["directions"] @ change if is_matrix else change, alpha=1e-3)


def projected(stage: Stage) -> Iterator[None]:
    """Full training under GaLore, each gradient given up once it is used."""
    model, vocab, batch, length = _gpt(stage)
    model.to(stage.device)
    stage.mark("adapters")
    optimizer = Projected(model.parameters(), {})
    stage.know(model, optimizer)

    def lost(rows: int, number: int) -> Any:
        ids = _ids(stage, rows, length, number, vocab)
        logits = model(ids)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    yield from _steps(stage, lost, optimizer.step, optimizer.zero_grad, batch)


NEW: dict[str, Callable[[Any], Iterator[None]]] = {
    program.__name__: program for program in (splats, zeroth, sparse_codes, parametrised, ode, projected)
}
