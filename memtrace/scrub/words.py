"""What is known to be harmless: words and packages that everybody's snapshots hold.

Whatever stands in none of these lists and patterns is hidden, so a list that lacks a word costs readability, never
privacy.
"""

from __future__ import annotations

import re

from memtrace.attribution.categories import SUBCATEGORIES, Category
from memtrace.attribution.origin import LIBRARIES

# Installed packages that everybody has.
_PACKAGES = """
_pytest absl aiohttp auto_gptq awq click composer cupy diffusers einops fairscale filelock fire fsspec galore_torch
gptqmodel hqq huggingface_hub hydra ipykernel IPython lion_pytorch llmcompressor megatron mlflow networkx numpy nvidia
omegaconf optimum orjson packaging pandas pip pluggy pyarrow pytest quanto ray regex requests rich schedulefree scipy
sentence_transformers sentencepiece setuptools sklearn sympy tensorboard textual tiktoken timm tokenizers torchaudio
torchmetrics torchvision tornado tqdm traitlets transformer_engine typer typing_extensions verl vllm wandb zstandard
"""
PACKAGES = frozenset(LIBRARIES) | frozenset(_PACKAGES.split())

# Parts, between underscores, of PyTorch's words and settings, of the names in public models and configurations, and of
# what functions of training programs are called.
_WORDS = """
32bit 4bit 4h 8bit A a absmax absmax1 absmax2 accelerate AcceleratedOptimizer accumulate accumulation act action
ACTIVATION activation active Adafactor Adagrad Adam Adam8bit AdamW adamw AdamW32bit AdamW8bit adapter add addmm addr
address all ALLOC alloc allocate allocated allocation allocations allocator allowed allreduce alpha already amsgrad
AND and annotate annotations apply arange are as at aten attention attn attr auto autocast AUTOGRAD autograd avg avoid
awaiting awq B backbone backend background backward barrier base batch batched betas between bf16 bfloat16 bias BITS
bitsandbytes block blocks bloom bmm bnb bool broadcast buffer build but by BYTES bytes c c10 c10d cache cached call
callback capability capacity capacty capturable capture cast cat catch category CAUSAL CB char checkpoint
checkpointing chunk chunked class classifier clone CLS cls coalesced code cohere cohere2 collate collator collection
columns compile completed compute CONF conf config const context contiguous copy counter cpu create cross cub CUDA
cuda CUDAGraphs cudamalloc cudaMallocAsync current Currently dampening data DataLoader decay decoder decorator deep
deepcopy deepseek default defaults del dense dequantize DETAIL Device device dict dictcomp differentiable dim dispatch
DistributedDataParallel div divisions documentation dora dot double down dpo dq drop dropout dry dtype dump dynamic e
e4m3fn e5m2 eager einsum emb embed embedding embeddings empty encoder END end enter entries entropy enumerate eps
error eval evaluate evaluation exceeds exit exp expand expandable experts external f factor falcon False false family
fc fc1 fc2 feed feedforward ffn file final finetune fit flash flex float float16 float32 fmt fn for foreach format
forward fp16 fp32 fp4 fraction fragmentation free freed freq from full FullyShardedDataParallel function fused g
garbage gate gather gaussian gelu gemma gemma2 Gemma2ForCausalLM gemma3 GemmaForCausalLM generate generation genexpr
get getattr getitem GiB gloo gpt gpt2 gptq GPU gpu grad GRADIENT gradient granite graph Graphs h half has head heads
hidden HIP hip hipmalloc history hold hook host hqq id If implementation in inactive Including inductor inference init
initialize initializer inner INPUT input inputs int int8 intermediate internal inv is iter k kbit keep key KiB kl kv
labels lambda language large last launch layer layernorm layers len like limit linear Lion Lion8bit listcomp llama
llama3 LlamaForCausalLM llm LM lm ln load local lock log logit logits logsumexp long longrope loop LORA lora loss
losses lr magnitude main mamba Management map matmul max maximize mb mean Memory memory memtrace message metadata
method MiB min ministral mistral MistralForCausalLM mixtral mlp mm mode model models module modules moe momentum mpi
mul MultiProcessingDataLoaderIter Muon N n name native nccl neox nested nesterov new next nf4 nll non none norm num o
Of of offset olmo olmo2 on ones only oom ooms opt optim OPTIMIZER Optimizer optimizer optimizers options original out
OutOfMemoryError output overflowed oversize packages padded paged PagedAdamW PagedAdamW32bit PagedAdamW8bit
PagedLion8bit PARAMETER parameter parameters partial peak peft PeftModel PeftModelForCausalLM PeftType pending per
permute phase phases phi phi3 Phi3ForCausalLM pinned placeholder pool pools position post pow power2 pre predict
predicted prepare pretrained private Process process product ProfilerStep proj project pybind11 python PYTORCH PyTorch
pytorch q qkv qmap1 qmap2 quant quantization QuantizationMethod quantize query qwen2 Qwen2ForCausalLM qwen3
Qwen3ForCausalLM r randn range rank real reason recompute record recording recv reduce reentrant reference register
registration release relu request Requested requested require reserve reserved reshape residual retries reuse rms
RMSprop root rope rotary round rounding roundup routed rows rslora run save scaled scatter SCB score sdpa See segment
segments self send SEQ seq sequence setattr setcomp setting settings setup sft SGD sgd share silu
SingleProcessDataLoaderIter size sliding small snapshot softcap softcapping softmax split sq stablelm stack stacks
stage starcoder2 START started STATE state state1 state2 stats std step steps storage stream streams sub subcategory
sum swish sync tanh target targets task TEMPORARY Tensor terminated test text the theta this threads threshold throw
thrust TiB tie tied time to tok tokenize tokens torch torchinductor total tower traces train trainable trainer
training transformer transpose Tried True true try type uint8 unallocated unknown unmap unsigned until up update us
usage use user utils v v2 v3 validate value vector version view vision vocab vocabulary void warmup was weight weights
where which window with word worker workspace world wpe wrapped wrapper wte XPU yarn zero zeros
"""
WORDS = frozenset(_WORDS.split()) | {
    part
    for name in (*PACKAGES, *Category, *(name for names in SUBCATEGORIES.values() for name in names))
    for part in name.split("_")
}

