"""The dry run against measured peaks, against the shape engine, and on architectures that the engine doesn't know.

``MEMTRACE_ALL_ROWS=1`` runs every measured row (some minutes).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from memtrace.cli import main
from memtrace.errors import NoAnswerError, UsageError
from memtrace.estimate.dryrun import worker
from memtrace.estimate.dryrun.source import with_layers
from memtrace.estimate.dryrun.worker import dry_run
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.estimate import categories_of, subcategories_at
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import place
from memtrace.estimate.presets import gpu_preset, model_preset, preset_config
from memtrace.estimate.stream import EMPTY_CACHE, Stream, live_at

TRUTH = Path(__file__).parent.parent / "truth" / "measured"
DEVICE = gpu_preset("h200").device
ALL = bool(os.environ.get("MEMTRACE_ALL_ROWS"))
ROWS = [
    pytest.param(row, id=f"{file.stem}-{number}")
    for file in sorted(TRUTH.glob("*_r[0-9]*.json"))
    for number, row in enumerate(json.loads(file.read_text())["rows"])
    if ALL or (number == 1 and file.stem.startswith("mistral"))  # 32 layers take seconds
]
SMALL: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 1000},
    "falcon": {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000},
    "olmo2": {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000},
    "stablelm": {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000},
    "granite": {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000},
    "cohere": {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000},
    "starcoder2": {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000},
}


def live_bytes(stream: Stream) -> np.ndarray[Any, Any]:
    """Requested bytes after every event."""
    sizes = np.array([*stream.sizes, 0], dtype=np.int64)
    events = np.array(stream.events, dtype=np.int64)
    events[events >= EMPTY_CACHE] = len(stream.sizes)
    index = np.where(events >= 0, events, ~events)
    return np.cumsum(np.where(events >= 0, sizes[index], -sizes[index]))


def step_peak(stream: Stream, step: int) -> int:
    start = next(mark.event for mark in stream.marks if mark.step == step)
    return int(live_bytes(stream)[max(start - 1, 0) :].max())


def mark_peak(stream: Stream, name: str) -> int:
    """Highest bytes in all phases of a name, 0 where there is none."""
    ends = [mark.event for mark in stream.marks[1:]] + [len(stream.events)]
    live = live_bytes(stream)
    spans = [live[mark.event : end] for mark, end in zip(stream.marks, ends, strict=True) if mark.name == name]
    return max((int(span.max()) for span in spans if len(span)), default=0)


@pytest.mark.parametrize("row", ROWS)
def test_requested_peak_of_measured_rows(row: dict[str, Any]) -> None:
    options = RunOptions(
        row["L"],
        row["B"],
        row["rank"],
        dropout=row["dropout"],
        optimizer=row["optim"],
        attention=row["attn"],
        checkpointing=row["ckpt"],
        prepare_kbit=row["prepare"],
        embeddings_require_grad=row["ckpt"],  # each ran in a process of its own
    )
    model = preset_config(row["arch"]) | {"sliding_window": None}  # the measured Mistral had no window
    measured = max(row[f"step1_{phase}"]["requested"] for phase in ("forward", "backward", "optimizer"))
    assert step_peak(dry_run(model, options, DEVICE).stream, 1) == measured


CASES = [
    ("llama2-7b", {}),
    ("mistral-7b", {"checkpointing": False, "batch": 2, "rank": 64}),
    ("mistral-7b", {"reentrant": True, "optimizer": "adamw_8bit"}),
    ("qwen2-7b", {"optimizer": "adamw_torch_fused"}),
    ("qwen3-8b", {"prepare_kbit": False, "optimizer": "paged_adamw_8bit"}),
    ("phi3-mini", {"prepare_kbit": False}),
    ("llama2-7b", {"attention": "eager", "batch": 2, "accumulation": 2}),
    ("mistral-7b", {"prepare_kbit": False, "autocast": True, "adapter_dtype": "bf16", "checkpointing": False}),
    ("llama2-7b", {"prepare_kbit": False, "quant": "none"}),
    ("llama2-7b", {"prepare_kbit": False, "quant": "none", "checkpointing": False}),
    ("llama2-7b", {"quant": "int8"}),
    ("llama2-7b", {"quant": "none", "prepare_kbit": False, "adapter_dtype": "bf16"}),
    ("llama2-7b", {"loss": "chunked", "chunk_tokens": 128, "prepare_kbit": False}),
    ("llama3.1-8b", {"loss": "chunked", "chunk_tokens": 128, "prepare_kbit": False, "quant": "none"}),
    ("llama2-7b", {"clips": True, "optimizer": "sgd"}),
    ("llama2-7b", {"batch": 2, "masked": True}),
    ("mistral-7b", {"batch": 2, "masked": True, "padded": True, "checkpointing": False}),
    ("llama2-7b", {"evaluates": True, "masked": True, "checkpointing": False, "prepare_kbit": False}),
]


@pytest.mark.parametrize(("model", "changes"), CASES, ids=lambda value: str(value))
def test_peaks_equal_those_of_the_shape_engine(model: str, changes: dict[str, Any]) -> None:
    options = RunOptions(256, **changes)
    mine = dry_run(with_layers(preset_config(model), 2), options, DEVICE).stream
    engine = simulate_run(replace(model_preset(model), layers=2), options, DEVICE)
    for step in (-1, 0, 1):
        assert step_peak(mine, step) == step_peak(engine, step)
    for mark in ("optimizer", "evaluation"):
        assert abs(mark_peak(mine, mark) - mark_peak(engine, mark)) < 1024  # norms on no card need no partial sums
    assert (mine.managed_bytes, mine.kernel) == (engine.managed_bytes, engine.kernel)


def test_flash_attention_is_taken_where_it_is_asked_for() -> None:
    """The operator also returns a number that nobody uses, which the shape engine leaves out."""
    options = RunOptions(256, prepare_kbit=False, attention="flash")
    mine = dry_run(with_layers(preset_config("mistral-7b"), 2), options, DEVICE).stream
    engine = simulate_run(replace(model_preset("mistral-7b"), layers=2), options, DEVICE)
    assert mine.kernel == engine.kernel == "flash"
    assert abs(step_peak(mine, 1) - step_peak(engine, 1)) <= 8


@pytest.mark.parametrize("quant", ["nf4-dq", "none"])
def test_fused_loss_equals_the_shape_engine(quant: str) -> None:
    pytest.importorskip("trl")
    options = RunOptions(256, loss="fused", prepare_kbit=False, quant=quant)
    mine = dry_run(with_layers(preset_config("llama2-7b"), 2), options, DEVICE).stream
    assert step_peak(mine, 1) == step_peak(
        simulate_run(replace(model_preset("llama2-7b"), layers=2), options, DEVICE), 1
    )


def test_categories_at_the_peak_equal_those_of_the_shape_engine() -> None:
    options = RunOptions(512, checkpointing=False, prepare_kbit=False)
    found = []
    for stream in (
        dry_run(with_layers(preset_config("mistral-7b"), 2), options, DEVICE).stream,
        simulate_run(replace(model_preset("mistral-7b"), layers=2), options, DEVICE),
    ):
        placement = place(stream)
        event = int(np.argmax(placement.allocated))
        found.append(categories_of(subcategories_at(stream, placement, event, live_at(stream, event))))
    mine, engine = ({k: v for k, v in entry.items() if k != "fragmentation"} for entry in found)
    assert mine == engine


@pytest.mark.parametrize("family", SMALL)
def test_architectures_that_the_engine_does_not_know(family: str) -> None:
    architecture = {"model_type": family, "num_hidden_layers": 2, **SMALL[family]}
    found = dry_run(architecture, RunOptions(64, prepare_kbit=False), DEVICE)
    live = live_bytes(found.stream)
    assert (live >= 0).all()
    assert found.trainable > 0
    # Everything that a step makes is given back: the second one ends where the first one ended.
    ends = [mark.event for mark in found.stream.marks if mark.name == "zero_grad"]
    nexts = [min(m.event for m in found.stream.marks if m.event > end) for end in ends]
    assert live[nexts[0] - 1] == live[nexts[1] - 1]
    deeper = dry_run(architecture | {"num_hidden_layers": 3}, RunOptions(64, prepare_kbit=False), DEVICE)
    assert step_peak(deeper.stream, 1) > step_peak(found.stream, 1)


def test_refusals_are_one_clear_line() -> None:
    with pytest.raises(UsageError, match="can't build"):
        dry_run({"model_type": "no-such-model"}, RunOptions(64), DEVICE)
    with pytest.raises(UsageError, match="can't build"):
        dry_run({"model_type": "t5", "num_layers": 1}, RunOptions(64), DEVICE)
    mixture = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, **SMALL["olmo2"]}
    with pytest.raises(NoAnswerError, match=r"the dry run stopped in .*: "):
        dry_run(mixture | {"num_key_value_heads": 2}, RunOptions(64), DEVICE)  # PEFT: no dropout on expert weights


CHECKPOINT = {  # what a published config.json says besides
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "auto_map": {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"},
}


def test_how_a_checkpoint_was_stored_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    plain = {"model_type": "olmo2", "num_hidden_layers": 1, **SMALL["olmo2"]}
    assert dry_run(plain | CHECKPOINT, RunOptions(64), DEVICE).stream == dry_run(plain, RunOptions(64), DEVICE).stream
    with pytest.raises(UsageError, match="no-such-model"):
        dry_run({"model_type": "no-such-model"} | CHECKPOINT, RunOptions(64), DEVICE)
    assert "[y/N]" not in "".join(capfd.readouterr())  # nobody is asked whether code may run


def test_an_interrupt_leaves_no_answer_for_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    small = {"model_type": "olmo2", "num_hidden_layers": 1, **SMALL["olmo2"]}
    expected = dry_run(small, RunOptions(32), DEVICE).stream
    asked = worker._worker(replace(DEVICE, product_rows=0))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pickle, "load", interrupted)
        dry_run(small, RunOptions(64), DEVICE)
    assert asked.returncode == 0  # it has ended, and Python has nothing to warn of
    # The new process has nothing of this one but what it can import: no path, no settings for a card.
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "no_such_key:1")
    assert dry_run(small, RunOptions(32), DEVICE).stream == expected


def test_a_step_ends_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = worker.Job({}, RunOptions(64), DEVICE, 2)
    monkeypatch.setattr(worker, "_done", lambda *_: time.sleep(60))
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as questions, io.BytesIO() as answers:
        os.close(writing)
        begun = time.monotonic()
        assert not worker._has_answered(questions, answers, job, cast(Any, None))
        assert time.monotonic() - begun < 50
    monkeypatch.setattr(worker, "_done", lambda *_: time.sleep(0.2))
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as questions, io.BytesIO() as answers, os.fdopen(writing, "wb") as more:
        more.write(b"the next question")
        more.flush()
        assert worker._has_answered(questions, answers, job, cast(Any, None))
        assert questions.read(17) == b"the next question"


def test_trace_has_real_stacks_and_report_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt_neox", "num_hidden_layers": 2, **SMALL["gpt_neox"]}))
    out = tmp_path / "dry.pickle"
    assert main(["dryrun", "--model", str(config), "--seq-len", "64", "--json", "--trace", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["report", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peaks"]["requested_bytes"] == answer["peak_requested_bytes"]
    assert report["peaks"]["allocated_bytes"] == answer["peak_allocated_bytes"]
    assert {k: v for k, v in report["categories"].items() if v} == {k: v for k, v in answer["categories"].items() if v}
    assert report["attribution"]["unattributed_bytes"] == 0
    assert sum(term["bytes"] for term in answer["terms"]) <= answer["peak_requested_bytes"]
    snapshot = pickle.loads(out.read_bytes())
    files = {frame["filename"] for entry in snapshot["device_traces"][0] for frame in entry["frames"]}
    assert any(name.endswith("gpt_neox/modeling_gpt_neox.py") for name in files)
    assert not any("capture/dryrun" in name or "_python_dispatch" in name for name in files)


def test_report_sets_the_estimate_beside_a_recorded_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000}
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, **shape}))
    out = tmp_path / "dry.pickle"
    assert main(["dryrun", "--model", str(config), "--seq-len", "64", "--json", "--trace", str(out)]) == 0
    capsys.readouterr()
    assert main(["report", str(out), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["estimate"]
    assert own["options"]["sequence"] == 64
    assert own["against"]["levels"]["requested"]["signed_error_bytes"] == 0
    assert main(["report", str(out)]) == 0
    assert "estimate distortion" in capsys.readouterr().out
