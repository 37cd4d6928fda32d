"""What cuDNN's convolutions ask PyTorch's allocator for, measured on a GPU, and what cuDNN says without one.

    python tests/gpu/check_convolutions.py properties OUT.json            # on the GPU: its properties in cuDNN's words
    python tests/gpu/check_convolutions.py measure FOLDER SECONDS         # on the GPU: rows as they come
    python tests/gpu/check_convolutions.py compare FOLDER/*.jsonl         # anywhere: beside the dry run

The convolutions are those of the vision models of ``scripts/zoo.py``, each shape once, in a random order, so that what
is there when the seconds are over stands for the whole.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tui"), str(ROOT / "tests/gpu/scripts")]
IMAGES = ((200, 32), (400, 32), (700, 32), (8, 224), (24, 224))  # batch, pixels
PROCESSES = 6
WAYS = (  # precision, layout, TF32, benchmark, one shape in so many
    ("float32", "contiguous_format", True, False, 1),
    ("bfloat16", "contiguous_format", True, False, 3),
    ("float16", "contiguous_format", True, False, 12),
    ("float32", "contiguous_format", False, False, 6),
    ("float32", "channels_last", True, False, 6),
    ("bfloat16", "channels_last", True, False, 6),
    ("float32", "contiguous_format", True, True, 30),
    ("bfloat16", "channels_last", True, True, 30),
)
Row = dict[str, Any]


def shapes() -> list[tuple[Any, ...]]:
    """(input, outputs, kernel, stride, padding, dilation, groups) of each convolution, once."""
    import torch
    import torchvision
    from zoo import VISION

    found = set()
    for name in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_"):
        setattr(torch.nn.init, name, lambda tensor, *_args, **_kwargs: tensor)  # the values are no matter

    def see(conv: Any, given: Any) -> None:
        size = tuple(given[0].shape)
        ways = conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups
        found.update(((batch, *size[1:]), *ways) for batch, pixels in IMAGES if pixels == seen)

    for name in VISION:
        model = getattr(torchvision.models, name)(num_classes=100).to("meta")
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_pre_hook(see)
        for seen in {pixels for _, pixels in IMAGES}:
            model(torch.empty(2, 3, seen, seen, device="meta"))
    return sorted(found)


def jobs() -> list[tuple[Any, ...]]:
    mixed = shapes()
    random.Random(7).shuffle(mixed)
    listed = [(shape, *way[:4]) for way in WAYS for shape in mixed[:: way[4]]]
    random.Random(3).shuffle(listed)
    return listed


def properties(out: Path) -> None:
    """The JSON that cuDNN makes of the card, for the same release to read where there is none."""
    import torch

    torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda"))
    library = ctypes.CDLL("libcudnn.so.9")
    made = ctypes.c_void_p()
    size, device = ctypes.c_int64(), ctypes.c_int32(0)
    statuses = [
        library.cudnnBackendCreateDescriptor(38, ctypes.byref(made)),
        library.cudnnBackendSetAttribute(made, 2700, 23, ctypes.c_int64(1), ctypes.byref(device)),
        library.cudnnBackendFinalize(made),
        library.cudnnBackendGetAttribute(made, 2702, 24, ctypes.c_int64(0), ctypes.byref(size), None),
    ]
    text = ctypes.create_string_buffer(size.value + 1)
    statuses.append(
        library.cudnnBackendGetAttribute(made, 2702, 24, ctypes.c_int64(size.value), ctypes.byref(size), text)
    )
    print("cuDNN", torch.backends.cudnn.version(), "statuses", statuses, text.raw[: size.value])
    out.write_bytes(text.raw[: size.value])


def measure(folder: Path, seconds: float) -> None:
    """In a few processes at once, each with a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    until, listed, children = time.monotonic() + seconds, jobs(), []
    print(len(listed), "convolutions", flush=True)
    for part in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            try:
                _measure(listed[part::PROCESSES], folder / f"{part}.jsonl", until)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    print(sum(len(file.read_text().splitlines()) for file in folder.glob("*.jsonl")), "measured")


