"""Apply what ``memtrace explain`` advises, really, and compare what it saved with what was said.

    python3 tests/gpu/apply_advice.py --out DIR [--workers 12]     # on a machine with a GPU

Each base run is recorded by ``memtrace capture`` in a process of its own (a few layers, random weights), explained, and
run again once for each of its largest changes that an option of the run or of the allocator makes (a loss in tiles
needs TRL). ``DIR/applied.json`` holds one row a change: what was said, on what basis, and what it saved; null where the
run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
_PLAIN = ["--quant", "none", "--no-prepare-kbit"]
BASES: dict[str, list[str]] = {
    "llama2-kept": ["--model", "llama2-7b", "--layers", "4", "--seq-len", "1024", *_PLAIN, "--no-checkpointing"],
    "llama2-eager": ["--model", "llama2-7b", "--layers", "4", "--seq-len", "1024", *_PLAIN, "--attn", "eager",
                     "--no-checkpointing"],
    "llama3-logits": ["--model", "llama3.1-8b", "--layers", "3", "--seq-len", "2048", *_PLAIN, "--keep-logits"],
    "llama3-kept": ["--model", "llama3.1-8b", "--layers", "3", "--seq-len", "1024", "--batch", "2", *_PLAIN,
                    "--no-checkpointing"],
    "mistral-kept": ["--model", "mistral-7b", "--layers", "4", "--seq-len", "1536", *_PLAIN, "--no-checkpointing",
                     "--autocast"],
    "mistral-eager": ["--model", "mistral-7b", "--layers", "3", "--seq-len", "2048", *_PLAIN, "--attn", "eager"],
    "qwen2-logits": ["--model", "qwen2.5-1.5b", "--layers", "6", "--seq-len", "2048", *_PLAIN],
    "qwen2-kept": ["--model", "qwen2.5-7b", "--layers", "3", "--seq-len", "1024", *_PLAIN, "--no-checkpointing",
                   "--keep-logits"],
    "tinyllama-rank": ["--model", "tinyllama-1.1b", "--layers", "6", "--seq-len", "2048", "--rank", "128", *_PLAIN,
                       "--no-checkpointing"],
    "llama2-qlora": ["--model", "llama2-7b", "--layers", "4", "--seq-len", "1024", "--rank", "64",
                     "--no-checkpointing"],
    "qwen2-qlora": ["--model", "qwen2.5-7b", "--layers", "3", "--seq-len", "1024"],
    "qwen3-kept": ["--model", "qwen3-8b", "--layers", "3", "--seq-len", "1024", *_PLAIN, "--no-checkpointing"],
}  # fmt: skip
_FLAGS = {
    "checkpointing": {True: ["--checkpointing"]},
    "autocast": {True: ["--autocast"]},
    "adapter_dtype": {"bf16": ["--adapter-dtype", "bf16"]},
    "dropout": {0.0: ["--dropout", "0"]},
    "attention": {"sdpa": ["--attn", "sdpa"]},
    "keep_logits": {False: ["--drop-logits"]},
    "loss": {"fused": ["--loss", "fused"]},
    "prepare_kbit": {False: ["--no-prepare-kbit"]},
    "optimizer": {name: ["--optim", name] for name in ("adamw_8bit", "paged_adamw_8bit")},
    "quant": {"nf4-dq": ["--quant", "nf4-dq"]},
}
_OFF = {"--no-checkpointing", "--keep-logits"}


def run(name: str, flags: list[str], out: Path, conf: str = "") -> Any:
    """One run in a process of its own, read in another: what :func:`advised` gives, or None where it failed."""
    target = out / f"{name}.pickle"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path} | ({"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {})
    capture = ["-m", "memtrace", "capture", *flags, "--train-steps", "2", "--out", str(target), "--force"]
    found = ""
    for command in (capture, [__file__, "--read", str(target)]):
        done = subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, check=False, timeout=400
        )
        if not target.exists() or (command is not capture and done.returncode):
            print(name, "failed:", done.stderr[-400:], file=sys.stderr)
            return None
        found = done.stdout
    return json.loads(found)


def advised(file: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(peaks of a recording, its advice that an option of the run or of the allocator makes)."""
    from memtrace.analysis import analyse
    from memtrace.explain.case import Case
    from memtrace.explain.detectors import DETECTORS
    from memtrace.explain.proof import Bench, proven
    from memtrace.explain.snapshot_facts import verdict_at
    from memtrace.history.timeline import build, choose_event
    from memtrace.snapshot.load import load

    snapshot = load(file)
    seen = analyse(build(snapshot, snapshot.devices[0]))
    at = choose_event(seen.timeline, None)
    bench = Bench(Case(seen, at, *verdict_at(seen, at.event)))
    _, allocated, reserved = seen.timeline.peaks()
    rows = []
    for detector in DETECTORS.values():
        finding = detector(bench.case)
        if finding is None:
            continue
        tested, held = proven(bench, finding)
        said = {advice.change: advice for advice in tested.advice}
        for proposal in held:
            flags = [_FLAGS.get(key, {}).get(value) for key, value in proposal.options.items()]
            if (not flags and not proposal.conf) or None in flags:
                continue
            advice = said[proposal.change]
            rows.append(
                {"finding": finding.id, "change": proposal.change, "conf": proposal.conf, "basis": str(advice.basis),
                 "flags": [flag for some in flags for flag in some or []], "said_bytes": advice.saves_bytes}
            )  # fmt: skip
    return {"allocated": allocated.size_bytes, "reserved": reserved.size_bytes}, rows


