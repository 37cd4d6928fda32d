"""Remove personal things from a snapshot before it is shared: paths, user names, project names, the command line.

What is known to be harmless stays: numbers, files of Python and public libraries, words that all snapshots hold.
Every other word is hidden; a project's acme_loss.py becomes project/1/word_2_loss.py. The result opens in memtrace and
in PyTorch's viewers, and reports the same bytes.

Function names of the project stay unless --functions is given. --check shows, without writing, what would still be
recognisable; docs/scrub.md says what can't be promised.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from memtrace.cli.common import add_shared, output_stream, print_json, progress
from memtrace.errors import SnapshotError, UsageError
from memtrace.writing import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="snapshot: .pickle or .json, plain or .gz/.xz/.zst; - is stdin")
    parser.add_argument(
        "--output", "-o", metavar="OUT", help="the scrubbed snapshot, a pickle; OUT.gz, OUT.xz and OUT.zst are packed"
    )
    parser.add_argument("--functions", action="store_true", help="replace the names of the project's functions, too")
    parser.add_argument("--keep-names", action="store_true", help="keep the base names of project files (train.py)")
    parser.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="WORD",
        help="also replace files, packages and functions whose name holds WORD; can be given again",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; list what would still be recognisable")
    add_shared(parser, "force json")


def run(args: argparse.Namespace) -> int:
    if args.check == (args.output is not None):
        raise UsageError("give either --output OUT or --check")
    if args.output is not None:
        if args.output.lower().endswith(".json"):
            raise UsageError(f"{args.output}: the scrubbed snapshot is written as a pickle, which every viewer opens")
        check_target(Path(args.output), args.force, args.file)
    from memtrace.export.cut import read_recording
    from memtrace.render.scrub_text import render_kept, render_scrub
    from memtrace.render.text import print_lines
    from memtrace.scrub import ScrubOptions, scrub
    from memtrace.snapshot.decoder.decode import without_gc

    options = ScrubOptions(args.keep_names, args.functions, tuple(args.hide))
    with progress("reading"), without_gc():
        recording = read_recording(args.file)
        source = recording.snapshot.source
        recording = replace(recording, snapshot=replace(recording.snapshot, devices=()))  # only the raw form is needed
        try:
            answer = scrub(recording.raw, options)
        except SnapshotError as error:
            raise SnapshotError(f"{source}: {error}") from None
    size_bytes = None
    if args.output is not None:
        with output_stream(args, tell=False) as out:
            _write(answer.snapshot, out, Path(args.output).suffix.lower())
        size_bytes = Path(args.output).stat().st_size
    if args.json:
        print_json(
            {
                "file": source,
                "output": args.output,
                "output_bytes": size_bytes,
                "removed": answer.removed,
                "kept": answer.kept,
            }
        )
    elif size_bytes is None:
        print_lines(render_kept(answer.kept))
    else:
        print_lines(render_scrub(source, args.output, size_bytes, answer))
    return 0


def _write(snapshot: Any, out: IO[bytes], suffix: str) -> None:
    """Pickle, packed if the name says so."""
    from memtrace.export.cut import write_snapshot

    with _packer(out, suffix) as packed:
        write_snapshot(snapshot, packed)


def _packer(out: IO[bytes], suffix: str) -> AbstractContextManager[Any]:
    if suffix == ".gz":
        import gzip

        return gzip.GzipFile(filename="", mode="wb", fileobj=out)
    if suffix == ".xz":
        import lzma

        return lzma.LZMAFile(out, "wb")
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(level=10).stream_writer(out, closefd=False)
    return nullcontext(out)
