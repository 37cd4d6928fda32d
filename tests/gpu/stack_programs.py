"""Programs of the ways to train that spread over ranks, compile, or come from other libraries; see ``programs.py``.

What a library makes for its own purposes (gathered copies of shards, buckets of gradients) is named where the library
makes it: each ``watch`` function below wraps the library's own functions and notes the addresses of what they return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import programs
import torch
from torch import nn
from torch.nn import functional

from memtrace.record import qlora

GATHERED, TRAINED_GATHERED = "base_weights/gathered", "lora/gathered"
GRADS, STATES, PARAMS = "lora/grad", "lora/optstate", "lora/param"
SAVED, LOGITS = "activations/saved", "temporary/logits"


class Stage(programs.Stage, Protocol):
    """What ``record_truth.py`` hands a program, with the means to name single tensors."""

    rank: int
    ranks: int

    def note(self, tensors: list[Any], label: str) -> None:
        """These tensors are that, now."""


def be_alone(rank: int, ranks: int) -> None:
    """Be one of ``ranks`` on the only GPU there is: PyTorch's own stand-in for the others, which moves no data."""
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin = c10d.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        begin("fake", store=FakeStore(), rank=rank, world_size=ranks)

    torch.distributed.init_process_group = c10d.init_process_group = init_process_group


def _after(owner: Any, name: str, do: Callable[..., None]) -> None:
    """Call ``do(result, *args)`` after every call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        do(result, *args)
        return result

    setattr(owner, name, wrapped)


def _before(owner: Any, name: str, do: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        do(*args)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


# sharded data parallel
def watch_fsdp2(stage: Stage, trained: bool) -> None:
    """Gathered copies and their buffer; full-size gradients and the buffers that reduce them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    flat = TRAINED_GATHERED if trained else GATHERED
    _after(collectives.DefaultAllGather, "allocate", lambda made, *_, **__: stage.note([made], flat))
    _after(
        collectives, "_get_param_all_gather_inputs", lambda made, *_: stage.note([t for row in made for t in row], flat)
    )
    _after(collectives.DefaultReduceScatter, "allocate", lambda made, *_, **__: stage.note([made], GRADS))

    def gathered(_: Any, parameter: Any, *__: Any) -> None:
        label = TRAINED_GATHERED if parameter.sharded_param.requires_grad else GATHERED
        stage.note(list(parameter.all_gather_outputs), label)

    _after(_fsdp_param.FSDPParam, "init_all_gather_outputs", gathered)
    _after(_fsdp_param.FSDPParam, "alloc_all_gather_outputs", gathered)
    _after(_fsdp_param.FSDPParam, "init_unsharded_param", gathered)  # of one rank alone, which copies instead

    def reduced(group: Any, *_: Any) -> None:
        for parameter in group.fsdp_params:
            full = getattr(parameter, "_unsharded_param", None)
            if full is not None and full.grad is not None:
                stage.note([full.grad], GRADS)

    _before(_fsdp_param_group.FSDPParamGroup, "post_backward", reduced)


