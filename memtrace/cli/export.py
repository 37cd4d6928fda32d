"""Files that other tools open.

perfetto     Perfetto's own format: counters by category, phases (ui.perfetto.dev)
chrome       the same as Trace Event JSON (chrome://tracing, also Perfetto)
speedscope   call stacks weighted by live bytes at the event, or by all bytes with --volume (speedscope.app)
collapsed    the same as one line a stack (flamegraph.pl, inferno)
html         one self-contained page to share: budget, timeline, segment map, call sites; opens offline
snapshot     a plain PyTorch snapshot cut to --events A:B or --steps A:B, pickle protocol 4 (pytorch.org/memory_viz);
             its events and steps are counted anew, from its own beginning

Tables for DuckDB and pandas come from memtrace allocations, GraphML and DOT from memtrace graph.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path, PurePath

from memtrace.cli.common import add_shared, floods_terminal, open_analysis, option, output_stream
from memtrace.errors import UsageError
from memtrace.units import printable, printable_lines
from memtrace.writing import check_target

FORMATS = ("perfetto", "chrome", "speedscope", "collapsed", "html", "snapshot")
_BINARY = ("perfetto", "snapshot")
_POINTS = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at rules")
    option(parser, "--format,-f", "see above (default: html where --output ends in .html)", choices=FORMATS)
    option(parser, "--volume", "speedscope, collapsed: all bytes allocated, freed or not")
    option(parser, "--beside FILE2", "html: a second recording on the same page, side by side")
    samples = f"about N samples a curve, every extreme kept (default {_POINTS}; 0: every event)"
    option(parser, "--points N", f"perfetto, chrome: {samples}", type=int)
    add_shared(parser, "events steps output force")


def run(args: argparse.Namespace) -> int:
    if args.format is None and PurePath(args.output or "").suffix == ".html":
        args.format = "html"
    if args.format is None:
        raise UsageError(f"--format says for which tool: {', '.join(FORMATS)}")
    _check(args)
    if args.output is not None:
        check_target(Path(args.output), args.force, args.file)
    if args.format == "snapshot":
        return _snapshot(args)
    analysis, at = open_analysis(args)
    name = printable(PurePath(analysis.timeline.snapshot.source).name)
    with output_stream(args) as out:
        if args.format in ("perfetto", "chrome"):
            from memtrace.export.chrome import write_chrome
            from memtrace.export.perfetto import write_perfetto
            from memtrace.export.tracks import build_tracks

            tracks = build_tracks(analysis, _POINTS if args.points is None else args.points)
            (write_perfetto if args.format == "perfetto" else write_chrome)(tracks, name, out)
        elif args.format in ("speedscope", "collapsed"):
            import orjson

            from memtrace.export.flame import live_stacks, to_collapsed, to_speedscope, volume_stacks

            stacks = volume_stacks(analysis) if args.volume else live_stacks(analysis, at)
            if args.format == "collapsed":
                out.write(to_collapsed(stacks).encode("utf-8", "backslashreplace"))
            else:
                out.write(orjson.dumps(to_speedscope(stacks, name)))
        else:
            from memtrace.export.html.page import html_report

            other = open_analysis(args, file=args.beside) if args.beside else None
            out.write(printable_lines(html_report(analysis, at, other)).encode())
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that the chosen format would ignore."""
    takes = {
        "--volume": (args.volume, ("speedscope", "collapsed")),
        "--beside": (args.beside is not None, ("html",)),
        "--points": (args.points is not None, ("perfetto", "chrome")),
        "--at": (args.at is not None, ("speedscope", "collapsed", "html")),
        "--rules": (bool(args.rules), ("perfetto", "chrome", "speedscope", "collapsed", "html")),
    }
    for name, (given, formats) in takes.items():
        if given and args.format not in formats:
            raise UsageError(f"{name} goes with {', '.join(formats)}, not with {args.format}")
    if args.volume and args.at is not None:
        raise UsageError("--volume counts all that was allocated; --at has no place in it")
    if args.points is not None and args.points < 0:
        raise UsageError("--points takes a number of samples, 0 for every event")
    if args.format == "snapshot" and (args.events is None) == (args.steps is None):
        raise UsageError("a snapshot is cut by --events A:B or by --steps A:B")
    if args.format != "collapsed" and floods_terminal(args):
        what = {"html": "for a browser", **dict.fromkeys(_BINARY, "binary")}.get(args.format, "for other programs")
        raise UsageError(f"{args.format} is {what}: give --output FILE or redirect stdout")


def _snapshot(args: argparse.Namespace) -> int:
    from memtrace.analysis import analyse
    from memtrace.export.cut import cut, read_recording, write_snapshot
    from memtrace.history.timeline import build
    from memtrace.ranges import check_ranges, parse_range
    from memtrace.snapshot.devices import choose_device

    check_ranges(args.events, args.steps)
    recording = read_recording(args.file)
    device, why = choose_device(recording.snapshot, args.device)
    if why is not None:
        print(f"memtrace: {why}", file=sys.stderr)
    timeline = build(recording.snapshot, device)
    if args.events is not None and len(timeline):  # only steps have to be told from what allocations are for
        span = parse_range(args.events, 0, len(timeline), "events")
    else:
        span = analyse(timeline).within(args.events, args.steps).timeline.span
    snapshot = cut(recording, timeline, *span)
    with output_stream(args) as out:
        write_snapshot(snapshot, out)
    return 0
