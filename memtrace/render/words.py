"""One table of words, letters and colours for the terminal, the browser, HTML and plots: categories, verdicts, moments,
streams and pools. What the JSON has as identifiers has its name for people here and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

from memtrace.answers.report import Report
from memtrace.attribution.categories import Category, category_name
from memtrace.history.timeline import At
from memtrace.units import format_count

_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Mark(NamedTuple):
    """How a category is drawn: a letter where there are no colours, a name where room is short, the terminal's own
    colour, and that of Okabe and Ito's palette, which readers who see few colours tell apart."""

    letter: str
    short: str
    ansi: str
    colour: str


MARKS: dict[str, Mark] = {
    Category.BASE_WEIGHTS: Mark("B", "base", "blue", "#0072B2"),
    Category.LORA: Mark("L", "lora", "magenta", "#CC79A7"),
    Category.ACTIVATIONS: Mark("A", "act", "green", "#009E73"),
    Category.TEMPORARY: Mark("T", "temp", "yellow", "#F0E442"),
    Category.RUNTIME: Mark("R", "run", "cyan", "#56B4E9"),
    Category.FRAGMENTATION: Mark("F", "frag", "red", "#D55E00"),
    Category.UNATTRIBUTED: Mark("?", "?", "bright_black", "#999999"),
}
STYLE: dict[str, str] = {category: mark.ansi for category, mark in MARKS.items()}
COLOUR: dict[str, str] = {category: mark.colour for category, mark in MARKS.items()}
FREE, PENDING = "·", "p"  # letters of a segment map

# verdict: its name, and what it says
_VERDICTS = {
    "fragmentation": ("fragmentation", "there was room, but in pieces"),
    "budget": ("budget", "more was needed than there is"),
    "limit": ("limit", "it would have fitted and was refused all the same"),
    "not_this_process": ("not this process", "others hold the card's memory"),
    "not_gpu_memory": ("not GPU memory", "this is not about GPU memory"),
    "not_pytorch": ("not PyTorch", "not PyTorch's allocator ran out"),
    "no_oom": ("no OOM", "nothing was refused"),
    "unknown": ("unknown", "the input does not tell why"),
}
MOMENTS = {
    "oom": "out of memory",
    "peak": "peak of allocated memory",
    "reserved-peak": "peak of reserved memory",
    "end": "end of the recording",
    "event": "state",
}


def plain_name(identifier: str) -> str:
    """``base weights`` for ``base_weights``."""
    return identifier.replace("_", " ")


def short_name(category: str, meaning: str) -> str:
    """A category where room is short."""
    return "train" if category_name(category, meaning) == "trained" else MARKS[category].short


def verdict_name(verdict: str) -> str:
    """``no OOM`` for ``no_oom``."""
    return _VERDICTS[verdict][0] if verdict in _VERDICTS else plain_name(verdict)


def verdict_meaning(verdict: str) -> str:
    """``nothing was refused`` for ``no_oom``."""
    return _VERDICTS[verdict][1] if verdict in _VERDICTS else ""


def moment_name(at: At) -> str:
    """``out of memory at event 250,595``."""
    if at.kind == "end" and at.event < 0:
        return "final state, no history recorded"
    return f"{MOMENTS[at.kind]} {f'at event {format_count(at.event)}' if at.event >= 0 else 'before the first event'}"


def moment_line(report: Report) -> str:
    """``out of memory at event 250,595, step 10, forward``."""
    step = "" if report.moment.step is None else f", step {report.moment.step}"
    return f"{moment_name(report.at)}{step}" + (f", {report.moment.phase}" if report.moment.phase != "unknown" else "")


def stream_name(stream: int) -> str:
    """``default stream``, or ``stream 0x55d0``."""
    return f"stream 0x{stream:x}" if stream else "default stream"


def pool_name(name: str) -> str:
    """A pool as answers name it (``large``, ``(1, 0) large``), with the word that says what the pair is."""
    return f"private pool {name}" if name.startswith("(") else name


def bar(share: float, width: int) -> str:
    """A bar of ``share`` (0 to 1) of ``width`` cells in eighths; anything above 0 shows at least an eighth."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if share > 0 and width > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def clip(text: str, width: int, keep_end: bool = False) -> str:
    """At most ``width`` characters, with ``…`` where something was cut (at the start with ``keep_end``)."""
    if len(text) <= width:
        return text
    if width <= 0:
        return ""
    return "…" + text[len(text) - width + 1 :] if keep_end else text[: width - 1] + "…"
