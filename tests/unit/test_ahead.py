"""The line before step 0: what a live model, a Trainer's arguments and a data set tell is forecast as from flags."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from memtrace.allocator.config import AllocatorConfig  # noqa: E402
from memtrace.estimate.forecast import RunPlan, forecast  # noqa: E402
from memtrace.estimate.options import RunOptions  # noqa: E402
from memtrace.estimate.presets import preset_config  # noqa: E402
from memtrace.estimate.schedule import steps_of  # noqa: E402
from memtrace.estimate.shapes import shape_from_config  # noqa: E402
from memtrace.estimate.source import ShapeSource  # noqa: E402
from memtrace.record import ahead  # noqa: E402
from memtrace.record.ahead import forecast_line  # noqa: E402
from memtrace.record.launcher import after_import  # noqa: E402

KEYS = preset_config("tiny-llama") | {"num_hidden_layers": 2, "vocab_size": 8000}
LENGTHS = [300, 900, 1500, 200, 1800, 400]
GIB = 1 << 30


@pytest.fixture(scope="module")
def model() -> Any:
    keys = dict(KEYS)
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return peft.get_peft_model(plain, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def line(model: Any, limit: int, rows: Any, **args: Any) -> str:
    arguments = SimpleNamespace(per_device_train_batch_size=1, optim="sgd", max_grad_norm=1.0, **args)
    facts = {"gpu": "NVIDIA H200", "device_total_bytes": 140 * GIB, "limit_bytes": limit}
    return forecast_line(model, None, arguments, SimpleNamespace(dataset=rows, batch_size=1), facts)


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": [0] * length} for length in lengths]


def expected(limit: int, **more: Any) -> Any:
    options = RunOptions(
        2, rank=8, targets=("q_proj", "v_proj"), dropout=0.0, optimizer="sgd", quant="none", prepare_kbit=False,
        checkpointing=False, embeddings_require_grad=False, clips=True, **more,
    )  # fmt: skip
    plan = RunPlan(ShapeSource(shape_from_config(KEYS, "tiny")), options, steps_of(LENGTHS))
    return forecast(plan, AllocatorConfig(limit_bytes=limit))


def test_the_line_is_the_forecast_of_the_same_run(model: Any) -> None:
    assert line(model, GIB * 2, rows_of(LENGTHS)).startswith("fits, ")
    limit = expected(GIB * 8).peaks.allocated_bytes * 9 // 10
    found, said = expected(limit), line(model, limit, rows_of(LENGTHS))
    assert found.oom is not None
    match = re.match(r"dies in step (\d+), (\w+): ", said)
    assert match is not None and (int(match[1]), match[2]) == (found.oom.step, found.oom.phase)
    assert "helps" in said


def test_one_step_is_said_to_be_one(model: Any) -> None:
    assert "only one step was looked at" in line(model, GIB * 2, rows_of([300]))
    assert "only one step" not in line(model, GIB * 2, rows_of([300, 300]))


def test_what_is_not_there_is_said(model: Any) -> None:
    assert "does not tell its lengths" in line(model, GIB, None)
    assert "does not tell its lengths" in line(model, GIB, [{"text": "a"}])
    keys = dict(KEYS)
    plain = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    )
    assert "no adapters" in line(plain, GIB, rows_of([4, 5]))


def test_a_column_of_lengths_is_enough(model: Any) -> None:
    class Table:
        def __len__(self) -> int:
            return len(LENGTHS)

        def __getitem__(self, row: int) -> dict[str, int]:
            return {"length": LENGTHS[row]}

    assert line(model, GIB * 2, Table()) == line(model, GIB * 2, rows_of(LENGTHS))


def loader_of(lengths: list[int], sampled: str, seed: int) -> Any:
    own = torch.Generator().manual_seed(seed) if sampled == "own generator" else None
    return torch.utils.data.DataLoader(
        rows_of(lengths), batch_size=2, shuffle=sampled != "in order", generator=own, collate_fn=list
    )


@pytest.mark.parametrize("sampled", ["in order", "shuffled", "own generator"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_the_steps_are_those_that_the_loader_will_give(sampled: str, has_begun: bool) -> None:
    """Before the loader's pass begins and after; and looking moves neither it nor PyTorch's random numbers."""
    lengths = list(range(10, 31))
    loader = loader_of(lengths, sampled, 5)
    torch.manual_seed(7)
    state = ahead.RandomState.of(loader) if has_begun else None
    given = iter(loader) if has_begun else None
    first = [next(given)] if given is not None else []
    before = torch.get_rng_state()
    steps, order = ahead._steps(loader, 2, 2, 50, state)
    assert torch.equal(before, torch.get_rng_state())
    real = [
        max(len(row["input_ids"]) for row in batch) for batch in (*first, *(given if given is not None else loader))
    ]
    assert [batch.length for step in steps for batch in step] == real
    assert [len(step) for step in steps] == [2, 2, 2, 2, 2, 1]
    assert order == "the sampler's order"


def test_rows_that_are_drawn_move_nothing() -> None:
    """Data sets that change their rows at random go on as if nobody had looked."""

    class Drawn(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            return {"length": 5 + int(random.random() + np.random.rand())}

    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    rows = Drawn(range(8))
    ahead._steps(torch.utils.data.DataLoader(rows, batch_size=2), 2, 1, 4, None)
    assert (random.random(), np.random.rand()) == expected


def test_a_sampler_of_ones_own_is_not_asked() -> None:
    class Mine(torch.utils.data.RandomSampler):  # type: ignore[misc]
        pass

    rows = rows_of([10, 20, 30])
    loader = torch.utils.data.DataLoader(rows, sampler=Mine(rows), collate_fn=list)
    steps, order = ahead._steps(loader, 1, 1, 2, None)
    assert [batch.length for step in steps for batch in step] == [10, 20] and order == "the data set's order"


def answer() -> Any:
    return ahead._keeps_result(*ahead_of_call())


def ahead_of_call() -> tuple[Any, int]:
    frame = sys._getframe(2)
    return frame.f_code, frame.f_lasti


def test_what_the_loop_does_with_the_answer() -> None:
    """Held logits outlive the backward pass where a name holds the answer in the function that calls backward."""

    def keeps() -> Any:
        kept = answer()
        kept.backward if kept is None else None  # noqa: B018
        return kept

    def lets_go() -> bool:
        found: Any = answer()
        result = bool(found)
        del found
        result.backward if result is None else None  # type: ignore[attr-defined] # noqa: B018
        return result

    def helper() -> Any:
        kept = answer()
        return bool(kept)

    assert (keeps(), lets_go(), helper()) == (True, False, False)


def test_who_waits_for_an_import_waits_through_mere_look_ups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``memtrace run`` looks PyTorch's version up before the program imports it."""
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []
    for name in ("first", "second"):
        after_import("awaited_module", lambda name=name: seen.append(name))  # type: ignore[misc]
    assert importlib.util.find_spec("awaited_module") is not None and not seen
    importlib.import_module("awaited_module")
    assert sorted(seen) == ["first", "second"]
    assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_AfterImport"]
