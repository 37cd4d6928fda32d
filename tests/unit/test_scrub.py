"""Scrubbed snapshots say the same about memory, and nothing about whose it is."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import FRAME, event, modern
from support import NAMES, trace_path

from memtrace.analysis import analyse
from memtrace.attribution.frame_tags import frame_tags
from memtrace.attribution.origin import is_cpp, package_of, with_origins
from memtrace.errors import SnapshotError
from memtrace.explain.detectors import weights
from memtrace.export.cut import read_recording
from memtrace.history.timeline import build
from memtrace.scrub.document import scrub
from memtrace.scrub.hiding import Hiding, ScrubOptions
from memtrace.snapshot.decoder.decode import without_gc
from memtrace.snapshot.load import from_raw
from memtrace.snapshot.model import Snapshot

SECRET = "xanadu"


def texts_of(value: Any) -> set[str]:
    """Every text in a container, keys included; each container once."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.add(item)
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting += [*item.keys(), *item.values()] if isinstance(item, dict) else item
    return found


def leaks(value: Any, *secrets: str) -> list[str]:
    return sorted(text for text in texts_of(value) for secret in secrets if secret.lower() in text.lower())


def loaded(raw: Any) -> Snapshot:
    """As a viewer gets it: through a pickle."""
    return from_raw(pickle.loads(pickle.dumps(raw, protocol=4)), "scrubbed")


def same_memory(before: Snapshot, after: Snapshot) -> None:
    """All columns but texts, and what attribution reads out of every stack."""
    for mine, other in zip(before.devices, after.devices, strict=True):
        for name in ("action", "address", "size", "stream", "time_us", "pool"):
            np.testing.assert_array_equal(getattr(mine.trace, name), getattr(other.trace, name))
        assert mine.trace.oom_device_free_bytes == other.trace.oom_device_free_bytes
        for part, names in (
            ("segments", ("address", "total_size", "stream", "is_small", "is_expandable", "pool", "first_block")),
            ("blocks", ("address", "size", "requested_size", "state", "segment")),
        ):
            for name in names:
                np.testing.assert_array_equal(getattr(getattr(mine, part), name), getattr(getattr(other, part), name))
        for old, new in {*zip(mine.trace.stack.tolist(), other.trace.stack.tolist(), strict=True)}:
            old_frames, new_frames = before.stacks.stack(old), after.stacks.stack(new)
            assert [f.line for f in old_frames] == [f.line for f in new_frames]
            for a, b in zip(old_frames, new_frames, strict=True):
                assert is_cpp(a.filename, a.name) == is_cpp(b.filename, b.name)
            for a, b in zip(with_origins(old_frames), with_origins(new_frames), strict=True):
                assert frame_tags(a.filename, a.name) == frame_tags(b.filename, b.name)
                assert package_of(a.filename) == package_of(b.filename) or not package_of(b.filename)


# Scrubbing is about texts, and every text of the largest stands in a smaller one of the same program.
LARGEST = (
    "llama2-7b_kept-graphs", "llama2-7b_variable-length", "llama2-7b_variable-length-expandable",
    "llama2-7b_oom-fragmentation",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LARGEST])
def test_same_bytes_and_same_attribution(name: str) -> None:
    with without_gc():
        recording = read_recording(trace_path(name))
        old = build(recording.snapshot, recording.snapshot.devices[0])
        answer = scrub(recording.raw, ScrubOptions(functions=True))
        after = loaded(answer.snapshot)
    assert after.warnings == recording.snapshot.warnings
    same_memory(recording.snapshot, after)
    new = build(after, after.devices[0])
    first, second = analyse(old).attribution, analyse(new).attribution
    np.testing.assert_array_equal(first.rule, second.rule)
    modules = [np.array([*found.sites.module, ""]) for found in (first, second)]
    np.testing.assert_array_equal(modules[0][old.allocations.stack], modules[1][new.allocations.stack])
    assert not leaks(answer.snapshot, "/train.py", "/qlora.py")
    assert answer.kept == {}


