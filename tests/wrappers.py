"""The same recording as if the program had been called by other code, or dumped at another time.

What an allocation was for depends neither on who called the program nor on when its history was dumped: purposes,
phases, steps, verdict and findings of a recording must come out the same under each of these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memtrace.attribution.shapes import CUBLAS_WORKSPACE_BYTES
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Snapshot
from memtrace.snapshot.stacks import Frame, StackTable

Frames = tuple[Frame, ...]  # innermost first
Fix = Callable[[Frames], Frames]


# Scrubbed recordings have paths that begin here: ``site-packages/torch/…``, ``python3/threading.py``, ``train/x.py``.
INSTALLED = r"^(?:.*/)?(?:site|dist)-packages/"
STANDARD = r"^(?:.*/)?python3[\d.]*/(?!site-packages|dist-packages)"
_OWN = r"^(?!.*(?:site-packages|dist-packages|torchinductor_\w+|python3[\d.]*)/)(?!<|memtrace/)"
OWN_FILE, OWN_FOLDER = _OWN + r".*\.py$", _OWN + r"(?:.*/)?(?=[^/]*\.py$)"
PLACES = {"~": "/home/u", "py": "/usr/lib/python3.11", "<frozen runpy>": "<frozen runpy>", "tmp": "/tmp"}


def frames_of(texts: tuple[str, ...]) -> Frames:
    """Frames from ``file:function``: installed, unless the path begins with a word of ``PLACES``."""
    made = []
    for text in texts:
        path, _, name = text.rpartition(":")
        first, _, rest = path.partition("/")
        place = PLACES.get(first)
        file = f"/env/lib/python3.11/site-packages/{path}" if place is None else f"{place}/{rest}" if rest else place
        made.append(Frame(file, 41, name))
    return tuple(made)


def _is_call(frame: Frame) -> bool:
    return frame.filename.endswith("torch/nn/modules/module.py") and frame.name in ("_call_impl", "_wrapped_call_impl")


def _is_backward(frame: Frame) -> bool:
    return frame.name == "backward" and frame.filename.endswith("torch/_tensor.py")


def _keeps_out(frames: Frames) -> bool:
    """Loading and optimizer steps lie beside a training step, not inside it."""
    optimizer = ("/torch/optim/", "/bitsandbytes/optim/")
    return any(f.name == "from_pretrained" or any(part in f.filename for part in optimizer) for f in frames)


def around_training(*inner: str) -> Fix:
    """Frames outside the model's forward pass and outside ``backward()``."""

    def fix(frames: Frames) -> Frames:
        if _keeps_out(frames):
            return frames
        at = max((i for i, f in enumerate(frames) if _is_call(f) or _is_backward(f)), default=None)
        return frames if at is None else (*frames[: at + 1], *frames_of(inner), *frames[at + 1 :])

    return fix


def around_program(*outer: str) -> Fix:
    """Frames outside everything: what called the script. Nothing calls what runs on autograd's own threads."""
    called = frames_of(outer)

    def fix(frames: Frames) -> Frames:
        outermost = next((f for f in reversed(frames) if f.filename.endswith(".py") or f.filename[:1] == "<"), None)
        return (*frames, *called) if outermost and outermost.name in ("<module>", "_bootstrap") else frames

    return fix


def around_modules(*hooks: str) -> Fix:
    """Frames between every module's own ``forward`` and the module call."""

    def fix(frames: Frames) -> Frames:
        made: list[Frame] = []
        for frame, outer in zip(frames, (*frames[1:], None), strict=False):
            made.append(frame)
            if frame.name == "forward" and outer is not None and _is_call(outer):
                made += frames_of(hooks)
        return tuple(made)

    return fix


def inside_linear(*inner: str) -> Fix:
    """Frames that a linear layer's product runs in."""

    def fix(frames: Frames) -> Frames:
        first = next((i for i, f in enumerate(frames) if f.filename.endswith(".py")), None)
        if first is None or frames[first].name != "forward" or not frames[first].filename.endswith("modules/linear.py"):
            return frames
        return (*frames[:first], *frames_of(inner), *frames[first:])

    return fix


