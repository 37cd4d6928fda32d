"""What can't record says so in one line; the real backend asks PyTorch for the right things."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtrace.errors import MissingDependencyError
from memtrace.record import backend


def fake_torch(version: str = "2.12.0", cuda: str | None = "13.0", available: bool = True, kind: str = "native") -> Any:
    """As much of torch as the checks look at; ``calls`` notes what is asked of the recording."""
    calls: list[Any] = []
    memory = SimpleNamespace(_record_memory_history=lambda **options: calls.append(options))
    gpu = SimpleNamespace(
        is_available=lambda: available,
        get_allocator_backend=lambda: kind,
        memory=memory,
        init=lambda: calls.append("init"),
    )
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=gpu,
        _C=SimpleNamespace(_profiler=SimpleNamespace(gather_traceback=lambda **_: calls.append("probe"))),
        calls=calls,
    )


@pytest.mark.parametrize(
    ("torch", "says"),
    [
        (fake_torch("2.0.1"), "too old"),
        (fake_torch("1.13.1+cu117"), "too old"),
        (fake_torch(cuda=None), "CPU-only build"),
        (fake_torch(available=False), "no usable GPU"),
        (fake_torch(kind="cudaMallocAsync"), "cudaMallocAsync"),
    ],
)
def test_refusals(torch: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(MissingDependencyError, match=says) as caught:
        backend.CudaBackend().require()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_torch_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="needs PyTorch"):
        backend.CudaBackend().require()


def test_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch("2.16.0a0+git1"))
    backend.CudaBackend().require()


def _installed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(folder))


GOOD = "__version__ = '2.11.0+cu130'\ncuda = '13.0'\nhip = None\n"


@pytest.mark.parametrize(
    ("text", "variables", "says"),
    [
        (GOOD.replace("2.11.0", "2.0.1"), {}, "too old"),
        (GOOD.replace("'13.0'", "None"), {}, "CPU-only build"),
        (GOOD, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "keeps no history"),
        (GOOD, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "keeps no history"),
        (GOOD, {"CUDA_VISIBLE_DEVICES": ""}, "hides every GPU"),
        (GOOD, {"CUDA_VISIBLE_DEVICES": "-1"}, "hides every GPU"),
    ],
)
def test_checks_before_the_program_runs_import_nothing(
    text: str, variables: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(tmp_path, monkeypatch, text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingDependencyError, match=says):
        backend.CudaBackend().precheck()
    assert "torch" not in sys.modules


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path, monkeypatch, GOOD)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(backend, "_driver_present", lambda: False)
    with pytest.raises(MissingDependencyError, match="no NVIDIA driver"):
        backend.CudaBackend().precheck()
    monkeypatch.setattr(backend, "_driver_present", lambda: True)
    backend.CudaBackend().precheck()


def test_cuda_is_initialised_before_recording_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert backend.CudaBackend().start("all", 1000) == "all"
    assert torch.calls == ["init", {"enabled": "all", "context": "all", "stacks": "all", "max_entries": 1000}, "probe"]


def test_stacks_fall_back_where_the_unwinder_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch()

    def broken(**_: Any) -> None:
        raise RuntimeError("INTERNAL ASSERT FAILED at unwind/fde.h: NOT IN RANGE?")

    torch._C._profiler.gather_traceback = broken
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert backend.CudaBackend().start("all", 1000) == "python"
    assert [call.get("stacks", call["enabled"]) for call in torch.calls[1:]] == ["all", None, "python"]


def test_python_stacks_that_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch()

    def broken(**_: Any) -> None:
        raise RuntimeError("no")

    torch.cuda.memory._record_memory_history = broken
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError):
        backend.CudaBackend().start("python", 1000)


def test_a_program_that_stops_the_recording_is_heard_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch()
    memory, own = torch.cuda.memory, torch.cuda.memory._record_memory_history
    memory._record_memory_history = lambda *args, **options: own(**options | ({"enabled": args[0]} if args else {}))
    before = memory._record_memory_history
    monkeypatch.setitem(sys.modules, "torch", torch)
    cuda = backend.CudaBackend()
    cuda.start("python", 1000, lambda: torch.calls.append("heard"))
    memory._record_memory_history(max_entries=5)
    memory._record_memory_history(None)
    memory._record_memory_history(enabled=False)
    assert [call if isinstance(call, str) else call["enabled"] for call in torch.calls] == [
        "init", "all", "all", "heard", None, False,
    ]  # fmt: skip
    assert memory._record_memory_history is before
    cuda.start("python", 1000, lambda: torch.calls.append("heard"))
    cuda.stop()
    assert "heard" not in torch.calls[-2:]
    assert memory._record_memory_history is before


def test_versions() -> None:
    assert backend.parse_version("2.11.0+cu130") == (2, 11)
    assert backend.parse_version("1.13.1") == (1, 13)
    assert backend.parse_version("2.16.0a0+git123") == (2, 16)


@pytest.mark.parametrize(("version", "kept"), [("2.11.1+cu130", sys.version_info < (3, 13)), ("2.12.0", False)])
def test_recomputations_keep_their_errors_where_pytorch_loses_them(
    version: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    monkeypatch.setattr(checkpoint, "_recomputation_hook", checkpoint._recomputation_hook)  # put back afterwards
    monkeypatch.setattr(torch, "__version__", version)
    seen: list[Any] = []

    def block(x: Any) -> Any:
        if torch._C._current_autograd_node() is not None:
            seen.append(torch._C._current_autograd_node().metadata.get("traceback_"))
        return x.sin().exp()

    for _ in range(2):  # a second recording changes nothing
        backend._keep_errors_of_recomputations(torch)
        x = torch.ones(3, requires_grad=True)
        checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
        assert torch.allclose(x.grad, x.sin().exp() * x.cos())
    assert seen == ([[]] if kept else [None]) * 2
