"""One rank of a run that shards, for its peaks: ``ranks.py ROW FOLDER``, one row of ``check_ranks.py`` as JSON.

Every process sees one GPU, whatever its rank; ``BACKEND`` in the environment is another than NCCL. Prints a line of
JSON at the end: the peaks until training began, and of training (bytes). A folder with a ``config.json`` alone is
enough where nothing is really computed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent), str(HERE.parent.parent.parent)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

ROW, FOLDER = json.loads(sys.argv[1]), Path(sys.argv[2])
BATCH, LENGTH, STEPS = ROW["batch"], ROW["length"], 3
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda:0")
seen: dict[str, Any] = {"load": None, "train": None, "oom": None}


def peaks() -> dict[str, int]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {key: stats[f"{key}_bytes.all.peak"] for key in ("requested", "allocated", "reserved")}


def loaded() -> None:
    """Everything is in place; what comes now is training."""
    seen["load"] = peaks()
    torch.cuda.reset_peak_memory_stats()


def pretrained(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    given = {"device_map": {"": DEVICE}, "dtype": torch.bfloat16} | options
    model = AutoModelForCausalLM.from_pretrained(FOLDER, **given)
    model.config.use_cache = False
    return model


def nf4() -> dict[str, Any]:
    """4-bit weights stored as bf16: what sharding needs."""
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
    }  # fmt: skip


def with_adapters(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    if ROW.get("checkpointing", True):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    targets = ROW.get("targets", "all-linear")
    config = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def train(model: Callable[..., Any], optimizer: Any, vocab: int) -> None:
    loaded()
    for step in range(STEPS):
        ids = torch.randint(0, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def fsdp2() -> None:
    """``fully_shard`` by layer: full fine-tuning in float32 with bf16 copies, LoRA in bf16 or QLoRA."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    how = ROW["method"]
    place = CPUOffloadPolicy() if ROW.get("offload") else OffloadPolicy()
    policy = MixedPrecisionPolicy()
    if how == "full":
        model = pretrained(dtype=torch.float32)
        if ROW.get("checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = model.model.layers
    else:
        model = with_adapters(pretrained(**(nf4() if how == "qlora" else {})))
        layers = model.get_base_model().model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy, offload_policy=place)
    fully_shard(model, mp_policy=policy, offload_policy=place)
    model.train()
    train(model, adamw(model), model.config.vocab_size)


def fsdp1() -> None:
    """``FullyShardedDataParallel`` as accelerate uses it, full fine-tuning."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = pretrained(dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        device_id=DEVICE,
    )
    wrapped.train()
    train(wrapped, adamw(wrapped), model.config.vocab_size)


def data_parallel() -> None:
    """DistributedDataParallel: full fine-tuning in bf16 or QLoRA; ``zero``: with sharded states."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = pretrained() if ROW["method"] == "full" else with_adapters(pretrained(**nf4()))
    model.train()
    wrapped = DistributedDataParallel(model)
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4) if ROW.get("zero") else adamw(model)
    )
    train(wrapped, optimizer, model.config.vocab_size)


