"""The model on the ``meta`` device: built by Transformers, quantised by bitsandbytes, loaded as by ``from_pretrained``.

The loader itself can't run without a checkpoint, so its order is followed here: a warm-up block as large as the model,
then one tensor at a time in natural order of the names, each quantised as it arrives (Transformers 5).
"""

from __future__ import annotations

from typing import Any

import torch

from memtrace.attribution.categories import Purpose
from memtrace.errors import MissingDependencyError, NoAnswerError, UsageError
from memtrace.estimate.dryrun.observer import DEVICE, Observer
from memtrace.estimate.dryrun.sites import DrySites, site_of
from memtrace.estimate.presets import named_config
from memtrace.estimate.shapes import refuse_absurd


def read_architecture(model: str) -> tuple[str, dict[str, Any]]:
    """(name, keys of a ``config.json``) of a preset, a ``config.json`` or the folder it lies in. Raises
    UsageError, and SnapshotError for what can't be read.
    """
    name, keys, where = named_config(model)
    if "model_type" not in keys:
        raise UsageError(f"{where}: not a model configuration: it has no model_type")
    refuse_absurd(keys, where)
    return name, keys


def with_layers(architecture: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same architecture with fewer layers."""
    keys = dict(architecture)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(keys.get(name), int):
            keys[name] = min(keys[name], layers)
    for name, value in architecture.items():
        if name.endswith("layer_types") and isinstance(value, list):
            keys[name] = value[:layers]
    return keys


def empty_model(architecture: dict[str, Any], attention: str) -> Any:
    """The causal language model of ``architecture`` on ``meta``. Raises UsageError if that can't be built."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(architecture)
    try:
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"transformers can't build {architecture.get('model_type')!r}: {reason}") from None


def quantizer_for(quant: str) -> Any:
    """Transformers' bitsandbytes quantizer, or None."""
    if quant == "none":
        return None
    try:
        from transformers import BitsAndBytesConfig
        from transformers.quantizers import AutoHfQuantizer
    except ImportError as error:
        raise MissingDependencyError(f"a dry run needs transformers with bitsandbytes ({error})") from None
    if quant == "int8":
        return AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_8bit=True), pre_quantized=False)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quant == "nf4-dq",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoHfQuantizer.from_config(config, pre_quantized=False)


class ModelLoader:
    """Gives the parameters of a model on ``meta`` their storages, in the loader's order."""

    def __init__(self, observer: Observer, sites: DrySites, quantizer: Any) -> None:
        self.observer = observer
        self.sites = sites
        self.quantizer = quantizer

    def load(self, model: Any) -> None:
        """Load everything; the observer must be at work."""
        self.sites.load_site = "from_pretrained", -1
        warmup = torch.empty(self._warmup_bytes(model) // 2, dtype=torch.float16, device=DEVICE)
        del warmup
        parameters = dict(model.named_parameters())
        for name in sorted(parameters, key=_natural):
            self.sites.load_site = site_of(name.rpartition(".")[0])
            self._materialize(model, name, parameters.pop(name))
        model.tie_weights()
        for name, buffer in list(model.named_buffers()):
            module, short = _owner(model, name)
            self.sites.load_site = site_of(name.rpartition(".")[0])
            module._buffers[short] = torch.empty_like(buffer)
        self.sites.load_site = "", -1

    def _warmup_bytes(self, model: Any) -> int:
        """``get_total_byte_count``: every parameter at the size it will have on the device."""
        total = 0.0
        for name, parameter in model.named_parameters():
            element = parameter.element_size()
            if self.quantizer is not None:
                element = self.quantizer.param_element_size(model, name, parameter)
            total += parameter.numel() * element
        return int(total)

    def _materialize(self, model: Any, name: str, old: Any) -> None:
        module, short = _owner(model, name)
        if self.quantizer is None or not self.quantizer.param_needs_quantization(model, name):
            value = torch.empty_like(old.data)
            module._parameters[short] = torch.nn.Parameter(value, requires_grad=self.quantizer is None)
            self.observer.relabel_tensors([value], Purpose.UNQUANTIZED)
            return
        value = torch.empty_like(old.data, dtype=torch.bfloat16)
        keywords = dict(old.__dict__)
        if hasattr(old, "quant_type"):
            module._parameters[short] = type(old)(value, requires_grad=False, **keywords)._quantize(DEVICE)
            return
        for key in ("SCB", "CB"):
            keywords.pop(key, None)
        import bitsandbytes.functional as functional

        half = value.to(torch.float16)
        weight, scales, _ = functional.int8_vectorwise_quant(half)
        new = type(old)(weight, requires_grad=False, **keywords)
        new.CB, new.SCB = new.data, scales
        module._parameters[short] = new


def label_weights(observer: Observer, model: Any) -> None:
    """Label everything the model holds: packed weights, their constants, plain weights, buffers, adapters."""
    for name, parameter in model.named_parameters():
        packed = not parameter.is_floating_point()
        if "lora_" in name:
            observer.relabel_tensors([parameter], Purpose.PARAMS)
            continue
        observer.relabel_tensors([parameter], Purpose.QUANTIZED if packed else Purpose.UNQUANTIZED)
        if packed:
            observer.relabel_tensors(_constants(parameter), Purpose.QUANT_STATE)
    observer.relabel_tensors(model.buffers(), Purpose.BUFFER)


def _constants(parameter: Any) -> list[Any]:
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return [parameter.SCB] if getattr(parameter, "SCB", None) is not None else []
    found = [state.absmax, state.code, state.offset]
    if state.state2 is not None:
        found += [state.state2.absmax, state.state2.code]
    return [tensor for tensor in found if tensor is not None]


def require_language_model(model: Any) -> None:
    """Refuse what has no forward pass for token ids. Raises NoAnswerError."""
    if model.get_input_embeddings() is None or model.get_output_embeddings() is None:
        raise NoAnswerError(f"{type(model).__name__} is not a causal language model with an embedding and a head")


def _owner(model: Any, name: str) -> tuple[Any, str]:
    path, _, short = name.rpartition(".")
    return model.get_submodule(path), short


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
