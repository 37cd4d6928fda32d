"""Workspaces of convolutions: cuDNN's own answer for a card that is not there.

Since 9.8 cuDNN plans for a card that is described to it ("deviceless"), so where its library is installed (a CUDA build
of PyTorch brings it, ``nvidia-cudnn-cu13`` beside a CPU build) its heuristics say what they would choose on the card.
It runs in a process of its own, which may load what PyTorch must not (``cublaslt.c``) and die of what it dies of.
Sources: ``cudnn_graph.h`` of cuDNN 9; PyTorch 2.11 ``aten/src/ATen/native/cudnn/Conv_v8.cpp``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from memtrace.estimate.dryrun import helper
from memtrace.estimate.dryrun.partial_sums import on_card
from memtrace.estimate.dryrun.passes import Convolution
from memtrace.estimate.presets import GpuPreset, gpu_preset

_LIBRARY = "libcudnn.so.9"
_SINCE = 90800  # the first cuDNN that plans for a description
#: Nothing is loaded from the current folder (-P), and memtrace from where it is, behind everything else.
_START = f"import sys; sys.path.append(sys.argv[1]); from {__name__} import main; main(sys.argv[2], int(sys.argv[3]))"

#: cudnnBackendDescriptorType_t and cudnnBackendAttributeName_t.
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _PLAN, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 5, 15, 17, 38
_OPERATIONS = {  # descriptor, its attributes: x, y, w, convolution, alpha, beta
    "forward": (10, 704, 705, 703, 702, 700, 701),
    "data": (12, 710, 711, 709, 708, 706, 707),
    "filter": (11, 716, 717, 715, 714, 712, 713),
}
_HANDLE, _INT64, _FLOAT, _DESCRIPTOR, _CHAR = 0, 3, 4, 15, 24  # cudnnBackendAttributeType_t
_TYPES: dict[int, Any] = {_INT64: ctypes.c_int64, _FLOAT: ctypes.c_float, _DESCRIPTOR: ctypes.c_void_p}
_INSTANT, _FALLBACK = 0, 2  # cudnnBackendHeurMode_t
_TENSOR_CORES, _ROUNDS_INPUTS, _VARIES = 0, 1, 4  # cudnnBackendNumericalNote_t
DATA_TYPES = {"torch.float32": 0, "torch.float64": 1, "torch.float16": 2, "torch.bfloat16": 9}  # cudnnDataType_t
#: Shared memory of a block in KiB, threads and blocks of a multiprocessor, by compute capability: CUDA's guide.
_LIMITS = {
    (7, 0): (96, 2048, 32), (7, 5): (64, 1024, 16), (8, 0): (163, 2048, 32), (8, 6): (99, 1536, 16),
    (8, 9): (99, 1536, 24), (9, 0): (227, 2048, 32), (10, 0): (227, 2048, 32), (12, 0): (99, 1536, 24),
}  # fmt: skip


class Cudnn:
    """cuDNN's heuristics for ``gpu``, in a process that is started with the first question."""

    def __init__(self, gpu: GpuPreset) -> None:
        self._gpu = gpu
        self._known: dict[Convolution, list[int]] = {}
        self._lock = threading.Lock()

    def workspaces_bytes(self, asked: Convolution) -> list[int]:
        """What the plans need that cuDNN proposes, best first; empty where it is not installed or has no plan."""
        with self._lock:
            if asked not in self._known:
                answer: list[int] = []
                with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                    questions, answers = self._process.stdin, self._process.stdout
                    assert questions is not None and answers is not None
                    pickle.dump(asked, questions)
                    questions.flush()
                    answer = pickle.load(answers)
                self._known[asked] = answer
            return self._known[asked]

    @cached_property
    def _process(self) -> subprocess.Popen[bytes]:
        ours = str(Path(__file__).parents[3])
        command = [sys.executable, "-P", "-c", _START, ours, self._gpu.name, str(self._gpu.total_bytes)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


class _Planner:
    """cuDNN, loaded into this process, and the description of ``gpu``."""

    def __init__(self, gpu: GpuPreset) -> None:
        self._library, self._gpu = _load(), gpu.device
        text = json.dumps(_properties(gpu)).encode()
        self._device = self._new(_DEVICE)
        self._set(self._device, 2702, _CHAR, text)
        self._finish(self._device)

    def workspaces_bytes(self, asked: Convolution) -> list[int]:
        made: list[ctypes.c_void_p] = []
        found: list[int] = []
        with contextlib.suppress(OSError):
            found = [*self._plans(asked, _INSTANT, made)] or [*self._plans(asked, _FALLBACK, made)]
        for descriptor in reversed(made):
            self._library.cudnnBackendDestroyDescriptor(descriptor)
        return found

    def _plans(self, asked: Convolution, mode: int, made: list[ctypes.c_void_p]) -> Iterator[int]:
        configs = self._configs(asked, mode, made)
        for config in configs:
            engine = self._new(_ENGINE, made)
            self._get(config, 300, _DESCRIPTOR, ctypes.byref(engine))
            notes = (ctypes.c_int * 16)()
            count = self._get(engine, 1303, 11, notes, 16)
            if self._is_refused(asked, set(notes[:count])):
                continue
            plan = self._new(_PLAN, made)
            try:
                self._set(plan, 401, _DESCRIPTOR, [config])
                self._set(plan, 407, _DESCRIPTOR, [self._device])
                self._finish(plan)
            except OSError:
                continue
            size = ctypes.c_int64()
            self._get(plan, 402, _INT64, ctypes.byref(size))
            yield self._on_card(size.value, asked, plan)

    def _on_card(self, said_bytes: int, asked: Convolution, plan: ctypes.c_void_p) -> int:
        """The plan's workspace; Hopper's engines plan for one part of the card where they do not see it."""
        if self._gpu.capability != (9, 0):
            return said_bytes
        length = self._get(plan, 405, _CHAR, None, 0)
        text = ctypes.create_string_buffer(length + 1)
        self._get(plan, 405, _CHAR, text, length)
        choices: dict[str, int] = json.loads(text.value)["engine"].get("knobChoices", {})
        knobs = {name.removeprefix("CUDNN_KNOB_TYPE_"): choice for name, choice in choices.items()}
        return on_card(said_bytes, asked, knobs, self._gpu.multiprocessors)

    @staticmethod
    def _is_refused(asked: Convolution, notes: set[int]) -> bool:
        """As ``filterEngineConfigs``."""
        if _ROUNDS_INPUTS in notes or (asked.deterministic and _VARIES in notes):
            return True
        return asked.dtype == "torch.float32" and not asked.tf32 and _TENSOR_CORES in notes

    def _configs(self, asked: Convolution, mode: int, made: list[ctypes.c_void_p]) -> list[ctypes.c_void_p]:
        kind, x, y, w, convolution, alpha, beta = _OPERATIONS[asked.kind]
        described = self._new(_CONVOLUTION, made)
        dtype = DATA_TYPES[asked.dtype]
        self._enum(described, 100, 1, 0 if dtype in (2, 9) else dtype)  # 16 bits are summed in 32
        self._enum(described, 101, 7, 1)  # cross-correlation
        dims = len(asked.stride)
        for name, values in ((103, asked.stride), (105, asked.padding), (104, asked.padding), (102, asked.dilation)):
            self._set(described, name, _INT64, values)
        self._set(described, 106, _INT64, [dims])
        self._finish(described)
        operation = self._new(kind, made)
        for name, identity, sizes in ((x, b"x", asked.x), (y, b"y", asked.y), (w, b"w", asked.w)):
            self._set(operation, name, _DESCRIPTOR, [self._tensor(asked, identity[0], sizes, made)])
        self._set(operation, convolution, _DESCRIPTOR, [described])
        self._set(operation, alpha, _FLOAT, [1.0])
        self._set(operation, beta, _FLOAT, [0.0])
        self._finish(operation)
        graph = self._new(_GRAPH, made)
        self._set(graph, 801, _DESCRIPTOR, [operation])
        self._finish(graph)
        heuristics = self._new(_HEURISTICS, made)
        self._set(heuristics, 201, _DESCRIPTOR, [graph])
        self._enum(heuristics, 200, 8, mode)
        self._set(heuristics, 204, _DESCRIPTOR, [self._device])
        self._finish(heuristics)
        count = self._get(heuristics, 202, _DESCRIPTOR, None, 0)
        configs = [self._new(_CONFIG, made) for _ in range(count)]
        listed = (ctypes.c_void_p * max(count, 1))(*(config.value for config in configs))
        return configs[: self._get(heuristics, 202, _DESCRIPTOR, listed, count)]

    def _tensor(
        self, asked: Convolution, identity: int, sizes: tuple[int, ...], made: list[ctypes.c_void_p]
    ) -> ctypes.c_void_p:
        tensor = self._new(_TENSOR, made)
        self._enum(tensor, 901, 1, DATA_TYPES[asked.dtype])
        order = [0, *range(2, len(sizes)), 1] if asked.channels_last else range(len(sizes))
        strides, step = [0] * len(sizes), 1
        for dim in reversed(order):
            strides[dim] = step
            step *= sizes[dim]
        for name, values in ((902, sizes), (903, strides), (906, [identity]), (900, [16])):
            self._set(tensor, name, _INT64, values)
        return self._finish(tensor)

    # ---- the C interface; OSError where cuDNN refuses ------------------------------------------------------------
    def _new(self, kind: int, made: list[ctypes.c_void_p] | None = None) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(descriptor)))
        if made is not None:
            made.append(descriptor)
        return descriptor

    def _set(self, into: ctypes.c_void_p, name: int, kind: int, values: Sequence[Any]) -> None:
        given: Any = values
        if kind != _CHAR:
            plain = [value.value if isinstance(value, ctypes.c_void_p) else value for value in values]
            given = (_TYPES[kind] * len(plain))(*plain)
        self._check(self._library.cudnnBackendSetAttribute(into, name, kind, ctypes.c_int64(len(values)), given))

    def _enum(self, into: ctypes.c_void_p, name: int, kind: int, value: int) -> None:
        given = ctypes.c_int(value)
        self._check(self._library.cudnnBackendSetAttribute(into, name, kind, ctypes.c_int64(1), ctypes.byref(given)))

    def _get(self, of: ctypes.c_void_p, name: int, kind: int, into: Any, most: int = 1) -> int:
        count = ctypes.c_int64()
        self._check(
            self._library.cudnnBackendGetAttribute(of, name, kind, ctypes.c_int64(most), ctypes.byref(count), into)
        )
        return count.value

    def _finish(self, descriptor: ctypes.c_void_p) -> ctypes.c_void_p:
        self._check(self._library.cudnnBackendFinalize(descriptor))
        return descriptor

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(status, "cuDNN refuses")


