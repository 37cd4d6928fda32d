"""Published models × optimizers × batches, trained on a GPU and dry-run without one: the error of the peaks.

    python tests/gpu/check_model_zoo.py measure OUT.json [MODEL…]    # on the GPU
    python tests/gpu/check_model_zoo.py predict DRY.json [MODEL…]    # anywhere: dry-runs them
    python tests/gpu/check_model_zoo.py compare TRUTH.json DRY.json  # prints the table

Both sides run ``scripts/zoo.py`` unchanged. On the GPU a process runs a few configurations of one model one after the
other as long as they leave no byte reserved (the others get a new process), and the first one again at the end, which
must take the same. A dry run is a fork for each.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tui"), str(ROOT / "tests/gpu/scripts")]
SCRIPT = ROOT / "tests/gpu/scripts/zoo.py"
VISION_OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
TEXT_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adafactor")
IMAGES = ((200, 32), (400, 32), (700, 32), (8, 224), (24, 224))  # batch, pixels
TEXTS = ((5, 128), (15, 128), (25, 128), (55, 128), (4, 512))  # batch, tokens
NEED_GIB = {"qwen3-0.6b": 42, "pythia-410m": 22, "opt-350m": 20, "convnext_base": 20, "t5-base": 20}
OTHERS_GIB, CARD_GIB, PROCESSES, TOGETHER = 12, 126, 14, 6
LONGEST_S = 400  # after which no measurement begins
CARDS_GIB = (1, 2, 4, 6, 8, 12, 16, 24)  # for which "does it fit" is asked
KEYS = ("requested", "allocated", "reserved")
Row = dict[str, Any]


def configurations(model: str) -> list[list[str]]:
    """Arguments of the script. Where gradients are zeroed alternates, so that each optimizer and batch has both."""
    from zoo import TEXT

    optimizers, shapes = (TEXT_OPTIMIZERS, TEXTS) if model in TEXT else (VISION_OPTIMIZERS, IMAGES)
    found = [
        [model, optimizer, str(batch), str(size), ("first", "last")[(i + j) % 2], "float32"]
        for i, optimizer in enumerate(optimizers)
        for j, (batch, size) in enumerate(shapes)
    ]
    return found + [[model, "AdamW", str(batch), str(size), "first", "bfloat16"] for batch, size in shapes[1:2]]


def models(chosen: list[str]) -> list[str]:
    from zoo import TEXT, VISION

    return chosen or [*sorted(NEED_GIB), *(name for name in (*VISION, *TEXT) if name not in NEED_GIB)]


def in_processes(
    jobs: list[Any], run: Callable[[Any], Any], need: Callable[[Any], int], room: int, most: int, until: float = inf
) -> list[Any]:
    """What ``run`` gives for each job, each in a fork of this process, as many at once as have ``room``."""
    waiting, running, found = list(range(len(jobs))), {}, [None] * len(jobs)
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            used = sum(need(jobs[i]) for i in running.values())
            if time.monotonic() > until:
                waiting.clear()
            next_one = next((i for i in waiting if used + need(jobs[i]) <= room), None)
            if next_one is not None and len(running) < most:
                waiting.remove(next_one)
                pid = os.fork()
                if pid == 0:
                    _answer(run, jobs[next_one], Path(folder) / str(next_one))
                running[pid] = next_one
                continue
            pid, _ = os.wait()
            done = running.pop(pid)
            with contextlib.suppress(OSError):
                found[done] = json.loads((Path(folder) / str(done)).read_text())
            print(jobs[done], "done", file=sys.stderr, flush=True)
    return found


def _answer(run: Callable[[Any], Any], job: Any, to: Path) -> None:
    try:
        to.write_text(json.dumps(run(job)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def run_script(words: list[str]) -> str | None:
    """The script in this process; what went wrong, if anything did."""
    sys.argv = [str(SCRIPT), *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


# ---- on the GPU ------------------------------------------------------------------------------------------------------
def measure(out: Path, chosen: list[str]) -> None:
    import torch
    import torchvision
    import transformers

    _ = transformers.GPT2Config, transformers.Adafactor  # imported before the forks
    torch.set_num_threads(1)
    began = time.monotonic()
    todo = [
        words[i : i + TOGETHER] for words in map(configurations, models(chosen)) for i in range(0, len(words), TOGETHER)
    ]
    need = {name: NEED_GIB.get(name, OTHERS_GIB) for name in models(chosen)}
    found, failed = [], []
    while todo:
        until = began + LONGEST_S
        rows = in_processes(todo, measured_together, lambda job: need[job[0][0]], CARD_GIB, PROCESSES, until)
        found += [row for together in rows for row in together or ()]
        failed += [job for job, row in zip(todo, rows, strict=True) if not row]
        todo = [job[len(row) :] for job, row in zip(todo, rows, strict=True) if row and len(row) < len(job)]
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, transformers)}
    out.write_text(json.dumps({"versions": versions, "gpu": torch.cuda.get_device_name(), "rows": found}))
    print(f"{len(found)} configurations in {time.monotonic() - began:.0f} s; no answer: {failed}")
    print(*(row for row in found if "error" in row or row.get("again")), sep="\n")


def measured_together(job: list[list[str]]) -> list[Row]:
    import torch

    limit = _limit(job[0][0])
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    rows: list[Row] = []
    for words in job:
        rows.append(measured(words))
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved():
            break  # the next needs a process of its own
    else:
        again = measured(job[0])
        rows[0]["again"] = {key: again[key] for key in again if key.endswith("_bytes") and again[key] != rows[0][key]}
    return rows


def _limit(model: str) -> int:
    return NEED_GIB.get(model, OTHERS_GIB) << 30


def measured(words: list[str]) -> Row:
    import torch

    began = time.monotonic()
    torch.cuda.reset_peak_memory_stats()
    error = run_script(words)
    stats = torch.cuda.memory_stats()
    row: Row = {"words": words} | {f"{key}_bytes": stats[f"{key}_bytes.all.peak"] for key in KEYS}
    return row | {"seconds": round(time.monotonic() - began, 2)} | ({"error": error} if error else {})


# ---- without a GPU ---------------------------------------------------------------------------------------------------
def dry(chosen: list[str]) -> list[Row]:
    """All configurations, dry-run. The libraries are imported once, with the device in place; each run is a fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from memtrace.estimate.dryrun.assumed import Assumptions
    from memtrace.estimate.dryrun.script import DryDevice
    from memtrace.estimate.presets import gpu_preset

    device = DryDevice(gpu_preset("h200"), 1 << 40, Assumptions())
    import transformers

    _import_torchvision()
    for name in ("GPT2", "GPTNeo", "OPT", "GPTNeoX", "T5", "Qwen3"):
        getattr(transformers, f"{name}Model")
    _ = transformers.Adafactor

    def run(words: list[str]) -> Row:
        error = run_script(words)
        row = {"words": words} | device.memory.most
        return row | ({"error": device.failed or error} if error else {})

    jobs = [words for name in models(chosen) for words in configurations(name)]
    return [row for row in in_processes(jobs, run, lambda _job: 0, 1, os.cpu_count() or 2) if row]


