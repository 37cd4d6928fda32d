# ruff: noqa: E501  (messages stand as they are printed)
"""Texts in words other than the caching allocator's: who was refused, and whether it was GPU memory at all."""

from __future__ import annotations

import pytest
from support import parse_log

from memtrace.explain.log_answer import verdict_from_log
from memtrace.oomlog import MessageKind

MIB, GIB = 1 << 20, 1 << 30

GPU = [
    ("RuntimeError: NPU out of memory. NPUWorkspaceAllocator tried to allocate 1.50 GiB (NPU 3; 60.97 GiB total capacity; 57.45 GiB already allocated; 57.45 GiB current active; 1.25 GiB free; 57.50 GiB reserved in total by PyTorch)",
     MessageKind.ALLOCATOR, "npu", None, {"tried_bytes": 1536 * MIB, "device": 3, "free_bytes": 1280 * MIB}),
    ("RuntimeError: XPU out of memory. Tried to allocate 896.00 MiB (GPU 0; 15.50 GiB total capacity; 13.00 GiB already allocated; 13.25 GiB reserved in total by PyTorch)",
     MessageKind.ALLOCATOR, "xpu", None, {"tried_bytes": 896 * MIB, "device": 0, "free_bytes": None, "reserved_bytes": 13568 * MIB}),
    ("RuntimeError: Could not allocate tensor with 1207959552 bytes. There is not enough GPU video memory available!",
     MessageKind.ALLOCATOR, "dml", None, {"tried_bytes": 1207959552}),
    ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution", MessageKind.LIBRARY, "cuda", "cudnn", {}),
    ("RuntimeError: NVML_SUCCESS == DriverAPI::get()->nvmlDeviceGetHandleByPciBusId_v2_( pci_id, &nvml_device) INTERNAL ASSERT FAILED at \"../c10/cuda/CUDACachingAllocator.cpp\":1154, please report a bug to PyTorch.",
     MessageKind.HIDDEN, "cuda", None, {}),
    ("CUDA error 2 at ggml-cuda.cu:359: out of memory", MessageKind.FOREIGN, "cuda", "llama.cpp", {}),
    ("Cuda error in file 'src/gpu.cu' in line 31 : out of memory.", MessageKind.DRIVER, "cuda", None, {}),
    ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58", MessageKind.DRIVER,
     "cuda", None, {}),
    ("torch.AcceleratorError: CUDA error: out of memory", MessageKind.DRIVER, "cuda", None, {}),
    ("RuntimeError: HIP error: out of memory", MessageKind.DRIVER, "hip", None, {}),
    ("RuntimeError: CUDA driver error: out of memory", MessageKind.DRIVER, "cuda", None, {}),
    ("RuntimeError: Triton Error [CUDA]: out of memory", MessageKind.DRIVER, "cuda", None, {}),
    ("numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", MessageKind.DRIVER,
     "cuda", None, {}),
    ("RuntimeError: Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", MessageKind.DRIVER, "xpu",
     None, {}),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", MessageKind.LIBRARY, "cuda", "cudnn", {}),
    ("RuntimeError: CUDA error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`", MessageKind.LIBRARY,
     "cuda", "cusolver", {}),
    ("RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", MessageKind.LIBRARY, "cuda",
     "hipblas", {}),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.21.5\n"
     "Last error:\nCuda failure 2 'out of memory'", MessageKind.LIBRARY, "cuda", "nccl", {}),
    ("host:12:34 [3] NCCL WARN Cuda failure 'out of memory'", MessageKind.LIBRARY, "cuda", "nccl", {"rank": 3}),
    ("Failed to CUDA calloc async 4194304 bytes", MessageKind.LIBRARY, "cuda", "nccl", {"tried_bytes": 4194304}),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.", MessageKind.ALLOCATOR, "cuda", None,
     {"tried_bytes": None}),
    ("torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because it would exceed "
     "per_process_memory_fraction limit. Requested size: 512.00 MiB", MessageKind.ALLOCATOR, "cuda", None,
     {"tried_bytes": 512 * MIB, "torch_at_least": "2.12"}),
    ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of 16.50 GiB. Of "
     "the allocated memory 16.50 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. Please "
     "use `empty_cache` to release all unoccupied cached memory.", MessageKind.ALLOCATOR, "xpu", None,
     {"device": 1, "reserved_unallocated_bytes": 0, "free_bytes": None}),
    ("torch.OutOfMemoryError: Allocation on device \n\n2024-09-15 22:48:26,085 - root - ERROR - Got an OOM", MessageKind.ASYNC,
     "cuda", None, {"tried_bytes": None}),
    ("RuntimeError: Invalid buffer size: 7.82 GiB", MessageKind.METAL, "mps", None, {"tried_bytes": round(7.82 * GIB)}),
    ("RuntimeError: EL0004: [PID: 12] 2024-01-01 Failed to allocate memory.", MessageKind.DRIVER, "npu", None, {}),
    ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.",
     MessageKind.FOREIGN, None, "jax", {"tried_bytes": 4770354232}),
    ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
     MessageKind.FOREIGN, "cuda", "llama.cpp", {"tried_bytes": 4 * GIB, "device": 0}),
    ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,024,000 bytes (allocated so far: 5,000 bytes).",
     MessageKind.FOREIGN, "cuda", "cupy", {"tried_bytes": 1024000, "allocated_bytes": 5000}),
    ("2025-01-01 10:00:00.1: W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory "
     "trying to allocate 2.00GiB (rounded to 2147483648)requested by op", MessageKind.FOREIGN, "cuda", "tensorflow",
     {"tried_bytes": 2 * GIB}),
    (":0:rocdevice.cpp :2993: 12 us: Callback: Queue 0x7f aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime "
     "failed to allocate the necessary resources.", MessageKind.DRIVER, "hip", None, {}),
    ("Error: command buffer exited with error status.\n\tInsufficient Memory "
     "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", MessageKind.DRIVER, "mps", None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("log", "kind", "backend", "component", "fields"), GPU, ids=[row[0][:40] for row in GPU])
