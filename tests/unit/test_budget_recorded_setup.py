"""The estimate that `memtrace report` sets beside a recording which carries its configuration."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.estimate.presets import preset_config
from memtrace.estimate.recorded import told_by_objects

TRUTH = Path(__file__).parents[1] / "truth"

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2000,
    "quantization_config": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "_attn_implementation": "sdpa",
}  # fmt: skip
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A file like one of the recorder's: the events are predicted ones, the configuration is as the recorder writes."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    out = tmp_path / "run.pickle"
    setup = ["--seq-len", "128", "--rank", "8", "--no-prepare-kbit", "--dropout", "0.1", "--optim", "adamw_8bit"]
    assert main(["estimate", "--model", str(config), *setup, "--trace", str(out)]) == 0
    rewrite(out, recorded())
    return out


def recorded(**changes: Any) -> dict[str, Any]:
    model = {
        "class": "PeftModelForCausalLM", "config": CONFIG, "gradient_checkpointing": True,
        "peft": {"default": {"r": 8, "lora_dropout": 0.1, "target_modules": EVERY}},
    }  # fmt: skip
    return {"models": [model], "optimizers": [{"class": "AdamW8bit", "defaults": {}}]} | changes


def rewrite(file: Path, config: Any) -> None:
    snapshot = pickle.loads(file.read_bytes())
    snapshot["memtrace"]["predicted"] = False
    snapshot["memtrace"]["config"] = config
    file.write_bytes(pickle.dumps(snapshot))


def answer(file: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(["report", str(file), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["estimate"]


def test_setup_is_read_from_the_objects_and_the_tokens_from_the_trace(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = answer(recording, capsys)
    options = own["options"]
    assert (options["sequence"], options["rank"], options["optimizer"]) == (128, 8, "adamw_8bit")
    assert options["targets"] == ["all-linear"] and options["quant"] == "nf4-dq" and not options["prepare_kbit"]
    assert own["against"]["levels"]["requested"]["signed_error_bytes"] == 0
    assert own["notes"]  # that the tokens were inferred


def test_a_recorded_run_says_length_and_batch(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"seq_len": 64, "batch": 2, "prepare_kbit": False, "accumulate": 1}
    rewrite(recording, recorded(run=run))
    own = answer(recording, capsys)
    assert (own["options"]["sequence"], own["options"]["batch"], own["notes"]) == (64, 2, [])


def test_what_the_recorder_saw_of_a_run_counts(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(recording, recorded(run={"seq_len": 64, "batch": 2, "accumulate": 4, "keep_logits": True, "loss": "full"}))
    options = answer(recording, capsys)["options"]
    assert (options["batch"], options["accumulation"], options["keep_logits"]) == (2, 4, True)
    assert not options["prepare_kbit"]  # by the labels, as before


@pytest.mark.parametrize(
    "config",
    [
        None,
        5,
        {"models": 5},
        {"models": [5]},
        recorded(models=[{"config": CONFIG}]),
        recorded(models=[{"config": {"model_type": "mixtral"}, "peft": {"default": {}}}]),
        recorded(models=[{"config": CONFIG, "peft": {"default": {"r": "many", "target_modules": 3}}}]),
        recorded(models=[{"config": CONFIG | {"hidden_size": 0}, "peft": {"default": {}}}]),
        {"options": {"sequence": "long"}, "model": CONFIG},
    ],
)
def test_no_estimate_without_a_usable_configuration(
    recording: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(recording, config)
    assert answer(recording, capsys) is None


def test_a_trainers_autocast_run_of_many_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    """A plain ``Trainer(bf16=True)`` script on an H200, 16 layers of Llama-2-7B, sequences of 200 to 1,500 tokens."""
    found = answer(TRUTH / "unlabelled" / "llama2-7b-16-layers_hf-trainer-bf16.pickle.xz", capsys)
    options = found["options"]
    assert (options["autocast"], options["adapter_dtype"], options["prepare_kbit"]) == (True, "fp32", True)
    assert (options["sequence"], options["checkpointing"]) == (1174, False)
    against = found["against"]
    assert against["by_category"]["activations"]["signed_error_bytes"] == 0
    assert abs(against["levels"]["requested"]["signed_error_bytes"]) < 64 << 10
    assert abs(against["signed_error_percent"]) < 0.1


def test_dora_is_not_taken_for_plain_lora() -> None:
    model = {"config": preset_config("tiny-llama"), "peft": {"default": {"r": 8, "use_dora": True}}}
    with pytest.raises(UsageError, match="DoRA"):
        told_by_objects(model, {})
