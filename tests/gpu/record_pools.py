"""Record small programs that do to the allocator what few do: pools, graphs, slept engines, settings that change.

    python3 tests/gpu/record_pools.py --out DIR [--only NAME …]

Every run is a fresh process. ``DIR/pools.tar`` holds ``NAME.pickle.xz`` and ``NAME.info.json`` (settings, what PyTorch
counted, the refused request if there was one); ``DIR/outside.jsonl`` what the card's memory outside the allocator does
at known points (context, cuBLAS, cuDNN, NCCL, managed memory, another process), by the driver and by NVML, and
``one_rank.pickle`` what memtrace's own recorder makes of it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
MIB = 1 << 20


def churn(seed: int, rounds: int = 40, most_mib: int = 24, held: list[Any] | None = None) -> list[Any]:
    """Tensors of many sizes are born and die in no order; returns those left."""
    draw = random.Random(seed)
    held = [] if held is None else held
    for _ in range(rounds):
        if held and draw.random() < 0.45:
            held.pop(draw.randrange(len(held)))
        size = draw.choice((draw.randint(1, 400_000), draw.randint(MIB, most_mib * MIB)))
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return held


# pools
def pool() -> None:
    """``use_mem_pool``: in and out of a pool, which is then given up."""
    outside = churn(0)
    made = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(made):
        inside = churn(1)
    churn(2, held=outside)
    with torch.cuda.use_mem_pool(made):
        churn(3, held=inside)
    inside.clear()
    torch.cuda.empty_cache()
    del made
    torch.cuda.empty_cache()
    churn(4, held=outside)


def pool_in_need() -> None:
    """``use_on_oom``: a pool's free memory serves requests from outside when the limit is reached."""
    made = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(made):
        inside = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del inside[:]
    limit_mib(512)
    held = []
    for _ in range(8):
        held.append(torch.empty(60 * MIB, dtype=torch.uint8, device="cuda"))


def pool_unsplit() -> None:
    """``no_split``: segments of a pool stay whole."""
    made = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(made):
        inside = churn(5)
        churn(6, held=inside)
    churn(7)


def pool_of_nccl() -> None:
    """A pool whose memory comes from NCCL's allocator, as tensors for zero-copy collectives do."""
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    back_end = torch.distributed.group.WORLD._get_backend(torch.device("cuda"))
    outside = churn(0, 10)
    made = torch.cuda.MemPool(back_end.mem_allocator)
    with torch.cuda.use_mem_pool(made):
        inside = churn(1, 20)
    torch.distributed.all_reduce(inside[-1])
    inside.clear()
    del made
    torch.cuda.empty_cache()
    churn(2, 10, held=outside)


SLEEPER = r"""
#include <cuda.h>
#include <map>
#include <sys/types.h>
// As serving engines do: addresses stay reserved while the memory behind them is given back and brought in again.
struct Part { size_t size; CUmemGenericAllocationHandle handle; };
static std::map<CUdeviceptr, Part> parts;
static CUmemAllocationProp prop(int device) {
  CUmemAllocationProp p = {}; p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE; p.location.id = device; return p;
}
static void map(CUdeviceptr at, Part& part, int device) {
  CUmemAllocationProp p = prop(device); cuMemCreate(&part.handle, part.size, &p, 0);
  cuMemMap(at, part.size, 0, part.handle, 0);
  CUmemAccessDesc access = {}; access.location = p.location; access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  cuMemSetAccess(at, part.size, &access, 1);
}
extern "C" {
void* take(ssize_t size, int device, CUstream) {
  size_t unit = 2 << 20; CUdeviceptr at; Part part = {(size + unit - 1) / unit * unit, 0};
  cuMemAddressReserve(&at, part.size, 0, 0, 0); map(at, part, device); parts[at] = part; return (void*)at;
}
void give(void* pointer, ssize_t, int, CUstream) {
  CUdeviceptr at = (CUdeviceptr)pointer; Part part = parts[at];
  if (part.handle) { cuMemUnmap(at, part.size); cuMemRelease(part.handle); }
  cuMemAddressFree(at, part.size); parts.erase(at);
}
void sleep_all() {
  for (auto& [at, part] : parts) { cuMemUnmap(at, part.size); cuMemRelease(part.handle); part.handle = 0; }
}
void wake_all() { for (auto& [at, part] : parts) map(at, part, 0); }
}
"""


