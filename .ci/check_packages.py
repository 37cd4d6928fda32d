#!/usr/bin/env python3
"""Build wheel and source distribution, check what is in them, and try the wheel in an empty environment.

Run it by hand from anywhere: ``python .ci/check_packages.py``. It needs nothing but Python and the package index; all
that it makes lies in a temporary folder.
"""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVELS = {"memtrace", "memtrace_tui"}
DEMO = "memtrace/sample_traces/llama2-7b_oom-fragmentation.pickle.xz"
IN_WHEEL = {"memtrace/py.typed", "memtrace_tui/py.typed", DEMO, "memtrace/cli/__init__.py", "memtrace_tui/app.py"}
IN_SDIST = {
    "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "memtrace/__init__.py",
    "tui/memtrace_tui/app.py", "tests/conftest.py", "sample_traces/manifest.json", "docs/contract.md", ".ci/run",
}  # fmt: skip
FOREIGN = ("__pycache__", ".pyc", ".hypothesis", ".pytest_cache", ".mypy_cache", ".DS_Store", ".env", ".partial")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tools = _environment(work / "tools", "build", "twine", "check-wheel-contents")
        _run(tools, "-m", "build", "--outdir", str(work / "dist"), str(ROOT))  # the wheel from the source distribution
        _run(tools, "-m", "build", "--wheel", "--outdir", str(work / "direct"), str(ROOT))
        wheel, sdist = _only(work / "dist", "*.whl"), _only(work / "dist", "*.tar.gz")
        _run(tools, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        _run(tools, "-m", "check_wheel_contents", "--config", str(ROOT / "pyproject.toml"), str(wheel))
        check_wheel(wheel)
        check_sdist(sdist)
        # From a checkout and from the source distribution comes the same wheel, to the byte.
        direct = _contents(_only(work / "direct", "*.whl"))
        _equal(
            "files that differ between both ways to build", set(_contents(wheel).items()) ^ set(direct.items()), set()
        )
        check_installed(work, wheel)
    print("packages: all checks passed")


def check_wheel(wheel: Path) -> None:
    """Top levels, contents and metadata."""
    names = set(_contents(wheel))
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    _equal("top levels of the wheel", {name.split("/")[0] for name in names} - {info}, TOP_LEVELS)
    _equal("missing in the wheel", IN_WHEEL - names, set())
    _equal("tests and the like in the wheel", {n for n in names if "/test_" in n or "conftest" in n}, set())
    _equal("rubbish in the wheel", {n for n in names if any(part in n for part in FOREIGN)}, set())
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "memtrace").rglob("*.py")}
    sources |= {str(p.relative_to(ROOT / "tui")) for p in (ROOT / "tui" / "memtrace_tui").rglob("*.py")}
    _equal("modules that differ from the checkout's", {n for n in names if n.endswith(".py")} ^ sources, set())
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    _expect(f"{info}/licenses/LICENSE" in names, "the licence is in the wheel")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version: dict[str, str] = {}
    exec((ROOT / "memtrace" / "_version.py").read_text(), version)
    _equal("name", metadata["Name"], project["name"])
    _equal("version", metadata["Version"], version["__version__"])
    _equal("licence", metadata["License-Expression"], "Apache-2.0")
    _equal("Python", metadata["Requires-Python"], ">=3.11")
    _equal("extras", set(metadata.get_all("Provides-Extra", [])), set(project["optional-dependencies"]))
    core = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    _expect(not any(line.startswith(("torch", "transformers")) for line in core), "the core does not require torch")
    _expect("memtrace = memtrace.entry:main" in scripts, "the wheel has the command")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _expect(f"## [{version['__version__']}]" in changes, "CHANGELOG.md has a section for this version")


def check_sdist(sdist: Path) -> None:
    """Everything to build and test from."""
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[0] for name in archive.getnames()}
        names = {name.partition("/")[2] for name in archive.getnames()}
    _equal("top levels of the source distribution", len(tops), 1)
    _equal("missing in the source distribution", IN_SDIST - names, set())
    _equal("rubbish in the source distribution", {n for n in names if any(part in n for part in FOREIGN)}, set())


def check_installed(work: Path, wheel: Path) -> None:
    """The wheel in an environment of its own, used from an empty folder."""
    python = _environment(work / "empty", str(wheel))
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    memtrace = python.with_name("memtrace" + python.suffix)

    def says(*args: str) -> str:
        return subprocess.run(
            [str(memtrace), *args], cwd=elsewhere, capture_output=True, text=True, check=True, encoding="utf-8"
        ).stdout

    _expect("will it fit?" in says("--help"), "memtrace --help")
    _expect(says("--version").count("\n") == 1, "memtrace --version")
    _expect("torch:             not installed" in says("--version", "--verbose"), "no torch came with it")
    _expect("fragmentation" in says("demo"), "memtrace demo")
    same_name = memtrace.with_stem("torch-memtrace")  # what uvx and pipx run
    demo = subprocess.run([str(same_name), "demo"], cwd=elsewhere, capture_output=True, text=True, check=True).stdout
    _expect(demo == says("demo"), "torch-memtrace demo")
    _expect("_memtrace" in says("completion", "bash"), "memtrace completion bash")
    code = "import memtrace, memtrace_tui.app; memtrace.load; print(memtrace.__file__)"
    where = subprocess.run([str(python), "-c", code], cwd=elsewhere, capture_output=True, text=True, check=True).stdout
    _expect("site-packages" in where, "the installed package is the one that was tried")


def _environment(folder: Path, *requirements: str) -> Path:
    """A new environment with these packages; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = next(p for p in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if p.exists())
    _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
    return python


def _run(python: Path, *args: str) -> None:
    done = subprocess.run([str(python), *args], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"packages: {' '.join(args[:3])} failed\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    _equal(f"number of {pattern} built", len(found), 1)
    return found[0]


def _contents(wheel: Path) -> dict[str, int]:
    """Name -> checksum of every file."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if not entry.is_dir()}


def _equal(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        sys.exit(f"packages: {what}: {found!r}, expected {wanted!r}")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"packages: does not hold: {what}")


if __name__ == "__main__":
    main()
