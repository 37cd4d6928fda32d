"""Detectors on made-up runs: each fires on what it is for, with the right bytes, and is silent on everything else."""

from __future__ import annotations

import pytest
from support import ROOT
from toy_run import COPY, EVALUATE, LOADER, MIB, PACK, Run, Toy, root, trained

from memtrace.explain.answer import Explanation, Finding
from memtrace.explain.detectors import DETECTORS
from memtrace.explain.explain import explain_snapshot
from memtrace.explain.traceback import CAUSES
from memtrace.history.timeline import At

PLAIN = {"checkpointing": True, "logits": 2 * MIB}


def explained(run: Run | Toy) -> Explanation:
    return explain_snapshot((run.run if isinstance(run, Toy) else run).analysis())


def found(answer: Explanation) -> dict[str, Finding]:
    return {finding.id: finding for finding in answer.findings}


def refused(toy: Toy, scale: float = 1.0) -> Explanation:
    """Run one more step until a request is refused."""
    with pytest.raises(MemoryError):
        toy.step(scale)
    return explained(toy)


def test_a_modest_run_has_no_cause_for_complaint() -> None:
    answer = explained(trained(**PLAIN, adapter=64 << 10))
    assert answer.verdict == "no_oom"
    assert not found(answer).keys() - {"reserved_in_pieces"}


def test_layers_kept_whole() -> None:
    one = found(explained(trained(layers=8)))["checkpointing_inactive"]
    assert one.bytes == 8 * 5 * 8 * MIB  # four activations of a layer, one of them twice as wide
    assert "no checkpointing frame" in one.evidence and "8 layers" in one.evidence
    assert "checkpointing_inactive" not in found(explained(trained(layers=8, checkpointing=True)))


def test_logits_of_the_whole_vocabulary() -> None:
    one = found(explained(trained(checkpointing=True, logits=64 * MIB)))["logits_unchunked"]
    assert one.bytes == 3 * 64 * MIB  # the saved log-softmax and two gradients
    assert "logits_unchunked" not in found(explained(trained(**PLAIN)))


def test_logits_that_the_caller_holds() -> None:
    one = found(explained(trained(checkpointing=True, keep_logits=True)))["kept_logits"]
    assert one.bytes == 24 * MIB
    assert "kept_logits" not in found(explained(trained(checkpointing=True)))


def test_attention_matrices_of_the_eager_implementation() -> None:
    one = found(explained(trained(eager=True)))["attention_matrices"]
    assert one.bytes == 6 * 32 * MIB
    assert "eager" in one.evidence and "sdpa" in one.advice[0].change
    assert "attention_matrices" not in found(explained(trained()))


def test_flash_attention_is_not_recommended_to_an_old_gpu() -> None:
    toy = trained(eager=True)
    toy.run.extra = {"version": 1, "capability": [7, 5]}
    change = found(explained(toy))["attention_matrices"].advice[0].change
    assert "flash_attention_2" not in change and "Ampere" in change


def test_base_in_sixteen_bits() -> None:
    one = found(explained(trained(quantized=False, **PLAIN)))["base_not_quantized"]
    assert one.bytes == 12 * 16 * MIB
    assert one.advice[0].saves_bytes == round(12 * 16 * MIB * (1 - (0.5 + 1 / 64 + 1 / 4096) / 2))
    assert "base_not_quantized" not in found(explained(trained(**PLAIN)))


def test_embeddings_and_head_in_32_bits() -> None:
    one = found(explained(trained(upcast=True, **PLAIN)))["fp32_upcast_head"]
    assert one.bytes == 2 * 48 * MIB and one.advice[0].saves_bytes == 48 * MIB
    assert "fp32_upcast_head" not in found(explained(trained(**PLAIN)))


def test_adapters_in_32_bits_show_by_their_dropout_masks() -> None:
    one = found(explained(trained(dropout=True)))["fp32_lora_branch"]
    assert one.bytes == 6 * 8 * MIB
    assert "lora_dropout=0" in " ".join(advice.change for advice in one.advice)
    assert "fp32_lora_branch" not in found(explained(trained()))