def _measure(listed: list[tuple[Any, ...]], file: Path, until: float) -> None:
    import torch

    torch.set_num_threads(1)
    with file.open("w", buffering=1) as rows:
        for job in listed:
            if time.monotonic() > until:
                break
            try:
                row = _convolution(*job)
            except Exception as error:
                row = {"job": job, "error": f"{type(error).__name__}: {error}"[:200]}
            rows.write(json.dumps(row, separators=(",", ":")) + "\n")


def _convolution(shape: tuple[Any, ...], precision: str, layout: str, tf32: bool, benchmark: bool) -> Row:
    """What the passes of one convolution ask for, in order; with ``benchmark`` those that come later, too."""
    import torch

    size, width, kernel, stride, padding, dilation, groups = shape
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32
    dtype, order = getattr(torch, precision), getattr(torch, layout)
    x = torch.randn(size, device="cuda", dtype=dtype).to(memory_format=order).requires_grad_()
    weight = torch.randn(width, size[1] // groups, *kernel, device="cuda", dtype=dtype).to(memory_format=order)
    weight.requires_grad_()
    began, passes = time.monotonic(), []
    grad = None
    for _ in range(2 if benchmark else 1):
        y, forward = _asked(torch.nn.functional.conv2d, x, weight, None, stride, padding, dilation, groups)
        if grad is None:
            grad = torch.ones_like(y)
        given, data = _asked(torch.autograd.grad, y, x, grad, retain_graph=True)
        del given
        given, filters = _asked(torch.autograd.grad, y, weight, grad)
        del given, y
        passes.append([forward, data, filters])
    del x, weight, grad
    torch.cuda.empty_cache()
    return {
        "job": [shape, precision, layout, tf32, benchmark],
        "passes": passes,
        "s": round(time.monotonic() - began, 3),
    }


def _asked(run: Any, *given: Any, **ways: Any) -> tuple[Any, list[int]]:
    """What ``run`` gives, and the bytes that it asks for."""
    import torch

    torch.cuda.memory._record_memory_history(context=None, max_entries=1000)
    result = run(*given, **ways)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return result, [event["size"] for event in events if event["action"] == "alloc"]


def compare(files: list[str]) -> None:
    """How often what cuDNN says without a GPU is what it took on one, by precision, layout and pass."""
    from memtrace.estimate.dryrun.cudnn import Cudnn
    from memtrace.estimate.dryrun.passes import Convolution
    from memtrace.estimate.presets import gpu_preset

    cudnn, found = Cudnn(gpu_preset("h200")), defaultdict(list)
    for row in (json.loads(line) for file in files for line in Path(file).read_text().splitlines()):
        (x, width, kernel, stride, padding, dilation, groups), precision, layout, tf32, benchmark = row["job"]
        if benchmark or groups == x[1] > 1:
            continue  # measured to be the fastest; kernels of PyTorch's own
        sizes = zip(x[2:], kernel, stride, padding, dilation, strict=True)
        y = (x[0], width, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))
        w, last = (width, x[1] // groups, *kernel), layout != "contiguous_format"
        ways = tuple(padding), tuple(stride), tuple(dilation), tf32, False
        for kind, (_, *took) in zip(("forward", "data", "filter"), row["passes"][0], strict=True):
            asked = Convolution(kind, f"torch.{precision}", last, tuple(x), w, y, *ways)
            said = (*cudnn.workspaces_bytes(asked), 0)[0]
            found[precision, layout, f"tf32 {tf32}", kind].append(sum(took) - said)
    for key, missed in sorted(found.items()):
        near = sum(abs(size) <= 1024 for size in missed)
        print(
            *key, f"{len(missed)}: the same {missed.count(0)}, within 1 KiB {near}, more by {max(missed)} bytes at most"
        )


if __name__ == "__main__":
    if sys.argv[1] == "properties":
        properties(Path(sys.argv[2]))
    elif sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        compare(sys.argv[2:])
