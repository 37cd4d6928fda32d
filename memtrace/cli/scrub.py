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

from memtrace.cli.common import add_shared, option, output_stream, print_json, print_text, progress
from memtrace.errors import SnapshotError, UsageError
from memtrace.writing import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file")
    option(parser, "--output,-o OUT", "the scrubbed snapshot, a pickle; OUT.gz, OUT.xz and OUT.zst are packed")
    option(parser, "--functions", "replace the names of the project's functions, too")
    option(parser, "--keep-names", "keep the base names of project files (train.py)")
    hide = "also replace files, packages and functions whose name holds WORD; can be given again"
    option(parser, "--hide WORD…", hide)
    option(parser, "--check", "write nothing; list what would still be recognisable")
    add_shared(parser, "force json")


def run(args: argparse.Namespace) -> int:
    if args.check == (args.output is not None):
        raise UsageError("give either --output OUT or --check")
    if args.output is not None:
        if args.output.lower().endswith(".json"):
            raise UsageError(f"{args.output}: the scrubbed snapshot is written as a pickle, which every viewer opens")
        check_target(Path(args.output), args.force, args.file)
    from memtrace.export.cut import read_recording, write_snapshot
    from memtrace.render.scrub_text import render_kept, render_scrub
    from memtrace.scrub.document import scrub
    from memtrace.scrub.hiding import ScrubOptions
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
        with output_stream(args, tell=False) as out, _packer(out, Path(args.output).suffix.lower()) as packed:
            write_snapshot(answer.snapshot, packed)
        size_bytes = Path(args.output).stat().st_size
    if args.json:
        answered = {"file": source, "output": args.output, "output_bytes": size_bytes}
        return print_json({**answered, "removed": answer.removed, "kept": answer.kept})
    if size_bytes is None:
        return print_text(lambda _: render_kept(answer.kept))
    return print_text(lambda _: render_scrub(source, args.output, size_bytes, answer))


def _packer(out: IO[bytes], suffix: str) -> AbstractContextManager[Any]:
    """``out``, packed if the name says so."""
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
