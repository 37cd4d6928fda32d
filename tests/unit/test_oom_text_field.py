"""Logs from the field: the traceback, the settings and the other processes in them decide too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import read_text

from memtrace.cli import main
from memtrace.explain.answer import Explanation
from memtrace.explain.explain import explain_log
from memtrace.explain.log_answer import principal
from memtrace.explain.traceback import lines_around

TRUTH = Path(__file__).parent.parent / "truth" / "field_logs.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in TRUTH.read_text().splitlines()]
BY_ID = {case["id"]: case["text"] for case in CASES}


def explained(text: str) -> Explanation:
    reading = read_text(text)
    around = lines_around(text.encode().splitlines(keepends=True), principal(reading.messages).line)
    return explain_log(reading, (), *around)


def said(answer: Explanation) -> str:
    changes = [advice.change for finding in answer.findings for advice in finding.advice]
    return " ".join([*answer.because, *answer.worth_saying, *(f.evidence for f in answer.findings), *changes])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_right_in_verdict_names_and_words_to_avoid(case: dict[str, Any]) -> None:
    answer = explained(case["text"])
    assert case["want_verdict"] in (None, answer.verdict)
    assert [word for word in case["should_name"] if word not in said(answer)] == []
    assert [word for word in case["must_not_advise"] if word in said(answer)] == []
    assert set(case.get("findings", ())) <= {finding.id for finding in answer.findings}
    for key in ("step", "phase"):
        assert key not in case or getattr(answer.when, key) == case[key]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_same_from_a_rank_among_others(case: dict[str, Any]) -> None:
    text = case["text"]
    if "rank" not in text:
        other = '[rank5]:   File "/env/train.py", line 5, in main\n'
        text = "".join(f"[rank3]: {line}\n{other}" for line in text.splitlines())
    answer, plain = explained(text), explained(case["text"])
    assert answer.verdict == plain.verdict
    assert [f.id for f in answer.findings] == [f.id for f in plain.findings]


def test_a_setting_that_is_in_force_is_not_advised() -> None:
    text = BY_ID["setting_not_supported"].split("\n", 1)[1].replace("C:\\work", "/work")
    assert "expandable_segments:True" in said(explained(text))
    for line in ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n",
                 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n'):  # fmt: skip
        answer = explained(line + "step 1\n" * 2000 + text)
        advised = [advice.change for finding in answer.findings for advice in finding.advice]
        assert not any("expandable" in change for change in advised)
        assert any("is set already" in sentence for sentence in answer.worth_saying)


def test_the_hint_of_a_message_sets_nothing() -> None:
    assert not any("already" in sentence for sentence in explained(BY_ID["shared_test_card"]).worth_saying)


def test_the_other_holder_is_the_other_run_of_the_log() -> None:
    answer = explained(BY_ID["two_runs_on_one_card"])
    assert len(answer.ooms) == 2
    assert any("149826" in sentence and "other run of this log" in sentence for sentence in answer.worth_saying)
    assert not any("found 2 times" in sentence for sentence in answer.worth_saying)


def test_others_count_only_where_they_would_have_sufficed() -> None:
    text = BY_ID["shared_test_card"]
    assert explained(text).verdict == "not_this_process"
    assert explained(text.replace("2.60 GiB", "7.60 GiB")).verdict == "budget"


def test_an_error_that_was_caught_is_not_the_end() -> None:
    caught = "/env/x.py:12: UserWarning: fell back: " + BY_ID["apu_free_exceeds_request"]
    answer = explained(caught)
    assert any("caught" in sentence for sentence in answer.because)
    both = explained(caught + "step 5\n" + BY_ID["shared_test_card"])
    assert both.verdict == "not_this_process" and not any("caught" in sentence for sentence in both.because)


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        (["transformers/trainer.py:save_model", "torch/distributed/fsdp/_state_dict_utils.py:_full_state_dict"],
         "saving_gathers_weights"),
        (["train.py:main", "transformers/generation/utils.py:generate", "transformers/models/llama/m.py:forward"],
         "eval_peak"),
        (["torch/distributed/fsdp/_fully_shard/_fsdp_state.py:_pre_forward", "x/_fsdp_param_group.py:wait_for_unshard"],
         "gathered_weights"),
        (["deepspeed/runtime/zero/partitioned_param_coordinator.py:fetch_sub_module",
          "deepspeed/runtime/zero/partition_parameters.py:_allgather_params_coalesced"], "gathered_weights"),
        (["deepspeed/runtime/engine.py:_take_model_step", "torch/optim/adamw.py:_init_group"],
         "optimizer_on_first_step"),
        (["train.py:main", "torch/optim/adamw.py:adamw"], None),
        (["torch/utils/data/_utils/fetch.py:fetch", "data.py:__getitem__"], "data_on_gpu"),
        (["train.py:main", "trl/models/utils.py:create_reference_model", "copy.py:deepcopy"], "reference_model_copy"),
        (["transformers/trainer.py:evaluate", "transformers/trainer.py:evaluation_loop", "m.py:forward"], "eval_peak"),
        (["train.py:main", "transformers/models/llama/modeling_llama.py:forward"], None),
    ],
)  # fmt: skip
def test_causes_named_by_frames(frames: list[str], wanted: str | None) -> None:
    lines = "".join('  File "/env/lib/site-packages/{}", line 7, in {}\n'.format(*frame.split(":")) for frame in frames)
    text = BY_ID["output_cast_to_32_bits"]
    start = text.index("torch.OutOfMemoryError")
    answer = explained(f"Traceback (most recent call last):\n{lines}{text[start:]}")
    found = [f.id for f in answer.findings if f.id not in ("other_processes", "outside_allocator")]
    assert found == ([wanted] if wanted else [])


def test_a_log_that_says_nothing_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.log").write_text("epoch 1 loss 2.0\n" * 50)
    assert main(["explain", str(tmp_path / "run.log")]) == 4
    assert "nothing here says that memory ran out" in capsys.readouterr().err


def test_a_retold_text_does_not_end_at_its_device_number() -> None:
    retold = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.60 GiB. GPU had 12.44 GiB free of 79.19"
    cut = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.60 GiB. GPU "
    assert not any("raw byte" in sentence for sentence in explained(retold).worth_saying)
    assert any("raw byte" in sentence for sentence in explained(cut).worth_saying)


def test_private_pools_are_named_after_their_back_end() -> None:
    text = (
        "HIP out of memory. Tried to allocate 1.63 GiB. GPU 0 has a total capacity of 63.98 GiB of which 1.18 GiB is "
        "free. Of the allocated memory 57.09 GiB is allocated by PyTorch, with 26.00 MiB allocated in private pools "
        "(e.g., HIP Graphs), and 1.23 GiB is reserved by PyTorch but unallocated."
    )
    assert "26.0 MiB sits in private pools (HIP graphs) alone." in explained(text).worth_saying


def test_a_device_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "/dev/zero"]) == 3
    assert capsys.readouterr().err == "memtrace: /dev/zero: a device that never ends, neither a snapshot nor a log\n"
    assert main(["explain", "/dev/null"]) == 4


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("transformers/trainer.py", "per_device_eval_batch_size"),
        ("lightning/pytorch/loops/loop.py", "batch in the evaluation"),
        ("axolotl/core/trainer.py", "eval_batch_size"),
    ],
)
def test_a_smaller_evaluation_is_spelled_for_the_trainer_of_the_traceback(file: str, words: str) -> None:
    lines = [
        "Traceback (most recent call last):\n",
        f'  File "/x/site-packages/{file}", line 9, in evaluate\n',
        '  File "/home/me/model.py", line 3, in forward\n',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 24.00 "
        "GiB of which 1.00 GiB is free. Of the allocated memory 22.50 GiB is allocated by PyTorch, and 0.50 GiB is "
        "reserved by PyTorch but unallocated.\n",
    ]
    answer = explain_log(read_text("".join(lines)), (), lines)
    change = next(finding for finding in answer.findings if finding.id == "eval_peak").advice[0].change
    assert words in change and ("per_device" in change) == ("transformers" in file)


def test_no_optimizer_is_advised_that_refuses_the_parameters_of_the_traceback() -> None:
    """bitsandbytes 0.50 raises "got mixed torch.Tensor and DTensor" for what ``fully_shard`` made."""
    for shards in (True, False):
        lines = [
            "Traceback (most recent call last):\n",
            '  File "/home/me/train.py", line 3, in main\n',
            '  File "/x/site-packages/torch/distributed/tensor/_dispatch.py", line 9, in dispatch\n' * shards,
            '  File "/x/site-packages/torch/optim/adam.py", line 178, in _init_group\n',
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of "
            "24.00 GiB of which 1.00 GiB is free. Of the allocated memory 22.50 GiB is allocated by PyTorch, and 0.50 "
            "GiB is reserved by PyTorch but unallocated.\n",
        ]
        answer = explain_log(read_text("".join(lines)), (), lines)
        states = next(finding for finding in answer.findings if finding.id == "optimizer_on_first_step")
        assert ("bitsandbytes.optim" not in states.advice[0].change) == shards
        assert ("torchao" in states.advice[0].change) == shards
