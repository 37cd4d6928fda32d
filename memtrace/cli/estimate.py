"""The memory of a QLoRA run before it runs: peaks of every phase, the six categories, fits or not, and why.

Nothing is downloaded and no GPU is needed. MODEL is a preset or a Hugging Face config.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.cli.common import add_shared, open_timeline, option, print_json, say_written
from memtrace.units import printable
from memtrace.writing import check_target

if TYPE_CHECKING:
    from memtrace.analysis import Analysis
    from memtrace.estimate.advice import Change
    from memtrace.estimate.estimate import Estimate
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.presets import GpuPreset
    from memtrace.estimate.shapes import ModelShape
    from memtrace.estimate.source import StreamSource


_ANY_LENGTH = 2  # where the options are of a run of many lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    add_shared(parser, "json")
    option(parser, "--against FILE", "compare with a recording, by category")
    option(parser, "--trace OUT.pickle", "write the predicted run as a snapshot")
    add_shared(parser, "force")


def add_setup(parser: argparse.ArgumentParser, of_one_length: bool = True) -> None:
    """Everything that describes the run. Without ``of_one_length``, lengths come otherwise, and perhaps the model."""
    from memtrace.estimate.options import ATTENTION, LOSSES, OPTIMIZERS, QUANT
    from memtrace.estimate.presets import gpu_names, model_names

    models, gpus = ", ".join(model_names()), ", ".join(gpu_names())
    flag = argparse.BooleanOptionalAction
    add = partial(option, parser)
    trainers = "a configuration of axolotl, LLaMA-Factory or torchtune (YAML or JSON); options after it count more"
    add("--config FILE", trainers, action=_FromConfig)
    which: Any = parser if of_one_length else parser.add_mutually_exclusive_group(required=True)
    model = f"a config.json (or its folder), or a preset: {models}"
    option(which, "--model CONFIG.json|PRESET", model, required=of_one_length)
    if of_one_length:
        add("--seq-len L", "tokens a sequence", required=True, type=int)
    else:
        option(which, "--like RECORDING", "as a recording that carries its configuration")
    add("--batch B", "sequences a micro-batch (default 1)", type=int, default=1)
    add("--accumulation N", "micro-batches a step (default 1)", type=int, default=1)
    add("--rank R", "LoRA rank (default 16)", type=int, default=16)
    add("--targets NAMES", "all-linear (default) or e.g. q_proj,v_proj", default="all-linear")
    add("--dropout P", "LoRA dropout (default 0.05)", type=float, default=0.05)
    add("--optim", "optimizer (default adamw_torch)", default="adamw_torch", choices=OPTIMIZERS)
    add("--attn", "attention implementation (default sdpa)", default="sdpa", choices=ATTENTION)
    add("--checkpointing", "gradient checkpointing (default on)", action=flag, default=True)
    add("--reentrant", "reentrant checkpointing (default off)", action=flag, default=False)
    add("--prepare-kbit", "prepare_model_for_kbit_training: fp32 stream (default on)", action=flag, default=True)
    add("--autocast", "16-bit autocast around the forward pass (default off)", action=flag, default=False)
    add("--adapter-dtype", "type of the adapters (default fp32)", default="fp32", choices=("fp32", "bf16"))
    logits = parser.add_mutually_exclusive_group()
    option(logits, "--keep-logits", "the loop holds the logits during backward")
    option(logits, "--drop-logits", "it does not (default)", dest="keep_logits", action="store_false")
    add("--loss", "full logits (default), chunks of tokens, or TRL's fused head", default="full", choices=LOSSES)
    add("--chunk-tokens N", "tokens a chunk of --loss chunked (default 1024)", type=int, default=1024)
    add("--quant", "base weights (default nf4-dq: NF4, double quantisation)", default="nf4-dq", choices=QUANT)
    usual = "on" if of_one_length else "as checkpointing"
    embedding = f"the embedding output needs a gradient, as enabling checkpointing makes it (default {usual})"
    add("--embedding-grad", embedding, action=flag, default=True if of_one_length else None)
    add("--gpu PRESET", f"GPU preset, for capacity and kernels: {gpus} (default: 24 GiB, kernels of an H200)")
    add("--capacity SIZE", "device memory, e.g. 24GiB (default: the GPU's, else 24GiB)")


class _FromConfig(argparse.Action):
    """Sets what a trainer's configuration says, and tells what it does not say."""

    def __call__(self, parser: Any, args: argparse.Namespace, path: Any, option: str | None = None) -> None:
        from memtrace.estimate.config_files import read_config_file
        from memtrace.estimate.options import FLAGS

        found = read_config_file(Path(path))
        for needed in (*parser._actions, *parser._mutually_exclusive_groups):
            needed.required = False  # the file says it, or it is missed later
        values = dict(found.values)
        args.clip = values.pop("clips", False)
        for name, value in values.items():
            told = ",".join(value) if isinstance(value, tuple) else value
            setattr(args, FLAGS[name][2:].replace("-", "_"), told)
        args.model = found.model if found.model is not None else args.model
        args.config, args.config_notes = path, [f"{path} ({found.trainer}): {note}" for note in found.notes]
        for note in args.config_notes:
            print(f"memtrace: {printable(note)}", file=sys.stderr)


