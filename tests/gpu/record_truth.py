"""Record runs with the truth behind every allocation.

    python3 tests/gpu/record_truth.py --out DIR [--only NAME…] [--workers 12] [--device cuda|cpu] [--labels]
    python3 tests/gpu/record_truth.py --relabel DIR

For each run of ``truth_configs.py``: ``NAME.pickle.xz`` (the snapshot), ``NAME.info.json`` (configuration, phase marks
in µs, memory statistics, versions, OOM) and ``NAME.stamps.json.xz`` (what its labels are derived from), packed into
``DIR/truth_N.tar``. ``--relabel DIR`` derives ``NAME.labels.json.xz`` (see ``tools/labelling``) and needs no GPU;
``--labels`` does so at once. Each run is made twice, each time in a process of its own: as a user would record it, and
under the operator stamps. With ``ALONE`` in the environment, rank 0 of several runs by itself, on one GPU.
With ``--device cpu`` the runs are tiny and a stand-in watches host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from sharing import place_of  # noqa: E402
from tools.labelling import stamps  # noqa: E402
from tools.labelling.files import pack_stamps, unpack_stamps  # noqa: E402
from tools.labelling.labels import FROM_IDENTITY, Run, truth  # noqa: E402
from truth_configs import ARCHITECTURES, RUNS, TruthRun, shrunk, small_architecture  # noqa: E402

from memtrace.record import backend as backend_module  # noqa: E402
from memtrace.record import qlora  # noqa: E402
from memtrace.record.labels import Labels, contents, storage_of  # noqa: E402
from memtrace.record.recorder import Recorder, RecordOptions  # noqa: E402

MAX_TAR_BYTES = 14 << 20
_NOTING = ("wrapped", "hook", "save")
KV_CACHE, STATE, WEIGHT = "activations/kv_cache", "lora/optstate", "base_weights/weight"


def now_us() -> int:
    return time.time_ns() // 1000


class Stage:
    """What a program is handed: it marks its phases and says what it trains. Times are µs, the events' clock."""

    def __init__(self, run: TruthRun, checkpoint: Path, scratch: Path, device: str, mode: str, rank: int = 0) -> None:
        self.backend = backend_module.get()
        self.rank, self.ranks = rank, run.ranks
        self.device, self.checkpoint, self.scratch = device, checkpoint, scratch
        self.small = device == "cpu"
        self.cfg, self.options = qlora.StepConfig(**run.step), run.options
        self.marks: list[tuple[int, str]] = []
        self.identity: list[tuple[int, list[tuple[int, str]]]] = []
        self.model: Any = None
        self.optimizers: list[Any] = []
        self.packed: frozenset[int] = frozenset()
        self._states: Callable[[], list[Any]] = list
        self._caches: list[weakref.ref[Any]] = []
        self._cap_file, self._is_clean = scratch.with_suffix(".cap"), mode == "clean"

    # what a program says
    def mark(self, name: str) -> None:
        if name in ("optimizer", "zero_grad"):
            self.note_gradients()
        if name == "zero_grad":
            self.note_states()
        self.marks.append((now_us(), name))

    def know(self, model: Any, *optimizers: Any, states: Callable[[], list[Any]] | None = None) -> None:
        self.model = model
        self.optimizers = [*self.optimizers, *(one for one in optimizers if one not in self.optimizers)]
        self._states = states or self._states
        self.note_model()
        self.note_states()

    def follow(self, model: Any) -> None:
        import torch
        from torch.optim import optimizer as optimizers

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("past_key_values")
            if cache is not None and all(ref() is not cache for ref in self._caches):
                self._caches.append(weakref.ref(cache))
            self.mark("forward" if torch.is_grad_enabled() else "eval")

        def leave(module: Any, args: Any, output: Any) -> None:
            self.note_caches()
            self.mark("backward" if torch.is_grad_enabled() else "between")

        def before_step(optimizer: Any, *_: Any) -> None:
            if optimizer not in self.optimizers:
                self.optimizers.append(optimizer)
            self.mark("optimizer")

        model.register_forward_pre_hook(enter, with_kwargs=True)
        model.register_forward_hook(leave)
        optimizers.register_optimizer_step_pre_hook(before_step)
        optimizers.register_optimizer_step_post_hook(lambda *_: self.mark("zero_grad"))

    def surprise(self) -> bool:
        if not self.options.get("oom"):
            return False
        if self._is_clean:
            peak = int(self.backend.stats(0)["reserved_bytes.all.peak"])
            self._cap_file.write_text(str(int(peak * self.options.get("cap_factor", 1.0))))
        self.backend.limit(int(self._cap_file.read_text()))
        return True

    # what lies where now
    def _note(self, rows: list[tuple[int, str]]) -> None:
        if rows:
            self.identity.append((now_us(), rows))

    def _note_labels(self, labels: Labels) -> None:
        within = [label for label in labels.values() if not label.outside]
        self._note([(x.address, FROM_IDENTITY[x.purpose.category, x.purpose.subcategory]) for x in within])

    def _tensors(self, tensors: list[Any], label: str) -> list[tuple[int, str]]:
        found = (storage_of(tensor, self.backend.device_type) for tensor in tensors)
        return [(storage[0], label) for storage in found if storage is not None]

    def note(self, tensors: list[Any], label: str) -> None:
        self._note(self._tensors(tensors, label))

    def note_model(self) -> None:
        if self.model is not None:
            # Of a run that trains nothing, no weight is trained, whatever it requires.
            trained = None if self.options.get("trains", True) else frozenset[int]()
            labels = Labels(self.backend.device_type)
            labels.add_model(contents(self.model), trained)
            self.packed |= {x.address for x in labels.values() if x.purpose.subcategory == "quantized"}
            self._note_labels(labels)

    def note_gradients(self) -> None:
        if self.model is not None:
            labels = Labels(self.backend.device_type)
            labels.add_gradients(self.model.named_parameters())
            self._note_labels(labels)

    def note_states(self) -> None:
        for optimizer in self.optimizers:
            labels = Labels(self.backend.device_type)
            labels.add_optimizer(optimizer, {})
            self._note_labels(labels)
        self._note(self._tensors(self._states(), STATE))

    def note_caches(self) -> None:
        for cache in filter(None, (ref() for ref in self._caches)):
            tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
            self._note(self._tensors([tensor for tensor in tensors if tensor is not None], KV_CACHE))

    def note_all(self) -> None:
        for note in (self.note_model, self.note_gradients, self.note_states, self.note_caches):
            note()


