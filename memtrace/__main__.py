"""``python -m memtrace``."""

import sys

from memtrace.entry import main

if __name__ == "__main__":
    sys.exit(main())
