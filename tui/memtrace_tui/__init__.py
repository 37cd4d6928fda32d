"""The terminal browser: ``memtrace browse``. ``provider`` and ``data`` know nothing of Textual; the rest draws."""
