"""The main job on a bundled recording of a real run: a 7B QLoRA fine-tuning that ran out of memory in step 10 under a
24 GB card's limit, with 1.83 GiB reserved but unusable."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from memtrace.cli.common import add_shared
from memtrace.errors import SnapshotError

RECORDING = "llama2-7b_oom-fragmentation.pickle.xz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "json")


def run(args: argparse.Namespace) -> int:
    from memtrace.cli import main

    path = demo_path()
    print(f"$ memtrace report {path}\n", file=sys.stderr)
    return main(["report", str(path), *(["--json"] if args.json else [])])


def demo_path() -> Path:
    """The bundled recording: inside the installed package, or in the checkout it was installed from."""
    package = Path(str(files("memtrace")))
    for folder in (package / "sample_traces", package.parent / "sample_traces"):
        if (folder / RECORDING).is_file():
            return folder / RECORDING
    raise SnapshotError(f"{RECORDING} is not part of this installation")
