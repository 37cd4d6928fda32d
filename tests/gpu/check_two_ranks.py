"""Two ranks under torchrun, one of which runs out of memory: both leave a complete file.

    python3 tests/gpu/check_two_ranks.py --out DIR          (ranks share a GPU if there is one alone)

Prints what it found, writes ``DIR/check_two_ranks.json`` and the two recordings; exit code 1 if the check failed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from check_recording import WORK, Checks, checkpoint, versions  # noqa: E402
from truth_configs import TINYLLAMA  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    checks = Checks("cuda")
    model = checkpoint(TINYLLAMA, "tinyllama", "cuda")
    for name, launcher in (
        ("torchrun", ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "memtrace"]),
        (
            "accelerate launch",
            ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "memtrace"],
        ),
    ):
        folder = WORK / name.split()[0]
        began = time.time()
        command = [sys.executable, *launcher, "run", "--out", str(folder), str(HERE / "scripts" / "train_ddp.py")]
        done = checks.run([*command, str(model)], timeout=200)
        found: dict[str, Any] = {}
        for path in sorted(folder.glob("*.pickle")):
            import pickle

            extra = pickle.loads(path.read_bytes())["memtrace"]
            found[path.name] = {key: extra[key] for key in ("rank", "world_size", "reason")}
            found[path.name] |= {"labels": len(extra["labels"]), "oom": bool(extra["oom"])}
            packed = args.out / f"{folder.name}_{path.name}.xz"
            packed.write_bytes(lzma.compress(path.read_bytes(), preset=1))
        ranks = {row["rank"]: row for row in found.values()}
        passed = set(ranks) == {0, 1} and len(found) == 2 and ranks[1]["oom"] and not ranks[0]["oom"]
        passed = passed and all(row["labels"] > 100 for row in ranks.values()) and done.returncode != 0
        lines = [line for line in done.stderr.splitlines() if "memtrace: " in line]
        error = "" if passed else done.stderr[-3000:]
        seconds = round(time.time() - began, 1)
        checks.note(f"two ranks, {name}", passed, files=found, lines=lines, seconds=seconds, error=error)
    document = {"versions": versions(), "results": checks.results}
    (args.out / "check_two_ranks.json").write_text(json.dumps(document, indent=1))
    sys.exit(0 if all(row["passed"] for row in checks.results) else 1)


if __name__ == "__main__":
    main()
