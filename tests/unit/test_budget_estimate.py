"""The estimate as a whole: sums, phases, affine form, fits, advice, comparison, and the predicted snapshot."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtrace.errors import UsageError
from memtrace.estimate.advice import advise
from memtrace.estimate.against import budget_distortion, compare
from memtrace.estimate.engine.step import simulate_run
from memtrace.estimate.estimate import CATEGORIES, Estimate, estimate
from memtrace.estimate.options import RunOptions
from memtrace.estimate.predicted import snapshot, write_document
from memtrace.estimate.presets import GpuPreset, gpu_preset, model_preset
from memtrace.estimate.source import ShapeSource

H200 = gpu_preset("h200")
GIB = 1 << 30


@cache
def llama(**options: Any) -> Estimate:
    return estimate(model_preset("llama2-7b"), RunOptions(**{"sequence": 1024, **options}), H200)


def test_sums_hold() -> None:
    found = llama()
    assert tuple(found.categories) == CATEGORIES
    assert sum(found.categories.values()) == int(found.placement.reserved[found.peak_event])
    for name, size in found.categories.items():
        assert size == sum(v for k, v in found.subcategories.items() if k.startswith(f"{name}/"))
        assert size >= 0
    assert sum(term.bytes for term in found.terms) == int(found.placement.requested[found.peak_event])
    live = sum(size for name, size in found.categories.items() if name != "fragmentation")
    assert sum(term.bytes for term in found.terms) == live


def test_phases_and_what_wins() -> None:
    found = llama()
    assert set(found.phases) == {"load", "first_step", "forward", "loss", "recompute", "backward", "optimizer"}
    assert found.peak_phase == "recompute" and found.peak_site == "layers.31.mlp.down_proj: mm"
    assert found.phases["recompute"].requested_bytes == 6_043_107_720  # measured on an H200
    assert found.phases["loss"].requested_bytes == 5_771_137_424
    assert found.phases["optimizer"].requested_bytes == 5_257_314_688
    assert found.margin_over_next_bytes == (
        found.phases["recompute"].allocated_bytes - found.phases[found.next_phase].allocated_bytes
    )
    assert "recompute" not in llama(checkpointing=False).phases
    assert llama(checkpointing=False).peak_phase == "backward"


def test_affine_form_is_exact_here_and_at_neighbouring_lengths() -> None:
    form = llama().affine
    assert form.at(1024) == llama().peak_requested_bytes
    assert form.per_token_squared_bytes == 0
    for length in (1088, 960):
        other = estimate(model_preset("llama2-7b"), RunOptions(length), H200)
        assert form.at(length) == other.peak_requested_bytes
    eager = estimate(model_preset("tiny-llama"), RunOptions(512, attention="eager", checkpointing=False), H200)
    longer = estimate(model_preset("tiny-llama"), RunOptions(576, attention="eager", checkpointing=False), H200)
    assert eager.affine.per_token_squared_bytes > 0
    assert eager.affine.at(576) == pytest.approx(longer.peak_requested_bytes, abs=1)


def test_fits_and_margin() -> None:
    found = llama()
    assert found.fit.fits and found.fit.device_bytes == found.peak_reserved_bytes + found.outside_bytes
    assert found.fit.margin_bytes == found.fit.capacity_bytes - found.fit.device_bytes
    assert advise(found) == ()
    default = estimate(model_preset("tiny-llama"), RunOptions(128))
    assert default.fit.capacity_bytes == 24 * GIB
    assert any("no --gpu" in warning for warning in default.warnings)


def test_a_run_that_fits_only_when_caches_are_flushed() -> None:
    shape, options = model_preset("tiny-llama"), RunOptions(1024)
    free = estimate(shape, options, H200)
    tight = free.fit.device_bytes - 16 * 2**20
    found = estimate(shape, options, H200, tight)
    assert not found.fit.fits and found.fit.fits_when_flushed
    assert not estimate(shape, options, H200, free.outside_bytes + 64 * 2**20).fit.fits_when_flushed


def test_advice_is_sufficient_and_in_order() -> None:
    found = estimate(model_preset("tiny-llama"), RunOptions(2048, 4, checkpointing=False), H200, 4 * GIB)
    assert not found.fit.fits
    changes = advise(found)
    assert changes and [c.sufficient for c in changes] == sorted((c.sufficient for c in changes), reverse=True)
    for change in changes:
        again = estimate(model_preset("tiny-llama"), change.options, H200, 4 * GIB)
        training = [peak.requested_bytes for name, peak in again.phases.items() if name not in ("load", "first_step")]
        assert found.peak_requested_bytes - max(training) == change.saves_requested_bytes
    assert any(change.flag.startswith("--seq-len") for change in changes)


def test_advice_combines_changes_when_none_suffices_alone() -> None:
    found = estimate(model_preset("tinyllama-1.1b"), RunOptions(4096, 2, checkpointing=False), gpu_preset("t4"))
    together = [change for change in advise(found) if "together" in change.change]
    assert together and together[0].sufficient and together[0].flag.count("--") > 1


@pytest.mark.parametrize("model", ["gemma2-2b", "phi3-mini", "qwen3-4b", "llama3.2-1b"])
def test_other_families_run_and_agree_with_the_shallow_route(model: str) -> None:
    shape, options = replace(model_preset(model), layers=6), RunOptions(512, 2, prepare_kbit=False)
    found = estimate(shape, options, H200)
    training = [peak.requested_bytes for name, peak in found.phases.items() if name not in ("load", "first_step")]
    assert ShapeSource(shape).requested_peak(options, H200.device) == max(training)


def test_qk_norm_costs_what_the_reference_says() -> None:
    """+ 4q + 4kv + 4a + 4k per token and layer (fp32 inputs and one rsqrt a head)."""
    shape = replace(model_preset("qwen3-4b"), layers=2)
    plain = replace(shape, family="llama")
    options = RunOptions(256, prepare_kbit=False, checkpointing=False)
    saved = []
    for which in (shape, plain):
        stream = simulate_run(which, options, H200.device, steps=1)
        saved.append(
            sum(s for s, label in zip(stream.sizes, stream.labels, strict=True) if label == "activations/saved")
        )
    per_token = 4 * shape.query + 4 * shape.kv + 4 * shape.heads + 4 * shape.kv_heads
    assert saved[0] - saved[1] == 2 * 256 * per_token


def test_losses_in_order() -> None:
    """The fused head holds no logits, chunks hold one chunk's, the full loss 12 bytes a logit."""
    shape = model_preset("qwen2.5-0.5b")
    peaks = {
        loss: estimate(shape, RunOptions(2048, 2, loss=loss, prepare_kbit=False), H200).peak_requested_bytes
        for loss in ("full", "chunked", "fused")
    }
    assert peaks["full"] > peaks["chunked"] and peaks["full"] > peaks["fused"]
    kept = RunOptions(2048, 2, prepare_kbit=False, keep_logits=True)
    assert estimate(shape, kept, H200).peak_requested_bytes == peaks["full"] + 2 * 4096 * shape.vocabulary


