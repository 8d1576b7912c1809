"""Where a part's bytes lie in an engine's cache: from block ids and slots to lists of ranges to copy.

A group's cache is a list of regions (a layer, or a pair of aliased layers): block `b` of a region starts at
`base + b * stride` and its first `page` bytes are worth keeping. A part is the pages of its blocks, region after region, and
in each region block after block, as py-kvcache has it in its files. The same lists serve copies on a CPU and on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's blocks: address of block 0, bytes from block to block, bytes of a block that count."""

    base: int
    stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Ranges:
    """Copies to make: `sizes[i]` bytes between `engine[i]` and `arena[i]`, all int64 arrays of one length."""

    engine: Addresses
    arena: Addresses
    sizes: Addresses

    @property
    def total_bytes(self) -> int:
        """Bytes to copy."""
        return int(self.sizes.sum())


class GroupLayout:
    """The regions of one group, and the size of its parts.

    Args:
        regions: in the order in which they lie in a part.
        blocks_per_chunk: blocks of one part.
    """

    def __init__(self, regions: Sequence[Region], blocks_per_chunk: int) -> None:
        self.regions = tuple(regions)
        self.blocks_per_chunk = blocks_per_chunk
        self._base = np.array([region.base for region in regions], dtype=np.int64)
        self._stride = np.array([region.stride_bytes for region in regions], dtype=np.int64)
        self._page = np.array([region.page_bytes for region in regions], dtype=np.int64)
        self._place = np.concatenate(([0], np.cumsum(self._page)[:-1])).astype(np.int64) * blocks_per_chunk
        self.payload_bytes = int(self._page.sum()) * blocks_per_chunk

    def ranges(self, block_ids: Addresses, slots: Addresses, places: Addresses) -> Ranges:
        """Ranges of whole blocks.

        Args:
            block_ids: the engine's blocks.
            slots: for each, the address of its slot.
            places: for each, which of its part's blocks it is.
        """
        engine = self._base[None, :] + block_ids[:, None] * self._stride[None, :]
        arena = slots[:, None] + self._place[None, :] + places[:, None] * self._page[None, :]
        sizes = np.ascontiguousarray(np.broadcast_to(self._page, engine.shape))
        return Ranges(engine.ravel(), arena.ravel(), sizes.ravel())


@dataclass(frozen=True, slots=True)
class Piece:
    """One group's share of a job: which engine blocks belong to which of the group's parts.

    Attributes:
        group: the group.
        parts: place of each of its parts in the job's list, in order.
        block_ids: the engine's blocks, int64, dealt to the parts in order.
        first: how many blocks of the first part are left out: in a load because the engine has them, in a store because it has them no more.
    """

    group: int
    parts: tuple[int, ...]
    block_ids: Addresses
    first: int

    def whole_parts(self, layout: GroupLayout) -> tuple["Piece", tuple[int, ...]]:
        """For a store: what of this piece has all its blocks, and the parts that have not.

        Where more blocks are missing than the first part's first ones, nothing says which: then no part is whole.
        """
        missing = len(self.parts) * layout.blocks_per_chunk - len(self.block_ids)
        if missing == 0:
            return self, ()
        if missing != self.first:
            return Piece(self.group, (), self.block_ids[:0], 0), self.parts
        rest = self.block_ids[layout.blocks_per_chunk - self.first :]
        return Piece(self.group, self.parts[1:], rest, 0), self.parts[:1]

    def select(
        self, layout: GroupLayout, slot_addresses: Addresses, wanted: npt.NDArray[np.bool_] | None = None
    ) -> Ranges:
        """Ranges of those parts for which `wanted` (one flag for each part of the job) is set, or of all.

        `slot_addresses` holds the address of the slot of each part of the job.
        """
        places = np.arange(self.first, self.first + len(self.block_ids), dtype=np.int64)
        owners = np.array(self.parts, dtype=np.int64)[places // layout.blocks_per_chunk]
        places %= layout.blocks_per_chunk
        if wanted is None:
            return layout.ranges(self.block_ids, slot_addresses[owners], places)
        mask = wanted[owners]
        return layout.ranges(self.block_ids[mask], slot_addresses[owners][mask], places[mask])


def join(ranges: Sequence[Ranges]) -> Ranges:
    """One list out of several, of which there is at least one."""
    if len(ranges) == 1:
        return ranges[0]
    return Ranges(
        np.concatenate([r.engine for r in ranges]),
        np.concatenate([r.arena for r in ranges]),
        np.concatenate([r.sizes for r in ranges]),
    )
