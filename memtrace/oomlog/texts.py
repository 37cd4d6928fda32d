"""Fixed texts as data: one row a text, with what it means and which figures it carries.

Patterns match text without white space and ignore case. In them ``<tried>`` is a printed size that becomes the figure
``tried_bytes``, ``<tried:n>`` a bare number of bytes, ``<device>`` a device number; groups named ``backend`` and
``component`` become those. A group ``end`` that did not match means that the text was cut short. Rows are tried in
order, and no two take the same stretch of text.
"""

from __future__ import annotations

import re
from typing import Any

from memtrace.frozen import dataclass
from memtrace.oomlog.message import MessageKind, OomMessage

_FIGURES = {
    "tried": "tried_bytes", "total": "total_bytes", "free": "free_bytes", "allocated": "allocated_bytes",
    "limit": "limit_bytes", "other": "other_allocations_bytes",
}  # fmt: skip
_PLACE = re.compile(r"(?<!\?P)<(\w+)(:n)?>")


@dataclass(frozen=True)
class OomText:
    """One known text. ``words``: lower-case words of which every match contains one, for a quick no. ``line``: what the
    line it begins on (white space and all) must contain. ``spare``: how far from any other message a match must stay,
    for names that stand inside longer texts; ``is_alone``: on no other's line."""

    kind: MessageKind
    component: str
    backend: str
    words: str
    what: str
    pattern: re.Pattern[str]
    versions: tuple[str | None, str | None] = (None, None)
    note: str = ""
    line: re.Pattern[str] | None = None
    spare: int = 0
    is_alone: bool = False

    def may_be_in(self, low: str) -> bool:
        """Whether a text in lower case, without white space, is worth searching."""
        return any(word in low for word in self.words.split())

    def draft(self, found: re.Match[str]) -> OomMessage:
        """The message a match stands for."""
        groups = found.groupdict()
        draft = OomMessage(
            self.kind,
            is_gpu_oom=self.kind not in (MessageKind.HOST, MessageKind.ON_CHIP, MessageKind.PLAN),
            backend=(groups.get("backend") or "").lower() or self.backend or None,
            component=(groups.get("component") or "").lower() or self.component or None,
            what=self.what,
            torch_at_least=self.versions[0],
            torch_below=self.versions[1],
        )
        decimal = self.kind is MessageKind.METAL
        for group, name in _FIGURES.items():
            if groups.get(group):
                draft.put(name, groups[group], groups.get(f"{group}_unit") or "bytes", decimal_units=decimal)
        if decimal and any(unit and len(unit) == 2 for name, unit in groups.items() if name.endswith("_unit")):
            draft.note("GB and MB in this text are read as powers of ten; which base it means is not certain")
        draft.cut_short = "end" in groups and not groups["end"]
        draft.put_device(groups.get("device"))
        if self.note:
            draft.note(self.note)
        return draft


def _text(kind: MessageKind, component: str, backend: str, words: str, what: str, pattern: str, **more: Any) -> OomText:
    def group(place: re.Match[str]) -> str:
        if place[1] == "device":
            return r"(?P<device>\d{1,4}|[\x00-\x1f])"
        if place[2]:
            return rf"(?P<{place[1]}>[\d,]+)"
        return rf"(?P<{place[1]}>\d[\d,]{{0,20}}(?:\.\d{{1,6}})?)(?P<{place[1]}_unit>bytes?|[KMGT]i?B|B)"

    compiled = re.compile(_PLACE.sub(group, pattern), re.IGNORECASE)
    return OomText(kind, component, backend, words, what, compiled, **more)


