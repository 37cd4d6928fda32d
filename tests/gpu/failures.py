"""The ways in which things go wrong around a recording; each function is one check of ``check_recording.py``."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from check_recording import Checks

WORK = Path("/tmp/check_recording")
SMALL = Path(__file__).resolve().parent / "scripts" / "train_small.py"


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("memtrace: ")]


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def killed_mid_dump(checks: Checks) -> None:
    """SIGKILL while a snapshot is being written: nothing half-written under the final name."""
    folder = WORK / "killed"
    halves, attempts, caught = [], 6, 0
    for attempt in range(attempts):
        command = checks.memtrace("run", "--out", folder, "--max-entries", 200_000, SMALL, "slow")
        program = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=checks.environment, cwd=WORK
        )
        assert program.stdout is not None
        while not program.stdout.readline().startswith("pid") and program.poll() is None:
            pass
        time.sleep(1.5 + 0.3 * attempt)
        program.send_signal(signal.SIGUSR1)
        deadline = time.time() + 20
        while time.time() < deadline and program.poll() is None:
            if any(path.stat().st_size > 0 for path in folder.glob(".memtrace-*.tmp")):
                caught += 1
                break
        program.send_signal(signal.SIGKILL)
        program.wait()
        for path in folder.glob("*.pickle"):
            try:
                _load(path)
            except Exception:
                halves.append(path.name)
    left = [path.name for path in folder.glob(".memtrace-*.tmp")]
    done = checks.run(checks.memtrace("run", "--out", folder, SMALL))
    cleaned = not list(folder.glob(".memtrace-*.tmp"))
    passed = not halves and caught > 0 and cleaned and done.returncode == 0
    checks.note("killed while writing", passed, caught=caught, of=attempts, halves=halves, temporary_left=len(left))


def full_disk(checks: Checks) -> None:
    """A full disk: the program is not disturbed, one line says so, nothing is left."""
    folder = WORK / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        checks.note("full disk", False, error="cannot mount a small tmpfs here: " + mounted.stderr.decode()[:200])
        return
    done = checks.run(checks.memtrace("run", "--out", folder, SMALL))
    left = [path.name for path in folder.iterdir()]
    subprocess.run(["umount", str(folder)], check=False)
    lines = _lines(done)
    passed = done.returncode == 0 and "trained" in done.stdout and not left and any("No space" in x for x in lines)
    checks.note("full disk", passed, lines=lines, said=lines[0] if lines else "", left=left)


def unwritable_folder(checks: Checks) -> None:
    """A folder that can't be written: one line, the recording goes to a temporary folder."""
    done = checks.run(checks.memtrace("run", "--out", "/proc/memtrace", SMALL))
    lines = _lines(done)
    passed = done.returncode == 0 and any("cannot write to /proc/memtrace" in line for line in lines)
    checks.note("unwritable folder", passed, lines=lines, said=lines[0] if lines else "")


def existing_file(checks: Checks) -> None:
    """An older file of the same name stays as it was."""
    folder = WORK / "existing"
    folder.mkdir()
    old = folder / "train_small.pickle"
    old.write_bytes(b"older")
    done = checks.run(checks.memtrace("run", "--out", folder, SMALL))
    names = sorted(path.name for path in folder.iterdir())
    passed = done.returncode == 0 and old.read_bytes() == b"older" and "train_small-2.pickle" in names
    checks.note("existing file", passed, names=names)


def handled_error(checks: Checks) -> None:
    """An error that the program handles is not reported as its failure."""
    folder = WORK / "handled"
    command = checks.memtrace("run", "--out", folder, SMALL, "retry")
    done = checks.run(command, MEMTRACE_TEST_CAPACITY=str(128 << 20))
    lines = _lines(done)
    names = sorted(path.name for path in folder.glob("*.pickle"))
    passed = done.returncode == 0 and names == ["train_small-oom.pickle", "train_small.pickle"]
    passed = passed and any("handled by the program itself" in line for line in lines)
    checks.note("handled out-of-memory error", passed, names=names, lines=lines)