def note_streamed_weights(stage: Stage) -> None:
    """Weights that accelerate brings in for one module's turn are weights; noted just before they leave again."""
    from accelerate.hooks import AlignDevicesHook

    leave = AlignDevicesHook.post_forward

    def post_forward(hook: Any, module: Any, output: Any) -> Any:
        if hook.offload:
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            stage._note(stage._tensors(tensors, WEIGHT))
        return leave(hook, module, output)

    AlignDevicesHook.post_forward = post_forward


def run_one(name: str, run: TruthRun, mode: str, checkpoint: Path, work: Path, device: str) -> None:
    """One process's job: run, and leave ``NAME.MODE.pickle`` with everything the labels need."""
    import torch
    from more_programs import MORE
    from new_programs import NEW
    from programs import PROGRAMS
    from rare_programs import RARE
    from stack_programs import STACKS, be_alone

    torch.manual_seed(0)
    backend = backend_module.get()
    rank = int(os.environ.get("RANK", 0))
    if device != "cpu":
        torch.cuda.init()
        if "cap_gib" in run.options:
            backend.limit(int(run.options["cap_gib"] * 2**30))
    place = "cpu" if device == "cpu" else "cuda:0"
    scratch = work / f"{name}{f'-rank{rank}' if rank else ''}.{mode}"
    scratch.mkdir(parents=True, exist_ok=True)
    if os.environ.get("ALONE"):
        be_alone(rank, run.ranks)
    if run.ranks > 1 or run.options.get("group"):
        kind, meeting = "gloo" if device == "cpu" else "nccl", f"file://{work}/{name}.{mode}.meeting"
        torch.distributed.init_process_group(kind, init_method=meeting, rank=rank, world_size=run.ranks)
    stage = Stage(run, checkpoint, scratch, place, mode, rank)
    record: dict[str, Any] = {"oom": None, "recorder_oom": None, "before": {}, "log": None}
    dump_at = run.options.get("dump", "oom")
    recorder = Recorder(RecordOptions(scratch, name, max_entries=2_000_000)) if run.options.get("recorder") else None

    def dump(kind: str) -> None:
        if "snapshot" in record or rank:
            return
        stage.note_all()
        snapshot = backend.snapshot() if recorder is None else recorder.take(kind, 0, record["recorder_oom"])
        record.update(kind=kind, snapshot=snapshot, stats=backend.stats(0), info=backend.memory_info(0))

    def on_oom(_device: int, requested: int, allocated: int, free: int) -> None:
        if record["oom"] is None:
            record["oom"] = {"requested": requested, "device_allocated": allocated, "device_free": free}
            record["oom"] |= {"t": now_us(), "phase": stage.marks[-1][1]}
        if recorder is not None and dump_at == "oom":
            seen = {"requested_bytes": requested, "device_in_use_bytes": allocated, "device_free_bytes": free}
            seen |= {"message": "", "time_us": now_us(), "device": 0}
            record["recorder_oom"] = seen | {"phase": recorder.log.name, "step": recorder.log.step}
        if dump_at == "oom":
            dump("oom")
        else:
            stage.note_all()
            stage.mark("oom")

    def begin() -> None:
        if rank:
            return
        backend.attach_oom_observer(on_oom)
        if recorder is not None:
            recorder.begin()
        else:
            backend.start(run.stacks, 2_000_000)

    if not run.late:
        begin()
    if run.program == "offload":
        note_streamed_weights(stage)
    stage.mark("load")
    # What is compiled asks for memory without operators, and runs uncompiled where somebody watches operators.
    stamped = mode == "stamped" and not run.options.get("compiled")
    stamping = stamps.stamping(lambda: stage.packed) if stamped else contextlib.nullcontext(stamps.StampLog())
    try:
        with stamping as log:
            record["log"] = log
            program = (PROGRAMS | MORE | RARE | NEW | STACKS)[run.program](stage)
            next(program)
            if run.late and not rank:
                backend.synchronize()
                begin()
                record["before"] = _live(backend.snapshot())
            stage.mark("ready")
            next(program, None)
            dump("end")
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:  # pipelining makes one of its own of PyTorch's
        if record["oom"] is None and not isinstance(error, torch.OutOfMemoryError):
            raise
        record["oom"] = (record["oom"] or {}) | {"message": str(error)}
        if dump_at == "except":
            dump("except")
    if rank:
        # Rank 0 may still wait for what was sent, and fails if its sender is gone: who started the ranks ends this.
        starter = os.getppid()
        while os.getppid() == starter:
            time.sleep(0.2)
        os._exit(0)
    if "snapshot" not in record:  # ``finally``: nothing of the pass is alive any more
        dump("finally")
    if recorder is not None:
        recorder.end()
    record["log"] = record["log"].as_dict() if record["log"] is not None else None
    record.update(marks=stage.marks, identity=stage.identity, vocab=_vocabulary(stage.model), cfg=asdict(stage.cfg))
    (work / f"{name}.{mode}.pickle").write_bytes(pickle.dumps(record))
    if run.ranks > 1:
        os._exit(0)  # another rank may wait in a collective for good


