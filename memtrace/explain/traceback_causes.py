"""Causes that the frames of a log's traceback name by themselves: one row a cause, the first that fits is it.

A row fits if each of its patterns is found among the frames, written ``file.py:function`` from the outermost to the
innermost; ``last`` must be found among the three innermost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.explain.answer import Advice, Basis, Finding
from memtrace.explain.facts import ByteSpan
from memtrace.snapshot.stacks import Frame


@dataclass(frozen=True, slots=True)
class TracebackCause:
    """``what`` completes "the refused request is …"; ``changes`` avoid it."""

    id: str
    title: str
    last: str
    what: str
    changes: tuple[str, ...]
    anywhere: str = ""
    is_second: bool = False
    """Another failure came before it: this one is not why the run ended."""


_GATHER = "preprocess_logits_for_metrics that keeps only what the metrics need, or prediction_loss_only=True"
CAUSES = (
    TracebackCause(
        "failure_while_reporting", "A second failure, while another one was reported",
        r"torch/_tensor_str\.py:|tensor\.py:__(?:repr|format|str)__",
        "a 32-bit copy made to print a tensor while something was being reported or logged: it is not the cause",
        ("look at the error before it in the log; print shapes (tensor.shape), not tensors",),
        is_second=True,
    ),
    TracebackCause(
        "eval_peak", "The evaluation joins the outputs of all batches on the GPU",
        r"(?:pad_and_concatenate|nested_concat|nested_gather|pad_across_processes|find_batch_size):?"
        r"|trainer\w*\.py:(?:evaluation_loop|prediction_loop)$",
        "the logits of all evaluation batches, joined on the GPU",
        ("eval_accumulation_steps=1 moves them to the CPU after every batch", _GATHER),
        anywhere=r"evaluat|predict",
    ),
    TracebackCause(
        "fp32_output_cast", "The model's output is copied in 32 bits",
        r"accelerate/utils/operations\.py:(?:_convert_to_fp32|convert_to_fp32|recursively_apply|__call__)"
        r"|loss\w*\.py:\w*|modeling_\w+\.py:forward$",
        "a 32-bit copy of the model's output (logits: tokens × vocabulary) that mixed precision makes",
        ("compute the loss inside the model or in tiles, so that whole logits are neither returned nor copied: "
         "use_liger_kernel=True, or return the loss only",
         "fewer tokens a batch: logits grow with tokens × vocabulary"),
        anywhere=r"operations\.py:_?convert_to_fp32",
    ),
    TracebackCause(
        "saving_gathers_weights", "Saving gathers the whole model on one GPU",
        r"(?:state_dict|save_\w+|_save|gather|all_gather\w*|_unshard|summon_full_params|consolidat\w*|16bit_model)",
        "part of a whole state dict, gathered to be saved",
        ("save shards, or gather on the CPU: FullStateDictConfig(offload_to_cpu=True, rank0_only=True); with DeepSpeed "
         "stage3_gather_16bit_weights_on_model_save=False", "torch.cuda.empty_cache() before saving"),
        anywhere=r"save_pretrained|save_model|save_checkpoint|_save\b|:save$|state_dict",
    ),
    TracebackCause(
        "eval_peak", "Generation runs out of memory",
        r".", "part of a generation: keys and values of every token so far, or the logits of the prompt",
        ("fewer sequences at once, a shorter prompt or a smaller max_new_tokens", "model.eval() and torch.no_grad() "
         "around it; gradient checkpointing switches the key/value cache off"),
        anywhere=r"generation/utils\.py:(?:generate|_sample|_beam_search|_prefill)|:generate$",
    ),
    TracebackCause(
        "eval_peak", "The evaluation needs more than training",
        r".", "made in the evaluation's forward pass",
        ("a smaller per_device_eval_batch_size (eval_batch_size), and torch.no_grad() in a loop of your own",),
        anywhere=r"evaluation_loop|prediction_step|:evaluate$|validation_step",
    ),
    TracebackCause(
        "data_on_gpu", "The data are kept on the GPU",
        r"(?:dataset|dataloader|data_loader|collat\w*|_utils/fetch|_utils/collate|sampler)\w*\.py:|:__getitem__$",
        "data, put on the GPU by the loader itself",
        ("keep data on the CPU and move one batch at a time: batch.to(device, non_blocking=True)",),
    ),
    TracebackCause(
        "reference_model_copy", "A second model is loaded",
        r".", "a second model beside the one that is trained",
        ("DPOTrainer(model, ref_model=None, peft_config=…): the reference is the base with adapters disabled",
         "precompute_ref_log_probs=True, so that the reference is not needed while training"),
        anywhere=r"create_reference_model|(?:ref|teacher|reward|critic|value)_?model\w*:|:deepcopy$|copy\.py:_?deepcopy",
    ),
)  # fmt: skip


def cause_in(frames: Sequence[Frame]) -> TracebackCause | None:
    """The cause that a traceback names; ``frames`` from the outermost in. None if it names none."""
    words = [f"{frame.filename.replace(chr(92), '/')}:{frame.name}" for frame in frames]
    ends, everything = "\n".join(words[-3:]), "\n".join(words)
    for cause in CAUSES:
        flags = re.MULTILINE
        if re.search(cause.last, ends, flags) and re.search(cause.anywhere, everything, flags | re.IGNORECASE):
            return cause
    return None


def finding_of(cause: TracebackCause, asked: ByteSpan | None) -> Finding:
    """What to say of it: the request itself is what each change saves."""
    size_bytes = round(asked.middle) if asked is not None else None
    terms = f"the refused {asked}" if asked is not None else ""
    changes = tuple(
        Advice(change, size_bytes, Basis.FORMULA, terms) if size_bytes and not cause.is_second
        else Advice(change, None, Basis.RULE)
        for change in cause.changes
    )  # fmt: skip
    return Finding(cause.id, cause.title, size_bytes, f"by the traceback the request is {cause.what}.", changes)
