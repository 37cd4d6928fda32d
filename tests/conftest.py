"""Every run of the tests tries the same examples: what chance finds belongs in a fuzzer, not in a gate. And the width
of the terminal that the tests run in does not change what they see, nor whether they run in the background.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Threads that wait for work of tiny models spin, in this process and in those that tests start: most of what they took.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background: its children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_known_width() -> None:
    """Test runners that start workers tell them the width of their terminal."""
    os.environ.pop("COLUMNS", None)


_MANY_MODULES = 50
_set_aside = 0  # modules that were there when the heap was last set aside


@pytest.fixture(autouse=True)
def libraries_are_set_aside() -> None:
    """What libraries make when they are imported (PyTorch and Transformers: a million objects) is not collected, nor
    searched for tensors by the recorder, in one test after the other.
    """
    global _set_aside
    if len(sys.modules) >= _set_aside + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _set_aside = len(sys.modules)


@pytest.fixture
def stand_in() -> Iterator[Any]:
    """The recorder's back end without a GPU (capture_standin.py); nothing is recorded when the test is over."""
    from capture_standin import StandIn

    from memtrace.record import backend, recorder

    gc.collect()
    with StandIn() as found, backend.use(found):
        yield found
    assert recorder.active() is None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one recording follow one another, so that each is read and replayed once (see support.py)."""
    from support import FIELD, LABELLED, NAMES, STACKS

    place = {name: number for number, name in enumerate(dict.fromkeys([*NAMES, *LABELLED, *FIELD, *STACKS]), 1)}

    def recording(item: pytest.Item) -> int:
        call = getattr(item, "callspec", None)
        return place.get(call.params.get("name"), 0) if call is not None and "/unit/" in item.nodeid else 0

    items.sort(key=recording)


# What the tests cost, in processor time: other work on the machine counts for nothing.

_SECONDS: dict[str, float] = {}


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", type=int, metavar="N", help="show the N tests that take most processor time")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start = _processor_seconds()
    try:
        return (yield)
    finally:
        _SECONDS[item.nodeid] = _processor_seconds() - start


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist tells what its tests cost."""
    _SECONDS.update(getattr(node, "workeroutput", {}).get("processor_seconds", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    getattr(session.config, "workeroutput", {})["processor_seconds"] = _SECONDS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.processor_time:
        terminalreporter.section(f"{_processor_seconds():.1f} s of processor time, imports and children included")
        for name, seconds in sorted(_SECONDS.items(), key=lambda pair: -pair[1])[: config.option.processor_time]:
            terminalreporter.write_line(f"{seconds:7.2f} s  {name}")
