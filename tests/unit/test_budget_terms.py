"""Each term against a value worked out by hand, and against the engine's live tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tools import formulas
from tools.formulas import Symbols, backward_peak, forward_peak, optimizer_peak, symbols

from memtrace.errors import UsageError
from memtrace.estimate import terms
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.options import RunOptions
from memtrace.estimate.presets import gpu_preset, model_preset
from memtrace.estimate.stream import live_at

DEVICE = gpu_preset("h200").device
MIB = 1 << 20


def letters(model: str = "llama2-7b", **options: object) -> Symbols:
    return symbols(model_preset(model), RunOptions(**{"sequence": 1024, **options}), DEVICE)  # type: ignore[arg-type]


# Llama-2-7B: h 4096, f 11008, L 32, a = k = 32, d 128, V 32000. Elements of a layer: 4·4096² + 3·4096·11008.
LAYER = 4 * 16_777_216 + 3 * 45_088_768


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (formulas.packed_weights, 32 * LAYER // 2),
        (
            formulas.quantisation_state,
            # a 4096 × 4096 matrix: 262144 + 4·1024 + 4 + 64 + 1024; a 4096 × 11008 one: 704512 + 4·2752 + 1092
            32 * (4 * (262_144 + 4_096 + 1_092) + 3 * (704_512 + 11_008 + 1_092)),
        ),
        (formulas.quantisation_map, 1_024),
        (formulas.embedding, 524_288_000),
        (formulas.head, 524_288_000),
        (formulas.norms, 65 * 4096 * 4),
        (formulas.biases, 0),
        (formulas.plain_weights, 0),
        (formulas.rotary_buffers, 512),
        (formulas.adapters, 159_907_840),  # 39,976,960 adapter parameters, as PEFT prints them
        (formulas.gradients, 159_907_840),
        (formulas.optimizer_state, 319_815_680),
        (formulas.optimizer_temporaries, 159_907_840),
        (formulas.cublas_workspaces, 67_108_864),
        (formulas.cublaslt_workspaces, 0),
        (formulas.token_ids, 8_192),
        (formulas.position_ids, 8_192),
        (formulas.rotary_tables, 1_048_576),
        (formulas.attention_mask, 0),
        (formulas.layer_inputs, 32 * 16 * MIB),
        (formulas.final_norm, 16 * MIB + 4_096),
        (formulas.saved_norms, 2 * (16 * MIB + 4_096)),
        (formulas.saved_qkv, 3 * (20 * MIB + 65_536)),  # a dropped-out copy, a 1-byte mask, the rank-16 product
        (formulas.saved_attention, 64 * MIB + 131_072),
        (formulas.saved_output, 20 * MIB + 65_536),
        (formulas.saved_gate, 20 * MIB + 65_536 + 2 * 43 * MIB),
        (formulas.saved_up, 20 * MIB + 65_536 + 43 * MIB),
        (formulas.saved_down, 11_272_192 + 43 * MIB + 65_536),
        (formulas.log_probabilities, 131_072_000),
        (formulas.loss_gradients, 262_144_000),
    ],
)
def test_llama2_7b_by_hand(term: formulas.Formula, expected: int) -> None:
    assert term(letters()) == expected


@pytest.mark.parametrize(
    ("options", "term", "expected"),
    [
        ({"quant": "nf4"}, formulas.quantisation_state, 32 * (4 * (1_048_576 + 64) + 3 * (2_818_048 + 64))),
        ({"quant": "nf4"}, formulas.quantisation_map, 0),
        ({"quant": "int8"}, formulas.packed_weights, 32 * LAYER),
        ({"quant": "int8"}, formulas.quantisation_state, 4 * 32 * (5 * 4096 + 2 * 11008)),
        ({"quant": "none"}, formulas.plain_weights, 32 * LAYER * 4),
        ({"prepare_kbit": False}, formulas.embedding, 262_144_000),
        ({"prepare_kbit": False}, formulas.saved_attention, 4 * 8 * MIB + 131_072 + 16),  # cuDNN: 16 bits, two seeds
        ({"adapter_dtype": "bf16"}, formulas.adapters, 79_953_920),
        ({"optimizer": "adamw_torch_fused"}, formulas.optimizer_state, 319_815_680 + 4 * 14 * 32),
        ({"optimizer": "adamw_bnb"}, formulas.optimizer_state, 319_815_680),
        # 8 bits: 65,536-element matrices 2·65536 + 8·256, 176,128-element ones 2·176128 + 8·688; two maps
        (
            {"optimizer": "adamw_8bit"},
            formulas.optimizer_state,
            32 * (11 * (131_072 + 2_048) + 3 * (352_256 + 5_504)) + 2_048,
        ),
        # paged: the states of the 176,128-element matrices are in managed memory
        (
            {"optimizer": "paged_adamw_8bit"},
            formulas.optimizer_state,
            32 * (11 * (131_072 + 2_048) + 3 * 5_504) + 2_048,
        ),
        ({"optimizer": "sgd"}, formulas.optimizer_state, 0),
        ({"attention": "eager"}, formulas.attention_mask, 4 * MIB),
        ({"attention": "eager"}, formulas.saved_attention, 48 * MIB + 128 * MIB),
        ({"dropout": 0.0}, formulas.saved_qkv, 16 * MIB + 3 * 65_536),  # the three adapters share their input
        ({"targets": ("q_proj", "v_proj")}, formulas.saved_qkv, 2 * (20 * MIB + 65_536)),
        ({"targets": ("q_proj", "v_proj")}, formulas.saved_down, 0),
        ({"loss": "fused"}, formulas.log_probabilities, None),
        ({"autocast": True}, formulas.saved_gate, None),
    ],
)
def test_variants_by_hand(options: dict[str, object], term: formulas.Formula, expected: int | None) -> None:
    assert term(letters(**options)) == expected


def test_biases_and_fused_bias_products_of_qwen2() -> None:
    x = letters("qwen2-7b")
    assert formulas.biases(x) == 2 * (3584 + 2 * 512) * 28
    assert formulas.cublaslt_workspaces(x) == 2 * MIB
    assert formulas.saved_attention(x) == (12 * 3584 + 4 * 28 * 1024) * 1024  # fp32, shared heads: the math path


def test_every_group_of_live_tensors_has_its_formula() -> None:
    """Live bytes when the backward pass begins, by term, equal the formulas (no checkpointing: L times a layer)."""
    per_layer = {"norms' inputs", "qkv inputs", "attention", "o input", "gate", "up", "down input"}
    skip = {"gradients", "optimizer states", "optimizer temporaries", "gradients of the loss", "layer inputs"}
    skip |= {"position ids", "attention mask", "cuBLAS workspaces", "cuBLASLt workspaces"}
    for model in ("tiny-llama", "tinyllama-1.1b", "qwen2-7b"):
        for prepare in (True, False):
            for dropout in (0.0, 0.05):
                shape = replace(model_preset(model), layers=3)
                options = RunOptions(256, 2, dropout=dropout, prepare_kbit=prepare, checkpointing=False)
                stream = simulate_run(shape, options, DEVICE, steps=1)
                begin = next(mark.event for mark in stream.marks if mark.name == "backward")
                found: Counter[str] = Counter()
                for i in live_at(stream, begin - 1):
                    name = terms.term_name(stream.labels[i], stream.ops[i], stream.sites[i], stream.layers[i], 2)
                    name = "attention" if name == "attention matrices" else name
                    found["norms' inputs" if name == "embedding output" and prepare else name] += stream.sizes[i]
                x = symbols(shape, options, DEVICE)
                for name, formula in formulas.FORMULAS.items():
                    if name in skip:
                        continue
                    expected = (formula(x) or 0) * (3 if name in per_layer else 1)
                    assert found[name] == expected, (model, prepare, dropout, name)


def test_every_name_is_registered() -> None:
    """Whatever the engine keeps, its term is in the table."""
    for model in ("gemma2-2b", "phi3-mini", "qwen3-4b"):
        shape = replace(model_preset(model), layers=2)
        options = RunOptions(192, attention="eager", loss="fused", autocast=True)
        stream = simulate_run(shape, options, DEVICE)
        for i, label in enumerate(stream.labels):
            assert terms.term_name(label, stream.ops[i], stream.sites[i], stream.layers[i], 1) in terms.TERMS


@pytest.mark.parametrize(
    "options", [{"autocast": True}, {"loss": "fused"}, {"targets": ("q_proj",)}, {"quant": "int8"}]
)
def test_closed_peaks_refuse_what_they_do_not_cover(options: dict[str, object]) -> None:
    for peak in (forward_peak, backward_peak, optimizer_peak):
        with pytest.raises(UsageError):
            peak(letters(**options))
