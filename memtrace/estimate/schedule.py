"""From the lengths of a data set to the steps of a run: order, micro-batches, padding, accumulation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from memtrace.errors import MissingDependencyError, SnapshotError, UsageError
from memtrace.frozen import dataclass
from memtrace.snapshot.container import never_ends

ORDERS = ("given", "longest-first", "shuffled")
_KEYS = ("length", "num_tokens", "n_tokens", "input_ids")
_LARGEST_FILE_BYTES = 4 << 30
_MOST_TOKENS = 10_000_000  # of one sequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``rows`` sequences padded to ``length`` tokens. ``padded``: some are shorter, so that attention needs a mask."""

    rows: int
    length: int
    padded: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.rows * self.length


Step = tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """How rows of a micro-batch come to one length.

    ``longest``: to the longest; ``multiple``: further up to a multiple of ``size``; ``max``: always to ``size``, longer
    ones cut; ``none``: rows are joined to one sequence without padding (packing).
    """

    kind: str = "longest"
    size: int = 0

    def batch(self, lengths: Sequence[int]) -> MicroBatch:
        """The micro-batch that these sequences make."""
        if self.kind == "none":
            return MicroBatch(1, sum(lengths))
        if self.kind == "max":
            lengths = [min(length, self.size) for length in lengths]
        longest = max(lengths)
        target = self.size if self.kind == "max" else longest
        if self.kind == "multiple":
            target = -(-longest // self.size) * self.size
        return MicroBatch(len(lengths), target, any(length < target for length in lengths))


def parse_padding(text: str) -> Padding:
    """``longest``, ``none``, ``multiple:N`` or ``max:N``. Raises UsageError."""
    kind, _, size = text.partition(":")
    if kind in ("longest", "none") and not size:
        return Padding(kind)
    if kind in ("multiple", "max") and size.isdecimal() and 0 < int(size) <= _MOST_TOKENS:
        return Padding(kind, int(size))
    raise UsageError(f"--padding takes longest, none, multiple:N or max:N, not {text!r:.60}")


def steps_of(
    lengths: Sequence[int],
    *,
    batch: int = 1,
    accumulation: int = 1,
    padding: Padding = Padding(),  # noqa: B008  # frozen
    order: str = "given",
    seed: int = 0,
    steps: int | None = None,
) -> tuple[Step, ...]:
    """The steps of one pass over the data, or exactly ``steps`` of them, over as many passes as that takes.

    Each pass of a shuffled order is another shuffle. A last short batch is kept, as PyTorch's data loader keeps it.
    """
    if not lengths:
        raise UsageError("there are no lengths")
    if order not in ORDERS:
        raise UsageError(f"unknown order {order!r} (one of: {', '.join(ORDERS)})")
    found = itertools.chain.from_iterable(
        _one_pass(lengths, batch, accumulation, padding, order, seed, epoch)
        for epoch in (range(1) if steps is None else itertools.count())
    )
    return tuple(itertools.islice(found, steps))


def _one_pass(
    lengths: Sequence[int], batch: int, accumulation: int, padding: Padding, order: str, seed: int, epoch: int
) -> Iterator[Step]:
    ordered = list(lengths)
    if order == "longest-first":
        ordered.sort(reverse=True)
    elif order == "shuffled":
        random.Random(f"{seed}/{epoch}").shuffle(ordered)
    batches = [padding.batch(ordered[start : start + batch]) for start in range(0, len(ordered), batch)]
    for start in range(0, len(batches), accumulation):
        yield tuple(batches[start : start + accumulation])


# ---- lengths ---------------------------------------------------------------------------------------------------------
def read_lengths(text: str, tokenizer: str | None = None) -> list[int]:
    """Token counts: ``N,N,…``, or a file with one a line, JSON lines, Parquet, or a folder that ``datasets`` saved.

    JSON lines and tables have a column ``length``, ``num_tokens`` or ``input_ids``, or with ``tokenizer`` (a folder or
    a tokenizer.json) ``text``; a plain text file is tokenized line by line. Raises SnapshotError and UsageError.
    """
    if text.replace(",", "").replace(" ", "").isdecimal():
        found = [int(part) for part in text.split(",") if part.strip()]
    else:
        found = list(_from_file(Path(text), _counter(tokenizer) if tokenizer is not None else None))
    if not found:
        raise UsageError(f"{text:.200}: no lengths in it")
    for length in found:
        if not 2 <= length <= _MOST_TOKENS:
            raise UsageError(f"a length of {length:,} tokens is out of range: 2 to {_MOST_TOKENS:,}")
    return found


def _from_file(path: Path, count: Any) -> Iterator[int]:
    try:
        if path.is_dir():
            files = sorted(path.glob("**/*.arrow")) or sorted(path.glob("**/*.parquet"))
            if not files:
                raise UsageError(f"{path}: a folder without .arrow or .parquet files")
            for file in files:
                yield from _from_table(file, count)
            return
        if path.suffix in (".parquet", ".arrow"):
            yield from _from_table(path, count)
            return
        if never_ends(path) or path.stat().st_size > _LARGEST_FILE_BYTES:
            raise UsageError(f"{path}: more than 4 GiB; give it as Parquet")
        with path.open("rb") as content:
            for number, line in enumerate(content, 1):
                if line.strip():
                    yield _from_line(path, number, line, count)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None


def _from_line(path: Path, number: int, line: bytes, count: Any) -> int:
    stripped = line.strip()
    if stripped.isdigit() and len(stripped) < 20:
        return int(stripped)
    if not stripped.startswith(b"{") and count is not None:
        return int(count(line.decode("utf-8", "replace").rstrip("\n")))
    try:
        row = orjson.loads(stripped)
    except ValueError:
        raise UsageError(f"{path}:{number}: neither a token count nor a JSON object") from None
    if not isinstance(row, dict):
        raise UsageError(f"{path}:{number}: not a JSON object with a length")
    for key in _KEYS:
        value = row.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, list):
            return len(value)
    if isinstance(row.get("text"), str) and count is not None:
        return int(count(row["text"]))
    raise UsageError(f"{path}:{number}: no 'length', 'num_tokens' or 'input_ids' (with --tokenizer also 'text')")


