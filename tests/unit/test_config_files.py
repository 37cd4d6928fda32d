"""Configurations of axolotl, LLaMA-Factory and torchtune, read by estimate, forecast and fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memtrace.cli import main
from memtrace.errors import MemtraceError, SnapshotError, UsageError
from memtrace.estimate.config_files import _preset_of, read_config_file
from memtrace.estimate.estimate import estimate
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import model_preset

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parent.parent / "truth" / "trainer_configs"
AXOLOTL = RunOptions(
    4096, batch=2, accumulation=4, rank=32, optimizer="paged_adamw_32bit", attention="flash", autocast=True
)
EXPECTED = {
    "axolotl.yml": ("llama3.1-8b", AXOLOTL, ("one GPU that holds all", "lora_qkv_kernel", "sample_packing")),
    "llamafactory.yaml": (
        "llama2-7b",
        RunOptions(
            2048, accumulation=8, targets=("q_proj", "v_proj"), dropout=0.0, optimizer="adamw_8bit", reentrant=True,
            prepare_kbit=False, autocast=True,
        ),
        ("use_galore",),
    ),
    "torchtune.yaml": (
        "llama2-7b",
        RunOptions(
            1024, batch=2, accumulation=16, rank=8, dropout=0.0, optimizer="adamw_torch_fused", prepare_kbit=False,
            targets=("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            adapter_dtype="bf16", loss="chunked",
        ),
        ("compile", "model code of its own"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_configuration_says(
    name: str, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of the estimate are those of the file, and what is not predicted is named."""
    monkeypatch.setattr("memtrace.estimate.advice.advise", lambda found: ())  # whose tests are elsewhere
    model, options, named = EXPECTED[name]
    found = read_config_file(FOLDER / name)
    assert found.model == model
    assert all(any(word in note for note in found.notes) for word in named)
    assert main(["estimate", "--config", str(FOLDER / name), "--json"]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert RunOptions(**said["options"] | {"targets": tuple(said["options"]["targets"])}) == options
    assert said["peak_allocated_bytes"] == estimate(model_preset(model), options).peak_allocated_bytes


def test_options_after_the_file_count_more(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    file = str(FOLDER / "torchtune.yaml")
    assert main(["estimate", "--config", file, "--seq-len", "512", "--model", "tiny-llama", "--json"]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert said["model"]["name"] == "tiny-llama" and said["options"]["sequence"] == 512
    assert said["options"]["rank"] == 8


@pytest.mark.parametrize("verb", ["forecast", "fit"])
def test_forecast_and_fit_take_it(verb: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    args = [verb, "--config", str(FOLDER / "torchtune.yaml"), "--model", "tiny-llama", "--lengths", "300,900,200,100"]
    assert main([*args, "--limit", "2GiB", "--json", *(["--no-ladder"] if verb == "fit" else [])]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert said["fits" if verb == "forecast" else "fits_as_is"] and any("compile" in n for n in said["assumptions"])


def test_parts_of_torchtune_s_model_are_read_or_told(tmp_path: Path) -> None:
    keys = yaml.safe_load((FOLDER / "torchtune.yaml").read_text())
    keys["model"] |= {"_component_": "torchtune.models.llama2.lora_llama2_7b", "quantize_base": True, "use_dora": True}
    keys["dataset"] = {"packed": True}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(keys))
    found = read_config_file(file)
    assert found.values["quant"] == "nf4-dq"
    assert any("not read" in note and "model.use_dora" in note and "lora_alpha" not in note for note in found.notes)
    assert any("dataset.packed" in note for note in found.notes)


def test_a_configuration_that_only_serves_or_exports_is_refused(tmp_path: Path) -> None:
    keys = yaml.safe_load((FOLDER / "llamafactory.yaml").read_text())
    del keys["do_train"]
    file = tmp_path / "merge.yaml"
    file.write_text(yaml.safe_dump(keys | {"export_dir": "merged"}))
    with pytest.raises(UsageError, match="do_train is not set"):
        read_config_file(file)


def test_json_is_read_like_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(yaml.safe_load((FOLDER / "axolotl.yml").read_text())))
    assert replace(read_config_file(file)).values == read_config_file(FOLDER / "axolotl.yml").values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"adapter": None}, "LoRA and QLoRA"),
        ({"rl": "dpo"}, "rl: dpo"),
        ({"optimizer": "muon"}, "optimizer: 'muon' is not covered"),
        ({"lora_r": "many"}, "lora_r"),
        ({"lora_modules_to_save": ["lm_head"]}, "trained whole"),
        ({"base_model": "TheBloke/Llama-2-7B-GPTQ"}, "weights stored as GPTQ"),
        ({"base_model": "meta-llama/Llama-2-7b_awq-4bit"}, "weights stored as awq"),
        ({"gptq": True}, "weights stored as gptq"),
        ({"base_model": None, "model": None}, "no shape"),
    ],
)
def test_other_training_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    keys = yaml.safe_load((FOLDER / "axolotl.yml").read_text()) | change
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(keys))
    if words == "no shape":
        assert read_config_file(file).model is None
        assert main(["estimate", "--config", str(file)]) == 2
        return
    with pytest.raises(UsageError, match=words):
        read_config_file(file)


# An alias of aliases of aliases: 9^24 words in one kilobyte.
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 25))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [1", SnapshotError),
        ("- 1", UsageError),
        ("x: 1", UsageError),
        ("", UsageError),
        ("[" * 999, MemtraceError),
        ("base_model: tiny-llama\nlora_r: .inf", UsageError),
        ("model: {_component_: torchtune.models.llama2.lora_llama2_7b, lora_attn_modules: 5}", MemtraceError),
        (f"base_model: tiny-llama\n{ALIASES}lora_target_modules: *a24", SnapshotError),
    ],
)
def test_files_that_are_none(text: str, error: type[MemtraceError], tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(text)
    with pytest.raises(error):
        read_config_file(file)
    with pytest.raises(SnapshotError):
        read_config_file(tmp_path / "missing.yml")
    assert main(["estimate", "--config", str(file)]) in (2, 3)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("TinyLlama/TinyLlama_v1.1", "tinyllama-1.1b"),
        ("qlora_llama3_2_1b", "llama3.2-1b"),
        ("lora_gemma2_9b", "gemma2-9b"),
        ("meta-llama/Llama-2-7b-something-else", None),
        ("mistralai/Mixtral-8x7B-v0.1", None),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
    ],
)
def test_a_model_s_name_means_a_preset_only_where_nothing_of_it_is_left(name: str, preset: str | None) -> None:
    assert _preset_of(name) == preset


def test_what_the_file_does_not_say_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = yaml.safe_load((FOLDER / "torchtune.yaml").read_text())
    del keys["tokenizer"]["max_seq_len"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(keys))
    assert main(["estimate", "--config", str(file)]) == 2
    assert "--seq-len" in capsys.readouterr().err
    assert main(["estimate", "--config", str(file), "--seq-len", "512"]) == 0
