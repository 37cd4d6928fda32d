"""The facts about process, device and run that go into a snapshot's extra key ``memtrace``; builtin containers only."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from importlib import metadata
from typing import Any

from memtrace.record.backend import CudaBackend, import_torch
from memtrace.record.labels import Contents

FORMAT_VERSION = 1
_PACKAGES = ("transformers", "peft", "bitsandbytes", "accelerate", "trl", "deepspeed", "flash-attn", "triton", "numpy")
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_MAX_DEPTH, _MAX_ITEMS, _MAX_TEXT = 6, 400, 400


def distributed_is_up() -> bool:
    """Whether torch.distributed has a process group."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks: from torch.distributed where it is up, else from the launcher."""
    if distributed_is_up():
        distributed = sys.modules["torch"].distributed
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank, size in _RANK_VARIABLES:
        if os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a fine-tuning run's memory, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def process_facts(backend: CudaBackend, device: int) -> dict[str, Any]:
    """Versions, device, limit and memory of ``device`` now. Sizes are bytes; ``None`` where unknown."""
    torch = import_torch()
    rank, world_size = rank_and_world_size()
    facts: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "torch": str(torch.__version__),
        "cuda": getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None),
        "gpu": None,
        "capability": None,
        "device": device,
        "device_total_bytes": None,
        "device_free_bytes": None,
        "limit_bytes": None,
        "pid": os.getpid(),
        "rank": rank,
        "world_size": world_size,
        "packages": package_versions(),
        "stats": {},
    }
    with contextlib.suppress(RuntimeError):
        facts |= backend.device_facts(device)
    with contextlib.suppress(RuntimeError):
        free, total = backend.memory_info(device)
        facts |= {"device_free_bytes": free, "device_total_bytes": total}
        facts["limit_bytes"] = backend.limit_bytes(device)
    with contextlib.suppress(RuntimeError):
        stats = backend.stats(device)
        facts["stats"] = {key: value for key, value in stats.items() if isinstance(value, int | float | str | bool)}
    return facts


def run_config(models: list[Contents], optimizers: list[Any]) -> dict[str, Any]:
    """Model, adapter, quantisation, checkpointing and optimizer settings, as far as the objects tell them."""
    config: dict[str, Any] = {"argv": [str(word)[:_MAX_TEXT] for word in sys.argv], "models": [], "optimizers": []}
    for found in models[:4]:
        model = found.model
        entry: dict[str, Any] = {"class": type(model).__name__, "training": bool(getattr(model, "training", False))}
        inner = getattr(model, "module", model)  # DistributedDataParallel and the like
        settings: Any = getattr(inner, "config", None)
        with contextlib.suppress(Exception):  # other people's code
            entry["config"] = builtins_only(settings.to_dict())
        for name, adapter in dict(getattr(inner, "peft_config", None) or {}).items():
            with contextlib.suppress(Exception):
                entry.setdefault("peft", {})[str(name)] = builtins_only(adapter.to_dict())
        entry["gradient_checkpointing"] = found.is_checkpointed
        entry["parameters"] = sum(p.numel() for _, p in found.parameters)
        entry["trainable_parameters"] = sum(p.numel() for _, p in found.parameters if p.requires_grad)
        config["models"].append(entry)
    for optimizer in optimizers[:4]:
        defaults = builtins_only(getattr(optimizer, "defaults", {}))
        config["optimizers"].append({"class": type(optimizer).__name__, "defaults": defaults})
    return config


def builtins_only(value: Any, depth: int = 0) -> Any:
    """``value`` in dicts, lists, strings, numbers, booleans and ``None``; anything else as (bounded) text."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)[:_MAX_TEXT]
    if depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {str(k): builtins_only(v, depth + 1) for k, v in list(value.items())[:_MAX_ITEMS]}
        if isinstance(value, list | tuple | set | frozenset):
            return [builtins_only(item, depth + 1) for item in list(value)[:_MAX_ITEMS]]
    return str(value)[:_MAX_TEXT]
