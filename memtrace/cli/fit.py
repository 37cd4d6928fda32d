"""The cheapest changes that make a run fit: memtrace fit --model M --lengths FILE --limit 22GiB [OPTIONS]

Takes what memtrace forecast takes, also --like RECORDING. Every plan is proven by a forecast and says what it costs,
with the lines to change for common trainers; then what each option of the configuration adds to the smallest one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from memtrace.cli import forecast
from memtrace.cli.common import add_shared, option, print_json, progress, say_written
from memtrace.errors import UsageError
from memtrace.writing import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    forecast.add_run(parser)
    option(parser, "--keep NAMES", "options that must stay as they are, such as length,rank,checkpointing", default="")
    option(parser, "--no-ladder", "leave out what each option adds (it takes some seconds)")
    option(parser, "--plot OUT.svg|.html", "what each option adds, as a waterfall")
    add_shared(parser, "json force")


def run(args: argparse.Namespace) -> int:
    from memtrace.estimate.fit import Search
    from memtrace.estimate.ladder import Rung, ladder
    from memtrace.estimate.moves import OPTIONS, FitRun
    from memtrace.estimate.source import ShapeSource

    keep = [name.strip() for name in args.keep.split(",") if name.strip()]
    unknown = [name for name in keep if name not in OPTIONS]
    if unknown:
        raise UsageError(f"--keep {unknown[0]}: NAMES are {', '.join(OPTIONS)}")
    if args.plot is not None:
        if Path(args.plot).suffix not in (".svg", ".html"):
            raise UsageError(f"{args.plot}: the waterfall is written as .svg or .html")
        check_target(Path(args.plot), args.force, args.model, args.like)
    asked, plan = forecast.plan_from(args)
    config, notes = forecast.limit_from(args, asked)
    with progress("looking for plans") as on_progress:
        search = Search(FitRun(plan, config), keep, on_progress)
        as_is = search.as_is
        plans = () if as_is.fits else search.plans()
    rungs: tuple[Rung, ...] = ()
    if not args.no_ladder and isinstance(plan.source, ShapeSource):
        longest = max((batch for step in plan.steps for batch in step), key=lambda batch: batch.tokens)
        options = replace(plan.options, sequence=longest.length, batch=longest.rows)
        with progress("combining options") as on_progress:
            rungs = ladder(plan.source, options, plan.gpu, on_progress)
    if args.plot is not None and rungs:
        from memtrace.export.waterfall import write_waterfall

        write_waterfall(rungs, Path(args.plot))
        say_written(args.plot)
    if args.json:
        print_json(
            {
                "fits_as_is": as_is.fits,
                "limit_bytes": config.limit_bytes,
                "peak_reserved_bytes": as_is.peak_reserved_bytes,
                "plans": [found.as_json() for found in plans],
                "ladder": rungs,
                "ladder_bytes": sum(rung.adds_bytes for rung in rungs),
                "basis": plan.source.basis,
                "assumptions": [*notes, *asked.notes],
            }
        )
        return 0
    from memtrace.render.fit_text import render_fit

    print("\n".join(render_fit(as_is, plans, rungs, [*notes, *asked.notes])))
    return 0