def fsdp2(stage: Stage) -> Iterator[None]:
    """``fully_shard`` a layer at a time: full fine-tuning in float32 with bf16 copies, or QLoRA (``lora``).

    ``offload``: shards, gradients and states stay on the host.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    lora = stage.options.get("lora", False)
    watch_fsdp2(stage, not lora)
    place = CPUOffloadPolicy(pin_memory=not stage.small) if stage.options.get("offload") else OffloadPolicy()
    if lora:
        model = _qlora_in_bf16(stage)
        policy = MixedPrecisionPolicy()
        layers = model.get_base_model().model.layers
    else:
        model = programs._pretrained(stage, dtype=torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = model.model.layers
    stage.mark("adapters")
    for layer in layers:
        fully_shard(layer, mp_policy=policy, offload_policy=place)
    fully_shard(model, mp_policy=policy, offload_policy=place)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    stage.know(model, optimizer)
    yield
    programs._train(stage, model, optimizer, 2, 768)


def _qlora_in_bf16(stage: Stage) -> Any:
    """4-bit weights stored as bf16 and adapters in bf16: what sharding needs."""
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = {}
    if not stage.small:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
    base = programs._pretrained(stage, **options)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def watch_fsdp1(stage: Stage) -> None:
    """Gathered flat parameters, their shards in low precision, and flat gradients."""
    from torch.distributed.fsdp import _flat_param, _runtime_utils

    handle = _flat_param.FlatParamHandle
    _after(handle, "_alloc_padded_unsharded_flat_param", lambda made, *_: stage.note([made], TRAINED_GATHERED))
    _after(handle, "_use_low_precision_shard", lambda _, h: stage.note([h.flat_param._mp_shard], TRAINED_GATHERED))
    _after(_runtime_utils, "_get_reduce_scatter_tensors", lambda made, *_: stage.note(list(made), GRADS))
    _before(_runtime_utils, "_reduce_grad", lambda _, h: stage.note([h.flat_param.grad], GRADS))


def fsdp1(stage: Stage) -> Iterator[None]:
    """``FullyShardedDataParallel`` as accelerate uses it: original parameters, wrapped by layer, bf16 copies."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    watch_fsdp1(stage)
    model = programs._pretrained(stage, dtype=torch.float32)
    stage.mark("adapters")
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        device_id=None if stage.small else torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    stage.know(wrapped, optimizer)
    yield
    programs._train(stage, _WithConfig(wrapped, model.config), optimizer, 2, 768)


class _WithConfig:
    """A wrapped model whose configuration stays within reach."""

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config = model, config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def train(self) -> None:
        self.model.train()


# data parallel
def ddp(stage: Stage) -> Iterator[None]:
    """Full fine-tuning in bf16 under DistributedDataParallel, buckets of their own; ``zero``: with sharded states."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = programs._pretrained(stage)
    stage.mark("adapters")
    wrapped = DistributedDataParallel(model)

    def hook(group: Any, bucket: Any) -> Any:
        stage.note([bucket.buffer()], GRADS)
        return default_hooks.allreduce_hook(group, bucket)

    hook.__annotations__ = {}  # PyTorch wants classes there, not their names
    wrapped.register_comm_hook(None, hook)
    if stage.options.get("zero"):
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        stage.know(model, optimizer.optim)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        stage.know(model, optimizer)
    yield
    programs._train(stage, _WithConfig(wrapped, model.config), optimizer, 2, 768)


def watch_deepspeed(stage: Stage, model: Any, zero: Any) -> None:
    """Shards, whole weights, master copies, moments and buckets, found in ZeRO's own attributes."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    def within(value: Any, depth: int = 4) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth:
            held = getattr(value, "__dict__", value if isinstance(value, dict) else None)
            for part in list(held.values()) if held is not None else value if isinstance(value, list | tuple) else ():
                yield from within(part, depth - 1)

    def named(*names: str) -> list[Any]:
        return [tensor for name in names for tensor in within(getattr(zero, name, None))]

    def note(*_: Any, **__: Any) -> None:
        masters = named("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        stage.note([tensor.grad for tensor in masters if tensor.grad is not None], GRADS)
        states = [t for state in zero.optimizer.state.values() for t in within(state) if t.ndim]
        stage.note([*masters, *states], STATES)
        stage.note(named("averaged_gradients", "ipg_buckets", "grad_partitions_flat_buffer"), GRADS)
        stage.note(named("bit16_groups_flat", "fp16_partitioned_groups_flat"), PARAMS)
        for parameter in model.parameters():
            sharded = getattr(parameter, "ds_tensor", None)
            if sharded is not None:
                stage.note([sharded], PARAMS)
                stage.note([parameter], TRAINED_GATHERED)
            if parameter.grad is not None:
                stage.note([parameter.grad], GRADS)

    words = ("reduce", "grad", "ipg", "step")
    for name in dir(zero):
        if any(word in name for word in words) and callable(getattr(type(zero), name, None)):
            _before(zero, name, note)
            _after(zero, name, note)
    _after(PartitionedParameterCoordinator, "fetch_sub_module", note)
    note()


def deepspeed(stage: Stage) -> Iterator[None]:
    """DeepSpeed's ZeRO, stage 2 or 3 (``zero``): full fine-tuning in bf16 with master copies in float32."""
    import deepspeed as library

    model = programs._pretrained(stage)
    vocab = qlora.vocabulary(model)
    stage.mark("adapters")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage.options["zero"], "reduce_bucket_size": 50_000_000, "overlap_comm": False,
            "stage3_prefetch_bucket_size": 20_000_000, "stage3_max_live_parameters": 100_000_000,
            "stage3_param_persistence_threshold": 10_000,
        }, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if stage.options.get("offload"):  # master copies and states live on the host
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = library.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config, dist_init_required=False
    )
    watch_deepspeed(stage, model, engine.optimizer)
    yield
    batch, length = programs._shape(stage, 2, 768)
    for step in range(3):
        ids = programs._ids(stage, 4 * batch if step == 2 and stage.surprise() else batch, length, step, vocab)
        stage.mark("forward")
        loss = engine(input_ids=ids, labels=ids).loss
        stage.mark("backward")
        engine.backward(loss)
        stage.mark("optimizer")
        engine.step()
        stage.mark("zero_grad")
        del loss
    stage.mark("end")