def personal() -> dict[str, Any]:
    """A snapshot with something personal in every place that can hold a text."""
    home = f"/home/{SECRET}.doe/{SECRET}-llm"
    frames = [
        {"filename": "/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
        {
            "filename": f"{home}/.venv/lib/python3.11/site-packages/peft/tuners/lora/bnb.py",
            "line": 2,
            "name": "forward",
        },
        {"filename": f"/usr/lib/python3.11/site-packages/{SECRET}_utils/cache.py", "line": 3, "name": "put"},
        {"filename": f"{home}/losses/{SECRET}_loss.py", "line": 4, "name": f"{SECRET}_loss"},
        {"filename": f"{home}/losses/{SECRET}_loss.py", "line": 4, "name": "reduce_rows"},
        {"filename": f"{home}/train.py", "line": 5, "name": "main", "fx_original_trace": f"File {home}/train.py"},
        {"filename": f"C:\\Users\\{SECRET}\\job.py", "line": 6, "name": f"run_{SECRET}"},
        {"filename": f"/tmp/torchinductor_{SECRET}/ab/cabc.py", "line": 7, "name": "call"},
        {"filename": f"{home}/kernels/{SECRET}.cu", "line": 8, "name": f"{SECRET}::kernel(float*)"},
        {"filename": "", "line": 9, "name": f"{{lambda()#1}} at {home}/x.cpp:3"},
        {"filename": "/usr/lib/python3.11/threading.py", "line": 10, "name": "run"},
        {"filename": "<frozen runpy>", "line": 11, "name": "_run_code"},
        {"filename": f"<ipython-input-3-{SECRET}>", "line": 12, "name": "<module>"},
    ]
    raw = modern()
    extra = {
        "user_metadata": f"{SECRET}.layer", "compile_context": SECRET, "forward_frames": [f"{home}/m.py:3"],
        "internal_metadata": SECRET, SECRET: 1,
    }  # fmt: skip
    raw["device_traces"][0].append(event("alloc", raw["segments"][0]["address"] + 4096, 512, 7, frames, **extra))
    raw["device_traces"][0].append(event(f"act_{SECRET}", 0, 0, 8, frames))
    raw["segments"][0]["frames"] = frames
    raw["segments"][0][SECRET] = SECRET
    raw["segments"][0]["blocks"][0] |= {"frames": frames, SECRET: {"deep": SECRET}, "history": [{"frames": frames}]}
    raw["allocator_settings"] |= {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{SECRET}:1,roundup_power2_divisions:[256:1,>:4]",
        SECRET: SECRET, "last_allocator_settings": SECRET,
    }  # fmt: skip
    raw["external_annotations"] = [
        {"device": 0, "time_us": 5, "name": name, "stage": "START", SECRET: SECRET}
        for name in (
            SECRET,
            f"Optimizer.step#{SECRET}.step",
            f"Optimizer.step#{SECRET.title()}W.step",
            "nccl:all_reduce",
        )
    ]
    raw[SECRET] = {"a": SECRET}
    raw["host_segments"] = [{**raw["segments"][0]}]
    raw["host_traces"] = [event("alloc", 4096, 512, 7, frames)]
    raw["memtrace"] = {
        "version": 1, "torch": "2.11.0+cu130", "cuda": "13.0", "gpu": "NVIDIA H200", "pid": 4242, "rank": 3,
        "world_size": 8, "packages": {"transformers": "5.1.0", SECRET: "1", "peft": f"0.1+{SECRET}"},
        "phases": [{"time_us": 1, "name": "forward", "step": 0}, {"time_us": 2, "name": SECRET, "step": 0}],
        "labels": [{
            "address": raw["segments"][0]["address"], "bytes": 2 << 20, "category": "lora", "subcategory": "params",
            "name": f"base_model.model.{SECRET}.layers.0.self_attn.q_proj.lora_A.default.weight", SECRET: 1,
        }],
        "oom": {
            "message": "CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 23.65 GiB of "
            f"which 44.00 MiB is free. Process 31337 has 3.00 GiB memory in use. {SECRET}@host wrote {home}.",
            "phase": SECRET, "requested_bytes": 5, SECRET: SECRET,
        },
        "config": {
            "argv": [f"{home}/train.py", SECRET], "run": {"seq_len": 512, SECRET: 1, "optim": SECRET},
            "models": [{
                "class": f"{SECRET}Model", "parameters": 7,
                "peft": {"default": {"r": 8, "target_modules": ["q_proj", SECRET]}},
                "config": {
                    "_name_or_path": f"{SECRET}/private", "model_type": "llama", "hidden_size": 64, SECRET: SECRET,
                },
            }],
        },
        "stats": {"allocated_bytes.all.peak": 5, SECRET: 6}, "problems": [f"{SECRET} failed"], SECRET: SECRET,
        "reason": "oom", "steps": {"columns": ["step", SECRET], "rows": [[1, 2]]},
    }  # fmt: skip
    return raw


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_personal_is_left(as_json: bool) -> None:
    raw = personal()
    if as_json:
        import json

        raw = json.loads(json.dumps(raw))
    before = loaded(copy.deepcopy(raw))
    answer = scrub(raw, ScrubOptions(functions=True))
    assert leaks(answer.snapshot, SECRET, "/home", "31337", "4242", "\\Users") == []
    after = loaded(answer.snapshot)
    same_memory(before, after)
    assert after.memtrace["config"]["models"][0]["config"] == {"model_type": "llama", "hidden_size": 64}
    assert after.memtrace["packages"].keys() == {"transformers", "peft"}
    assert after.memtrace["packages"]["transformers"] == "5.1.0"
    name = after.memtrace["labels"][0]["name"]
    assert re.fullmatch(r"base_model\.model\.word_\d+\.layers\.0\.self_attn\.q_proj\.lora_A\.default\.weight", name)
    assert after.memtrace["gpu"] == "NVIDIA H200"
    assert after.memtrace["oom"]["message"].startswith(
        "CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 44.00 MiB "
        "is free. Process 1 has 3.00 GiB memory in use. …"
    )
    conf = after.settings["PYTORCH_CUDA_ALLOC_CONF"]
    assert re.fullmatch(r"expandable_segments:True,word_\d+:1,roundup_power2_divisions:\[256:1,>:4\]", conf)
    assert [note.name for note in after.annotations][-1] == "nccl:all_reduce"
    assert sum(note.name.startswith("Optimizer.step#") for note in after.annotations) == 2
    assert answer.removed["user names"] == 2
    files = {frame.filename for frame in after.stacks.frames}
    assert {
        "site-packages/torch/nn/modules/linear.py", "site-packages/peft/tuners/lora/bnb.py",
        "lib/python3.11/threading.py", "<frozen runpy>",
    } < files  # fmt: skip
    assert any(file.startswith("C:\\project\\") for file in files)  # which system it was decides about advice
    assert any("/losses/" in file for file in files)  # a harmless word, and why these frames count as a loss


def test_without_functions_the_projects_names_stay_but_not_those_that_name_a_person() -> None:
    answer = scrub(personal())
    after = loaded(answer.snapshot)
    names = {frame.name for frame in after.stacks.frames}
    assert "main" in names
    assert leaks(answer.snapshot, f"/{SECRET}", f"run_{SECRET}") == []  # part of a name, in a person's home folder
    assert leaks(scrub(personal(), ScrubOptions(hide=(SECRET,))).snapshot, SECRET) == []


def test_scrubbing_twice_changes_nothing_more() -> None:
    once = scrub(personal(), ScrubOptions(functions=True)).snapshot
    again = scrub(copy.deepcopy(once), ScrubOptions(functions=True))
    assert again.snapshot == once


def test_base_names_can_be_kept() -> None:
    raw = modern()
    raw["device_traces"][0][1]["frames"] = [dict(FRAME, filename="/home/someone/proj/train.py")]
    answer = scrub(raw, ScrubOptions(keep_names=True))
    files = {frame.filename for frame in loaded(answer.snapshot).stacks.frames}
    assert any(file.startswith("project/") and file.endswith("/train.py") for file in files)
    assert answer.kept["project files"] == ["train"]
    assert not leaks(answer.snapshot, "someone")


def test_code_out_of_a_text_and_types_in_library_functions() -> None:
    raw = modern()
    raw["device_traces"][0][1]["frames"] = [
        dict(FRAME, filename="<string>", name="qwyjibo_step"),
        dict(FRAME, filename="??", name="std::vector<qwyjibo::Tensor>::push_back()"),
        dict(FRAME, filename="engine.cpp", name="torch::autograd::Engine::execute()"),
    ]
    answer = scrub(copy.deepcopy(raw))
    assert "qwyjibo_step" in answer.kept["functions"]
    assert leaks(scrub(copy.deepcopy(raw), ScrubOptions(functions=True)).snapshot, "qwyjibo_step") == []
    hidden = scrub(raw, ScrubOptions(hide=("Qwyjibo",)))
    assert leaks(hidden.snapshot, "qwyjibo") == []
    assert {"torch::autograd::Engine::execute()", "engine.cpp", "<string>"} <= texts_of(hidden.snapshot)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("xanadu_loss", "word_1_loss"),
        ("compute_xanadu_cross_entropy", "compute_word_1_cross_entropy"),
        ("base_model.model.layers.31.q_proj", "base_model.model.layers.31.q_proj"),
        ("2.11.0+cu130", "2.11.0+cu130"),
        ("20260131", "word_1"),
        ("bob@example.org", "word_1word_2word_3.word_4"),
        ("étude", "word_1"),
        ("\x1b[31m\u202e", "word_1[word_2word_3"),
        ("word_1", "word_1"),
        ("10.20.30.40:29500", "word_1:29500"),
        ("layers.0.1.2.3", "layers.0.1.2.3"),
        ("https://pytorch.org/docs/stable/xanadu", "word_1://pytorch.word_2/word_3/word_4/word_5"),
    ],
)
def test_words_that_are_harmless_stay_and_the_rest_is_numbered(text: str, left: str) -> None:
    assert Hiding(ScrubOptions()).words(text) == left