def sleeping() -> None:
    """A pool of virtual addresses that sleeps and wakes, as vLLM's weights and caches do."""
    folder = Path(tempfile.mkdtemp())
    (folder / "sleeper.cpp").write_text(SLEEPER)
    site = Path(torch.__file__).parent.parent
    places = (site / "nvidia", site / "triton", Path("/usr/local"))
    headers = next(found.parent for place in places for found in place.glob("**/cuda.h"))
    library = folder / "sleeper.so"
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{headers}", str(folder / "sleeper.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "take", "give")
    calls = ctypes.CDLL(str(library))
    made = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(made):
        weights = [torch.empty(48 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for night in range(2):
        used = churn(night, 16)
        torch.cuda.synchronize()
        del used
        torch.cuda.empty_cache()
        FREE.append(torch.cuda.mem_get_info()[0])
        calls.sleep_all()
        FREE.append(torch.cuda.mem_get_info()[0])
        training = churn(10 + night, 30)
        del training
        torch.cuda.empty_cache()
        calls.wake_all()
        weights[0].fill_(1)
    torch.cuda.synchronize()


FREE: list[int] = []


# graphs
def graphs() -> None:
    """Two graphs of one pool, replayed, and given up."""
    static = torch.zeros(4 * MIB, device="cuda")
    side = torch.cuda.Stream()
    outside = churn(0)

    def work(rounds: int) -> Any:
        x = static
        for i in range(rounds):
            x = x * 2 + torch.ones(i % 3 + 1, 1, device="cuda").sum()
        return x

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(3)
    torch.cuda.current_stream().wait_stream(side)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        out = work(6)
    with torch.cuda.graph(second, pool=first.pool()):
        other = work(4)
    for _ in range(3):
        first.replay()
        second.replay()
        churn(1, 10, held=outside)
    torch.cuda.synchronize()
    del out, first
    churn(2, 10, held=outside)
    del other, second
    torch.cuda.empty_cache()
    churn(3, 10, held=outside)


# settings
def changed() -> None:
    """Settings that change in the middle of the run."""
    held = churn(0)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    churn(1, 30, held=held)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False,max_split_size_mb:20")
    churn(2, 30, held=held)


def engine() -> None:
    """An engine that gives its memory up by deleting it: weights, then a cache, ``empty_cache`` between."""
    for night in range(3):
        weights = [torch.empty((17 + 3 * i) * MIB, dtype=torch.uint8, device="cuda") for i in range(6)]
        cache = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
        used = churn(night, 16)
        del cache
        torch.cuda.empty_cache()
        churn(20 + night, 16, held=used)
        del weights, used
        torch.cuda.empty_cache()


def limit_mib(mib: int) -> None:
    torch.cuda.set_per_process_memory_fraction(mib * MIB / torch.cuda.get_device_properties(0).total_memory)


EXPANDABLE, ASYNC = "expandable_segments:True", "backend:cudaMallocAsync"
RUNS: dict[str, tuple[Callable[[], Any], str]] = {
    "pool": (pool, ""), "pool-expandable": (pool, EXPANDABLE),
    "pool-in-need": (pool_in_need, ""), "pool-unsplit": (pool_unsplit, ""), "pool-of-nccl": (pool_of_nccl, ""),
    "graphs": (graphs, ""), "graphs-expandable": (graphs, EXPANDABLE),
    "sleeping": (sleeping, ""), "engine": (engine, ""), "engine-expandable": (engine, EXPANDABLE),
    "changed": (changed, ""), "async": (lambda: churn(0), ASYNC),
}  # fmt: skip


def work(name: str, out: Path) -> None:
    """One recorded run in this process."""
    do, conf = RUNS[name]
    info: dict[str, Any] = {"name": name, "conf": conf, "torch": torch.__version__, "error": None, "oom": None}
    torch.zeros(1, device="cuda")
    try:
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        kept = do()
        del kept
    except torch.OutOfMemoryError as error:
        info["oom"] = str(error)
    except Exception as error:  # of any kind: what it says is what is asked
        info["error"] = f"{type(error).__name__}: {error}"
    try:
        snapshot = torch.cuda.memory._snapshot()
        (out / f"{name}.pickle.xz").write_bytes(lzma.compress(pickle.dumps(snapshot, 4)))
        info["events"] = len(snapshot["device_traces"][0])
    except Exception as error:
        info["no_snapshot"] = f"{type(error).__name__}: {error}"
    info["stats"] = {k: v for k, v in torch.cuda.memory_stats().items() if ".all." in k or k.startswith("num_")}
    info |= {"gpu": torch.cuda.get_device_name(0), "free": [*FREE, *torch.cuda.mem_get_info()]}
    (out / f"{name}.info.json").write_text(json.dumps(info, indent=1))
    os._exit(0)


# outside the allocator
def outside(out: Path) -> None:
    """What the card's memory does when the owners of what lies outside the allocator come, one after the other."""
    from memtrace.record.outside import by_process

    def read(after: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        row = {"after": after, "used": total - free, "reserved": torch.cuda.memory_reserved(), "pid": os.getpid()}
        row |= {"processes": by_process(0)}
        with (out / "outside.jsonl").open("a") as lines:
            print(json.dumps(row), file=lines)

    torch.cuda.init()
    read("init")
    x = torch.zeros(1 << 20, device="cuda").add(1).mul(2)
    read("first kernels")
    a = torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.current_blas_handle()
    read("cuBLAS handle")
    a @ a
    read("cuBLAS product")
    torch.nn.functional.linear(a, a, a[0])
    read("cuBLASLt product")
    q = torch.zeros(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    read("attention")
    torch.nn.functional.conv2d(torch.zeros(4, 64, 64, 64, device="cuda"), torch.zeros(64, 64, 3, 3, device="cuda"))
    read("cuDNN convolution")
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    read("process group")
    torch.distributed.all_reduce(x)
    read("first collective")
    group = torch.distributed.new_group([0])
    torch.distributed.all_reduce(x, group=group)
    read("second communicator")
    back_end = torch.distributed.group.WORLD._get_backend(torch.device("cuda"))
    print([name for name in dir(back_end) if "mem" in name.lower() or "stat" in name.lower()], flush=True)
    code = "import torch, sys; x = torch.zeros(1 << 28, device='cuda'); torch.cuda.synchronize()"
    code += "; print('up', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()
    read(f"another process ({other.pid}) with 1 GiB")
    other.communicate("")
    import bitsandbytes.functional as paged

    managed = paged.get_paged(256, 1024, 1024, dtype=torch.uint8, device=torch.device("cuda:0"))
    read("256 MiB managed, untouched")
    managed.page_deviceid = 0
    paged.prefetch_tensor(managed)
    read("256 MiB managed, on the card")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=["outside", *RUNS])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        outside(args.out) if args.one == "outside" else work(args.one, args.out)
    began = time.time()

    def start(name: str) -> str:
        conf = RUNS[name][1] if name in RUNS else ""
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf}
        command = [sys.executable, __file__, "--out", str(args.out), "--one", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return f"{name}: exit {done.returncode} {done.stderr[-600:] if done.returncode else ''}{done.stdout}"

    if "outside" in args.only:  # alone on the card
        print(start("outside"), flush=True)
        print((args.out / "outside.jsonl").read_text(), flush=True)
        tool, script = [sys.executable, "-m", "memtrace"], ROOT / "tests/gpu/scripts/one_rank.py"
        for words in (
            ["run", "--force", "--out", str(args.out), str(script)],
            ["report", str(args.out / "one_rank.pickle")],
        ):
            done = subprocess.run([*tool, *words], capture_output=True, text=True, cwd=ROOT, check=False)
            print(done.stdout[:3000], done.stderr[-1500:], flush=True)
    with ThreadPoolExecutor(6) as workers:
        for line in workers.map(start, [name for name in args.only if name in RUNS]):
            print(line, flush=True)
    if "async" in args.only:
        command = [
            sys.executable,
            "-m",
            "memtrace",
            "run",
            "--out",
            str(args.out),
            str(ROOT / "tests/gpu/scripts/one_rank.py"),
        ]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": ASYNC},
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        print("cudaMallocAsync:", done.returncode, done.stderr[-600:], flush=True)
    with tarfile.open(args.out / "pools.tar", "w") as archive:
        for path in sorted(args.out.glob("*.xz")) + sorted(args.out.glob("*.info.json")):
            archive.add(path, path.name)
            path.unlink()
    print(f"done after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
