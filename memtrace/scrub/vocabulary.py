"""Public words: what may stay in a scrubbed snapshot because everybody's snapshots hold it.

Whatever is a text and stands in none of these lists (or patterns) is replaced or left out, so a list that lacks a word
costs readability, never privacy.
"""

from __future__ import annotations

import re

# Package folder -> beginnings of its own files. A folder of that name is taken to be the library, wherever it lies,
# only if the recording has such a file below it: a checkout of one's own may be called "torch" as well.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerator.py", "big_modeling.py", "hooks.py", "optimizer.py", "utils/"),
    "apex": ("optimizers/", "normalization/"),
    "axolotl": ("cli/", "core/", "utils/"),
    "bitsandbytes": ("_ops.py", "autograd/", "backends/", "functional.py", "nn/", "optim/"),
    "datasets": ("arrow_dataset.py", "iterable_dataset.py"),
    "deepspeed": ("ops/", "runtime/"),
    "flash_attn": ("flash_attn_interface.py", "layers/", "ops/"),
    "lightning": ("fabric/", "pytorch/"),
    "liger_kernel": ("ops/", "transformers/"),
    "llamafactory": ("train/", "model/"),
    "memtrace": ("capture/",),
    "peft": ("mapping.py", "peft_model.py", "tuners/", "utils/"),
    "pytorch_lightning": ("loops/", "trainer/"),
    "safetensors": ("torch.py",),
    "torch": ("_compile.py", "_dynamo/", "_inductor/", "_ops.py", "autograd/", "nn/", "optim/", "utils/"),
    "torchao": ("dtypes/", "optim/", "quantization/"),
    "torchtune": ("modules/", "training/"),
    "transformers": ("core_model_loading.py", "integrations/", "modeling_utils.py", "models/", "trainer.py", "utils/"),
    "triton": ("compiler/", "runtime/"),
    "trl": ("kernels/", "models/", "trainer/"),
    "unsloth": ("kernels/", "models/"),
    "unsloth_zoo": ("patching_utils.py", "loss_utils.py"),
    "xformers": ("ops/",),
}

# Installed packages that need no remark when they stay.
PACKAGES = frozenset(LIBRARIES) | {
    "absl", "aiohttp", "awq", "auto_gptq", "click", "composer", "cupy", "diffusers", "einops", "fairscale", "filelock",
    "fire", "fsspec", "galore_torch", "gptqmodel", "hqq", "huggingface_hub", "hydra", "ipykernel", "IPython",
    "lion_pytorch", "llmcompressor", "megatron", "mlflow", "networkx", "nvidia", "numpy", "omegaconf", "optimum",
    "orjson", "packaging", "pandas", "pip", "pluggy", "pyarrow", "pytest", "_pytest", "quanto", "ray", "regex",
    "requests", "rich", "schedulefree", "scipy", "sentence_transformers", "sentencepiece", "setuptools", "sklearn",
    "sympy", "tensorboard", "textual", "tiktoken", "timm", "tokenizers", "torchaudio", "torchmetrics", "torchvision",
    "tornado", "tqdm", "traitlets", "transformer_engine", "typer", "typing_extensions.py", "verl", "vllm", "wandb",
    "zstandard",
}  # fmt: skip

# Functions that say what a program does, not whose it is; findings rest on some of them.
FUNCTIONS = frozenset({
    "<module>", "main", "train", "train_step", "training_step", "train_loop", "training_loop", "step", "run", "forward",
    "backward", "loss", "compute_loss", "evaluate", "validate", "predict", "generate", "fit", "setup", "worker",
    "load", "load_model", "get_model", "build_model", "create_model", "from_pretrained", "from_config", "save_model",
    "load_state_dict", "load_checkpoint_and_dispatch", "deepcopy", "clone", "copy", "to", "cuda", "cpu", "float",
    "half", "bfloat16", "type", "embedding", "optimizer_step", "zero_grad", "wrapper", "inner", "wrapped", "decorator",
    "prepare_model_for_kbit_training", "prepare_model_for_int8_training", "get_peft_model",
    "_cast_input_dtype", "create_reference_model",
})  # fmt: skip