def test_reference_model() -> None:
    one = found(explained(trained(reference=True, **PLAIN)))["reference_model_copy"]
    assert one.bytes == 2 * 24 * MIB + 12 * (4 * MIB + MIB // 8)
    assert "reference_model_copy" not in found(explained(trained(**PLAIN)))


def test_two_loads_from_one_line_are_told_by_their_sequence() -> None:
    toy = Toy(**PLAIN).load().load().adapters()
    toy.step()
    assert "same sequence" in found(explained(toy))["reference_model_copy"].evidence


def test_growth_needs_steps_that_all_leave_something() -> None:
    leaking = found(explained(trained(steps=8, keep_loss=True, checkpointing=True)))["growth_across_steps"]
    assert leaking.bytes == 2 * 8 * MIB and leaking.per_step
    assert leaking.advice[0].saves_bytes == 6 * 16 * MIB  # the first and the unfinished step are left out
    assert "growth_across_steps" not in found(explained(trained(steps=8, checkpointing=True)))
    assert "growth_across_steps" not in found(explained(trained(steps=2, keep_loss=True)))


def test_lengths_that_vary_leave_pieces() -> None:
    toy = Toy(checkpointing=True).load().adapters()
    for scale in (1, 2, 0.7, 1.3, 0.5, 1.7, 0.9, 2.1):
        toy.step(scale)
    one = found(explained(toy))
    peaks = toy.run.analysis().timeline.peaks()
    assert one["variable_length_fragmentation"].bytes == peaks[2].size_bytes - peaks[1].size_bytes
    assert "reserved_in_pieces" not in one
    assert "variable_length_fragmentation" not in found(explained(trained(steps=8)))


def test_a_batch_longer_than_the_others() -> None:
    toy = Toy(run=Run(limit=1 << 30)).load().adapters()
    for scale in (1, 1.1, 0.9, 1):
        toy.step(scale)
    answer = refused(toy, 3)
    one = found(answer)["padding_or_packing"]
    assert "longest of 5" in one.evidence and answer.when is not None and answer.when.step == 4
    assert "padding_or_packing" not in found(explained(trained(steps=6)))


def test_outputs_of_an_evaluation_pile_up() -> None:
    answer = explained(trained(**{**PLAIN, "logits": 24 * MIB}).evaluate(12))
    one = found(answer)["eval_peak"]
    assert answer.when is not None and answer.when.phase == "evaluation"
    assert "12 tensors of logits" in one.evidence or "13 tensors of logits" in one.evidence
    assert "prediction_loss_only" in one.advice[0].change
    assert "eval_peak" not in found(explained(trained(steps=3, **PLAIN)))


def test_an_evaluation_of_ones_own_is_told_by_its_passes() -> None:
    toy = trained(checkpointing=True)
    for _ in range(8):  # no trainer's frames: only that the head runs again and again without a backward pass
        held, loss, _ = toy.forward()
        toy.run.free(*held, *loss, at=root(20))
    answer = explained(toy)
    assert answer.when is not None and answer.when.phase == "evaluation" and "eval_peak" in found(answer)


def test_states_in_full_precision() -> None:
    one = found(explained(trained(**PLAIN)))["optimizer_full_precision"]
    assert one.bytes == 2 * 12 * 2 * MIB and "2.0 times" in one.evidence
    assert "optimizer_full_precision" not in found(explained(trained(optimizer=False, **PLAIN)))


def test_states_that_appear_with_the_first_step() -> None:
    free = trained(steps=1, adapter=10 * MIB, checkpointing=True, optimizer=False)
    reserved = free.run.analysis().timeline.peaks()[2].size_bytes  # a pass fits, the states of the first step don't
    toy = Toy(run=Run(limit=reserved + 60 * MIB), adapter=10 * MIB, checkpointing=True).load().adapters()
    answer = refused(toy)
    assert answer.when is not None and answer.when.phase == "optimizer" and answer.when.first_step
    one = found(answer)["optimizer_on_first_step"]
    assert one.bytes is not None and one.bytes % (10 * MIB) == 0 and one.bytes >= 60 * MIB
    assert answer.verdict == "budget"


def test_copies_made_while_loading() -> None:
    run = Run(limit=100 * MIB)
    with pytest.raises(MemoryError):
        for _ in range(3):
            run.alloc(32 * MIB, COPY, LOADER, *root(5))
            run.alloc(8 * MIB, PACK, LOADER, *root(5))
    answer = explained(run)
    assert answer.when is not None and answer.when.phase == "load" and answer.verdict == "budget"
    assert found(answer)["load_time_copies"].bytes == 64 * MIB
    assert "base_not_quantized" not in found(answer)


def test_a_load_that_never_quantises() -> None:
    run = Run(limit=100 * MIB)
    with pytest.raises(MemoryError):
        for _ in range(4):
            run.alloc(32 * MIB, COPY, LOADER, *root(5))
    one = found(explained(run))["base_not_quantized"]
    assert one.bytes == 4 * 32 * MIB and "load_time_copies" not in found(explained(run))


@pytest.mark.parametrize(
    ("conf", "effective", "words"),
    [
        ("expandable_segments=True", False, "colon"),
        ("expandable_segments:True", False, "off in the recorded settings"),
        ("max_split_size_mb:1", False, "too small"),
        ("expandable_segments:False", False, None),
        ("", False, None),
    ],
)
def test_settings_without_effect(conf: str, effective: bool, words: str | None) -> None:
    toy = trained(**PLAIN)
    toy.run.settings |= {"PYTORCH_CUDA_ALLOC_CONF": conf, "expandable_segments": effective}
    one = found(explained(toy)).get("settings_without_effect")
    assert (one is None) == (words is None)
    assert one is None or words in one.evidence


def test_memory_outside_the_allocator() -> None:
    toy = trained(**PLAIN)
    toy.run.extra = {"version": 1, "device_total_bytes": 24 << 30, "device_free_bytes": 10 << 30}
    one = found(explained(toy))["outside_allocator"]
    reserved = toy.run.analysis().timeline.curve_at(len(toy.run.events) - 1)[2]
    assert one.bytes is not None and abs(one.bytes - ((14 << 30) - reserved)) <= 64 * MIB
    toy.run.extra["device_free_bytes"] = (24 << 30) - reserved - 700 * MIB  # a context's worth
    assert "outside_allocator" not in found(explained(toy))


def test_buckets_beside_the_gradients() -> None:
    toy = trained(steps=1, checkpointing=True, logits=2 * MIB, adapter=4 * MIB)
    ddp = "/x/site-packages/torch/nn/parallel/distributed.py"
    toy.run.alloc(48 * MIB, f"{ddp}:1207 _ddp_init_helper", *root(7))
    toy.step()
    answer = explain_snapshot(toy.run.analysis(), at=At("event", _in_optimizer(toy), None))
    one = found(answer)["gradient_buckets"]
    assert one.bytes == 48 * MIB and "gradient_as_bucket_view" in changes(one)
    assert "gradient_buckets" not in found(explained(trained(checkpointing=True)))


def _in_optimizer(toy: Toy) -> int:
    """The last event at which all gradients are alive."""
    frames = [event["frames"] for event in toy.run.events]
    return max(i for i, stack in enumerate(frames) if stack and "adam" in stack[0]["filename"])


def changes(one: Finding) -> str:
    return " ".join(advice.change for advice in (*one.advice, *one.tried))


def test_zero_has_nothing_to_share_on_one_gpu() -> None:
    toy = trained(checkpointing=True)
    zero = "/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py:300 __init__"
    toy.run.alloc(64 * MIB, zero, *root(7))
    toy.step()
    assert found(explained(toy))["zero_on_one_gpu"].bytes == 64 * MIB
    toy.run.extra = {"version": 1, "world_size": 2}
    assert "zero_on_one_gpu" not in found(explained(toy))


def test_weights_that_come_again_in_every_pass() -> None:
    toy = trained(checkpointing=True)
    hook = ("/x/site-packages/accelerate/utils/modeling.py:343 set_module_tensor_to_device",
            "/x/site-packages/accelerate/hooks.py:360 pre_forward")  # fmt: skip
    for _ in range(4):
        toy.run.free(toy.run.alloc(32 * MIB, *hook, *root(9)))
        toy.step()
    one = found(explained(toy))["offload_reloads"]
    assert "4 tensors, 128.0 MiB in all" in one.evidence
    assert "offload_reloads" not in found(explained(trained()))


def test_an_evaluation_in_larger_batches_than_training() -> None:
    toy = trained(checkpointing=True, logits=24 * MIB)
    run, inner = toy.run, (EVALUATE,)
    for _ in range(3):
        held, loss, _ = toy.forward(scale=4, inner=inner)
        run.free(*held, *loss, at=(*inner, *root(20)))
    one = found(explained(toy))["eval_batch_larger"]
    assert "4.0 times the tokens" in one.evidence and one.advice[0].saves_bytes
    assert "eval_batch_larger" not in found(explained(trained(checkpointing=True).evaluate(8)))


def test_hidden_states_that_an_evaluation_keeps() -> None:
    toy = trained(checkpointing=True, layers=8)
    held, loss, _ = toy.forward(scale=2, inner=(EVALUATE,))  # the outputs of all layers stay alive
    del held, loss
    assert "8 tensors" in found(explained(toy))["output_hidden_states"].evidence
    assert "output_hidden_states" not in found(explained(trained(checkpointing=True, layers=8).evaluate(2)))


def test_a_graph_that_outlives_its_pass() -> None:
    toy = Toy(layers=6).load().adapters()
    kept: list[int] = []
    for number in range(5):
        held, loss, logits = toy.forward()
        toy.run.free(logits, *loss, at=root())
        short = toy.run.alloc(24 * MIB)
        toy.run.free(short)
        toy.run.free(*kept)
        kept = held if number >= 2 else []
        toy.run.free(*(() if kept else held))
    held, _, _ = toy.forward()
    one = found(explained(toy)).get("retained_graph")
    assert one is not None and one.bytes and one.bytes >= 6 * 8 * MIB
    assert "retained_graph" not in found(explained(trained(steps=6)))


def test_experts_that_stay_in_sixteen_bits() -> None:
    toy = Toy(checkpointing=True, layers=6).load()
    for _ in range(6):
        toy.run.alloc(160 * MIB, COPY, LOADER, *root(5))
    toy.adapters()
    for _ in range(2):
        toy.step()
    one = found(explained(toy))
    assert one["experts_not_quantized"].bytes == 6 * 160 * MIB and "base_not_quantized" not in one
    assert "experts_not_quantized" not in found(explained(trained(checkpointing=True)))


def test_every_detector_is_listed_under_its_id() -> None:
    assert all(name == detector.__name__ for name, detector in DETECTORS.items())


def test_every_finding_has_its_page() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "findings").glob("*.md")} - {"README"}
    assert pages == set(DETECTORS) | {"other_processes"} | {cause.id for cause in CAUSES}
    index = (ROOT / "docs" / "findings" / "README.md").read_text()
    assert all(f"({page}.md)" in index for page in pages)
