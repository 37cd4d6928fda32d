"""argparse with errors of one line, and the parsers of all verbs from one place."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from memtrace.units import printable

_UNKNOWN_OPTION = "unrecognized arguments: "
_LIKENESS = 0.6
# Options of one meaning, of which a verb has some: whoever knows another verb means this verb's own.
_SAME = (("--seq-len", "--seq-length", "--max-length", "--lengths"), ("--limit", "--vram", "--memory", "--capacity"))

_RANKS = ("--world-size", "--num-gpus", "--num-processes", "--nproc")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line on stderr, and exits with 2."""

    _given: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; the words are kept for the error."""
        self._given = args or ()
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """One line, and where the options are listed."""
        if "--model" in message and self._given and not self._given[0].startswith("-"):
            word = self._given[0]
            option = "--config" if word.endswith((".yaml", ".yml")) else "--model"
            is_script = word.endswith(".py")
            message += f"; memtrace dryrun {word} takes a script" if is_script else f"; did you mean {option} {word}?"
        if message.startswith(_UNKNOWN_OPTION):
            word = message.removeprefix(_UNKNOWN_OPTION).split("=")[0].split()[0]
            options = [option for action in self._actions for option in action.option_strings]
            same = [option for group in _SAME if word in group for option in group if option in options]
            close = same or (nearest(word, options) if word.startswith("-") else [])
            if any(one in message for one in _RANKS):
                message += "; runs on several GPUs: memtrace dryrun --world-size N SCRIPT"
            elif close:
                message += f"; did you mean {' or '.join(close)}?"
        if sys.stderr is not None:
            print(f"{self.prog}: {printable(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three known words that someone who wrote ``word`` may have meant, the likeliest first."""
    from difflib import get_close_matches

    known = list(known)
    close = get_close_matches(word, known, n=3, cutoff=_LIKENESS)
    begins = [name for name in known if len(word) > 1 and name.startswith(word) and name not in close]
    return [*close, *begins][:3]


def verb_module(verb: str) -> ModuleType:
    """The file of one verb."""
    return import_module(f"memtrace.cli.{verb}")


def verb_parser(verb: str, module: ModuleType) -> Parser:
    """The parser of one verb, as ``memtrace VERB`` uses it."""
    form = argparse.RawDescriptionHelpFormatter
    # argparse makes a formatter for every argument that is added, and each one would ask the terminal for its width.
    parser = Parser(prog=f"memtrace {verb}", description=module.__doc__, formatter_class=partial(form, width=80))
    module.add_arguments(parser)
    parser.formatter_class = form
    return parser


def whole_parser(verbs: Mapping[str, str]) -> Parser:
    """One parser with every verb as a subparser, for tools that read parsers (shell completion); imports all verbs."""
    parser = Parser(prog="memtrace")
    parser.add_argument("--version", action="store_true", help="the version of memtrace")
    parser.add_argument("--verbose", action="store_true", help="with --version: the environment, for bug reports")
    choices = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb, line in verbs.items():
        verb_module(verb).add_arguments(choices.add_parser(verb, help=line, description=line))
    return parser
