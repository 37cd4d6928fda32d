"""What somebody may have meant by a settings string that PyTorch refuses; its own texts don't tell."""

from __future__ import annotations

import re
from difflib import get_close_matches

from memtrace.allocator.conf_text import SETTINGS


def conf_hint(text: str) -> str:
    """One clause that repairs the usual slips, with the separator before it; empty where none is recognised."""
    if "=" in text:
        return f"; a setting is written KEY:VALUE, as in {text.split(',')[0].replace('=', ':', 1)}"
    for item in re.sub(r"\s", "", text).split(","):
        key, colon, value = item.partition(":")
        if value.capitalize() in ("True", "False") and value not in ("True", "False"):
            return f"; write {key}:{value.capitalize()}"
        if key in SETTINGS and not colon:
            return f"; {key} needs a value after a colon"
        close = get_close_matches(key, SETTINGS, n=1) if key not in SETTINGS and "[" not in text else []
        if close:
            return f"; did you mean {close[0]}?"
    return ""