def tensor_parallel(stage: Stage) -> Iterator[None]:
    """Full fine-tuning of a model that Transformers splits over the ranks (``tp_plan``)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stage.checkpoint, tp_plan="auto", dtype=torch.bfloat16)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    stage.know(model, optimizer)
    yield
    programs._train(stage, model, optimizer, 2, 768)


class Part(nn.Module):
    """The layers of one stage of a pipeline: the first embeds, the last has the head."""

    def __init__(self, whole: Any, rank: int, ranks: int) -> None:
        super().__init__()
        inner, share = whole.model, len(whole.model.layers) // ranks
        self.embed = inner.embed_tokens if rank == 0 else None
        self.layers = inner.layers[rank * share : (rank + 1) * share]
        self.turn = inner.rotary_emb
        self.norm, self.head = (inner.norm, whole.lm_head) if rank == ranks - 1 else (None, None)

    def forward(self, x: Any) -> Any:
        x = x if self.embed is None else self.embed(x)
        places = torch.arange(x.shape[1], device=x.device)[None]
        turned = self.turn(x, position_ids=places)
        for layer in self.layers:
            x = layer(x, position_ids=places, position_embeddings=turned)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def one_stage(whole: Any, rank: int, ranks: int, batch: int, length: int, device: Any) -> tuple[Part, Any]:
    """This rank's part of a model and its 1F1B schedule over four parts of a batch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    parts, vocab, width = 4, whole.config.vocab_size, whole.config.hidden_size
    part = Part(whole, rank, ranks).to(device)
    rows, dtype = batch // parts, next(whole.parameters()).dtype
    handed, words = ((rows, length, width), dtype), ((rows, length), torch.int64)
    forms = words if rank == 0 else handed, ((rows, length, vocab), dtype) if rank == ranks - 1 else handed
    enters, leaves = (
        torch.empty(shape, dtype=kind, device="meta", requires_grad=kind is dtype) for shape, kind in forms
    )
    stage = PipelineStage(part, rank, ranks, torch.device(device), input_args=enters, output_args=leaves)

    def loss(logits: Any, ids: Any) -> Any:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    return part, Schedule1F1B(stage, n_microbatches=parts, loss_fn=loss)


