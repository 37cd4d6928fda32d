"""Doors for trainers: accelerate's own loop with the tracker, Lightning's hooks in its order, missing packages."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from capture_standin import StandIn  # noqa: E402

import memtrace  # noqa: E402
from memtrace.errors import MissingDependencyError  # noqa: E402
from memtrace.record import backend, trainers  # noqa: E402


def recorded(file: Path) -> tuple[str, list[int]]:
    """Why the file was written, and the steps of its forward passes."""
    extra = pickle.loads(file.read_bytes())["memtrace"]
    # What other tests left behind is labelled, too.
    assert {row["subcategory"] for row in extra["labels"]} >= {"params", "grads", "optimizer_state"}
    return extra["reason"], [row["step"] for row in extra["phases"] if row["name"] == "forward"]


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    with StandIn() as stand_in, backend.use(stand_in):
        accelerator = accelerate.Accelerator(cpu=True, log_with=memtrace.AccelerateTracker(tmp_path / "run.pickle"))
        accelerator.init_trackers("project", {"rate": 1e-3})
        model = torch.nn.Linear(32, 32)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for step in range(3):
            accelerator.backward(model(torch.randn(4, 32)).square().mean())
            optimizer.step()
            accelerator.log({"loss": 1.0}, step=step)
        assert accelerator.get_tracker("memtrace", unwrap=True) is not None
        accelerator.end_training()
        assert stand_in.recording is None
    assert recorded(tmp_path / "run.pickle") == ("end", [0, 1, 2])


def test_lightnings_callback_goes_to_spawned_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = SimpleNamespace(Callback=type("Callback", (), {}))
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=base))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", base)
    monkeypatch.delitem(trainers.__dict__, "LightningCallback", raising=False)
    made = memtrace.LightningCallback(tmp_path / "run.pickle", stacks="none")
    again = pickle.loads(pickle.dumps(made))
    assert (again.path, again.options) == (made.path, made.options)
    del trainers.__dict__["LightningCallback"]


@pytest.mark.parametrize("fails", [False, True])
def test_lightning(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Trainer was run once, with Lightning 2.6; here its hooks are called as it calls them."""
    base = SimpleNamespace(Callback=type("Callback", (), {}))
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=base))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", base)
    with StandIn(capacity=1 << 20) as stand_in, backend.use(stand_in):
        callback: Any = trainers._lightning()(tmp_path / "run.pickle")
        assert isinstance(callback, base.Callback)
        model = torch.nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = SimpleNamespace(optimizers=[optimizer])
        callback.on_train_start(trainer, model)
        for _ in range(2):

            def closure() -> Any:  # forward and backward lie within the step
                loss = model(torch.randn(4, 32)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        if fails:
            with pytest.raises(torch.OutOfMemoryError) as caught:
                torch.zeros(1 << 22)
            callback.on_exception(trainer, model, caught.value)
        callback.on_train_end(trainer, model)
        assert stand_in.recording is None
    assert recorded(tmp_path / "run.pickle") == ("oom" if fails else "end", [0, 1])


@pytest.mark.parametrize(("name", "packages"), [
    ("LightningCallback", ("lightning", "lightning.pytorch", "pytorch_lightning")),
    ("AccelerateTracker", ("accelerate",)),
])  # fmt: skip
def test_missing_trainers_are_said(name: str, packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(trainers.__dict__, name, raising=False)
    for module in [each for each in sys.modules if each.split(".")[0] in packages] + list(packages):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=f"memtrace.{name} needs"):
        getattr(memtrace, name)
