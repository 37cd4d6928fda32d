"""The run that memtrace builds itself, on a tiny model and the stand-in: losses, recording, truth, trainer callback."""

from __future__ import annotations

import contextlib
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from capture_standin import StandIn  # noqa: E402
from tools.labelling.labels import run_of, truth  # noqa: E402
from tools.labelling.stamps import stamping  # noqa: E402

from memtrace.cli import main  # noqa: E402
from memtrace.errors import SnapshotError, UsageError  # noqa: E402
from memtrace.record import backend, checkpoint, qlora  # noqa: E402
from memtrace.record.qlora import loss_and_output  # noqa: E402

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write_checkpoint(TINY, tmp_path_factory.mktemp("model"), "cpu")


STEP = qlora.StepConfig(seq_len=32, rank=4, optim="adamw_torch", steps=2)


def test_three_losses_are_one_number(model_folder: Path) -> None:
    cfg = qlora.StepConfig(seq_len=32, quant="none", dropout=0.0)
    model = qlora.add_adapters(qlora.load_base(model_folder, cfg, "cpu"), cfg)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    losses = [float(loss_and_output(model, ids, "full")[0]), float(loss_and_output(model, ids, "chunked", 10)[0])]
    if pytest.importorskip("importlib.util").find_spec("trl") is not None:
        losses.append(float(loss_and_output(model, ids, "fused")[0]))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_recorded_run_and_its_truth(model_folder: Path, tmp_path: Path) -> None:
    runs = []
    for stamped in (False, True):
        with (
            StandIn() as stand_in,
            backend.use(stand_in),
            stamping() if stamped else contextlib.nullcontext() as stamped_log,
        ):
            file = qlora.record_run(str(model_folder), STEP, tmp_path / f"{stamped}.pickle")
        runs.append(pickle.loads(file.read_bytes()))
    assert stamped_log is not None
    labels = truth(run_of(runs[0]), run_of(runs[1]), stamped_log.as_dict(), 256, {})
    assert labels["labelled_share_of_bytes"] > 0.99
    assert labels["peak_bytes"] == runs[0]["memtrace"]["stats"]["requested_bytes.all.peak"]
    by_label: dict[str, int] = {}
    sizes = [entry["size"] for entry in runs[0]["device_traces"][0]]
    for event, label in zip(labels["event_index"], labels["label"], strict=True):
        by_label[label] = by_label.get(label, 0) + sizes[event]
    adapters = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192)) * 4  # q and o, k and v, the MLP
    assert by_label["lora/param"] >= adapters
    assert by_label["lora/optstate"] >= 2 * adapters
    assert {
        "base_weights/weight",
        "base_weights/quant_const",
        "lora/grad",
        "activations/saved",
        "temporary/loss",
    } <= set(by_label)


def test_late_recording_knows_what_was_there_before(model_folder: Path, tmp_path: Path) -> None:
    gc.collect()  # other tests' models are this process's memory too
    with StandIn() as stand_in, backend.use(stand_in):
        file = qlora.record_run(str(model_folder), STEP, tmp_path / "late.pickle", late=True)
    snapshot = pickle.loads(file.read_bytes())
    labels = snapshot["memtrace"]["labels"]
    born = {entry["addr"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"}
    before = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["address"] not in born
    }
    base = [row for row in labels if row["category"] == "base_weights"]
    assert base
    assert all(before[row["address"]] == row["bytes"] for row in base)


def test_limit_forces_the_error_into_the_file(model_folder: Path, tmp_path: Path) -> None:
    with StandIn() as stand_in, backend.use(stand_in):
        file = qlora.record_run(str(model_folder), STEP, tmp_path / "oom.pickle", cap_bytes=400_000)
    extra = pickle.loads(file.read_bytes())["memtrace"]
    assert extra["oom"]["requested_bytes"] > 0
    assert extra["limit_bytes"] == pytest.approx(400_000, abs=1)


def test_capture_verb(model_folder: Path, tmp_path: Path) -> None:
    words = ["capture", "--model", str(model_folder), "--seq-len", "32", "--rank", "4", "--eval-batches", "1"]
    words += ["--loss", "chunked", "--out", str(tmp_path / "c.pickle")]
    with StandIn() as stand_in, backend.use(stand_in):
        assert main(words) == 0
    phases = [row["name"] for row in pickle.loads((tmp_path / "c.pickle").read_bytes())["memtrace"]["phases"]]
    assert phases.count("optimizer") == 2
    assert "evaluation" in phases


def test_models_that_cannot_be_found(tmp_path: Path, model_folder: Path) -> None:
    bad = tmp_path / "config.json"
    bad.write_text("{}")
    for model, layers, says in (
        (str(bad), None, "no model_type"),
        (str(tmp_path / "none.json"), None, "none.json"),
        ("no-such-preset", None, "no model preset"),
        (str(model_folder), 2, "weights of its own"),
    ):
        with pytest.raises((UsageError, SnapshotError), match=says):
            checkpoint.find_model(model, tmp_path, layers, "cpu")


def test_every_preset_is_a_configuration() -> None:
    from transformers import AutoConfig

    from memtrace.estimate.presets import model_names, model_preset, preset_config

    for name in model_names():
        keys = preset_config(name)
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
        shape = model_preset(name)
        assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (
            shape.hidden, shape.layers, shape.vocabulary,
        )  # fmt: skip


def test_trainer_callback(model_folder: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    import memtrace

    rows = [{"input_ids": list(range(32)), "labels": list(range(32))} for _ in range(8)]
    with StandIn() as stand_in, backend.use(stand_in):
        cfg = qlora.StepConfig(quant="none", rank=4)
        model = qlora.add_adapters(qlora.load_base(model_folder, cfg, "cpu"), cfg)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        callback = memtrace.MemtraceCallback(tmp_path / "run.pickle")
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
        assert stand_in.recording is None
    extra = pickle.loads((tmp_path / "run.pickle").read_bytes())["memtrace"]
    assert [row["step"] for row in extra["phases"] if row["name"] == "forward"] == [0, 0, 1, 1]
    assert {row["subcategory"] for row in extra["labels"] if row["category"] == "lora"} == {
        "params", "grads", "optimizer_state",
    }  # fmt: skip
    assert extra["config"]["models"][0]["peft"]["default"]["r"] == 4
