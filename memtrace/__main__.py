"""``python -m memtrace``."""

import sys

from memtrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
