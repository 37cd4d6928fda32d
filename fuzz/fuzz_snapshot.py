"""Coverage-guided fuzzing of the decoders with atheris (``pip install atheris``).

    python fuzz/fuzz_snapshot.py [CORPUS] -max_total_time=3600 -rss_limit_mb=2048 -timeout=20

Without a corpus it starts from seeds of fuzz/mutate.py. Everything memtrace raises is caught in check.py; a crash, a
hang, a flood of memory or a disagreement between the decoders is what libFuzzer reports.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parent)]

with atheris.instrument_imports(include=["memtrace"]):
    from check import check
from mutate import content, damaged, structure  # noqa: E402

from memtrace.errors import SnapshotError  # noqa: E402
from memtrace.snapshot.decoder.decode import decode  # noqa: E402

_SEEDS = 200


def one_input(data: bytes) -> None:
    check(data, 600)


def mutated(data: bytes, max_bytes: int, seed: int) -> bytes:
    """libFuzzer's own mutation, or one of mutate.py: of bytes seldom anything is left that gets past the decoders."""
    rng = random.Random(seed)
    made = b""
    if rng.random() < 0.3:
        try:
            raw = decode(io.BytesIO(data), data[:4096], "x")
            if isinstance(raw, dict):
                structure(raw, rng)
                made = pickle.dumps(raw, 4)
        except (SnapshotError, RecursionError):
            pass
    elif data and rng.random() < 0.3:
        made = bytes(content(bytearray(data), rng))
    return made if 0 < len(made) <= max_bytes else atheris.Mutate(data, max_bytes)


def main() -> None:
    arguments = list(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        if not any(not argument.startswith("-") for argument in arguments[1:]):
            for seed in range(_SEEDS):
                (Path(folder) / str(seed)).write_bytes(damaged(seed))
            arguments.append(folder)
        atheris.Setup(arguments, one_input, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
