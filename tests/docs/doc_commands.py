"""Commands of the documentation: taken from blocks and sentences, parsed by the real parsers, run in a scratch folder.

Everything runs in this process, so that a page costs what its commands cost and not what starting Python costs.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import itertools
import json
import os
import re
import shlex
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from doc_output import fits, renewed
from doc_pages import ROOT, Block
from support import shared_recordings

from memtrace.cli import VERBS, main

SAMPLES = ROOT / "sample_traces"
TINY = "sample_traces/tiny-llama_3-steps.pickle.xz"
# What a sentence may call its file, and what stands in for it when the command is tried.
STAND_INS = {"FILE": TINY, "BEFORE": TINY, "AFTER": TINY, "FILE_OR_LOG": TINY, "DIR": "runs", "LOG": "train.log"}
# Verbs that need a GPU, a terminal or the packages of the extra [capture]; their commands are parsed, not run.
NOT_RUN = {"browse", "run", "capture", "dryrun", "sweep", "completion", "mcp"}
_MESSAGES = map(json.loads, (ROOT / "tests" / "truth" / "oom_messages.jsonl").read_text().splitlines())
_MESSAGE = next(row["log"] for row in _MESSAGES if row["id"] == "M042")
_LOG = textwrap.fill(_MESSAGE, 100, break_long_words=False) + "\n"


@dataclass(frozen=True)
class Step:
    """One command (or one Python statement) of a block and the lines that the page shows after it."""

    source: tuple[str, ...]  # as on the page, prompts included
    command: str
    expected: tuple[str, ...]


def console_steps(block: Block) -> list[Step]:
    """The commands of a ``console`` block: ``$ `` begins one, a backslash at the end continues it."""
    steps: list[Step] = []
    lines, index = block.lines, 0
    while index < len(lines):
        if not lines[index].startswith("$ "):
            raise ValueError(f"output without a command: {lines[index]!r}")
        source = [lines[index]]
        while source[-1].endswith("\\"):
            index += 1
            source.append(lines[index])
        index += 1
        first = index
        while index < len(lines) and not lines[index].startswith("$ "):
            index += 1
        command = " ".join(line.removesuffix("\\").strip() for line in source).removeprefix("$ ")
        steps.append(Step(tuple(source), command, lines[first:index]))
    return steps


def python_steps(block: Block) -> list[Step]:
    """The statements of a ``pycon`` block."""
    steps: list[Step] = []
    for example in doctest.DocTestParser().get_examples(block.text):
        first, *rest = example.source.rstrip("\n").split("\n")
        source = (f">>> {first}", *(f"... {line}".rstrip() for line in rest))
        steps.append(Step(source, example.source, tuple(example.want.rstrip("\n").split("\n")) if example.want else ()))
    return steps


class Session:
    """What the commands of one page share: a scratch folder with the recordings, the last exit code, variables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = 0
        self.variables: dict[str, object] = {"__name__": "__main__"}
        (folder / "sample_traces").symlink_to(SAMPLES)
        (folder / "train.log").write_text(_LOG)

    def stand_ins(self) -> None:
        """Recordings for commands that name some of the reader's own."""
        runs = self.folder / "runs"
        runs.mkdir(exist_ok=True)
        for rank in range(2):
            link = runs / f"rank{rank}.pickle.xz"
            if not link.exists():
                link.symlink_to(ROOT / TINY)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[io.TextIOWrapper]:
        """Both output streams in one text, in a folder of its own, on a terminal of a known width without colours."""
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        before, known = Path.cwd(), dict(os.environ)
        os.environ.update(COLUMNS="100", NO_COLOR="1", MEMTRACE_NO_INDEX="1")
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                yield out
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(known)

    def run(self, command: str) -> list[str]:
        """The lines that a command prints. Besides ``memtrace`` it may be ``echo $?`` or ``cat FILE``."""
        words = shlex.split(command, comments=True)
        if words == ["echo", "$?"]:
            return [str(self.code)]
        if words[0] == "cat" and len(words) == 2:
            return (self.folder / words[1]).read_text().rstrip("\n").split("\n")
        if words[0] != "memtrace":
            raise ValueError(f"the documentation's tests can't run {words[0]!r}")
        target = None
        if ">" in words:
            target = self.folder / words[words.index(">") + 1]
            words = words[: words.index(">")]
        with self._inside() as out, shared_recordings():
            self.code = self._main(words[1:])
        text = out.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
        if target is not None:
            target.write_text(text)
            return []
        return [self._portable(line) for line in text.rstrip("\n").split("\n")] if text else []

    def evaluate(self, source: str) -> list[str]:
        """The lines that a statement prints, or the last line of its traceback."""
        with self._inside() as out:
            try:
                exec(compile(source, "<page>", "single"), self.variables)
            except Exception as error:
                out.write("Traceback (most recent call last):\n  …\n")
                out.write("".join(traceback.format_exception_only(error)))
        text = out.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
        return [self._portable(line) for line in text.rstrip("\n").split("\n")] if text else []

    def _main(self, words: list[str]) -> int:
        try:
            return main(words)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1

    def _portable(self, line: str) -> str:
        """A printed line without this machine's folders."""
        return line.replace(f"{ROOT}/", "").replace(f"{self.folder}/", "")


