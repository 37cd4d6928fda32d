"""GPU memory refused to another framework, perhaps one that shares the card or the process with PyTorch."""

from __future__ import annotations

from .message import Kind
from .table import Text, size_groups, text

FOREIGN: tuple[Text, ...] = (
    text(
        "cuda_error_out_of_memory",
        r"failedtoallocate[\d.]+[KMGT]?i?B?\((?P<tried>\d+)bytes\)fromdevice:CUDA_ERROR_OUT_OF_MEMORY",
        Kind.FOREIGN,
        "TensorFlow or XLA tried to take GPU memory for itself",
        backend="cuda",
        component="tensorflow",
    ),
    text(
        "oomwhenallocatingtensor",
        r"OOMwhenallocatingtensorwithshape.{0,200}?device:GPU:(?P<device>\d{1,4})(?:byallocator\w+)?",
        Kind.FOREIGN,
        "TensorFlow's allocator could not place a tensor",
        backend="cuda",
        component="tensorflow",
    ),
    text(
        "ranoutofmemorytryingtoallocate",
        rf"Allocator\(GPU_(?P<device>\d{{1,4}})\w*\)ranoutofmemorytryingtoallocate"
        rf"{size_groups('tried')}",
        Kind.FOREIGN,
        "TensorFlow's or XLA's allocator ran out of the memory it had taken",
        backend="cuda",
        component="tensorflow",
    ),
    text(
        "hbm",
        r"RESOURCE_?EXHAUSTED.{0,60}?Ranoutofmemoryinmemoryspacehbm",
        Kind.FOREIGN,
        "an XLA program does not fit a TPU",
        backend="tpu",
        component="jax",
    ),
    text(
        "exhausted",
        r"RESOURCE_?EXHAUSTED:.{0,60}?Outofmemory(?:whiletryingtoallocate|allocating)?"
        rf"(?:{size_groups('tried')})?",
        Kind.FOREIGN,
        "XLA (JAX or TensorFlow) could not get memory",
        component="jax",
    ),
    text(
        "unabletoallocate",
        r"\[malloc_or_wait\]Unabletoallocate(?P<tried>\d+)bytes",
        Kind.FOREIGN,
        "MLX, Apple's array framework, could not get memory",
        backend="mlx",
        component="mlx",
    ),
    text(
        "metal::malloc",
        r"\[metal::malloc\].{0,10}?(?:Attemptingtoallocate|Unabletoallocate)(?P<tried>\d+)bytes"
        r"(?:whichisgreaterthanthemaximumallowedbuffersizeof(?P<limit>\d+)bytes)?",
        Kind.FOREIGN,
        "MLX, Apple's array framework, asked for a larger buffer than Metal allows",
        backend="mlx",
        component="mlx",
    ),
    text(
        "kiogpucommandbuffer",
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory",
        Kind.FOREIGN,
        "a Metal command buffer ran out of memory",
        backend="mlx",
        component="mlx",
    ),
    text(
        "outofmemoryallocating",
        r"OutOfMemoryError:Outofmemoryallocating(?P<tried>[\d,]+)bytes"
        r"(?:\(allocatedsofar:(?P<allocated>[\d,]+)bytes)?(?:,limitsetto:(?P<limit>[\d,]+)bytes)?",
        Kind.FOREIGN,
        "CuPy's memory pool could not grow",
        backend="cuda",
        component="cupy",
    ),
    text(
        "cudamallocfailed",
        rf"allocating{size_groups('tried')}ondevice(?P<device>\d{{1,4}}):cudaMallocfailed:outofmemory",
        Kind.FOREIGN,
        "llama.cpp could not get a buffer on the GPU",
        backend="cuda",
        component="llama.cpp",
    ),
    text(
        "ggml",
        r"CUDAerror\d{0,3}at.{0,60}?ggml.{0,60}?:outofmemory",
        Kind.FOREIGN,
        "llama.cpp could not get memory on the GPU",
        backend="cuda",
        component="llama.cpp",
    ),
    text(
        "outofmemoryerrorongpu",
        rf"OutofmemoryerroronGPU(?P<device>\d{{1,4}})\.Cannotallocate{size_groups('tried')}memoryonGPU\d+"
        rf"(?:,{size_groups('allocated')}memoryhasbeenallocated)?(?:andavailablememoryisonly{size_groups('free')})?",
        Kind.FOREIGN,
        "PaddlePaddle's allocator could not get memory",
        backend="cuda",
        component="paddle",
    ),
    text(
        "requestedamountofgpumemory",
        r"RequestedamountofGPUmemory\((?P<tried>\d+)bytes\)couldnotbeallocated",
        Kind.FOREIGN,
        "TensorRT could not get memory",
        backend="cuda",
        component="tensorrt",
    ),
    text(
        "std::bad_alloc:out_of_memory",
        r"std::bad_alloc:out_of_memory:CUDAerrorat.{0,200}?cudaErrorMemoryAllocation|std::bad_alloc:out_of_memory",
        Kind.FOREIGN,
        "RAPIDS' memory manager could not get memory",
        backend="cuda",
        component="rmm",
    ),
    text(
        "vk_error_out_of_device_memory",
        r"VK_ERROR_OUT_OF_DEVICE_MEMORY",
        Kind.FOREIGN,
        "a Vulkan program could not get device memory",
        backend="vulkan",
        component="vulkan",
    ),
    text(
        "cudafailure",
        r"CUDAfailure\d+:outofmemory(?:;GPU=(?P<device>\d{1,4}))?",
        Kind.FOREIGN,
        "ONNX Runtime's CUDA provider was refused memory",
        backend="cuda",
        component="onnxruntime",
    ),
    text(
        "requestedbufferofsize",
        r"Failedtoallocatememoryforrequestedbufferofsize(?P<tried>\d+)",
        Kind.FOREIGN,
        "ONNX Runtime's arena could not grow",
        component="onnxruntime",
    ),
)
