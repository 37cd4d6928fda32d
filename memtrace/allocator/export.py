"""A simulated run as a snapshot of builtin containers, which PyTorch's viewer and memtrace itself can open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, TypeAlias

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.state import AllocatorState
from memtrace.allocator.whatif.program import Op
from memtrace.allocator.whatif.whatif import Simulation
from memtrace.snapshot.model import DEFAULT_POOL, Action, Snapshot
from memtrace.snapshot.stacks import StackTable

Frames: TypeAlias = Callable[[int], list[dict[str, Any]]]
_BLOCK = ("address", "size", "requested_size", "state", "frames")
WrittenBlock: TypeAlias = tuple[int, int, int, str, list[dict[str, Any]]]


def as_snapshot(snapshot: Snapshot, run: Simulation) -> dict[str, Any]:
    """The end of a simulated run (its ``until`` event, its refusal, or the end of the trace) as a snapshot dictionary.

    The events are told again with simulated addresses and segment events, so that the file can be browsed over time;
    stacks and times are those of the recorded events.
    """
    frames = frames_of(snapshot.stacks)
    device = run.program.evidence.device.device
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device + 1)]
    traces[device] = _trace(run, frames)
    return {
        "segments": segments_of(run.state, _used_blocks(run, frames), device, run.program.evidence.history.pools),
        "device_traces": traces,
        "allocator_settings": settings_of(run.config),
        "external_annotations": [
            {"device": note.device, "time_us": note.time_us, "name": note.name, "stage": note.stage}
            for note in snapshot.annotations
        ],
    }


def settings_of(config: AllocatorConfig) -> dict[str, Any]:
    """Settings in the form that PyTorch exports, with those that it does not export in the settings string."""
    text = []
    if config.large_segment_bytes != 20 << 20:
        text.append(f"large_segment_size_mb:{config.large_segment_bytes >> 20}")
    if config.max_non_split_rounding_bytes != config.large_segment_bytes:
        text.append(f"max_non_split_rounding_mb:{config.max_non_split_rounding_bytes >> 20}")
    return {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(text),
        "max_split_size": -1 if config.max_split_bytes is None else config.max_split_bytes,
        "garbage_collection_threshold": config.gc_threshold,
        "expandable_segments": config.expandable_segments,
        "roundup_power2_divisions": {str(1 << i): value for i, value in enumerate(config.roundup_divisions)},
    }


def frames_of(stacks: StackTable) -> Frames:
    """Stacks as lists of frame dictionaries; one list a stack, shared as in PyTorch's own dumps. [] for -1."""

    @cache
    def frame(number: int) -> dict[str, Any]:
        return {**stacks.frames[number]._asdict(), **stacks.fx.get(number, {})}

    @cache
    def of(stack: int) -> list[dict[str, Any]]:
        return [frame(number) for number in stacks.frame_ids(stack).tolist()]

    return of


def mapped_ranges(state: AllocatorState) -> list[tuple[int, int, int, bool]]:
    """(address, size, free list, expandable) of every segment or maximal mapped range, by address."""
    ranges = [(address, size, state.owner[address], False) for address, size in state.whole.items()]
    for number, reservations in state.reservations.items():
        holes = state.unmapped.get(number, [])
        for reservation in reservations:
            position, end = reservation.base, reservation.base + reservation.length
            for hole in [h for h in holes if position <= h < end]:
                if hole > position:
                    ranges.append((position, hole - position, number, True))
                position = hole + state.unmapped_at[hole]
            if position < end:
                ranges.append((position, end - position, number, True))
    return sorted(ranges)


