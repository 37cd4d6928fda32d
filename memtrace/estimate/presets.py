"""Published model shapes and GPUs by name. Public numbers from model cards and ``config.json`` files; data sheets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memtrace.errors import UsageError
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.shapes import ModelShape, read_config
from memtrace.units import GIB, MIB

# name: family, hidden, ffn, layers, heads, kv heads, head dim, vocabulary, tied embeddings
_MODELS: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "tiny-llama": ("llama", 512, 1376, 4, 8, 8, 64, 32000, False),
    "tinyllama-1.1b": ("llama", 2048, 5632, 22, 32, 4, 64, 32000, False),
    "llama2-7b": ("llama", 4096, 11008, 32, 32, 32, 128, 32000, False),
    "llama2-13b": ("llama", 5120, 13824, 40, 40, 40, 128, 32000, False),
    "llama2-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 32000, False),
    "llama3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama3.1-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    "llama3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32, 8, 128, 32000, False),
    "qwen2-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen2.5-14b": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False),
    "qwen2.5-32b": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-14b": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "qwen3-32b": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "gemma2-2b": ("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, True),
    "gemma2-9b": ("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, True),
    "phi3-mini": ("phi3", 3072, 8192, 32, 32, 32, 96, 32064, False),
}
_SLIDING_WINDOW = {"mistral-7b": 4096, "phi3-mini": 2047, "gemma2-2b": 4096, "gemma2-9b": 4096}
DEFAULT_CAPACITY_BYTES = 24 * GIB


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """A GPU: memory as PyTorch sees it, kernels, and what a training process holds outside PyTorch's allocator.

    ``outside_bytes``: CUDA context, kernels, library handles after a training step. Measured on an H200 (751–771
    MiB); for the other cards that figure is assumed.
    """

    name: str
    total_bytes: int
    device: KernelDevice
    outside_bytes: int
    outside_measured: bool


_OUTSIDE_BYTES = 771 * MIB
# name: GiB as in PyTorch's messages, compute capability, multiprocessors
_GPUS: dict[str, tuple[float, tuple[int, int], int]] = {
    "rtx3090": (23.69, (8, 6), 82),
    "rtx4090": (23.65, (8, 9), 128),
    "a10": (22.05, (8, 6), 72),
    "l4": (22.05, (8, 9), 58),
    "t4": (14.75, (7, 5), 40),
    "v100-32g": (31.75, (7, 0), 80),
    "a100-40g": (39.45, (8, 0), 108),
    "a100-80g": (79.15, (8, 0), 108),
    "h100": (79.21, (9, 0), 132),
    "h200": (139.80, (9, 0), 132),
}


def model_names() -> tuple[str, ...]:
    """Names of the model presets."""
    return tuple(_MODELS)


def gpu_names() -> tuple[str, ...]:
    """Names of the GPU presets."""
    return tuple(_GPUS)


def _meant(name: str, known: Iterable[str]) -> str:
    """The presets that somebody may have meant by ``name``: same letters and digits (``meta-llama/Llama-2-7b-hf``), a
    part of a name (``4090``), or a likeness. All presets where none is."""
    from difflib import get_close_matches

    def plain(text: str) -> str:
        return "".join(character for character in text.lower() if character.isalnum())

    names = list(known)
    asked = plain(name.rsplit("/", 1)[-1])
    found = [preset for preset in names if asked and asked in plain(preset)]
    if not found:
        found = sorted((preset for preset in names if plain(preset) in asked), key=len)[-1:]
    if not found:
        by_plain = {plain(preset): preset for preset in names}
        found = [by_plain[match] for match in get_close_matches(asked, by_plain, n=3, cutoff=0.6)]
    return f"did you mean {' or '.join(found[:3])}?" if found else f"presets: {', '.join(names)}"


def model_preset(name: str) -> ModelShape:
    """The shape of a published model. Raises UsageError for an unknown name."""
    row = _MODELS.get(name.lower())
    if row is None:
        raise UsageError(f"no model preset {name!r} (a config.json is taken, too); {_meant(name, _MODELS)}")
    family, hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, tied = row
    gemma2 = family == "gemma2"
    return ModelShape(
        name.lower(), family, hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, tied,
        attention_bias=family == "qwen2",
        sliding_window=_SLIDING_WINDOW.get(name.lower()),
        attention_softcap=gemma2,
        logit_softcap=gemma2,
    )  # fmt: skip


def gpu_preset(name: str) -> GpuPreset:
    """A GPU by name. Raises UsageError for an unknown one."""
    row = _GPUS.get(name.lower())
    if row is None:
        raise UsageError(f"no GPU preset {name!r}; {_meant(name, _GPUS)}")
    total_gib, capability, multiprocessors = row
    device = KernelDevice(capability, multiprocessors)
    return GpuPreset(name.lower(), round(total_gib * GIB), device, _OUTSIDE_BYTES, name.lower() == "h200")


def model_shape(model: str) -> ModelShape:
    """A preset by name, or the shape in a ``config.json`` (a path to the file or to the folder that holds it).

    Raises UsageError for an unknown name, and as :func:`read_config` does.
    """
    if not model:
        raise UsageError("no model is named: give a config.json or a preset")
    path = Path(model)
    if model.lower() not in _MODELS and (path.exists() or path.suffix == ".json"):
        return read_config(path / "config.json" if path.is_dir() else path)
    return model_preset(model)
