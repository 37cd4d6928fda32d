"""The pytest plugin: limits, budgets, and nothing at all for those who use neither."""

from __future__ import annotations

import json
import lzma
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy  # noqa: F401 - once for all: pytester forgets what a test imported, and numpy can't be loaded anew
import pytest
from fake_gpu import FakeGpu
from support import TRUTH

from memtrace.pytest_plugin import GpuMeter
from memtrace.record import backend

pytest_plugins = ["pytester"]

# Other plugins of this environment take seconds to start and import what they like.
ALONE = [
    part
    for name in ("hypothesispytest", "syrupy", "textual-snapshot", "asyncio", "cacheprovider")
    for part in ("-p", f"no:{name}")
]

CACHE = os.environ.get("MEMTRACE_CACHE") or str(Path.home() / ".cache/memtrace")  # pytester has another home

CONFTEST = """
import contextlib
import pytest
from fake_gpu import FakeGpu
from memtrace.record import backend

GPU = FakeGpu(present={present})
STACK = contextlib.ExitStack()
STACK.enter_context(backend.use(GPU))

def pytest_unconfigure(config):
    STACK.close()

@pytest.fixture
def gpu():
    return GPU
"""


def run(
    pytester: pytest.Pytester, tests: str, *args: str, present: bool = True, apart: bool = False
) -> pytest.RunResult:
    """Run tests with a pretended GPU, in this process or apart from it."""
    folder = json.dumps(str(Path(__file__).parents[1]))
    pytester.makeconftest(f"import sys; sys.path.insert(0, {folder})\n" + CONFTEST.format(present=present))
    pytester.makepyfile("import pytest\n" + textwrap.dedent(tests))
    return (pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess)(*ALONE, *args)


def test_a_peak_over_the_limit_fails_with_the_budget(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.mark.limit_gpu_memory("100 MiB")
        def test_peak(gpu):
            gpu.free(gpu.allocate(120))
            gpu.allocate(20)
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*peak of GPU memory 120.0 MiB on GPU 0; the limit is 100.0 MiB*",
            "*GPU memory*",
            "*peak of allocated memory*",
            "*reserved*120.0 MiB*",
        ]
    )


def test_a_peak_on_the_limit_passes(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.mark.limit_gpu_memory("100 MiB")
        def test_peak(gpu):
            gpu.free(gpu.allocate(100))
            gpu.allocate(50)

        @pytest.mark.limit_gpu_memory(150 * 2**20)
        def test_what_was_live_before_counts(gpu):
            gpu.allocate(100)
        """,
    )
    result.assert_outcomes(passed=2)


def test_what_was_live_before_counts_and_is_said(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        def test_leak(gpu):
            gpu.allocate(64)

        @pytest.mark.limit_gpu_memory("100 MiB")
        def test_peak(gpu):
            gpu.allocate(60)
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*124.0 MiB on GPU 0, 64.0 MiB of it live before the test*"])


def test_what_holds_most_has_the_name_that_people_call_it() -> None:
    """Without adapters the weights that are trained are no LoRA."""
    gpu = FakeGpu()
    raw = pickle.loads(lzma.decompress((TRUTH / "unlabelled" / "own-optimizer_step.pickle.xz").read_bytes()))
    gpu.snapshot = lambda: raw  # type: ignore[method-assign]
    with backend.use(gpu):
        assert GpuMeter().finish().largest.startswith("trained ")


def test_memtrace_lists_the_largest_peaks(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        def test_small(gpu):
            gpu.free(gpu.allocate(10))

        def test_large(gpu):
            gpu.free(gpu.allocate(200))

        @pytest.mark.skip
        def test_skipped(gpu):
            pass
        """,
        "--memtrace",
    )
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*largest peaks of GPU memory*", "*200.0 MiB*test_large*", "*10.0 MiB*test_small*"])