def _import_torchvision() -> None:
    """Its build for CUDA lacks operators of its own beside a CPU build of PyTorch; the models need none of them."""
    import torch

    register, torch.library.register_fake = torch.library.register_fake, lambda _name: lambda function: function
    import torchvision  # noqa: F401

    torch.library.register_fake = register


def predict(out: Path, chosen: list[str]) -> None:
    rows = dry(chosen)
    times = os.times()
    spent = sum((times.user, times.system, times.children_user, times.children_system))
    out.write_text(json.dumps({"rows": rows, "processor_s": round(spent)}, separators=(",", ":")))
    print(f"{len(rows)} configurations, {spent:.0f} s of processor time")


def compare(truth: Path, predicted: Path) -> None:
    real = {tuple(row["words"]): row for row in json.loads(truth.read_text())["rows"]}
    rows = json.loads(predicted.read_text())["rows"]
    pairs = [(mine, real[tuple(mine["words"])]) for mine in rows if tuple(mine["words"]) in real]
    dead = [(mine, his) for mine, his in pairs if "error" not in mine and "out of memory" in his.get("error", "")]
    show([(mine, his) for mine, his in pairs if "error" not in mine | his])
    said = sum(mine["reserved_bytes"] > _limit(mine["words"][0]) for mine, _ in dead)
    print(f"died under their limit: {len(dead)}, of which told to need more than it: {said}")
    print(*(mine for mine, _ in pairs if "error" in mine), sep="\n")


def show(pairs: list[tuple[Row, Row]]) -> None:
    """Errors by model, then of all, then how often a card's room was judged wrongly."""
    print(f"{'model':20} {'runs':>5} {'requested: median':>18} {'most':>8} {'reserved: median':>18} {'most':>8}")
    names = dict.fromkeys(mine["words"][0] for mine, _ in pairs)
    for name in (*names, "all"):
        chosen = [pair for pair in pairs if name in (pair[0]["words"][0], "all")]
        cells = []
        for key in ("requested_bytes", "reserved_bytes"):
            errors = [abs(mine[key] / his[key] - 1) for mine, his in chosen]
            cells.append(f"{median(errors):18.3%} {max(errors):8.2%}")
        print(f"{name:20} {len(chosen):5} {' '.join(cells)}")
    reserved = [(mine["reserved_bytes"], his["reserved_bytes"]) for mine, his in pairs]
    print(f"mean error of the reserved peak {mean(abs(a / b - 1) for a, b in reserved):.3%}")
    under = [b / a - 1 for a, b in reserved if a < b]
    print(f"told too little: {len(under)} of {len(reserved)}, by {max(under, default=0):.2%} at most")
    asked = [(a <= gib << 30, b <= gib << 30) for a, b in reserved for gib in CARDS_GIB]
    wrong = f"{asked.count((True, False))} wrongly yes, {asked.count((False, True))} wrongly no"
    print(f"does it fit in {', '.join(map(str, CARDS_GIB))} GiB: {len(asked)} verdicts, {wrong}")


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "predict":
        predict(Path(sys.argv[2]), sys.argv[3:])
    else:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
