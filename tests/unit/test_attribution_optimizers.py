"""Optimizers in every form that people write: parameters, gradients and states are told by what becomes of them.

Real training steps on the CPU under the allocator's stand-in, with stacks as autograd's threads leave them; the truth
is the identity of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from capture_standin import StandIn  # noqa: E402

from memtrace.attribution.categories import Purpose  # noqa: E402
from memtrace.attribution.classify import attribute  # noqa: E402
from memtrace.history.timeline import build  # noqa: E402
from memtrace.snapshot.load import from_raw  # noqa: E402

Note = Callable[[Purpose, Iterable[Any]], None]
_SMALLEST_ELEMENTS = 65  # scalars and tiny biases coincide with anything
_DISPATCH = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")


def _model() -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 8))


def _backward(model: Any, note: Note) -> Any:
    loss = torch.nn.functional.mse_loss(model(torch.randn(32, 64)), torch.randn(32, 8))
    loss.backward()
    note(Purpose.GRADS, [p.grad for p in model.parameters()])
    return loss.detach()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: two passes a step, and weights swapped for copies that the first half made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.AdamW(self.param_groups, lr=1e-3)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * 0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


def sam(note: Note) -> Iterator[None]:
    model = _model()
    optimizer = SAM(model.parameters())
    while True:
        _backward(model, note)
        optimizer.first_step()
        _backward(model, note)
        optimizer.second_step()
        note(Purpose.PARAMS, model.parameters())
        note(Purpose.OPTIMIZER_STATE, [s for st in optimizer.base.state.values() for k, s in st.items() if k != "old"])
        yield


def lbfgs(note: Note) -> Iterator[None]:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    note(Purpose.PARAMS, model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        return _backward(model, note)

    while True:
        optimizer.step(closure)
        state = next(iter(optimizer.state.values()))
        note(Purpose.OPTIMIZER_STATE, [*state["old_dirs"], *state["old_stps"], state["d"], state["prev_flat_grad"]])
        yield


@dataclass
class Moments:
    """States of a weight, replaced in each step."""

    mean: Any
    square: Any


def _stepper(params: list[Any], moments: dict[Any, Moments]) -> Callable[[], None]:
    @torch.no_grad()
    def update() -> None:
        def one(p: Any) -> None:
            state = moments.setdefault(p, Moments(torch.zeros_like(p), torch.zeros_like(p)))
            moments[p] = Moments(state.mean * 0.9 + p.grad * 0.1, state.square * 0.99 + p.grad**2 * 0.01)
            p -= 1e-3 * moments[p].mean / (moments[p].square.sqrt() + 1e-8)

        for p in params:
            one(p)
            p.grad = None

    return update


def nested_closure(note: Note) -> Iterator[None]:
    model = _model()
    moments: dict[Any, Moments] = {}
    update = _stepper(list(model.parameters()), moments)
    note(Purpose.PARAMS, model.parameters())
    while True:
        _backward(model, note)
        update()
        note(Purpose.OPTIMIZER_STATE, [tensor for m in moments.values() for tensor in (m.mean, m.square)])
        yield


def _two_moments(params: list[Any], means: list[Any], squares: list[Any], grads: list[Any]) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(means, grads, 0.1)
        torch._foreach_mul_(squares, 0.99)
        torch._foreach_addcmul_(squares, grads, grads, 0.01)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_addcdiv_(params, means, scale, -1e-3)


def made_ahead(note: Note) -> Iterator[None]:
    """Lists of states from before the first pass."""
    model = _model()
    params = list(model.parameters())
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    note(Purpose.PARAMS, params)
    note(Purpose.OPTIMIZER_STATE, means + squares)
    while True:
        _backward(model, note)
        _two_moments(params, means, squares, [p.grad for p in params])
        model.zero_grad()
        yield


def one_flat_tensor(note: Note) -> Iterator[None]:
    model = _model()
    params = list(model.parameters())
    note(Purpose.PARAMS, params)
    states: list[Any] = []
    while True:
        _backward(model, note)
        grads = torch.cat([p.grad.reshape(-1) for p in params])
        states = states or [torch.zeros_like(grads), torch.zeros_like(grads)]
        note(Purpose.OPTIMIZER_STATE, states)
        change = torch.zeros_like(grads)
        _two_moments([change], [states[0]], [states[1]], [grads])
        with torch.no_grad():
            for p, part in zip(params, change.split([p.numel() for p in params]), strict=True):
                p += part.view_as(p)
        model.zero_grad()
        yield


class Adan(torch.optim.Optimizer):
    """Three moments in place, and the last gradient replaced in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for name in "mvn" if not state else "":
                state[name] = torch.zeros_like(p)
            change = p.grad - state.get("last", p.grad)
            state["last"] = p.grad.clone()
            state["m"].lerp_(p.grad, 0.02)
            state["v"].lerp_(change, 0.08)
            state["n"].lerp_((p.grad + change) ** 2, 0.01)
            p.addcdiv_(state["m"] + state["v"], state["n"].sqrt() + 1e-8, value=-1e-3)


