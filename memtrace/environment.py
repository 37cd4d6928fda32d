"""What a bug report needs to know of the machine: versions, GPU, terminal. No paths, no names of users or hosts.

Nothing heavy is imported: versions come from the packages' metadata, CUDA's from the text of ``torch/version.py``.
"""

from __future__ import annotations

import locale
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from memtrace.compiled import described

_CORE = ("numpy", "networkx", "orjson", "textual", "rich", "zstandard")
_TRAINING = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "triton")
_TORCH_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([\w.+-]+)['\"]", re.MULTILINE)
_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR", "TERM_PROGRAM", "TMUX")
_PLAIN = re.compile(r"[\w.+-]{1,40}")


def environment() -> list[tuple[str, str]]:
    """(what, value) rows, in the order people read them; absent packages and devices are said to be absent."""
    return [
        ("installed", "from a checkout (editable)" if _is_editable() else "as a package"),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()}, {platform.python_compiler()})"),
        ("loops over events", described()),
        ("system", f"{platform.platform()}, {os.cpu_count()} CPUs"),
        *((name, _installed(name)) for name in (*_CORE, *_TRAINING)),
        ("torch built for", _torch_build()),
        ("NVIDIA driver", _ask_driver("driver_version").partition(";")[0] or "none found"),
        ("GPUs", _ask_driver("name,memory.total") or "none found"),
        ("terminal", _terminal()),
        ("text encoding", f"{locale.getpreferredencoding(False)}, stdout {getattr(sys.stdout, 'encoding', None)}"),
    ]


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _is_editable() -> bool:
    try:
        text = metadata.distribution("torch-memtrace").read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return False
    return '"editable": true' in text


def _torch_build() -> str:
    """What ``torch.version`` would say, without importing torch, which takes seconds."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        found = [f"{kind.upper()} {version}" for kind, version in _TORCH_BUILD.findall(text)]
        return ", ".join(found) or "CPU only"
    return "no torch"


def _ask_driver(fields: str) -> str:
    """nvidia-smi's answer, one GPU after the other; empty where there is none or it doesn't answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return "; ".join(line.strip() for line in answer.splitlines() if line.strip())


def _terminal() -> str:
    """Size, and the variables that decide about colour; a value that isn't a plain word is only said to be set."""
    shown = []
    for name in _TERMINAL:
        value = os.environ.get(name)
        if value:
            shown.append(f"{name}={value}" if _PLAIN.fullmatch(value) else f"{name} set")
    size = shutil.get_terminal_size()
    kind = f"{size.columns}x{size.lines}" if sys.stdout is not None and sys.stdout.isatty() else "not a terminal"
    return ", ".join([kind, *shown])
