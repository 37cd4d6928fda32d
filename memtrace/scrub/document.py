"""The whole snapshot, built anew from what is known to be safe: numbers stay, every text goes through its own filter,
keys that no release of PyTorch writes are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memtrace.errors import SnapshotError
from memtrace.scrub import texts
from memtrace.scrub.extra import is_number, scrub_extra
from memtrace.scrub.frames import Frames, Options
from memtrace.scrub.ledger import Ledger
from memtrace.scrub.vocabulary import PROFILER_CATEGORIES

_EVENT_NUMBERS = frozenset({"addr", "device_free", "size", "stream", "time_us", "pool_id", "device"})
_BLOCK_NUMBERS = frozenset({"address", "size", "requested_size", "real_size", "addr"})
_SEGMENT_NUMBERS = frozenset({
    "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "is_expandable",
    "segment_pool_id", "registration_counter",
})  # fmt: skip
_SETTING_NUMBERS = frozenset({
    "max_split_size", "garbage_collection_threshold", "expandable_segments", "pinned_num_register_threads",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "graph_capture_record_stream_reuse", "roundup_power2_divisions",
    "max_non_split_rounding_size", "large_segment_size", "per_process_memory_fraction", "throw_on_cudamalloc_oom",
})  # fmt: skip
_SETTING_TEXTS = frozenset(
    {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "last_allocator_settings"}
)
_ACTIONS = frozenset({
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom", "annotate", "workspace_snapshot",
})  # fmt: skip
_STATES = frozenset({"inactive", "active_allocated", "active_pending_free", "active_awaiting_free"})
_FRAME_KEYS = frozenset({"filename", "line", "name"})
_FX_OPS = frozenset({"call_function", "call_method", "call_module", "get_attr", "output", "placeholder", "root"})
_FRAME_LISTS = ("frames", "cpp_frames")


def _word(value: Any, ledger: Ledger, kind: str, known: frozenset[str]) -> Any:
    """A word that PyTorch writes; another one is numbered, what is no text can only be a number."""
    if not isinstance(value, str):
        return _numbers(value)
    return (
        value if value in known else f"{kind.rstrip('s').replace(' ', '_')}_{ledger.number(f'unknown {kind}', value)}"
    )


_EVENT_TEXTS: dict[str, Callable[[str, Ledger], str]] = {
    "action": lambda text, ledger: str(_word(text, ledger, "actions", _ACTIONS)),
    "compile_context": texts.compile_context,
    "user_metadata": texts.metadata,
    "internal_metadata": texts.metadata,
    "category": lambda text, ledger: str(_word(text, ledger, "memory categories", PROFILER_CATEGORIES)),
}


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """``snapshot`` in builtin containers, ready to be pickled. ``removed``: kind -> number of distinct things that are
    gone; ``kept``: kind -> texts that stay and that a reader may recognise."""

    snapshot: dict[str, Any] | list[Any]
    removed: Mapping[str, int]
    kept: Mapping[str, list[str]]


def scrub(raw: dict[str, Any] | list[Any], options: Options | None = None) -> Scrubbed:
    """The snapshot without personal things. ``raw`` is what PyTorch dumped; its lists are emptied on the way.

    Raises SnapshotError where the containers are not those of a snapshot.
    """
    ledger = Ledger()
    functions: dict[str, dict[str, None]] = {}  # in the order of the file, so that scrubbing twice numbers alike
    seen: set[int] = set()  # frames are shared between stacks
    for frames in _frame_lists(raw):
        for frame in frames:
            if id(frame) not in seen and isinstance(frame, dict):
                seen.add(id(frame))
                functions.setdefault(_text(frame.get("filename")), {})[_text(frame.get("name"))] = None
    work = _Scrubber(Frames(functions, options or Options(), ledger), ledger)
    snapshot = work.segments(raw) if isinstance(raw, list) else work.top(raw)
    return Scrubbed(snapshot, ledger.removed, ledger.kept)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _frame_lists(raw: dict[str, Any] | list[Any]) -> Iterator[Sequence[Any]]:
    """Every list of frames, once."""
    seen: set[int] = set()

    def of(holders: Any) -> Iterator[Sequence[Any]]:
        for holder in _list(holders):
            if not isinstance(holder, dict):
                continue
            for key in _FRAME_LISTS:
                frames = holder.get(key)
                if isinstance(frames, (list, tuple)) and id(frames) not in seen:
                    seen.add(id(frames))
                    yield frames
            yield from of(holder.get("blocks"))
            yield from of(holder.get("history"))

    if isinstance(raw, list):
        yield from of(raw)
        return
    for key in ("segments", "host_segments"):
        yield from of(raw.get(key))
    for trace in _list(raw.get("device_traces")):
        yield from of(trace)
    host = _list(raw.get("host_traces"))
    for trace in host if host and isinstance(host[0], list) else [host]:
        yield from of(trace)


class _Scrubber:
    """Old containers to new ones. Lists of frames that were one object stay one object: it says that two events came
    from one call."""

    def __init__(self, frames: Frames, ledger: Ledger) -> None:
        self._frames, self._ledger = frames, ledger
        # By the id of the old object; old lists are kept, so that no id is given to another meanwhile.
        self._frame_list: dict[int, tuple[Any, list[Any]]] = {}
        self._frame_object: dict[int, dict[str, Any]] = {}
        self._frame: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._event_text: dict[tuple[str, str], str] = {}

    def top(self, raw: dict[str, Any]) -> dict[str, Any]:
        known: dict[str, Callable[[Any], Any]] = {
            "segments": self.segments,
            "device_traces": lambda traces: [self._trace(trace) for trace in _list(traces)],
            "allocator_settings": self._settings,
            "external_annotations": lambda notes: [self._note(note) for note in _list(notes) if isinstance(note, dict)],
            "host_segments": self.segments,
            "host_traces": self._host_traces,
            "memtrace": lambda extra: scrub_extra(extra, self._ledger) if isinstance(extra, dict) else {},
        }
        result = {}
        for key in list(raw):
            value = raw.pop(key)
            if key in known:
                result[key] = known[key](value) if value is not None else None
            else:
                self._unknown("snapshot", key)
        return result

    def segments(self, segments: Any) -> list[Any]:
        """Segments and their blocks."""
        return self._each(segments, self._segment)

    def _each(self, items: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Any]:
        """Changed items in a new list; the old list is emptied from its end, so that both are never whole."""
        if not isinstance(items, (list, tuple)):
            raise SnapshotError(f"a {type(items).__name__} where a snapshot has a list")
        items = items if isinstance(items, list) else list(items)
        items.reverse()
        result = []
        while items:
            item = items.pop()
            if not isinstance(item, dict):
                raise SnapshotError(f"a {type(item).__name__} where a snapshot has a dictionary")
            result.append(change(item))
        return result

    def _trace(self, trace: Any) -> list[Any]:
        return self._each(trace, self._event)

    def _host_traces(self, traces: Any) -> list[Any]:
        nested = bool(_list(traces)) and isinstance(traces[0], list)
        return [self._trace(trace) for trace in traces] if nested else self._trace(traces)

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        result = event.copy()
        for key, value in event.items():
            if key in _EVENT_NUMBERS:
                if type(value) is not int:
                    result[key] = _numbers(value)
            elif key in _FRAME_LISTS:
                result[key] = self._frames_of(value)
            elif key in _EVENT_TEXTS and isinstance(value, str):
                known = self._event_text.get((key, value))
                if known is None:
                    known = self._event_text[key, value] = _EVENT_TEXTS[key](value, self._ledger)
                result[key] = known
            elif key in _EVENT_TEXTS:
                result[key] = _numbers(value)
            elif key == "forward_frames":
                result[key] = []
                for line in _list(value):
                    self._ledger.remove("lines of forward stacks", line if isinstance(line, str) else id(line))
            else:
                del result[key]
                self._unknown("event", key)
        return result

    def _segment(self, segment: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in segment.items():
            if key in _SEGMENT_NUMBERS:
                result[key] = _numbers(value)
            elif key == "segment_type":
                result[key] = _word(value, self._ledger, "segment types", frozenset({"small", "large"}))
            elif key in _FRAME_LISTS:
                result[key] = self._frames_of(value)
            elif key == "blocks":
                result[key] = self._each(value, self._block)
            else:
                self._unknown("segment", key)
        return result

    def _block(self, block: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in block.items():
            if key in _BLOCK_NUMBERS:
                result[key] = _numbers(value)
            elif key == "state":
                result[key] = _word(value, self._ledger, "states", _STATES)
            elif key in _FRAME_LISTS:
                result[key] = self._frames_of(value)
            elif key == "history":
                # One level of entries; a history of a history is nobody's.
                entries = [
                    {k: v for k, v in entry.items() if k != "history"}
                    for entry in _list(value)
                    if isinstance(entry, dict)
                ]
                result[key] = [self._block(entry) for entry in entries]
            elif key == "user_metadata":
                result[key] = texts.metadata(value, self._ledger) if isinstance(value, str) else _numbers(value)
            else:
                self._unknown("block", key)
        return result

    def _unknown(self, where: str, key: Any) -> None:
        self._ledger.remove("unknown keys", (where, key if isinstance(key, str) else type(key).__name__))

    # -- frames -----------------------------------------------------------------------------------------------------

    def _frames_of(self, frames: Any) -> Any:
        if not isinstance(frames, (list, tuple)):
            return None
        known = self._frame_list.get(id(frames))
        if known is None:
            made = self._frame_object
            new = [made.get(id(frame)) or self._one_frame(frame) for frame in frames if isinstance(frame, dict)]
            known = self._frame_list[id(frames)] = (frames, new)
        return known[1]

    def _one_frame(self, frame: dict[str, Any]) -> dict[str, Any]:
        filename, name, line = _text(frame.get("filename")), _text(frame.get("name")), frame.get("line")
        operator = frame.get("fx_node_op")
        operator = operator if isinstance(operator, str) and operator in _FX_OPS else None
        for key in frame.keys() - _FRAME_KEYS:
            if key != "fx_node_op" or operator is None:
                self._unknown("frame", key)
        line = line if type(line) in (int, float) else 0
        same = (filename, line, name, operator)
        known = self._frame.get(same)
        if known is None:
            known = {"filename": self._frames.file(filename), "line": line, "name": self._frames.name(filename, name)}
            known |= {"fx_node_op": operator} if operator is not None else {}
            self._frame[same] = known
        self._frame_object[id(frame)] = known
        return known

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _note(self, note: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {key: note[key] for key in ("device", "time_us") if is_number(note.get(key, ""))}
        if note.get("stage") in ("START", "END"):
            result["stage"] = note["stage"]
        if isinstance(note.get("name"), str):
            result["name"] = texts.annotation(note["name"], self._ledger, self._frames.is_hidden)
        return result

    def _settings(self, settings: Any) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in settings.items() if isinstance(settings, dict) else ():
            if key in _SETTING_TEXTS and isinstance(value, str):
                result[key] = texts.conf(value, self._ledger)
            elif key in _SETTING_NUMBERS and isinstance(value, dict):
                result[key] = {k: v for k, v in value.items() if str(k).isdigit() and is_number(v)}
            elif key in _SETTING_NUMBERS:
                result[key] = _numbers(value)
            else:
                self._ledger.remove("allocator settings", str(key))
        return result


def _numbers(value: Any) -> Any:
    """A number, or a pair of numbers (a pool's id); 0 for anything that could hold a text."""
    if is_number(value):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(map(is_number, value)):
        return value
    return 0