# Short forms: versions, dtypes, names that carry nothing but a number.
FORMS = re.compile(r"(?:cu|rocm|a|b|rc|dev|post|v|parameter|t|g|h|py)\d{1,8}|(?:u?int|b?float|fp|bf|nf)\d{1,3}")
GPU = re.compile(
    r"NVIDIA|AMD|Intel|Tesla|Quadro|GeForce|Radeon|Instinct|TITAN|RTX|GTX|Graphics|Device|Laptop|GPU|Ti|Super|Ada|Max"
    r"|Generation|Pro|Arc|PCIe|NVL|HBM\d?e?|SXM\d?|OAM|MIG|Xp?|Xt?x|Blackwell|Server|Workstation|Edition"
    r"|(?:rtx|gtx|gb|gh|mi|[abhltvpkmr])?\d{1,4}(?:ti|super|gb|g|x|s|xt|xtx|d)?",
    re.IGNORECASE,
)
CPP_NAMESPACE = re.compile(  # how C++ functions of PyTorch, CUDA, Python and the C library begin
    r"^(?:[\w:<>,*& ]+ )?(?:\(anonymous namespace\)::)?"
    r"(?:torch|c10d?|at|caffe2|std|cub|thrust|pybind11|fmt|gloo|nccl|cudnn\w*|cublas\w*|__gnu_cxx)::"
    r"|^_*Py[A-Z_]|^_[Pp]y\w|^(?:\(anonymous namespace\)::)?(?:THC?P|cuda|cu|nccl|ncclGroup)[A-Z]"
    r"|^(?:_start|_?unwind|__libc_\w+|__clone3?|clone3?|start_thread|pthread_\w+|main|\?\?|<unknown>)$"
    r"|^(?:method_vectorcall\w*|(?:slot|type|object|function)_\w+)$"
)