def _vocabulary(model: Any) -> int:
    """Rows of a language model's head; -1 of anything else, which no tensor has."""
    if getattr(model, "config", None) is not None:
        return qlora.vocabulary(model)
    return getattr(getattr(model, "head", None), "out_features", -1)


def _live(snapshot: dict[str, Any]) -> dict[int, int]:
    """Requested bytes by address of every active block."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    return {block["address"]: block["requested_size"] for block in blocks if block["state"] != "inactive"}


def portable(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The snapshot with frames' paths from ``site-packages`` or from the repository's root on."""
    memo: dict[str, str] = {}

    def short(path: str) -> str:
        if path not in memo:
            memo[path] = path.removeprefix(f"{ROOT}/").replace("tests/gpu/", "train/")
            for folder in ("/site-packages/", "/site/", "/python3"):  # pip's --target is called /…/site
                _, found, rest = path.partition(folder)
                if found:
                    is_standard = folder == "/python3"
                    memo[path] = "python3/" + rest.partition("/")[2] if is_standard else f"site-packages/{rest}"
                    break
        return memo[path]

    if "memtrace" in snapshot:
        snapshot["memtrace"]["config"]["argv"] = ["train/record_truth.py"]
    # What notes the library's own tensors stands between its functions, and would look like a program's callback.
    traced = [entry for trace in snapshot["device_traces"] for entry in trace]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    entries = [*traced, *blocks, *snapshot["segments"]]
    for entry in entries:
        frames = entry.get("frames") or []
        if any(frame["name"] in _NOTING and frame["filename"].endswith("stack_programs.py") for frame in frames):
            entry["frames"] = [
                f for f in frames if f["name"] not in _NOTING or not f["filename"].endswith("stack_programs.py")
            ]
    seen: set[int] = set()
    for entry in entries:
        for frame in entry.get("frames") or ():
            if id(frame) not in seen:
                seen.add(id(frame))
                frame["filename"] = short(frame["filename"])
    return snapshot


