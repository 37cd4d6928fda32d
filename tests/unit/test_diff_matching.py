"""Sites match across shifted lines, renamed files, other checkouts, launchers and stack settings."""

from __future__ import annotations

import lzma
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from support import analysis, trace_path

from memtrace.analysis import Analysis, analyse
from memtrace.answers.diff.diff import diff
from memtrace.answers.diff.match import Side, pair_sites
from memtrace.answers.diff.paths import align, match_files, match_lines, plain_path
from memtrace.attribution.origin import is_cpp
from memtrace.history.timeline import build
from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.load import from_raw
from memtrace.snapshot.stacks import StackTable

NAME = "tiny-llama_3-steps"
FrameDict = dict[str, Any]


def rewritten(change: Callable[[list[FrameDict]], list[FrameDict]]) -> Analysis:
    """The tiny recording with every stack passed through ``change``."""
    raw = pickle.loads(lzma.decompress(trace_path(NAME).read_bytes()))
    done: dict[int, tuple[Any, list[FrameDict]]] = {}

    def changed(frames: list[FrameDict]) -> list[FrameDict]:
        if id(frames) not in done:
            done[id(frames)] = (frames, change(frames))
        return done[id(frames)][1]

    for owner in [*raw["segments"], *(b for s in raw["segments"] for b in s["blocks"]), *raw["device_traces"][0]]:
        if owner.get("frames"):
            owner["frames"] = changed(owner["frames"])
    snapshot = from_raw(raw, "rewritten")
    return analyse(build(snapshot, snapshot.devices[0]))


def each(change: Callable[[FrameDict], FrameDict]) -> Callable[[list[FrameDict]], list[FrameDict]]:
    return lambda frames: [change(frame) for frame in frames]


def shifted(frame: FrameDict) -> FrameDict:
    """Lines move by another amount in every function, as after an edit of the file."""
    return {**frame, "line": frame["line"] + sum(map(ord, frame["name"])) % 40 + 1}


def renamed(frame: FrameDict) -> FrameDict:
    name = re.sub(r"modeling_llama\.py$", "modular_llama_v2.py", frame["filename"])
    return {**frame, "filename": re.sub(r"lora/bnb\.py$", "lora/bitsandbytes_layers.py", name)}


def moved(frame: FrameDict) -> FrameDict:
    return {**frame, "filename": f"C:\\Users\\ada\\venv\\Lib\\{frame['filename']}".replace("/", "\\")}


