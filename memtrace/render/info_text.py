"""What a file holds, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from memtrace.allocator.config import conf_string
from memtrace.answers.info import DeviceInfo, Info
from memtrace.cache.folder import CacheFolder
from memtrace.render.text import Text, warning_lines
from memtrace.snapshot.model import DEFAULT_POOL
from memtrace.units import counted, format_bytes, format_count, printable

_DEFAULT = str(DEFAULT_POOL)


def render_info(info: Info, cache: CacheFolder | None = None) -> Iterator[Text]:
    """A few lines a device, and where large recordings are kept."""
    f = info.format
    parts = [
        f"{f.torch_at_least} or later" if f.torch_at_least else "",
        f"before {f.torch_below}" if f.torch_below else "",
    ]
    known = ", ".join(filter(None, parts))
    version = f"written by PyTorch {known}" if known else "release unknown"
    yield Text.assemble((PurePath(info.file).name, "bold"), f" · {version}")
    if info.recorded_by_memtrace:
        yield Text("recorded by memtrace: phases, labels and statistics are included")
    if info.settings:
        yield Text(f"allocator settings: {conf_string(info.settings) or 'defaults'}")
    if info.host_reserved_bytes:
        yield Text(f"pinned host memory: {format_bytes(info.host_reserved_bytes)}")
    for device in info.devices:
        yield Text()
        yield from _device(device)
    if cache is not None:
        kept = f"{counted(cache.files, 'large recording')}, {format_bytes(cache.bytes)}"
        yield Text()
        yield Text(f"cache         {printable(cache.folder)}: {kept}")
    if info.warnings:
        yield Text()
        yield from warning_lines(info.warnings)


def _device(device: DeviceInfo) -> Iterator[Text]:
    duration = "" if device.duration_us is None else f" over {device.duration_us / 1e6:,.1f} s"
    pools = ", ".join("default" if pool == _DEFAULT else f"private {pool}" for pool in device.pools) or "none"
    actions = ", ".join(f"{name.replace('_', ' ')} {format_count(count)}" for name, count in device.actions.items())
    truncated = {True: "yes: the beginning is lost", False: "no", None: "no, but recording began late"}
    segments, blocks = counted(device.segments, "segment"), counted(device.blocks, "block")
    reserved, allocated = format_bytes(device.reserved_bytes), format_bytes(device.allocated_bytes)
    yield Text(device.device_name, style="bold")
    yield Text(f"  final state   {reserved} reserved in {segments}, {allocated} allocated, {blocks}")
    yield Text(f"  trace         {counted(device.events, 'event')}{duration}" + (f": {actions}" if actions else ""))
    yield Text(f"  streams       {device.streams}; pools {pools}; stacks {device.stacks}")
    yield Text(f"  out of memory {'yes' if device.has_oom else 'no'}")
    yield Text(f"  truncated     {truncated[device.truncated]}")
    if device.replay_exact:
        yield Text("  replay        exact: block sizes and layout are known at every event")
    else:
        yield Text(f"  replay        not exact: {device.replay_why}", style="yellow")