_HOST = "the machine's memory (RAM) ran out, not the GPU's"
_KILLED = "a process was killed with SIGKILL, which is what the machine's out-of-memory killer sends"
_ASYNC = "PyTorch's cudaMallocAsync back end was refused memory"
_MAP = r"(?:\(free:<free:n>,total:<total:n>\))?"
_TALK = r"\b(?:if|when|avoid|prevent|may|might|could|except|raise|in case)\b"
_K = MessageKind
TEXTS: tuple[OomText, ...] = (
    # PyTorch's other back ends, warnings and asserts: kind, component, back end, words, what it means, pattern.
    _text(_K.ASYNC, "", "cuda", "allocationondevice", _ASYNC,
          r"Allocationondevice<device>?wouldexceedallowedmemory\.?(?:\(outofmemory\))?"
          r"(?:.{0,80}?Currentlyallocated:<allocated>)?(?:.{0,80}?Requested:<tried>)?(?:.{0,80}?Devicelimit:<total>)?"
          r"(?:.{0,80}?Free\(accordingtoCUDA\):<free>)?"
          r"(?:.{0,80}?(?P<end>PyTorchlimit)(?:\(setbyuser-suppliedmemoryfraction\))?:?<limit>)?",
          note="backend:cudaMallocAsync keeps no segments, so there is no snapshot to look into"),
    _text(_K.ASYNC, "", "cuda", "allocationondevice", _ASYNC, r"Allocationondevice(?!\d{1,4}would)",
          versions=("2.3", "2.10"),
          note="the text ends at the device number: some PyTorch versions write it as a raw byte, and GPU 0 ends it",
          line=re.compile(r"(?i)Allocation on device[\s\x00-\x1f\"']*$")),
    _text(_K.WARNING, "", "cuda", "withoomondevice",
          "the driver refused one allocation; PyTorch releases its cache and tries again",
          r"memoryallocationfailedwithOOMondevice<device>(?:whiletryingtoallocate<tried:n>bytes)?" + _MAP,
          versions=("2.13", None)),
    _text(_K.WARNING, "", "cuda", "withoomondevice", "the driver refused to map more memory into an expandable segment",
          r"memorymappingfailedwithOOMondevice<device>(?:whiletryingtomap<tried:n>bytes)?" + _MAP,
          versions=("2.13", None),
          note="expandable segments: the figure is the size of one mapping, not of the tensor"),
    _text(_K.HIDDEN, "", "cuda", "nvml_success==",
          "an NVML query failed while PyTorch was composing an out-of-memory text; the real error is that one",
          r"NVML_SUCCESS==.{0,200}?(?:INTERNALASSERTFAILED|$)", versions=("2.1", "2.14"),
          note="a snapshot dumped after this error has no oom event"),
    _text(_K.METAL, "", "mps", "mpsbackend", "PyTorch's Metal allocator would have passed its high watermark",
          r"MPSbackendoutofmemory(?:\(MPSallocated:<allocated>(?:,otherallocations:<other>)?(?:,maxallowed:<limit>)?"
          r"\)?)?(?:\.?(?P<end>Triedtoallocate)<tried>)?"),
    _text(_K.METAL, "", "mps", "buffersize", "the request is larger than the largest single buffer Metal allows",
          r"Invalidbuffersize:<tried>"),
    _text(_K.ALLOCATOR, "", "dml", "gpuvideomemory", "PyTorch's DirectML back end could not get memory",
          r"Couldnotallocatetensorwith<tried:n>bytes\.ThereisnotenoughGPUvideomemoryavailable"),
    _text(_K.ALLOCATOR, "", "hpu", "pt_devmem", "Habana's allocator could not get device memory",
          r"PT_DEVMEM.{0,20}?Allocationfailedforsize::<tried:n>"),
    # Other frameworks, and libraries that allocate for themselves.
    _text(_K.FOREIGN, "tensorflow", "cuda", "cuda_error_out_of_memory",
          "TensorFlow or XLA tried to take GPU memory for itself",
          r"failedtoallocate[\d.]+[KMGT]?i?B?\(<tried:n>bytes\)fromdevice:CUDA_ERROR_OUT_OF_MEMORY"),
    _text(_K.FOREIGN, "tensorflow", "cuda", "_bfc)ran", "TensorFlow could not get GPU memory",
          r"Allocator\(GPU_\d+_bfc\)ranoutofmemorytryingtoallocate<tried>"),
    _text(_K.FOREIGN, "jax", "", "exhausted", "XLA (JAX or TensorFlow) could not get memory",
          r"RESOURCE_?EXHAUSTED:.{0,60}?(?:Outofmemory|Ranoutofmemory)(?:whiletryingtoallocate|allocating)?(?:<tried>)?"),
    _text(_K.FOREIGN, "mlx", "mlx", "malloc_or_wait", "MLX, Apple's array framework, could not get memory",
          r"\[malloc_or_wait\]Unabletoallocate<tried:n>bytes"),
    _text(_K.FOREIGN, "cupy", "cuda", "outofmemoryallocating", "CuPy's memory pool could not grow",
          r"OutOfMemoryError:Outofmemoryallocating<tried:n>bytes(?:\(allocatedsofar:<allocated:n>bytes)?"
          r"(?:,limitsetto:<limit:n>bytes)?"),
    _text(_K.FOREIGN, "llama.cpp", "cuda", "cudamallocfailed", "llama.cpp could not get memory on the GPU",
          r"allocating<tried>ondevice<device>:cudaMallocfailed:outofmemory"),
    _text(_K.FOREIGN, "llama.cpp", "cuda", "ggml", "llama.cpp could not get memory on the GPU",
          r"CUDAerror\d{0,3}at.{0,60}?ggml.{0,60}?:outofmemory"),
    _text(_K.LIBRARY, "vllm-cumem", "cuda", "cumem_allocator",
          "vLLM's own memory pool (cumem, used by sleep mode) could not map memory",
          r"CUDAError:outofmemoryat.{0,160}?cumem_allocator\.cpp"),
    _text(_K.LIBRARY, "bitsandbytes", "cuda", "outofmemoryatline",
          "bitsandbytes could not get memory for itself (unified memory of a paged optimizer, as a rule)",
          r"Erroroutofmemoryatline\d+infile.{0,200}?(?:bitsandbytes|pythonInterface|/csrc/ops\.)"),
    _text(_K.LIBRARY, "nccl", "cuda", "failure failedtocuda", "NCCL could not get memory for its buffers",
          r"NCCLWARN.{0,40}?(?:Cuda|HIP)failure\d*'?outofmemory'?|(?:Cuda|HIP)failure\d*'outofmemory'"
          r"|FailedtoCUDA[cm]alloc(?:async|host)?<tried:n>bytes"),
    _text(_K.LIBRARY, "", "cuda", "alloc_failed", "a CUDA library could not get memory for its handle or workspace",
          r"(?P<component>cublas|cudnn|cusolver|cusparse|cufft|curand|hipblas|hipsparse|hipfft|rocblas|miopen)"
          r"_(?:STATUS_)?ALLOC_FAILED(?:whencalling`?\w+)?"),
    _text(_K.LIBRARY, "", "hip", "allocfailed _memory_error",
          "a ROCm library could not get memory for its handle or workspace",
          r"(?P<component>miopen|hipblas|rocblas)(?:StatusAllocFailed|_status_memory_error)"),
    _text(_K.LIBRARY, "cudnn", "cuda", "algorithmtorun",
          "cuDNN found no algorithm whose workspace fits, most often because the card was full",
          r"UnabletofindavalidcuDNNalgorithmtorunconvolution"),
    _text(_K.LIBRARY, "", "cuda", "_not_initialized",
          "a CUDA library could not start, most often because the card had no memory left for its handle",
          r"(?P<component>cublas|cudnn|cusolver)_STATUS_NOT_INITIALIZED(?:whencalling`?\w+)?",
          note="the same error follows an earlier failed kernel (an index out of range, say)"),
    # The driver.
    _text(_K.DRIVER, "", "", "outofmemory", "a driver call was refused memory outside PyTorch's allocator",
          r"(?P<backend>CUDA|HIP)(?:driver)?error(?:\(?\d+\)?|:\d+)?:outofmemory"),
    _text(_K.DRIVER, "", "cuda", "outofmemory", "a CUDA call was refused memory",
          r"(?:cudaruntimeerror\(2\):outofmemory|error=2:outofmemory|TritonError\[CUDA\]:outofmemory)"
          r"(?:at/[^:]{1,120}:\d+)?"),
    _text(_K.DRIVER, "", "xpu", "outofdevicememory", "Intel's extension for PyTorch could not get device memory",
          r"Allocationisoutofdevicememoryoncurrentplatform"),
    _text(_K.DRIVER, "", "xpu", "_error_out_of_", "a call to Intel's runtime ran out of device memory or resources",
          r"(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"),
    _text(_K.DRIVER, "", "npu", "el0004", "Ascend's runtime could not get device memory",
          r"EL0004.{0,60}?Failedtoallocatememory"),
    _text(_K.DRIVER, "", "hip", "hiperroroutofmemory", "a HIP call was refused memory", r"hipErrorOutOfMemory"),
    _text(_K.DRIVER, "", "hip", "hsa_status", "AMD's runtime ran out of memory or other resources of the GPU",
          r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    _text(_K.DRIVER, "", "mps", "kiogpu", "Metal ran out of memory while it worked through its commands",
          r"kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    # Look-alikes: not the memory of the GPU.
    _text(_K.ON_CHIP, "triton", "", "outofresource",
          "a Triton kernel needs more on-chip memory per block than the GPU has; unrelated to VRAM",
          r"outofresources?:(?:sharedmemory|tensormemory|threads|registers)(?:,Required:\d+)?"
          r"(?:,Hardwarelimit:\d+)?"),
    _text(_K.HOST, "host", "", "youtriedtoallocate cannotallocatememory", _HOST,
          r"(?:(?:DefaultCPUAllocator|Torch|THGeneral).{0,60}?)?youtriedtoallocate(?:<tried>)?"
          r"|(?:\[Errno12\])?Cannotallocatememory"),
    _text(_K.HOST, "host", "", "bytesonhost", "pinned memory of the machine (RAM) ran out; WSL and containers cap it",
          r"failedtoalloc(?:ate)?<tried:n>bytesonhost:CUDA_ERROR_OUT_OF_MEMORY(?::outofmemory)?"),
    _text(_K.HOST, "numpy", "", "foranarray", "NumPy could not get memory of the machine (RAM)",
          r"Unabletoallocate<tried>foranarraywithshape"),
    _text(_K.HOST, "ray", "", "runninglowonmemory", "Ray killed a task because the machine's memory (RAM) ran low",
          r"(?:ray\.exceptions\.OutOfMemoryError:)?Taskwaskilledduetothenoderunninglowonmemory"),
    _text(_K.HOST, "host", "",
          "memory:kill oom-kill oom_kill oom_reaper oomkill :outofmemory systemd-oomd lowonresource",
          "the machine's out-of-memory killer ended a process: RAM or a container's limit ran out",
          r"(?:Memorycgroup)?outofmemory:Kill(?:ed)?process\d+|oom-kill:constraint|invokedoom-killer|oom_reaper:"
          r"|Detected\d+oom[_-]kill|oom_kill_process|OOMKilled(?!\W{0,3}false)|task[\d,\[\]-]+:OutOfMemory"
          r"|systemd-oomd\[\d+\]:Killed|nodewaslowonresource:memory"),
    _text(_K.HOST, "host", "", "availableram memorythanisavailable",
          "the notebook's machine ran out of memory (RAM) and was started again",
          r"sessioncrashedafterusingallavailableRAM|triedtoallocatemorememorythanisavailable"),
    _text(_K.HOST, "dataloader", "", "killedbysignal",
          "a DataLoader worker was killed: the machine's memory or /dev/shm ran out",
          r"DataLoaderworker\(pid(?:\(s\))?[\d,]+\)(?:is|exited)?killedbysignal:(?:Killed|Buserror)"),
    _text(_K.HOST, "host", "", "sharedmemory", "shared memory of the machine (/dev/shm) ran out",
          r"insufficientsharedmemory\(shm\)|unabletoopensharedmemoryobject|Errorwhilecreatingsharedmemorysegment"),
    _text(_K.HOST, "host", "", "exit sigkill", _KILLED,
          r"exit(?:s|ed)?(?:with)?(?:return)?(?:code|status)?(?:code|status)?\W{0,4}(?:=|:)?(?:-9|137)(?!\d)"
          r"|Signal9\(SIGKILL\)|Signals\.SIGKILL:9|\(SIGKILL\)|signal:?SIGKILL"),
    _text(_K.HOST, "host", "", "pagingfile", "Windows could not commit memory: the paging file is too small",
          r"Thepagingfileistoosmallforthisoperation"),
    _text(_K.HOST, "host", "", "std::bad_alloc", _HOST, r"std::bad_alloc(?!:out_of_memory)"),
    _text(_K.HOST, "host", "", "killed", _KILLED, "Killed", line=re.compile(
          r"^(?:\S+: (?:line \d+: )?\s*\d+ )?Killed(?:\s+(?:python|torchrun|accelerate|deepspeed)\b.*)?\s*$")),
    _text(_K.PLAN, "vllm", "", "cacheblocks kvcache",
          "vLLM's plan leaves no memory for its KV cache; nothing was refused by the GPU",
          r"Noavailablememoryforthecacheblocks|largerthanthemaximumnumberoftokensthatcanbestoredinKVcache"
          r"|largerthantheavailableKVcachememory"),
    _text(_K.PLAN, "vllm", "", "memoryutilization",
          "vLLM found less free memory at start than it was told to use; nothing was refused by the GPU",
          r"(?:Freememoryondevice.{0,60}?)?islessthandesiredGPUmemoryutilization"),
    _text(_K.PLAN, "sglang", "", "mem-fraction",
          "SGLang's plan leaves no memory for its KV cache; nothing was refused by the GPU",
          r"Notenoughmemory\.?.{0,40}?mem-fraction-static"),
    # Names of the driver's error that stand inside many of the texts above.
    _text(_K.DRIVER, "", "cuda", "out_of_memory cudaerrormemoryallocation failed:outofmemory",
          "a call of the GPU's driver was refused memory",
          r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|cudaMalloc(?:Async)?(?:retry)?failed:outofmemory",
          spare=300),
    _text(_K.DRIVER, "", "", "outofmemory", "a call of the GPU's driver or runtime was refused memory",
          r"(?P<backend>cuda|hip)[^;]{0,20}?(?:error|fail)[^;]{0,90}?outofmemory(?!error)", spare=300,
          line=re.compile(rf"(?i)^(?!.*{_TALK}).*(?:error|fail)")),
    _text(_K.ALLOCATOR, "", "", "outofmemoryerror", "PyTorch's out-of-memory exception, its text lost",
          r"torch\.(?:cuda\.)?OutOfMemoryError", spare=300,
          line=re.compile(r"^(?!.*\bexcept\b)(?:.*[\s:*\]])?torch\.(?:cuda\.)?OutOfMemoryError:?\s*$")),
    _text(_K.HOST, "host", "", "memoryerror", "Python could not get memory of the machine (RAM)",
          r"(?<!OutOf)MemoryError", is_alone=True, line=re.compile(
          r"^(?!.*\b(?:except|raise|catch)\b)(?:.*\s)?(?:[\w.]+\._ArrayMemory|Memory)Error(?::.*)?\s*$")),
)  # fmt: skip
