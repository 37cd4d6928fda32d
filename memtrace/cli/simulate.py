"""Would it have fit? Replay the recorded program under other allocator settings, limits, or with parts left out.

The first run is the recorded settings; every --conf adds one. Without --capacity the runs have the limit that the
recorded run had, as far as the file shows it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import (
    add_shared,
    open_timeline,
    option,
    print_json,
    print_text,
    progress,
    say_written,
    settings,
    whole_number,
)
from memtrace.errors import UsageError
from memtrace.writing import check_target, whole_file

if TYPE_CHECKING:
    from memtrace.answers.simulate import Answer
    from memtrace.snapshot.model import Snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index")
    option(
        parser,
        "--conf SETTINGS…",
        'as in PYTORCH_CUDA_ALLOC_CONF, such as "expandable_segments:True"; may be repeated',
        type=settings,
    )
    option(parser, "--capacity SIZE", "the most the process may reserve (24GiB), as a memory fraction sets it")
    option(parser, "--search", "try the sensible settings and rank them")
    option(parser, "--without WHAT…", "leave out a category, category/subcategory or call site; may be repeated")
    option(parser, "--scale WHAT=FACTOR…", "the same, made FACTOR times as large")
    option(parser, "--torch VERSION", "PyTorch release whose rules apply (default: the file's)")
    option(parser, "--quick", "one assumption about driver addresses, no range (several times faster)")
    option(parser, "--packing", "pack long recordings, too, with all lifetimes known (up to a minute)")
    option(parser, "--export OUT.pickle", "write a run as a snapshot that memtrace and PyTorch's viewer open")
    option(parser, "--run N", "which run to export (default: the last)", type=whole_number)
    add_shared(parser, "force rules json")


def run(args: argparse.Namespace) -> int:
    from memtrace.allocator.conf_text import ConfError
    from memtrace.answers.simulate import Question, answer, parse_edits
    from memtrace.render.simulation_text import render_simulation
    from memtrace.units import parse_capacity

    edits = parse_edits(args.without, args.scale)
    capacity = None if args.capacity is None else parse_capacity(args.capacity)
    version = None if args.torch is None else _version(args.torch)
    if args.export is not None:
        check_target(Path(args.export), args.force, args.file)
    timeline = open_timeline(args)
    attribution = None
    if edits:
        from memtrace.attribution.classify import attribute

        attribution = attribute(timeline, args.rules)
    question = Question(
        tuple(args.conf), capacity, args.search, edits, version, addresses=not args.quick, packing=args.packing
    )
    with progress("simulating") as on_progress:
        try:
            result = answer(timeline, question, attribution, on_progress)
        except ConfError as error:
            raise ConfError(f"--conf {error}") from None
    if args.export is not None:
        _export(args, timeline.snapshot, result)
    if args.json:
        return print_json(result.as_json())
    return print_text(lambda width: render_simulation(result, width), 160)


def _version(text: str) -> tuple[int, int]:
    from memtrace.allocator.config import NEWEST, OLDEST

    parts = text.split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts[:2]):
        raise UsageError(f"--torch takes a release such as 2.4, not {text!r}")
    release = int(parts[0]), int(parts[1])
    if not OLDEST <= release <= NEWEST:
        known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise UsageError(f"--torch {text}: the rules of releases {known} are known")
    return release


def _export(args: argparse.Namespace, snapshot: Snapshot, result: Answer) -> None:
    """Write one run; whole or not at all."""
    import pickle

    from memtrace.allocator.export import as_snapshot

    runs = result.simulations
    index = len(runs) - 1 if args.run is None else args.run
    if not 0 <= index < len(runs):
        raise UsageError(f"--run {args.run}: there are runs 0 to {len(runs) - 1}")
    with whole_file(Path(args.export)) as out:
        pickle.dump(as_snapshot(snapshot, runs[index]), out, protocol=4)
    say_written(args.export)
