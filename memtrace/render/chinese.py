"""OOM help in Chinese, beside the English: the verdict, what was found, what to change; texts in ``chinese.json``.

Sentences with the recording's own numbers stay English; figures, settings and finding ids are the same in both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memtrace.explain.answer import Explanation
from memtrace.units import format_bytes

_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_name("chinese.json").read_bytes())
VERDICTS: dict[str, list[str]] = _TEXTS["verdicts"]  # verdict -> its name, what it says
CONFIDENCE: dict[str, str] = _TEXTS["confidence"]
BASIS: dict[str, str] = _TEXTS["basis"]
PHASES: dict[str, str] = _TEXTS["phases"]
FINDINGS: dict[str, list[str]] = _TEXTS["findings"]  # finding -> what it is, what is usually done about it


def wants_chinese(lang: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``--lang``, or else the environment as programs read it, asks for Chinese."""
    if lang is None:
        lang = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return lang.lower().startswith("zh")


def render_chinese(answer: Explanation, most: int | None = 3) -> Iterator[str]:
    """The verdict, and of at most ``most`` findings what they are and what is usually done about such a thing."""
    name, meaning = VERDICTS[answer.verdict]
    yield f"{name}（{CONFIDENCE[answer.confidence]}）：{meaning}{_when(answer)}"
    for finding in answer.findings[:most]:
        title, change = FINDINGS[finding.id]
        size = "" if finding.bytes is None else f"，{format_bytes(finding.bytes)}{'/步' if finding.per_step else ''}"
        yield f"  {title}（{finding.id}{size}）"
        for best in finding.advice[:1]:  # what fits this very run stands in the English text
            saves = best.saves_bytes
            saving = "" if saves is None else f"（英文中的改法可省 {format_bytes(saves)}，{BASIS[best.basis]}）"
            yield f"    → 一般做法：{change}{saving}"


def _when(answer: Explanation) -> str:
    if answer.when is None:
        return ""
    step = "" if answer.when.step is None else f"第 {answer.when.step} 步"
    parts = "，".join(filter(None, [PHASES[answer.when.phase], step]))
    return f" · {parts}" if parts else ""
