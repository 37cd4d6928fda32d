"""Partial sums of cuDNN's Hopper convolutions: what it would take on the whole card.

A convolution is a product in tiles, one block of threads each. The last wave of tiles rarely fills the card, so its
tiles are split into ranges of the sum, and each block keeps a partial tile in 32 bits in the workspace. How many blocks
run at once cuDNN asks the driver; without a card it plans for one group of 18 multiprocessors. So its answer is taken
apart here by the same rule, and put together for the card. The rule was read from its answers without a card (7,600
plans of chosen tiles and clusters, 98 % exact) and tried on an H200 under cuDNN 9.19: 97 % of 5,616 plans exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from memtrace.estimate.dryrun.passes import Convolution

_TILES = {
    0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256), 7: (64, 128), 9: (64, 256),
    18: (64, 192), 19: (128, 192),
}  # fmt: skip
_GROUP = 18  # multiprocessors that cuDNN takes without a card
#: Of the 132 multiprocessors of an H200, those that clusters of some sizes can use at once.
_CLUSTERED = {3: 117, 4: 120, 5: 110, 6: 102, 7: 105, 8: 120, 10: 70, 12: 84, 16: 112}
_STEP_BYTES = 128  # of a row, for each step of a sum
_LONG = 1024  # numbers: more than that are in each range of a long sum
#: What joining two ranges costs, in steps of 32 bits, by elements of a tile: where tiles are few, and in a last wave.
_FIRST = {32768: 11.3, 16384: 13.3, 8192: 17.1, 4096: 24.8}
_LAST = {32768: 12.0, 16384: 13.5, 8192: 16.7, 4096: 23.3}
#: Bytes of a number, and the weight of that cost.
_WEIGHTS = {"torch.float32": (4, 1.0), "torch.bfloat16": (2, 4.0), "torch.float16": (2, 0.5)}
#: Joining that many ranges of a last wave, where one pair of pairs costs 1.
_JOINED = (
    0.49, 0.842, 0.98, 1.16, 1.248, 1.31, 1.373, 1.44, 1.48, 1.515, 1.545, 1.573, 1.6, 1.624, 1.647, 1.669, 1.689,
)  # fmt: skip


def on_card(said_bytes: int, asked: Convolution, knobs: Mapping[str, int], multiprocessors: int) -> int:
    """The workspace of a plan with ``knobs`` (without ``CUDNN_KNOB_TYPE_``) on a card, ``said_bytes`` without one.

    Plans that the rule does not explain keep what is said.
    """
    tile = _TILES.get(knobs.get("TILE_SIZE", -1))
    if tile is None or not {"TILE_CGA_M", "WORKSPACE"} <= knobs.keys() or asked.dtype not in _WEIGHTS:
        return said_bytes
    width, weight = _WEIGHTS[asked.dtype]
    cluster = knobs["TILE_CGA_M"], knobs["TILE_CGA_N"]
    grain = (_STEP_BYTES << knobs.get("TILEK", 0)) // width
    down, across, steps = _tiles(asked, tile, grain)
    tiles = _up(down, cluster[0]) * cluster[0] * _up(across, cluster[1]) * cluster[1]
    is_split, size = not knobs.get("WORKSPACE"), prod(cluster)

    def held(most: int) -> int:
        return _held(tiles, steps << knobs.get("TILEK", 0), tile, width, weight, most, is_split)

    copies = _copies(asked, width)
    if not size <= _GROUP or copies + held(_GROUP // size * size) != said_bytes:
        return said_bytes
    clustered = _CLUSTERED if multiprocessors == 132 else {}
    return copies + held(clustered.get(size, multiprocessors // size * size))


def _tiles(asked: Convolution, tile: tuple[int, int], grain: int) -> tuple[int, int, int]:
    """Tiles down and across, and the steps of each sum."""
    taps, outputs, inputs = prod(asked.w[2:]), asked.w[0], asked.w[1]
    if asked.kind == "filter":
        return _up(outputs, tile[0]), taps * _up(inputs, tile[1]), _up(asked.y[0] * prod(asked.y[2:]), grain)
    rows, columns, summed = (asked.y, outputs, inputs) if asked.kind == "forward" else (asked.x, inputs, outputs)
    return _up(rows[0] * prod(rows[2:]), tile[0]), _up(columns, tile[1]), taps * _up(summed, grain)


def _copies(asked: Convolution, width: int) -> int:
    """Tensors that are not channels-last are copied, and padded where their channels do not fill 16 bytes."""
    copied = 0
    for sizes, channels in ((asked.x, (1,)), (asked.w, (0, 1)), (asked.y, (1,))):
        padded = [_up(size, 16 // width) * 16 // width if dim in channels else size for dim, size in enumerate(sizes)]
        if padded != [*sizes] or (not asked.channels_last and prod(sizes[2:]) > 1):
            copied += prod(padded) * width
    return copied + 16 if copied else 0


def _held(tiles: int, steps: int, tile: tuple[int, int], width: int, weight: float, most: int, is_split: bool) -> int:
    """Bytes for a counter of tiles where they are many, and for partial tiles with a flag for each pair."""
    is_first = tiles < most
    last = tiles if is_first else tiles % most
    ranges = _ranges(steps, most // last, tile, width, weight, is_first) if is_split and last else 1
    size = 4 if tiles > 2 * most else 0
    if ranges > 1:
        size += last * (ranges * prod(tile) * 4 + 4 * _pairs(ranges)) + 32
    return size and size + 127


def _ranges(steps: int, most: int, tile: tuple[int, int], width: int, weight: float, is_first: bool) -> int:
    """Into how many ranges, ``most`` or fewer, each sum is split: what ends first, joining included."""
    long = min(most, steps // (_LONG * width // _STEP_BYTES + 1))
    if is_first and long > 8:
        return long
    cost = (_FIRST if is_first else _LAST).get(prod(tile), 13.3) * weight
    begins = 0.0
    if tile == (128, 64) and width == 4:
        cost, begins = 15.5, 3.0

    def ends(ranges: int) -> float:
        if is_first:
            return _up(steps, ranges) + cost * (ranges - 1).bit_length() + (begins if ranges > 1 else 0)
        return steps / ranges + cost * (_JOINED[min(ranges - 2, len(_JOINED) - 1)] if ranges > 1 else 0)

    return min(range(1, most + 1), key=ends)


def _pairs(ranges: int) -> int:
    joined = 0
    while ranges > 1:
        ranges = _up(ranges, 2)
        joined += ranges
    return joined


def _up(number: int, of: int) -> int:
    return -(-number // of)
