"""Record runs with the truth behind every allocation.

    python3 tests/gpu/record_truth.py --out DIR [--only NAME…] [--workers 4] [--device cuda|cpu]
    python3 tests/gpu/record_truth.py --relabel DIR

For each configuration of ``truth_configs.py``: ``NAME.pickle.xz`` (the snapshot), ``NAME.info.json`` (configuration,
phase marks in µs, memory statistics, versions, OOM) and ``NAME.labels.json.xz`` (the truth labels, see
``tools.labelling.labels``; ``NAME.stamps.json.xz`` holds what they were derived from), packed into ``DIR/truth_N.tar``.
With ``--relabel DIR`` the labels of recordings already made are derived anew. Each configuration runs twice, each time
in a process of its own: once as a user would record it, once under the operator stamps. With ``--device cpu`` the runs
are tiny and a stand-in watches host memory, to test the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import pickle
import subprocess
import sys
import tarfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from tools.labelling import stamps  # noqa: E402
from tools.labelling.files import pack_stamps, unpack_stamps  # noqa: E402
from tools.labelling.labels import FROM_IDENTITY, Run, truth  # noqa: E402
from truth_configs import ARCHITECTURES, RECORDINGS, TINY, Recording, shrunk  # noqa: E402

from memtrace.record import backend as backend_module  # noqa: E402
from memtrace.record import identity, qlora  # noqa: E402

MAX_TAR_BYTES = 14 << 20


class Notes:
    """Phase marks and identities of one run, on the clock of the events (µs)."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.marks: list[tuple[int, str]] = []
        self.identity: list[tuple[int, list[tuple[int, str, int]]]] = []
        self.model: Any = None
        self.optimizers: list[Any] = []
        self.packed: frozenset[int] = frozenset()

    def mark(self, name: str) -> None:
        if name == "optimizer":
            self.note_gradients()
        if name == "zero_grad":
            self.note_gradients()
            self.note_states()
        self.marks.append((time.time_ns() // 1000, name))

    def _note(self, labels: Any) -> None:
        rows = [(x.address, FROM_IDENTITY[x.category, x.subcategory], x.size_bytes) for x in labels if not x.outside]
        self.identity.append((time.time_ns() // 1000, rows))

    def note_model(self) -> None:
        if self.model is not None:
            labels = identity.unique(identity.model_labels(self.model, self.device_type))
            self.packed = frozenset(x.address for x in labels if x.subcategory == "quantized")
            self._note(labels)

    def note_gradients(self) -> None:
        if self.model is not None:
            self._note(identity.gradient_labels(self.model.named_parameters(), self.device_type))

    def note_states(self) -> None:
        for optimizer in self.optimizers:
            self._note(identity.optimizer_labels(optimizer, {}, self.device_type))

    def note_all(self) -> None:
        self.note_model()
        self.note_gradients()
        self.note_states()


def run_trainer(model: Any, cfg: qlora.StepConfig, device: str, notes: Notes, work: Path) -> None:
    """The same steps through Transformers' or TRL's trainer, marked by global hooks."""
    import torch
    from torch.optim import optimizer as optim_module

    def enter(module: Any, _args: Any) -> None:
        if module is model and torch._C._current_graph_task_id() == -1:
            notes.mark("forward")

    def leave(module: Any, _args: Any, _out: Any) -> None:
        if module is model and torch._C._current_graph_task_id() == -1:
            notes.mark("backward" if torch.is_grad_enabled() else "eval")

    def before_step(optimizer: Any, *_: Any) -> None:
        if optimizer not in notes.optimizers:
            notes.optimizers.append(optimizer)
        notes.mark("optimizer")

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
        optim_module.register_optimizer_step_pre_hook(before_step),
        optim_module.register_optimizer_step_post_hook(lambda *_: notes.mark("zero_grad")),
    ]
    rows = cfg.steps * cfg.batch * cfg.accumulate
    tokens = list(qlora.token_lists(cfg, qlora.vocabulary(model), rows))
    options = {
        "output_dir": str(work / "trainer"), "per_device_train_batch_size": cfg.batch, "max_steps": cfg.steps,
        "gradient_accumulation_steps": cfg.accumulate, "bf16": cfg.autocast, "optim": cfg.optim, "report_to": [],
        "save_strategy": "no", "logging_strategy": "no", "use_cpu": device == "cpu", "dataloader_pin_memory": False,
        "gradient_checkpointing": cfg.checkpointing, "disable_tqdm": True,
    }  # fmt: skip
    if cfg.trainer == "hf":
        from transformers import Trainer, TrainingArguments

        data = [{"input_ids": ids, "labels": ids} for ids in tokens]
        trainer = Trainer(model=model, args=TrainingArguments(**options), train_dataset=data, data_collator=_collate)
    else:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"input_ids": ids} for ids in tokens])
        args = SFTConfig(
            **options, max_length=cfg.seq_len, packing=False, dataset_kwargs={"skip_prepare_dataset": True}
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=_tokenizer())
    try:
        trainer.train()
        notes.mark("end")
    finally:
        for hook in hooks:
            hook.remove()


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def run_one(name: str, recording: Recording, mode: str, checkpoint: Path, work: Path, device: str, cap: int) -> None:
    """One process's job: run, and leave ``NAME.MODE.pickle`` with everything the labels need."""
    import torch

    torch.manual_seed(0)
    backend = backend_module.get()
    cfg = qlora.StepConfig(**recording.step)
    notes = Notes(backend.device_type)
    record: dict[str, Any] = {"oom": None, "before": {}, "log": None}
    if device != "cpu":
        torch.cuda.init()
        if cap:
            torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info(0)[1])
    elif cap:
        backend.fraction = cap / backend.capacity  # type: ignore[attr-defined]

    def dump(kind: str) -> None:
        if "snapshot" not in record:
            notes.note_all()
            record.update(kind=kind, snapshot=backend.snapshot(), stats=backend.stats(0), info=backend.memory_info(0))

    def on_oom(_device: int, requested: int, allocated: int, free: int) -> None:
        record["oom"] = {"requested": requested, "device_allocated": allocated, "device_free": free}
        record["oom"] |= {"t": time.time_ns() // 1000, "phase": notes.marks[-1][1]}
        dump("oom")

    def begin() -> None:
        backend.start(recording.stacks, 2_000_000)
        backend.attach_oom_observer(on_oom)

    if not recording.late:
        begin()
    notes.mark("load")
    stamping = stamps.stamping(lambda: notes.packed) if mode == "stamped" else contextlib.nullcontext()
    try:
        with stamping as log:
            record["log"] = log
            base = qlora.load_base(checkpoint, cfg, "cuda:0" if device != "cpu" else "cpu")
            notes.mark("adapters")
            torch.manual_seed(1)
            notes.model = qlora.add_adapters(base, cfg)
            del base
            if cfg.trainer == "loop":
                notes.optimizers = [qlora.make_optimizer(notes.model, cfg)]
            notes.note_model()
            if recording.late:
                backend.synchronize()
                begin()
                record["before"] = _live(backend.snapshot())
            notes.mark("ready")
            if cfg.trainer == "loop":
                qlora.run_loop(notes.model, notes.optimizers[0], cfg, device, notes.mark, lambda: None)
            else:
                run_trainer(notes.model, cfg, device, notes, work)
            dump("end")
    except torch.OutOfMemoryError as error:
        record["oom"] = (record["oom"] or {}) | {"message": str(error)}
    record["log"] = record["log"].as_dict() if record["log"] is not None else None
    record.update(marks=notes.marks, identity=notes.identity, vocab=qlora.vocabulary(notes.model), cfg=cfg.as_dict())
    (work / f"{name}.{mode}.pickle").write_bytes(pickle.dumps(record))


def _live(snapshot: dict[str, Any]) -> dict[int, int]:
    """Requested bytes by address of every active block."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    return {block["address"]: block["requested_size"] for block in blocks if block["state"] != "inactive"}


def finish(name: str, recording: Recording, work: Path, out: Path) -> str:
    """Derive the labels from both runs and write the four files; returns one line for the log."""
    clean, stamped = (pickle.loads((work / f"{name}.{mode}.pickle").read_bytes()) for mode in ("clean", "stamped"))
    runs = []
    for record in (clean, stamped):
        found = [(time_us, [(address, label) for address, label, _ in rows]) for time_us, rows in record["identity"]]
        runs.append(Run(record["snapshot"]["device_traces"][0], record["marks"], found))
    before = clean["before"] if recording.late else {}
    labels = truth(runs[0], runs[1], stamped["log"], clean["vocab"], before)
    raw = pickle.dumps(clean["snapshot"], protocol=4)
    info = {
        "name": name, "arch": recording.arch, "cfg": clean["cfg"], "late": recording.late, "stacks": recording.stacks,
        "kind": clean["kind"], "raw_bytes": len(raw), "events": len(runs[0].trace), "marks": clean["marks"],
        "versions": _versions(), "stats": clean["stats"], "oom": clean["oom"], "driver_total": clean["info"][1],
        "driver_used": clean["info"][1] - clean["info"][0], "stamped_kind": stamped["kind"],
        "labelled_share_of_bytes": labels["labelled_share_of_bytes"],
    }  # fmt: skip
    (out / f"{name}.pickle.xz").write_bytes(lzma.compress(raw))
    (out / f"{name}.labels.json.xz").write_bytes(lzma.compress(json.dumps(labels).encode()))
    (out / f"{name}.info.json").write_text(json.dumps(info, indent=1))
    stamps_file = pack_stamps(runs[0], runs[1], stamped["log"], clean["vocab"], before)
    (out / f"{name}.stamps.json.xz").write_bytes(stamps_file)
    peak_gib = sum(labels["peak_breakdown"].values()) / 2**30
    return f"{name}: {info['events']} events, labelled {labels['labelled_share_of_bytes']:.3%}, peak {peak_gib:.3f} GiB"


def relabel(folder: Path) -> None:
    """Derive the labels of every recording in a folder anew, from its snapshot and its stamps."""
    for stamps_file in sorted(folder.glob("*.stamps.json.xz")):
        name = stamps_file.name.removesuffix(".stamps.json.xz")
        snapshot = pickle.loads(lzma.decompress((folder / f"{name}.pickle.xz").read_bytes()))
        labels = truth(*unpack_stamps(stamps_file.read_bytes(), snapshot["device_traces"][0]))
        (folder / f"{name}.labels.json.xz").write_bytes(lzma.compress(json.dumps(labels).encode()))
        print(f"{name}: labelled {labels['labelled_share_of_bytes']:.3%}", flush=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl"):
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


def job(name: str, arguments: argparse.Namespace, recording: Recording, checkpoint: Path, work: Path) -> str:
    """One configuration; errors become the returned line, so that one failure does not lose the others."""
    try:
        return record_both(name, arguments, recording, checkpoint, work)
    except Exception as error:
        return f"{name}: FAILED: {error!s:.3500}\n{traceback.format_exc()[-1500:]}"


def record_both(name: str, arguments: argparse.Namespace, recording: Recording, checkpoint: Path, work: Path) -> str:
    """Both processes of one configuration at once, then the labels."""
    began, cap, seconds = time.time(), 0, {}
    if recording.cap_of is not None:
        other = json.loads((work / "files" / f"{recording.cap_of}.info.json").read_text())
        cap = int(other["stats"]["reserved_bytes.all.peak"] * recording.cap_factor)

    def run(mode: str) -> str:
        command = [sys.executable, __file__, "--one", name, "--mode", mode, "--checkpoint", str(checkpoint)]
        command += ["--work", str(work), "--device", arguments.device, "--cap", str(cap)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
        seconds[mode] = round(time.time() - began, 1)
        if done.returncode:
            raise RuntimeError(f"{mode} run\n{done.stderr[-3000:]}")
        return done.stdout.strip()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, ("clean", "stamped")))
    return f"{run('labels')} ({seconds})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout", type=int, default=240)
    parser.add_argument("--one")
    parser.add_argument("--mode")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/truth_work"))
    parser.add_argument("--cap", type=int, default=0)
    parser.add_argument("--relabel", type=Path)
    arguments = parser.parse_args()
    choose = shrunk if arguments.device == "cpu" else lambda recording: recording
    if arguments.relabel:
        relabel(arguments.relabel)
        return
    if arguments.mode == "labels":
        print(finish(arguments.one, choose(RECORDINGS[arguments.one]), arguments.work, arguments.work / "files"))
        return
    if arguments.one:
        recording = choose(RECORDINGS[arguments.one])
        options = (arguments.one, recording, arguments.mode, arguments.checkpoint, arguments.work, arguments.device)
        if arguments.device == "cpu":
            from capture_standin import StandIn

            with StandIn() as stand_in, backend_module.use(stand_in):
                run_one(*options, arguments.cap)
        else:
            run_one(*options, arguments.cap)
        return
    names = arguments.only or list(RECORDINGS)
    recordings = {name: choose(RECORDINGS[name]) for name in names}
    files = arguments.work / "files"
    files.mkdir(parents=True, exist_ok=True)
    architectures = ARCHITECTURES | {"tiny": TINY}
    needed = {recording.arch for recording in recordings.values()}
    began = time.time()
    for arch in sorted(needed):
        folder = arguments.work / "checkpoints" / arch
        if not folder.exists():
            qlora.write_checkpoint(architectures[arch], folder, arguments.device)
        print(f"checkpoint {arch} ready after {time.time() - began:.0f} s", flush=True)
    if arguments.device != "cpu":
        import torch

        torch.cuda.empty_cache()
    for wave in (False, True):
        with ThreadPoolExecutor(arguments.workers) as pool:
            todo = [n for n in names if (recordings[n].cap_of is not None) == wave]
            folders = {n: arguments.work / "checkpoints" / recordings[n].arch for n in todo}
            for line in pool.map(lambda n, f=folders: job(n, arguments, recordings[n], f[n], arguments.work), todo):
                print(line, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in files.iterdir():
        (arguments.out / path.name).write_bytes(path.read_bytes())
    pack(arguments.out)
    names = sorted(path.name for path in arguments.out.iterdir())
    print(f"done after {time.time() - began:.0f} s: {', '.join(names)}")


if __name__ == "__main__":
    main()
