"""Single texts of a snapshot: kept where they are public by form, else replaced by a numbered word."""

from __future__ import annotations

import re
from collections.abc import Callable

from memtrace.scrub.ledger import Ledger
from memtrace.scrub.vocabulary import ANNOTATIONS, MODULES, OOM_WORDS, VALUES

_COMPILE_ID = re.compile(r"[\[\]\d/_!., -]*|N/A")
_NUMBERS = re.compile(r"-?\d[\d+.,/: -]*|")
_CONF_KEYS = (
    r"backend|expandable_segments(?:_\w+)?|garbage_collection_threshold|graph_capture_record_stream_reuse"
    r"|large_segment_size_mb|max_non_split_rounding_mb|max_split_size_mb|per_process_memory_fraction"
    r"|pinned_(?:free_catch_all|max_cached_size_mb|max_round_threshold_mb|num_register_threads"
    r"|reserve_segment_size_mb|use_background_threads|use_\w+_host_register)|release_lock_on_\w+malloc"
    r"|roundup_power2_divisions|throw_on_cudamalloc_oom"
)
_CONF_VALUE = r"True|False|true|false|native|cudaMallocAsync|[\d.]+|\[[\d:,.> ]*(?:>:\d+)?[\d:,.> ]*\]"
_CONF_PIECE = re.compile(rf"\s*(?:{_CONF_KEYS})\s*:\s*(?:{_CONF_VALUE})\s*")
_VERSION = re.compile(r"(\d+(?:\.\d+)*(?:\.?(?:a|b|rc|dev|post)\d*)?)(\+(?:cu\d+|cpu|rocm[\d.]+|xpu))?")
_GPU = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|GRID|AMD|Radeon|Intel)[\w ()./-]{0,60}|[a-z]+\d+[a-z]*(?:-\d+g)?")
_PROCESS = re.compile(r"\bProcess (\d+)")
_TOKEN = re.compile(r"https://(?:docs\.)?pytorch\.org/docs/[\w./#-]*|[A-Za-z_][\w]*|\d[\d.]*|\s+|.", re.DOTALL)
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#(\w+)\.(step|zero_grad)")
_ELLIPSES = re.compile(r"…(?:[^\w…]*…)+")
_LONGEST_MESSAGE = 20_000

Hidden = Callable[[str], bool]


def compile_context(text: str, ledger: Ledger) -> str:
    """The compiler's numbers stay (``0/1``, ``N/A``)."""
    return text if _COMPILE_ID.fullmatch(text) else f"compiled_{ledger.number('compile contexts', text)}"


def metadata(text: str, ledger: Ledger) -> str:
    """``user_metadata`` and the like: numbers, and module names of public models."""
    if _NUMBERS.fullmatch(text):
        return text
    is_public = all(part.isdigit() or part in MODULES for part in text.split("."))
    return text if is_public else f"metadata_{ledger.number('metadata', text)}"


def module_name(text: str, ledger: Ledger) -> str:
    """A dotted name, each part that isn't public replaced; the number of its parts stays."""
    parts = []
    for part in text[:2000].split("."):
        is_public = part.isdigit() or part in MODULES or (part.startswith("parameter") and part[9:].isdigit())
        parts.append(part if is_public else f"part_{ledger.number('module names', part)}")
    return ".".join(parts)


def annotation(text: str, ledger: Ledger, hidden: Hidden) -> str:
    """Names that PyTorch itself gives to ranges; an optimizer's class only where it is a public one."""
    found = _OPTIMIZER.fullmatch(text)
    if found and found[2] not in VALUES:
        return f"Optimizer.{found[1]}#Optimizer{ledger.number('optimizer classes', found[2])}.{found[3]}"
    if ANNOTATIONS.fullmatch(text) and (found or not hidden(text)):
        return text
    return f"annotation_{ledger.number('annotations', text)}"


def conf(text: str, ledger: Ledger) -> str:
    """An allocator configuration string, without what isn't a setting of PyTorch's."""
    kept = []
    for piece in re.split(r",(?![^\[]*\])", text):
        if not piece.strip() or _CONF_PIECE.fullmatch(piece):
            kept.append(piece)
        else:
            ledger.remove("allocator settings", piece)
    return ",".join(kept)


def version(text: str) -> str | None:
    """A release number with a public build tag; None for what is none."""
    found = _VERSION.match(text)
    return found[0] if found else None


def gpu(text: str) -> str | None:
    """A product name; None for any other text."""
    return text if _GPU.fullmatch(text) else None


def oom_message(text: str, ledger: Ledger) -> str:
    """PyTorch's words and figures; process numbers renumbered, anything else an ellipsis."""

    def renumber(found: re.Match[str]) -> str:
        return f"Process {ledger.number('process ids', found[1])}"

    words: list[str] = []
    for token in _TOKEN.findall(_PROCESS.sub(renumber, text[:_LONGEST_MESSAGE])):
        is_word = token[0].isalpha() or token[0] == "_"
        if token.startswith("https:") or token.isspace() or token[0].isdigit() or token in OOM_WORDS:
            words.append(token)
        elif is_word or token not in ".,:;()[]%-=<>'|":
            ledger.remove("words of messages", token)
            words.append("…")
        else:
            words.append(token)
    return _ELLIPSES.sub("…", "".join(words))