def adan(note: Note) -> Iterator[None]:
    model = _model()
    return _steps(model, Adan(model.parameters(), {}), note)


def averaged(note: Note) -> Iterator[None]:
    """AdamW, clipped, beside a running average of the weights."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in _steps(model, optimizer, note):
        average.update_parameters(model)
        yield


def _steps(model: Any, optimizer: Any, note: Note) -> Iterator[None]:
    note(Purpose.PARAMS, model.parameters())
    while True:
        _backward(model, note)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        note(Purpose.OPTIMIZER_STATE, [s for state in optimizer.state.values() for s in state.values()])
        yield


def _as_on_a_gpu(frames: list[dict[str, Any]], dispatched: bool) -> list[dict[str, Any]]:
    """Autograd's thread is not called from Python; without a dispatch mode its stacks are empty."""
    if not dispatched:
        frames = [frame for frame in frames if not frame["filename"].endswith(_DISPATCH)]
    names = [frame["name"] for frame in frames]
    return frames[: names.index("_engine_run_backward")] if "_engine_run_backward" in names else frames


def _wrong(program: Callable[[Note], Iterator[None]], late: bool, dispatched: bool) -> list[tuple[Any, ...]]:
    """(what it was, what is said, bytes) for each tensor that is said to be something else."""
    truth: dict[tuple[int, int], Purpose] = {}
    torch.manual_seed(0)
    with StandIn() as backend:

        def note(purpose: Purpose, tensors: Iterable[Any]) -> None:
            made = {event["addr"]: i for i, event in enumerate(backend.ring) if event["action"] == "alloc"}
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= _SMALLEST_ELEMENTS:
                    address = tensor.untyped_storage().data_ptr()
                    truth[address, made.get(address, -1)] = purpose

        steps = program(note)
        for step in range(4):
            if step == int(late):
                backend.start("python", 1 << 20)
                truth.clear()
            next(steps)
        raw = backend.snapshot()
    for event in [*raw["device_traces"][0], *(block for s in raw["segments"] for block in s["blocks"])]:
        event["frames"] = _as_on_a_gpu(event["frames"], dispatched)
    snapshot = from_raw(raw, "made")
    found = attribute(build(snapshot, snapshot.devices[0]))
    table = found.facts.timeline.allocations
    rows = {key: i for i, key in enumerate(zip(table.address.tolist(), table.alloc_event.tolist(), strict=True))}
    said = {key: found.rules[found.rule[rows[key]]] for key in truth}
    assert {Purpose.GRADS} <= set(truth.values())
    return [(truth[key], said[key].id, key) for key in truth if said[key].purpose is not truth[key]]


PROGRAMS = [sam, lbfgs, nested_closure, made_ahead, one_flat_tensor, adan, averaged]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_trained_is_found_whoever_wrote_the_optimizer(program: Any) -> None:
    assert not _wrong(program, late=False, dispatched=False)


@pytest.mark.parametrize("program", [nested_closure, adan], ids=lambda program: program.__name__)
def test_what_is_trained_is_found_in_a_recording_begun_late(program: Any) -> None:
    assert not _wrong(program, late=True, dispatched=False)


def test_a_dispatch_mode_leaves_frames_of_its_own_in_autograds_threads() -> None:
    assert not _wrong(nested_closure, late=False, dispatched=True)