def changed_flags(flags: list[str], more: list[str]) -> list[str]:
    """The options of a run with some replaced: a later one wins, and what switches one off goes."""
    names = {flag.split("-")[-1] for flag in more if flag.startswith("--")}
    return [flag for flag in flags if not (flag in _OFF and flag.split("-")[-1] in names)] + more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help="(the script itself) read one recording")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--most", type=int, default=3, help="changes of one run that are applied, the largest first")
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    if args.read:
        print(json.dumps(advised(args.read)))
        return 0
    work = Path("/tmp/applied")
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.only or list(BASES)
    jobs: list[tuple[str, dict[str, int], dict[str, Any]]] = []
    with ThreadPoolExecutor(args.workers) as pool:
        for name, found in zip(names, pool.map(lambda n: run(n, BASES[n], work), names), strict=True):
            rows = sorted(found[1], key=lambda row: -row["said_bytes"]) if found is not None else []
            jobs += [(name, found[0], row) for row in rows[: args.most]]

        def apply(job: tuple[int, tuple[str, dict[str, int], dict[str, Any]]]) -> dict[str, Any]:
            number, (name, before, row) = job
            found = run(f"{name}.{number}", changed_flags(BASES[name], row["flags"]), work, row["conf"])
            what = "reserved" if row["basis"] == "replay" else "allocated"
            saved = before[what] - found[0][what] if found is not None else None
            return {"run": name, "of": what, "before_bytes": before[what], "saved_bytes": saved, **row}

        applied: list[dict[str, Any]] = []
        for future in as_completed([pool.submit(apply, job) for job in enumerate(jobs)]):
            applied.append(future.result())
            (args.out / "applied.json").write_text(json.dumps(applied, indent=1))
    good, ran = 0, [row for row in applied if row["saved_bytes"] is not None]
    for row in ran:
        said, saved = row["said_bytes"], row["saved_bytes"]
        is_good = abs(saved - said) <= 0.05 * said
        good += is_good
        figures = f"said {said / 2**20:8.1f} saved {saved / 2**20:8.1f} MiB"
        what = f"{row['run']:15} {row['finding']:24} {row['basis']:8} {row['of']:9}"
        print(f"{'ok ' if is_good else 'OFF'} {what} {figures}  {row['flags'] or row['conf']}")
    runs = len({row["run"] for row in ran})
    print(f"{good} of {len(ran)} changes over {runs} runs within 5 %; {len(applied) - len(ran)} failed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
