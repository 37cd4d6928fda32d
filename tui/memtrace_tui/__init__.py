"""The terminal browser: ``memtrace browse``. ``provider`` and ``data`` know nothing of Textual; the rest draws."""

import os

# Milliseconds for which an Escape is held back, as it may begin the sequence of another key; Textual's own are 100.
os.environ.setdefault("ESCDELAY", "50")