def inside_operators(*inner: str) -> Fix:
    """Frames within whatever calls an operator, autograd's own threads included: dispatch modes and tensor classes."""
    made = frames_of(inner)

    def fix(frames: Frames) -> Frames:
        first = next((i for i, f in enumerate(frames) if f.filename.endswith(".py") or f.filename[:1] == "<"), None)
        return (*frames, *made) if first is None else (*frames[:first], *made, *frames[first:])

    return fix


def in_calls(*inner: str) -> Fix:
    """The same within Python code only, which is where function modes are."""
    everywhere = inside_operators(*inner)
    return lambda frames: everywhere(frames) if any(f.filename.endswith(".py") for f in frames) else frames


def between_functions(*decorators: str) -> Fix:
    """Frames of a decorator around each of the user's own functions."""

    def fix(frames: Frames) -> Frames:
        made: list[Frame] = []
        for frame in frames:
            made.append(frame)
            if re.match(OWN_FILE, frame.filename) and frame.name != "<module>":
                made += frames_of(decorators)
        return tuple(made)

    return fix


def renamed(pattern: str, replacement: str) -> Fix:
    """Other paths."""
    return lambda frames: tuple(f._replace(filename=re.sub(pattern, replacement, f.filename)) for f in frames)


def windows(frames: Frames) -> Frames:
    """As on Windows: drives and backslashes; the standard library lies in ``Lib``."""
    made = []
    for frame in frames:
        path = re.sub(INSTALLED, "C:/Users/u/venv/Lib/site-packages/", frame.filename)
        path = re.sub(STANDARD, "C:/Python311/Lib/", path)
        path = re.sub(OWN_FOLDER, "D:/project/", path)
        made.append(frame._replace(filename=path.replace("/", "\\") if path.endswith(".py") else path))
    return tuple(made)


def other_lines(frames: Frames) -> Frames:
    """Another release: every line number moves."""
    return tuple(f._replace(line=f.line * 2 + 7 if f.line else 0) for f in frames)


def both(first: Fix, second: Fix) -> Fix:
    """One after the other."""
    return lambda frames: second(first(frames))


