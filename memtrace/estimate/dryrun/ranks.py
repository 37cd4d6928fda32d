"""The other ranks of a run, which are not there: collectives return at once, and tensors keep their sizes.

This process is one rank, usually the first. A process group that does nothing stands in for NCCL, Gloo and every
rendezvous, so that what shards (FSDP, DDP, ZeRO, tensor parallelism, Trainers on top of them) runs its real code for
any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from memtrace.errors import UsageError
from memtrace.estimate.dryrun.assumed import Assumptions

_PLACE = {"LOCAL_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


def install(ranks: int, assumed: Assumptions, forget: Callable[[Any], None]) -> None:
    """Have ``torch.distributed`` be one of ``ranks``, as a launcher like torchrun would start it.

    Which one says the variable ``RANK``; the first without it. Whatever its number, it sees one card. ``forget`` makes
    a tensor's values unknown. Raises UsageError.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    text = os.environ.get("RANK", "0")
    if text not in map(str, range(ranks)):
        raise UsageError(f"RANK is {text!r}: there are ranks 0 to {ranks - 1} (--world-size {ranks})")
    rank = int(text)
    os.environ |= _PLACE | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    group = _group_class(forget)
    distributed.Backend.register_backend(
        "dry", lambda _store, rank, size, _timeout: group(rank, size), devices=["cpu", "cuda"]
    )
    begin, make_group = c10d.init_process_group, c10d._new_process_group_helper

    def init_process_group(*_args: Any, **_options: Any) -> None:
        others = f"{ranks - 1} other rank{'s' * (ranks != 2)} doing the same"
        if ranks > 1:
            assumed.note("ranks", f"{others}; what NCCL itself takes is not counted")
        begin("dry", store=distributed.HashStore(), rank=rank, world_size=ranks)

    def new_group(*args: Any, **options: Any) -> Any:
        size, rank, members, _backend, *rest = args
        return make_group(size, rank, members, "dry", *rest, **options | {"backend_options": None, "device_id": None})

    distributed.init_process_group = c10d.init_process_group = init_process_group
    c10d._new_process_group_helper = new_group
    c10d._store_based_barrier = lambda *_, **__: None
    distributed.recv_object_list = c10d.recv_object_list = _receive_object
    distributed.is_nccl_available = lambda: True
    distributed.Logger.set_runtime_stats_and_log = lambda _logger: None  # asks a clock of the card


def install_alone(assumed: Assumptions, forget: Callable[[Any], None]) -> None:
    """Have a program that starts NCCL with one rank be that rank; one with more ends and names ``--world-size``."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    begin = c10d.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
        size = options.get("world_size", -1)
        size = int(os.environ.get("WORLD_SIZE", "1")) if size < 1 else size
        if backend is not None and "nccl" not in str(backend):
            return begin(backend, *args, **options)
        if size > 1:
            raise RuntimeError(f"NCCL with {size} ranks in a dry run: memtrace dryrun --world-size {size} SCRIPT")
        install(1, assumed, forget)
        return distributed.init_process_group()

    distributed.init_process_group = c10d.init_process_group = init_process_group
    distributed.is_nccl_available = lambda: True


def _receive_object(*_: Any, **__: Any) -> None:
    raise RuntimeError("a dry run has no other rank that would send an object")


def _group_class(forget: Callable[[Any], None]) -> Any:
    import torch
    from torch._C import _distributed_c10d as library

    def done(result: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(result)
        return library._create_work_from_future(future)  # type: ignore[attr-defined]

    def collective(_group: Any, *tensors: Any, **_: Any) -> Any:
        return done(tensors[0] if tensors else [])

    def receive(_group: Any, tensors: Any, *_: Any) -> Any:
        """What another rank alone knows: a value that is asked of it is assumed."""
        for tensor in tensors:
            if tensor.is_cuda:
                forget(tensor)
        return done(tensors)

    class DryGroup(torch.distributed.ProcessGroup):  # type: ignore[misc]
        """Every collective is over when it begins."""

        def __init__(self, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self._size = size

        def size(self) -> int:
            return self._size

        def getBackendName(self) -> str:
            return "dry"

        @property
        def group_name(self) -> str:
            return str(torch.distributed.distributed_c10d._world.pg_names[self])

        def allgather(self, outputs: Any, inputs: Any, *_: Any) -> Any:
            """Small ones are read: the sizes and bytes of objects, say."""
            for gathered, own in zip(outputs, inputs, strict=True):
                for output in gathered:
                    output.detach().copy_(own)
            return done(outputs)

    DryGroup.recv = DryGroup.recv_anysource = receive
    for name in _COLLECTIVES:
        setattr(DryGroup, name, collective)
    return DryGroup
