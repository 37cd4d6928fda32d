"""Model shapes from presets and config.json files, kernels by GPU, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memtrace.cli import main
from memtrace.errors import MemtraceError, SnapshotError, UsageError
from memtrace.estimate.engine.kernels import KernelDevice, attention_kernel, fused_4bit_product
from memtrace.estimate.estimate import estimate
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import gpu_names, gpu_preset, model_names, model_preset, model_shape
from memtrace.estimate.shapes import refuse_absurd, shape_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA_COUNTS = [key for key, value in LLAMA.items() if type(value) is int] + ["head_dim"]

PUBLISHED = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gemma2-9b": 9_241_705_984,
    "phi3-mini": 3_821_079_552,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert model_preset(name).parameters == parameters


def test_required_presets_exist() -> None:
    assert {"tiny-llama", *PUBLISHED} <= set(model_names())
    required = "rtx3090 rtx4090 a10 l4 t4 v100-32g a100-40g a100-80g h100 h200"
    assert set(required.split()) <= set(gpu_names())
    assert gpu_preset("H200").total_bytes > 139 << 30


def test_config_file_equals_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for where in (str(tmp_path), str(tmp_path / "config.json")):
        shape = model_shape(where)
        assert shape.linears == model_preset("llama2-7b").linears
        assert shape.parameters == PUBLISHED["llama2-7b"]


def test_families() -> None:
    qwen2 = shape_from_config({**LLAMA, "model_type": "qwen2"}, "x")
    assert qwen2.attention_bias and not qwen2.output_bias and qwen2.sliding_window is None
    qwen3 = shape_from_config({**LLAMA, "model_type": "qwen3", "head_dim": 128}, "x")
    assert qwen3.qk_norm and ("self_attn.q_norm", 128) in qwen3.norms
    gemma = shape_from_config({**LLAMA, "model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}, "x")
    assert gemma.sandwich_norms and gemma.query == 8192 and gemma.logit_softcap and gemma.sliding_window == 4096
    phi = shape_from_config({**LLAMA, "model_type": "phi3"}, "x")
    assert [name for name, *_ in phi.linears][1] == "self_attn.qkv_proj"
    no_heads = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert shape_from_config(no_heads, "x").kv_heads == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": 8, "model_type": "mixtral"}, "mixture of experts"),
        ({"num_experts": 128, "model_type": "qwen3_moe"}, "mixture of experts"),
        ({"model_type": "mamba"}, "not covered"),
        ({"model_type": None}, "not covered"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers.*True is not a whole number"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers.*out of range"),
        ({"hidden_size": 10**12}, "hidden_size.*out of range"),
        ({"vocab_size": 10**18}, "vocab_size.*out of range"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": -128}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": "x"}, "head_dim"),
        ({"hidden_size": 8}, "more than 'hidden_size' 8 has room for"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings.*neither true nor false"),
        ({"model_type": "phi3", "partial_rotary_factor": "x"}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq' format"),
        ({"num_key_value_heads": 5}, "do not divide"),
    ],
)
def test_refusals_say_why(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shape_from_config({**LLAMA, **change}, "model")


def test_null_means_the_default() -> None:
    nothing = dict.fromkeys(("head_dim", "num_key_value_heads", "attention_bias", "quantization_config"))
    assert shape_from_config({**LLAMA, **nothing}, "x") == shape_from_config(LLAMA, "x")
    stored = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert shape_from_config({**LLAMA, **stored}, "x") == shape_from_config(LLAMA, "x")


@pytest.mark.parametrize(
    ("content", "kind"),
    [("", SnapshotError), ("[]", SnapshotError), ("not json", SnapshotError), ('{"text_config": {}}', UsageError)],
)
def test_bad_config_files(tmp_path: Path, content: str, kind: type[MemtraceError]) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(kind):
        model_shape(str(path))


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "negative.json"
    path.write_text(json.dumps({**LLAMA, "hidden_size": -1}))
    with pytest.raises(UsageError, match=r"negative\.json: .*hidden_size"):
        model_shape(str(path))
    with pytest.raises(SnapshotError, match=r"nothing\.json: No such file or directory$"):
        model_shape(str(tmp_path / "nothing.json"))


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert model_shape(str(path)).parameters == PUBLISHED["llama2-7b"]


def test_unknown_names() -> None:
    for call in (lambda: model_shape("llama9"), lambda: gpu_preset("tpu"), lambda: model_shape("")):
        with pytest.raises(UsageError):
            call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 1_000_000}, "tokens a micro-batch"),
        ({"sequence": 1 << 30}, "tokens a micro-batch"),
        ({"rank": 10_000_000}, "rank"),
        ({"accumulation": 1_000_000_000}, "accumulation"),
        ({"loss": "chunked", "chunk_tokens": 1, "sequence": 100_000}, "chunks of the loss"),
        ({"attention": "eager", "sequence": 9_000_000}, "more than any device"),
    ],
)
def test_what_no_run_reaches_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(model_preset("tiny-llama"), RunOptions(**{"sequence": 512, **options}))


@pytest.mark.parametrize(
    "bad",
    [
        {"sequence": 0},
        {"batch": -1},
        {"rank": 0},
        {"dropout": 1.0},
        {"optimizer": "lion"},
        {"attention": "xformers"},
        {"loss": "mse"},
        {"quant": "fp4x"},
        {"adapter_dtype": "fp8"},
        {"sequence": 1},
        {"accumulation": 0},
    ],
)
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RunOptions(**{"sequence": 128, **bad})


def test_unknown_target_layer() -> None:
    with pytest.raises(UsageError, match="no layer"):
        RunOptions(128, targets=("query_key_value",)).adapted(model_preset("llama2-7b"))


def test_the_fused_4bit_product_on_an_h200() -> None:
    """The cases measured: every 7B product dequantises; a 1376 × 512 weight at 256 tokens is fused."""
    device = gpu_preset("h200").device
    assert not fused_4bit_product(device, 512, 4096, 4096)
    assert fused_4bit_product(device, 4, 4096, 4096)
    assert fused_4bit_product(device, 256, 1376, 512)
    assert not fused_4bit_product(device, 256, 512, 1376)
    assert not fused_4bit_product(device, 2048, 1376, 512)
    assert not fused_4bit_product(device, 4, 4096, 4095)


@pytest.mark.parametrize(
    ("capability", "requested", "width", "shared", "kernel"),
    [
        ((9, 0), "sdpa", 4, False, "efficient"),
        ((9, 0), "sdpa", 4, True, "math"),
        ((9, 0), "sdpa", 2, True, "cudnn"),
        ((8, 9), "sdpa", 2, True, "flash"),
        ((7, 5), "sdpa", 2, False, "efficient"),
        ((9, 0), "eager", 2, True, "eager"),
        ((9, 0), "flash", 2, True, "flash"),
    ],
)
def test_attention_kernels(capability: tuple[int, int], requested: str, width: int, shared: bool, kernel: str) -> None:
    assert attention_kernel(KernelDevice(capability, 100), requested, width, shared, 128) == kernel


def test_workspace_by_capability() -> None:
    assert gpu_preset("h100").device.cublas_workspace_bytes == 32 << 20
    assert gpu_preset("rtx4090").device.cublas_workspace_bytes == 8_519_680


@pytest.mark.parametrize("key", [*LLAMA_COUNTS, "n_layer", "n_embd", "num_experts", "max_position_embeddings"])
@pytest.mark.parametrize("nested", [False, True])
def test_estimate_and_dryrun_refuse_the_same_absurd_numbers(key: str, nested: bool, tmp_path: Path) -> None:
    change: dict[str, Any] = {key: 10**13}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | ({"text_config": change} if nested else change)))
    for verb in ("estimate", "dryrun"):
        if verb == "estimate" and (nested or key not in LLAMA_COUNTS):
            continue  # it reads only what it knows
        if verb == "dryrun":
            pytest.importorskip("torch")
            pytest.importorskip("transformers")
        assert main([verb, "--model", str(file), "--seq-len", "64", "--batch", "1"]) == 2
    with pytest.raises(UsageError, match=f"{key}.*out of range"):
        refuse_absurd(json.loads(file.read_text()), str(file))


@pytest.mark.parametrize("value", [-64, "512", 512.5, True, 0])
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_no_count_is_refused_by_both_before_any_work(value: object, nested: bool, tmp_path: Path) -> None:
    change = {"hidden_size": value}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | ({"text_config": change} if nested else change)))
    with pytest.raises(UsageError, match="not a whole number above 0"):
        refuse_absurd(json.loads(file.read_text()), str(file))
    if not nested:
        assert main(["estimate", "--model", str(file), "--seq-len", "64", "--batch", "1"]) == 2
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert main(["dryrun", "--model", str(file), "--seq-len", "64", "--batch", "1"]) == 2


def test_counts_that_some_architectures_leave_open_are_left_to_them() -> None:
    refuse_absurd({"num_experts": 0, "intermediate_size": [64, 128], "num_key_value_heads": None, "n_layer": 1}, "here")