WRAPPERS: Mapping[str, Fix] = {
    # accelerate's AlignDevicesHook: device_map over two devices, disk offload, bitsandbytes models before 0.43.2
    "accelerate-hooks": around_modules("accelerate/hooks.py:new_forward"),
    # Lightning's automatic optimisation: forward and backward run in the optimizer's closure
    "lightning-closure": around_training(
        "lightning/pytorch/strategies/strategy.py:training_step",
        "lightning/pytorch/loops/optimization/automatic.py:_training_step",
        "lightning/pytorch/loops/optimization/automatic.py:closure",
        "torch/optim/adamw.py:step",
        "torch/optim/optimizer.py:wrapper",
        "lightning/pytorch/core/optimizer.py:step",
        "lightning/pytorch/trainer/call.py:_call_lightning_module_hook",
    ),
    "lightning-own-optimizer": around_training(
        "~/model.py:training_step",
        "lightning/pytorch/loops/optimization/automatic.py:closure",
        "~/optim/muon.py:step",
        "torch/utils/_contextlib.py:decorate_context",
        "torch/optim/optimizer.py:wrapper",
        "torch/optim/lr_scheduler.py:wrapper",
    ),
    # DeepSpeed ZeRO-3 replaces torch.nn.functional.linear
    "deepspeed-linear": inside_linear(
        "deepspeed/runtime/zero/linear.py:forward",
        "torch/amp/autocast_mode.py:decorate_fwd",
        "torch/autograd/function.py:apply",
        "deepspeed/runtime/zero/linear.py:zero3_linear_wrap",
    ),
    "deepspeed-engine": around_training(
        "deepspeed/utils/nvtx.py:wrapped_fn",
        "deepspeed/runtime/engine.py:forward",
        "torch/nn/modules/module.py:_call_impl",
        "torch/nn/modules/module.py:_wrapped_call_impl",
    ),
    # LBFGS and SAM style: the program's own closure inside torch.optim
    "own-closure": around_training(
        "~/train.py:closure",
        "torch/utils/_contextlib.py:decorate_context",
        "torch/optim/lbfgs.py:step",
    ),
    "sam-closure": around_training(
        "~/train.py:<lambda>",
        "~/sam.py:step",
        "torch/utils/_contextlib.py:decorate_context",
        "torch/optim/optimizer.py:wrapper",
    ),
    "fabric": around_training(
        "lightning/fabric/wrappers.py:forward",
        "torch/nn/modules/module.py:_call_impl",
        "torch/nn/modules/module.py:_wrapped_call_impl",
    ),
    "ddp": around_training(
        "torch/nn/parallel/distributed.py:_run_ddp_forward",
        "torch/nn/parallel/distributed.py:forward",
        "torch/nn/modules/module.py:_call_impl",
        "torch/nn/modules/module.py:_wrapped_call_impl",
    ),
    "tensor-parallel-hooks": around_modules("transformers/integrations/tensor_parallel.py:<lambda>"),
    "accelerate-offload": around_modules(
        "accelerate/big_modeling.py:wrapper",
        "accelerate/hooks.py:new_forward",
        "functools.py:wrapped",
    ),
    "big-modeling-program": around_program(
        "accelerate/big_modeling.py:wrapper",
        "accelerate/utils/memory.py:decorator",
    ),
    "compile-frames": around_modules(
        "torch/_dynamo/eval_frame.py:compile_wrapper",
        "torch/_dynamo/external_utils.py:nonrecursive_disable_wrapper",
    ),
    "compiled-model": around_training(
        "torch/_dynamo/eval_frame.py:compile_wrapper",
        "torch/nn/modules/module.py:_call_impl",
        "torch/_dynamo/eval_frame.py:__call__",
    ),
    "autocast-decorators": between_functions(
        "torch/amp/autocast_mode.py:decorate_autocast",
        "torch/utils/_contextlib.py:decorate_context",
    ),
    "functools": between_functions("py/contextlib.py:inner", "py/functools.py:wrapper"),
    "notebook": both(
        renamed(OWN_FILE, "/tmp/ipykernel_3141/2718281828.py"),
        around_program(
            "IPython/core/interactiveshell.py:run_code",
            "ipykernel/zmqshell.py:run_cell",
            "ipykernel/kernelbase.py:dispatch_shell",
            "py/asyncio/events.py:_run",
            "<frozen runpy>:_run_module_as_main",
        ),
    ),
    "ray": around_program(
        "ray/train/_internal/worker_group.py:__execute",
        "ray/util/tracing/tracing_helper.py:_resume_span",
        "ray/_private/function_manager.py:actor_method_executor",
        "ray/_private/worker.py:main_loop",
    ),
    "pytest": around_program(
        "_pytest/python.py:pytest_pyfunc_call",
        "pluggy/_callers.py:_multicall",
        "_pytest/main.py:_main",
    ),
    "unittest": around_program("py/unittest/case.py:run", "py/unittest/suite.py:run"),
    "hydra": around_program(
        "hydra/core/utils.py:run_job",
        "hydra/_internal/utils.py:_run_hydra",
        "hydra/main.py:decorated_main",
    ),
    "torchrun": around_program(
        "torch/distributed/elastic/multiprocessing/errors/__init__.py:wrapper",
        "torch/distributed/run.py:main",
    ),
    "profiler": around_program(
        "torch/profiler/profiler.py:wrapper",
        "torch/autograd/profiler.py:__call__",
        "py/cProfile.py:runctx",
    ),
    "threads": around_program(
        "py/threading.py:run",
        "py/threading.py:_bootstrap_inner",
    ),
    "load-and-train": around_program("~/loading.py:load_checkpoint_and_train", "~/loading.py:load_and_train"),
    "named-backward": around_training("~/optim/backward.py:backward", "~/optim/step.py:step"),
    "named-optimizer": around_program("~/optim/adam.py:step", "~/optimizers/adafactor.py:init_state"),
    "named-loss": around_program("~/losses/train.py:compute_loss", "~/loss.py:train_loss"),
    "named-evaluate": around_program("~/evaluate.py:evaluate", "~/validate.py:validate", "~/generate.py:generate"),
    "named-checkpoint": around_program(
        "~/activation_checkpointing/run.py:checkpoint", "~/checkpoint_wrapper/run.py:backward"
    ),
    "named-loader-modules": around_modules("~/loading.py:load_state_dict", "~/optim/forward.py:step"),
    "named-quantize": around_program("~/quantize/run.py:quantize", "~/cache_utils.py:update"),
    "trainer-names": around_training(
        "transformers/trainer.py:compute_loss",
        "transformers/trainer.py:training_step",
        "transformers/trainer.py:_inner_training_loop",
        "accelerate/utils/memory.py:decorator",
    ),
    "named-hooks": around_modules("~/quantize/pack.py:quantize", "~/losses/hooks.py:compute_loss"),
    "named-sharding": around_training(
        "~/fsdp/unshard.py:unshard", "~/zero/stage3.py:foreach_reduce", "~/grad/bucket.py:post_backward"
    ),
    "named-caches": around_training(
        "~/data/cache_utils.py:update",
        "~/kv_cache.py:put",
        "py/contextlib.py:__exit__",
        "~/head/attention.py:eager_attention",
    ),
    "named-decorators": between_functions("~/common/optim/loading.py:from_pretrained", "~/common/loss.py:backward"),
    "own-copy-of-deepspeed": around_program(
        "~/deepspeed/runtime/zero/stage3.py:step", "~/torch/distributed/fsdp/_flat_param.py:unshard"
    ),
    "server": around_program(
        "starlette/routing.py:app",
        "anyio/_backends/_asyncio.py:run",
        "uvicorn/server.py:serve",
        "py/asyncio/runners.py:run",
    ),
    "precision-plugin": around_training(
        "lightning/pytorch/plugins/precision/precision.py:_wrap_closure",
        "lightning/pytorch/plugins/precision/amp.py:optimizer_step",
        "lightning/pytorch/strategies/strategy.py:optimizer_step",
        "~/lesson.py:optimizer_step",
    ),
    # A script handed to exec: ``python -c``, launchers, zipped programs, pdb, coverage
    "exec-string": both(renamed(OWN_FILE, "<string>"), around_program("<string>:<module>", "~/launch.py:main")),
    "standard-input": renamed(OWN_FILE, "<stdin>"),
    "asyncio-executor": around_program(
        "py/concurrent/futures/thread.py:run",
        "py/concurrent/futures/thread.py:_worker",
        "py/threading.py:run",
        "py/threading.py:_bootstrap",
    ),
    "asyncio-task": both(
        around_training("~/jobs/step.py:step", "py/asyncio/events.py:_run"),
        around_program("py/asyncio/base_events.py:run_forever", "py/asyncio/runners.py:run"),
    ),
    "callable-objects": both(
        between_functions("~/utils/partial.py:__call__", "py/functools.py:__call__"),
        around_modules("~/hooks/trampoline.py:__call__"),
    ),
    "debugger": around_program("<string>:<module>", "py/bdb.py:run", "py/pdb.py:_runscript", "py/pdb.py:main"),
    "coverage": around_program("coverage/execfile.py:run", "coverage/cmdline.py:do_run", "coverage/cmdline.py:main"),
    "viztracer": both(
        around_modules("viztracer/tracer.py:trace_and_save"),
        around_program("viztracer/main.py:run_code", "viztracer/main.py:run"),
    ),
    "retries": both(
        around_training("tenacity/__init__.py:__call__", "tenacity/__init__.py:wrapped_f"),
        between_functions("backoff/_sync.py:retry", "py/contextlib.py:inner"),
    ),
    "named-functions": between_functions("~/train.py:step", "~/train.py:zero_grad", "~/train.py:checkpoint"),
    "own-package-like-torch": renamed(OWN_FILE, "/home/u/torch_utils/optim/program.py"),
    "own-package-like-a-loss": renamed(OWN_FILE, "/home/u/losses/quantizers/cache_utils.py"),
    "program-named-loss": renamed(OWN_FILE, "/home/u/loss.py"),
    "program-named-cache": renamed(OWN_FILE, "/home/u/kv_cache.py"),
    "hooks-named-attention": around_modules("~/attention.py:flash_attention_wrapper"),
    "hooks-named-rotary": around_modules("~/rotary/rope_utils.py:apply_rope"),
    "hooks-named-zero-grad": around_modules("~/utils.py:zero_grad"),
    "packed-with-everything": both(renamed(OWN_FOLDER, "/tmp/_MEI3141/"), renamed(INSTALLED, "/tmp/_MEI3141/")),
    "environment-named-torch": renamed(INSTALLED, "/home/u/torch/optim/venv/lib/python3.11/site-packages/"),
    "environment-named-peft": renamed(INSTALLED, "/opt/conda/envs/peft/lib/python3.11/site-packages/"),
    "environment-named-transformers": renamed(
        INSTALLED, "/data/transformers/integrations/safetensors/lib/python3.11/site-packages/"
    ),
    "program-among-clones": renamed(OWN_FOLDER, "/home/u/peft/bitsandbytes/safetensors/"),
    "program-in-torch-folder": renamed(OWN_FOLDER, "/home/u/torch/optim/"),
    "script-in-site-packages": renamed(OWN_FOLDER, "/home/u/site-packages/torch/optim/"),
    "script-in-unused-clone": renamed(OWN_FOLDER, "/home/u/deepspeed/runtime/zero/"),
    "zipped": renamed(INSTALLED, "/srv/app.pex/site-packages.zip/"),
    "wheels": renamed(
        INSTALLED + r"(\w+)/", r"/home/u/.pex/installed_wheels/0/5f/\1-2.5.0-cp311-cp311-linux_x86_64.whl/\1/"
    ),
    "source-checkouts": both(
        renamed(INSTALLED + r"(torch|triton)/", r"/home/u/src/py\1/\1/"),
        renamed(INSTALLED + r"(transformers|peft|trl|accelerate)/", r"/home/u/git/\1/src/\1/"),
    ),
    # Modes and tensors of classes of their own, which see every operator pass
    "default-device": in_calls("torch/utils/_device.py:__torch_function__"),
    "own-function-mode": in_calls("~/optim/modes.py:__torch_function__"),
    "flop-counter": inside_operators("torch/utils/flop_counter.py:__torch_dispatch__"),
    "own-dispatch-mode": inside_operators("~/loss/optim.py:_count", "~/loss/optim.py:__torch_dispatch__"),
    "tensor-class": inside_operators("torch/_ops.py:__call__", "torchao/dtypes/nf4tensor.py:__torch_dispatch__"),
    # Queues of jobs, pipelines, trackers, other trainers
    "celery": around_program("celery/app/trace.py:trace_task", "billiard/pool.py:workloop"),
    "airflow": around_program("airflow/models/taskinstance.py:_execute_task", "airflow/sdk/task_runner.py:run"),
    "prefect": both(
        around_program("prefect/flow_engine.py:run_flow_sync", "prefect/utilities/callables.py:call_with_parameters"),
        between_functions("prefect/tasks.py:__call__", "prefect/context.py:__exit__"),
    ),
    "mlflow": around_training(
        "mlflow/pytorch/_lightning_autolog.py:patched_fit",
        "mlflow/utils/autologging_utils/safety.py:safe_patch_function",
    ),
    "wandb-watch": both(
        around_modules("wandb/integration/torch/wandb_torch.py:<lambda>"),
        around_program("wandb/agents/pyagent.py:_run_job"),
    ),
    "process-pool": around_program(
        "py/concurrent/futures/process.py:_process_worker",
        "py/multiprocessing/process.py:_bootstrap",
        "py/multiprocessing/spawn.py:_main",
    ),
    "functorch": around_training(
        "torch/_functorch/functional_call.py:functional_call",
        "torch/_functorch/apis.py:wrapped",
        "torch/_functorch/eager_transforms.py:grad_and_value_impl",
    ),
    "skorch": around_training(
        "skorch/net.py:step_fn",
        "torch/optim/sgd.py:step",
        "torch/optim/optimizer.py:wrapper",
        "skorch/net.py:train_step",
    ),
    "keras-layers": around_modules(
        "keras/src/layers/layer.py:__call__",
        "keras/src/utils/traceback_utils.py:error_handler",
    ),
    "converted-outputs": around_training(
        "accelerate/utils/operations.py:__call__",
        "accelerate/utils/operations.py:forward",
        "torch/amp/autocast_mode.py:decorate_autocast",
    ),
    "debugpy": both(
        around_program("debugpy/_vendored/pydevd/pydevd.py:_exec", "debugpy/server/cli.py:run_file"),
        between_functions("debugpy/_vendored/pydevd/_pydevd_bundle/pydevd_frame.py:trace_dispatch"),
    ),
    "timed-cell": both(
        renamed(OWN_FILE, "<timed exec>"),
        around_program("IPython/core/magics/execution.py:time", "IPython/core/interactiveshell.py:run_cell_magic"),
    ),
    "torch-package": renamed(OWN_FILE, "<torch_package_0>.company.optim"),
    "unicode": renamed(OWN_FOLDER, "/home/用户/проекты/обучение модели 🚀/"),
    "network-drive": renamed(OWN_FOLDER, r"\\\\server\\share\\torch\\optim\\"),
    "eggs": renamed(INSTALLED + r"(\w+)/", r"/home/u/.local/lib/python3.11/site-packages/\1-2.5.0-py3.11.egg/\1/"),
    "local-packages": renamed(INSTALLED, "/home/u/project/__pypackages__/3.11/lib/"),
    "windows": windows,
    "compiled-elsewhere": renamed(r"^.*/torchinductor_\w+/", "/scratch/cache/inductor/"),
    "installed-program": renamed(OWN_FOLDER, "/env/lib/python3.11/site-packages/company_training/"),
    "other-site-packages": renamed(INSTALLED, "/opt/conda/envs/x/lib/python3.12/site-packages/"),
    "other-lines": other_lines,
}


