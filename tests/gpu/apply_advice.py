"""Apply what ``memtrace explain`` advises, really, and compare what it saved with what was said.

    python3 tests/gpu/apply_advice.py --out DIR [--workers 12] [--least-mib 20]     # on a machine with a GPU
    python3 tests/gpu/apply_advice.py --out DIR --verb estimate                     # a trial of the script anywhere

Each base run is recorded by ``memtrace capture`` in a process of its own (a few layers, random weights), explained, and
run again once for every change that an option of the run or of the allocator makes. ``DIR/applied.json`` holds one row
a change: what was said, on what basis, and what it saved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
    "qwen3-kept": ["--model", "qwen3-8b", "--layers", "3", "--seq-len", "1024", *_PLAIN, "--no-checkpointing"],
}  # fmt: skip
_FLAGS = {
    "checkpointing": {True: ["--checkpointing"]},
    "autocast": {True: ["--autocast"]},
    "adapter_dtype": {"bf16": ["--adapter-dtype", "bf16"]},
    "dropout": {0.0: ["--dropout", "0"]},
    "loss": {"chunked": ["--loss", "chunked"]},
    "attention": {"sdpa": ["--attn", "sdpa"]},
    "keep_logits": {False: ["--drop-logits"]},
}
_OFF = {"--no-checkpointing", "--keep-logits"}


def run(verb: str, name: str, flags: list[str], out: Path, conf: str = "") -> Path | None:
    """One run in a process of its own; its recording, or None where it failed."""
    target = out / f"{name}.pickle"
    steps = ["--train-steps", "2"] if verb == "capture" else []
    place = ["--out", str(target)] if verb == "capture" else ["--trace", str(target)]
    layers = (
        flags if verb == "capture" else [flag for i, flag in enumerate(flags) if "--layers" not in flags[i - 1 : i + 1]]
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)} | ({"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {})
    command = [sys.executable, "-m", "memtrace", verb, *layers, *steps, *place, "--force"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=400)
    if not target.exists():
        print(name, "failed:", done.stderr[-400:], file=sys.stderr)
        return None
    return target


def advised(file: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(peaks of a recording, its advice that an option of the run or of the allocator makes)."""
    from memtrace.analysis import analyse
    from memtrace.explain.case import Case
    from memtrace.explain.detectors import DETECTORS
    from memtrace.explain.proof import Bench, proven
    from memtrace.explain.snapshot_facts import Known, verdict_at
    from memtrace.history.timeline import build, choose_event
    from memtrace.snapshot.load import load

    snapshot = load(file)
    seen = analyse(build(snapshot, snapshot.devices[0]))
    at = choose_event(seen.timeline, None)
    bench = Bench(Case(seen, at, *verdict_at(seen, at.event, Known())))
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
    """The options of a run with some replaced."""
    kept = [
        flag for flag in flags if not (flag in _OFF and any(flag.split("-")[-1] == one.split("-")[-1] for one in more))
    ]
    for place, flag in enumerate(more):
        if flag.startswith("--") and flag in kept and place + 1 < len(more):
            at = kept.index(flag)
            del kept[at : at + 2]
    return [*kept, *more]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--verb", default="capture")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    work = args.out / "runs"
    work.mkdir(parents=True, exist_ok=True)
    names = args.only or list(BASES)
    jobs: list[tuple[str, dict[str, int], dict[str, Any]]] = []
    with ThreadPoolExecutor(args.workers) as pool:
        files = dict(zip(names, pool.map(lambda n: run(args.verb, n, BASES[n], work), names), strict=True))
        for name, file in files.items():
            if file is not None:
                peaks, rows = advised(file)
                jobs += [(name, peaks, row) for row in rows]

        def apply(job: tuple[int, tuple[str, dict[str, int], dict[str, Any]]]) -> dict[str, Any]:
            number, (name, before, row) = job
            flags = changed_flags(BASES[name], row["flags"])
            file = run(args.verb, f"{name}.{number}", flags, work, row["conf"])
            after = advised(file)[0] if file is not None else None
            what = "allocated" if row["basis"] == "formula" else "reserved"
            saved = before[what] - after[what] if after is not None else None
            return {"run": name, "of": what, "before_bytes": before[what], "saved_bytes": saved, **row}

        applied = list(pool.map(apply, enumerate(jobs)))
    (args.out / "applied.json").write_text(json.dumps(applied, indent=1))
    good = 0
    for row in applied:
        said, saved = row["said_bytes"], row["saved_bytes"]
        is_good = saved is not None and abs(saved - said) <= 0.05 * said
        good += is_good
        print(f"{'ok ' if is_good else 'OFF'} {row['run']:15} {row['finding']:24} {row['basis']:8} {row['of']:9} "
              f"said {said / 2**20:8.1f} saved {(saved or 0) / 2**20:8.1f} MiB  {row['flags'] or row['conf']}")  # fmt: skip
    print(f"{good} of {len(applied)} changes over {len(set(row['run'] for row in applied))} runs within 5 %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
