"""What a snapshot file holds: release, devices, events, settings, and whether the trace can be replayed exactly."""

from __future__ import annotations

import argparse

from memtrace.cli.common import add_json, print_json, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="snapshot: .pickle or .json, plain or .gz/.xz/.zst; - is stdin")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from memtrace.info import describe
    from memtrace.snapshot.load import load

    with progress("reading") as on_progress:
        snapshot = load(args.file, on_progress)
    info = describe(snapshot)
    if args.json:
        print_json(info)
        return 0
    from memtrace.export.info_text import render_info
    from memtrace.export.text import print_lines

    print_lines(render_info(info))
    return 0