def finish(name: str, run: TruthRun, work: Path, out: Path) -> str:
    """Write snapshot, info and stamps of both runs; returns one line for the log."""
    clean, stamped = (pickle.loads((work / f"{name}.{mode}.pickle").read_bytes()) for mode in ("clean", "stamped"))
    if run.options.get("compiled"):  # the first run benchmarks kernels, and its choices are kept for the second
        stamped = clean
    runs = [Run(one["snapshot"]["device_traces"][0], one["marks"], one["identity"]) for one in (clean, stamped)]
    stamps_file = pack_stamps(runs[0], runs[1], stamped["log"], clean["vocab"], clean["before"])
    raw = pickle.dumps(portable(clean["snapshot"]), protocol=4)
    info = {
        "name": name, "program": run.program, "arch": run.arch, "cfg": clean["cfg"], "options": run.options,
        "late": run.late, "stacks": run.stacks, "kind": clean["kind"], "raw_bytes": len(raw),
        "events": len(runs[0].trace), "marks": clean["marks"], "versions": _versions(), "stats": clean["stats"],
        "oom": clean["oom"], "driver_total": clean["info"][1], "driver_used": clean["info"][1] - clean["info"][0],
        "stamped_kind": stamped["kind"],
    }  # fmt: skip
    (out / f"{name}.pickle.xz").write_bytes(lzma.compress(raw))
    (out / f"{name}.info.json").write_text(json.dumps(info))
    (out / f"{name}.stamps.json.xz").write_bytes(stamps_file)
    return f"{name}: {info['events']} events, {info['kind']}, oom {clean['oom']}"