def test_the_list_survives_worker_processes(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, "def test_large(gpu):\n    gpu.free(gpu.allocate(200))\n", "--memtrace", "-n", "2", apart=True
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*200.0 MiB*test_large*"])


def test_a_failing_test_fails_as_itself_and_an_oom_shows_the_budget(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.mark.limit_gpu_memory("1 MiB")
        def test_oom(gpu):
            gpu.allocate(30)
            gpu.run_out(90)

        @pytest.mark.limit_gpu_memory("1 GiB")
        def test_wrong():
            assert 1 == 2
        """,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*MemoryError: CUDA out of memory*", "*asked for 90.0 MiB more*", "*assert 1 == 2*"])


def test_without_a_gpu_tests_run_and_the_summary_says_so(pytester: pytest.Pytester) -> None:
    tests = '@pytest.mark.limit_gpu_memory("1 MiB")\ndef test_it():\n    pass\n'
    result = run(pytester, tests, present=False)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*GPU memory of 1 test was not measured: PyTorch finds no usable GPU*"])


def test_without_a_gpu_a_failing_test_reports_only_itself(pytester: pytest.Pytester) -> None:
    tests = '@pytest.mark.limit_gpu_memory("1 MiB")\ndef test_it():\n    assert 1 == 2\n'
    result = run(pytester, tests, present=False)
    result.assert_outcomes(failed=1)
    assert "During handling" not in result.stdout.str() and "memtrace/capture" not in result.stdout.str()


def test_memtrace_without_a_gpu_is_an_error(pytester: pytest.Pytester) -> None:
    """A gate that silently measures nothing would be worse than none."""
    pytester.makepyfile("def test_it(): pass")
    block = "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main(['--memtrace']))"
    result = subprocess.run(
        [sys.executable, "-c", block], cwd=pytester.path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 4
    assert "--memtrace: recording needs PyTorch" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("argument", ['"much"', "", '"1 GiB", "2 GiB"', "size=3", "None"])
def test_a_marker_that_makes_no_sense_fails_its_test(pytester: pytest.Pytester, argument: str) -> None:
    result = run(pytester, f"@pytest.mark.limit_gpu_memory({argument})\ndef test_it():\n    pass\n")
    result.assert_outcomes(failed=1)
    assert "INTERNALERROR" not in result.stdout.str() and "During handling" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*limit_gpu_memory*size*"])


def test_unused_it_imports_nothing_and_records_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_came_along():
            heavy = ("numpy", "networkx", "torch", "textual", "orjson", "memtrace.record", "memtrace.answers.report")
            assert [name for name in heavy if name in sys.modules] == []
            assert "memtrace.pytest_plugin" in sys.modules
        """
    )
    pytester.runpytest_subprocess(*ALONE, "-p", "no:xdist", "--strict-markers").assert_outcomes(passed=1)


def test_the_marker_is_declared(pytester: pytest.Pytester) -> None:
    result = run(pytester, '@pytest.mark.limit_gpu_memory("1 GiB")\ndef test_it():\n    pass\n', "--strict-markers")
    result.assert_outcomes(passed=1)
    pytester.runpytest_inprocess(*ALONE, "--markers").stdout.fnmatch_lines(["*limit_gpu_memory(size)*"])


def test_a_dry_run_checks_limits_without_a_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if sys.platform != "linux":
        pytest.skip("the dry device needs Linux")
    monkeypatch.setenv("MEMTRACE_CACHE", CACHE)
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.limit_gpu_memory("100 MiB")
        def test_small():
            x = torch.ones(1 << 20, device="cuda", requires_grad=True)
            assert (x * x).sum().item() == 1.0

        @pytest.mark.limit_gpu_memory("10 MiB")
        def test_large():
            loss = torch.nn.Linear(4096, 4096).cuda()(torch.ones(4, 4096, device="cuda")).sum()
            loss.backward()

        def test_more_than_the_card_has():
            torch.empty(25 << 30, dtype=torch.uint8, device="cuda")
        """
    )
    args = ("--memtrace", "--memtrace-dryrun", "--memtrace-gpu", "rtx4090")
    result = pytester.runpytest_subprocess(*ALONE, *args, timeout=300)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "peak of GPU memory 1*.? MiB on GPU 0; the limit is 10.0 MiB. *",
            "*OutOfMemoryError: CUDA out of memory. Tried to allocate 25.00 GiB. *",
            "memtrace: assumed: a number is 1 (a loss, a norm, a metric) at first, and *1 time, first at *",
            "*test_large  (trained 128.0 MiB)",
        ]
    )


def test_a_dry_run_on_no_known_card_is_one_line(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*ALONE, "--memtrace-dryrun", "--memtrace-gpu", "none", timeout=60)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --memtrace-dryrun: no GPU preset 'none'*"])
