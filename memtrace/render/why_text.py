"""Decisions and their evidence as text."""

from __future__ import annotations

from rich.text import Text

from memtrace.answers.why import Why
from memtrace.render.words import STYLE, moment_name
from memtrace.units import format_bytes, format_count

_STACK_LINES = 6


def render_why(answer: Why) -> list[Text]:
    """What was asked, then each rule with its sentence and its largest examples."""
    lines = [Text.assemble((answer.asked, "bold"), f": {answer.meaning} ({moment_name(answer.at)})")]
    for decision in answer.decisions:
        lines.append(Text())
        lines.append(
            Text.assemble(
                (f"{format_bytes(decision.bytes)} in {format_count(decision.count)}", "bold"),
                " → ",
                (f"{decision.category}/{decision.subcategory}", STYLE[decision.category]),
                f"  [{decision.evidence}: rule {decision.rule}]",
            )
        )
        lines.append(Text(f"  {decision.why}"))
        for example in decision.examples:
            lines += _example(example)
    return lines


def _example(example: object) -> list[Text]:
    assert isinstance(example, dict)
    made = "before the recording" if example["alloc_event"] is None else f"event {example['alloc_event']}"
    if example["made_in"] not in (None, "unknown"):
        made += f" ({example['made_in']}" + (f", step {example['step']})" if example["step"] is not None else ")")
    freed = "never" if example["free_event"] is None else f"event {example['free_event']} ({example['freed_in']})"
    lines = [
        Text(
            f"  e.g. 0x{example['address']:x}, {format_bytes(example['requested_bytes'])}: made {made}, freed {freed}",
            style="dim",
        )
    ]
    stack = example["stack"]
    lines += [Text(f"       {frame}", style="dim") for frame in stack[:_STACK_LINES]]
    if len(stack) > _STACK_LINES:
        lines.append(Text(f"       … {len(stack) - _STACK_LINES} more frames", style="dim"))
    return lines