def test_8bit_base_keeps_inputs_despite_checkpointing() -> None:
    """``MatMul8bitLt`` stores its input outside the saved-tensor hooks."""
    found = estimate(replace(model_preset("tiny-llama"), layers=3), RunOptions(256, quant="int8"), H200)
    assert any("outlier columns" in warning for warning in found.warnings)
    nf4 = estimate(replace(model_preset("tiny-llama"), layers=3), RunOptions(256), H200)
    assert found.categories["activations"] > nf4.categories["activations"]


def test_gpu_changes_kernels_and_workspaces() -> None:
    ampere = estimate(model_preset("tiny-llama"), RunOptions(256, prepare_kbit=False), gpu_preset("rtx3090"))
    hopper = estimate(model_preset("tiny-llama"), RunOptions(256, prepare_kbit=False), H200)
    assert (ampere.kernel, hopper.kernel) == ("flash", "cudnn")
    assert ampere.categories["runtime"] == 2 * 8_519_680
    assert any("assumed" in warning for warning in ampere.warnings)


# ---- against a recording ---------------------------------------------------------------------------------------------
def test_compare_with_itself_and_with_something_else() -> None:
    found = llama()
    peaks = {f"{name}_bytes": getattr(found, f"peak_{name}_bytes") for name in ("requested", "allocated", "reserved")}
    same: Any = SimpleNamespace(file="same", peaks=peaks, categories=found.categories, outside_allocator=None)
    against = compare(found, same)
    assert against.signed_error_bytes == 0 and against.signed_error_percent == 0
    assert all(gap.signed_error_bytes == 0 for gap in against.by_category.values())
    assert "no category differs" in against.because[0]
    same.peaks = peaks | {"allocated_bytes": found.peak_allocated_bytes // 2}
    same.categories = {"lora": 1, "unattributed": 5}
    against = compare(found, same)
    assert against.signed_error_bytes == found.peak_allocated_bytes - found.peak_allocated_bytes // 2
    assert against.by_category["unattributed"].measured_bytes == 5
    assert any(line.startswith("base_weights") for line in against.because)


def test_budget_distortion_is_nominal_minus_usable() -> None:
    found = budget_distortion(24 * GIB, GIB, {"fragmentation": 2 * GIB, "runtime": GIB, "lora": 5})
    assert found.usable_bytes == 20 * GIB and found.distortion_bytes == 4 * GIB


# ---- the predicted run as a snapshot ---------------------------------------------------------------------------------
def test_predicted_snapshot_is_read_and_replayed_exactly(tmp_path: Path) -> None:
    from memtrace.allocator.replay.replay import replay_device
    from memtrace.analysis import analyse
    from memtrace.answers.report import report
    from memtrace.history.timeline import build, choose_event
    from memtrace.snapshot.load import load

    small: GpuPreset = H200
    found = estimate(model_preset("tiny-llama"), RunOptions(256), small)
    path = tmp_path / "predicted.pickle"
    write_document(snapshot(found), path)
    loaded = load(path)
    assert loaded.memtrace["predicted"] is True and not loaded.warnings
    assert replay_device(loaded.devices[0], loaded.settings).exact
    timeline = build(loaded, loaded.devices[0])
    budget = report(analyse(timeline), choose_event(timeline, "peak"))
    assert budget.requested_bytes == sum(term.bytes for term in found.terms)
    assert budget.peaks == {
        "requested_bytes": found.peak_requested_bytes,
        "allocated_bytes": found.peak_allocated_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
    }
    for category in CATEGORIES:
        assert budget.categories[category] == found.categories[category]


def test_predicted_snapshot_holds_builtin_containers_only() -> None:
    found = estimate(replace(model_preset("tiny-llama"), layers=1), RunOptions(128), H200)
    allowed = (dict, list, tuple, str, int, float, bool, type(None))
    stack: list[Any] = [snapshot(found)]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        assert type(value) in allowed
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
    assert pickle.loads(pickle.dumps(snapshot(found)))["memtrace"]["predicted"]


def test_unwritable_target() -> None:
    found = estimate(replace(model_preset("tiny-llama"), layers=1), RunOptions(128), H200)
    with pytest.raises(UsageError, match="No such file"):
        write_document(snapshot(found), Path("/nowhere/at/all.pickle"))


def test_savings_add_up_with_what_is_missing() -> None:
    found = estimate(model_preset("tiny-llama"), RunOptions(2048, 4, checkpointing=False), H200, 4 * GIB)
    for change in advise(found):
        assert found.fit.margin_bytes + change.saves_bytes == change.margin_bytes


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"batch": 2, "checkpointing": False},
        {"keep_logits": True, "sequence": 256},
        {"hold_loss": True, "batch": 3, "sequence": 777, "reentrant": True},
        {"quant": "int8", "optimizer": "adamw_8bit"},
        {"quant": "none", "loss": "fused", "autocast": True},
        {"loss": "chunked", "prepare_kbit": False, "optimizer": "paged_adamw_8bit"},
    ],
)
def test_more_than_three_micro_batches_change_no_peak(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(model_preset("qwen2.5-0.5b"), layers=5)
    options = RunOptions(**{"sequence": 512, **setup, "accumulation": 8})
    short = estimate(shape, options)
    monkeypatch.setattr("memtrace.estimate.engine.step.MICRO_BATCHES", 8)
    whole = estimate(shape, options)
    assert len(whole.stream.events) > 1.5 * len(short.stream.events)
    for name in ("phases", "categories", "fit", "terms", "affine"):
        assert getattr(short, name) == getattr(whole, name), name
    assert any(line.startswith("3 of the 8 micro-batches") for line in short.warnings)
