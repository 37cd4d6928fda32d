"""What the reading verbs share: the input arguments, loading with a progress bar, JSON on stdout."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memtrace import compiled
from memtrace.units import format_bytes, json_text, printable
from memtrace.writing import check_target, whole_file

if TYPE_CHECKING:
    from memtrace.analysis import Analysis
    from memtrace.cache.index import OpenRecording
    from memtrace.history.timeline import At, Timeline
    from memtrace.render.text import Text
    from memtrace.snapshot.model import Device

_PROGRESS_AFTER_S = 1.0
_DEEPEST, _MOST_PARTS = 12, 100_000  # of what is written when a file holds values that JSON can't


# Arguments that mean the same in every verb, as :func:`option` takes them.
_SHARED: dict[str, tuple[str, str]] = {
    "file": ("file FILE", "snapshot: .pickle or .json, plain or .gz/.xz/.zst; - is stdin"),
    "device": ("--device N", "device number (default: the one that matters, and it says which)"),
    "no-index": ("--no-index", "neither use nor fill the cache of large recordings"),
    "at": (
        "--at WHEN",
        "oom, peak, end, an event, step 3, peak of step 3, +2s, an address … (default: oom, else peak)",
    ),
    "events": ("--events A:B", "only events A up to, not including, B (either may be left out)"),
    "steps": ("--steps A:B", "only steps A up to, not including, B, as report counts them"),
    "rules": ("--rules FILE.toml", "your own attribution rules (see docs/attribution.md)"),
    "json": ("--json", "one JSON object on stdout; sizes in bytes, times in µs"),
    "output": ("--output,-o FILE", "write to FILE instead of stdout (which - is, too)"),
    "force": ("--force", "overwrite an existing output file"),
}


def add_shared(parser: argparse.ArgumentParser, names: str) -> None:
    """The shared arguments with these names, in the order in which --help is to list them."""
    special: dict[str, dict[str, Any]] = {
        "device": {"type": int},
        "rules": {"action": _Rules, "default": ()},
        "output": {"type": lambda name: None if name == "-" else name},
    }
    for name in names.split():
        option(parser, *_SHARED[name], **special.get(name, {}))


class _Rules(argparse.Action):
    """The rules in a file, read before anything else, so that a mistake in them costs no time."""

    def __call__(self, parser: object, args: argparse.Namespace, path: Any, option: str | None = None) -> None:
        from memtrace.attribution.user_rules import read_rules

        args.rules, args.rules_file = read_rules(path), path


def option(parser: argparse._ActionsContainer, form: str, text: str, **how: Any) -> None:
    """An argument, written as --help shows it: ``--search`` is a switch, ``--capacity SIZE`` takes a value,
    ``--lengths N,N,…`` a list, ``--conf SETTINGS…`` may be given again. ``how`` is what argparse takes besides."""
    flags, _, metavar = form.partition(" ")
    if metavar.endswith("…") and not metavar.endswith(",…"):
        how = {"action": "append", "default": [], **how}
        metavar = metavar.removesuffix("…")
    how |= {"metavar": metavar} if metavar else {} if how else {"action": "store_true"}
    parser.add_argument(*flags.split(","), help=text, **how)


def add_format(parser: argparse.ArgumentParser, *formats: str, default: str, text: str = "") -> None:
    """--format, and --json for one of them; see :func:`format_of`."""
    option(parser, "--format", f"default: as --output's name ends, else {text or default}", choices=formats)
    parser.set_defaults(formats=formats, usual_format=default)
    option(parser, "--json", "the same as --format json", dest="format", action="store_const", const="json")


def format_of(args: argparse.Namespace) -> str:
    """The format that --format names, else the ending of --output's name; the verb's usual one where neither does."""
    ending = Path(args.output or "").suffix.removeprefix(".").lower()
    return str(args.format or (ending if ending in args.formats else args.usual_format))


def whole_number(text: str) -> int:
    """An argparse type: 0, 1, 2 …"""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a whole number, 0 or more, not {text!r}")
    return int(text)


def settings(text: str) -> str:
    """An argparse type: allocator settings, also as advice and shells write them, with the variable's name."""
    name, _, value = text.partition("=")
    return value if name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") else text


def print_json(answer: Any, **more: Any) -> int:
    """One JSON object and a newline on stdout: an answer, and ``more`` keys; returns the exit code 0."""
    sys.stdout.buffer.write(to_json(answer, **more))
    sys.stdout.buffer.flush()
    return 0


def print_text(render: Callable[[int], Iterable[Text | str]], widest: int = 1 << 16) -> int:
    """What ``render`` has for the width of the terminal, at most ``widest`` columns; returns the exit code 0."""
    from memtrace.render.text import print_lines, width

    print_lines(render(min(width(), widest)))
    return 0


