"""What the browser remembers between runs, in ``$XDG_CONFIG_HOME/memtrace/browser.json``. Failing is never an error."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from memtrace.writing import draft

SERVED = "MEMTRACE_SERVED"


def is_served() -> bool:
    """Whether this process is what the visitor of a web page drives: it writes and opens no file then."""
    return bool(os.environ.get(SERVED))


@dataclass(slots=True)
class Settings:
    """Choices that last. ``view`` is the screen last used; all others are what their keys toggle."""

    theme: str = "memtrace-dark"
    coloring: str = "category"
    segment_sort: str = "address"
    axis: str = "event"
    group: str = "none"
    fold: bool = True
    inverted: bool = False

    @classmethod
    def load(cls, path: Path | None = None) -> Settings:
        """The remembered choices; what is missing, unknown or of the wrong type takes its default."""
        settings = cls()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stored = json.loads((path or config_path()).read_text("utf-8")).items()
            for name, value in stored:
                if type(value) is type(getattr(settings, name, None)):
                    setattr(settings, name, value)
        return settings

    def save(self, path: Path | None = None) -> None:
        """Write them down, replacing the file in one go; a disk that refuses is ignored."""
        if is_served():
            return
        target = path or config_path()
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft(target.parent) as made:
                made.out.write((json.dumps(asdict(self), indent=1) + "\n").encode())
                made.replace(target)


def config_path() -> Path:
    """``$XDG_CONFIG_HOME/memtrace/browser.json``, ``~/.config`` where the variable isn't set."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(base) / "memtrace" / "browser.json"
