"""Bytes to builtin containers, safely: a pickle machine that refuses every global, or JSON."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from memtrace.errors import SnapshotError
from memtrace.snapshot.bounds import CutShort, Foreign, Hostile
from memtrace.snapshot.container import half_of_free_memory_bytes, is_json, is_pickle
from memtrace.snapshot.plain import Look, look

# Python objects take 5 to 10 times the bytes of their pickle; hostile opcodes ask for thousands of times.
_MEMORY_PER_BYTE = 32
_MEMORY_PER_COMPRESSED_BYTE = 400
_MEMORY_FLOOR_BYTES = 768 << 20


@contextmanager
def bounded_memory(allowance_bytes: int) -> Iterator[None]:
    """Let the process grow by at most ``allowance_bytes`` meanwhile (Linux; elsewhere no bound).

    A few bytes of pickle can ask for gigabytes (a huge memo index); the allocation then fails with MemoryError
    instead of taking the machine down.
    """
    try:
        import resource
        from pathlib import Path

        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError, IndexError):
        yield
        return
    bound = used_bytes + allowance_bytes
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def without_gc() -> Iterator[None]:
    """Millions of containers that all stay alive make the cyclic collector cost more than the decoding."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def memory_allowance_bytes(size_bytes: int, is_compressed: bool) -> int:
    """How much memory decoding a file of ``size_bytes`` may take: at most half of what is free."""
    per_byte = _MEMORY_PER_COMPRESSED_BYTE if is_compressed else _MEMORY_PER_BYTE
    return min(_MEMORY_FLOOR_BYTES + per_byte * size_bytes, half_of_free_memory_bytes())


def decode(stream: BinaryIO, head: bytes, name: str) -> Any:
    """The content as builtin objects. Raises SnapshotError with one line that says what is wrong."""
    if is_json(head):
        return _decode_json(stream, name)
    if is_pickle(head):
        return _decode_pickle(stream, name)
    raise SnapshotError(f"{name}: neither a pickle nor JSON, so not a memory snapshot")


def _decode_pickle(stream: BinaryIO, name: str) -> Any:
    try:
        data = stream.read()
        found = look(data)
        if found is Look.CUT_SHORT:
            raise CutShort
        if found is Look.OTHER:
            from memtrace.snapshot.decoder.machine import Machine  # no dump of PyTorch needs it

            return Machine(data).load()
        # Every opcode in it was looked at. From bytes, and only from bytes, the C machine reads what was looked at even
        # where frames overlap.
        return pickle.loads(data)
    except Foreign as refused:
        raise SnapshotError(f"{name}: {refused}, so it is not a memory snapshot (nothing was executed)") from None
    except SnapshotError as error:
        raise SnapshotError(f"{name}: {error}") from None
    except Hostile as error:
        raise SnapshotError(f"{name}: holds {error}, which no snapshot does; damaged or hostile") from None
    except MemoryError:
        raise SnapshotError(
            f"{name}: asks for far more memory than a snapshot of its size; damaged or hostile"
        ) from None
    except (CutShort, EOFError):
        raise SnapshotError(f"{name}: ends in the middle; the dump or the download was cut short") from None
    except Exception as error:  # a damaged pickle makes the machine raise nearly anything
        if "truncated" in str(error):
            raise SnapshotError(f"{name}: ends in the middle; the dump or the download was cut short") from None
        raise SnapshotError(f"{name}: a damaged pickle ({_one_line(error)})") from None


def _decode_json(stream: BinaryIO, name: str) -> Any:
    import json

    import orjson

    try:
        data = stream.read()
        if data.startswith(b"\xef\xbb\xbf"):
            data = data[3:]
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return json.loads(data)  # NaN, Infinity, numbers beyond 64 bits
    except SnapshotError as error:
        raise SnapshotError(f"{name}: {error}") from None
    except MemoryError:
        raise SnapshotError(f"{name}: needs more memory than a snapshot of its size can") from None
    except EOFError:
        raise SnapshotError(f"{name}: ends in the middle; the dump or the download was cut short") from None
    except RecursionError:
        raise SnapshotError(f"{name}: JSON nested too deeply for a snapshot") from None
    except Exception as error:
        if isinstance(error, json.JSONDecodeError) and ("Unterminated" in error.msg or error.pos >= len(data) - 1):
            raise SnapshotError(f"{name}: JSON that ends in the middle; the file was cut short") from None
        raise SnapshotError(f"{name}: damaged JSON ({_one_line(error)})") from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:120] + ("…" if len(text) > 120 else "")
