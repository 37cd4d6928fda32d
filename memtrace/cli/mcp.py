"""Answers for agents over the Model Context Protocol, on stdin and stdout: memtrace mcp [FOLDER…]

Tools: explain, report, why, diff, simulate, forecast, fit. Reads only within the FOLDERs. See docs/agents.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

from memtrace.cli.common import option, usual_signals
from memtrace.cli.parsing import verb_module, verb_parser
from memtrace.errors import MissingDependencyError, UsageError
from memtrace.mcp_server import make_server

_one_at_a_time = threading.Lock()  # the streams are the process's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "folders FOLDER", "where recordings, logs and configurations lie (default: here)", nargs="*")


def run(args: argparse.Namespace) -> int:
    try:
        server = make_server(args.folders or ["."], ask)
    except ImportError:
        raise MissingDependencyError.of_extra("memtrace mcp needs the package mcp", "mcp") from None
    usual_signals()
    signal.signal(signal.SIGINT, _leave)
    server.run("stdio")
    return 0


def _leave(number: int, frame: object) -> None:
    print("memtrace: interrupted", file=sys.__stderr__, flush=True)
    os._exit(130)  # the SDK's thread waits for stdin, which the agent may hold open


def ask(verb: str, words: Sequence[str], text: str, model: Callable[[str], str]) -> dict[str, Any]:
    """What ``memtrace VERB WORDS --json`` prints with ``text`` on stdin; ``notes`` is what it says on stderr.

    A model's name, which a configuration file may also give, goes through ``model``. Raises MemtraceError.
    """
    module = verb_module(verb)
    printed, said = io.BytesIO(), io.StringIO()
    with _one_at_a_time, ExitStack() as streams:
        out = streams.enter_context(redirect_stdout(io.TextIOWrapper(printed, encoding="utf-8")))
        streams.enter_context(redirect_stderr(said))
        streams.callback(setattr, sys, "stdin", sys.stdin)
        pasted = io.BytesIO(text.encode("utf-8", "backslashreplace"))
        sys.stdin = io.TextIOWrapper(io.BufferedReader(pasted))
        try:
            parser = verb_parser(verb, module)
            parser.allow_abbrev = False  # else --tra would be --trace, which writes a file
            parsed = parser.parse_args(["--json", *words])
            if getattr(parsed, "model", None) is not None:
                parsed.model = model(parsed.model)
            module.run(parsed)
            out.flush()
        except SystemExit:
            raise UsageError(said.getvalue().strip().removeprefix(f"memtrace {verb}: ")) from None
    answer: dict[str, Any] = json.loads(printed.getvalue())
    notes = said.getvalue().splitlines()
    return answer | ({"notes": notes} if notes else {})
