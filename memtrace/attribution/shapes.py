"""What sizes say: copies of quantised weights, their scales, and adapters where neither their creation nor a gradient
was recorded.

A weight matrix of n elements is stored in n/2 bytes (4 bits) or n (8 bits); its 16-bit copy has 2n, its fp32 block
scales n/16 (one float a 64 elements). Source: bitsandbytes ``quantize_4bit`` (block size 64) and ``int8`` storage.

A low-rank adapter of a weight with n = in × out elements has two matrices of rank r: A with r·in elements and B with
r·out. So for one number c = r × bytes an element, every adapted weight has A = c·in, B = c·out bytes with in·out = n;
and a 4-bit weight of n elements is stored in n/2 bytes. The c that explains most stored weights is the one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct
from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag, frame_tags

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

# Workspaces that cuBLAS keeps a handle and stream: 32 MiB on Hopper and later, :4096:2:16:8 elsewhere; cuBLASLt 1 MiB.
# Source: ATen/cuda/CublasHandlePool.cpp (getChosenWorkspaceSize, parseChosenWorkspaceSize, getCUDABlasLtWorkspaceSize).
CUBLAS_WORKSPACE_BYTES = (33_554_432, 8_519_680, 1_048_576)
_SCALES_ARE_ONE_OF = (8, 16, 32, 64)  # fp32 or 16-bit scales of 64 or 128 elements, 8-bit ones of scales
_SCALE_SHARE = 64  # sizes below 1/64 of a site's largest are scales and the like, and speak for or against nothing
_ELEMENT_BYTES = (4, 2)
_RANKS = tuple(1 << power for power in range(1, 11))
_WIDTH_MULTIPLE = 32  # widths of linear layers are multiples of this in every published architecture
_MAX_SIZES = 64


def quantized_sizes(facts: Facts) -> tuple[I8, I8]:
    """(sizes of stored quantised matrices, sizes their 16-/32-bit copies and fp32 scales can have), both sorted.

    Where quantisation was not recorded, everything that was there before the trace and stayed may be such a matrix.
    """
    # Sharding cuts what was packed and frees it, but gathers the whole again.
    made = facts.has(Tag.QUANTIZE) & (facts.stays | facts.stacks.has(Tag.GATHER).any())
    stayed = facts.before_trace & facts.persistent
    eight_bits = facts.has(Tag.INT8).any()
    stored = distinct(facts.size[made])
    if not len(stored):
        stored = distinct(facts.size[stayed]) if eight_bits else _with_scales(facts.size[stayed])
        stored = distinct(np.append(stored, gathered_quantized(facts)))
    wide = [stored * 2, stored * 4] if eight_bits else [stored * 4, stored * 8]
    return stored, distinct(np.concatenate([*wide, stored // 8]))


def gathered_quantized(facts: Facts) -> I8:
    """Sizes of packed matrices that sharding brings together: products make copies of four times as much (or eight),
    and there are scales for them, which sharding leaves whole."""
    whole = distinct(facts.size[facts.has(Tag.GATHER) & ~facts.before_trace])
    copies = distinct(facts.size[facts.has(Tag.DEQUANT)])
    whole = whole[among(whole * 4, copies) | among(whole * 8, copies)]
    return whole[among(whole, facts.size[facts.before_trace & facts.persistent] * 8)]


def _with_scales(sizes: I8) -> I8:
    """Sizes (one entry an allocation) that have scales beside them, one for each; all sizes if none has."""
    found, counts = np.unique(sizes, return_counts=True)
    count_of = dict(zip(found.tolist(), counts.tolist(), strict=True))
    packed = [
        size
        for size, count in count_of.items()
        if any(size % share == 0 and count_of.get(size // share, 0) >= count for share in _SCALES_ARE_ONE_OF)
    ]
    return np.array(packed, dtype=np.int64) if packed else found


def is_weight_copy(facts: Facts) -> Bool:
    """Rows made inside a product with quantised weights whose size is that of a weight's copy or its scales.

    A product's output can have that size by chance, so a call site counts only if *all* it ever made has such sizes;
    and where one call made several such tensors of a copy's size, only its first is the copy: the weight has to be
    there before the product.
    """
    _, copies = quantized_sizes(facts)
    result = np.zeros(len(facts.size), dtype=np.bool_)
    inside = facts.stacks.has(Tag.QUANT_MATMUL) & ~facts.stacks.has(Tag.QUANTIZE | Tag.DEQUANT)
    if not len(copies) or not inside.any():
        return result
    rows = np.flatnonzero(inside[facts.timeline.allocations.stack])
    stack, size = facts.timeline.allocations.stack[rows], facts.size[rows]
    fits = among(size, copies)
    largest = np.zeros(len(inside), dtype=np.int64)
    np.maximum.at(largest, stack, size)
    contradicts = ~fits & (size * _SCALE_SHARE > largest[stack])
    fits &= ~among(stack, stack[contradicts])
    rows, stack = rows[fits], stack[fits]
    others = np.concatenate([_later_sites(facts, rows), _beside_dequantising(facts, rows)])
    result[rows[~among(stack, others)]] = True
    return result


def _beside_dequantising(facts: Facts, rows: I8) -> NDArray[np.int32]:
    """Stacks of ``rows`` whose innermost function itself calls a dequantising function: that one makes the copy."""
    table, stack = facts.stacks.python, facts.timeline.allocations.stack
    callers = set()
    for number in np.flatnonzero(facts.stacks.has(Tag.DEQUANT)[:-1]).tolist():
        frames = table.stack(number)
        inner = next((i for i, f in enumerate(frames) if frame_tags(f.filename, f.name) & Tag.DEQUANT), None)
        while inner is not None and inner < len(frames):
            frame = frames[inner]
            tags = frame_tags(frame.filename, frame.name)
            if not tags & Tag.QUANT_MATMUL:
                break
            if not tags & Tag.DEQUANT:
                callers.add((frame.filename, frame.name, frames[inner + 1 :]))
            inner += 1
    beside = [
        number
        for number in distinct(stack[rows]).tolist()
        if (frames := table.stack(number)) and (frames[0].filename, frames[0].name, frames[1:]) in callers
    ]
    return np.array(beside, dtype=np.int32)


def _later_sites(facts: Facts, rows: I8) -> NDArray[np.int32]:
    """Stacks that differ from another one of ``rows`` only in the innermost line and always come after it in a call.

    Sites that make scales only (far smaller) are not rivals of the site that makes the weight's copy.
    """
    table, stack = facts.stacks.python, facts.timeline.allocations.stack
    sites, first, inverse = np.unique(stack[rows], return_index=True, return_inverse=True)
    largest = np.zeros(len(sites), dtype=np.int64)
    np.maximum.at(largest, inverse, facts.size[rows])
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, number in enumerate(sites.tolist()):
        frames = table.stack(number)
        if not frames:
            continue
        groups.setdefault((frames[0].filename, frames[0].name, frames[1:]), []).append(i)
    later: list[int] = []
    for members in groups.values():
        top = int(largest[members].max())
        rivals = sorted((i for i in members if largest[i] * 8 > top), key=lambda i: int(first[i]))
        earliest = table.stack(int(sites[rivals[0]]))[0].line  # C++ frames can make one line many stacks
        later += [int(sites[i]) for i in rivals[1:] if table.stack(int(sites[i]))[0].line != earliest]
    return np.array(later, dtype=np.int32)


def split_scales(facts: Facts, early: Bool, packed: Bool) -> Bool:
    """Which of the ``early`` rows are scales of the ``packed`` weights, however many others have the same size.

    A packed weight of s bytes has scales of s/32 (8-bit, double quantisation) or s/8 (fp32). Each is expected once;
    where a size has more rows than that (an adapter of rank 16 on a width of 4,096 is as large as the scales of a
    square weight), the rows with the tiny tables of a quantisation state as neighbours in memory are taken first.
    """
    result = np.zeros(len(facts.size), dtype=np.bool_)
    sizes, counts = np.unique(facts.size[packed], return_counts=True)
    if not len(sizes):
        return result
    rows = np.flatnonzero(early & ~packed)
    rows = rows[np.argsort(facts.timeline.allocations.address[rows], kind="stable")]
    tiny = np.concatenate([[0, 0], facts.size[rows] <= 1024, [0, 0]]).astype(np.int64)
    tiny_near = tiny[:-4] + tiny[1:-3] + tiny[3:-1] + tiny[4:]
    for parts in (32, 8):
        expected: dict[int, int] = {}
        for size, count in zip((sizes // parts).tolist(), counts.tolist(), strict=True):
            expected[size] = expected.get(size, 0) + count
        found = {size: np.flatnonzero(facts.size[rows] == size) for size in expected}
        if sum(len(places) for places in found.values()) < sum(expected.values()):
            continue  # this is not how these weights were quantised
        for size, places in found.items():
            likely = places[np.argsort(-tiny_near[places], kind="stable")]
            result[rows[likely[: expected[size]]]] = True
        break
    return result


def adapter_sizes(candidates: I8, packed: I8) -> I8:
    """Sizes among ``candidates`` (bytes, one entry an allocation) that adapters of the ``packed`` weights have.

    Empty unless one c explains at least two different weights, or one weight that is not square: a square weight alone
    fits too many numbers.
    """
    sizes = distinct(candidates)
    stored = distinct(packed)
    if not 0 < len(sizes) <= _MAX_SIZES * 4 or not 0 < len(stored) <= _MAX_SIZES:
        return sizes[:0]
    there = set(sizes.tolist())
    best: tuple[int, set[int]] = (0, set())
    for c in sorted({rank * element for rank in _RANKS for element in _ELEMENT_BYTES}):
        found: set[int] = set()
        explained = 0
        for size in stored.tolist():
            pairs = _pairs(size * 2, c, there)
            if pairs:
                explained += 2 if all(a != b for a, b in pairs) else 1
                found.update(size for pair in pairs for size in pair)
        # Of numbers that explain as much, the one that needs fewest sizes: others find pairs by chance.
        if found and (explained, -len(found)) > (best[0], -len(best[1])):
            best = (explained, found)
    return np.array(sorted(best[1]), dtype=np.int64) if best[0] >= 2 else sizes[:0]


def _pairs(elements: int, c: int, there: set[int]) -> list[tuple[int, int]]:
    """(A, B) byte sizes present for a weight of that many elements, A ≤ B."""
    pairs = []
    for a in there:
        width, rest = divmod(a, c)
        if rest or width % _WIDTH_MULTIPLE or width == 0 or width * width > elements:
            continue
        other, rest = divmod(elements, width)
        if not rest and c * other in there:
            pairs.append((a, c * other))
    return pairs
