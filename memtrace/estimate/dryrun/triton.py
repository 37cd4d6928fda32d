"""Triton where there is no GPU: its kernels write into tensors that the program made, so a launch takes no memory.

Where Triton is installed only its launches are replaced; where it is not, a module of that name stands for it, as on
the machine that the run is meant for.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from memtrace.record.launcher import after_import

_VERSION = "3.6.0"


def install(written: Callable[[Any], None]) -> None:
    """``written`` is called for each argument of a launch: its values are no longer known."""
    if importlib.util.find_spec("triton") is not None:
        after_import("triton.runtime.jit", lambda: _replace_launch(written))
        return
    jit = _decorator(lambda function: _Kernel(function, written))
    same = _decorator(lambda function: function)
    functions = {
        "jit": jit,
        "autotune": lambda *_args, **_kwargs: lambda function: function,
        "heuristics": lambda *_args, **_kwargs: lambda function: function,
        "Config": _Anything("triton.Config"),
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << max(0, int(n) - 1).bit_length(),
        "__version__": _VERSION,
    }
    language = _Anything("triton.language")
    for name, module in {"triton": _Anything("triton"), "triton.language": language}.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__file__, module.__path__ = __file__, []
        sys.modules[name] = module
    sys.modules["triton"].__dict__.update(functions, language=language)
    language.__dict__["jit"] = same


def _decorator(of: Callable[[Any], Any]) -> Callable[..., Any]:
    """With or without arguments."""

    def decorate(function: Any = None, **_kwargs: Any) -> Any:
        return of if function is None else of(function)

    return decorate


class _Kernel:
    """``kernel[grid](…)``."""

    def __init__(self, function: Any, written: Callable[[Any], None]) -> None:
        self.fn, self.written = function, written
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, _grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            self.written(value)


class _Anything(types.ModuleType):
    """Has every attribute and may be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, _Anything(f"{self.__name__}.{name}"))

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self


def _replace_launch(written: Callable[[Any], None]) -> None:
    from triton.runtime.jit import JITFunction

    def run(_self: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            written(value)

    JITFunction.run = run
