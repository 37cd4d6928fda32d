"""What a file holds, as text."""

from __future__ import annotations

from pathlib import PurePath

from rich.text import Text

from memtrace.allocator.config import conf_string
from memtrace.answers.info import DeviceInfo, Info
from memtrace.cache.folder import CacheFolder
from memtrace.render.text import warning_lines
from memtrace.snapshot.model import DEFAULT_POOL
from memtrace.units import counted, format_bytes, format_count, printable

_DEFAULT = str(DEFAULT_POOL)


def render_info(info: Info, cache: CacheFolder | None = None) -> list[Text]:
    """A few lines a device, and where large recordings are kept."""
    f = info.format
    if f.torch_at_least and f.torch_below:
        version = f"written by PyTorch {f.torch_at_least} or later, before {f.torch_below}"
    elif f.torch_at_least:
        version = f"written by PyTorch {f.torch_at_least} or later"
    elif f.torch_below:
        version = f"written by PyTorch before {f.torch_below}"
    else:
        version = "release unknown"
    lines = [Text.assemble((PurePath(info.file).name, "bold"), f" · {version}")]
    if info.recorded_by_memtrace:
        lines.append(Text("recorded by memtrace: phases, labels and statistics are included"))
    conf = conf_string(info.settings)
    if info.settings:
        lines.append(Text(f"allocator settings: {conf or 'defaults'}"))
    if info.host_reserved_bytes:
        lines.append(Text(f"pinned host memory: {format_bytes(info.host_reserved_bytes)}"))
    for device in info.devices:
        lines.append(Text())
        lines += _device(device)
    if cache is not None:
        kept = f"{counted(cache.files, 'large recording')}, {format_bytes(cache.bytes)}"
        lines += [Text(), Text(f"cache         {printable(cache.folder)}: {kept}")]
    if info.warnings:
        lines.append(Text())
        lines += warning_lines(info.warnings)
    return lines


def _device(device: DeviceInfo) -> list[Text]:
    duration = "" if device.duration_us is None else f" over {device.duration_us / 1e6:,.1f} s"
    events = counted(device.events, "event")
    pools = ", ".join("default" if pool == _DEFAULT else f"private {pool}" for pool in device.pools) or "none"
    actions = ", ".join(f"{name.replace('_', ' ')} {format_count(count)}" for name, count in device.actions.items())
    lines = [
        Text(f"GPU {device.device}", style="bold"),
        Text(
            f"  final state   {format_bytes(device.reserved_bytes)} reserved in "
            f"{counted(device.segments, 'segment')}, {format_bytes(device.allocated_bytes)} allocated, "
            f"{counted(device.blocks, 'block')}"
        ),
        Text(f"  trace         {events}{duration}" + (f": {actions}" if actions else "")),
        Text(f"  streams       {device.streams}; pools {pools}; stacks {device.stacks}"),
        Text(f"  out of memory {'yes' if device.has_oom else 'no'}"),
    ]
    truncated = {True: "yes: the beginning is lost", False: "no", None: "no, but recording began late"}
    lines.append(Text(f"  truncated     {truncated[device.truncated]}"))
    lines.append(
        Text("  replay        exact: block sizes and layout are known at every event")
        if device.replay_exact
        else Text(f"  replay        not exact: {device.replay_why}", style="yellow")
    )
    return lines
