"""Watch a running program's GPU memory: memtrace live [PID | SOCKET], started with memtrace run --live.

Without a name it shows the one program there is, or a list to choose from. --once prints it and ends; --json prints one
JSON object a refresh. --replay FILE plays a recording as if it ran.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.cli.common import add_shared, option, print_json, usual_signals, whole_number
from memtrace.errors import NoAnswerError, SnapshotError, UsageError
from memtrace.units import format_bytes, parse_capacity, printable

if TYPE_CHECKING:
    from memtrace.live.state import LiveView
    from memtrace.live.watch import Watched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    which = "which program (default: the only one, or a list); a file is played as --replay does"
    add("program PID|SOCKET", which, nargs="?")
    add_shared(parser, "json device")
    add("--once", "one look, and end")
    add("--ranks", "all programs of this user's, one row each, the odd one marked")
    add("--replay FILE", "play a recording or a .jsonl step log as if it ran")
    add("--speed N", "steps a second of --replay (default 2)", type=float, default=2.0)
    add("--limit SIZE", "the capacity to judge a replay by (default: what the recording says)")
    add("--forecast FILE", "what memtrace forecast --json printed: its step of death is watched for")
    add("--every SECONDS", "between two refreshes (default 1)", type=float, default=1.0)
    add("--count N", "so many refreshes, then end (0: no end)", type=whole_number, default=0)
    add("--metrics KIND:WHERE…", "send the steps' numbers on: tensorboard:DIR, prometheus:FILE, wandb, mlflow, otel")


def run(args: argparse.Namespace) -> int:
    if not 0.05 <= args.every <= 3600 or not 0.05 <= args.speed <= 1e4:
        raise UsageError("--every takes 0.05 to 3600 seconds, --speed 0.05 to 10000 steps a second")
    usual_signals()
    if args.ranks:
        if args.replay is not None:
            raise UsageError("--ranks shows what runs; recordings of ranks are compared by memtrace ranks")
        return _ranks(args)
    watched = _open(args)
    try:
        if args.json or args.once or args.metrics or not sys.stdout.isatty():
            return _print(args, watched)
        from memtrace_tui.live import LiveApp

        from memtrace.cli.browse import run_app

        poll_s = 1 / args.speed if args.replay else 0.2
        return run_app(LiveApp(watched, args.every, poll_s, _forecast_step(args.forecast)))
    finally:
        watched.close()


def _open(args: argparse.Namespace) -> Watched:
    program = args.program or ""
    if args.replay is None and not program.isdigit() and os.path.isfile(program):  # noqa: PTH113  # of any length
        args.replay = args.program
    if args.replay is not None:
        return _replay(args)
    from memtrace.live.watch import Watch, find

    places = find(args.program)
    return Watch(places[0] if len(places) == 1 else _choose(places, args), looks=not args.metrics or args.json)


def _replay(args: argparse.Namespace) -> Watched:
    from memtrace.live.replay import PlayedRun

    capacity = parse_capacity(args.limit) if args.limit else None
    if Path(args.replay).suffix == ".jsonl":
        return PlayedRun(None, Path(args.replay), capacity, "the --limit given")
    from memtrace.cli.common import open_analysis

    analysis, what = open_analysis(args, file=args.replay)[0], "the --limit given"
    if capacity is None and (ooms := analysis.timeline.oom_events):
        from memtrace.explain.snapshot_facts import verdict_at

        refused = verdict_at(analysis, ooms[-1])[1]
        if refused is not None and refused.capacity is not None:
            capacity = refused.capacity.low_bytes
            kind = "the limit" if refused.capacity.kind == "limit" else "the card"
            what = f"{'' if refused.capacity.is_exact else 'about; '}{kind}, by the refused request"
    return PlayedRun(analysis, None, capacity, what)


def _choose(places: Sequence[Path], args: argparse.Namespace) -> Path:
    """Ask which of several programs, where there is somebody to ask."""
    from memtrace.live.watch import Watch

    for number, place in enumerate(places, 1):
        try:
            about, name = Watch(place, looks=False).state.about, place.stem
        except NoAnswerError as error:
            print(f"  {number}  {place.stem}  {error}", file=sys.stderr)
            continue
        argv = " ".join(about["argv"])
        print(f"  {number}  {name}  rank {about.get('rank')}  {printable(argv)[:60]}", file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or args.json:
        raise UsageError("several programs run; name one by its pid, or take --ranks for all")
    print("which one? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if answer.isdigit() and 1 <= int(answer) <= len(places):
        return places[int(answer) - 1]
    raise UsageError(f"there is no program {answer[:20]!r} in the list")


def _print(args: argparse.Namespace, watched: Watched) -> int:
    from memtrace.live.alarms import SOON_STEPS
    from memtrace.live.metrics import open_sink
    from memtrace.render.live_text import live_text

    dies = _forecast_step(args.forecast)
    width = min(shutil.get_terminal_size().columns, 120)
    shown, written = 0, -1
    with ExitStack() as sinks:
        opened = [sinks.enter_context(closing(open_sink(spec))) for spec in args.metrics]
        while True:
            goes_on = _gather(watched, args, first=not shown)
            view = watched.state.view()
            if args.json:
                print_json(view.as_json() | {"predicted_oom_step": dies})
            elif not args.metrics or args.once:
                print(live_text(view, width), flush=True)
                if dies is not None:
                    near = "ALARM: " if view.step <= dies <= view.step + SOON_STEPS else ""
                    print(f" {near}by the forecast of its lengths the run dies in step {dies}")
            rows = [row for row in watched.state.rows if row["step"] > written]
            written = rows[-1]["step"] if rows else written
            for sink in opened:
                sink.write(rows, dict(view.now) | {"device": view.about.get("device") or 0})
            shown += 1
            if not goes_on or args.once or shown == args.count:
                return 0


def _gather(watched: Watched, args: argparse.Namespace, first: bool) -> bool:
    """Listen until the next refresh is due; the first one waits for the counters and, where it can be, the blocks."""
    if args.replay is not None:
        goes_on = watched.poll(0 if args.once else 1 / args.speed)
        while goes_on and args.once:
            goes_on = watched.poll(0)
        return goes_on
    from memtrace.live.watch import Watch

    if first and args.once and isinstance(watched, Watch):
        watched.looks = False
        watched.ask_now("now")
    begun = time.monotonic()
    while True:
        passed = time.monotonic() - begun
        waits = first and (not watched.state.now or (args.once and watched.state.report is None))
        if passed >= (max(args.every, 5.0) if waits else args.every):
            return True
        if first and args.once and not waits:
            return True
        if not watched.poll(min(0.2, args.every)):
            return False


def _forecast_step(file: str | None) -> int | None:
    """The step in which a forecast dies, None where it survives. Raises UsageError for what is no forecast."""
    if file is None:
        return None
    import json

    from memtrace.answers.gate import LARGEST_BYTES
    from memtrace.snapshot.container import read_at_most

    try:
        oom = json.loads(read_at_most(Path(file), LARGEST_BYTES, "forecast"))["oom"]
        return None if oom is None else int(oom["step"])
    except (SnapshotError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"{file}: not what memtrace forecast --json prints ({type(error).__name__})") from None


def _ranks(args: argparse.Namespace) -> int:
    from memtrace.live.watch import Watch, find
    from memtrace.ranks.odd import Standing, find_odd

    shown = 0
    while True:
        views: list[LiveView] = []
        for place in find(args.program):
            try:
                watch = Watch(place, looks=False)
            except NoAnswerError as error:
                print(f"memtrace: {printable(str(error))}", file=sys.stderr)
                continue
            begun = time.monotonic()
            while not watch.state.now and time.monotonic() - begun < 3 and watch.poll(0.2):
                continue
            views.append(watch.state.view())
            watch.close()
        views.sort(key=lambda view: (view.about["rank"] or 0, view.pid))
        programs: dict[tuple[object, ...], list[Standing]] = {}  # ranks are compared with those of their own program
        for view in views:
            program = (*view.about["argv"][:1], view.about["world_size"])
            programs.setdefault(program, []).append(_standing(view, Standing))
        found = [odd for ranks in programs.values() if (odd := find_odd(ranks, "adapters"))]  # no categories, these
        odd = max(found, key=lambda each: abs(each.excess_bytes), default=None)
        marked = next((view.pid for view in views if odd is not None and odd.file == view.name), None)
        if args.json:
            whom = None if odd is None else {"pid": marked, "why": odd.why}
            print_json({"programs": [view.as_json() for view in views], "odd": whom})
        else:
            print(f"{'':2}{'rank':>4} {'pid':>8} {'step':>7} {'allocated':>11} {'reserved':>11} {'peak':>11}  program")
            for view in views:
                sizes = (view.now.get(f"{name}_bytes", 0) for name in ("allocated", "reserved", "peak_allocated"))
                mark = "*" if view.pid == marked else " "
                texts = " ".join(f"{format_bytes(size):>11}" for size in sizes)
                argv = printable(" ".join(view.about["argv"]))[:40]
                print(f"{mark:2}{view.about['rank'] or 0:>4} {view.pid:>8} {view.step:>7} {texts}  {argv}")
            for line in odd.why if odd is not None else ():
                print(f"* pid {marked}: {printable(line)}")
        sys.stdout.flush()
        shown += 1
        if args.once or shown == args.count:
            return 0
        time.sleep(args.every)


def _standing(view: LiveView, make: Any) -> Any:
    """For the comparison of ranks: in use at the peak, and reserved beside it."""
    peak, reserved = (int(view.now.get(f"peak_{name}_bytes", 0)) for name in ("allocated", "reserved"))
    parts = {"allocated": peak, "fragmentation": max(reserved - peak, 0)}
    return make(view.about["rank"] or 0, view.name, -1, peak, reserved, None, parts)
