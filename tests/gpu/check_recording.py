"""Check the recorder on a real GPU: cost, forced out-of-memory errors, and the ways in which things go wrong.

    python3 tests/gpu/check_recording.py --out DIR [--device cuda|cpu] [--only overhead ooms failures] [--quick]

Prints one line a check and writes ``DIR/check_recording.json`` (with versions and every figure) and
``DIR/check_recordings.tar`` (the recordings of the forced errors). Exit code 1 if a check failed. With ``--device cpu``
a stand-in watches host memory and the models are tiny, to test the script itself. ``--quick`` measures the cost on a
narrow model with as many modules, in few pairs.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import failures  # noqa: E402
from truth_configs import LLAMA2_7B, TINY, TINYLLAMA  # noqa: E402

WORK = Path("/tmp/check_recording")


class Checks:
    """Runs programs under the recorder and collects what was found."""

    def __init__(self, device: str, is_quick: bool = False) -> None:
        self.device, self.is_quick = device, is_quick
        self.results: list[dict[str, Any]] = []
        self.environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE / 'scripts'}:{os.environ.get('PYTHONPATH', '')}"}
        self.environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def memtrace(self, *words: Any) -> list[str]:
        """The command line of ``memtrace WORDS``."""
        start = ["-m", "memtrace"] if self.device == "cuda" else [str(HERE.parent / "standin_memtrace.py")]
        return [sys.executable, *start, *map(str, words)]

    def run(self, command: list[str], timeout: int = 240, **env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=self.environment | env, cwd=WORK
        )

    def note(self, name: str, passed: bool, **figures: Any) -> None:
        """One line, kept for the report."""
        self.results.append({"check": name, "passed": bool(passed), **figures})
        short = {k: v for k, v in figures.items() if not passed or not isinstance(v, list | dict)}
        print(f"{'ok  ' if passed else 'FAIL'} {name} {json.dumps(short, default=str)[:900]}", flush=True)


def checkpoint(architecture: dict[str, Any], name: str, device: str) -> Path:
    """Random weights, written by a process of its own."""
    folder = WORK / "models" / name
    if not folder.exists():
        config = WORK / f"{name}.json"
        config.write_text(json.dumps(architecture))
        command = [sys.executable, "-m", "memtrace.record.checkpoint", str(config), str(folder), device]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return folder


def check_overhead(checks: Checks) -> None:
    """Llama-2-7B, length 1,024: at most 5 % of step time, and not one byte of GPU memory."""
    narrow = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    full = LLAMA2_7B | {"num_hidden_layers": 32} | (narrow if checks.is_quick else {})
    folder = checkpoint(full, "llama2-7b-full", "cuda")
    out = WORK / "overhead.json"
    command = [sys.executable, str(HERE / "overhead.py"), str(folder), str(out)]
    done = checks.run([*command, "--pairs", "6" if checks.is_quick else "40"], timeout=300)
    shutil.rmtree(folder)
    if not out.exists():
        checks.note("overhead", False, error=done.stderr[-1500:])
        return
    found = json.loads(out.read_text())
    for row in found["recordings"]:
        low, high = (round(100 * (bound - 1), 2) for bound in row["ratio_95_percent"])
        checks.note(
            f"cost above PyTorch's own recording, stacks={row['stacks']}",
            checks.is_quick or (row["median_ratio"] <= 1.05 and row["own_share"] <= 0.05),
            percent=round(100 * (row["median_ratio"] - 1), 2),
            between_percent=f"{low} and {high}",
            own_code_percent=round(100 * row["own_share"], 3),
            own_code_ms=round(1000 * row["own_s"], 3),
            pairs=len(row["ratios"]),
            off_step_s=round(found["off_step_s"], 4),
            **{f"{how}_step_s": round(value, 4) for how, value in row["median_step_s"].items()},
        )
        equal, peaks = row["peaks_equal"], row["peaks"]
        checks.note(f"peak memory equal to the byte, stacks={row['stacks']}", equal, peaks=peaks)
    first = found["first_step"]
    checks.note("cost of the first step, models not yet known", first["own_code_ms"] <= 10, **first)


def check_oom(checks: Checks, script: str, model: Path, late: bool, stacks: str = "python") -> None:
    """An unchanged script with a forced error: the file, its end, PyTorch's own viewer, the labels."""
    name = f"{Path(script).stem}{'-late' if late else ''}{'-cpp' if stacks == 'all' else ''}"
    folder, truth_file = WORK / "ooms" / name, WORK / f"{name}.truth.json"
    options: list[Any] = ["--out", folder, "--stacks", stacks, *(["--steps", "1:100"] if late else [])]
    arguments = [HERE / "scripts" / script, model, "--truth", truth_file, "--tighten", 2]
    arguments += ["--length", 64] if checks.device == "cpu" else []
    began = time.time()
    done = checks.run(checks.memtrace("run", *options, *arguments), MEMTRACE_TEST_TIGHTEN="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("memtrace: ")]
    files = sorted(folder.glob("*.pickle"))
    figures: dict[str, Any] = {"seconds": round(time.time() - began, 1), "exit_code": done.returncode}
    figures |= {"files": [path.name for path in files], "lines": lines}
    if len(files) != 1 or not truth_file.exists():
        checks.note(f"forced out-of-memory error, {name}", False, error=done.stderr[-2000:], **figures)
        return
    file = files[0]
    figures |= inspect(checks, file, json.loads(truth_file.read_text()))
    wanted = figures["ends_at_oom"] and figures["viewer_opens"] and len(lines) == 5 and done.returncode == 1
    covered = min(figures["covered"].values())
    traceback_whole = "OutOfMemoryError" in done.stderr and "memtrace/record" not in done.stderr
    base = figures["report_base_bytes"] / max(1, figures["true_base_bytes"])
    checks.note(f"forced out-of-memory error, {name}", wanted and traceback_whole, bytes=file.stat().st_size, **figures)
    checks.note(f"labels cover parameters, gradients and states, {name}", covered >= 0.999, least=covered)
    checks.note(f"base weights attributed, {name}", 0.995 <= base <= 1.02, report_over_true=round(base, 4))


def inspect(checks: Checks, file: Path, truth: dict[str, dict[str, int]]) -> dict[str, Any]:
    """What memtrace and PyTorch's own viewer make of a file, and how much of the truth its labels cover."""
    import pickle

    snapshot = pickle.loads(file.read_bytes())
    extra = snapshot["memtrace"]
    trace = snapshot["device_traces"][extra["device"]]
    present = {row["address"]: row for row in extra["labels"] if row["until_time_us"] is None}
    covered = {}
    for kind, storages in truth.items():
        total = sum(storages.values())
        known = sum(size for address, size in storages.items() if present.get(int(address), {}).get("bytes") == size)
        covered[kind] = known / total if total else 1.0
    html = file.with_suffix(".html")
    viewer = checks.run([sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(file), "-o", str(html)])
    report = checks.run(checks.memtrace("report", file, "--json"))
    budget = json.loads(report.stdout) if report.returncode == 0 else {"categories": {}}
    base = sum(r["bytes"] for r in present.values() if r["category"] == "base_weights" and not r.get("outside"))
    lora = sum(r["bytes"] for r in present.values() if r["subcategory"] == "params")
    return {
        "ends_at_oom": bool(trace) and trace[-1]["action"] == "oom",
        "viewer_opens": viewer.returncode == 0 and html.exists(),
        "report_error": report.stderr[-500:] if report.returncode else "",
        "report_base_bytes": budget["categories"].get("base_weights", 0),
        "true_base_bytes": base,
        "params_and_base_bytes": base + lora,
        "covered": covered,
        "message": extra["oom"]["message"][:120] if extra["oom"] else None,
        "events": len(trace),
        "labels": len(extra["labels"]),
        "problems": extra["problems"],
        "phases": [(row["name"], row["step"]) for row in extra["phases"]][-6:],
        "true_bytes": {kind: sum(storages.values()) for kind, storages in truth.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--only", choices=("overhead", "ooms", "failures"), nargs="*")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    checks = Checks(args.device, args.quick)
    began = time.time()
    wanted = set(args.only or ("overhead", "ooms", "failures"))
    if args.device == "cpu":
        wanted.discard("overhead")
    if "overhead" in wanted:
        guarded(checks, check_overhead)
    tiny = args.device == "cpu"
    small = checkpoint(TINY if tiny else TINYLLAMA, "tinyllama", args.device)
    large = small if tiny else checkpoint(LLAMA2_7B, "llama2-7b-8-layers", args.device)
    ooms: list[Callable[[Checks], None]] = [
        lambda c: check_oom(c, "train_loop.py", large, late=False),
        lambda c: check_oom(c, "train_loop.py", large, late=True),
        lambda c: check_oom(c, "train_trl.py", small, late=False),
        lambda c: check_oom(c, "train_trl.py", small, late=False, stacks="all"),
    ]
    jobs = [*(ooms if "ooms" in wanted else []), *(failures.ALL if "failures" in wanted else [])]
    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(lambda job: guarded(checks, job), jobs))
    document = {"seconds": round(time.time() - began, 1), "versions": versions(), "results": checks.results}
    (args.out / "check_recording.json").write_text(json.dumps(document, indent=1, default=str))
    with tarfile.open(args.out / "check_recordings.tar", "w") as archive:
        for path in sorted((WORK / "ooms").rglob("*.pickle")):
            packed = path.with_suffix(".pickle.xz")
            packed.write_bytes(lzma.compress(path.read_bytes(), preset=1))
            archive.add(packed, f"{path.parent.name}.pickle.xz")
    failed = [row["check"] for row in checks.results if not row["passed"]]
    print(f"{len(checks.results)} checks in {document['seconds']} s, failed: {failed or 'none'}")
    sys.exit(1 if failed else 0)


def guarded(checks: Checks, job: Callable[[Checks], None]) -> None:
    """One check's own failure must not lose the others."""
    try:
        job(checks)
    except Exception as error:
        checks.note(getattr(job, "__name__", "check"), False, error=f"{type(error).__name__}: {error}"[:1500])


def versions() -> dict[str, str]:
    """Of everything that matters."""
    import torch

    from memtrace.record.facts import package_versions

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"torch": str(torch.__version__), "gpu": gpu, "python": sys.version.split()[0]} | package_versions()


if __name__ == "__main__":
    main()
