"""Places in libraries that ask for a real device; replaced for as long as a dry run lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Managed:
    """Counts optimizer states in managed memory, which lies outside PyTorch's allocator."""

    def __init__(self) -> None:
        self.bytes = 0

    def get_paged(self, *shape: int, dtype: Any = torch.float32, device: Any = None) -> Any:
        """``bitsandbytes.functional.get_paged``: a buffer in managed memory (here: one that nobody counts)."""
        buffer = torch.empty(shape, dtype=dtype, device="cpu" if 0 in shape else "meta")
        self.bytes += buffer.numel() * buffer.element_size()
        buffer.is_paged = True
        return buffer


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of ``owner`` replaced for the duration of the block; those it doesn't have are left out."""
    before = {name: getattr(owner, name) for name in attributes if hasattr(owner, name)}
    for name in before:
        setattr(owner, name, attributes[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def device_free_libraries(managed: Managed, uncounted: Any) -> Iterator[None]:
    """Optimizers that run on ``meta``: no device checks, no synchronisation; paged buffers go through ``managed``.

    ``uncounted``: a context in which new tensors are not noted.
    """
    from torch.optim import adam

    def get_paged(*shape: int, dtype: Any = torch.float32, device: Any = None) -> Any:
        with uncounted():
            return managed.get_paged(*shape, dtype=dtype, device=device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(adam, _device_dtype_check_for_fused=_nothing))
        try:
            import bitsandbytes.functional as functional
            from bitsandbytes.optim import optimizer
        except ImportError:
            pass
        else:
            stack.enter_context(
                replaced(functional, get_paged=get_paged, prefetch_tensor=_nothing, fill=_nothing, name2qmap={})
            )
            stack.enter_context(replaced(optimizer, sync_gpu=_nothing))
        with contextlib.suppress(ImportError):
            from trl.kernels import chunked_logprob

            # On a GPU these are kernels that work in place.
            in_place = dict.fromkeys(("_forward_tile", "_backward_tile", "_addmm_fp32"), _nothing)
            stack.enter_context(replaced(chunked_logprob, **in_place))
        yield
