"""Builds the compiled parts where there is a compiler, and a plain wheel where there is none.

Run by hand (``python hatch_build.py``, with Cython and setuptools installed) it puts them beside their sources, for an
editable install. ``MEMTRACE_COMPILE=0`` leaves them out, ``MEMTRACE_COMPILE=1`` makes a failure an error.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SOURCES = sorted(Path(__file__).parent.glob("memtrace/**/*.pyx"))
ABI = 0x030B0000  # one build for Python 3.11 and later
SWITCH = "MEMTRACE_COMPILE"


def build(root: Path, folder: Path) -> dict[str, str]:
    """Compile every part into ``folder``: file -> place in the wheel. Raises what Cython and the compiler raise."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    limited = sysconfig.get_config_var("Py_GIL_DISABLED") != 1  # free-threaded Python has no stable ABI yet
    macros = [("Py_LIMITED_API", hex(ABI)), ("CYTHON_LIMITED_API", "1")] if limited else []
    parts = [
        Extension(
            ".".join(source.relative_to(root).with_suffix("").parts),
            [str(source.relative_to(root))],
            define_macros=[(name, value) for name, value in macros],
            py_limited_api=limited,
            extra_compile_args=[] if os.name == "nt" else ["-g0"],
        )
        for source in SOURCES
    ]
    here = Path.cwd()
    os.chdir(root)
    try:
        modules = cythonize(parts, build_dir=str(folder / "c"), quiet=True, language_level=3)
        command: Any = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
        command.ensure_finalized()
        command.run()
        outputs = command.get_outputs()
    finally:
        os.chdir(here)
    return {str(made): str(Path(made).relative_to(folder / "lib")) for made in outputs}


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object  # type: ignore[assignment, misc]


class CompiledParts(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled parts to a wheel, or leaves it plain."""

    PLUGIN_NAME = "custom"
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the files of a wheel."""
        wanted = os.environ.get(SWITCH)
        if self.target_name != "wheel" or wanted == "0":
            return
        self._folder = tempfile.mkdtemp()
        root = Path(self.root)
        try:
            made = build(root, Path(self._folder))
        except BaseException as error:  # a compiler may fail in any way, also by SystemExit
            if wanted == "1" or isinstance(error, KeyboardInterrupt):
                raise
            self.app.display_warning(f"memtrace runs without its compiled parts, in plain Python: {error}")
            return
        if version == "editable":
            for file, place in made.items():
                shutil.copy(file, root / place)
            return
        build_data["force_include"].update(made)
        build_data["pure_python"] = False
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        stable = all(".abi3." in file or file.endswith(".pyd") for file in made)
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{tag}" if stable else f"{python}-{python}-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after the wheel was written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made_in:
        for made_file, its_place in build(Path(__file__).parent.resolve(), Path(made_in)).items():
            shutil.copy(made_file, Path(__file__).parent / its_place)
            print(its_place)
