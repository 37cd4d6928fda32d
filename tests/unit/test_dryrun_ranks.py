"""Rank 0 of runs that shard, dry-run alone, against what H200s took (``tests/truth/stacks``).

``MEMTRACE_ALL_ROWS=1`` runs every kind; DeepSpeed's need it installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
if sys.platform != "linux":
    pytest.skip("the dry device needs Linux", allow_module_level=True)

from forked import Runs

from tests.gpu.check_dryrun_scripts import environment
from tests.gpu.check_ranks import chosen_rows, dry, folder_of
from tests.gpu.truth_configs import ARCHITECTURES, RUNS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/gpu/scripts/rank_zero.py"
#: Kind: the share by which the reserved peak may differ. Other releases run here than there (see docs/dryrun.md).
KINDS = {
    "fsdp2": 0.01,
    "fsdp2-offload": 0.001,
    "fsdp2-qlora": 0.01,
    "fsdp1": 0.01,
    "ddp": 0.01,
    "zero-states": 0.02,
    "deepspeed-2": 0.07,
    "deepspeed-3": 0.01,
}
EACH_KIND = ("ddp", "fsdp1")
#: What streams still hold depends on how far the card was behind; here it is as far as it can be.
REQUESTED = {"fsdp1": 0.1}


def rank_zero(runs: Runs | None, kind: str, folder: Path, ranks: int | None = None) -> dict[str, int]:
    """What it took; in a process of its own where there are no ``runs``."""
    ranks = ranks or RUNS[f"{kind}_late"].ranks
    architecture = ARCHITECTURES[RUNS[f"{kind}_late"].arch] | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(architecture | {"dtype": "bfloat16"}))
    words = ["--world-size", str(ranks), "-o", str(folder / "run.pickle"), str(SCRIPT), f"{kind}_late", str(folder)]
    done = runs(*words) if runs is not None else subprocess.run(
        [sys.executable, "-m", "memtrace", "dryrun", *words],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{ranks - 1} other rank" in done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS if os.environ.get("MEMTRACE_ALL_ROWS") else EACH_KIND)
def test_rank_zero_takes_what_it_took_on_a_gpu(kind: str, runs: Runs, tmp_path: Path) -> None:
    if kind.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    real = json.loads((ROOT / f"tests/truth/stacks/{kind}_late.info.json").read_text())["stats"]
    mine = rank_zero(None if kind == "ddp" else runs, kind, tmp_path)
    assert mine["requested"] == pytest.approx(real["requested_bytes.all.peak"], rel=REQUESTED.get(kind, 1e-4))
    assert mine["allocated"] == pytest.approx(real["allocated_bytes.all.peak"], rel=1e-3)
    assert mine["reserved"] == pytest.approx(real["reserved_bytes.all.peak"], rel=KINDS[kind])


MEASURED = json.loads((ROOT / "tests/truth/ranks.json").read_text())
#: What depends on the timing of the card (docs/dryrun.md), and what is too large for a test.
_APART = ("ddp-tiny", "states", "fsdp1", "published", "whole", "zero", "trainer", "experts-qwen3-moe@4")
STEADY = [name for name in MEASURED if not any(name.startswith(one) or name.endswith(one) for one in _APART)]


@pytest.mark.parametrize("name", STEADY if os.environ.get("MEMTRACE_ALL_ROWS") else ["qlora-7b-512"])
def test_every_rank_takes_what_it_took_on_gpus(name: str, runs: Runs, tmp_path: Path) -> None:
    row, ranks = chosen_rows([name])[0]
    measured = MEASURED[name]["ranks"]
    for rank, real in enumerate(measured):
        if rank and real == measured[0]:
            continue
        mine = dry(row, folder_of(row, tmp_path, False), rank, ranks, tmp_path, runs)
        for part in ("load", "train"):
            requested, allocated, reserved = real[part]
            assert mine[part]["requested"] == pytest.approx(requested, rel=0.01), mine
            assert mine[part]["allocated"] == pytest.approx(allocated, rel=0.01)
            assert mine[part]["reserved"] == pytest.approx(reserved, rel=0.05)


def test_a_rank_that_is_none_of_them_is_refused(runs: Runs, tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(
        "import os, torch.distributed as d\nd.init_process_group('nccl')\n"
        "print(d.get_rank(), os.environ['RANK'], d.get_world_size())\n"
    )
    for rank, said in (("3", "3 3 4"), ("4", "there are ranks 0 to 3"), ("x", "there are ranks 0 to 3")):
        done = runs("--world-size", "4", "-o", str(tmp_path / f"{rank}.pickle"), str(train), RANK=rank)
        assert said in (done.stderr if done.returncode else done.stdout), done.stderr
        assert done.returncode == (0 if rank == "3" else 2)


def test_more_ranks_hold_smaller_shards(runs: Runs, tmp_path: Path) -> None:
    """Parameters and two states in float32 are what is sharded at the peak, here over eight instead of two ranks."""
    two = json.loads((ROOT / "tests/truth/stacks/fsdp2_late.info.json").read_text())["stats"]
    eight = rank_zero(runs, "fsdp2", tmp_path, ranks=8)["requested"]
    width, feed, head = 2048, 5632, 2048 // 32
    layer = width * (2 * width + 2 * 4 * head + 3 * feed + 2)
    parameters = 4 * layer + 2 * 32000 * width + width
    smaller = two["requested_bytes.all.peak"] - eight
    assert smaller == pytest.approx(3 * 4 * parameters * (1 / 2 - 1 / 8), rel=0.02)


def test_nccl_with_one_rank_runs_and_with_more_names_the_option(runs: Runs, tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(
        "import sys, torch.distributed as d\nd.init_process_group('nccl', rank=0, world_size=int(sys.argv[1]))\n"
        "d.barrier()\nprint('one', d.get_world_size())\n"
    )
    alone = runs("-o", str(tmp_path / "a.pickle"), str(train), "1")
    assert alone.returncode == 0 and "one 1" in alone.stdout, alone.stderr
    two = runs("-o", str(tmp_path / "b.pickle"), str(train), "2")
    assert two.returncode == 1 and "--world-size 2" in two.stderr