def pipeline(stage: Stage) -> Iterator[None]:
    """The first stage of a pipeline (``torch.distributed.pipelining``), full fine-tuning, 1F1B over four parts."""
    whole = programs._pretrained(stage, device_map=None)
    batch, length = (8, 32) if stage.small else (8, 768)
    vocab = qlora.vocabulary(whole)
    stage.mark("adapters")
    part, schedule = one_stage(whole, stage.rank, stage.ranks, batch, length, stage.device)
    # A stage knows the sizes of what it is handed, so that the larger batch has a schedule of its own.
    wide, larger = one_stage(whole, stage.rank, stage.ranks, 4 * batch, length, stage.device)
    del whole
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
    stage.know(part, optimizer)
    for one in (part, wide):
        one.register_forward_pre_hook(lambda *_: stage.mark("forward"))
        one.register_forward_hook(lambda *_: stage.mark("backward"))
    yield
    for step in range(3):
        is_larger = step == 2 and stage.surprise()
        ids = programs._ids(stage, 4 * batch if is_larger else batch, length, step, vocab)
        run = (larger if is_larger else schedule).step
        run(*([ids] if stage.rank == 0 else []), **({"target": ids} if stage.rank == stage.ranks - 1 else {}))
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    stage.mark("end")


def with_spread_experts(folder: Any, ranks: int) -> Any:
    """A mixture of experts of which each rank has some (``enable_expert_parallel``), the rest split (``tp_plan``)."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(tp_size=ranks, tp_plan="auto", enable_expert_parallel=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=spread)


def expert_parallel(stage: Stage) -> Iterator[None]:
    """Full fine-tuning of a mixture whose experts are spread over the ranks."""
    model = with_spread_experts(stage.checkpoint, stage.ranks)
    stage.mark("adapters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    stage.know(model, optimizer)
    yield
    programs._train(stage, model, optimizer, 1, 768)


# one GPU
def compiled(stage: Stage) -> Iterator[None]:
    """Full fine-tuning through ``torch.compile``. What autograd saves is noted where compiled code hands it over."""
    model = programs._pretrained(stage)
    vocab = qlora.vocabulary(model)
    stage.mark("adapters")
    keep = torch.autograd.function.FunctionCtx.save_for_backward

    def save(context: Any, *tensors: Any) -> None:
        kept = [t for t in tensors if isinstance(t, torch.Tensor)]
        logits = [t for t in kept if t.ndim >= 2 and t.shape[-1] == vocab and t.shape[0] != vocab]
        stage.note(logits, LOGITS)
        stage.note([t for t in kept if all(t is not one for one in logits)], SAVED)
        keep(context, *tensors)

    torch.autograd.function.FunctionCtx.save_for_backward = save  # type: ignore[method-assign]
    plain = stage.options.get("optimizer") == "sgd"  # without states, and so with its peak in the loss
    optimizer = (torch.optim.SGD if plain else torch.optim.AdamW)(model.parameters(), lr=1e-4)
    stage.know(model, optimizer)
    fast = torch.compile(model, mode=stage.options.get("mode"), dynamic=False)
    yield
    programs._train(stage, _WithConfig(fast, model.config), optimizer, 2, stage.options.get("length", 512))


def kernels(stage: Stage) -> Iterator[None]:
    """LoRA with one of SDPA's kernels alone (``sdpa``), or with Liger's kernels (``liger``)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if stage.options.get("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    inner = programs.adapters(stage)
    next(inner)
    yield
    if "sdpa" in stage.options and not stage.small:
        with sdpa_kernel(getattr(SDPBackend, stage.options["sdpa"])):
            next(inner, None)
    else:
        next(inner, None)


def vision(stage: Stage) -> Iterator[None]:
    """LoRA on a vision-language model (LLaVA) whose weights are made on the device; the vision tower stays frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    size = (64, 2, 4, 512) if stage.small else (2048, 3, 32, 32000)
    text = LlamaConfig(hidden_size=size[0], intermediate_size=size[0] * 3, num_hidden_layers=size[1],
                       num_attention_heads=size[2], num_key_value_heads=size[2], vocab_size=size[3])  # fmt: skip
    eyes = CLIPVisionConfig(hidden_size=size[0] // 2, intermediate_size=size[0] * 2, num_hidden_layers=3,
                            num_attention_heads=size[2] // 2, image_size=336, patch_size=14)  # fmt: skip
    config = LlavaConfig(
        vision_config=eyes, text_config=text, image_token_id=size[3] - 1, image_token_index=size[3] - 1
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(stage.device):
        base = LlavaForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    stage.mark("adapters")
    base.config.use_cache = False
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model.*(q_proj|v_proj|up_proj|down_proj)")
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    stage.know(model, optimizer)
    yield
    model.train()
    images = (336 // 14) ** 2
    for step in range(3):
        rows = 4 if step == 2 and stage.surprise() else 1 if stage.small else 2
        pixels = torch.rand((rows, 3, 336, 336)).to(stage.device, torch.bfloat16)
        ids = programs._ids(stage, rows, images + 64, step, size[3] - 1)
        ids[:, :images] = size[3] - 1
        stage.mark("forward")
        loss = model(input_ids=ids, pixel_values=pixels, labels=ids).loss
        stage.mark("backward")
        loss.backward()
        stage.mark("optimizer")
        optimizer.step()
        stage.mark("zero_grad")
        optimizer.zero_grad()
    stage.mark("end")


def preferences(stage: Stage) -> Iterator[None]:
    """TRL's DPO (``trainer``: dpo) or GRPO (grpo) with LoRA; the latter generates in its loop."""
    import random

    from datasets import Dataset

    model = qlora.add_adapters(qlora.load_base(stage.checkpoint, stage.cfg, stage.device), stage.cfg)
    stage.know(model)
    yield
    stage.follow(model.get_base_model())
    batch, length = programs._shape(stage, 2, 256)
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(200)}" for _ in range(count))

    options: dict[str, Any] = {
        "output_dir": str(stage.scratch / "trainer"), "per_device_train_batch_size": batch, "max_steps": 3,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "use_cpu": stage.small,
        "dataloader_pin_memory": False, "disable_tqdm": True, "bf16": not stage.small, "optim": "adamw_torch",
        "gradient_checkpointing": False, "shuffle_dataset": False,
    }  # fmt: skip
    # The last batch is four times as long where the run is to die.
    lengths = [length * (4 if stage.options.get("oom") and i >= 2 * batch else 1) for i in range(3 * batch)]
    tighten = programs._tightening(stage, 3)
    made: Any
    if stage.options["trainer"] == "dpo":
        from trl import DPOConfig, DPOTrainer

        options.pop("shuffle_dataset")
        rows = [{"prompt": words(16), "chosen": words(n), "rejected": words(n)} for n in lengths]
        args: Any = DPOConfig(**options, max_length=8 * length)
        made = DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows),
                          processing_class=_words(), callbacks=[tighten])  # fmt: skip
    else:
        from trl import GRPOConfig, GRPOTrainer

        rows = [{"prompt": words(n // 2)} for n in lengths]
        options |= {"max_completion_length": 16, "num_generations": 2, "beta": 0.0, "temperature": 1.0}
        args = GRPOConfig(**options)
        made = GRPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), reward_funcs=_length,
                           processing_class=_words(), callbacks=[tighten])  # fmt: skip
    made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(made.train_dataset)
    made.train()
    stage.mark("end")


def _length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(one))) for one in completions]


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(200)}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


STACKS: dict[str, Callable[[Stage], Iterator[None]]] = {
    program.__name__: program
    for program in (
        *(fsdp2, fsdp1, ddp, deepspeed, tensor_parallel, pipeline, expert_parallel),
        *(compiled, kernels, vision, preferences),
    )
}
