"""A running program for people: lines of (text, role) spans, the same in print and in the terminal view."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap
from typing import Any

from memtrace.attribution.categories import category_name, category_words
from memtrace.live.state import LiveView
from memtrace.render.words import bar, clip
from memtrace.units import counted, format_bytes, format_count, format_delta, printable

Spans = list[tuple[str, str]]
_BARS = "▁▂▃▄▅▆▇█"
_MOMENTS = {"step": "after step", "backward": "before the backward pass of step", "peak": "at the peak of step"}


def sparkline(values: Sequence[int], width: int) -> str:
    """The highest value of each of ``width`` stretches, from the lowest of all to the highest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    tops = [max(values[low:high]) for low, high in pairwise(edges)]
    low, span = min(tops), max(max(tops) - min(tops), 1)
    return "".join(_BARS[min((top - low) * len(_BARS) // span, len(_BARS) - 1)] for top in tops)


def live_lines(view: LiveView, width: int) -> list[Spans]:
    """Everything at a glance; an empty list of spans is an empty line."""
    lines = [_head(view, width), []]
    names = ("allocated", "reserved", "peak")
    for position, name in enumerate(names, 1):
        values = [row[position] for row in view.curves]
        now = view.now.get(f"{'peak_allocated' if name == 'peak' else name}_bytes") or (values[-1] if values else 0)
        between = f"  {format_bytes(min(values))} to {format_bytes(max(values))}" if values else ""
        room = max(width - 24 - len(between), 10)
        lines.append([(f" {name:<10}", "dim"), (f"{format_bytes(now):>11}  ", "strong"),
                      (sparkline(values, room), "accent"), (between, "dim")])  # fmt: skip
    lines += [_limits(view), _rate(view), []]
    lines += _categories(view, width)
    lines += [_pieces(view), *_phases(view), *_growing(view, width), *_outside(view)]
    return [*lines, *([[]] if view.alarms else []), *_alarms(view, width)]


def live_text(view: LiveView, width: int) -> str:
    """The same as plain text."""
    return "\n".join("".join(text for text, _ in spans).rstrip() for spans in live_lines(view, width))


def _head(view: LiveView, width: int) -> Spans:
    about = view.about
    rank = f"  rank {about['rank']} of {about['world_size']}" if (about.get("world_size") or 1) > 1 else ""
    program = " ".join(map(str, about.get("argv") or [view.name]))
    died = any(alarm.get("id") == "oom" for alarm in view.alarms)
    state = ("out of memory" if died else "ended") if view.ended else f"step {format_count(view.step)}  {view.phase}"
    stacks = "stacks on" if view.now.get("stacks") else "stacks off"
    head = f" {view.pid or ''}{rank}  {about.get('gpu') or 'GPU'}  "
    return [(head, "dim"), (clip(program, max(width - len(head) - 40, 20)), "strong"), (f"  {state}", "accent"),
            (f"  {stacks}", "dim")]  # fmt: skip


def _limits(view: LiveView) -> Spans:
    capacity = view.now.get("capacity_bytes")
    if capacity is None or view.headroom_bytes is None:
        return [(" headroom   unknown: no limit is known", "dim")]
    what = printable(str(view.about.get("capacity_is") or ""))[:60] or (
        "limit" if view.now.get("limit_bytes") == capacity else "what the device has for it"
    )
    role = "bad" if view.headroom_bytes < capacity / 20 else "text"
    return [(" headroom  ", "dim"), (f"{format_bytes(view.headroom_bytes):>11}", role),
            (f"  of {format_bytes(capacity)} ({what})", "dim")]  # fmt: skip


def _rate(view: LiveView) -> Spans:
    spans: Spans = [(" a step    ", "dim"), (f"{format_delta(view.rate_bytes_per_step):>11}", "text")]
    if view.seconds_per_step:
        spans.append((f"  {view.seconds_per_step:.3g} s each", "dim"))
    if view.forecast_oom_step is not None:
        left = max(view.forecast_oom_step - view.step, 0)
        time = f", {_duration(left * view.seconds_per_step)}" if view.seconds_per_step else ""
        spans.append((f"  at this rate it ends in step {format_count(view.forecast_oom_step)} "
                      f"({counted(left, 'step')}{time})", "bad"))  # fmt: skip
    return spans


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


def _categories(view: LiveView, width: int) -> list[Spans]:
    report = view.report
    if report is None:
        return [[(" categories: the blocks were not looked at yet", "dim")]]
    when = _MOMENTS.get(view.looked_at, "in step")
    lines: list[Spans] = [[(f" {when} {format_count(view.looked_step)}: {format_bytes(report.reserved_bytes)} reserved",
                            "dim")]]  # fmt: skip
    top = max(report.reserved_bytes, 1)
    for name, size in report.categories.items():
        if size or name != "unattributed":
            called = category_words(name, report.lora["meaning"])
            lines.append([(f"  {called:<14}{format_bytes(size):>11}  ", "text"),
                          (bar(size / top, max(width - 30, 10)), f"cat:{name}")])  # fmt: skip
    return lines


def _pieces(view: LiveView) -> Spans:
    found = view.report.fragmentation if view.report is not None else None
    if found is not None:
        parts = {"holes": found.holes_bytes, "cached": found.cached_segments_bytes,
                 "largest free block": found.largest_free_block_bytes}  # fmt: skip
    elif "active_bytes" in view.now:
        holes = view.now.get("inactive_split_bytes", 0)
        cached = view.now.get("reserved_bytes", 0) - view.now["active_bytes"] - holes
        parts = {"holes": holes, "cached": cached}
    else:
        return []
    return [
        (" free then  " if found is not None else " free       ", "dim"),
        ("  ".join(f"{name} {format_bytes(size)}" for name, size in parts.items()), "text"),
    ]


def _phases(view: LiveView) -> list[Spans]:
    phases = [each for each in view.now.get("phases", ()) if type(each.get("peak_bytes")) is int]
    if not phases:
        return []
    word = "peak" if view.about.get("peaks_are_of_steps") else "highest so far"
    texts = [f"{printable(str(each.get('name')))[:20]} {format_bytes(each['peak_bytes'])}" for each in phases[:8]]
    return [[(f" {word} by phase  ", "dim"), ("  ".join(texts), "text")]]


def _growing(view: LiveView, width: int) -> list[Spans]:
    lines: list[Spans] = [[(" grows", "dim")]] if view.growing else []
    meaning = view.report.lora["meaning"] if view.report is not None else "adapters"
    for site in view.growing[:5]:
        purpose = category_name(f"{site.category}/{site.subcategory}", meaning)
        text = f"  {format_delta(round(site.per_step_bytes)):>11} a step  {purpose}  "
        lines.append(
            [(text, "text"), (clip(printable(site.frame or "no stack"), max(width - len(text), 10)), "accent")]
        )
    return lines


def _outside(view: LiveView) -> list[Spans]:
    now = view.now
    if not now.get("device_total_bytes") or "device_free_bytes" not in now:
        return []
    used = now["device_total_bytes"] - now["device_free_bytes"] - now.get("reserved_bytes", 0)
    who: Sequence[Any] = view.outside[:4]
    names = "".join(f"  {each['pid']} {printable(each['name'])[-24:]} {format_bytes(each['bytes'])}" for each in who)
    return [[(" outside    ", "dim"), (f"{format_bytes(max(used, 0))} of the device are not this allocator's", "text"),
             (names, "dim")]]  # fmt: skip


def _alarms(view: LiveView, width: int) -> list[Spans]:
    texts = [f"! {printable(str(each.get('id')))}: {printable(str(each.get('line')))}" for each in view.alarms[:8]]
    lines = [line for text in texts for line in wrap(text, max(width, 20), initial_indent=" ", subsequent_indent="   ")]
    return [[(line, "bad")] for line in lines]