# Parts of the module names of public models, adapters and wrappers.
MODULES = frozenset({
    "base_model", "model", "module", "models", "layers", "layer", "h", "blocks", "block", "decoder", "encoder",
    "transformer", "backbone", "language_model", "text_model", "gpt_neox", "embed_tokens", "wte", "wpe", "lm_head",
    "self_attn", "attn", "attention", "self_attention", "cross_attn", "mlp", "ffn", "feed_forward", "q_proj", "k_proj",
    "v_proj", "o_proj", "qkv_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "c_attn", "c_proj",
    "c_fc", "fc1", "fc2", "dense", "query_key_value", "dense_h_to_4h", "dense_4h_to_h", "q_norm", "k_norm", "norm",
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "ln_1",
    "ln_2", "ln_f", "final_layernorm", "final_layer_norm", "rotary_emb", "inv_freq", "original_inv_freq", "weight",
    "bias", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_dropout", "lora_magnitude_vector",
    "default", "base_layer", "original_module", "modules_to_save", "absmax", "quant_map", "nested_absmax",
    "nested_quant_map", "quant_state", "offset", "code", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2",
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "SCB", "CB", "weight_format", "grad", "data",
    "act_fn", "score", "classifier", "vision_tower", "parameter", "bitsandbytes__nf4", "bitsandbytes__fp4",
    "nested_offset",
})  # fmt: skip

# Values of configurations, and of what the recorder notes.
VALUES = MODULES | {
    "", "none", "all", "all-linear", "auto", "LORA", "CAUSAL_LM", "SEQ_CLS", "lora_only", "gaussian", "silu", "gelu",
    "gelu_pytorch_tanh", "gelu_new", "relu", "swish", "sdpa", "eager", "flash", "flash_attention_2",
    "flash_attention_3", "flex_attention", "nf4", "nf4-dq", "fp4", "int8", "bitsandbytes", "gptq", "awq", "hqq",
    "float32", "float16", "bfloat16", "torch.float32", "torch.float16", "torch.bfloat16", "fp32", "fp16", "bf16",
    "uint8", "full", "chunked", "fused", "adamw_torch", "adamw_torch_fused", "adamw_bnb", "adamw_8bit",
    "paged_adamw_32bit", "paged_adamw_8bit", "sgd", "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3",
    "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt2", "gpt_neox", "falcon", "opt", "bloom",
    "stablelm", "deepseek_v2", "deepseek_v3", "olmo", "olmo2", "granite", "cohere", "cohere2", "starcoder2", "mamba",
    "AdamW", "Adam", "AdamW8bit", "AdamW32bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "Adam8bit", "SGD",
    "Adafactor", "Lion", "Lion8bit", "PagedLion8bit", "Adagrad", "RMSprop", "Muon", "AcceleratedOptimizer",
    "PeftModel", "PeftModelForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "DistributedDataParallel",
    "FullyShardedDataParallel", "linear", "dynamic", "yarn", "llama3", "longrope", "python", "oom", "end", "request",
    "steps", "error", "terminated", "default", "START", "END", "QuantizationMethod.BITS_AND_BYTES", "PeftType.LORA",
    "predicted",
}  # fmt: skip

# Keys of configurations whose values are numbers, flags or words of VALUES.
CONFIG_KEYS = frozenset({
    "models", "model", "config", "peft", "optimizers", "optimizer", "options", "run", "dry_run", "class", "training",
    "gradient_checkpointing", "parameters", "trainable_parameters", "defaults", "model_type", "family", "hidden_size",
    "hidden", "intermediate_size", "ffn", "num_hidden_layers", "layers", "num_attention_heads", "heads",
    "num_key_value_heads", "kv_heads", "head_dim", "vocab_size", "vocabulary", "tie_word_embeddings",
    "tied_embeddings", "attention_bias", "output_bias", "mlp_bias", "sliding_window", "use_sliding_window",
    "attn_logit_softcapping", "final_logit_softcapping", "attention_softcap", "logit_softcap", "partial_rotary_factor",
    "rotary_share", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "rope_theta", "hidden_act",
    "hidden_activation", "initializer_range", "use_cache", "attention_dropout", "torch_dtype", "dtype",
    "attn_implementation", "_attn_implementation", "quantization_config", "load_in_4bit", "load_in_8bit",
    "bnb_4bit_use_double_quant", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    "llm_int8_threshold", "quant_method", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "r", "lora_alpha",
    "lora_dropout", "target_modules", "bias", "peft_type", "task_type", "use_rslora", "use_dora", "inference_mode",
    "lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused",
    "momentum", "dampening", "nesterov", "seq_len", "batch", "accumulate", "autocast", "prepare_kbit", "adapter_dtype",
    "keep_logits", "loss", "chunk_tokens", "reentrant", "attn", "checkpointing", "dropout", "rank", "quant", "optim",
    "sequence", "targets", "attention", "embeddings_require_grad", "hold_loss", "accumulation", "stacks",
    "max_entries", "started_us", "overflowed", "deep", "steps", "drop_logits", "evaluation", "target",
})  # fmt: skip

