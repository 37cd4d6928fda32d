"""The provider: the same dataclasses as ``--json``, jumps, and no Textual."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import orjson
import pytest
from browser_cases import CASES, TINY, recording
from memtrace_tui.data.lines import Goto
from memtrace_tui.data.overview import budget_lines
from memtrace_tui.provider import BrowsedRecording, Provider
from support import trace_path

from memtrace.answers.report import report
from memtrace.cli import main
from memtrace.errors import MemtraceError, NoAnswerError, UsageError
from memtrace.history.timeline import choose_event

BIG = "llama2-7b_oom-first-step"


def test_the_data_side_imports_no_textual() -> None:
    code = (
        "import sys, pkgutil, importlib, memtrace_tui.provider, memtrace_tui.session, memtrace_tui.palette, "
        "memtrace_tui.settings, memtrace_tui.data as data\n"
        "[importlib.import_module(f'memtrace_tui.data.{m.name}') for m in pkgutil.iter_modules(data.__path__)]\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('textual', 'rich', 'torch')]\n"
        "sys.exit(f'imports {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("case", CASES)
def test_reports_are_the_same_object_as_json_prints(case: str) -> None:
    provider = recording(case).provider()
    for at in ("peak", "end", "reserved-peak", None):
        chosen = choose_event(provider.timeline, at)
        mine, theirs = provider.report(chosen.event), report(provider.analysis, chosen)
        a, b = (orjson.loads(orjson.dumps(r, option=orjson.OPT_SERIALIZE_NUMPY)) for r in (mine, theirs))
        for each in (a, b):  # one event can have several names; everything else must agree
            each["at"].pop("kind"), each["fragmentation"]["at"].pop("kind")
        assert a == b


@pytest.mark.parametrize("name", [TINY, BIG])
def test_the_first_screen_is_what_report_json_prints(name: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = str(trace_path(name))
    assert main(["report", path, "--json"]) == 0
    printed = json.loads(capsysbinary.readouterr().out)
    provider = BrowsedRecording.open(path).provider()
    shown = orjson.loads(orjson.dumps(provider.report(provider.start.event), option=orjson.OPT_SERIALIZE_NUMPY))
    assert shown == {key: printed[key] for key in shown}  # the command may add to it


@pytest.mark.parametrize("case", CASES)
def test_live_rows_and_categories_agree_with_the_report(case: str) -> None:
    provider = recording(case).provider()
    for event in {-1, 0, provider.count // 3, provider.count - 1, provider.start.event}:
        event = provider.clamp(event)
        told = provider.report(event)
        rows = provider.live(event)
        size = provider.timeline.allocations.requested_bytes
        assert int(size[rows].sum()) == told.requested_bytes - int(
            size[np.setdiff1d(provider.timeline.live_rows(event), rows)].sum()
        )
        assert sum(told.categories.values()) == told.reserved_bytes == provider.layout(event).reserved_bytes


def test_names_of_events() -> None:
    provider = recording(BIG).provider()
    assert provider.at(provider.ooms[-1]).kind == "oom"
    assert recording(TINY).provider().at(recording(TINY).provider().peaks[1].event).kind == "peak"
    assert provider.at(0).kind == "event"


def test_jumps() -> None:
    provider = recording(TINY).provider()
    starts = [span.start for span in provider.spans]
    assert provider.neighbour(starts[3], 1, "phase") == starts[4]
    assert provider.neighbour(starts[3], -1, "phase") == starts[2]
    assert provider.neighbour(starts[3] + 1, -1, "phase") == starts[3]
    assert provider.neighbour(provider.count - 1, 1, "phase") == provider.count - 1
    step = provider.neighbour(0, 1, "step")
    assert provider.moment(step).step == 0 and provider.moment(step - 1).step is None


def test_named_places() -> None:
    provider = recording(TINY).provider()
    assert provider.named("peak") == provider.peaks[1].event
    assert provider.named("end") == provider.count - 1
    assert provider.named("start") == 0
    assert provider.named("1,234") == 1234
    assert provider.named("50%") == round((provider.count - 1) / 2)
    assert provider.moment(provider.named("step 2")).step == 2
    for nonsense, error in (("nowhere", UsageError), ("99999999", UsageError), ("step 77", UsageError),
                            ("step x", UsageError), ("oom", NoAnswerError)):  # fmt: skip
        with pytest.raises(error):
            provider.named(nonsense)


def test_two_devices() -> None:
    both = recording("two-devices")
    assert both.devices == (0, 1)
    assert both.provider(0).device == 0 and both.provider(1).device == 1
    assert both.provider(1) is both.provider(1)
    assert both.why_device is not None


def test_a_file_that_is_no_snapshot_says_so(tmp_path: object) -> None:
    with pytest.raises(MemtraceError, match="no such file"):
        BrowsedRecording.open(f"{tmp_path}/nothing.pickle")


def test_progress_goes_up_and_can_stop_the_loading() -> None:
    seen: list[float] = []
    BrowsedRecording.open(trace_path(TINY), on_progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0

    class Stop(Exception):
        pass

    def stop(share: float) -> None:
        raise Stop

    with pytest.raises((Stop, MemtraceError)):
        BrowsedRecording.open(trace_path(TINY), on_progress=stop)


def test_the_provider_of_an_empty_recording_answers_everything() -> None:
    provider: Provider = recording("empty").provider()
    assert provider.count == 0 and provider.clamp(5) == -1
    assert provider.report(-1).reserved_bytes == 0
    assert provider.named("start") == -1
    assert provider.spans == () and provider.ooms == () and provider.capacity_bytes is None


def test_a_category_without_bytes_leads_nowhere() -> None:
    provider = recording(BIG).provider()
    budget = provider.report(-1)  # before anything was allocated
    assert not any(budget.categories.values())
    lines = budget_lines(budget, 100)
    assert {line.target for line in lines} == {None, Goto("segments")}
