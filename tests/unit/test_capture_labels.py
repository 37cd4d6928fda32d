"""Labels by identity: quantised weights and their constants, adapters, gradients, optimizer states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from memtrace.record.labels import Labels, contents, storage_of  # noqa: E402


class Packed(nn.Parameter):
    """Like bitsandbytes' ``Params4bit``: packed values and their constants."""

    quant_state: Any = None


def four_bit(rows: int, columns: int, storage: Any = torch.uint8) -> Any:
    """A packed weight with doubly quantised constants."""
    size = torch.empty(0, dtype=storage).element_size()
    weight = Packed(torch.zeros(rows * columns // 2 // size, 1, dtype=storage), requires_grad=False)
    inner = SimpleNamespace(absmax=torch.zeros(4), code=torch.zeros(256), offset=None, state2=None)
    weight.quant_state = SimpleNamespace(
        absmax=torch.zeros(rows * columns // 64, dtype=torch.uint8),
        code=torch.zeros(16),
        offset=torch.zeros(1),
        state2=inner,
    )
    return weight


class Model(nn.Module):
    """A packed layer, an adapter, a norm, tied embeddings, a buffer."""

    def __init__(self, storage: Any = torch.uint8) -> None:
        super().__init__()
        self.packed = four_bit(64, 64, storage)
        self.lora_A = nn.Linear(64, 4, bias=False)
        self.norm = nn.Parameter(torch.ones(64), requires_grad=False)
        self.embedding = nn.Parameter(torch.zeros(10, 64), requires_grad=False)
        self.head = self.embedding
        self.register_buffer("table", torch.ones(32))
        self.register_buffer("qweight", torch.ones(8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(8))


def kinds(model: Any, trained: frozenset[int] | None = None) -> dict[str, str]:
    labels = Labels("cpu")
    labels.add_model(contents(model), trained)
    return {label.name: str(label.purpose) for label in labels.values()}


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_model(storage: Any) -> None:
    assert kinds(Model(storage)) == {
        "packed": "base_weights/quantized",
        "packed.quant_state.absmax": "base_weights/quant_state",
        "packed.quant_state.code": "base_weights/quant_state",
        "packed.quant_state.offset": "base_weights/quant_state",
        "packed.quant_state.state2.absmax": "base_weights/quant_state",
        "packed.quant_state.state2.code": "base_weights/quant_state",
        "lora_A.weight": "lora/params",
        "norm": "base_weights/unquantized",
        "embedding": "base_weights/unquantized",
        "table": "base_weights/buffer",
        "qweight": "base_weights/quantized",
        "scales": "base_weights/quant_state",
    }


def test_eight_bit_constants_before_and_after_the_first_forward() -> None:
    class Int8Params(nn.Parameter):
        """As in bitsandbytes."""

    layer = nn.Module()
    layer.weight = Int8Params(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    layer.weight.SCB = torch.zeros(8)
    assert kinds(layer) == {"weight": "base_weights/quantized", "weight.SCB": "base_weights/quant_state"}
    layer.state = SimpleNamespace(SCB=layer.weight.SCB)
    layer.weight.SCB = None
    assert kinds(layer) == {"weight": "base_weights/quantized", "state.SCB": "base_weights/quant_state"}


def test_what_is_known_to_be_trained_is_whatever_requires_grad_says() -> None:
    model = Model()
    model.norm.requires_grad_(True)
    assert kinds(model)["norm"] == "lora/params"
    trained = frozenset([id(model.lora_A.weight)])
    assert kinds(model, trained)["norm"] == "base_weights/unquantized"
    assert kinds(model, frozenset([id(model.norm)]))["lora_A.weight"] == "lora/params"


def test_gradients_and_states() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), amsgrad=True)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    labels = Labels("cpu")
    labels.add_gradients(layer.named_parameters())
    grads = list(labels.values())
    assert [(label.name, label.purpose.subcategory) for label in grads] == [
        ("weight.grad", "grads"),
        ("bias.grad", "grads"),
    ]
    assert grads[0].size_bytes == 64
    names = {id(parameter): (name, parameter) for name, parameter in layer.named_parameters()}
    labels.add_optimizer(optimizer, names)
    states = {label.name for label in labels.values()}
    assert {"weight.exp_avg", "weight.exp_avg_sq", "weight.max_exp_avg_sq", "bias.exp_avg"} <= states


def test_paged_states_are_outside_the_allocator() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    paged = torch.zeros(4)
    paged.is_paged = True
    optimizer = SimpleNamespace(state={parameter: {"state1": paged, "qmap1": torch.zeros(8), "nested": {"x": [paged]}}})
    labels = Labels("cuda")
    labels.add_optimizer(optimizer, {})
    assert [(label.name, label.outside) for label in labels.values()] == [("parameter0.state1", True)]
    labels = Labels("cpu")
    labels.add_optimizer(optimizer, {id(parameter): ("p", parameter)})
    found = [(label.name, label.outside) for label in labels.values()]
    assert found == [("p.state1", True), ("p.qmap1", False)]


def test_tensors_without_memory_of_the_device_have_no_storage() -> None:
    assert storage_of(torch.empty(4, device="meta"), "cpu") is None
    assert storage_of(torch.empty(0), "cpu") is None
    assert storage_of(torch.ones(4), "cuda") is None
    assert storage_of(None, "cpu") is None
    assert storage_of(torch.eye(3).to_sparse(), "cpu") is None


def test_a_view_is_its_whole_storage() -> None:
    base = torch.zeros(100)
    assert storage_of(base[10:20], "cpu") == (base.data_ptr(), 400)