def _load() -> ctypes.CDLL:
    """cuDNN, from NVIDIA's packages or where the system has it. Raises OSError where it is missing or too old."""
    folders = [Path(folder, place) for folder in sys.path for place in ("nvidia/cudnn/lib", "torch/lib")]
    own = [file for file in (folder / _LIBRARY for folder in folders) if file.exists()]
    library = ctypes.CDLL(str(own[0]) if own else _LIBRARY)
    library.cudnnGetVersion.restype = library.cudnnGetCudartVersion.restype = ctypes.c_size_t
    if library.cudnnGetVersion() < _SINCE:
        raise OSError("this cuDNN can't plan for a card that is not there")
    ctypes.CDLL(str(helper.stand_in_for_cublaslt(library.cudnnGetCudartVersion() // 1000)))
    return library


def _properties(gpu: GpuPreset) -> dict[str, Any]:
    """The card in cuDNN's words. What the heuristics do not look at has the numbers of an H200."""
    major, minor = gpu.device.capability
    limits = max((known for known in _LIMITS if known <= (major, minor)), default=(8, 0))
    shared_kib, threads, blocks = _LIMITS[limits]
    return {
        "deviceVer": 100 * major + 10 * minor, "driverVer": 13000, "cudaDeviceId": 0,
        "totalGlobalMem": gpu.total_bytes, "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536, "multiProcessorCount": gpu.device.multiprocessors, "warpSize": 32,
        "maxSharedMemoryPerBlock": 48 << 10, "maxSharedMemoryPerBlockOptin": shared_kib << 10,
        "reservedSharedMemoryPerBlock": 1 << 10, "maxRegistersPerSM": 65536, "maxCtasPerSM": blocks,
        "maxThreadsPerBlock": 1024, "maxThreadsPerSM": threads, "pciDeviceId": 0, "isTccDriver": 0,
        "supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 60 << 20,
        "deviceName": f"NVIDIA {gpu.name.upper()}",
    }  # fmt: skip


def main(gpu: str, total_bytes: int) -> None:
    """Answer each :class:`Convolution` on the standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # cuDNN may have something to say
    planner = _Planner(replace(gpu_preset(gpu), total_bytes=total_bytes))
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(planner.workspaces_bytes(pickle.load(sys.stdin.buffer)), answers)
            answers.flush()
