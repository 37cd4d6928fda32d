"""Started in a stranger's folder, memtrace runs nothing that lies there: neither it nor any process it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, trace_path

SCRIPT = """
import sys
from memtrace.entry import main
if __name__ == "__main__":
    sys.exit(main())
"""  # what pip installs
WITHOUT_GPU = """
from memtrace.record import backend
class Nothing:
    device_type = "cpu"
    def __getattr__(self, name):
        return lambda *args: None
backend.get = Nothing
"""
ARCHITECTURE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip
CHILDREN = """
import subprocess, sys
from memtrace.entry import main
import memtrace.cli
def run(argv=None):
    return subprocess.run([sys.executable, "-c", "import csv, json, sched, memtrace"]).returncode
memtrace.cli.main = run
sys.exit(main())
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with a module of every name: each says so where it is executed."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    trace = f"open({str(tmp_path / 'EXECUTED')!r}, 'a').write(__name__ + chr(10))\n"
    others = {
        "dask",
        "distributed",
        "fsspec",
        "peft",
        "pyarrow",
        "safetensors",
        "transformers",
        "usercustomize",
        "yaml",
    }
    others |= {"numpy", "orjson", "networkx", "rich", "textual", "zstandard", "memtrace_tui", "sitecustomize", "torch"}
    for name in sys.stdlib_module_names | others:
        (folder / f"{name}.py").write_text(trace)
    (folder / "memtrace").mkdir()
    for name in ("__init__", "__main__", "entry"):
        (folder / "memtrace" / f"{name}.py").write_text(trace)
    for rank in range(2):
        (folder / f"rank{rank}.pickle.xz").symlink_to(trace_path("llama2-7b_oom-at-load"))
    return folder


def run(folder: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    console = folder.parent / "bin" / "memtrace"
    console.parent.mkdir(exist_ok=True)
    console.write_text(script)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tui")]), "MEMTRACE_NO_INDEX": "1"}
    command = [sys.executable, str(console), *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [["ranks", ".", "-j", "2"], ["ranks", "rank0.pickle.xz", "-j", "1"], ["report", "rank0.pickle.xz"],
     ["explain", "rank0.pickle.xz"], ["timeline", "rank0.pickle.xz", "--plot", "x.svg"], ["--version", "--verbose"],
     ["dryrun", "--model", "arch.json", "--seq-len", "32"], ["ranks", ".", "--scheduler", "tcp://127.0.0.1:9"],
     ["live", "--once"], ["mcp"]],
    ids=lambda args: args[0],
)  # fmt: skip
def test_verbs_and_their_workers(planted: Path, args: list[str]) -> None:
    (planted / "arch.json").write_text(json.dumps(ARCHITECTURE))
    done = run(planted, SCRIPT, *args)
    assert done.returncode in (0, 2, 4, 5) and "Traceback" not in done.stderr, done.stderr
    executed = planted.parent / "EXECUTED"
    assert not executed.exists(), executed.read_text()


def test_any_process_that_a_verb_starts(planted: Path) -> None:
    done = run(planted, CHILDREN, "report")
    assert done.returncode == 0, done.stderr
    assert not (planted.parent / "EXECUTED").exists()


def test_numpys_threads_are_the_users_to_choose(planted: Path, tmp_path: Path) -> None:
    """Commands that read start none; a program that is run has those it would have."""
    shown = "import os\nprint('threads', os.environ.get('OPENBLAS_NUM_THREADS'))\n"
    (tmp_path / "train.py").write_text(shown)
    at_end = f"import atexit, os\natexit.register(lambda: exec({shown!r}))\n" + SCRIPT
    assert "threads 1" in run(planted, at_end, "info", "rank0.pickle.xz").stdout
    assert "threads None" in run(tmp_path, WITHOUT_GPU + SCRIPT, "run", "train.py").stdout


def test_a_users_program_ends_as_any_and_others_at_once(planted: Path, tmp_path: Path) -> None:
    """What a program left in cycles is finalised when it ends; in memtrace's own objects none are looked for."""
    cycle = "class Last:\n    def __del__(self): print('finalised')\nlast = Last()\nlast.itself = last\n"
    (tmp_path / "train.py").write_text(cycle)
    assert "finalised" in run(tmp_path, WITHOUT_GPU + SCRIPT, "run", "train.py").stdout
    at_end = "import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count() > 9000))\n" + SCRIPT
    assert "frozen True" in run(planted, at_end, "info", "rank0.pickle.xz").stdout


def test_the_users_own_program_still_finds_its_modules(tmp_path: Path) -> None:
    """``memtrace run`` is for running what lies there; its children are started as Python starts them."""
    (tmp_path / "helper.py").write_text("print('helped')\n")
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys, helper\nassert 'PYTHONSAFEPATH' not in os.environ\n"
        "subprocess.run([sys.executable, '-c', 'import helper'], check=True)\n"
    )
    for program in (["train.py"], ["-m", "train"]):
        done = run(tmp_path, WITHOUT_GPU + SCRIPT, "run", *program)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("helped") == 2
