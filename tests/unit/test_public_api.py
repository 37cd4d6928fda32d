"""The names that ``memtrace`` exports: there, documented, typed, and free until they are used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import memtrace
from memtrace import errors

# Removing or renaming one of these is a breaking change: it needs a line in CHANGELOG.md and a new major version.
PUBLIC = ["MemtraceCallback", "MemtraceError", "Snapshot", "__version__", "load", "open", "record"]
ROOT = Path(__file__).parents[2]


def test_the_public_names() -> None:
    assert sorted(memtrace.__all__) == PUBLIC == dir(memtrace)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_each_has_a_docstring_and_annotations(name: str) -> None:
    thing = getattr(memtrace, name)
    assert (inspect.getdoc(thing) or "").strip()
    if inspect.isclass(thing):
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            assert method.startswith("_") or (inspect.getdoc(function) or "").strip(), method
    else:
        signature = inspect.signature(thing)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        memtrace.no_such_name  # noqa: B018


def test_a_room_of_the_same_name_hides_no_function() -> None:
    import memtrace.record.labels
    from memtrace import record
    from memtrace.record import api

    assert memtrace.record is record is api.record


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", memtrace.__version__)


def imported_by(code: str) -> set[str]:
    """Top-level modules in memory after ``code`` ran in an interpreter of its own."""
    program = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "textual", "rich", "numpy", "networkx", "orjson", "zstandard", "matplotlib"}


def test_importing_memtrace_imports_nothing_heavy() -> None:
    assert not imported_by("import memtrace") & HEAVY
    assert not imported_by("import memtrace; memtrace.__version__, dir(memtrace)") & HEAVY


def test_names_for_recording_need_no_torch_until_they_record() -> None:
    assert "torch" not in imported_by("import memtrace; memtrace.record, memtrace.load, memtrace.Snapshot")
    assert not imported_by("from memtrace import load, MemtraceError") & {"torch", "textual"}


@pytest.mark.skipif(find_spec("transformers") is not None, reason="Transformers is installed")
def test_the_callback_says_what_it_needs() -> None:
    with pytest.raises(errors.MissingDependencyError, match="needs transformers"):
        memtrace.MemtraceCallback("run.pickle")


def test_every_error_has_its_exit_code_and_docstring() -> None:
    found = [thing for _, thing in inspect.getmembers(errors, inspect.isclass) if thing.__module__ == errors.__name__]
    assert len(found) >= 5
    for error in found:
        assert issubclass(error, memtrace.MemtraceError)
        assert error.exit_code in range(1, 6) and error.__doc__


def test_packages_are_marked_as_typed() -> None:
    assert (ROOT / "memtrace" / "py.typed").exists()
    assert (ROOT / "tui" / "memtrace_tui" / "py.typed").exists()