def program_called(table: StackTable, name: str) -> Fix:
    """Another name for each function of the user's that runs the model."""
    stacks = [table.stack(number) for number in range(len(table))]
    outside = [
        frames[max(i for i, f in enumerate(frames) if _is_call(f)) :] for frames in stacks if any(map(_is_call, frames))
    ]
    found = {(f.filename, f.name) for frames in outside for f in frames if re.match(OWN_FILE, f.filename)}
    is_one = lambda f: (f.filename, f.name) in found and f.name != "<module>"  # noqa: E731
    return lambda frames: tuple(f._replace(name=name) if is_one(f) else f for f in frames)


def wrapped(snapshot: Snapshot, fix: Fix) -> Snapshot:
    """The snapshot with every stack changed; stacks keep their numbers. Labels by identity, which would hide what
    stacks alone say, are left out."""
    table = snapshot.stacks
    ids: dict[Frame, int] = {}
    made = [[ids.setdefault(f, len(ids)) for f in fix(table.stack(number))] for number in range(len(table))]
    start = np.concatenate([[0], np.cumsum([len(frames) for frames in made])]).astype(np.int64)
    frame = np.array([f for frames in made for f in frames], dtype=np.int32)
    return dataclasses.replace(snapshot, stacks=StackTable(tuple(ids), frame, start), memtrace={})