def test_gpu_texts(
    log: str, kind: MessageKind, backend: str | None, component: str | None, fields: dict[str, object]
) -> None:
    (message,) = parse_log("starting\n" + log + "\n")
    assert message.is_gpu_oom
    assert (message.kind, message.backend, message.component) == (kind, backend, component)
    assert {name: getattr(message, name) for name in fields} == fields


LOOK_ALIKES = [
    "E tensorflow/stream_executor/cuda/cuda_driver.cc:802] failed to alloc 245638656 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
    "1073741824 bytes.",
    "RuntimeError: [enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096 bytes. Error code 12 (Cannot allocate memory)",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.5 GiB for an array with shape (1, 2)",
    "MemoryError",
    "OSError: [Errno 12] Cannot allocate memory",
    "[12345.6] Out of memory: Killed process 1234 (python) total-vm:123kB",
    "Memory cgroup out of memory: Killed process 77 (python)",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
    " Signal 9 (SIGKILL) received by PID 1234",
    "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.",
    "./run.sh: line 12:  4242 Killed                  python train.py",
    "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)",
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.",
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are "
    "out of shared memory. Please try to raise your shared memory limit.",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache "
    "(12345). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (1.22 GiB).",
    "ValueError: Free memory on device (10.1/23.6 GiB) on startup is less than desired GPU memory utilization (0.9, 21 GiB).",
    "triton.runtime.errors.OutOfResources: out of resource: tensor memory, Required: 1024, Hardware limit: 512.",
    "OSError: [WinError 1455] The paging file is too small for this operation to complete",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "srun: error: gpu-12: task 0: Out Of Memory",
    "Warning  Evicted  2m  kubelet  The node was low on resource: memory. Threshold quantity: 100Mi, available: 20Mi.",
    "systemd-oomd[512]: Killed /user.slice/app.scope due to memory used (31.0G) / total (31.2G) being more than 90.00%",
    "Your session crashed after using all available RAM.",
    "Your notebook tried to allocate more memory than is available. It has restarted.",
    "finetune-1 exited with code 137",
    '"OOMKilled": true,',
]


@pytest.mark.parametrize("log", LOOK_ALIKES, ids=[text[:40] for text in LOOK_ALIKES])
def test_look_alikes(log: str) -> None:
    messages = parse_log("starting\n" + log + "\n")
    assert messages
    assert not any(message.is_gpu_oom for message in messages)
    assert messages[0].what
    assert verdict_from_log(messages).verdict in ("not_gpu_memory", "not_pytorch")


def test_gpu_message_is_judged_before_look_alikes_and_warnings() -> None:
    log = (
        "MemoryError\nmemory allocation failed with OOM on device 0 while trying to allocate 4096 bytes (free: 1, total: 2).\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB of "
        "which 0 bytes is free. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch "
        "but unallocated."
    )
    messages = parse_log(log)
    answer = verdict_from_log(messages)
    assert len(messages) == 3
    assert answer.oom is messages[2]
    assert answer.verdict == "budget"