NATIVE = [
    {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"},
    {
        "filename": "CUDACachingAllocator.cpp",
        "line": 0,
        "name": "c10::cuda::CUDACachingAllocator::malloc(unsigned long)",
    },
]


def with_native(frames: list[FrameDict]) -> list[FrameDict]:
    """As ``stacks="all"`` records them: C++ innermost, the interpreter between Python frames."""
    between = {"filename": "??", "line": 0, "name": "_PyEval_EvalFrameDefault"}
    return [*NATIVE, *(f for frame in frames for f in (frame, between))]


def launched(frames: list[FrameDict]) -> list[FrameDict]:
    """Started by another program: other frames at the bottom."""
    bottom = [
        {"filename": "/opt/launch.py", "line": 7, "name": "main"},
        {"filename": "<frozen runpy>", "line": 198, "name": "_run_module_as_main"},
    ]
    return frames + bottom if frames and frames[-1]["name"] == "<module>" else frames


def other_version(frames: list[FrameDict]) -> list[FrameDict]:
    """A library release that puts a decorator around every module call."""
    extra = {"filename": "site-packages/torch/nn/modules/module.py", "line": 1, "name": "_call_with_hooks"}
    return [f for frame in frames for f in ((frame, extra) if frame["name"] == "_call_impl" else (frame,))]


def several(frames: list[FrameDict]) -> list[FrameDict]:
    return with_native(each(shifted)(launched(frames)))


CHANGES = {
    "lines": each(shifted),
    "files": each(renamed),
    "checkout": each(moved),
    "cpp": with_native,
    "launcher": launched,
    "version": other_version,
    "several": several,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_same_run_seen_differently_differs_in_nothing(change: Any, backwards: bool) -> None:
    before, after = analysis(NAME), rewritten(change)
    answer = diff(after, before) if backwards else diff(before, after)
    assert [site for site in answer.sites if site.delta_bytes or site.match is None] == []
    by_line = sum(site.after_bytes for site in answer.sites if site.match == "line")
    with_frames = sum(site.after_bytes for site in answer.sites if site.frame and not site.frame.startswith("("))
    assert by_line > 0.95 * with_frames


def test_lines_are_aligned_within_a_function() -> None:
    assert match_lines([10, 12, 20], [10, 12, 20]) == {10: 10, 12: 12, 20: 20}
    assert match_lines([10, 12, 20], [13, 15, 23]) == {13: 10, 15: 12, 23: 20}
    assert match_lines([10, 12, 20], [12, 20, 30]) == {12: 12, 20: 20}  # one version, other lines reached
    assert match_lines([175, 176, 177], [176, 177, 178]) == {176: 175, 177: 176, 178: 177}
    assert match_lines([10, 20], [11, 25]) == {11: 10}
    assert match_lines([10, 20, 30, 40, 50], [15, 28, 47, 59, 80]) == {15: 10, 28: 20, 47: 30, 59: 40, 80: 50}
    assert match_lines([], [1]) == {} == match_lines([1], [])


def test_files_are_matched_by_path_then_end_then_functions() -> None:
    before = {
        "a/x.py": {"f"},
        "home/me/train.py": {"main", "step"},
        "m/modeling_llama.py": {"forward", "rotate_half", "mlp"},
    }
    after = {
        "a/x.py": {"f"},
        "srv/ci/train.py": {"main"},
        "m/modeling_qwen2.py": {"forward", "rotate_half"},
        "new.py": {"q"},
    }
    assert match_files(before, after) == {
        "a/x.py": "a/x.py",
        "srv/ci/train.py": "home/me/train.py",
        "m/modeling_qwen2.py": "m/modeling_llama.py",
    }


def test_a_choice_between_equals_is_not_made() -> None:
    assert match_files({"p/utils.py": {"f"}, "q/utils.py": {"f"}}, {"r/utils.py": {"f"}}) == {}


def test_installed_packages_lose_their_prefix() -> None:
    assert plain_path("C:\\v\\Lib\\site-packages\\peft\\x.py") == "peft/x.py"
    assert plain_path("/usr/lib/python3/dist-packages/peft/x.py") == "peft/x.py"
    assert plain_path("/home/me/x.py") == "/home/me/x.py"


def test_native_frames_are_told_from_python() -> None:
    assert is_cpp("??", "torch::autograd::Engine::thread_main()")
    assert is_cpp("", "PyObject_Call")
    assert not is_cpp("train.py", "main")
    assert not is_cpp("x/pyramid.py", "Pyramid")


def table(*stacks: list[tuple[str, int, str]]) -> StackTable:
    interner = StackInterner()
    made: list[Any] = [[{"filename": f, "line": n, "name": name} for f, n, name in stack] for stack in stacks]
    for stack in made:  # the interner tells stacks apart by identity first: all of them must stay alive
        interner.add(stack)
    return interner.table()


def side(stack: int, size: int, purpose: str = "temporary/backward", early: bool = False) -> Side:
    return Side(purpose, stack, early, "", size, 1)


def test_autograd_nodes_pair_stacks_without_python() -> None:
    mm = [("??", 0, "torch::autograd::generated::MmBackward0::apply(x)"), ("??", 0, "torch::autograd::Engine::run()")]
    add = [("??", 0, "torch::autograd::generated::AddBackward0::apply(x)"), ("??", 0, "torch::autograd::Engine::run()")]
    mm_elsewhere = [("??", 0, "at::native::mm()"), *mm]
    before, after = align(table(mm, add), table(add, mm_elsewhere))
    pairs = pair_sites([side(1, 5), side(2, 7)], [side(1, 7), side(2, 5)], before, after)
    assert {(p.before[0].bytes, p.after[0].bytes, p.how) for p in pairs} == {(5, 5, "operator"), (7, 7, "line")}


def test_memory_from_before_the_recording_is_not_memory_without_a_stack() -> None:
    before, after = align(table(), table())
    pairs = pair_sites([side(-1, 5, early=True), side(-1, 7)], [side(-1, 8), side(-1, 6, early=True)], before, after)
    assert {(p.before[0].bytes, p.after[0].bytes, p.how) for p in pairs} == {(5, 6, "no stack"), (7, 8, "no stack")}


def test_a_site_is_never_matched_across_purposes() -> None:
    stacks = table([("train.py", 3, "main")])
    before, after = align(stacks, stacks)
    pairs = pair_sites([side(1, 5, "activations/saved")], [side(1, 5, "temporary/forward")], before, after)
    assert [p.how for p in pairs] == [None, None]