def dumped_late(raw: dict[str, Any], interrupted: bool = False) -> dict[str, Any]:
    """An out-of-memory recording as dumped in ``except`` or ``finally``, after the stack has unwound.

    The tensors of the pass that failed are freed behind the error; nothing before it changes. With ``interrupted`` the
    error leaves no ``oom`` event: what Ctrl-C does.
    """
    trace = raw["device_traces"][0]
    oom = max(i for i, e in enumerate(trace) if e["action"] == "oom")
    del trace[oom + 1 :]
    time_us = trace[oom].get("time_us", 0) + 10

    def names(event: Mapping[str, Any]) -> set[str]:
        return {frame["name"] for frame in event.get("frames") or ()}

    def ends_pass(event: Mapping[str, Any]) -> bool:
        found = names(event)
        return bool(found & {"backward", "step", "zero_grad"}) or any("autograd::Engine" in name for name in found)

    begun = max((i for i, e in enumerate(trace[:oom]) if ends_pass(e)), default=0)
    live: dict[int, tuple[int, dict[str, Any]]] = {}
    for i, event in enumerate(trace):
        if event["action"] == "alloc":
            live[event["addr"]] = (i, event)
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    gone = {
        address: event
        for address, (i, event) in live.items()
        if i > begun and "forward" in names(event) and "from_pretrained" not in names(event)
    }
    if interrupted:
        del trace[oom:]
    for event in gone.values():
        trace += [event | {"action": a, "frames": [], "time_us": time_us} for a in ("free_requested", "free_completed")]
    for segment in raw["segments"]:
        _give_back(segment, gone)
    return raw


