"""``memtrace run``: a program runs as plain Python would run it, and leaves a recording."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch (the CPU build will do)")

# Programs that never import torch need no stand-in: only the checks before the start are taken away.
UNCHECKED = """
import sys
from memtrace import cli
from memtrace.record import backend
class Unchecked(backend.CudaBackend):
    def precheck(self): pass
with backend.use(Unchecked()):
    code = cli.main(sys.argv[1:])
sys.exit(code)
"""


def environment(**more: str) -> dict[str, str]:
    """The tests' own memtrace, whether installed or not."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"} | more


def run(words: list[Any], cwd: Path, timeout: int = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, with text output."""
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout
    )


def unchecked(*words: Any) -> list[Any]:
    return [sys.executable, "-c", UNCHECKED, "run", "--out", "out", *words]


def standin(*words: Any) -> list[Any]:
    return [sys.executable, TESTS / "standin_memtrace.py", "run", "--out", "out", *words]


@pytest.fixture(scope="module")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    """What :func:`standin` starts, with PyTorch loaded once for all."""
    made = Forked("standin", tmp_path_factory.mktemp("standins"), environment())
    yield made
    made.close()


def own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("memtrace: ")]


def without_own_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("memtrace: "))


PROGRAMS = {
    "names": "import sys, os; print(__name__, __file__, sys.argv, sys.path[0], __spec__, __doc__, os.getcwd())",
    "options are its own": "import sys; print(sys.argv)",
    "exit code": "import sys; print('x'); sys.exit(7)",
    "exit text": "import sys; sys.exit('bye')",
    "exit none": "raise SystemExit",
    "traceback": "def f():\n    raise ValueError('b')\ntry:\n    {}['a']\nexcept KeyError:\n    f()",
    "syntax error": "print('x')\nif:",
    "atexit": "import atexit; atexit.register(print, 'at exit'); print('main')",
    "thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint(1)"
    ),
    "main is importable": "import __main__; x = 1; print(__main__.x, hasattr(__main__, '__builtins__'))",
    "dataclass and pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(5)",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_as_plain_python(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "prog.py").write_text(PROGRAMS[name])
    words = ["sub/prog.py", "--out", "elsewhere", "-m", "x", "--lr=1"]
    plain = run([sys.executable, *words], tmp_path)
    under = run(unchecked(*words), tmp_path)
    assert (under.stdout, under.returncode) == (plain.stdout, plain.returncode)
    assert without_own_lines(under.stderr) == without_own_lines(plain.stderr)
    assert not (tmp_path / "elsewhere").exists()


def test_runs_a_module_as_plain_python(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys; print(__name__, __package__, __spec__.name, sys.argv, sys.path[0])"
    )
    words = ["-m", "pack", "-x", "--steps", "2"]
    plain = run([sys.executable, *words], tmp_path)
    under = run(unchecked(*words), tmp_path)
    assert plain.returncode == 0
    assert (under.stdout, under.returncode) == (plain.stdout, plain.returncode)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_a_program(method: str, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(
        "import multiprocessing as mp, sys\n"
        "def work(n): print('child', n, __name__, flush=True); sys.exit(n)\n"
        "if __name__ == '__main__':\n"
        f"    p = mp.get_context({method!r}).Process(target=work, args=(3,))\n"
        "    p.start(); p.join(); print(p.exitcode)\n"
    )
    plain = run([sys.executable, "prog.py"], tmp_path)
    under = run(unchecked("prog.py"), tmp_path)
    assert plain.stdout.endswith("3\n")
    assert (under.stdout, under.returncode) == (plain.stdout, plain.returncode)


def test_nothing_of_torch_is_imported_before_the_program_does(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(
        "import sys; print([m for m in ('torch', 'numpy', 'textual') if m in sys.modules])"
    )
    done = run(unchecked("prog.py"), tmp_path)
    assert done.stdout == "[]\n"
    assert own_lines(done.stderr) == ["memtrace: the program never used the GPU; nothing was recorded"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "nothing to run"),
        (["missing.py"], 2, "can't open missing.py"),
        (["--steps", "5", "x.py"], 2, "FIRST:END"),
        (["--steps", "5:5", "x.py"], 2, "FIRST < END"),
        (["--max-entries", "0", "x.py"], 2, "at least 1"),
    ],
)
def test_wrong_usage(words: list[str], code: int, text: str, tmp_path: Path) -> None:
    done = run(unchecked(*words), tmp_path)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not HAS_TORCH, reason="needs the CPU build of PyTorch")
def test_a_cpu_build_is_refused_before_the_program_starts(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text("print('ran')")
    done = run([sys.executable, "-m", "memtrace", "run", "prog.py"], tmp_path)
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "CPU-only build" in done.stderr


TRAIN = """
import os, sys, time, torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.randn(4096 if step == 3 else 4, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0: print("pid", os.getpid(), flush=True)
    if len(sys.argv) > 2: time.sleep(0.05)
print("trained")
"""
# Making an optimizer imports the compiler of PyTorch, which takes longer than all the rest.
WITHOUT_OPTIMIZER = "\n".join(line for line in TRAIN.split("\n") if "optimizer" not in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


@needs_torch
def test_unchanged_script_is_recorded(folder: Path) -> None:
    done = run(standin("--steps", "1:3", "train.py", 5), folder)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trained")
    extra = read(folder / "out" / "train-steps1-3.pickle")["memtrace"]
    assert {row["step"] for row in extra["phases"] if row["name"] == "optimizer"} == {1, 2}
    assert {f"{r['category']}/{r['subcategory']}" for r in extra["labels"]} == {
        "lora/params", "lora/grads", "lora/optimizer_state",
    }  # fmt: skip


@needs_torch
def test_oom_leaves_the_file_the_verdict_and_the_traceback(folder: Path, standins: Forked) -> None:
    done = standins("run", "--out", "out", "train.py", "5", cwd=folder, MEMTRACE_TEST_CAPACITY="400000")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line.startswith("memtrace: ") for line in lines[-5:]] == [True] * 5
    assert lines[-6].startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert "memtrace/capture" not in "".join(lines[:-5])
    snapshot = read(folder / "out" / "train.pickle")
    assert snapshot["device_traces"][0][-1]["action"] == "oom"
    assert snapshot["memtrace"]["oom"]["step"] == 3


def test_an_error_that_got_lost_is_not_left_unexplained(folder: Path) -> None:
    lost = "raise SystemError('<function dropout> returned NULL without setting an exception')"
    (folder / "train.py").write_text(lost)
    done = run(unchecked("train.py"), folder)
    assert done.returncode == 1
    assert any("--stacks none" in line for line in own_lines(done.stderr))


@needs_torch
def test_two_ranks_leave_two_files_when_one_runs_out_of_memory(folder: Path, standins: Forked) -> None:
    (folder / "train.py").write_text(WITHOUT_OPTIMIZER)
    ranks = []
    for rank, capacity, steps in ((0, 1 << 30, 5000), (1, 400_000, 100)):  # rank 0 goes on until it is told to stop
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MEMTRACE_TEST_CAPACITY": str(capacity)}
        ranks.append(standins.begin("run", "--out", "out", "train.py", str(steps), "slow", cwd=folder, **place))
    assert ranks[1].wait().returncode == 1
    ranks[0].wait_until_it_prints()
    os.kill(ranks[0].pid, signal.SIGTERM)  # what torchrun does to the others
    assert ranks[0].wait().returncode == -signal.SIGTERM
    extras = [read(folder / "out" / f"train-rank{rank}.pickle")["memtrace"] for rank in (0, 1)]
    assert [extra["reason"] for extra in extras] == ["terminated", "oom"]
    assert [extra["rank"] for extra in extras] == [0, 1]


@needs_torch
def test_request_by_signal(folder: Path, standins: Forked) -> None:
    (folder / "train.py").write_text(WITHOUT_OPTIMIZER)
    program = standins.begin("run", "--out", "out", "train.py", "60", "slow", cwd=folder)
    program.wait_until_it_prints()
    time.sleep(0.3)
    os.kill(program.pid, signal.SIGUSR1)
    done = program.wait()
    assert done.returncode == 0
    assert "train-request.pickle on request" in done.stderr
    assert read(folder / "out" / "train-request.pickle")["memtrace"]["reason"] == "request"
    assert read(folder / "out" / "train.pickle")["memtrace"]["reason"] == "end"


@needs_torch
def test_disk_full_does_not_disturb(folder: Path, standins: Forked) -> None:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n{WITHOUT_OPTIMIZER}"
    (folder / "train.py").write_text(f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{limited}")
    done = standins("run", "--out", "out", "train.py", "5", cwd=folder)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trained")
    lines = own_lines(done.stderr)
    assert len(lines) == 1
    assert "cannot write" in lines[0]
    assert "File too large" in lines[0]
    assert list((folder / "out").iterdir()) == []
