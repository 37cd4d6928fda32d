"""Where each rank of a run is, on as many GPUs as there are.

python tests/gpu/sharing.py [RANKS]         # whether NCCL's ranks reach each other: exit code 0
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def place_of(rank: int, ranks: int, gpus: int) -> dict[str, str]:
    """The environment of a process that is one rank and sees one GPU."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
             "CUDA_VISIBLE_DEVICES": rank % gpus}  # fmt: skip
    return {key: str(value) for key, value in place.items()} | apart(rank, ranks, gpus)


def apart(rank: int, ranks: int, gpus: int) -> dict[str, str]:
    """What NCCL is told where ranks share GPUs: two of one host on one GPU it refuses.

    Each is a host of its own, which speaks to the others through sockets. What PyTorch asks of the GPU is the same.
    """
    if ranks <= gpus:
        return {}
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_BUFFSIZE": str(1 << 25)}  # fmt: skip


def _meet(meeting: str) -> None:
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("nccl", init_method=meeting, rank=rank, world_size=ranks)
    sent = torch.full((1 << 20,), float(rank + 1), device="cuda")
    torch.distributed.all_reduce(sent)
    assert sent.unique().tolist() == [ranks * (ranks + 1) / 2]
    os._exit(0)


def main(ranks: int) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--meet", f"file://{folder}/meeting"]
        places = [place_of(rank, ranks, torch.cuda.device_count()) for rank in range(ranks)]
        runs = [subprocess.Popen(command, env=os.environ | place) for place in places]
        codes = [run.wait() for run in runs]
    print(f"{ranks} ranks on {torch.cuda.device_count()} GPUs: exit codes {codes}")
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--meet"]:
        _meet(sys.argv[2])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 2)
