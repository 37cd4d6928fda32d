"""The same program on a card whose driver puts segments elsewhere, or which keeps up with the host.

Of free blocks of one size the lowest address is taken, so what is reserved depends on addresses, and those on what else
the process maps (libraries, NCCL).
"""

from __future__ import annotations

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES
from memtrace.allocator.simulator import Allocator
from memtrace.allocator.whatif.addresses import AddressSpace, CardDriver, Hints, Policy


class Elsewhere:
    """One allocator under ``policy``. Blocks are named by their addresses in the run itself; sizes are bytes.

    ``keeps_up``: what other streams use (``record_stream``) is free as soon as the program gives it up.
    """

    def __init__(self, config: AllocatorConfig, policy: Policy, keeps_up: bool = False) -> None:
        self.keeps_up = keeps_up
        self._driver = CardDriver(config, AddressSpace(policy, Hints({}, {}), ()))
        self._allocator = Allocator(config, self._driver)
        self._blocks: dict[int, tuple[int, int, int]] = {}
        self.fits = True

    @property
    def peak_reserved_bytes(self) -> int:
        """The most it held."""
        return self._allocator.state.peak_bytes

    def born(self, address: int, rounded: int, stream: int) -> None:
        """The run was served."""
        number = self._allocator.state.list_of(0, rounded <= SMALL_LIMIT_BYTES, stream)
        served = self._allocator.malloc(number, rounded)
        self._driver.log.clear()
        if served is None:
            self.fits = False
        else:
            self._blocks[address] = number, *served

    def freed(self, address: int) -> None:
        """The block is free, if it wasn't before."""
        if (block := self._blocks.pop(address, None)) is not None:
            self._allocator.state.release(*block)

    def flush(self) -> None:
        """``torch.cuda.empty_cache()``."""
        self._allocator.flush()

    def limit(self, config: AllocatorConfig) -> None:
        """Another limit."""
        self._driver.config = self._allocator.config = self._allocator.state.config = config
