"""Convolutions of a dry run with a cuDNN that proposes plans of known sizes."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")
if sys.platform != "linux" or shutil.which("cc") is None:
    pytest.skip("the dry device needs Linux and a compiler", allow_module_level=True)

from forked import Runs

MIB = 1 << 20
#: Three plans for each pass, the first of them on tensor cores: forward 30, 20, 10 MiB, data 32, 22, 12, filter 31, …
CUDNN = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int kind, serial, pass; } D;
size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }
static int pass;
int cudnnBackendCreateDescriptor(int kind, D** d) {
  *d = calloc(1, sizeof(D)); (*d)->kind = kind;
  if (kind >= 10 && kind <= 12) pass = kind - 10;
  return 0;
}
int cudnnBackendDestroyDescriptor(D* d) { free(d); return 0; }
int cudnnBackendFinalize(D* d) { return 0; }
int cudnnBackendSetAttribute(D* d, int name, int type, int64_t n, void* from) {
  if (name == 401) *d = **(D**)from;
  return 0;
}
int cudnnBackendGetAttribute(D* d, int name, int type, int64_t most, int64_t* count, void* into) {
  *count = 1;
  if (name == 202) { *count = 3; for (int i = 0; i < most; i++) ((D**)into)[i]->serial = i; }
  if (name == 300) **(D**)into = *d;
  if (name == 1303) { *count = d->serial ? 0 : 1; ((int*)into)[0] = 0; }
  if (name == 405) { *count = 13; if (into) memcpy(into, "{\\"engine\\":{}}", most < 13 ? most : 13); }
  if (name == 402) *(int64_t*)into = (int64_t)(30 - 10 * d->serial + pass) << 20;
  return 0;
}
"""
SCRIPT = """
import os, sys
os.environ["PYTHONPATH"] = sys.argv[1] + os.pathsep + os.environ["PYTHONPATH"]
import torch
torch.backends.cudnn.allow_tf32 = "tf32" in sys.argv
torch.backends.cudnn.benchmark = "benchmark" in sys.argv
if "here" in sys.argv:
    os.chdir(os.path.dirname(sys.argv[1]))
if "limited" in sys.argv:
    torch.cuda.set_per_process_memory_fraction(24 / 8192)
layout = torch.channels_last if "last" in sys.argv else torch.contiguous_format
kind = torch.nn.ConvTranspose2d if "transposed" in sys.argv else torch.nn.Conv2d
model = kind(8, 16, 3, padding=1).cuda()
x = torch.ones(4, 8, 32, 32, device="cuda").to(memory_format=layout).requires_grad_()
for _ in range(2):
    if "part" in sys.argv:
        whole = torch.cat([model(x), x], 1)
        whole.backward(torch.ones_like(whole))
    else:
        model(x).sum().backward()
sys.exit(3 * ("dies" in sys.argv))
"""


def cudnn(folder: Path, version: int = 91900) -> str:
    library = folder / "nvidia/cudnn/lib/libcudnn.so.9"
    library.parent.mkdir(parents=True)
    (folder / "cudnn.c").write_text(CUDNN)
    command = ["cc", "-w", "-shared", "-fPIC", f"-DVERSION={version}", "-o", library, folder / "cudnn.c"]
    subprocess.run(command, check=True)
    return str(folder)


def asked(runs: Runs, tmp_path: Path, *words: str, card: str = "8GiB", version: int = 91900) -> tuple[list[int], str]:
    """The workspaces in MiB that were asked for, and what was assumed."""
    script, out = tmp_path / "train.py", tmp_path / "run.pickle"
    script.write_text(SCRIPT)
    done = runs("--capacity", card, "-o", str(out), str(script), cudnn(tmp_path / "site", version), *words)
    assert done.returncode == 3 * ("dies" in words), done.stderr[-2000:]
    events = pickle.loads(out.read_bytes())["device_traces"][0]
    sizes = [event["size"] for event in events if event["action"] == "alloc" and event["size"] >= 8 * MIB]
    return [size // MIB for size in sizes if size % MIB == 0], done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tf32"], [30, 32, 31] * 2),
        ([], [20, 22, 21] * 2),
        (["transposed"], [22, 20, 21] * 2),
        (["benchmark"], [20, 20, 22, 22, 21, 21, 20, 22, 21]),
    ],
)
def test_each_pass_has_the_workspace_of_its_first_plan(
    words: list[str], expected: list[int], runs: Runs, tmp_path: Path
) -> None:
    found, said = asked(runs, tmp_path, *words)
    assert found == expected
    assert "missing" not in said and ("cudnn.benchmark" in said) == ("benchmark" in words)


def test_a_plan_without_room_gives_way_to_the_next(runs: Runs, tmp_path: Path) -> None:
    found, _ = asked(runs, tmp_path, "tf32", card=f"{771 + 26}MiB")
    assert found == [20, 22, 21] * 2


def test_a_program_that_ends_otherwise_did_not_end_for_want_of_a_workspace(runs: Runs, tmp_path: Path) -> None:
    _, said = asked(runs, tmp_path, "tf32", "dies", card=f"{771 + 26}MiB")
    assert "does not fit" not in said


def test_measuring_takes_what_a_limit_below_the_card_leaves(runs: Runs, tmp_path: Path) -> None:
    assert asked(runs, tmp_path, "benchmark", "tf32", "limited")[0]


def test_a_cudnn_in_the_current_folder_is_not_loaded(runs: Runs, tmp_path: Path) -> None:
    cudnn(tmp_path)
    _, said = asked(runs, tmp_path, "here", version=90700)
    assert "cuDNN's workspaces of convolutions are missing" in said


def test_without_a_cudnn_that_can_plan_it_is_said(runs: Runs, tmp_path: Path) -> None:
    found, said = asked(runs, tmp_path, version=90700)
    assert not found
    assert "cuDNN's workspaces of convolutions are missing" in said


def test_images_of_another_layout_are_copied_weights_too(runs: Runs, tmp_path: Path) -> None:
    asked(runs, tmp_path, "last")
    events = pickle.loads((tmp_path / "run.pickle").read_bytes())["device_traces"][0]
    weight = 16 * 8 * 3 * 3 * 4
    copies = [event for event in events if event["action"] == "alloc" and event["size"] == weight]
    assert len(copies) == 1 + 2 * 3 + 1  # weights, two copies and a gradient a step, the first as weights lie


@pytest.mark.parametrize(("words", "copies"), [([], 2), (["last"], 2), (["transposed"], 1)])
def test_a_gradient_that_is_part_of_a_tensor_is_copied_by_each_pass(
    words: list[str], copies: int, runs: Runs, tmp_path: Path
) -> None:
    asked(runs, tmp_path, "part", *words)
    events = pickle.loads((tmp_path / "run.pickle").read_bytes())["device_traces"][0]
    results = 4 * 16 * 32 * 32 * 4
    assert sum(event["action"] == "alloc" and event["size"] == results for event in events) == 2 * (1 + copies)


def test_what_cudnn_finds_in_place_of_cublaslt_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source comes with the package: without it cuDNN knows no plan for many convolutions."""
    from memtrace.estimate.dryrun.helper import stand_in_for_cublaslt

    monkeypatch.setenv("MEMTRACE_CACHE", str(tmp_path))
    assert stand_in_for_cublaslt(13).read_bytes()[:4] == b"\x7fELF"