def print_answer(
    as_json: bool, answer: Any, render: Callable[[int], Iterable[Text | str]], widest: int = 1 << 16, **more: Any
) -> int:
    """An answer as text, or as JSON with ``more`` keys. See :func:`print_text` and :func:`print_json`."""
    return print_json(answer, **more) if as_json else print_text(render, widest)


def to_json(answer: Any, **more: Any) -> bytes:
    """One JSON object and a newline; what a terminal might obey is written as escapes."""
    from dataclasses import fields

    import orjson

    if more:
        answer = {field.name: getattr(answer, field.name) for field in fields(answer)} | more
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    try:
        written = orjson.dumps(answer, option=options)
    except (orjson.JSONEncodeError, RecursionError):  # odd values out of a file's own settings
        written = orjson.dumps(_plain(answer, 0), option=options)
    return written if written.isascii() else json_text(written.decode()).encode()


def _plain(value: Any, depth: int) -> Any:
    """``value`` in what JSON can hold: odd numbers and types as text, nothing deeper than a settings file would be."""
    from dataclasses import fields, is_dataclass

    if depth > _DEEPEST:
        return "…"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), depth + 1) for field in fields(value)}
    if isinstance(value, dict):
        return {_plain(str(key)[:200], 0): _plain(part, depth + 1) for key, part in list(value.items())[:_MOST_PARTS]}
    if isinstance(value, (list, tuple)):
        return [_plain(part, depth + 1) for part in value[:_MOST_PARTS]]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    return f"a {type(value).__name__}"


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None] | None]:
    """A progress callback (share 0 to 1) that draws a bar on stderr once work has taken longer than a second.

    Yields None where stderr is not a terminal.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    start = time.monotonic()
    drawn = False

    def show(share: float) -> None:
        nonlocal drawn
        if time.monotonic() - start > _PROGRESS_AFTER_S:
            filled = round(30 * share)
            print(f"\r{label} {'█' * filled}{'░' * (30 - filled)} {share:4.0%}", end="", file=sys.stderr, flush=True)
            drawn = True

    try:
        yield show
    finally:
        if drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def usual_signals(and_path: bool = False) -> None:
    """For verbs with a terminal interface: SIGTERM as the interpreter has it; imports, too, for the user's program."""
    entry = sys.modules.get("memtrace.entry")
    if entry is not None:
        entry.usual_signals()
        if and_path:
            entry.usual_path()


def open_timeline(args: argparse.Namespace) -> Timeline:
    """Load FILE, choose the device, replay it. Says on stderr which device was chosen where there was a choice."""
    recording, device = _open(args)
    with progress("replaying") as on_progress:
        return recording.timeline(device, on_progress)


def _open(args: argparse.Namespace) -> tuple[OpenRecording, Device]:
    from memtrace.cache.index import open_recording
    from memtrace.snapshot.devices import choose_device

    with progress("reading") as on_progress:
        recording = open_recording(args.file, on_progress, use_index=not getattr(args, "no_index", False))
    if recording.is_large and "memtrace.entry" in sys.modules:  # the process is a command's, not somebody's notebook
        allocator = compiled.part("allocator")
        if allocator is not None:
            allocator.reuse_freed_memory()
    device, why = choose_device(recording.snapshot, args.device)
    if why is not None:
        print(f"memtrace: {why}", file=sys.stderr)
    return recording, device


def open_analysis(args: argparse.Namespace, **instead: Any) -> tuple[Analysis, At]:
    """:func:`open_timeline`, attributed by --rules where given, within --events or --steps, and the event of --at.

    ``instead``: other values of arguments, ``file`` say.
    """
    args = argparse.Namespace(**{**vars(args), **instead})
    events, steps, rules = getattr(args, "events", None), getattr(args, "steps", None), getattr(args, "rules", ())
    if events is not None or steps is not None:
        from memtrace.ranges import check_ranges

        check_ranges(events, steps)
    recording, device = _open(args)
    with progress("replaying") as on_progress:
        analysis = recording.analysis(device, rules, on_progress).within(events, steps)
    return analysis, analysis.at(getattr(args, "at", None))


def say_written(path: str | Path) -> None:
    """On stderr: ``memtrace: written out.html (657.3 KiB)``."""
    size = format_bytes(Path(path).stat().st_size)
    print(f"memtrace: written {printable(str(path))} ({size})", file=sys.stderr)


def floods_terminal(args: argparse.Namespace) -> bool:
    """Whether what is made for other programs would go to a person's terminal."""
    return args.output is None and sys.stdout.isatty()


@contextmanager
def output_stream(args: argparse.Namespace, tell: bool = True) -> Iterator[IO[bytes]]:
    """Binary stdout, or --output written whole or not at all; with ``tell``, stderr says what was written."""
    if args.output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(args.output)
    check_target(target, getattr(args, "force", False), getattr(args, "file", None))
    with whole_file(target, getattr(args, "file", None)) as out:
        yield out
    if tell and target.is_file():
        say_written(args.output)
