"""What a snapshot file holds: release, devices, events, settings, and whether the trace can be replayed exactly."""

from __future__ import annotations

import argparse
from typing import Any

from memtrace.cli.common import add_shared, option, print_answer, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file")
    option(parser, "--device N", "only this device (default: all that have data)", type=int)
    add_shared(parser, "no-index json")


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from memtrace.answers.info import describe
    from memtrace.cache.folder import cache_folder
    from memtrace.cache.index import open_recording
    from memtrace.render.info_text import render_info
    from memtrace.snapshot.devices import choose_device

    with progress("reading") as on_progress:
        recording = open_recording(args.file, on_progress, use_index=not args.no_index)
    snapshot = recording.snapshot
    if args.device is not None:
        device, _ = choose_device(snapshot, args.device)
        snapshot = replace(snapshot, devices=(device,))
    last = snapshot.devices[-1]
    info = describe(snapshot, lambda device: recording.timeline(device, more=device is not last))
    cache = None if args.no_index else cache_folder()
    more: dict[str, Any] = {} if cache is None else {"cache": cache}
    return print_answer(args.json, info, lambda _: render_info(info, cache), **more)