def deepspeed() -> None:
    """ZeRO stage ``zero`` with DeepSpeed's own defaults but for its stage; bf16, master copies in float32."""
    import deepspeed as library

    model = pretrained()
    if ROW.get("checkpointing"):
        model.gradient_checkpointing_enable()
    model.train()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": ROW["zero"], **ROW.get("options", {})}, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if ROW.get("offload"):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = library.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config, dist_init_required=False
    )
    loaded()
    for step in range(STEPS):
        ids = torch.randint(0, 1000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        del loss


def trainer() -> None:
    """Transformers' Trainer under DDP or FSDP (``options``: its arguments), or TRL's for preferences (``dpo``)."""
    import random

    from datasets import Dataset
    from stack_programs import _words

    quick: dict[str, Any] = {
        "output_dir": str(FOLDER / f"trainer{RANK}"), "per_device_train_batch_size": BATCH, "max_steps": STEPS,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "dataloader_pin_memory": False,
        "disable_tqdm": True, "bf16": True, "optim": "adamw_torch", **ROW.get("options", {}),
    }  # fmt: skip
    draw = random.Random(0)
    if ROW["method"] == "dpo":
        from trl import DPOConfig, DPOTrainer

        def words(count: int) -> str:
            return " ".join(f"w{draw.randrange(200)}" for _ in range(count))

        rows = [{"prompt": words(16), "chosen": words(LENGTH), "rejected": words(LENGTH)} for _ in range(32)]
        base = with_adapters(pretrained())
        made: Any = DPOTrainer(model=base, args=DPOConfig(**quick, max_length=4 * LENGTH),
                               train_dataset=Dataset.from_list(rows), processing_class=_words())  # fmt: skip
    else:
        from transformers import Trainer, TrainingArguments

        ids = [[draw.randrange(1000) for _ in range(LENGTH)] for _ in range(32)]
        data = Dataset.from_list([{"input_ids": one, "labels": one} for one in ids])
        model = pretrained(**({"dtype": torch.float32, "device_map": None} if ROW["method"] == "full" else {}))
        made = Trainer(model=model, args=TrainingArguments(**quick), train_dataset=data)
    loaded()
    made.train()


def pipeline() -> None:
    """Full fine-tuning in bf16 through ``torch.distributed.pipelining``, one stage a rank, 1F1B over four parts."""
    from stack_programs import one_stage

    whole = pretrained(device_map=None)
    vocab = whole.config.vocab_size
    part, schedule = one_stage(whole, RANK, RANKS, BATCH, LENGTH, DEVICE)
    del whole
    optimizer = adamw(part)
    loaded()
    for step in range(STEPS):
        ids = torch.randint(0, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        schedule.step(*([ids] if RANK == 0 else []), **({"target": ids} if RANK == RANKS - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()


def experts() -> None:
    """Experts spread over the ranks by Transformers (``enable_expert_parallel``), the rest split; full fine-tuning."""
    from stack_programs import with_spread_experts

    model = with_spread_experts(FOLDER, RANKS)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    train(model, optimizer, model.config.vocab_size)


def tensor() -> None:
    """Weights split over the ranks by Transformers (``tp_plan``); full fine-tuning."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, tp_plan="auto", dtype=torch.bfloat16)
    model.train()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False), model.config.vocab_size)


def published() -> None:
    """The recipe of AnswerDotAI/fsdp_qlora (March 2024): FSDP1, LoRA of rank 64 on six projections, reentrant
    checkpoints, and as in Transformers 4.39 the loss on shifted float32 logits, of which the whole ones live on through
    the backward pass. How weights come there is our own, and not part of the peak."""
    import bitsandbytes
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(FOLDER)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    kind = type(model.model.layers[0])
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear) and ROW["method"] == "qlora":
            made = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                quant_storage=torch.bfloat16, compress_statistics=False,
            )  # fmt: skip
            data = torch.zeros(module.out_features, module.in_features, dtype=torch.bfloat16, device=DEVICE)
            options = _kept(made.weight) | {"requires_grad": False, "module": made}
            made.weight = bitsandbytes.nn.Params4bit(data, **options).to(DEVICE)
            model.model.set_submodule(name, made)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                fill = 0.02 + ("Norm" in type(module).__name__)
                made = torch.full(parameter.shape, fill, dtype=torch.bfloat16, device=DEVICE)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
    names = ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]
    model.is_loaded_in_4bit = ROW["method"] == "qlora"
    lora = LoraConfig(task_type="CAUSAL_LM", r=64, lora_alpha=16, lora_dropout=0.1, target_modules=names)
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).to(torch.bfloat16)

    def is_adapter(module: Any) -> bool:
        weight = getattr(module, "weight", None)
        return not list(module.named_children()) and weight is not None and weight.requires_grad

    by_kind = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={kind})
    both = [functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter), by_kind]
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(_or_policy, policies=both),
        use_orig_params=False,
        limit_all_gathers=True,
        cpu_offload=CPUOffload(offload_params=True) if ROW.get("offload") else None,
        device_id=torch.cuda.current_device(),
        sharding_strategy=ShardingStrategy.NO_SHARD if ROW.get("whole") else ShardingStrategy.FULL_SHARD,
    )
    hold = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    wrapped.enable_input_require_grads()
    apply_activation_checkpointing(
        wrapped, checkpoint_wrapper_fn=hold, check_fn=lambda module: isinstance(module, kind)
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-5)
    wrapped.train()
    torch.cuda.empty_cache()
    limit()
    loaded()
    for step in range(STEPS):
        ids = torch.randint(0, 30000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        logits = wrapped(ids, attention_mask=torch.ones_like(ids)).logits.float()
        before, after = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
        loss = nn.functional.cross_entropy(before.view(-1, before.shape[-1]), after.view(-1))
        del before
        loss.backward()
        loss.item()
        wrapped.clip_grad_norm_(0.3, norm_type=2.0)
        optimizer.step()
        optimizer.zero_grad()
        del logits, after, loss


def _kept(weight: Any) -> dict[str, Any]:
    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    return {name: getattr(weight, name) for name in names}


def limit() -> None:
    """Be a card of 24 GB."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, 24 * 2**30 / torch.cuda.mem_get_info()[1]))


def main() -> None:
    torch.manual_seed(0)
    torch.cuda.init()
    if os.environ.get("ALONE"):
        from stack_programs import be_alone

        be_alone(RANK, RANKS)
    kinds = (fsdp2, fsdp1, data_parallel, deepspeed, trainer, pipeline, experts, tensor, published)
    if ROW["kind"] != "trainer":
        meeting = f"file://{FOLDER}/meeting-{ROW['name']}"
        library = os.environ.get("BACKEND", "nccl")
        torch.distributed.init_process_group(library, init_method=meeting, rank=RANK, world_size=RANKS)
    if "RECORD" in os.environ:
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        next(one for one in kinds if one.__name__ == ROW["kind"])()
    except torch.OutOfMemoryError as error:
        seen["oom"] = str(error)[:300]
    seen["train"] = peaks()
    if "RECORD" in os.environ:
        torch.cuda.memory._dump_snapshot(str(FOLDER / f"{ROW['name']}-{RANK}.pickle"))
    print(json.dumps(seen), flush=True)
    if seen["oom"] is None:  # another rank may still be sent what this one has
        torch.distributed.barrier()
    os._exit(0)  # another rank may wait in a collective for good


if __name__ == "__main__":
    main()
