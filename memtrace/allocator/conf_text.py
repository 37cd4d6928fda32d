"""Parse the strings that PyTorch takes in ``PYTORCH_CUDA_ALLOC_CONF``, and refuse what PyTorch refuses, in its words.

Two parsers exist: the one up to 2.9, and the token-based one since 2.10. They differ in minima, in what a missing
colon does, and in their texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from memtrace.allocator.config import INTERVALS, NEWEST, AllocatorConfig, Version, fraction_limit
from memtrace.errors import UsageError

_MIB = 1 << 20
_MOST_MB = (1 << 64) // _MIB
_INTEGER = re.compile(r"\s*[+-]?[0-9]+")
_DOUBLE = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
TOKEN_PARSER: Version = (2, 10)  # the first release whose parser works on a token list

# Setting -> (first release, kind of its value, field that it sets). Those without a field don't touch placement.
_SETTINGS: dict[str, tuple[Version, str, str]] = {
    "max_split_size_mb": ((1, 10), "megabytes", "max_split_bytes"),
    "garbage_collection_threshold": ((1, 12), "threshold", "gc_threshold"),
    "roundup_power2_divisions": ((1, 12), "divisions", "roundup_divisions"),
    "backend": ((2, 0), "backend", "backend"),
    "expandable_segments": ((2, 1), "bool", "expandable_segments"),
    "max_non_split_rounding_mb": ((2, 6), "megabytes", "max_non_split_rounding_bytes"),
    "per_process_memory_fraction": ((2, 10), "fraction", "memory_fraction"),
    "large_segment_size_mb": ((2, 11), "large", "large_segment_bytes"),
    "throw_on_cudamalloc_oom": ((2, 12), "bool", "throw_on_oom"),
    "expandable_segments_reserve": ((2, 15), "reserve", "reserve"),
    "release_lock_on_cudamalloc": ((2, 3), "bool", ""),
    "release_lock_on_hipmalloc": ((2, 3), "bool", ""),
    "pinned_use_cuda_host_register": ((2, 3), "bool", ""),
    "pinned_use_hip_host_register": ((2, 3), "bool", ""),
    "pinned_num_register_threads": ((2, 3), "threads", ""),
    "pinned_use_background_threads": ((2, 6), "bool", ""),
    "graph_capture_record_stream_reuse": ((2, 9), "bool", ""),
    "pinned_reserve_segment_size_mb": ((2, 10), "positive", ""),
    "pinned_free_catch_all": ((2, 12), "bool", ""),
    "pinned_max_round_threshold_mb": ((2, 13), "integer", ""),
    "pinned_max_cached_size_mb": ((2, 13), "integer", ""),
    "expandable_segments_handle_type": ((2, 8), "text", ""),
    "expandable_segments_reserve_by_class": ((2, 15), "list", ""),
}
_BYPASS = "roundup_bypass_threshold_mb"  # in 1.13 alone

SETTINGS = tuple(_SETTINGS)


_PAST_END = "Index out of bounds in ConfigTokenizer"


class ConfError(UsageError):
    """PyTorch would refuse this settings string; the text is PyTorch's own where it has one."""


def parse_conf(text: str, version: Version = NEWEST, device_total_bytes: int | None = None) -> AllocatorConfig:
    """Settings of a process started with this string. Raises ConfError with PyTorch's text.

    ``device_total_bytes`` gives settings that are fractions of the card their size; without it they are kept as
    fractions and limit nothing.
    """
    parser = _Parser(text, version)
    parser.run()
    values = parser.values
    if device_total_bytes is not None:
        spec = values.get("reserve")
        reserve = 1.125 * device_total_bytes if spec is None else spec[0] * (device_total_bytes if spec[1] else 1 << 30)
        values["reservation_bytes"] = max(int(reserve), 1)
        if values.get("throw_on_oom"):
            values["preempt_bytes"] = int(values.get("memory_fraction", 1.0) * device_total_bytes)
        if "memory_fraction" in values:
            values["limit_bytes"] = fraction_limit(values["memory_fraction"], device_total_bytes, version)
    values.pop("reserve", None)
    values.pop("throw_on_oom", None)
    return AllocatorConfig(version=version, **values)