def children(checks: Checks) -> None:
    """A spawned process that uses the GPU gets a file of its own; the parent never used it."""
    folder = WORK / "children"
    done = checks.run(checks.memtrace("run", "--out", folder, SMALL, "spawn"))
    names = sorted(path.name for path in folder.glob("*.pickle"))
    passed = done.returncode == 0
    if checks.device == "cuda":
        passed = passed and len(names) == 1 and "-pid" in names[0]
    checks.note("spawned process", passed, names=names, lines=_lines(done))


def terminated(checks: Checks) -> None:
    """SIGTERM, as a launcher sends it when another rank fails: the state is saved, and the process dies of it."""
    folder = WORK / "terminated"
    command = checks.memtrace("run", "--out", folder, SMALL, "slow")
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=checks.environment, cwd=WORK
    )
    assert program.stdout is not None
    while not program.stdout.readline().startswith("pid") and program.poll() is None:
        pass
    time.sleep(1)
    program.send_signal(signal.SIGTERM)
    _, stderr = program.communicate(timeout=60)
    names = sorted(path.name for path in folder.glob("*.pickle"))
    passed = program.returncode == -signal.SIGTERM and names == ["train_small.pickle"]
    checks.note("terminated", passed, code=program.returncode, names=names, said=stderr[-200:])


def refusals(checks: Checks) -> None:
    """What can't record says why in one line and ends with exit code 5."""
    if checks.device == "cpu":
        return
    for name, env in (
        ("cudaMallocAsync", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
        ("no visible GPU", {"CUDA_VISIBLE_DEVICES": ""}),
    ):
        done = checks.run(checks.memtrace("run", "--out", WORK / "refused", SMALL), **env)
        lines = done.stderr.strip().splitlines()
        checks.note(f"refusal: {name}", done.returncode == 5 and len(lines) == 1, said=done.stderr.strip()[:300])


def deep_names(checks: Checks) -> None:
    """``--deep`` stamps module names on allocations."""
    folder = WORK / "deep"
    done = checks.run(checks.memtrace("run", "--deep", "--out", folder, SMALL))
    files = list(folder.glob("*.pickle"))
    if done.returncode or not files:
        checks.note("module names", False, error=done.stderr[-800:])
        return
    entries = _load(files[0])["device_traces"][0]
    names = {entry.get("user_metadata", "") for entry in entries if entry["action"] == "alloc"}
    checks.note("module names", len(names - {""}) >= 3, names=sorted(names)[:8])


def capture_verb(checks: Checks) -> None:
    """``memtrace capture``."""
    out = WORK / "capture.pickle"
    model = "tiny-llama" if checks.device == "cuda" else str(WORK / "models" / "tinyllama" / "config.json")
    length = 256 if checks.device == "cuda" else 64
    done = checks.run(checks.memtrace("capture", "--model", model, "--seq-len", length, "--out", out))
    passed = done.returncode == 0 and out.exists()
    checks.note("capture verb", passed, error=done.stderr[-800:] if not passed else "")


def stopped_by_program(checks: Checks) -> None:
    """A program that switches PyTorch's recording off itself: what was recorded until then is kept."""
    if checks.device == "cpu":
        return
    folder = WORK / "stopped"
    done = checks.run(checks.memtrace("run", "--out", folder, SMALL, "stops"))
    files = list(folder.glob("*.pickle"))
    events = len(_load(files[0])["device_traces"][0]) if len(files) == 1 else 0
    said = [line for line in _lines(done) if "stopped the recording itself" in line]
    passed = done.returncode == 0 and events > 20 and len(said) == 1
    checks.note("recording stopped by the program", passed, events=events, lines=_lines(done), error=done.stderr[-400:])


def plain_python_agrees(checks: Checks) -> None:
    """The program's own output and exit code are what plain Python gives."""
    plain = checks.run([sys.executable, str(SMALL)])
    under = checks.run(checks.memtrace("run", "--out", WORK / "plain", SMALL))
    lines = [[x for x in done.stdout.splitlines() if not x.startswith("pid")] for done in (plain, under)]
    checks.note("output and exit code", plain.returncode == under.returncode == 0 and lines[0] == lines[1])


ALL: list[Callable[[Any], None]] = [
    killed_mid_dump,
    full_disk,
    unwritable_folder,
    existing_file,
    handled_error,
    children,
    terminated,
    refusals,
    deep_names,
    capture_verb,
    stopped_by_program,
    plain_python_agrees,
]
if os.name == "nt":
    ALL = [refusals, deep_names, capture_verb]