@pytest.mark.parametrize(
    "gpu", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "Tesla V100-PCIE-32GB", "rtx4090",
            "AMD Instinct MI300X", "NVIDIA RTX 6000 Ada Generation", "NVIDIA L40S", "NVIDIA GH200 480GB"],
)  # fmt: skip
def test_names_of_gpus_stay_and_what_else_stands_there_does_not(gpu: str) -> None:
    hiding = Hiding(ScrubOptions())
    assert hiding.words(gpu, gpu=True) == gpu
    assert SECRET not in hiding.words(f"{gpu} {SECRET}", gpu=True)


@given(st.data())
def test_a_secret_in_the_place_of_any_text_is_gone(data: st.DataObject) -> None:
    """Turned round: not one text of a snapshot is let through because of where it stands (but names of functions)."""
    raw = personal()
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [raw]
    while waiting:
        holder = waiting.pop()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, str) and key not in ("action", "state", "segment_type"):
                places.append((holder, key))
            elif isinstance(value, (dict, list)):
                waiting.append(value)
    before = data.draw(st.sampled_from(["", "NVIDIA ", "memtrace 0.1 ", "2.1+", "cu130", "Optimizer.step#", "torch."]))
    for holder, key in places:
        holder[key] = f"{before}qwyjibo"
    answer = scrub(raw, ScrubOptions(functions=True, hide=data.draw(st.sampled_from([(), ("qwyjibo",)]))))
    assert leaks(answer.snapshot, "qwyjibo") == []