class _Parser:
    def __init__(self, text: str, version: Version) -> None:
        self.modern = version >= TOKEN_PARSER
        self.version = version
        blank = r"\s" if self.modern else " "
        self.tokens = [t for t in re.split(r"([,:\[\]])", re.sub(blank, "", text)) if t]
        self.values: dict[str, Any] = {}
        self.at = 0

    def run(self) -> None:
        if self.version >= (2, 11):  # read first: other minima depend on it
            for i, token in enumerate(self.tokens):
                if token == "large_segment_size_mb":
                    self.at = i
                    self._one(token)
            self.at = 0
            self.values["max_non_split_rounding_bytes"] = self.values.get("large_segment_bytes", 20 * _MIB)
        while self.at < len(self.tokens):
            self._one(self.tokens[self.at])
            self.at += 1
            if self.at < len(self.tokens):
                self._expect(",", self.at)
                self.at += 1

    def _one(self, key: str) -> None:
        first, kind, name = _SETTINGS.get(key, ((1, 13), "bypass", "roundup_bypass_bytes"))
        if self.version < first or (kind == "bypass" and (key != _BYPASS or self.version != first)):
            raise self._error(
                f"Unrecognized CachingAllocator option: {key}",
                f"Unrecognized key '{key}' in Accelerator allocator config.",
            )
        read: Callable[[str, str], Any] = getattr(self, f"_{kind}")
        value = read(self._value(key), key)
        if name:
            self.values[name] = value

    def _error(self, old: str, new: str) -> ConfError:
        """What the parser up to 2.9, and the one since, say."""
        return ConfError(new if self.modern else old)

    def _expect(self, token: str, index: int) -> None:
        if index >= len(self.tokens):
            raise self._error(f"Error parsing CachingAllocator settings, expected {token}", _PAST_END)
        if self.tokens[index] != token and not self.modern:  # the token parser compares, and ignores the outcome
            raise ConfError(f"Error parsing CachingAllocator settings, expected {token}")

    def _value(self, key: str) -> str:
        """The token after ``key:``; leaves ``at`` on it."""
        self.at += 1
        self._expect(":", self.at)
        self.at += 1
        if self.at >= len(self.tokens):
            raise self._error(f"Error, expecting {key} value", _PAST_END)
        return self.tokens[self.at]

    def _integer(self, text: str, key: str) -> int:
        """What stoi (up to 2.9) and stoull (since) make of a token: a numeric prefix, negatives wrap around."""
        function = "stoull" if self.modern else "stoi"
        match = _INTEGER.match(text)
        if match is None:
            raise ConfError(f"{function}: {text!r} is not a number for {key}")
        value = int(match[0])
        if abs(value) >= (1 << 64 if self.modern else 1 << 31):
            raise ConfError(f"{function}: {text!r} is out of range for {key}")
        return value % (1 << 64)

    def _double(self, text: str, key: str) -> float:
        match = _DOUBLE.match(text)
        if match is None:
            raise ConfError(f"stod: {text!r} is not a number for {key}")
        return float(match[0])

    # Kinds of values: each makes what a setting says of the token behind its colon, where ``at`` is.

    def _bool(self, text: str, key: str) -> bool:
        if text in ("True", "False"):
            return text == "True"
        raise self._error(
            f"Expected a single True/False argument for {key}",
            f"Expected 'True' or 'False' at index {self.at} in ConfigTokenizer but got '{text}'",
        )

    def _megabytes(self, text: str, key: str) -> int | None:
        """A size that must not be below the large segment size: above it up to 2.9, at least it since."""
        value = self._integer(text, key)
        least = self.values.get("large_segment_bytes", 20 * _MIB) // _MIB
        if value < least or (value == least and not self.modern):
            raise ConfError(f"CachingAllocator option {key} too small, must be {'>=' if self.modern else '>'} {least}")
        size = min(value, _MOST_MB) * _MIB
        return None if key == "max_split_size_mb" and size >= 1 << 60 else size

    def _large(self, text: str, key: str) -> int:
        value = self._integer(text, key)
        if value <= 10:
            raise ConfError(f"CachingAllocator option {key} must be > 10 MB")
        return min(value, _MOST_MB) * _MIB

    def _threshold(self, text: str, key: str) -> float:
        value = self._double(text, key)
        if not 0 < value < 1:
            raise self._error(
                f"garbage_collect_threshold too {'big' if value > 0 else 'small'}, set it 0.0~1.0",
                "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
            )
        return value

    def _divisions(self, text: str, key: str) -> tuple[int, ...]:
        table = [0] * INTERVALS
        if text == "[":
            self._roundup_list(table, key)
        else:
            value = self._integer(text, key)
            if not _is_power2(value):
                raise ConfError("For roundups, the divisions has to be power of 2 ")
            table = [value] * INTERVALS
        return tuple(table)

    def _roundup_list(self, table: list[int], key: str) -> None:
        first, last = True, 0
        self.at += 1
        while self.at < len(self.tokens) and self.tokens[self.at] != "]":
            boundary = self.tokens[self.at]
            self.at += 1
            self._expect(":", self.at)
            self.at += 1
            if self.at >= len(self.tokens):
                raise self._error("Error parsing roundup_power2_divisions value", _PAST_END)
            value = self._integer(self.tokens[self.at], key)
            zero = self.version > (2, 0)
            if not (_is_power2(value) or (value == 0 and zero)):
                extra = "or 0 to disable roundup " if zero else ""
                raise ConfError(f"For roundups, the divisions has to be power of 2 {extra}")
            if boundary == ">":
                start = last + 1 if self.modern else last  # up to 2.9 it overwrote the last listed interval
                table[start:] = [value] * (INTERVALS - start)
            else:
                size = self._integer(boundary, key)
                if not _is_power2(size):
                    raise ConfError("For roundups, the intervals have to be power of 2 ")
                last = min(size.bit_length() - 1, INTERVALS - 1)
                if first:
                    table[:last] = [value] * last
                    first = False
                table[last] = value
            self.at += 1
            if self.at < len(self.tokens) and self.tokens[self.at] != "]":
                self._expect(",", self.at)
                self.at += 1
        if self.at >= len(self.tokens):
            raise ConfError("Expected closing bracket ']' in ConfigTokenizer but reached end of config")

    def _bypass(self, text: str, key: str) -> int:
        return self._integer(text, key) * _MIB

    def _backend(self, text: str, key: str) -> str:
        if text not in ("native", "cudaMallocAsync"):
            raise ConfError("Unknown allocator backend, options are native and cudaMallocAsync")
        return text

    def _fraction(self, text: str, key: str) -> float:
        value = self._double(text, key)
        if not 0.0 <= value <= 1.0:
            raise ConfError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
        return value

    def _reserve(self, text: str, key: str) -> tuple[float, bool] | None:
        """A fraction of the card or ``40G``; PyTorch warns about anything else and keeps what it had."""
        number = text[:-1] if text[-1:] in "Gg" else text
        match = _DOUBLE.fullmatch(number)
        if match is not None and math.isfinite(float(number)) and float(number) > 0:
            return float(number), number == text
        return self.values.get("reserve")

    def _text(self, text: str, key: str) -> str:
        return text

    def _list(self, text: str, key: str) -> None:
        while self.at < len(self.tokens) and self.tokens[self.at] != "]":
            self.at += 1

    def _threads(self, text: str, key: str) -> None:
        value = self._integer(text, key)
        got = f", got {value}" if self.modern else ""
        if not _is_power2(value):
            raise ConfError(f"Number of register threads has to be power of 2{got or ' '}")
        if value > 128:
            raise ConfError(f"Number of register threads should be less than or equal to 128{got}")

    def _positive(self, text: str, key: str) -> None:
        if not self._integer(text, key):
            raise ConfError("Pinned reserve segment size has to be greater than 0")


def _is_power2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def conf_hint(text: str) -> str:
    """What may have been meant by a string that PyTorch refuses; its own texts don't tell.

    One clause that repairs the usual slips, with the separator before it; empty where none is recognised.
    """
    from difflib import get_close_matches

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
