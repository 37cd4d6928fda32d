"""Every ``memtrace`` command that a page mentions exists, with its flags, and runs where it can without a GPU."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from doc_commands import Session, complaint, flags_of, mentioned, parser_of, runnable
from doc_pages import blocks, name_of, spans
from doc_pages import pages as all_pages

from memtrace.cli import VERBS

SHELL = {"sh", "bash", "shell", "text", "", "console"}
# Options of other programs that the pages name: pytest's, torchrun's, Dask's, this repository's scripts'.
CAPTURE = {"torch", "transformers", "peft", "bitsandbytes"}
FOREIGN = {
    "--memtrace", "--nproc-per-node", "--nthreads", "--table", "--update", "--strict", "--version", "--help", "--found",
}  # fmt: skip


def pages() -> list[Path]:
    """Those that tell how memtrace is used today; the changelog also names what is gone."""
    return [page for page in all_pages() if page.name != "CHANGELOG.md"]


def in_blocks(page: Path) -> list[str]:
    """The distinct commands of a page's blocks, in order."""
    found = [mentioned(block.text) for block in blocks(page.read_text()) if block.language in SHELL]
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def in_sentences(page: Path) -> list[str]:
    """The distinct commands of a page's inline code, in order."""
    return list(dict.fromkeys(command for span in spans(page.read_text()) for command in mentioned(span)))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_commands_are_taken_by_the_parser(page: Path) -> None:
    wrong = {command: said for command in in_blocks(page) if (said := complaint(command))}
    wrong |= {command: said for command in in_sentences(page) if (said := complaint(command, whole=False))}
    assert not wrong


def test_flags_in_sentences_exist() -> None:
    known = FOREIGN.union(*(flags_of(parser_of(verb)) for verb in VERBS))
    wrong = [
        f"{name_of(page)}: {span}"
        for page in pages()
        for span in spans(page.read_text())
        if span.startswith("--") and re.split(r"[\s=/]", span)[0] not in known
    ]
    assert not wrong


def to_run() -> dict[Path, list[str]]:
    """The commands of every page that no earlier page has and no ``console`` block runs."""
    seen = {
        command
        for page in pages()
        for block in blocks(page.read_text())
        if block.language == "console"
        for command in mentioned(block.text)
    }
    found: dict[Path, list[str]] = {}
    for page in pages():
        own = list(dict.fromkeys(command for command in in_blocks(page) + in_sentences(page) if command not in seen))
        seen.update(own)
        if own:
            found[page] = own
    return found


TO_RUN = to_run()


@pytest.mark.parametrize("page", TO_RUN, ids=name_of)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """On bundled recordings in place of the reader's; in the order of the page, so that files made before are there.

    Exit code 1 is a gate that fails, 4 a recording that lacks what is asked about; anything else is a wrong page.
    """
    session = Session(tmp_path)
    session.stand_ins()
    wrong = []
    for command in TO_RUN[page]:
        words = runnable(command, session)
        if words is None:
            continue
        lines = session.run(shlex.join(words))
        if session.code not in (0, 1, 4):
            wrong.append("\n".join([f"{command}: exit code {session.code}", *lines[:5]]))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_python_blocks_parse_and_their_imports_exist(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memtrace":
                try:
                    module = import_module(node.module or "")
                except ModuleNotFoundError as error:  # code that needs the extra [capture], where it is not installed
                    assert error.name in CAPTURE, f"{name_of(page)}:{block.first}: {error}"
                    continue
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{name_of(page)}:{block.first}: {node.module} has no {missing}"


def test_commands_are_found_in_sentences() -> None:
    assert mentioned("$ memtrace report FILE --at peak | head") == ["memtrace report FILE --at peak"]
    assert mentioned("memtrace check FILE --write base.json    # store") == ["memtrace check FILE --write base.json"]
    assert mentioned("torchrun --nproc-per-node 2 -m memtrace run train.py") == ["memtrace run train.py"]
    assert mentioned("pip install . && memtrace demo") == ["memtrace demo"]
    assert mentioned("the memtrace key") == ["memtrace key"]  # why only code is searched


def test_wrong_commands_are_seen() -> None:
    assert "no verb" in (complaint("memtrace reprot FILE") or "")
    assert "--nope" in (complaint("memtrace report FILE --nope") or "")
    assert "--nope" in (complaint("memtrace report FILE [--nope N]") or "")
    assert complaint("memtrace estimate --model llama2-7b") is not None  # --seq-len is missing
    assert complaint("memtrace FILE") is None
    assert complaint("memtrace run --out recordings -m mypackage.train --lr 1") is None
