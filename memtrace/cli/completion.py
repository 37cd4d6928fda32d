"""Print the script that completes memtrace's verbs, options and files in a shell.

bash   eval "$(memtrace completion bash)"                     in ~/.bashrc
zsh    memtrace completion zsh > FOLDER/_memtrace             with FOLDER on $fpath, before compinit
fish   memtrace completion fish > ~/.config/fish/completions/memtrace.fish

The script is static: print it again after an update of memtrace.
"""

from __future__ import annotations

import argparse
import re

_FILE = re.compile(r"FILE|OUT|SCRIPT|BEFORE|AFTER|\.json")
_FOLDER = re.compile(r"DIR")
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    import shtab

    from memtrace.cli import VERBS
    from memtrace.cli.parsing import whole_parser

    parser = whole_parser(VERBS)
    _complete_files(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Arguments that are shown as files or folders complete to files or folders, in every verb."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner)
        elif action.nargs != 0 and _FILE.search(str(action.metavar)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.nargs != 0 and _FOLDER.search(str(action.metavar)):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