def options_from(args: argparse.Namespace) -> RunOptions:
    """The options that the arguments name. Raises UsageError."""
    from memtrace.errors import UsageError
    from memtrace.estimate.options import FLAGS, RunOptions

    if getattr(args, "seq_len", _ANY_LENGTH) is None:
        raise UsageError("--seq-len says how long a sequence is")
    values: dict[str, Any] = {
        name: getattr(args, flag[2:].replace("-", "_"), _ANY_LENGTH) for name, flag in FLAGS.items()
    }
    values["targets"] = tuple(name.strip() for name in args.targets.split(",") if name.strip())
    if not values["targets"]:
        raise UsageError("--targets names no layer: all-linear, or e.g. q_proj,v_proj")
    if values["embeddings_require_grad"] is None:
        values["embeddings_require_grad"] = args.checkpointing
    return RunOptions(**values)


def card_from(args: argparse.Namespace) -> tuple[GpuPreset | None, int | None]:
    """The GPU and the capacity that the arguments name. Raises UsageError."""
    from memtrace.estimate.presets import gpu_preset
    from memtrace.units import parse_capacity

    gpu = gpu_preset(args.gpu) if args.gpu is not None else None
    return gpu, parse_capacity(args.capacity) if args.capacity is not None else None


def run(args: argparse.Namespace) -> int:
    from memtrace.estimate.advice import advise
    from memtrace.estimate.predicted import snapshot
    from memtrace.estimate.presets import model_shape

    return answer(args, lambda: model_shape(args.model), snapshot, advise)


def answer(
    args: argparse.Namespace,
    find: Callable[[], StreamSource | ModelShape],
    document: Callable[[Estimate], dict[str, Any]],
    advise: Callable[[Estimate], tuple[Change, ...]] = lambda _: (),
) -> int:
    """Print the estimate of what ``find`` finds, beside --against; ``document`` makes what --trace writes."""
    from memtrace.answers.report import report
    from memtrace.estimate.against import compare
    from memtrace.estimate.estimate import estimate
    from memtrace.estimate.predicted import write_document
    from memtrace.estimate.text import as_json, render
    from memtrace.history.timeline import choose_event

    if args.trace is not None:
        check_target(Path(args.trace), args.force, args.against, args.model)
    found, against = estimate(find(), options_from(args), *card_from(args)), None
    if args.against is not None:
        analysis = analysed(args.against)
        against = compare(found, report(analysis, choose_event(analysis.timeline, "peak")))
    changes = advise(found)
    if args.trace is not None:
        write_document(document(found), Path(args.trace))
        say_written(args.trace)
    if args.json:
        return print_json(as_json(found, changes, against))
    print("\n".join(render(found, changes, against)))
    return 0


def analysed(file: str) -> Analysis:
    """The recording ``file``; stderr says which device was chosen where there was a choice."""
    from memtrace.analysis import analyse

    return analyse(open_timeline(argparse.Namespace(file=file, device=None)))
