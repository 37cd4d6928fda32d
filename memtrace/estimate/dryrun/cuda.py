"""``torch.cuda`` of a CPU build, as it is with one card: the C functions behind it, and what Python code compares."""

from __future__ import annotations

import itertools
import logging
import types
from typing import Any

from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.dryrun.streams import Moment

_IDLE = (
    "init", "setDevice", "ipc_collect", "resetAccumulatedMemoryStats", "set_sync_debug_mode",
    "lock_mutex", "unlock_mutex", "resetPeakHostMemoryStats", "set_cudnn_benchmark_limit",
)  # fmt: skip


def install(memory: DryMemory) -> None:
    """Have ``torch.cuda`` answer for the card of ``memory``, for the rest of this process."""
    import torch
    from torch.backends.cudnn import rnn

    _answer_in_c(torch._C, memory)
    cuda = torch.cuda
    gpu = memory.gpu
    major, minor = gpu.device.capability
    properties = types.SimpleNamespace(
        name=f"NVIDIA {gpu.name.upper()}", major=major, minor=minor, total_memory=memory.total_bytes,
        multi_processor_count=gpu.device.multiprocessors, warp_size=32, L2_cache_size=50 << 20, uuid="dry-run",
        max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, gcnArchName="",
    )  # fmt: skip
    cuda._cudart = types.SimpleNamespace(
        cudaMemGetInfo=lambda _device: (memory.free_bytes, memory.total_bytes),
        cudaGetErrorString=str,
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda *_: 0,
        cudaProfilerStart=_nothing,
        cudaProfilerStop=_nothing,
    )
    torch.version.cuda = "13.0"
    cuda._CudaDeviceProperties = types.SimpleNamespace
    cuda.get_device_properties = lambda _device=None: properties
    cuda._exchange_device = cuda._maybe_exchange_device = lambda _device: 0
    cuda.default_generators = (torch.Generator("cuda"),)
    cuda._check_capability = cuda._check_cubins = _nothing
    cuda.graphs._cuda_isCurrentStreamCapturing = cuda.is_current_stream_capturing = lambda: False
    cuda.device_count = lambda: 1
    cuda._is_in_bad_fork = lambda: False  # there is no card that a fork would lose
    _install_streams(torch, memory)
    cuda.current_blas_handle = lambda: 0
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _nothing
    torch.backends.cuda.is_built = lambda: True
    known = torch.backends.cudnn.is_acceptable.__globals__  # the modules themselves are behind others
    known["is_available"] = known["_init"] = torch.backends.cudnn.is_available = lambda: True
    torch.backends.cudnn.version = lambda: 91501
    modes = types.SimpleNamespace(rnn_relu=0, rnn_tanh=1, lstm=2, gru=3)  # cudnnRNNMode_t
    rnn.get_cudnn_mode.__globals__["_cudnn"] = types.SimpleNamespace(RNNMode=modes)
    _storages_on_the_device(torch, memory)


def page_states() -> None:
    """bitsandbytes' paged states lie in managed memory, outside PyTorch's allocator: here in the host's."""
    import torch

    logging.disable(logging.WARNING)  # which kernels its CPU part lacks is no matter here
    try:
        from bitsandbytes import functional
    finally:
        logging.disable(logging.NOTSET)

    def get_paged(*shape: int, dtype: Any = torch.float32, **_: Any) -> Any:
        made = torch.empty(shape, dtype=dtype)
        made.is_paged, made.page_deviceid = True, 0
        return made

    functional.get_paged, functional.fill, functional.prefetch_tensor = get_paged, _nothing, _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _answer_in_c(c: Any, memory: DryMemory) -> None:
    history = {"on": False}

    def record(enabled: Any = "all", *rest: Any, **_: Any) -> None:  # context, stacks, entries
        history["on"] = enabled is not None
        memory.record(min(rest[2], 1 << 40) if enabled is not None else None)

    answers: dict[str, Any] = {
        "getDeviceCount": lambda: 1,
        "getDevice": lambda: 0,
        "exchangeDevice": lambda _device: 0,
        "maybeExchangeDevice": lambda _device: 0,
        "canDeviceAccessPeer": lambda *_: False,
        "getCompiledVersion": lambda: 13000,
        "getArchFlags": lambda: "sm_{}{}".format(*memory.gpu.device.capability),
        "isInBadFork": lambda: False,
        "getAllocatorBackend": lambda: "native",
        "memoryStats": lambda _device: memory.stats(),
        "hostMemoryStats": dict,
        "resetPeakMemoryStats": lambda _device: memory.reset_peaks(),
        "memorySnapshot": lambda *_: memory.snapshot(),
        "emptyCache": memory.empty_cache,
        "synchronize": memory.streams.wait_for_all,
        "setMemoryFraction": lambda fraction, _device: memory.set_fraction(fraction),
        "getMemoryFraction": lambda _device: memory.fraction,
        "record_memory_history": record,
        "isHistoryEnabled": lambda: history["on"],
        "attach_out_of_memory_observer": memory.observers.append,
        "setMemoryMetadata": memory.set_metadata,
        "get_sync_debug_mode": lambda: 0,
        "get_cudnn_benchmark_limit": lambda: 10,
    }
    for name, answer in (dict.fromkeys(_IDLE, _nothing) | answers).items():
        setattr(c, f"_cuda_{name}", answer)
    c._scatter = lambda x, _devices, _sizes, dim, *_: (x.chunk(1, dim)[0].to("cuda"),)  # DataParallel, on one card


