"""Unchanged scripts without a GPU, against what they took on one (``tests/truth/dryrun_scripts.json``).

``MEMTRACE_ALL_ROWS=1`` runs every script that was measured, not one of each kind.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
if sys.platform != "linux":
    pytest.skip("the dry device needs Linux", allow_module_level=True)

from forked import Runs

import memtrace
from memtrace.cli import main
from tests.gpu.check_dryrun_scripts import LIMITS, OUTSIDE_BYTES, command, environment, model_folder

TRUTH: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "truth" / "dryrun_scripts.json").read_text()
)
EACH_KIND = ("mlp_amp", "gpt", "trainer_bert", "qlora_loop", "sft", "moe", "masks", "compiled", "oom_growing")
#: cuDNN's workspaces of convolutions, which are missing where it is not installed.
LOOSE = {"gan": 0.2, "unet": 0.03, "lightning_mlp": 0.005, "segmenter": 0.03, "vae": 0.12}
LOOSE |= {"ema_resume": 0.03, "lstm": 0.015, "sessions_gru": 0.005}  # small convolutions, recurrent layers: workspaces
#: Other releases allocate small things in another order: segments of 2 and 20 MiB more or less.
RESERVED = {"masks": 0.15, "recommender": 0.07, "resnet": 0.05, "unet": 0.055, "vit": 0.04, "moe": 0.03, "gan": 0.04}
RESERVED |= {"segmenter": 0.15, "vae": 0.43, "ema_resume": 0.22, "sessions_gru": 0.13, "accelerate_vit": 0.16}

#: Detectors: how many boxes are kept is taken to be the most there can be.
LOOSE |= {"detection": 0.06, "mask_rcnn": 2.2}
RESERVED |= {"mask_rcnn": 2.6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), weights=False)


def dry(runs: Runs, *words: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = runs("--json", *words)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"exit_code"')]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1]), done


@pytest.mark.parametrize("name", TRUTH if os.environ.get("MEMTRACE_ALL_ROWS") else EACH_KIND)
def test_a_script_takes_what_it_took_on_a_gpu(name: str, runs: Runs, model: Path, tmp_path: Path) -> None:
    real, out = TRUTH[name], tmp_path / "run.pickle"
    limit = ["--capacity", str(LIMITS[name] + OUTSIDE_BYTES)] if name in LIMITS else []
    mine, done = dry(runs, *limit, "-o", str(out), *command(name, model))
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("a package of the script is not installed")
    assert mine["exit_code"] == real["exit_code"], done.stderr[-2000:]
    share = mine["peak_requested_bytes"] / real["requested_bytes"]
    assert abs(share - 1) <= LOOSE.get(name, 0.001)
    assert abs(mine["peak_reserved_bytes"] / real["reserved_bytes"] - 1) <= RESERVED.get(name, 0.02)
    assert (mine["refused_bytes"], mine["refused_bytes"] and mine["steps"]) == (
        real.get("oom_bytes"),
        real.get("oom_step"),
    )
    extra = pickle.loads(out.read_bytes())["memtrace"]
    assert extra["predicted"] is True
    assert [one["name"] for one in extra["assumptions"]] == [one["name"] for one in mine["assumptions"]]
    assert extra["stats"]["requested_bytes.all.peak"] == mine["peak_requested_bytes"]


def script(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text("import torch\n" + text)
    return str(file)


def test_it_dies_as_the_run_would_and_the_file_is_read(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(
        tmp_path,
        "kept = []\n"
        "try:\n"
        "    for _ in range(100):\n"
        "        kept.append(torch.empty(1 << 28, device='cuda'))\n"
        "except torch.cuda.OutOfMemoryError as error:\n"
        "    print(len(kept), torch.cuda.memory_allocated(), str(error)[:60])\n"
        "    raise\n",
    )
    out = tmp_path / "run.pickle"
    mine, done = dry(runs, "--capacity", "8GiB", "-o", str(out), train)
    held = (mine["capacity_bytes"] - OUTSIDE_BYTES) // (1 << 30)
    text = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a "
    assert done.stdout.splitlines()[0] == f"{held} {held << 30} {text}"
    assert (mine["exit_code"], mine["refused_bytes"]) == (1, 1 << 30)
    assert "memtrace: out of memory in phase" in done.stderr
    assert main(["explain", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "budget"
    assert any("predicted" in warning for warning in told["warnings"])
    assert main(["report", str(out)]) == 0
    assert "predicted by memtrace" in capsys.readouterr().out


def test_values_that_nobody_knows_are_assumed_and_listed_once(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "x = torch.randn(4096, 4096, device='cuda')\n"
        "mine = torch.arange(6, device='cuda')\n"
        "print((mine > 2).sum().item(), mine[mine > 2].tolist(), torch.isnan(x).any().item())\n"
        "print([x.sum().item() for _ in range(3)], len(x[x > 0]), bool((x > 0).all()))\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    known, asked = done.stdout.splitlines()[:2]
    assert known == "3 [3, 4, 5] False" and asked.startswith("[1.0, 0.99") and asked.endswith(f"] {1 << 24} True")
    found = {one["name"]: (one["count"], one["first"].rpartition(":")[2]) for one in mine["assumptions"]}
    assert found == {"float": (3, "5"), "share": (1, "5"), "boolean": (1, "5")}
    mine, done = dry(
        runs, "--assume", "share=0.25", "--assume", "train.py:5=7", "--assume", "boolean=false",
        "-o", str(tmp_path / "b.pickle"), train,
    )  # fmt: skip
    assert done.stdout.splitlines()[1].startswith("[7.0, 7.0, 7.0]")


def test_a_number_that_nobody_knows_compares_as_what_is_taken_for_it(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "norm = torch.randn(2048, 2048, device='cuda').norm()\n"
        "print(bool(norm > 1000), bool(norm < 1000), bool(norm == 0.25), bool(norm >= 0.25), bool(norm != 0.25))\n"
        "while norm > 10:\n"
        "    norm = norm * 2\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert done.stdout.splitlines()[0] == "False True False True True"
    assert [one["name"] for one in mine["assumptions"]] == ["float"]


def test_what_waits_for_a_loss_to_stand_still_goes_on(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "weight = torch.randn(2048, 2048, device='cuda', requires_grad=True)\n"
        "optimizer, before, steps = torch.optim.LBFGS([weight], max_iter=4), None, 0\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = weight.square().sum()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "for _ in range(4):\n"
        "    loss = optimizer.step(closure).item()\n"
        "    if before is not None and abs(before - loss) < 1e-6:\n"
        "        break\n"
        "    before, steps = loss, steps + 1\n"
        "print(steps, optimizer.state[weight]['n_iter'])\n",
    )
    _, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert done.stdout.splitlines()[0] == "4 16"


def test_flags_of_cudnn_are_set_for_a_while(runs: Runs, tmp_path: Path) -> None:
    train = script(tmp_path, "with torch.backends.cudnn.flags(enabled=False, benchmark_limit=4):\n    print('in')\n")
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert (mine["exit_code"], done.stdout.splitlines()[0]) == (0, "in"), done.stderr[-2000:]


def test_kernels_that_a_package_brings_are_told_by_their_shapes(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "library = torch.library.Library('torchvision', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.define('nms(Tensor boxes, Tensor scores, float overlap) -> Tensor')\n"
        "library.impl('twice', lambda x: 1 / 0, 'CUDA')\n"
        "library.impl('nms', lambda *_: 1 / 0, 'CUDA')\n"
        "library.impl('twice', lambda x: x.new_empty((2 * len(x),)), 'Meta')\n"
        "torch.ops.load_library(torch._C.__file__)\n"
        "print(torch.ops.torchvision.twice(torch.ones(3, device='cuda')).shape)\n"
        "boxes = torch.randn(600_000, 4, device='cuda')\n"
        "print(torch.ops.torchvision.nms(boxes[:1000], boxes[:1000, 0], 0.5).shape)\n",
    )
    mine, done = dry(runs, "--assume", "share=0.25", "-o", str(tmp_path / "a.pickle"), train)
    assert done.stdout.splitlines()[:2] == ["torch.Size([6])", "torch.Size([250])"], done.stderr[-2000:]
    assert [one["name"] for one in mine["assumptions"]] == ["share"]


def test_a_mask_that_began_as_zeros_has_what_was_set_in_it(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "picked = torch.randn(3000, 1000, device='cuda').sum(1).topk(100).indices\n"
        "mask = torch.zeros(3000, dtype=torch.uint8, device='cuda')\n"
        "mask[picked] = 1\n"
        "other = torch.zeros_like(mask, dtype=torch.bool)\n"
        "other[picked[:50]] = True\n"
        "masks = torch.zeros(64, 50000, dtype=torch.bool, device='cuda')\n"
        "masks[3, picked] = True\n"
        "masks[7, picked] = True\n"
        "wide = torch.zeros(64, 3000, device='cuda').scatter_(1, picked.expand(64, 100), 1)\n"
        "for each in (mask, mask | other, mask.bool() & other, mask > 0, mask == 0, masks.clone(), wide.bool()):\n"
        "    print(len(each.nonzero()))\n"
        "masks[0] = torch.randn(50000, device='cuda') > 0\n"
        "print(len(masks.nonzero()))\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    expected = [100, 150, 50, 100, 3000, 200, 6400, 64 * 50000]
    assert [int(line) for line in done.stdout.splitlines()[: len(expected)]] == expected
    assert {one["name"] for one in mine["assumptions"]} == {"set", "share"}


def test_what_is_chosen_among_kinds_is_one_of_many(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "words = torch.randn(512, 4000, device='cuda').argmax(-1)\n"
        "ended = words == 2\n"
        "print(bool(ended.all()), bool(ended.any()), len((~ended).nonzero()))\n"
        "chosen = torch.randn(4096, 64, 8, device='cuda').sum(1).topk(2).indices\n"
        "mine = chosen == 3\n"
        "print(len(mine.nonzero()), len(mine.any(-1).nonzero()), bool(mine.any()))\n"
        "print(len(torch.nn.functional.one_hot(chosen, 8).sum((0, 1)).nonzero()))\n"
        "print(bool((words % 1 == 0).all()), len((words % 4 == 1).nonzero()), bool((words // 4 == 1).all()))\n"
        "print(len(((chosen == 3) | (chosen == 5)).nonzero()), len(((chosen == 3) | (words[:2] > 7)).nonzero()))\n"
        "chances = torch.randn(256, 8, 64, device='cuda').sum(-1).softmax(-1)\n"
        "choice = torch.distributions.Categorical(probs=chances)\n"
        "choice.log_prob(choice.sample())\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    expected = ["False False 512", "1024 1024 True", "8", "True 128 False", "2048 8192"]
    assert done.stdout.splitlines()[: len(expected)] == expected


def test_a_permutation_is_turned_round(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "from torch.nn.utils import rnn\n"
        "lengths = torch.tensor([3, 9, 5])\n"
        "data = torch.randn(3, 9, 4, device='cuda')\n"
        "packed = rnn.pack_padded_sequence(data, lengths, batch_first=True, enforce_sorted=False)\n"
        "print(packed.unsorted_indices.tolist(), rnn.pad_packed_sequence(packed, batch_first=True)[1].tolist())\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert done.stdout.splitlines()[0] == "[2, 0, 1] [3, 9, 5]" and not mine["assumptions"]


def test_first_segments_fill_a_gap_from_below(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "held = [torch.empty(32 << 20, dtype=torch.uint8, device='cuda') for _ in range(14)]\n"
        "print(*[each.data_ptr() >> 20 for each in held])\n"
        "del held[3:11]\n"
        "torch.cuda.empty_cache()\n"
        "print(torch.empty(64 << 20, dtype=torch.uint8, device='cuda').data_ptr() >> 20)\n",
    )
    _, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    first, then = done.stdout.splitlines()[:2]
    places = [int(word) for word in first.split()]
    assert places[:11] == [places[0] + 32 * at for at in range(11)]
    assert places[11:] == [places[0] - 32 * at for at in (1, 2, 3)]  # 384 MiB, of which the context has a little
    assert int(then) == places[3]


def test_two_results_into_given_tensors(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "x = torch.arange(60.0).cuda().view(6, 10)\n"
        "for find in (torch.min, lambda x, dim, out: torch.kthvalue(x, 1, dim, out=out)):\n"
        "    values, places = torch.empty(0).cuda(), torch.empty(0, dtype=torch.long).cuda()\n"
        "    find(x, 1, out=(values, places))\n"
        "    print(values.tolist(), places.tolist())\n"
        "print(torch.kthvalue(x, 3).values.tolist())\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    each = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert done.stdout.splitlines()[:3] == [f"{each} {[0] * 6}"] * 2 + [str([value + 2 for value in each])]


def test_steps_end_the_run_and_what_can_not_be_done_is_named(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "layer = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(layer.parameters())\n"
        "for step in range(5):\n"
        "    layer(torch.ones(2, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    print('step', step)\n"
        "torch.ones(3, 2, device='cuda').to_sparse()\n",
    )
    mine, done = dry(runs, "--steps", "2", "-o", str(tmp_path / "a.pickle"), train)
    assert (mine["exit_code"], mine["steps"], done.stdout.count("step ")) == (0, 2, 1)
    mine, done = dry(runs, "-o", str(tmp_path / "b.pickle"), train)
    assert mine["steps"] == 5 and mine["exit_code"] == 1
    assert mine["impossible"].startswith("aten::_to_sparse can't run without data, at ")
    assert mine["impossible"].endswith("train.py:8")


def test_a_mask_whose_last_dimension_is_no_run_of_numbers_gets_no_fused_kernel(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "q = torch.randn(2, 8, 512, 64, device='cuda', requires_grad=True)\n"
        "bias = torch.randn(1, 8, 512, 512, device='cuda')\n"
        "for mask in (bias, bias.transpose(2, 3)):\n"
        "    before = torch.cuda.memory_allocated()\n"
        "    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)\n"
        "    print((torch.cuda.memory_allocated() - before) >> 20)\n"
        "    del out\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    fused, plain = map(int, done.stdout.splitlines()[:2])
    assert fused < 3 and plain > 16  # two of 512 x 512 numbers a head and text are 16 MiB


def test_what_another_stream_uses_is_free_once_the_host_waited_for_it(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "side = torch.cuda.Stream()\n"
        "def held():\n"
        "    x = torch.empty(8 << 20, dtype=torch.uint8, device='cuda')\n"
        "    x.record_stream(side)\n"
        "    y = x.record_stream(torch.cuda.current_stream())\n"
        "    del x\n"
        "    torch.empty(1, device='cuda')\n"
        "    stats = torch.cuda.memory_stats()\n"
        "    return torch.cuda.memory_allocated() >> 20, stats['active_bytes.all.current'] >> 20\n"
        "print(*held())\n"  # as if the card kept up, until the program waits for an event
        "side.record_event().synchronize()\n"
        "print(*held(), *held())\n"  # the second 8 MiB are not the first
        "event = side.record_event()\n"
        "torch.cuda.current_stream().wait_event(event)\n"  # the card waits, the host does not
        "print(*held())\n"
        "event.synchronize()\n"
        "print(*held())\n"
        "with torch.cuda.stream(side): side.wait_stream(torch.cuda.default_stream())\n"
        "torch.ones(1).cuda().item()\n"
        "print(*held())\n"
        "torch.cuda.synchronize()\n"
        "print(*held())\n"
        "print(torch.empty(4, pin_memory=True).is_pinned(), torch.empty(4).is_pinned())\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:7] == ["0 0", "0 8 0 16", "0 24", "0 16", "0 24", "0 8", "True False"]
    assert mine["peak_reserved_bytes"] == (40 + 2) << 20


def test_reserved_is_a_range_where_addresses_decide(runs: Runs, tmp_path: Path) -> None:
    """Of two free blocks of 30 MiB the lower is taken: a segment of its own, or what keeps 60 MiB from being free."""
    train = script(
        tmp_path,
        "import torch\n"
        "def mib(size): return torch.empty(size << 20, dtype=torch.uint8, device='cuda')\n"
        "b, a = mib(30), mib(60)\n"
        "del a\n"
        "x = mib(30)\n"
        "del b\n"
        "y = mib(12)\n"
        "del x\n"
        "z = mib(60)\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert (mine["peak_reserved_low_bytes"], mine["peak_reserved_high_bytes"]) == (90 << 20, 150 << 20)
    assert mine["fits_always"]
    assert "reserved is 90.0 MiB to 150.0 MiB, by the addresses that the driver hands out" in done.stderr
    mine, done = dry(runs, "--capacity", str((100 << 20) + OUTSIDE_BYTES), "-o", str(tmp_path / "b.pickle"), train)
    assert mine["exit_code"] == 0
    assert not mine["fits_always"]
    assert "with other addresses of the driver's it does not" in done.stderr


def test_what_is_held_for_another_stream_makes_a_range(runs: Runs, tmp_path: Path) -> None:
    """Three blocks of 30 MiB that a side stream uses: one at a time on a card that keeps up, else all three."""
    train = script(
        tmp_path,
        "import torch\n"
        "side, event = torch.cuda.Stream(), torch.cuda.Event()\n"
        "event.record()\n"
        "event.synchronize()\n"
        "for _ in range(3):\n"
        "    block = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')\n"
        "    block.record_stream(side)\n"
        "    del block\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert (mine["peak_allocated_bytes"], mine["peak_requested_bytes"]) == (30 << 20, 90 << 20)
    assert (mine["peak_reserved_low_bytes"], mine["peak_reserved_high_bytes"]) == (30 << 20, 90 << 20)
    assert "requested is 30.0 MiB to 90.0 MiB, by how far the host is ahead of the card" in done.stderr
    assert "hands out and how far the host is ahead of the card" in done.stderr


def test_steps_that_repeat_end_the_run_where_that_is_asked(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "import sys\n"
        "layer = torch.nn.Linear(64, 64).cuda()\n"
        "optimizer = torch.optim.Adam(layer.parameters())\n"
        "for step in range(30):\n"
        "    rows = 8 + (step % 2 if sys.argv[1] == 'varied' and step < 20 else 0)\n"
        "    layer(torch.ones(rows, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n",
    )
    ended = {}
    for kind in ("same", "varied"):
        mine, done = dry(runs, "--steps", "repeat", "-o", str(tmp_path / f"{kind}.pickle"), train, kind)
        assert mine["exit_code"] == 0, done.stderr[-2000:]
        ended[kind] = mine["steps"]
        (said,) = (one["said"] for one in mine["assumptions"])
        assert said.startswith(f"steps go on as the last 3 of {mine['steps']}")
    assert ended == {"same": 4, "varied": 23}  # the 21st gives back what the 20th held


def test_what_it_saved_is_loaded_again_and_one_card_is_parallel(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "import os, sys\n"
        "model = torch.nn.DataParallel(torch.nn.Linear(8192, 4096)).cuda()\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "model(torch.ones(2, 8192)).sum().backward()\n"
        "optimizer.step()\n"
        "held = torch.cuda.memory_allocated()\n"
        "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': 3}, sys.argv[1])\n"
        "kept = torch.load(sys.argv[1], map_location='cuda', weights_only=False)\n"
        "optimizer.load_state_dict(kept['optimizer'])\n"
        "facts = os.stat(sys.argv[1])\n"
        "print(kept['step'], facts.st_size >> 20, facts.st_blocks >> 10)\n"
        "print((torch.cuda.memory_allocated() - held) >> 20)\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train, str(tmp_path / "last.pt"))
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[:2] == ["3 384 0", "128"]  # the old states are gone
    assert [one["name"] for one in mine["assumptions"]] == ["saved"]


def test_a_text_is_generated_to_its_greatest_length(runs: Runs, tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=90, bos_token_id=1, eos_token_id=1)\n"
        "model = GPT2LMHeadModel(config).cuda().eval()\n"
        "tokens = torch.randint(5, 90, (3, 7)).cuda()\n"
        "mask = torch.ones_like(tokens)\n"
        "for options in ({}, {'do_sample': True}, {'num_beams': 3}):\n"
        "    made = model.generate(\n"
        "        tokens, attention_mask=mask, max_new_tokens=9, pad_token_id=0, return_dict_in_generate=True,\n"
        "        **options,\n"
        "    )\n"
        "    print(made.past_key_values.get_seq_length())\n",
    )
    mine, done = dry(runs, "-o", str(tmp_path / "a.pickle"), train)
    assert mine["exit_code"] == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[:3] == ["15", "15", "15"]
    assert "generation" in [one["name"] for one in mine["assumptions"]]


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = script(tmp_path, "")
    for words, said in (
        ([str(tmp_path / "none.py")], "no such file"),
        (["--assume", "luck=1", train], "--assume luck=1"),
        (["--assume", "float=x", train], "no number"),
        (["--gpu", "no-such", train], "no GPU preset"),
        (["--model", "llama2-7b", train], "give one of them"),
    ):
        assert main(["dryrun", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [["train.py"], ["--model", "llama2-7b", "--seq-len", "64"]])
def test_a_pytorch_that_is_none_is_one_line(words: list[str], tmp_path: Path) -> None:
    script(tmp_path, "")
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").touch()
    known = environment()
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "dryrun", *words],
        env=known | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), known.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1 and "a dry run needs PyTorch" in done.stderr


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    train = script(tmp_path, "")
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "dryrun", train],
        env=environment() | {"MEMTRACE_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path), "CXX": ""},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1 and "no C++ compiler" in done.stderr


def test_data_of_a_run_that_dies_in_its_first_pass_is_no_weight(runs: Runs, tmp_path: Path) -> None:
    """The recorder says which tensors weights are: what the program made beside them is none. Whether a graph holds it
    for a backward pass is not known, since none came."""
    train = script(
        tmp_path,
        "net = torch.nn.Linear(1024, 1024).cuda()\n"
        "rows = torch.ones(1 << 20, 1024, device='cuda')\n"
        "net(rows).sum().backward()\n",
    )
    out = tmp_path / "a.pickle"
    _, done = dry(runs, "--capacity", "8GiB", "-o", str(out), train)
    assert "0 B are frozen weights" in done.stderr
    report = memtrace.open(out).report()
    assert (report.categories["base_weights"], report.categories["unattributed"]) == (0, 4 << 30)