def relabel(folder: Path) -> None:
    """Derive the labels of every recording in a folder anew, from its snapshot and its stamps."""
    for stamps_file in sorted(folder.glob("*.stamps.json.xz")):
        name = stamps_file.name.removesuffix(".stamps.json.xz")
        snapshot = pickle.loads(lzma.decompress((folder / f"{name}.pickle.xz").read_bytes()))
        labels = truth(*unpack_stamps(stamps_file.read_bytes(), snapshot["device_traces"][0]))
        (folder / f"{name}.labels.json.xz").write_bytes(lzma.compress(json.dumps(labels).encode()))
        peak = {label: f"{size / 2**20:.1f}" for label, size in labels["peak_breakdown"].items() if size >= 1 << 19}
        print(f"{name}: labelled {labels['labelled_share_of_bytes']:.3%}, at the peak (MiB) {peak}", flush=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "lightning"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def pack(out: Path) -> None:
    """Move the files into tar archives small enough to be carried around."""
    number, size = 0, 0
    for path in sorted(p for p in out.iterdir() if p.suffix != ".tar"):
        number, size = (number, size) if size + path.stat().st_size <= MAX_TAR_BYTES else (number + 1, 0)
        with tarfile.open(out / f"truth_{number}.tar", "a") as archive:
            archive.add(path, path.name)
        size += path.stat().st_size + 2048
        path.unlink()


def job(number: int, name: str, arguments: argparse.Namespace, checkpoint: Path) -> str:
    """One run, recorded and then stamped; errors become the returned line, so that one does not lose the others."""
    began, seconds = time.time(), []
    ranks = RUNS[name].ranks
    for mode in ("clean", "stamped", "pack"):
        command = [sys.executable, __file__, "--one", name, "--mode", mode, "--checkpoint", str(checkpoint)]
        command += ["--work", str(arguments.work), "--device", arguments.device]
        (arguments.work / f"{name}.{mode}.meeting").unlink(missing_ok=True)
        paths = [os.environ.get("PYTHONPATH", "")]
        if RUNS[name].program == "deepspeed":  # others that find it import it
            paths.append(os.environ.get("DEEPSPEED_PATH", ""))
        known = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
        places = [dict(known, CUDA_VISIBLE_DEVICES=str(number % arguments.gpus))]
        if ranks > 1:
            places = [known | place_of(rank, ranks, arguments.gpus) for rank in range(ranks)]
        others = [
            subprocess.Popen(command, env=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for place in (places[1:] if mode != "pack" and "ALONE" not in os.environ else ())
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, env=places[0])
        except subprocess.TimeoutExpired as error:
            said = str(error.stderr or "")[-1500:]
            return f"{name}: FAILED: {mode} took longer than {arguments.timeout} s: {said} {_ended(others)}"
        said = _ended(others)
        if done.returncode or (not done.stdout.strip() and mode == "pack"):
            return f"{name}: FAILED in {mode}: {done.stderr[-2500:]} {said}"
        seconds.append(round(time.time() - began, 1))
    return f"{done.stdout.strip()} {seconds}"


def _ended(others: list[subprocess.Popen[str]]) -> str:
    """End the other ranks; returns the ends of what they said."""
    said = []
    for other in others:
        other.kill()
        said.append(other.communicate()[1][-600:])
    return " ".join(said)


def write_checkpoints(names: list[str], arguments: argparse.Namespace) -> dict[str, Path]:
    """Random weights of every architecture that is needed, a process each."""
    folders = {arch: arguments.work / "checkpoints" / arch for arch in {RUNS[name].arch for name in names} - {""}}

    def write(arch: str) -> None:
        keys = small_architecture(arch) if arguments.device == "cpu" else ARCHITECTURES[arch]
        config = arguments.work / f"{arch}.json"
        config.write_text(json.dumps(keys))
        command = [
            sys.executable,
            "-m",
            "memtrace.record.checkpoint",
            str(config),
            str(folders[arch]),
            arguments.device,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        print(f"checkpoint {arch}: {(done.stderr.strip().splitlines() or ['?'])[-1] if done.returncode else 'ready'}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [arch for arch, folder in folders.items() if not folder.exists()]))
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=200)
    parser.add_argument("--one")
    parser.add_argument("--mode")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/truth_work"))
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--relabel", type=Path)
    arguments = parser.parse_args()
    files = arguments.work / "files"
    if arguments.relabel:
        relabel(arguments.relabel)
        return
    if arguments.one:
        run = shrunk(RUNS[arguments.one]) if arguments.device == "cpu" else RUNS[arguments.one]
        options = (arguments.one, run, arguments.mode, arguments.checkpoint, arguments.work, arguments.device)
        if arguments.mode == "pack":
            print(finish(arguments.one, run, arguments.work, files))
        elif arguments.device == "cpu":
            from capture_standin import StandIn

            with StandIn() as stand_in, backend_module.use(stand_in):
                run_one(*options)
        else:
            run_one(*options)
        return
    began = time.time()
    names = arguments.only or list(RUNS)
    files.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    folders = write_checkpoints(names, arguments)
    print(f"checkpoints after {time.time() - began:.0f} s", flush=True)
    with ThreadPoolExecutor(arguments.workers) as pool:
        for line in pool.map(
            lambda i: job(i, names[i], arguments, folders.get(RUNS[names[i]].arch, Path())), range(len(names))
        ):
            print(line, flush=True)
    if arguments.labels:
        relabel(files)
    for path in files.iterdir():
        (arguments.out / path.name).write_bytes(path.read_bytes())
    pack(arguments.out)
    print(f"done after {time.time() - began:.0f} s: {', '.join(sorted(path.name for path in arguments.out.iterdir()))}")


if __name__ == "__main__":
    main()
