"""Decisions and their evidence as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from memtrace.answers.why import Why
from memtrace.render.words import STYLE, category_name, moment_name
from memtrace.units import format_bytes, format_count

_STACK_LINES = 6


def render_why(answer: Why, lora_meaning: str) -> Iterator[Text]:
    """What was asked, then each rule with its sentence and its largest examples. For ``lora_meaning`` see the report's
    ``lora``."""
    yield Text.assemble((answer.asked, "bold"), f": {answer.meaning} ({moment_name(answer.at)})")
    for decision in answer.decisions:
        yield Text()
        yield Text.assemble(
            (f"{format_bytes(decision.bytes)} in {format_count(decision.count)}", "bold"),
            " → ",
            (f"{category_name(decision.category, lora_meaning)}/{decision.subcategory}", STYLE[decision.category]),
            f"  [{decision.evidence}: rule {decision.rule}]",
        )
        yield Text(f"  {decision.why}")
        for example in decision.examples:
            yield from (Text(line, style="dim") for line in _example(example))


def _example(example: Mapping[str, Any]) -> Iterator[str]:
    made = "before the recording" if example["alloc_event"] is None else f"event {example['alloc_event']}"
    if example["made_in"] not in (None, "unknown"):
        made += f" ({example['made_in']}" + (f", step {example['step']})" if example["step"] is not None else ")")
    freed = "never" if example["free_event"] is None else f"event {example['free_event']} ({example['freed_in']})"
    size = format_bytes(example["requested_bytes"])
    yield f"  e.g. 0x{example['address']:x}, {size}: made {made}, freed {freed}"
    stack = example["stack"]
    yield from (f"       {frame}" for frame in stack[:_STACK_LINES])
    if len(stack) > _STACK_LINES:
        yield f"       … {len(stack) - _STACK_LINES} more frames"
