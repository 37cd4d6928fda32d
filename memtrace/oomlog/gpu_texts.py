"""GPU memory refused, in words other than the caching allocator's."""

from __future__ import annotations

from .message import Kind
from .table import Text, size_groups, text

_ASYNC_WHAT = "PyTorch's cudaMallocAsync back end was refused memory"
_ASYNC_LIMIT = r"(?P<end>PyTorchlimit)(?:\(setbyuser-suppliedmemoryfraction\))?:?" + size_groups("limit")

PYTORCH: tuple[Text, ...] = (
    text(
        "allocationondevice",
        r"Allocationondevice(?P<device>\d{1,4}|[\x00-\x1f])?wouldexceedallowedmemory\.?(?:\(outofmemory\))?"
        rf"(?:.{{0,80}}?Currentlyallocated:{size_groups('allocated')})?"
        rf"(?:.{{0,80}}?Requested:{size_groups('tried')})?"
        rf"(?:.{{0,80}}?Devicelimit:{size_groups('total')})?"
        rf"(?:.{{0,80}}?Free\(accordingtoCUDA\):{size_groups('free')})?"
        rf"(?:.{{0,80}}?{_ASYNC_LIMIT})?",
        Kind.ASYNC,
        _ASYNC_WHAT,
        backend="cuda",
        note="backend:cudaMallocAsync keeps no segments, so there is no snapshot to look into",
    ),
    text(
        "allocationondevice",
        r"Allocationondevice(?!\d{1,4}would)",
        Kind.ASYNC,
        _ASYNC_WHAT,
        backend="cuda",
        versions=("2.3", "2.10"),
        note="the text ends at the device number: some PyTorch versions write it as a raw byte, and GPU 0 ends it",
        needs_line=r"(?i)Allocation on device[\s\x00-\x1f\"']*$",
    ),
    text(
        "mpsbackend",
        rf"MPSbackendoutofmemory(?:\(MPSallocated:{size_groups('allocated')}"
        rf"(?:,otherallocations:{size_groups('other')})?(?:,maxallowed:{size_groups('limit')})?\)?)?"
        rf"(?:\.?(?P<end>Triedtoallocate){size_groups('tried')})?",
        Kind.METAL,
        "PyTorch's Metal allocator would have passed its high watermark",
        backend="mps",
        decimal_units=True,
    ),
    text(
        "invalidbuffersize",
        rf"Invalidbuffersize:{size_groups('tried')}",
        Kind.METAL,
        "the request is larger than the largest single buffer Metal allows",
        backend="mps",
        decimal_units=True,
    ),
    text(
        "withoomondevice",
        r"memoryallocationfailedwithOOMondevice(?P<device>\d{1,4})(?:whiletryingtoallocate(?P<tried>\d+)bytes)?"
        r"(?:\(free:(?P<free>\d+),total:(?P<total>\d+)\))?",
        Kind.WARNING,
        "the driver refused one allocation; PyTorch releases its cache and tries again",
        backend="cuda",
        versions=("2.13", None),
    ),
    text(
        "withoomondevice",
        r"memorymappingfailedwithOOMondevice(?P<device>\d{1,4})(?:whiletryingtomap(?P<tried>\d+)bytes)?"
        r"(?:\(free:(?P<free>\d+),total:(?P<total>\d+)\))?",
        Kind.WARNING,
        "the driver refused to map more memory into an expandable segment",
        backend="cuda",
        versions=("2.13", None),
        note="expandable segments: the figure is the size of one mapping, not of the tensor",
    ),
    text(
        "nvml_success",
        r"NVML_SUCCESS==.{0,200}?(?:INTERNALASSERTFAILED|$)",
        Kind.HIDDEN,
        "an NVML query failed while PyTorch was composing an out-of-memory text; the real error is that one",
        backend="cuda",
        versions=("2.1", "2.14"),
        note="a snapshot dumped after this error has no oom event",
    ),
)

