"""Coverage-guided fuzzing of the decoders with atheris (``pip install atheris``).

    python fuzz/fuzz_snapshot.py [CORPUS] -max_total_time=3600 -rss_limit_mb=2048 -timeout=20

Without a corpus it starts from seeds of fuzz/mutate.py. Everything memtrace raises is caught in check.py; a crash, a
hang, a flood of memory or a disagreement between the decoders is what libFuzzer reports.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parent)]

with atheris.instrument_imports(include=["memtrace"]):
    from check import check
from mutate import damaged  # noqa: E402

_SEEDS = 200


def one_input(data: bytes) -> None:
    check(data, 600)


def main() -> None:
    arguments = list(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        if not any(not argument.startswith("-") for argument in arguments[1:]):
            for seed in range(_SEEDS):
                (Path(folder) / str(seed)).write_bytes(damaged(seed))
            arguments.append(folder)
        atheris.Setup(arguments, one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
