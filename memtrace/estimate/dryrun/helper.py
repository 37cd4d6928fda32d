"""The compiled helper (``device.cpp``): built once for a PyTorch release, kept in the user's cache, loaded first.

Nothing of it is linked with Python, so one build serves every Python; PyTorch's C++ interface changes with a release.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from memtrace.cache.folder import kept_file
from memtrace.errors import MissingDependencyError, UsageError
from memtrace.record import messages

_SOURCE = Path(__file__).with_name("device.cpp")
_COMPILERS = ("c++", "g++", "clang++")
KNOWN = ((2, 11), (2, 13))  # PyTorch releases, first and last, whose C++ interface the helper is written for
_LIBRARIES = ("c10", "torch_cpu")


class Answers(ctypes.Structure):
    """What the helper asks of Python (``struct Answers``)."""

    _fields_ = (
        ("allocate", ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)),
        ("release", ctypes.CFUNCTYPE(None, ctypes.c_uint64)),
        ("refusal", ctypes.CFUNCTYPE(ctypes.c_void_p)),
        ("value", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int, ctypes.c_char_p)),
        ("attention", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))),
        ("workspace", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int)),
        ("failed", ctypes.CFUNCTYPE(None, ctypes.c_char_p)),
        ("used", ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int64)),
        ("waited", ctypes.CFUNCTYPE(None)),
        ("multiprocessors", ctypes.c_int64),
    )


def load() -> ctypes.CDLL:
    """The helper, in this process, which must not have imported PyTorch. Raises MissingDependencyError, UsageError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise MissingDependencyError.of_extra("a dry run needs PyTorch, which is not installed here", "capture")
    if "torch" in sys.modules:
        raise UsageError("PyTorch was imported before the dry run began: its device can't be replaced any more")
    torch = Path(spec.origin).parent
    try:
        facts = runpy.run_path(str(torch / "version.py"))
    except OSError as error:
        raise MissingDependencyError(f"a dry run needs PyTorch, and {torch} is none: {error.strerror}") from None
    version = str(facts["__version__"])
    _check(version, facts)
    key = hashlib.blake2b(_SOURCE.read_bytes() + version.encode(), digest_size=12).hexdigest()
    path = kept_file(f"dryrun-{key}.so", lambda file: _build(torch, version, file))
    for name in _LIBRARIES:
        ctypes.CDLL(str(torch / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _check(version: str, facts: dict[str, object]) -> None:
    if sys.platform != "linux":
        raise MissingDependencyError(f"a dry run needs Linux; this is {sys.platform}")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not KNOWN[0] <= release <= KNOWN[1]:
        known = " to ".join(f"{major}.{minor}" for major, minor in KNOWN)
        raise MissingDependencyError(f"a dry run knows PyTorch {known}; this is {version}")
    if facts.get("hip"):
        raise MissingDependencyError(f"a dry run knows PyTorch's CPU and CUDA builds; this is {version}")


def stand_in_for_cublaslt(cuda_major: int) -> Path:
    """The library that ``cublaslt.c`` says, under the name of CUDA's release. Raises MissingDependencyError."""
    source = _SOURCE.with_name("cublaslt.c")
    key = hashlib.blake2b(source.read_bytes(), digest_size=12).hexdigest()
    options = ["-xc", str(source), f"-DCUDA_MAJOR={cuda_major}", f"-Wl,-soname,libcublasLt.so.{cuda_major}"]
    return kept_file(f"cublaslt-{cuda_major}-{key}.so", lambda file: _compile(options, file, source.name))


def _build(torch: Path, version: str, target: Path) -> None:
    include = torch / "include"
    options = [
        "-O1", "-std=c++20", str(_SOURCE), "-DAT_PER_OPERATOR_HEADERS", f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}", f"-L{torch / 'lib'}", *(f"-l{name}" for name in _LIBRARIES),
    ]  # fmt: skip
    _compile(options, target, f"the helper for PyTorch {version}", takes="10 to 30 seconds")


def _compile(options: list[str], target: Path, what: str, takes: str = "") -> None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise MissingDependencyError("a dry run compiles a helper once: no C++ compiler (g++) is found")
    if takes:
        messages.say(f"compiling {what}, once ({takes})")
    command = [*compiler.split(), "-fPIC", "-shared", "-w", "-o", str(target), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MissingDependencyError(f"the C++ compiler can't be run: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise MissingDependencyError(f"{what} does not compile: {errors[0].strip()}")


def operators_of_cuda() -> list[str]:
    """Names of PyTorch's operators that have a CUDA kernel, from the list that PyTorch's own code is made of."""
    import torchgen

    listed = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    own: dict[str, bool] = {}
    delegate: dict[str, str] = {}
    name = ""
    for line in listed.read_text().splitlines():
        if line.startswith("- func: "):
            name = line[len("- func: ") :].partition("(")[0]
        elif line.startswith("  structured_delegate: "):
            delegate[name] = line.partition(": ")[2].strip()
        elif line.startswith("    ") and ":" in line and "CUDA" in re.split(r"[,:\s]+", line.partition(":")[0]):
            own[name] = True
    return sorted({*own, *(name for name, other in delegate.items() if other in own)})
