"""The ``memtrace`` command. Each verb is one file here; only the chosen one is imported.

A verb file has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). To add a verb, write the file and
list it in ``QUESTIONS``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from memtrace._version import __version__
from memtrace.cli.leads import lead, with_lead
from memtrace.cli.parsing import Parser, nearest, verb_module, verb_parser
from memtrace.errors import MemtraceError, NoAnswerError, SnapshotError, UsageError
from memtrace.units import printable

# Verb (the name of its file) -> one line for the overview, by the question that people come with.
QUESTIONS: dict[str, dict[str, str]] = {
    "it died: why, and what to change?": {
        "explain": "why it ran out of memory and what to change, from a snapshot, a log or both",
        "report": "where every reserved byte is at the peak, at the OOM or at any event",
        "browse": "walk through all of it in the terminal (also plain: memtrace FILE)",
    },
    "what changed?": {
        "diff": "what changed between two recordings, by category and call site",
        "check": "a gate for CI: fail when a recording needs more memory than allowed",
    },
    "will it fit?": {
        "forecast": "the step at which a run will die, before it starts, from the lengths of its data",
        "fit": "the cheapest changes that make a run fit, and what each option adds",
    },
    "what does my run do?": {
        "run": "run an unchanged training script with recording on",
        "live": "watch the memory of a program that runs, sound alarms before it dies",
        "ranks": "one row a GPU of a multi-GPU run, the imbalance, the odd one out",
    },
    "more": {
        "demo": "the main job on a bundled recording of a real OOM",
        "attach": "let memtrace live watch a program that was started without memtrace",
        "simulate": "would it have fit? the same program under other settings, limits, edits",
        "steps": "memory over the steps of a long run: growth, or only varying lengths",
        "fragmentation": "reserved but unusable bytes: why, where, pinned by what",
        "segments": "map of segments and blocks at an event",
        "graph": "the segment/block graph (GraphML, JSON, DOT)",
        "allocations": "every allocation, one row each (CSV, JSON, Parquet)",
        "timeline": "memory over time by category (CSV, JSON, plot)",
        "export": "files for other tools: Perfetto, speedscope, HTML, a cut snapshot",
        "info": "what a snapshot file holds",
        "scrub": "remove paths, user names and the like before a snapshot is shared",
        "mcp": "the answers as tools for agents (Model Context Protocol)",
        "estimate": "the memory of a QLoRA run before it runs: fits or not, and why",
        "dryrun": "an unchanged script, or any architecture, without a GPU and without data",
        "sweep": "measure on a GPU what each option adds, one thing at a time",
        "capture": "build a QLoRA run and record it",
        "completion": "print the shell completion script for bash, zsh or fish",
    },
}
VERBS = {verb: line for verbs in QUESTIONS.values() for verb, line in verbs.items()}
_FIRST_STEPS = """memtrace says why a GPU ran out of memory. Where to begin:

  memtrace demo                     a real out-of-memory error, explained; no GPU needed
  memtrace explain FILE_OR_LOG      it died: from a memory snapshot, the log, or both
  memtrace run train.py             there is no snapshot yet: record one of an unchanged script
  memtrace forecast --help          will it fit? the step at which a run will die, before it starts
  memtrace diff BEFORE AFTER        what changed between two recordings?
  memtrace --help                   all verbs
"""


def _overview() -> Parser:
    width = max(map(len, VERBS))
    verbs = ""
    for question, group in QUESTIONS.items():
        verbs += f"\n{question}\n" + "".join(f"  {verb:<{width}}  {line}\n" for verb, line in group.items())
    parser = Parser(
        prog="memtrace",
        description="Why did the GPU run out of memory? Reads PyTorch snapshots, says what every byte was for.",
        usage="memtrace VERB [OPTIONS] FILE   (memtrace VERB --help for a verb's options)",
        epilog=f"{verbs.lstrip()}\n"
        "exit codes: 0 done · 1 a check failed · 2 wrong usage · 3 input unreadable or no snapshot ·\n"
        "            4 input can't answer · 5 an optional package or device is missing · 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", "-V", action="store_true", help="print the version; with --verbose the environment too"
    )
    parser.add_argument("--verbose", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("verb", metavar="VERB", nargs="?", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a pipe that can't show a character gets an escape
            stream.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(args)
    except MemtraceError as error:
        print(f"memtrace: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("memtrace: interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        print("memtrace: not enough memory for this input", file=sys.stderr)
        return 3
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        print(f"memtrace: can't write the output: {error.strerror or error}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """What is still buffered for stdout can't be written; without this the interpreter would try once more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError:
        sys.stdout = None


def _dispatch(args: list[str]) -> int:
    if not args:
        print(_FIRST_STEPS, end="")
        return 2
    if args[0].startswith("-"):
        parser = _overview()
        asked = parser.parse_args(args)  # --help ends here
        if asked.version:
            return _version(asked.verbose)
        parser.print_help()
        return 2
    name = args[0]
    if name in ("help", "version") and not _exists(name):  # as other tools have them
        return _dispatch([*args[1:2], "--help"] if name == "help" else ["--version", *args[1:]])
    if name not in VERBS and _exists(name):  # memtrace FILE
        name, args = "browse", ["browse", *args]
    if name not in VERBS:
        hint = lead(name, "")
        if hint is not None:
            raise UsageError(f"no verb and no file {name[:200]!r}; {hint}")
        if os.sep in name or Path(name).suffix:  # meant as a file
            raise SnapshotError(f"{name[:200]}: no such file")
        close = nearest(name, VERBS)
        hint = f"did you mean {' or '.join(close)}?" if close else "memtrace --help lists them"
        raise UsageError(f"no verb and no file {name[:200]!r}; {hint}")
    module = verb_module(name)
    parser = verb_parser(name, module)
    parsed = parser.parse_args(args[1:])
    if sys.stdout is None:
        raise UsageError("standard output is closed")
    try:
        code: int = module.run(parsed)
        sys.stdout.flush()
    except (SnapshotError, UsageError, NoAnswerError) as error:
        raise type(error)(with_lead(str(error), parsed, name)) from None
    except BrokenPipeError:  # the reader of our output went away, as `| head` does; what a check found stands
        _drop_output()
        return getattr(parsed, "exit_code", 0)
    return code


def _exists(name: str) -> bool:
    try:
        Path(name).stat()
    except (OSError, ValueError):
        return False
    return True


def _version(is_verbose: bool) -> int:
    """One line; with --verbose what a bug report needs besides."""
    if sys.stdout is None:
        raise UsageError("standard output is closed")
    print(f"memtrace {__version__}")
    if is_verbose:
        from memtrace.environment import environment

        for name, value in environment():
            print(f"{name + ':':<{18}} {printable(value)}")
    sys.stdout.flush()
    return 0
