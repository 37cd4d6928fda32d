"""The memory of a run from the real Transformers/PEFT/bitsandbytes code on tensors without data; no GPU is needed.

Works for any causal language model that Transformers can build, also where `memtrace estimate` has no formulas. Takes
the same options, some seconds, and the extra packages of torch-memtrace[capture]; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, print_json, say_written
from memtrace.cli.estimate import add_setup, options_from
from memtrace.writing import check_target

if TYPE_CHECKING:
    from memtrace.estimate.against import Against
    from memtrace.estimate.dryrun.answer import DryRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    add_shared(parser, "json")
    parser.add_argument("--against", metavar="FILE", help="compare with a recording, by category")
    parser.add_argument("--trace", metavar="OUT.pickle", help="write the dry run as a snapshot with real stacks")
    add_shared(parser, "force")


def run(args: argparse.Namespace) -> int:
    from memtrace.errors import MissingDependencyError
    from memtrace.estimate.presets import gpu_preset
    from memtrace.units import parse_capacity

    if args.trace is not None:
        check_target(Path(args.trace), args.force, args.against, args.model)
    options = options_from(args)
    gpu = gpu_preset(args.gpu) if args.gpu is not None else None
    capacity = parse_capacity(args.capacity) if args.capacity is not None else None
    logging.disable(logging.WARNING)  # what libraries say about this host means nothing here
    try:
        from memtrace.estimate.dryrun.answer import as_json, examine, render, snapshot
        from memtrace.estimate.dryrun.build import read_architecture
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            f"a dry run needs PyTorch, Transformers and PEFT ({error})", "capture"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    name, architecture = read_architecture(args.model)
    found = examine(name, architecture, options, gpu, capacity)
    against = _against(found, args.against) if args.against is not None else None
    if args.trace is not None:
        from memtrace.estimate.predicted import write_document

        write_document(snapshot(found), Path(args.trace))
        say_written(args.trace)
    if args.json:
        print_json(as_json(found, against))
        return 0
    print("\n".join(render(found)))
    if against is not None:
        from memtrace.estimate.text import render_against

        print("\n".join(render_against(against)))
    return 0


def _against(found: DryRun, file: str) -> Against:
    from memtrace.cli.estimate import measured
    from memtrace.estimate.against import compare

    return compare(found, measured(file))