def test_a_share_of_a_network_in_a_function_s_name_is_a_path() -> None:
    raw = modern()
    raw["device_traces"][0][1]["frames"] = [dict(FRAME, name="operator() at \\\\qwyjibo\\home\\a.cu:12")]
    assert leaks(scrub(raw).snapshot, "qwyjibo") == []


def test_shared_stacks_stay_shared() -> None:
    """Two events with one list of frames came from one call; attribution knows that by identity."""
    raw = modern()
    frames = raw["device_traces"][0][3]["frames"]
    raw["device_traces"][0][4]["frames"] = frames
    trace = scrub(raw).snapshot["device_traces"][0]  # type: ignore[call-overload]
    assert trace[3]["frames"] is trace[4]["frames"]
    assert trace[3]["frames"] is not trace[1]["frames"]


def test_a_library_counts_as_one_only_by_its_own_files() -> None:
    def file_of(*filenames: str) -> list[str]:
        raw = modern()
        raw["device_traces"][0][1]["frames"] = [dict(FRAME, filename=name) for name in filenames]
        after = loaded(scrub(raw).snapshot)
        return [frame.filename for frame in after.stacks.stack(int(after.devices[0].trace.stack[1]))]

    public, other = file_of("/data/site/trl/trainer/sft_trainer.py", "/data/site/trl/x/y.py")
    assert public == "trl/trainer/sft_trainer.py" and other.startswith("project/")
    [own] = file_of("/data/jobs/trl/plan.py")
    assert own.startswith("project/")


def test_names_that_findings_look_for_are_harmless() -> None:
    wanted = weights._LOADERS | weights._COPIERS | weights._UPCAST | weights._CASTS_INPUT
    assert {name for name in wanted if not Hiding(ScrubOptions()).is_harmless(name)} == set()


@given(st.data())
def test_no_text_gets_through_wherever_it_stands(data: st.DataObject) -> None:
    """A text that is nobody's vocabulary, put in the place of any value or key, or beside it."""
    raw = personal()
    holder: Any = raw
    for _ in range(data.draw(st.integers(1, 7))):
        inner = [
            v for v in (holder.values() if isinstance(holder, dict) else holder) if isinstance(v, (dict, list)) and v
        ]
        if not inner:
            break
        holder = data.draw(st.sampled_from(inner))
    canary = data.draw(st.sampled_from(["qwyjibo", "/home/qwyjibo/x.py", "qwyjibo.qwyjibo", "C:\\qwyjibo\\a b"]))
    value: Any = data.draw(st.sampled_from([canary, [canary], {canary: 1}, (canary,), {"name": [canary]}]))
    if isinstance(holder, dict):
        holder[data.draw(st.sampled_from([canary, *map(str, holder)]))] = value
    else:
        holder[data.draw(st.integers(0, len(holder) - 1))] = value
    try:
        from_raw(copy.deepcopy(raw), "canary")
    except SnapshotError:  # no snapshot any more: refused before anything is scrubbed
        return
    answer = scrub(raw, ScrubOptions(functions=True))
    assert leaks(answer.snapshot, "qwyjibo", SECRET) == []
    loaded(answer.snapshot)
