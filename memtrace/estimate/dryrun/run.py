"""One dry run: load, adapters, optimizer, steps; what comes out is a stream with stacks."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch

from memtrace.attribution.categories import Purpose
from memtrace.errors import MemtraceError, NoAnswerError
from memtrace.estimate.dryrun.autocast import meta_autocast
from memtrace.estimate.dryrun.build import (
    ModelLoader,
    empty_model,
    label_weights,
    quantizer_for,
    require_language_model,
)
from memtrace.estimate.dryrun.cuda_ops import CudaOps
from memtrace.estimate.dryrun.observer import DEVICE, DispatchMode, Observer
from memtrace.estimate.dryrun.overrides import cuda_composites
from memtrace.estimate.dryrun.patches import Managed, device_free_libraries, replaced
from memtrace.estimate.dryrun.sites import DrySites, site_of
from memtrace.estimate.dryrun.stacks import Frames
from memtrace.estimate.engine.kernels import KernelDevice, attention_kernel
from memtrace.estimate.options import RunOptions
from memtrace.estimate.stream import MICRO_BATCHES, Stream
from memtrace.record import qlora

_TENSOR = torch.tensor
_GET_PEFT_MODEL = peft.get_peft_model
_BATCH = qlora._batch


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a dry run saw. ``stacks[stack_of[i]]`` is where allocation i was made; ``parameters`` counts all weights.
    ``products``: (outputs, inputs) of its 4-bit products."""

    stream: Stream
    stacks: list[Frames]
    stack_of: list[int]
    parameters: int
    trainable: int
    products: set[tuple[int, int]]


def dry_run(architecture: dict[str, Any], options: RunOptions, device: KernelDevice, steps: int = 2) -> Recorded:
    """Load ``architecture`` and train it for ``steps`` steps without data.

    Raises UsageError where Transformers can't build it, NoAnswerError where its code needs values of tensors or fails.
    """
    with warnings.catch_warnings(), _quiet_libraries():
        warnings.simplefilter("ignore")
        try:
            return _Run(architecture, options, device, steps).result()
        except (MemtraceError, MemoryError):
            raise
        except Exception as error:  # other people's code: a model that can't do without values, a refused option
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NoAnswerError(f"the dry run stopped in {_place(error)}: {reason}") from None