def cleaned_up(raw: dict[str, Any]) -> dict[str, Any]:
    """The snapshot as dumped after ``del model, optimizer`` and ``gc.collect()``: the program frees all but workspaces
    behind the last event."""
    return _freed_at_last(raw, all_of_it=False)


def ended(raw: dict[str, Any]) -> dict[str, Any]:
    """The snapshot as dumped when the program was over: everything is freed, by nobody's code."""
    return _freed_at_last(raw, all_of_it=True)


def _freed_at_last(raw: dict[str, Any], all_of_it: bool) -> dict[str, Any]:
    trace = raw["device_traces"][0]
    stacks = (event["frames"] for event in trace if event.get("frames"))
    program = [] if all_of_it else next(frames[-1:] for frames in stacks if frames[-1]["name"] == "<module>")
    end = {"stream": 0, "time_us": trace[-1].get("time_us", 0) + 10}
    gone = {}
    for segment in raw["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            address = at + block["size"]
            is_kept = block["requested_size"] in CUBLAS_WORKSPACE_BYTES and not all_of_it
            if block["state"] == "active_allocated" and not is_kept:
                gone[at] = end | {"addr": at, "size": block["requested_size"], "frames": program}
    for event in gone.values():
        trace += [event | {"action": action} for action in ("free_requested", "free_completed")]
    for segment in raw["segments"]:
        _give_back(segment, gone)
    return raw


def _give_back(segment: dict[str, Any], gone: Mapping[int, Any]) -> None:
    """The segment once the blocks at those addresses are free."""
    blocks: list[dict[str, Any]] = []
    address = segment["address"]
    for old in segment["blocks"]:
        block = dict(old)
        at = block.get("address", address)
        address = at + block["size"]
        if at in gone and block["state"] == "active_allocated":
            block.update(state="inactive", frames=[], requested_size=0)
            segment["allocated_size"] -= block["size"]
            segment["active_size"] -= block["size"]
        if blocks and blocks[-1]["state"] == "inactive" == block["state"]:
            blocks[-1]["size"] += block["size"]
        else:
            blocks.append(block)
    used = [b.get("requested_size", b["size"]) for b in blocks if b["state"] != "inactive"]
    segment.update(blocks=blocks, requested_size=sum(used))


def ring_of(raw: dict[str, Any], events: int) -> dict[str, Any]:
    """The snapshot as of a ring that holds that many events: the history before them is lost."""
    trace = raw["device_traces"][0]
    del trace[: len(trace) - events]
    return raw


def without_stacks(timeline: Timeline, lost: np.ndarray) -> Timeline:
    """The timeline without the stacks of those events; labels by identity are left out."""
    stack, rows = timeline.trace.stack.copy(), timeline.allocations.stack.copy()
    stack[lost] = 0  # the empty one
    made = timeline.allocations.alloc_event >= 0
    rows[made] = stack[timeline.allocations.alloc_event[made]]
    device = dataclasses.replace(timeline.device, trace=dataclasses.replace(timeline.trace, stack=stack))
    replay = dataclasses.replace(timeline.replay, allocations=dataclasses.replace(timeline.allocations, stack=rows))
    snapshot = dataclasses.replace(timeline.snapshot, devices=(device,), memtrace={})
    return dataclasses.replace(timeline, snapshot=snapshot, device=device, replay=replay)


def with_allocation_stacks(timeline: Timeline) -> Snapshot:
    """As ``context="alloc"`` records: a free carries the stack of its allocation."""
    table, stack = timeline.allocations, timeline.trace.stack.copy()
    for frees in (table.free_requested_event, table.free_completed_event):
        made = np.flatnonzero((frees >= 0) & (table.alloc_event >= 0))
        stack[frees[made]] = table.stack[made]
    device = dataclasses.replace(timeline.device, trace=dataclasses.replace(timeline.trace, stack=stack))
    return dataclasses.replace(timeline.snapshot, devices=(device,))


_FETCHING = ("~/data.py:_to_device", "~/data.py:_work", "py/threading.py:run", "py/threading.py:_bootstrap")
_BATCH_BYTES = 2 << 20


def beside_fetching(raw: dict[str, Any], every: int) -> np.ndarray:
    """Put a thread beside the program that fetches batches of 2 MiB, of which two live at a time, between its events.

    Returns where the program's events lie now.
    """
    trace, frames = raw["device_traces"][0], [f._asdict() for f in frames_of(_FETCHING)]
    base = max(s["address"] + s["total_size"] for s in raw["segments"]) + (1 << 44)
    event = {"size": _BATCH_BYTES, "stream": 0, "frames": frames}
    batches: list[dict[str, Any]] = []
    made, places = [], []
    for number, old in enumerate(trace):
        places.append(len(made))
        made.append(old)
        if number % every == every - 1:
            batch = event | {"addr": base + len(batches) * _BATCH_BYTES, "time_us": old.get("time_us", 0)}
            made += [batch | {"action": action} for action in ("segment_alloc", "alloc")]
            for done in batches[-2:-1]:
                made += [
                    done | {"action": a, "time_us": batch["time_us"]} for a in ("free_requested", "free_completed")
                ]
            batches.append(batch)
    raw["device_traces"][0] = made
    for number, batch in enumerate(batches):
        size = _BATCH_BYTES if number >= len(batches) - 2 else 0
        state = "active_allocated" if size else "inactive"
        block = {
            "address": batch["addr"],
            "size": _BATCH_BYTES,
            "requested_size": size,
            "state": state,
            "frames": frames,
        }
        sizes = {"allocated_size": size, "active_size": size, "requested_size": size, "total_size": _BATCH_BYTES}
        segment = {"address": batch["addr"], "device": 0, "stream": 0, "segment_type": "large", "frames": frames}
        raw["segments"].append(segment | sizes | {"blocks": [block]})
    return np.array(places)