def segment_of(
    device: int,
    address: int,
    total_bytes: int,
    blocks: Sequence[WrittenBlock],
    *,
    small: bool,
    expandable: bool = False,
    stream: int = 0,
    pool: tuple[int, int] = DEFAULT_POOL,
    frames: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A segment as PyTorch dumps it."""
    active = [block for block in blocks if block[3] != "inactive"]
    return {
        "device": device,
        "address": address,
        "total_size": total_bytes,
        "allocated_size": sum(block[1] for block in active if block[3] == "active_allocated"),
        "active_size": sum(block[1] for block in active),
        "requested_size": sum(block[2] for block in active),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "frames": frames or [],
        "blocks": [dict(zip(_BLOCK, block, strict=True)) for block in blocks],
    }  # fmt: skip


def segments_of(
    state: AllocatorState,
    used: Iterable[WrittenBlock],
    device: int = 0,
    pools: Sequence[tuple[int, int]] = (DEFAULT_POOL,),
) -> list[dict[str, Any]]:
    """The segments of an allocator's state, as PyTorch dumps them: ``used`` blocks, and the free ones between."""
    free: list[WrittenBlock] = [(address, size, 0, "inactive", []) for address, size in state.free_at.items()]
    blocks = sorted([*free, *used], key=itemgetter(0))
    found, at = [], 0
    for address, size, number, expandable in mapped_ranges(state):
        first = at
        while at < len(blocks) and blocks[at][0] < address + size:
            at += 1
        name = state.ids[number]
        found.append(
            segment_of(
                device, address, size, blocks[first:at], small=name.small, expandable=expandable,
                stream=_signed(name.stream), pool=pools[name.pool],
            )
        )  # fmt: skip
    return found


def _used_blocks(run: Simulation, frames: Frames) -> Iterator[WrittenBlock]:
    program, evidence = run.program, run.program.evidence
    trace, life = evidence.device.trace, evidence.life
    held = [(handle, "active_allocated") for handle in run.live().tolist()]
    for handle, status in [*held, *((handle, "active_pending_free") for handle in run.pending)]:
        event = int(life.alloc_event[handle])
        stack = int(trace.stack[event]) if event >= 0 else int(evidence.beginning.stack[handle])
        sizes = int(run.block_bytes[handle]), int(program.requested_bytes[handle])
        yield int(run.address[handle]), *sizes, status, frames(stack)


def _trace(run: Simulation, frames: Frames) -> list[dict[str, Any]]:
    """Simulated events: those of the program that were executed, with segment events where the simulation had them."""
    program, evidence, last = run.program, run.program.evidence, run.executed
    trace, pools = evidence.device.trace, evidence.history.pools
    raised = _by_event((event, rest) for event, *rest in run.segment_events.tolist())
    flushed = _by_event(run.completed_by_flush)
    done = {handle for _, handle in run.completed_by_flush}
    spared, refused = {one.event: one for one in run.spared}, {one.event: one for one in run.refused}
    codes, handles, events = (part[:last].tolist() for part in (program.op, program.handle, program.event))
    if run.stopped_at is not None and run.stopped_at >= 0:
        codes, handles, events = [*codes, int(Op.REFUSE)], [*handles, -1], [*events, run.stopped_at]
    told: list[dict[str, Any]] = []
    event, stack = -1, list[dict[str, Any]]()

    def tell(action: str, address: int, size: int, stream: int, pool: int) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "frames": stack}
        if action == "oom":
            free = max(trace.oom_device_free_bytes.get(event, 0), 0)
            entry = {"action": action, "size": size, "stream": stream, "device_free": free, "frames": stack}
        if len(pools) > 1:
            entry["pool_id"] = pools[pool]
        if trace.time_us is not None:
            entry["time_us"] = int(trace.time_us[event])
        told.append(entry)

    def what(handle: int) -> tuple[int, int, int, int]:
        size, stream = int(program.requested_bytes[handle]), int(program.stream[handle])
        return int(run.address[handle]), size, stream, int(program.pool[handle])

    for code, handle, event in zip(codes, handles, events, strict=True):
        stack = list(frames(int(trace.stack[event])))  # a call of its own has a list of its own
        for waiting in flushed.pop(event, ()):
            tell("free_completed", *what(waiting))
        if code in (Op.MALLOC, Op.FLUSH, Op.REFUSE):
            for action, address, size, number in raised.pop(event, ()):
                name = run.state.ids[number]
                tell(Action(action).name.lower(), address, size, _signed(name.stream), name.pool)
        if code == Op.MALLOC:
            tell("alloc", *what(handle))
        elif code == Op.REFUSE:
            pool = program.refusals[handle].pool if handle >= 0 else what(evidence.life.handle[event])[3]
            stream, size = trace.streams[int(trace.stream[event])], int(trace.size[event])
            if event in spared:
                tell("alloc", spared[event].address, size, stream, pool)
                stack = list(stack)
                tell("free_requested", spared[event].address, size, stream, pool)
                tell("free_completed", spared[event].address, size, stream, pool)
            elif event in refused:
                tell("oom", 0, refused[event].size_bytes, stream, pool)
        elif code == Op.COMPLETE and handle not in done:
            tell("free_completed", *what(handle))
        elif code in (Op.FREE, Op.DEFER):
            tell("free_requested", *what(handle))
            if code == Op.FREE:
                tell("free_completed", *what(handle))
    return told


def _by_event(pairs: Iterable[tuple[int, Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event, thing in pairs:
        found.setdefault(event, []).append(thing)
    return found


def _signed(stream: int) -> int:
    """A stream handle as PyTorch writes it."""
    return stream if stream < 1 << 63 else stream - (1 << 64)
