"""Everything memtrace asks of ``torch.cuda.memory``, behind one small class that tests replace.

No other module of memtrace touches the CUDA allocator. :func:`get` returns the backend in use; a test hands its own
object, with the same methods, to :func:`use`. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError

OomObserver = Callable[[int, int, int, int], None]
"""Called with (device, bytes of the failing request, bytes of the limit or device in use, free bytes of the device)."""

MIN_TORCH = (2, 1)
_CPU_ONLY = (
    "this PyTorch ({version}) is a CPU-only build: there is no GPU memory to record; "
    "install a CUDA build, or let memtrace dryrun run the script without a GPU"
)
_NO_HISTORY = (
    "the allocator backend is {backend}, which keeps no history; "
    "remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF to record"
)


class CudaBackend:
    """PyTorch's native CUDA caching allocator."""

    device_type = "cuda"
    _replaced: tuple[Any, Any] | None = None  # PyTorch's function that starts and stops recording, and ours

    def precheck(self) -> None:
        """What :meth:`require` checks, as far as it can be known without importing PyTorch or touching the GPU.

        A program under ``memtrace run`` may still set variables that PyTorch reads when it is imported, choose its GPU,
        or fork; so neither may happen before it runs.
        """
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise MissingDependencyError("recording needs PyTorch, which is not installed here")
        built = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
        self._check_version(str(built["__version__"]))
        if not (built.get("cuda") or built.get("hip")):
            raise MissingDependencyError(_CPU_ONLY.format(version=built["__version__"]))
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            if "cudaMallocAsync" in os.environ.get(name, ""):
                raise MissingDependencyError(_NO_HISTORY.format(backend="cudaMallocAsync"))
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            raise MissingDependencyError("CUDA_VISIBLE_DEVICES hides every GPU: there is nothing to record")
        if built.get("cuda") and not _driver_present():
            raise MissingDependencyError("no NVIDIA driver (libcuda) is found here: there is no GPU to record")

    def when_ready(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` when the program first uses the GPU (at once if it has). PyTorch must be imported."""
        import_torch().cuda._lazy_call(begin)

    @staticmethod
    def _check_version(version: str) -> None:
        if parse_version(version) < MIN_TORCH:
            raise MissingDependencyError(
                f"PyTorch {version} is too old to record a memory history; 2.1 or newer is needed"
            )

    def require(self) -> None:
        """Raise :class:`MissingDependencyError` with one clear line unless this process can record."""
        torch = import_torch()
        self._check_version(str(torch.__version__))
        if getattr(torch.version, "cuda", None) is None and getattr(torch.version, "hip", None) is None:
            raise MissingDependencyError(_CPU_ONLY.format(version=torch.__version__))
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                "PyTorch finds no usable GPU (torch.cuda.is_available() is False): check the driver, "
                "CUDA_VISIBLE_DEVICES, and that the container sees the GPU"
            )
        get_backend = getattr(torch.cuda, "get_allocator_backend", None)
        if get_backend is not None and get_backend() != "native":
            raise MissingDependencyError(_NO_HISTORY.format(backend=get_backend()))

    def start(self, stacks: str, max_entries: int, on_stopped: Callable[[], None] | None = None) -> str:
        """Switch recording on for every device; returns the stacks really recorded.

        CUDA is initialised first: an OOM observer or a recording attached before that crashes some releases. Where the
        C++ unwinder fails, Python stacks are recorded instead. ``on_stopped`` is called if the program switches the
        recording off, before that happens.
        """
        torch = import_torch()
        torch.cuda.init()
        self._listen(torch.cuda.memory, on_stopped)
        _keep_errors_of_recomputations(torch)
        record = functools.partial(self._record(), enabled="all", context="all", max_entries=max_entries)
        try:
            record(stacks=stacks)
            if stacks == "all":
                self._probe_unwinder()
        except RuntimeError:
            if stacks != "all":
                raise
            with contextlib.suppress(RuntimeError):
                self._record()(enabled=None)
            record(stacks="python")
            return "python"
        return stacks

    def _listen(self, memory: Any, on_stopped: Callable[[], None] | None) -> None:
        if on_stopped is None or self._replaced is not None:
            return
        original = memory._record_memory_history

        @functools.wraps(original)
        def _record_memory_history(enabled: Any = "all", *args: Any, **options: Any) -> Any:
            if not enabled:
                on_stopped()
                self._restore()
            return original(enabled, *args, **options)

        memory._record_memory_history = _record_memory_history
        self._replaced = original, _record_memory_history

    def _record(self) -> Any:
        """PyTorch's own ``_record_memory_history``."""
        return self._replaced[0] if self._replaced is not None else import_torch().cuda.memory._record_memory_history

    @staticmethod
    def _probe_unwinder() -> None:
        """Unwind one stack without allocating GPU memory; raises RuntimeError where the unwinder is broken."""
        gather = getattr(import_torch()._C._profiler, "gather_traceback", None)
        if gather is not None:
            gather(python=True, script=False, cpp=True)

    def stop(self) -> None:
        """Switch recording off and drop the history."""
        self._record()(enabled=None)
        self._restore()

    def _restore(self) -> None:
        if self._replaced is not None:
            memory = import_torch().cuda.memory
            if memory._record_memory_history is self._replaced[1]:
                memory._record_memory_history = self._replaced[0]
            self._replaced = None

    def is_recording(self) -> bool:
        """Whether PyTorch is recording; true where it can't be asked."""
        ask = getattr(import_torch()._C, "_cuda_isHistoryEnabled", None)
        return ask is None or bool(ask())

    def snapshot(self) -> dict[str, Any]:
        """PyTorch's own snapshot dictionary, unchanged."""
        taken: dict[str, Any] = import_torch().cuda.memory._snapshot()
        return taken

    def blocks(self) -> dict[str, Any]:
        """PyTorch's snapshot of segments and blocks without the history; with it before 2.10, which can't leave it out.

        A block's stack is there where its allocation was recorded.
        """
        torch = import_torch()
        if "include_traces" not in inspect.signature(torch.cuda.memory.memory_snapshot).parameters:
            return self.snapshot()
        taken: dict[str, Any] = torch._C._cuda_memorySnapshot((0, 0, False))
        return taken

    def stats(self, device: int) -> dict[str, Any]:
        """``torch.cuda.memory_stats`` of one device."""
        return dict(import_torch().cuda.memory_stats(device))

    def levels(self, device: int) -> tuple[int, int, int, int, int, int]:
        """Allocated and reserved bytes, the peaks of both, free bytes in segments that are partly in use, and how often
        a request went through only after all cached memory had been given back; a fraction of what ``stats`` takes."""
        nested = import_torch().cuda.memory_stats_as_nested_dict(device)
        names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        allocated, reserved, holes = (nested.get(name, {}).get("all", {}) for name in names)
        current, peak = ([int(found.get(key, 0)) for found in (allocated, reserved)] for key in ("current", "peak"))
        return *current, *peak, int(holes.get("current", 0)), int(nested.get("num_alloc_retries", 0))  # type: ignore[return-value]

    def reset_peaks(self, device: int) -> None:
        """Begin PyTorch's peak statistics anew."""
        import_torch().cuda.reset_peak_memory_stats(device)

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of the device, all processes counted."""
        free, total = import_torch().cuda.mem_get_info(device)
        return int(free), int(total)

    def limit_bytes(self, device: int) -> int | None:
        """What ``set_per_process_memory_fraction`` leaves; ``None`` where unset or unknown (PyTorch before 2.6)."""
        get_fraction = getattr(import_torch().cuda, "get_per_process_memory_fraction", None)
        if get_fraction is None:
            return None
        fraction = float(get_fraction(device))
        return int(self.memory_info(device)[1] * fraction) if fraction < 1.0 else None

    def limit(self, size_bytes: int) -> None:
        """Let this process reserve no more than ``size_bytes`` of the current device, as a smaller card would."""
        cuda = import_torch().cuda
        total = cuda.get_device_properties(cuda.current_device()).total_memory
        cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total))

    def attach_oom_observer(self, observer: OomObserver) -> None:
        """Have ``observer`` called before an OutOfMemoryError unwinds anything. PyTorch offers no way to detach it."""
        torch = import_torch()
        torch.cuda.init()
        torch._C._cuda_attach_out_of_memory_observer(observer)

    def set_metadata(self, text: str) -> None:
        """Stamp the calling thread's next events with ``text`` (PyTorch 2.10 and newer)."""
        import_torch().cuda.memory._set_memory_metadata(text)

    def has_metadata(self) -> bool:
        """Whether :meth:`set_metadata` exists."""
        return hasattr(import_torch().cuda.memory, "_set_memory_metadata")

    def current_device(self) -> int:
        """Ordinal of the calling thread's device."""
        return int(import_torch().cuda.current_device())

    def device_facts(self, device: int) -> dict[str, Any]:
        """Name and compute capability."""
        cuda = import_torch().cuda
        return {"gpu": cuda.get_device_name(device), "capability": list(cuda.get_device_capability(device))}

    def synchronize(self) -> None:
        """Wait for the GPU."""
        import_torch().cuda.synchronize()


def import_torch() -> Any:
    """The torch module, or one clear line where PyTorch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            f"recording needs PyTorch, which cannot be imported here ({error})", "capture"
        ) from None
    return torch


def parse_version(version: str) -> tuple[int, int]:
    """(major, minor) of a PyTorch version."""
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])


def _keep_errors_of_recomputations(torch: Any) -> None:
    """Work around a fault of PyTorch 2.11 under Python before 3.13 (pytorch/pytorch issue 179536; 2.12 has none).

    While it records a stack inside a backward pass, it looks up the "traceback_" of the node that runs. Where there is
    none it drops the Python error that is on its way, such as the one by which checkpointing ends a recomputation.
    So the nodes that recompute get an empty one.
    """
    if parse_version(str(torch.__version__)) != (2, 11) or sys.version_info >= (3, 13):
        return
    from torch.utils import checkpoint

    original = checkpoint._recomputation_hook
    if hasattr(original, "__wrapped__"):  # a second recording
        return

    @functools.wraps(original, updated=())
    def recomputation_hook(*args: Any) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None:
            node.metadata.setdefault("traceback_", [])
        return original(*args)

    checkpoint._recomputation_hook = recomputation_hook


def _driver_present() -> bool:
    """Whether the driver's library can be loaded; it is not initialised, so that the program may still fork."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


_in_use: list[CudaBackend] = [CudaBackend()]


def get() -> CudaBackend:
    """The backend every recorder uses."""
    return _in_use[-1]


@contextlib.contextmanager
def use(backend: Any) -> Any:
    """Replace the backend for the duration of a ``with`` block (for tests)."""
    _in_use.append(backend)
    try:
        yield backend
    finally:
        _in_use.remove(backend)
