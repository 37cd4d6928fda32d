"""Plans that make a run fit, the lines to change for common trainers, and the ladder as a waterfall."""

from __future__ import annotations

from collections.abc import Sequence

from memtrace.estimate.fit import FitPlan
from memtrace.estimate.forecast import Forecast
from memtrace.estimate.ladder import Rung
from memtrace.units import format_bytes, format_delta

_BAR = 40
TRAINERS = ("Trainer", "TRL", "axolotl", "torchtune", "LLaMA-Factory", "plain loop")
# Option -> the line to change, in the order of TRAINERS; {now} is the new value, {quoted} its names in quotes, {times}
# by how much M, the micro-batches of a step, grows.
_ARGS = "per_device_train_batch_size={now}, gradient_accumulation_steps={times}*M"
_YAML = "{now}, gradient_accumulation_steps: {times}*M"
_4BIT = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)"
_ATTN, _QV = 'from_pretrained(…, attn_implementation="{now}")', "LoraConfig(target_modules=[{quoted}])"
_ON, _R = "gradient_checkpointing", "LoraConfig(r={now})"
LINES: dict[str, tuple[str, ...]] = {
    "allocator settings": ("PYTORCH_CUDA_ALLOC_CONF={now} in the environment",) * 6,
    "keep logits": ("(it lets go by itself)",) * 5 + ("del outputs, logits before loss.backward()",),
    "attention": (_ATTN, _ATTN, "attn_implementation: {now}", "(sdpa by default)", "flash_attn: {now}", _ATTN),
    "quantization": (
        _4BIT, _4BIT, "load_in_4bit: true", "a qlora_… model", "quantization_bit: 4, double_quantization: true", _4BIT,
    ),
    "order": (
        "group_by_length=True", "group_by_length=True", "group_by_length: true", "sort the data set",
        "group_by_length: true", "sort the data set, longest first",
    ),
    "optimizer": (
        'optim="{now}"', 'optim="{now}"', "optimizer: {now}", "bitsandbytes.optim.PagedAdamW8bit", "optim: {now}",
        "bitsandbytes.optim.PagedAdamW8bit (or AdamW8bit)",
    ),
    "loss": (
        "use_liger_kernel=True", "use_liger_kernel=True", "liger_fused_linear_cross_entropy: true",
        "CEWithChunkedOutputLoss", "enable_liger_kernel: true", "checkpoint the head over chunks of tokens",
    ),
    "checkpointing": (
        f"{_ON}=True", f"{_ON}=True", f"{_ON}: true", "enable_activation_checkpointing: True",
        "disable_gradient_checkpointing: false", f"model.{_ON}_enable(); model.enable_input_require_grads()",
    ),
    "micro-batch": (
        _ARGS, _ARGS, f"micro_batch_size: {_YAML}", f"batch_size: {_YAML}", f"per_device_train_batch_size: {_YAML}",
        "{now} rows at once, {times} times the backward passes before optimizer.step()",
    ),
    "precision": (
        *("no prepare_model_for_kbit_training, bf16=True",) * 2, "bf16: true", "dtype: bf16",
        "upcast_layernorm: false, bf16: true", "no prepare_model_for_kbit_training",
    ),
    "rank": (_R, _R, "lora_r: {now}", "lora_rank: {now}", "lora_rank: {now}", _R),
    "targets": (
        _QV, _QV, "lora_target_modules: [{now}]", "lora_attn_modules: ['q_proj', 'v_proj']", "lora_target: {now}", _QV,
    ),
    "length": (
        "truncate to {now} tokens in the tokenizer", "max_length={now}", "sequence_len: {now}", "max_seq_len: {now}",
        "cutoff_len: {now}", "truncate to {now} tokens in the tokenizer",
    ),
}  # fmt: skip


def render_fit(as_is: Forecast, plans: Sequence[FitPlan], rungs: Sequence[Rung], notes: Sequence[str]) -> list[str]:
    """All of it."""
    limit = as_is.config.limit_bytes
    most = "" if limit is None else f" under {format_bytes(limit)}"
    if as_is.fits:
        seen = " in the one step that was looked at" if len(as_is.steps) == 1 else ""
        lines = [f"It fits as it is{seen}{most}: peak reserved {format_bytes(as_is.peak_reserved_bytes)}."]
    else:
        step = as_is.oom.step if as_is.oom is not None else -1
        lines = [f"As it is, the run dies in step {step}{most}." if step >= 0 else f"As it is, loading fails{most}."]
        lines += ["", "No plan was found that fits."] if not plans else []
    for number, plan in enumerate(plans, 1):
        lines += ["", *_plan(number, plan)]
    if rungs:
        lines += ["", *render_ladder(rungs)]
    return [*lines, "", *(f"note: {note}" for note in notes)] if notes else lines


def _plan(number: int, plan: FitPlan) -> list[str]:
    time = f"steps take about {plan.time_share:.0%} longer" if plan.time_share > 0 else "no slower"
    other = "; another training" if any(move.alters for move in plan.moves) else ""
    lines = [
        f"plan {number}: peak reserved {format_bytes(plan.forecast.peak_reserved_bytes)}, "
        f"{format_bytes(plan.margin_bytes)} to spare; {time}{other}"
    ]
    for change in plan.changes:
        lines.append(f"  {change.option}: {change.was} → {change.now}  ({change.why})")
        quoted = ", ".join(f'"{name}"' for name in change.now.split(","))
        times = -(-int(change.was) // int(change.now)) if change.option == "micro-batch" else 1
        for trainer, line in zip(TRAINERS, LINES[change.option], strict=True):
            lines.append(f"    {trainer:<14} {line.format(now=change.now, quoted=quoted, times=times)}")
    return lines


def render_ladder(rungs: Sequence[Rung]) -> list[str]:
    """A waterfall: each bar begins where the one above it ended."""
    whole = sum(rung.adds_bytes for rung in rungs)
    top = max(whole, 1)
    lines = ["what each option adds (a fair share over all orders; requested bytes of the longest micro-batch)"]
    at = 0
    for rung in rungs:
        low, high = sorted((at, at + rung.adds_bytes))
        start, stop = (round(_BAR * max(0, min(edge, top)) / top) for edge in (low, high))
        bar = " " * start + "█" * max(stop - start, 1)
        lines.append(f"  {rung.option:<24}{format_delta(rung.adds_bytes):>12}  {bar}")
        at += rung.adds_bytes
    return [*lines, f"  {'the whole':<24}{format_bytes(whole):>12}  {'█' * _BAR}"]