ANNOTATIONS = re.compile(
    r"Optimizer\.(step|zero_grad)#\w+\.(step|zero_grad)|(nccl|gloo|c10d|mpi):{1,2}\w+|ProfilerStep#\d+"
    r"|DistributedDataParallel\.forward|FullyShardedDataParallel\.\w+|(aten|torch|autograd)::\w+"
    r"|enumerate\(DataLoader\)#_(SingleProcess|MultiProcessing)DataLoaderIter\.__next__"
)
PHASES = frozenset({
    "load", "forward", "backward", "optimizer", "between", "evaluation", "generation", "unknown", "inputs", "loss",
    "zero_grad", "recompute",
})  # fmt: skip
PROFILER_CATEGORIES = frozenset(
    {"INPUT", "TEMPORARY", "ACTIVATION", "GRADIENT", "AUTOGRAD_DETAIL", "PARAMETER", "OPTIMIZER_STATE", "unknown"}
)
CPP_NAMESPACE = re.compile(
    r"^(?:[\w:<>,*& ]+ )?(?:\(anonymous namespace\)::)?"
    r"(?:torch|c10d?|at|caffe2|std|cub|thrust|pybind11|fmt|gloo|nccl|cudnn\w*|cublas\w*|__gnu_cxx)::"
    r"|^_*Py[A-Z_]|^_[Pp]y\w|^(?:\(anonymous namespace\)::)?(?:THC?P|cuda|cu|nccl|ncclGroup)[A-Z]"
    r"|^(?:_start|_?unwind|__libc_\w+|__clone3?|clone3?|start_thread|pthread_\w+|main|\?\?|<unknown>)$"
    r"|^(?:method_vectorcall\w*|(?:slot|type|object|function)_\w+)$"
)
STATISTIC = re.compile(
    r"(requested_bytes|allocated_bytes|reserved_bytes|active_bytes|inactive_split_bytes|allocation|segment|active"
    r"|inactive_split|oversize_allocations|oversize_segments)\.(all|large_pool|small_pool)\.(current|peak|allocated|freed)"
    r"|(oversize_allocations|oversize_segments)\.(current|peak|allocated|freed)"
    r"|num_(alloc_retries|ooms|sync_all_streams|device_alloc|device_free)|max_split_size"
)
# Every word of PyTorch's own out-of-memory messages, from 1.13 to today.
OOM_WORDS = frozenset({
    "non", "CUDA", "HIP", "XPU", "out", "of", "memory", "Tried", "to", "allocate", "GPU", "has", "a", "total",
    "capacity", "capacty", "which", "is", "free", "Process", "in", "use", "Including", "this", "process",
    "allowed", "Of", "the", "allocated", "by", "PyTorch", "and", "reserved", "but", "unallocated", "If", "large",
    "try", "setting", "max_split_size_mb", "expandable_segments", "True", "avoid", "fragmentation", "See",
    "documentation", "for", "Memory", "Management", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "error", "torch", "OutOfMemoryError", "already", "bytes", "KiB", "MiB", "GiB", "TiB", "B",
    "with", "private", "pools", "e", "g", "Graphs", "CUDAGraphs", "are", "Requested", "Device", "limit", "as",
    "Currently", "usage", "exceeds", "device", "was",
})  # fmt: skip
