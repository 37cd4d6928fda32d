"""The memory of a run from the real Transformers/PEFT/bitsandbytes code on tensors without data; no GPU is needed.

Works for any causal language model that Transformers can build, also where `memtrace estimate` has no formulas. Takes
the same options, some seconds, and the extra packages of torch-memtrace[capture]; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from memtrace.cli.common import add_shared, say_written
from memtrace.cli.estimate import add_setup, card_from, compared, options_from, show
from memtrace.writing import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    add_shared(parser, "json")
    parser.add_argument("--against", metavar="FILE", help="compare with a recording, by category")
    parser.add_argument("--trace", metavar="OUT.pickle", help="write the dry run as a snapshot with real stacks")
    add_shared(parser, "force")


def run(args: argparse.Namespace) -> int:
    from memtrace.errors import MissingDependencyError
    from memtrace.estimate.estimate import estimate

    if args.trace is not None:
        check_target(Path(args.trace), args.force, args.against, args.model)
    options = options_from(args)
    logging.disable(logging.WARNING)  # what libraries say about this host means nothing here
    try:
        from memtrace.estimate.dryrun.build import read_architecture
        from memtrace.estimate.dryrun.source import DryRunSource, snapshot
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            f"a dry run needs PyTorch, Transformers and PEFT ({error})", "capture"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    source = DryRunSource(*read_architecture(args.model))
    found = estimate(source, options, *card_from(args))
    against = compared(found, args.against)
    if args.trace is not None:
        from memtrace.estimate.predicted import write_document

        write_document(snapshot(found, source), Path(args.trace))
        say_written(args.trace)
    show(args, found, (), against)
    return 0
