"""A pass of a convolution, as cuDNN is asked for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Convolution:
    """One pass of a convolution of images ``x`` with weights ``w`` to ``y``: sizes, NCHW whatever the layout.

    ``kind``: forward, data (the gradient of x) or filter (of w).
    """

    kind: str
    dtype: str
    channels_last: bool
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    tf32: bool
    deterministic: bool