def _install_streams(torch: Any, memory: DryMemory) -> None:
    """Streams, which operators take, too; memory of one is cached apart. See ``streams.py`` for when work is over."""
    count, streams = itertools.count(1), memory.streams

    class DryStream(torch.Stream):  # type: ignore[misc]
        priority = 0

        def __new__(cls, *_args: Any, number: int | None = None, **_kwargs: Any) -> Any:
            number = next(count) if number is None else number
            return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        def record_event(self, event: Any = None) -> Any:
            return (event or DryEvent()).record(self)

        def wait_event(self, event: Any) -> None:
            streams.follow(self.stream_id, event.moment)

        def wait_stream(self, stream: Any) -> None:
            streams.follow(self.stream_id, streams.moment(stream.stream_id))

        def synchronize(self) -> None:
            streams.wait(streams.moment(self.stream_id))

        def query(self) -> bool:
            return True

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    class DryEvent:
        """An event; between two of them lies a millisecond."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self.cuda_event = 0
            self.moment: Moment = {}

        def record(self, stream: Any = None) -> DryEvent:
            """PyTorch's returns nothing, and FSDP keeps what it returns."""
            self.moment = streams.moment(memory.stream if stream is None else stream.stream_id)
            return self

        def wait(self, stream: Any = None) -> None:
            streams.follow(memory.stream if stream is None else stream.stream_id, self.moment)

        def synchronize(self) -> None:
            streams.is_ahead = True
            streams.wait(self.moment)

        def query(self) -> bool:
            """Whether it has happened: a program that asks until it has is not kept waiting."""
            streams.wait(self.moment)
            return True

        def elapsed_time(self, _end: DryEvent) -> float:
            """Milliseconds."""
            return 1.0

    def choose(stream: Any) -> None:
        if stream is not None:
            memory.stream = stream.stream_id

    torch.cuda.Stream = torch.cuda.streams.Stream = torch.cuda.ExternalStream = DryStream
    torch.cuda.Event = torch.cuda.streams.Event = DryEvent
    torch.cuda.default_stream = lambda _device=None: DryStream(number=0)
    torch.cuda.current_stream = lambda _device=None: DryStream(number=memory.stream)
    torch.cuda.set_stream = choose


def _storages_on_the_device(torch: Any, memory: DryMemory) -> None:
    """``torch.UntypedStorage(size, device="cuda")`` and the like, which a CPU build refuses."""
    storage = torch.UntypedStorage
    original, read_file, write_file = storage.__new__, storage._set_from_file, storage._write_file
    resize_on_host = storage.resize_

    def resize(self: Any, size: int) -> Any:
        if not self.is_cuda:
            return resize_on_host(self, size)
        if not memory.resize(self._cdata, size):
            raise torch.OutOfMemoryError(memory.refusal)
        return self

    def read(self: Any, *args: Any) -> Any:
        on_host = storage(self.nbytes())
        read_file(on_host, *args)
        return self.copy_(on_host)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "cuda":
            return original(cls, *args, **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device="cuda").untyped_storage()

    storage.__new__, storage.resize_ = new, resize
    storage._set_from_file = lambda self, *args: (read if self.is_cuda else read_file)(self, *args)
    storage._write_file = lambda self, *args: write_file(self.cpu() if self.is_cuda else self, *args)
    storage.clone = lambda self: type(self)(self.nbytes(), device=self.device).copy_(self)
