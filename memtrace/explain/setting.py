"""Where a run ran: back end, release, platform, trainer and the settings it had, as far as a file or a log shows them.

Advice is spelled for that: the variable that the back end reads, no setting that the release or platform lacks, none
that is set already, and no argument of a trainer that does not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memtrace.frozen import dataclass
from memtrace.snapshot.model import Snapshot
from memtrace.snapshot.version import other_backend

if TYPE_CHECKING:
    from memtrace.oomlog import LogReading, OomMessage

_VARIABLE = r"PYTORCH_(?:CUDA_|HIP_|NPU_|XPU_|MUSA_|MLU_|GCU_)?ALLOC_CONF"
_SET = re.compile(rf"({_VARIABLE})[\"']?\]?\s*[=:,]\s*[\"']?([a-z_0-9]+:[\w:.,\[\]>;-]+)")
_UNSUPPORTED = re.compile(
    r"expandable_segments\W+(?:is )?not supported|(?:does not|doesn't) support expandable_segments"
)
_ENABLED = re.compile(r"expandable_segments is enabled")
_WINDOWS_PATH = re.compile(r"(?:^|[\s\"'(])[A-Za-z]:\\")
_NAMED = re.compile(rf"try setting ({_VARIABLE})")
_TRAINERS = (  # the outermost program first: it is what a person writes arguments for
    ("axolotl", "/axolotl/"), ("llamafactory", "/llamafactory/"), ("trl", "/trl/"),
    ("transformers", "/transformers/trainer"), ("lightning", "/lightning/"), ("lightning", "/pytorch_lightning/"),
    ("deepspeed", "/deepspeed/"), ("accelerate", "/accelerate/"), ("vllm", "/vllm/"), ("sglang", "/sglang/"),
    ("comfyui", "/comfy/"), ("diffusers", "/diffusers/pipelines/"),
)  # fmt: skip
_SHARDED = re.compile(r"torch/distributed/fsdp/|/deepspeed/runtime/zero/(?:stage3|partition)")
_DTENSORS = re.compile(r"torch/distributed/(?:fsdp/_fully_shard|tensor)/")
_TOOLS = {"cuda": "nvidia-smi", "hip": "rocm-smi", "npu": "npu-smi info", "xpu": "xpu-smi"}


@dataclass(frozen=True, slots=True)
class RunSetting:
    """``release``: (major, minor) that the run had at least, None if unknown. ``conf``: allocator settings in force."""

    backend: str = "cuda"
    release: tuple[int, int] | None = None
    is_windows: bool = False
    trainer: str = "plain"
    has_dtensors: bool = False
    """Parameters are DTensors (FSDP2, tensor parallelism), as the code on the stacks shows."""
    shards_weights: bool = False
    """Weights are spread over ranks by FSDP or ZeRO-3, likewise."""
    conf: str = ""
    is_expandable: bool = False
    unsupported: bool = False
    """The log says that expandable segments have no effect here."""
    named_variable: str | None = None

    @property
    def variable(self) -> str:
        """The environment variable that this back end and release read."""
        if self.backend not in ("cuda", "hip", "xpu"):
            return f"PYTORCH_{self.backend.upper()}_ALLOC_CONF"
        if self.named_variable is not None:
            return self.named_variable
        if self.backend == "xpu" or (self.release is not None and self.release >= (2, 10)):
            return "PYTORCH_ALLOC_CONF"
        return "PYTORCH_HIP_ALLOC_CONF" if self.backend == "hip" else "PYTORCH_CUDA_ALLOC_CONF"

    @property
    def serves(self) -> bool:
        """Whether the program answers prompts and trains nothing."""
        return self.trainer in ("vllm", "sglang") or self.draws

    @property
    def draws(self) -> bool:
        """Whether it makes images or videos with a finished model."""
        return self.trainer in ("comfyui", "diffusers")

    @property
    def card_tool(self) -> str:
        """What lists the processes on the card."""
        return _TOOLS.get(self.backend, "the vendor's tool")

    @property
    def may_expand(self) -> bool:
        """Whether expandable segments are worth advising: they exist here and are not in force."""
        if self.is_windows or self.unsupported or self.is_expandable or "expandable_segments:True" in self.conf:
            return False
        least = {"cuda": (2, 1), "npu": (2, 1), "hip": (2, 9), "xpu": (2, 10)}.get(self.backend)
        if least is None:
            return False
        return self.release >= least if self.release is not None else self.backend in ("cuda", "npu")

    @property
    def may_split(self) -> bool:
        """Whether ``max_split_size_mb`` is worth advising."""
        known = self.backend in ("cuda", "hip", "npu") and (self.release is None or self.release >= (1, 10))
        return known and "max_split_size_mb" not in self.conf

    def already(self) -> tuple[str, ...]:
        """Sentences on settings that are in force, or have no effect here, and so are not advised."""
        found = []
        if self.unsupported:
            found.append("The log says that expandable_segments is not supported on this platform: it has no effect.")
        elif self.is_windows:
            found.append("Expandable segments don't exist on Windows.")
        if self.conf:
            found.append(f"{self.conf} is set already.")
        elif self.is_expandable:
            found.append("Expandable segments are switched on already.")
        return tuple(found)


def setting_of_snapshot(snapshot: Snapshot, is_expandable: bool, is_npu: bool = False) -> RunSetting:
    """From a snapshot's settings, frames and what memtrace's recorder noted. ``is_npu``: its block sizes say so."""
    extra, files = snapshot.memtrace, [frame.filename for frame in snapshot.stacks.frames]
    confs = [value for key, value in snapshot.settings.items() if re.fullmatch(_VARIABLE, key) and value]
    built = str(extra.get("cuda") or "")
    is_hip = bool(snapshot.settings.get("PYTORCH_HIP_ALLOC_CONF")) or any("/hip/" in name for name in files)
    nvidia_or_amd = "hip" if is_hip and not built.startswith(("11", "12", "13")) else "cuda"
    return RunSetting(
        backend="npu" if is_npu else other_backend(snapshot) or nvidia_or_amd,
        release=_release(str(extra.get("torch") or "")),
        is_windows=any(_WINDOWS_PATH.match(name) for name in files),
        trainer=trainer_of(files),
        has_dtensors=_any(_DTENSORS, files),
        shards_weights=_any(_SHARDED, files),
        conf=str(confs[0]) if confs else "",
        is_expandable=is_expandable,
    )


def setting_of_log(
    reading: LogReading, message: OomMessage | None, lines: Iterable[str], files: Iterable[str]
) -> RunSetting:
    """From what a log prints: exports, warnings, the message's own hint, and the files of its traceback."""
    text = "\n".join([*reading.settings, *lines])
    words = message.text if message is not None else ""
    named, put = _NAMED.search(words), _SET.search(_NAMED.sub("", text))
    return RunSetting(
        backend=(message.backend if message is not None else None) or "cuda",
        release=_release(message.torch_at_least or "") if message is not None else None,
        is_windows=bool(_WINDOWS_PATH.search(text)),
        trainer=trainer_of(files),
        has_dtensors=_any(_DTENSORS, files),
        shards_weights=_any(_SHARDED, files),
        conf=put[2].rstrip(".,;") if put is not None else "",
        is_expandable=bool(_ENABLED.search(words + text)),
        unsupported=bool(_UNSUPPORTED.search(text)),
        named_variable=named[1] if named is not None else None,
    )


def trainer_of(files: Iterable[str]) -> str:
    """The program whose arguments the user writes, by the files on the stacks; "plain" for a loop of one's own."""
    seen = "\n".join("/" + name.replace("\\", "/") for name in set(files))
    return next((name for name, part in _TRAINERS if part in seen), "plain")


def _any(part: re.Pattern[str], files: Iterable[str]) -> bool:
    return any(part.search(name.replace("\\", "/")) for name in files)


def _release(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found is not None else None
