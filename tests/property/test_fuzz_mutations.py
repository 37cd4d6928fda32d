"""A short run of the mutations in fuzz/: the decoders agree, and every input ends in an answer or in one line."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARES, PER_SHARE = 4, 100
FOUND = sorted((ROOT / "tests" / "hostile").glob("fuzz_*.pickle.xz"))  # where long runs once stopped


@pytest.fixture(autouse=True)
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "fuzz"))
    yield
    for name in ("check", "mutate", "run"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("share", range(SHARES))
def test_mutations(share: int) -> None:
    from run import tried

    tries, readable, failed, _ = tried(range(share * PER_SHARE, (share + 1) * PER_SHARE))
    assert tries == PER_SHARE and not failed
    assert readable > PER_SHARE // 10  # the damage must not be so coarse that nothing gets past the decoders


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.name)
def test_what_long_runs_found(file: Path) -> None:
    from check import check

    check(lzma.decompress(file.read_bytes()))


def test_a_seed_that_once_failed() -> None:
    """A trace in which nothing was allocated or refused, with phases told by lifetimes."""
    from run import tried

    assert tried(range(300_002_079, 300_002_080))[2] == []


def test_a_failure_is_told_with_its_seed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a process that dies is not taken for success."""
    import subprocess

    broken = tmp_path / "broken.py"
    for name, does in (("raises", "raise ValueError('oh')"), ("dies", "os.kill(os.getpid(), 9)")):
        broken.write_text(
            f"import os, sys\nsys.path[:0] = [{str(ROOT / 'fuzz')!r}]\nimport run\nimport mutate\n"
            "def fails(data):\n"
            f"    if data == mutate.damaged(2): {does}\n"
            "    return True\n"
            "run.check = run.check_log = run.check_file = fails\n"
            "if __name__ == '__main__':\n"
            f"    sys.argv[1:] = ['--count', '8', '--found', {str(tmp_path / name)!r}]\n    sys.exit(run.main())\n"
        )
        ended = subprocess.run([sys.executable, str(broken)], capture_output=True, text=True)
        assert ended.returncode == 1, ended.stderr
        assert "seed 2: " in ended.stdout and "1 failures" in ended.stdout
        assert [file.name for file in (tmp_path / name).iterdir()] == ["2"]
