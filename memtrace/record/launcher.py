"""Run an unchanged program with recording on, as ``python SCRIPT`` or ``python -m MODULE`` would run it.

Nothing is imported and the GPU is not touched before the program does so itself: it may still set variables that
PyTorch reads on import, choose its GPU, or fork. The recorder follows when PyTorch has been imported, and begins when
the program first uses the GPU. Processes that the program forks or spawns are recorded the same way, into files of
their own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from memtrace.record import backend as backend_module
from memtrace.record import messages
from memtrace.record.live import let_watchers_in
from memtrace.record.recorder import Recorder, RecordOptions
from memtrace.record.signals import SignalWatch

_CHILD_KEY = "memtrace"
_HERE = Path(__file__).parent

_LOST_ERROR = (
    "PyTorch lost an error here; 2.11 under Python before 3.13 does while it records (pytorch/pytorch issue 179536): "
    "PyTorch 2.12, Python 3.13 or --stacks none let it pass"
)


def launch(program: Sequence[str], is_module: bool, options: RecordOptions) -> int:
    """Run ``program`` (script or module, then its arguments) under a recorder; returns its exit code."""
    backend_module.get().precheck()
    inner = let_watchers_in(Recorder(options))
    signals = SignalWatch(inner)
    signals.install()
    _record_children(inner)
    after_import("torch", lambda: _follow(inner))
    code, error = _run(program, is_module)
    for thread in threading.enumerate():  # as the interpreter would before it exits
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    signals.remove()
    if inner.started_us is None and not inner.is_child and options.steps is None and options.stacks != "none":
        messages.say("the program never used the GPU; nothing was recorded")
    if isinstance(error, SystemError) and "without setting an exception" in str(error) and options.stacks != "none":
        messages.say(_LOST_ERROR)
    inner.conclude(error)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return code


def _follow(inner: Recorder) -> None:
    with messages.guarded("following the program"):
        inner.follow()
        backend_module.get().when_ready(lambda: _begin(inner))


def _begin(inner: Recorder) -> None:
    with messages.guarded("starting the recording"):
        if inner.is_child:
            SignalWatch(inner).install()
            multiprocessing.util.Finalize(None, _child_ends, args=(inner,), exitpriority=100)
        inner.begin()


# running the program
def _run(program: Sequence[str], is_module: bool) -> tuple[int, BaseException | None]:
    """(exit code, the exception that ended the program)."""
    sys.argv = list(program)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    try:
        if is_module:
            _set_path(str(Path.cwd()))
            runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]
        else:
            _run_script(program[0], main)
    except SystemExit as error:
        return _exit_code(error), error
    except BaseException as error:
        _show(error)
        return 1, error
    return 0, None


def _run_script(script: str, main: types.ModuleType) -> None:
    import zipfile

    if Path(script).is_dir() or (not script.endswith((".py", ".pyw")) and zipfile.is_zipfile(script)):
        sys.path.insert(0, script) if sys.flags.safe_path else _set_path(script)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _set_path(str(Path(script).resolve().parent))
    file = str(Path(script).absolute())  # as Python does since 3.9; sys.argv[0] stays as it was given
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main.__dict__.update(__file__=file, __loader__=loader, __spec__=None, __package__=None, __cached__=None)
    code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _set_path(first: str) -> None:
    """Make ``first`` what ``sys.path[0]`` is for a program that Python runs itself."""
    if not sys.flags.safe_path:
        sys.path[0] = first


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print the traceback as Python would: without runpy's frames, and without those of the recorder's hooks."""
    _clean(error, set())
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)


def _clean(error: BaseException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    kept: list[types.TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in ("<frozen runpy>", runpy.__file__) and Path(file).parent != _HERE:
            kept.append(traceback)
        traceback = traceback.tb_next
    for position, entry in enumerate(kept):
        entry.tb_next = kept[position + 1] if position + 1 < len(kept) else None
    error.__traceback__ = kept[0] if kept else None
    _clean(error.__cause__, seen)
    _clean(error.__context__, seen)


# waiting for an import
class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module like everyone else, and calls back when it has been executed."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Part of the import protocol."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # whoever only looked for the module has not imported it
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                loader.__dict__.pop("exec_module", None)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                self.call()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` once the module ``name`` has been imported; at once where it has been."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


# children
class _BeginInChild:
    """Rides along with what ``multiprocessing`` sends to a spawned child; unpickling it there starts a recorder."""

    def __init__(self, options: RecordOptions) -> None:
        self.options = options

    def __reduce__(self) -> Any:
        return _begin_in_child, (self.options,)


def _begin_in_child(options: RecordOptions) -> None:
    with messages.guarded("starting the recording in a child process"):
        inner = let_watchers_in(Recorder(options))
        inner.is_child = True
        after_import("torch", lambda: _follow(inner))


def _record_children(inner: Recorder) -> None:
    """Have spawned children recorded too; forked ones are (see :meth:`Recorder.forked`)."""
    if not _children_find_memtrace():
        return  # what can't be unpickled would break them
    original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        data[_CHILD_KEY] = _BeginInChild(inner.options)
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def _children_find_memtrace() -> bool:
    """Whether a new interpreter can import memtrace: installed, or on ``PYTHONPATH``."""
    root = _HERE.parent.parent
    on_path = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    try:
        metadata.distribution("torch-memtrace")
    except metadata.PackageNotFoundError:
        return root in on_path
    return True


def _child_ends(inner: Recorder) -> None:
    if inner.process == os.getpid():
        inner.conclude(sys.exc_info()[1])
