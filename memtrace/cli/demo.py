"""The main job on a bundled recording of a real run: a 7B QLoRA fine-tuning that ran out of memory in step 10 under a
24 GB card's limit, with 1.83 GiB reserved but unusable. Where the bytes were, why it died, what to change first."""

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
    from memtrace.cli import report
    from memtrace.cli.parsing import verb_parser

    path = demo_path()
    print(f"$ memtrace report {path}\n", file=sys.stderr)
    asked = verb_parser("report", report).parse_args([str(path), *(["--json"] if args.json else [])])
    code = report.run(asked)
    if not args.json:
        _what_to_do(asked, path)
    return code


def _what_to_do(asked: argparse.Namespace, path: Path) -> None:
    """The verdict, the change that saves most, and what to try next."""
    from memtrace.cli.common import open_analysis
    from memtrace.explain.explain import explain_snapshot
    from memtrace.render.explain_text import render_top

    print()
    print("\n".join(render_top(explain_snapshot(*open_analysis(asked)))))
    print("\nnext")
    print(f"  why, and all that can be changed   memtrace explain {path}")
    print(f"  what that change would do          memtrace simulate {path} --conf expandable_segments:True")
    print(f"  walk through it in the terminal    memtrace browse {path}")


def demo_path() -> Path:
    """The bundled recording: inside the installed package, or in the checkout it was installed from."""
    package = Path(str(files("memtrace")))
    for folder in (package / "sample_traces", package.parent / "sample_traces"):
        if (folder / RECORDING).is_file():
            return folder / RECORDING
    raise SnapshotError(f"{RECORDING} is not part of this installation")
