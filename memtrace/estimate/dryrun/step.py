"""A QLoRA step on the dry device: load, adapters, optimizer, steps; what comes out is a stream with stacks."""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memtrace.attribution.categories import Purpose
from memtrace.errors import NoAnswerError, UsageError
from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.dryrun.outcome import Recorded
from memtrace.estimate.dryrun.sites import DrySites, site_of
from memtrace.estimate.options import RunOptions
from memtrace.estimate.stream import MICRO_BATCHES, Tape
from memtrace.record import qlora

_BATCH = qlora._batch
_PRODUCT = "gemm_4bit"  # its buffers are dequantised weights; its result is none
_DEQUANTIZES = ("dequantize_4bit", "dequantize_blockwise")


class Book:
    """Writes what ``memory`` gives and takes back on a tape, with operator, module, layer, label and stack."""

    def __init__(self, memory: DryMemory, helper: ctypes.CDLL, sites: DrySites) -> None:
        self.memory, self.sites, self.tape = memory, sites, Tape()
        self.stack_of: list[int] = []
        self.vocabulary = 0  # rows of the head: tensors that wide belong to logits and loss
        self._asked = helper.memtrace_asked
        self._asked.restype = ctypes.c_char_p
        self._shape = (ctypes.c_int64 * 3)()
        self._live: dict[int, int] = {}  # address: index on the tape
        helper.memtrace_name_operators()
        memory.follower = self

    def born(self, address: int, size_bytes: int, stack: int) -> None:
        """A block was given out."""
        tape = self.tape
        index = self._live[address] = len(tape.sizes)
        op = self._asked(self._shape).decode().partition("::")[2]
        tape.site, tape.layer = self.sites.where()
        tape.sizes.append(size_bytes)
        tape.labels.append(self._label(op))
        tape.ops.append(op)
        tape.sites.append(tape.site)
        tape.layers.append(tape.layer)
        self.stack_of.append(stack)
        tape.events.append(index)

    def gone(self, address: int) -> None:
        """It was given back."""
        self.tape.events.append(~self._live.pop(address))

    def _label(self, op: str) -> str:
        current = self.tape.default_label
        dims, rows, columns = self._shape
        if op.endswith("_workspace"):
            return Purpose.CUBLAS_WORKSPACE
        if op in _DEQUANTIZES or (op == _PRODUCT and dims == 1):
            return Purpose.DEQUANT
        passing = current in (Purpose.FORWARD, Purpose.BACKWARD)
        if passing and dims == 4 and rows == columns > 1 and op in ("_softmax", "_safe_softmax"):
            return Purpose.ATTENTION_MATRIX
        if passing and dims > 1 and columns == self.vocabulary:
            # Logits and their copies in the forward pass; what the loss makes of them, and their gradients.
            is_loss = current == Purpose.BACKWARD or op == "_log_softmax"
            return Purpose.LOSS if is_loss else Purpose.LOGITS
        return current

    def index_of(self, tensor: Any) -> int | None:
        """The tape's index of a tensor's storage, if it is on the device."""
        return self._live.get(tensor.untyped_storage().data_ptr()) if tensor.is_cuda else None

    def relabel(self, tensors: Any, label: str, site: tuple[str, int] | None = None) -> None:
        """Give the storages of ``tensors`` their label and, where it is known, the module they belong to."""
        for tensor in tensors:
            index = self.index_of(tensor)
            if index is not None:
                self.tape.labels[index] = label
                if site is not None:
                    self.tape.sites[index], self.tape.layers[index] = site

    def mark(self, name: str) -> None:
        """Begin phase ``name`` here, with everything told that has died before."""
        self.memory.drain()
        self.tape.mark(name)