def differences(block: Block, session: Session) -> list[tuple[Step, list[str]]]:
    """The steps of a block whose output is not what the page shows, with the real output."""
    wrong = []
    for step, lines in _executed(block, session):
        if not fits(step.expected, lines):
            wrong.append((step, lines))
    return wrong


def rewritten(block: Block, session: Session) -> list[str]:
    """The block's lines with the output that its commands print now."""
    result: list[str] = []
    for step, lines in _executed(block, session):
        fresh = list(step.expected) if fits(step.expected, lines) else renewed(step.expected, lines)
        while fresh and not fresh[-1]:
            fresh.pop()
        blank = [""] if step.expected and step.expected[-1] == "" else []
        result += [*step.source, *fresh, *blank]
    while result and not result[-1]:
        result.pop()
    return result


def _executed(block: Block, session: Session) -> Iterator[tuple[Step, list[str]]]:
    if block.language == "console":
        for step in console_steps(block):
            yield step, session.run(step.command)
    elif block.language == "pycon":
        for step in python_steps(block):
            yield step, session.evaluate(step.command)


# Commands that the page only mentions.


def mentioned(text: str) -> list[str]:
    """The ``memtrace`` commands in a piece of text, without what surrounds them: prompts, launchers, comments."""
    found = []
    for line in re.sub(r"\\\n\s*", "", text).split("\n"):
        for match in re.finditer(r"(?:^|[\s$(|])(?:-m )?(memtrace [^\n|;&)#]*)", line):
            command = re.split(r"\s{2,}|,\s|`|\s[·>]", match[1].strip())[0].rstrip(".:")
            if len(command.split()) > 1:
                found.append(command)
    return found


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb, as the command line builds it."""
    module = import_module(f"memtrace.cli.{verb}")
    parser = argparse.ArgumentParser(prog=f"memtrace {verb}")
    module.add_arguments(parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every option string of a parser."""
    return set(parser._option_string_actions) | {"--help", "-h"}


def complaint(command: str, whole: bool = True) -> str | None:
    """What is wrong with a command that the documentation mentions; None if the parser takes it.

    Of commands with ``…``, ``[`` or alternatives, which stand for many, and of those that are not ``whole`` (a verb
    named in a sentence), only the verb and the flags are checked.
    """
    words = command.split()[1:]
    verb = words[0]
    if verb.startswith("-"):
        return None if verb in {"--version", "--help"} else f"no such option: {verb}"
    if verb not in VERBS:
        return None if _is_file(verb) else f"no verb {verb!r}"
    parser = parser_of(verb)
    own = words[1:]
    if verb == "run":  # what follows the script is the script's own
        script = next((i for i, w in enumerate(own) if w.endswith((".py", "SCRIPT")) or w == "-m"), len(own))
        own = own[:script]
    known = flags_of(parser)
    for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", " ".join(own)):
        if flag not in known:
            return f"memtrace {verb} has no option {flag}"
    return refusal(parser, command) if whole and not is_pattern(command) else None


def refusal(parser: argparse.ArgumentParser, command: str) -> str | None:
    """The parser's message about a whole command; None if it takes it."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            parser.parse_args(shlex.split(command)[2:])
    except ValueError as error:
        return f"a shell can't read it: {error}"
    except SystemExit:
        return errors.getvalue().strip().split("\n")[-1] or "the parser refuses it"
    return None


def is_pattern(command: str) -> bool:
    """Whether a command stands for many."""
    return re.search(r"[…\[\]|]|\bOPTIONS\b", command) is not None


def _is_file(word: str) -> bool:
    return word in STAND_INS or re.search(r"\.(pickle|json)(\.\w+)?$", word) is not None


_OUTPUTS = {"-o", "--output", "--trace", "--export", "--plot", "--write"}


def runnable(command: str, session: Session) -> list[str] | None:
    """The command with stand-ins for the reader's files; None where it can't be run here."""
    if is_pattern(command) or command.split()[1] in NOT_RUN or command.split()[1] not in VERBS:
        return None
    if refusal(parser_of(command.split()[1]), command) is not None:
        return None  # a verb named in a sentence
    words = shlex.split(command)
    result = words[:2]
    for before, word in itertools.pairwise(words[1:]):
        word = STAND_INS.get(word, word)
        path = session.folder / word
        if re.search(r"\.(pickle|json|jsonl|toml)(\.\w+)?$", word) and before not in _OUTPUTS and not path.exists():
            if ".pickle" not in word:
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(ROOT / TINY)
        result.append(word)
    return result