def _place(error: Exception) -> str:
    """File, line and function where an error came from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    code = trace.tb_frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}:{trace.tb_lineno} ({code.co_name})"


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Libraries warn of what a run on a host would mean; here it means nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Run:
    def __init__(self, architecture: dict[str, Any], options: RunOptions, device: KernelDevice, steps: int) -> None:
        self.architecture, self.options, self.device = architecture, options, device
        simulated = replace(options, accumulation=min(options.accumulation, MICRO_BATCHES))
        self.config = qlora.step_config(simulated, steps)
        self.sites = DrySites()
        self.sites.on_recompute = self._recompute
        self.observer = Observer(self.sites.where)
        self.tape = self.observer.tape
        self.cuda = CudaOps(device)
        self.managed = Managed()
        self.mode = DispatchMode(self.observer, self.cuda.handlers())
        self.model: Any = None
        self.optimizer: Any = None
        self._phase_start = 0
        self._recompute_start = 0
        self._in_recompute = contextlib.ExitStack()
        self._step_is_over = True

    def result(self) -> Recorded:
        """Run everything."""
        collecting = gc.isenabled()
        gc.disable()  # cycles would be collected at points that depend on what ran before
        try:
            asked = "flash" if self.options.attention == "flash" else "sdpa"
            with contextlib.ExitStack() as stack:
                stack.enter_context(cuda_composites(self.device, asked))
                stack.enter_context(device_free_libraries(self.managed, self._uncounted))
                stack.enter_context(replaced(torch, tensor=self._tensor))
                self._build()
                self._train()
            stream = self._stream()
            self.observer.forget()
            parameters = list(self.model.parameters())
            return Recorded(
                stream,
                self.observer.stacks.frames(),
                self.observer.stack_of,
                sum(_elements(p) for p in parameters),
                sum(p.numel() for p in parameters if p.requires_grad),
                self.cuda.products,
            )
        finally:
            if collecting:
                gc.enable()

    def _tensor(self, *args: Any, **kwargs: Any) -> Any:
        """``torch.tensor``, which calls no operator that a dispatch mode could see."""
        made = _TENSOR(*args, **kwargs)
        self.observer.see(made, "tensor")
        return made

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            yield

    # ---- building ------------------------------------------------------------------------------------------------
    def _build(self) -> None:
        config, tape = self.config, self.tape
        quantizer = quantizer_for(config.quant)
        attention = "eager" if config.attn == "eager" else "sdpa"
        model = empty_model(self.architecture, attention)
        require_language_model(model)
        if quantizer is not None:
            quantizer._process_model_before_weight_loading(model, {"": 0})
        tape.default_label = Purpose.LOADING
        tape.mark("load")
        with self.mode:
            ModelLoader(self.observer, self.sites, quantizer).load(model)
            if quantizer is not None:
                quantizer._process_model_after_weight_loading(model)
                model.is_quantized, model.quantization_method = True, quantizer.quantization_config.quant_method
                model.hf_quantizer = quantizer
            self.sites.name_modules(model)
            with replaced(torch.cuda, empty_cache=tape.empty_cache, is_available=lambda: True):
                model = self._prepare(model)
        self.model = model
        self.sites.name_modules(model)
        label_weights(self.observer, model)
        self.observer.vocabulary = int(model.get_output_embeddings().weight.shape[0])

    def _prepare(self, model: Any) -> Any:
        """``prepare_model_for_kbit_training`` and adapters, which PEFT makes on the host and then moves."""
        config = self.config
        with (
            torch.device(DEVICE),
            replaced(torch.nn.init, **_QUIET),
            replaced(peft, get_peft_model=self._get_peft_model),
        ):
            model = qlora.add_adapters(model, config)
        if self.options.embeddings_require_grad and not config.checkpointing:
            model.enable_input_require_grads()
        return model

    def _get_peft_model(self, model: Any, lora: Any, **options: Any) -> Any:
        """``get_peft_model`` with adapters made unseen; then the moves a GPU would see: in 16 bits, cast after."""
        with self._uncounted():
            wrapped = _GET_PEFT_MODEL(model, lora, **options)
        self.sites.name_modules(wrapped)
        adapters = [(name, p) for name, p in wrapped.named_parameters() if p.requires_grad]
        dtype = torch.float32 if options.get("autocast_adapter_dtype", True) else torch.bfloat16
        for name, parameter in adapters:
            self.sites.load_site = site_of(name.removesuffix(".weight"))
            parameter.data = torch.empty_like(parameter.data, dtype=torch.bfloat16)
        for name, parameter in adapters:
            self.sites.load_site = site_of(name.removesuffix(".weight"))
            parameter.data = parameter.data.to(dtype)
        self.sites.load_site = "", -1
        return wrapped

    # ---- training ------------------------------------------------------------------------------------------------
    def _train(self) -> None:
        self.optimizer = self._make_optimizer()
        with self.sites.followed(), meta_autocast(), self.mode, replaced(qlora, _batch=self._batch):
            qlora.run_loop(self.model, self.optimizer, self.config, DEVICE, self._mark, self._step_ends)

    def _make_optimizer(self) -> Any:
        if self.config.optim == "adamw_torch":  # the multi-tensor form, which is the default on CUDA
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            return torch.optim.AdamW(trainable, lr=1e-4, foreach=True)
        return qlora.make_optimizer(self.model, self.config)

    def _mark(self, name: str) -> None:
        """The loop enters a phase; what the phase before it leaves behind gets its label."""
        tape, observer = self.tape, self.observer
        if name == "forward":
            self._phase_start = len(tape.events)
            self.sites.checkpoint_inputs.clear()
            tape.default_label = Purpose.FORWARD
        elif name == "backward":
            tape.relabel_since(self._phase_start, Purpose.SAVED)
            known = (observer.index_of_key(key) for key in self.sites.checkpoint_inputs)
            tape.relabel([index for index in known if index is not None], Purpose.SAVED, Purpose.CHECKPOINT_INPUT)
            tape.default_label = Purpose.BACKWARD
        elif name == "optimizer":
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            observer.relabel_tensors(gradients, Purpose.GRADS)
            tape.default_label = Purpose.OPTIMIZER
        elif name == "zero_grad":
            for values in self.optimizer.state.values():
                tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
                observer.relabel_tensors(tensors, Purpose.OPTIMIZER_STATE)
            maps = getattr(self.optimizer, "name2qmap", {})
            observer.relabel_tensors(maps.values(), Purpose.OPTIMIZER_STATE)
        tape.mark(name)

    def _step_ends(self) -> None:
        self._step_is_over = True

    def _batch(self, *args: Any) -> Any:
        """A batch comes in: the old one dies after."""
        self.tape.step += self._step_is_over
        self._step_is_over = False
        self.tape.default_label = Purpose.OTHER
        self.tape.mark("inputs")
        return _BATCH(*args)

    def _recompute(self, begins: bool) -> None:
        """A checkpoint makes its region again: autocast is switched on as it was, what stays is labelled."""
        tape = self.tape
        if begins:
            self._recompute_start = len(tape.events)
            tape.default_label = Purpose.FORWARD
            tape.mark("recompute")
            if self.config.autocast:
                self._in_recompute.enter_context(torch.autocast(DEVICE, dtype=torch.bfloat16))
        else:
            self._in_recompute.close()
            tape.relabel_since(self._recompute_start, Purpose.RECOMPUTE)
            tape.default_label = Purpose.BACKWARD
            tape.mark("backward")

    def _stream(self) -> Stream:
        tape = self.tape
        config = self.model.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        shared = heads != int(getattr(config, "num_key_value_heads", heads) or heads)
        head_dim = int(getattr(config, "head_dim", 0) or (config.hidden_size // heads if heads else 0))
        width = 4 if self.options.prepare_kbit and not self.options.autocast else 2
        kernel = attention_kernel(self.device, self.options.attention, width, shared, head_dim)
        return tape.stream(self.managed.bytes, kernel)


def _elements(parameter: Any) -> int:
    """Elements before packing."""
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else int(parameter.numel())


def _same(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
    return tensor


#: Initialisation of values there are none of; on ``meta`` it would only make temporaries that a host would have.
_QUIET = dict.fromkeys(("kaiming_uniform_", "zeros_", "normal_", "uniform_", "ones_", "orthogonal_"), _same)