class QloraStep:
    """The step of one setup, on the dry device of this process, which serves for one run."""

    def __init__(self, device: Any, options: RunOptions, steps: int) -> None:
        self.options, self.device = options, device
        device.kernels.only_flash = options.attention == "flash"
        self.sites = DrySites()
        self.sites.on_recompute = self._recompute
        self.book = Book(device.memory, device.helper, self.sites)
        self.tape = self.book.tape
        simulated = replace(options, accumulation=min(options.accumulation, MICRO_BATCHES))
        self.config = qlora.step_config(simulated, steps, int(options.evaluates))
        self.model: Any = None
        self.optimizer: Any = None
        self._phase_start = self._recompute_start = 0
        self._step_is_over = True
        self._evaluates = False

    def run(self, architecture: dict[str, Any]) -> Recorded:
        """Load a model of ``architecture`` and train it. Raises UsageError where Transformers can't build it."""
        gc.disable()  # cycles would be collected at points that depend on what ran before
        self._load(architecture)
        self._train()
        self.device.memory.drain()
        managed = sum(state.nbytes for state in self._states() if getattr(state, "is_paged", False))
        parameters = list(self.model.parameters())
        return Recorded(
            self.tape.stream(managed, self.device.kernels.attention_kernel),
            self.device.memory.stacks.frames(),
            self.book.stack_of,
            sum(_elements(p) for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            self.device.kernels.products,
            [one.said for one in self.device.assumed.listed.values() if not one.name.startswith("weights of ")],
        )

    def _load(self, architecture: dict[str, Any]) -> None:
        tape, book, config = self.tape, self.book, self.config
        tape.default_label = Purpose.LOADING
        tape.mark("load")
        with tempfile.TemporaryDirectory(prefix="memtrace-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_buildable(architecture) | {"dtype": "bfloat16"}))
            try:
                base = qlora.load_base(
                    folder, replace(config, attn="eager" if config.attn == "eager" else "sdpa"), "cuda:0"
                )
            except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UsageError(f"transformers can't build {architecture.get('model_type')!r}: {reason}") from None
        if base.get_input_embeddings() is None or base.get_output_embeddings() is None:
            raise NoAnswerError(f"{type(base).__name__} is not a causal language model with an embedding and a head")
        self.model = model = qlora.add_adapters(base, config)
        if self.options.embeddings_require_grad and not config.checkpointing:
            model.enable_input_require_grads()
        self.sites.name_modules(model)
        for name, parameter in model.named_parameters():
            site, packed = site_of(name.removesuffix(".weight")), not parameter.is_floating_point()
            if "lora_" in name:
                book.relabel([parameter], Purpose.PARAMS, site)
                continue
            book.relabel([parameter], Purpose.QUANTIZED if packed else Purpose.UNQUANTIZED, site)
            book.relabel(_constants(parameter), Purpose.QUANT_STATE, site)
        for name, buffer in model.named_buffers():
            book.relabel([buffer], Purpose.BUFFER, site_of(name.rpartition(".")[0]))
        book.vocabulary = int(model.get_output_embeddings().weight.shape[0])

    def _train(self) -> None:
        self.optimizer = qlora.make_optimizer(self.model, self.config)
        qlora.__dict__["_batch"] = self._batch
        self.sites.follow()
        qlora.run_loop(self.model, self.optimizer, self.config, "cuda:0", self._mark, self._step_ends)

    def _mark(self, name: str) -> None:
        """The loop enters a phase; what the phase before it leaves behind gets its label."""
        tape, book = self.tape, self.book
        book.mark(name)
        if name == "eval":
            self._evaluates = True
        elif name == "forward":
            self._phase_start = len(tape.events)
            self.sites.checkpoint_inputs.clear()
            tape.default_label = Purpose.FORWARD
        elif name == "backward":
            tape.relabel_since(self._phase_start, Purpose.SAVED)
            known = (book._live.get(address) for address in self.sites.checkpoint_inputs)
            tape.relabel([index for index in known if index is not None], Purpose.SAVED, Purpose.CHECKPOINT_INPUT)
            tape.default_label = Purpose.BACKWARD
        elif name == "optimizer":
            book.relabel((p.grad for p in self.model.parameters() if p.grad is not None), Purpose.GRADS)
            tape.default_label = Purpose.OPTIMIZER
        elif name == "zero_grad":
            book.relabel(self._states(), Purpose.OPTIMIZER_STATE)

    def _states(self) -> list[Any]:
        states = [v for values in self.optimizer.state.values() for v in values.values()]
        return [v for v in (*states, *getattr(self.optimizer, "name2qmap", {}).values()) if isinstance(v, torch.Tensor)]

    def _step_ends(self) -> None:
        self._step_is_over = True

    def _batch(self, *args: Any) -> Any:
        """A batch comes in: the old one dies after."""
        self.tape.step += self._step_is_over and not self._evaluates
        self._step_is_over = False
        self.tape.default_label = Purpose.OTHER
        self.book.mark("inputs")
        batch = _BATCH(*args)
        if self._evaluates:
            self.book.mark("evaluation")
            self.tape.default_label = Purpose.FORWARD
        return batch

    def _recompute(self, begins: bool) -> None:
        """A checkpoint makes its region again: what stays of it is labelled."""
        tape = self.tape
        if begins:
            self._recompute_start = len(tape.events)
            tape.default_label = Purpose.FORWARD
            self.book.mark("recompute")
        else:
            self.device.memory.drain()
            tape.relabel_since(self._recompute_start, Purpose.RECOMPUTE)
            tape.default_label = Purpose.BACKWARD
            self.book.mark("backward")


def _buildable(architecture: dict[str, Any]) -> dict[str, Any]:
    """Without how a checkpoint was quantised, which the options say here, and without code that comes with it."""
    return {
        key: _buildable(value) if isinstance(value, dict) else value
        for key, value in architecture.items()
        if key not in ("quantization_config", "auto_map")
    }


def _constants(parameter: Any) -> list[Any]:
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return [parameter.SCB] if getattr(parameter, "SCB", None) is not None else []
    found = [state.absmax, state.code, state.offset]
    if state.state2 is not None:
        found += [state.state2.absmax, state.state2.code]
    return [tensor for tensor in found if tensor is not None]


def _elements(parameter: Any) -> int:
    """Elements before packing."""
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else int(parameter.numel())
