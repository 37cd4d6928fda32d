"""Phase and step from the lines around a message, as trainers print them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from support import read_text

from memtrace.explain.explain import explain_log
from memtrace.explain.inputs import Logs
from memtrace.explain.traceback import frames_in_log, lines_around, moment_in_log

MODULE = (
    '  File "/x/site-packages/torch/nn/modules/module.py", line 1790, in _call_impl\n    return forward_call(*args)\n'
)
FORWARD = (
    MODULE
    + '  File "/x/site-packages/transformers/models/llama/modeling_llama.py", line 175, in forward\n    down = …\n'
)
BACKWARD = (
    '  File "/x/site-packages/torch/_tensor.py", line 581, in backward\n    torch.autograd.backward(\n'
    '  File "/x/site-packages/torch/autograd/graph.py", line 829, in _engine_run_backward\n    return …\n'
)
RECOMPUTE = '  File "/x/site-packages/torch/utils/checkpoint.py", line 1100, in unpack_hook\n    frame.recompute_fn()\n'
OPTIMIZER = '  File "/x/site-packages/torch/optim/adam.py", line 178, in _init_group\n    state["exp_avg"] = …\n'
LOAD = '  File "/x/site-packages/transformers/modeling_utils.py", line 4313, in from_pretrained\n    load()\n'
EVALUATE = '  File "/x/site-packages/transformers/trainer.py", line 4300, in evaluation_loop\n    step()\n' + FORWARD
OWN = '  File "/home/me/train.py", line 12, in <module>\n    main()\n'
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 23.69 GiB\n"
)


def log(body: str, bar: str = "") -> list[str]:
    return f"{bar}\nTraceback (most recent call last):\n{OWN}{body}{MESSAGE}".splitlines(keepends=True)


@pytest.mark.parametrize(
    ("body", "phase"),
    [
        (FORWARD, "forward"), (BACKWARD, "backward"), (BACKWARD + RECOMPUTE + FORWARD, "backward"),
        (OPTIMIZER, "optimizer"), (LOAD, "load"), (EVALUATE, "evaluation"),
    ],
)  # fmt: skip
def test_phase_by_the_traceback(body: str, phase: str) -> None:
    when = moment_in_log(log(body))
    assert when is not None and (when.phase, when.step, when.event, when.kind) == (phase, None, None, "log")


def test_the_last_traceback_counts() -> None:
    lines = [*log(LOAD), "During handling of the above exception, another exception occurred:\n", *log(BACKWARD)]
    when = moment_in_log(lines)
    assert when is not None and when.phase == "backward"


@pytest.mark.parametrize(
    ("bar", "step"),
    [
        (" 12%|█▏        | 123/1000 [01:23<09:56,  1.47it/s]", 123),
        ("  0%|          | 0/1000 [00:00<?, ?it/s]", 0),
        ("\r  1%| | 9/1000 [00:03<?, ?it/s]\r  1%| | 10/1000 [00:04<06:00, 2.75it/s]", 10),
        ("Epoch 1/9  ━━━━━╸━━━━━ 120/500 0:01:10 • 0:03:40 1.70it/s v_num: 3.000", 120),
        ("Loading checkpoint shards: 100%|██████████| 3/3 [00:04<00:00,  1.4s/it]", None),
        ("Map: 100%|██████████| 5000/5000 [00:01<00:00, 3911.09 examples/s]", None),
        ("step 5/10 done", None),
    ],
)
def test_step_by_the_progress_bar(bar: str, step: int | None) -> None:
    when = moment_in_log(log(FORWARD, bar))
    assert when is not None and when.step == step and when.first_step == (None if step is None else step == 0)


def test_a_bar_drawn_behind_the_message() -> None:
    after = ["\n", "  1%| | 7/1000 [00:03<06:00, 2.75it/s]\n", "  2%| | 20/1000 [00:09<06:00, 2.75it/s]\n"]
    when = moment_in_log(log(FORWARD), after[:2])
    assert when is not None and when.step == 7
    when = moment_in_log(log(FORWARD, "  1%| | 6/1000 [00:03<06:00, 2.75it/s]"), after)
    assert when is not None and when.step == 6


def test_a_traceback_behind_the_message_that_ends_in_it() -> None:
    after = ["Traceback (most recent call last):\n", *(OWN + BACKWARD).splitlines(keepends=True)]
    when = moment_in_log([MESSAGE], [*after, MESSAGE])
    assert when is not None and when.phase == "backward"
    assert moment_in_log([MESSAGE], [*after, "ChildFailedError: train.py FAILED\n"]) is None


FORMS = {
    "IPython": "File /x/site-packages/torch/optim/adam.py:178, in Adam._init_group(self)\n    177 if\n--> 178 a\n",
    "old notebooks": "/x/site-packages/torch/optim/adam.py in _init_group(self, group)\n    177 if:\n--> 178     a\n",
    "rich": "│ /x/site-packages/torch/optim/adam.py:178 in _init_group      │\n│ ❱ 178 │   a   │\n",
    "rich, wrapped": "│ /x/site-packages/torch/optim/adam.py:178 in   │\n│ _init_group   │\n│ ❱ 178 │   a   │\n",
    "JSON": r"  File \"/x/site-packages/torch/optim/adam.py\", line 178, in _init_group\n    a\n" + "\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_traceback(form: str) -> None:
    lines = f"Traceback (most recent call last)\n{FORMS[form]}{MESSAGE}".splitlines(keepends=True)
    (frame,) = frames_in_log(lines)
    assert (frame.filename, frame.line, frame.name) == ("/x/site-packages/torch/optim/adam.py", 178, "_init_group")
    when = moment_in_log(lines)
    assert when is not None and when.phase == "optimizer"


def test_nothing_to_go_by() -> None:
    assert moment_in_log([MESSAGE]) is None
    assert moment_in_log(["Traceback (most recent call last):\n", MESSAGE]) is None


def test_a_file_is_read_up_to_its_message(tmp_path: Path) -> None:
    file = tmp_path / "log"
    text = "loss 1\n" * 1000 + "".join(log(BACKWARD, "  3%| | 3/100 [00:04<06:00, 2.75it/s]")) + "restarting\n" * 9
    file.write_text(text)
    reading = read_text(text)
    read = Logs([str(file)])
    before, after = read.around(read.reading.messages[0])
    assert len(before) == 400 and "out of memory" in before[-1] and after == ["restarting\n"] * 9
    when = explain_log(reading, [str(file)], before, after).when
    assert when is not None and (when.phase, when.step, when.first_step) == ("backward", 3, False)
    (tmp_path / "other").write_text("loss 1\n")
    for names in (("other", "log"), ("log", "other")):
        several = Logs([str(tmp_path / name) for name in names])
        assert several.around(several.reading.messages[0]) == (before, after)
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):  # as PowerShell's > writes it
        wide = tmp_path / encoding
        wide.write_bytes(text.encode(encoding))
        decoded = Logs([str(wide)])
        assert decoded.around(decoded.reading.messages[0]) == (before, after)
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    unpacked = Logs([str(packed)])
    assert unpacked.around(unpacked.reading.messages[0]) == (before, after)
    assert lines_around(iter([b"a", b"b", b"c"]), 2) == (["a", "b"], ["c"])