def _from_table(path: Path, count: Any) -> Iterator[int]:
    """A column of a Parquet or Arrow file."""
    try:
        import pyarrow as arrow
        import pyarrow.compute as compute
        import pyarrow.ipc as ipc
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingDependencyError.of_extra(f"{path}: Parquet and Arrow files need pyarrow", "parquet") from None
    try:
        if path.suffix == ".parquet":
            names = parquet.read_schema(path).names
            column = next((key for key in (*_KEYS, "text") if key in names), None)
            table = parquet.read_table(path, columns=[column]) if column else None
        else:
            with arrow.memory_map(str(path)) as source:
                table = ipc.open_stream(source).read_all()
            column = next((key for key in (*_KEYS, "text") if key in table.column_names), None)
    except arrow.ArrowException as error:
        raise SnapshotError(f"{path}: {str(error).splitlines()[0]}") from None
    if column is None or table is None or (column == "text" and count is None):
        raise UsageError(f"{path}: no column {', '.join(_KEYS)} (with --tokenizer also text)")
    values = table.column(column)
    if column == "text":
        yield from (int(count(text.as_py() or "")) for text in values)
    elif arrow.types.is_list(values.type) or arrow.types.is_large_list(values.type):
        yield from compute.list_value_length(values).to_pylist()
    else:
        yield from (int(value) for value in values.to_pylist())


def _counter(tokenizer: str) -> Any:
    """A function from a text to its number of tokens."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingDependencyError("--tokenizer needs the package tokenizers, which Transformers brings") from None
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise SnapshotError(f"{file}: {error}") from None
    return lambda text: len(loaded.encode(text).ids)