DRIVER: tuple[Text, ...] = (
    text(
        "cumem_allocator",
        r"CUDAError:outofmemoryat.{0,160}?cumem_allocator\.cpp",
        Kind.LIBRARY,
        "vLLM's own memory pool (cumem, used by sleep mode) could not map memory",
        backend="cuda",
        component="vllm-cumem",
    ),
    text(
        "outofmemoryatline",
        r"Erroroutofmemoryatline\d+infile.{0,200}?(?:bitsandbytes|pythonInterface|/csrc/ops\.)",
        Kind.LIBRARY,
        "bitsandbytes could not get memory for itself (unified memory of a paged optimizer, as a rule)",
        backend="cuda",
        component="bitsandbytes",
    ),
    text(
        "outofmemory",
        r"NCCLWARN.{0,40}?(?:Cuda|HIP)failure(?:\d+)?'?outofmemory'?|(?:Cuda|HIP)failure(?:\d+)?'outofmemory'",
        Kind.LIBRARY,
        "NCCL could not get memory for its buffers",
        backend="cuda",
        component="nccl",
    ),
    text(
        "tocuda",
        r"FailedtoCUDA[cm]alloc(?:async|host)?(?P<tried>\d+)bytes",
        Kind.LIBRARY,
        "NCCL could not get memory for its buffers",
        backend="cuda",
        component="nccl",
    ),
    text(
        "alloc_failed",
        r"(?P<component>cublas|cudnn|cusolver|cusparse|cufft|curand|hipblas|hipsparse|hipfft|rocblas|miopen)"
        r"_(?:STATUS_)?ALLOC_FAILED(?:whencalling`?\w+)?",
        Kind.LIBRARY,
        "a CUDA library could not get memory for its handle or workspace",
        backend="cuda",
    ),
    text(
        "statusallocfailed",
        r"(?P<component>miopen|hipblas)StatusAllocFailed",
        Kind.LIBRARY,
        "a ROCm library could not get memory for its handle or workspace",
        backend="hip",
    ),
    text(
        "rocblas_status_memory_error",
        r"rocblas_status_memory_error",
        Kind.LIBRARY,
        "rocBLAS could not get memory for its handle or workspace",
        backend="hip",
        component="rocblas",
    ),
    text(
        "_not_initialized",
        r"(?P<component>cublas|cudnn|cusolver)_STATUS_NOT_INITIALIZED(?:whencalling`?\w+)?",
        Kind.LIBRARY,
        "a CUDA library could not start, most often because the card had no memory left for its handle",
        backend="cuda",
        note="the same error follows an earlier failed kernel (an index out of range, say)",
    ),
    text(
        "outofmemory",
        r"(?P<backend>CUDA|HIP)(?:driver)?error(?:\(?\d+\)?|:\d+)?:outofmemory",
        Kind.DRIVER,
        "a driver call was refused memory outside PyTorch's allocator",
    ),
    text(
        "outofmemory",
        r"(?:cudaruntimeerror\(2\):outofmemory|error=2:outofmemory|TritonError\[CUDA\]:outofmemory)"
        r"(?:at/[^:]{1,120}:\d+)?",
        Kind.DRIVER,
        "a CUDA call was refused memory",
        backend="cuda",
    ),
    text(
        "validcudnnalgorithm",
        r"UnabletofindavalidcuDNNalgorithmtorunconvolution",
        Kind.LIBRARY,
        "cuDNN found no algorithm whose workspace fits, most often because the card was full",
        backend="cuda",
        component="cudnn",
    ),
    text(
        "gpuvideomemory",
        r"Couldnotallocatetensorwith(?P<tried>\d+)bytes\.ThereisnotenoughGPUvideomemoryavailable",
        Kind.ALLOCATOR,
        "PyTorch's DirectML back end could not get memory",
        backend="dml",
    ),
    text(
        "outofdevicememory",
        r"Allocationisoutofdevicememoryoncurrentplatform",
        Kind.DRIVER,
        "Intel's extension for PyTorch could not get device memory",
        backend="xpu",
    ),
    text(
        "out_of_",
        r"(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)",
        Kind.DRIVER,
        "a call to Intel's runtime ran out of device memory or resources",
        backend="xpu",
    ),
    text(
        "devmem",
        r"(?:MODULE:)?PT_DEVMEM.{0,20}?Allocationfailedforsize::(?P<tried>\d+)",
        Kind.ALLOCATOR,
        "Habana's allocator could not get device memory",
        backend="hpu",
    ),
    text(
        "el0004",
        r"EL0004.{0,60}?Failedtoallocatememory",
        Kind.DRIVER,
        "Ascend's runtime could not get device memory",
        backend="npu",
    ),
    text(
        "hiperroroutofmemory",
        r"hipErrorOutOfMemory",
        Kind.DRIVER,
        "a HIP call was refused memory",
        backend="hip",
    ),
)

# Names of the driver's error that stand inside many of the texts above: read last.
LAST: tuple[Text, ...] = (
    text(
        "cuda_error_out_of_memory",
        r"CUDA_ERROR_OUT_OF_MEMORY",
        Kind.DRIVER,
        "a CUDA driver call was refused memory",
        backend="cuda",
    ),
    text(
        "cudaerrormemoryallocation",
        r"cudaErrorMemoryAllocation",
        Kind.DRIVER,
        "a CUDA call was refused memory",
        backend="cuda",
    ),
    text(
        "cudamallocfailed",
        r"cudaMalloc(?:Async)?(?:retry)?failed:outofmemory",
        Kind.DRIVER,
        "cudaMalloc was refused memory",
        backend="cuda",
    ),
    text(
        "outofmemory",
        r"(?P<backend>cuda|hip)[^;]{0,20}?(?:error|fail)[^;]{0,90}?outofmemory(?!error)",
        Kind.DRIVER,
        "a call of the GPU's driver or runtime was refused memory",
        needs_line=r"(?i)^(?!.*\b(?:if|when|avoid|prevent|may|might|could|except|raise|in case)\b).*(?:error|fail)",
    ),
    text(
        "outofmemoryerror",
        r"torch\.(?:cuda\.)?OutOfMemoryError",
        Kind.ALLOCATOR,
        "PyTorch's out-of-memory exception, its text lost",
        needs_line=r"^(?!.*\bexcept\b)(?:.*[\s:*\]])?torch\.(?:cuda\.)?OutOfMemoryError:?\s*$",
    ),
)
