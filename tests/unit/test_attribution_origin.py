"""Whose code a frame is, wherever people keep libraries, clones, programs and Python itself."""

from __future__ import annotations

import pytest
from support import snapshot
from wrappers import WRAPPERS, wrapped

from memtrace.attribution.origin import with_origins
from memtrace.attribution.sites import is_plumbing
from memtrace.snapshot.stacks import Frame


def origins(*paths: str, name: str = "f") -> list[str]:
    return [frame.filename for frame in with_origins(tuple(Frame(path, 1, name) for path in paths))]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/env/lib/python3.11/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/usr/lib/python3/dist-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("C:\\venv\\Lib\\site-packages\\torch\\nn\\functional.py", "torch/nn/functional.py"),
        ("/app/site-packages.zip/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/u/.pex/installed_wheels/0/ab/torch-2.5-cp311.whl/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/u/project/__pypackages__/3.11/lib/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/u/torch/optim/venv/lib/python3.11/site-packages/einops/layers.py", "einops/layers.py"),
        ("/usr/lib/python3.11/contextlib.py", "python3/contextlib.py"),
        ("C:\\Python311\\Lib\\asyncio\\runners.py", "python3/asyncio/runners.py"),
        ("/app/python311.zip/functools.py", "python3/functools.py"),
        ("<frozen runpy>", "python3/<frozen runpy>"),
        ("D:\\Lib\\train.py", "own/D:/Lib/train.py"),
        ("/home/u/python3/train.py", "own//home/u/python3/train.py"),
        ("<stdin>", "own/<stdin>"),
        ("<string>", "own/<string>"),
        ("/home/u/torch/optim/train.py", "torch/optim/train.py"),  # alone, it may be a clone
        ("", "c++/"),
        ("??", "c++/??"),
        ("torch/csrc/autograd/engine.cpp", "c++/torch/csrc/autograd/engine.cpp"),
    ],
)
def test_paths_come_to_one_form(path: str, wanted: str) -> None:
    assert origins(path) == [wanted]


def test_functions_that_data_classes_write_are_pythons() -> None:
    assert origins("<string>", name="__init__") == ["python3/<string>"]


def test_a_clone_is_a_library_only_where_it_is_used() -> None:
    clone, own = "/home/u/src/pytorch/torch/nn/modules/module.py", "/home/u/torch/optim/train.py"
    more = "/home/u/src/pytorch/torch/nn/modules/linear.py"
    assert origins(clone, more, own) == ["torch/nn/modules/module.py", "torch/nn/modules/linear.py", f"own/{own}"]
    assert origins("/env/lib/python3.11/site-packages/torch/_tensor.py", clone) == ["torch/_tensor.py", f"own/{clone}"]


def test_a_script_and_what_lies_beside_it_are_the_users() -> None:
    for folder in ("/home/u/site-packages/torch/optim", "/home/u/deepspeed/runtime/zero"):
        frames = Frame(f"{folder}/train.py", 3, "<module>"), Frame(f"{folder}/model.py", 1, "forward")
        assert {frame.filename for frame in with_origins(frames, [0])} == {f"own/{frame.filename}" for frame in frames}


def test_the_wrappers_of_these_tests_wrap() -> None:
    """Recordings have shortened paths: a pattern may fit none of them."""
    idle = set(WRAPPERS)
    for name in ("tiny-llama_3-steps", "adversarial_oom", "compiled_oom", "tinyllama_hf-trainer"):
        before = snapshot(name).stacks
        for wrapper in sorted(idle):
            after = wrapped(snapshot(name), WRAPPERS[wrapper]).stacks
            if any(before.stack(number) != after.stack(number) for number in range(len(before))):
                idle.discard(wrapper)
    assert not idle


@pytest.mark.parametrize("folder", ["/home/u/memtrace", "/env/lib/python3.12/site-packages"])
def test_the_recorder_s_own_call_is_no_place_that_asks(folder: str) -> None:
    """A model that is a library's class is called by the recorder: the program below it asked."""
    assert is_plumbing(Frame(f"{folder}/memtrace/record/hooks.py", 148, "plain_call"))
    assert not is_plumbing(Frame("/home/u/record/hooks.py", 1, "train"))
