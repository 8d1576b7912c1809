"""Slots of the arena: which byte ranges are taken, by size class.

Parts of each group have their own size, so each group is a size class. The arena is cut into slabs of one size; a slab belongs
to one class while any of its slots is taken, and returns to the common pool when its last one is given back. So memory moves
between classes as the mix changes, and nothing is padded to the largest part. What a slab loses at its end is bounded by the
choice of its size (`choose_slab_bytes`).
"""

from collections.abc import Iterator, Mapping, Sequence

SLAB_WASTE_MAX = 0.03


def choose_slab_bytes(slot_bytes: Sequence[int], arena_bytes: int) -> int:
    """The smallest slab, a multiple of the largest slot, that loses at most 3% in every class; else the one that loses least.

    Slabs are at most an eighth of the arena (but hold at least one slot), so that every class can get some.
    """
    largest = max(slot_bytes)
    best, best_waste = largest, 1.0
    for count in range(1, max(1, arena_bytes // 8 // largest) + 1):
        slab = count * largest
        waste = max((slab % size) / slab for size in slot_bytes)
        if waste < best_waste:
            best, best_waste = slab, waste
        if waste <= SLAB_WASTE_MAX or count >= 256:
            break
    return best


class SlotAllocator:
    """Hands out slots by byte offset. Pure bookkeeping: it never touches the arena's bytes.

    Args:
        slot_bytes: bytes of one slot of each class.
        arena_bytes: bytes to hand out; what is left over below one slab is not used.
    """

    def __init__(self, slot_bytes: Sequence[int], arena_bytes: int) -> None:
        if not slot_bytes or min(slot_bytes) <= 0:
            raise ValueError(f"slot_bytes is {list(slot_bytes)}: each class needs a positive size")
        self.slot_bytes = tuple(slot_bytes)
        self.slab_bytes = choose_slab_bytes(slot_bytes, arena_bytes)
        self.slab_count = arena_bytes // self.slab_bytes
        if self.slab_count == 0:
            raise ValueError(f"an arena of {arena_bytes} bytes has no room for one slot of {max(slot_bytes)} bytes")
        self.slots_per_slab = tuple(self.slab_bytes // size for size in self.slot_bytes)
        self._free_slabs = list(range(self.slab_count - 1, -1, -1))
        self._class_of: dict[int, int] = {}
        # Free offsets of each slab in use, and for each class the slabs that have any (a dict keeps their order).
        self._free_in: dict[int, list[int]] = {}
        self._partial: tuple[dict[int, None], ...] = tuple({} for _ in self.slot_bytes)
        self._free_count = [0] * len(self.slot_bytes)

    def capacity(self, cls: int) -> int:
        """How many slots the arena would hold if all were of class `cls`."""
        return self.slab_count * self.slots_per_slab[cls]

    def holds(self, need: Mapping[int, int]) -> bool:
        """Whether an empty arena has room for so many slots of each class at once."""
        slabs = sum(-(-count // self.slots_per_slab[cls]) for cls, count in need.items())
        return slabs <= self.slab_count

    def used_bytes(self) -> int:
        """Bytes in slots that are taken."""
        return sum(
            (self.slots_per_slab[cls] - len(self._free_in[slab])) * self.slot_bytes[cls]
            for slab, cls in self._class_of.items()
        )

    def take(self, cls: int) -> int | None:
        """Offset of a slot of class `cls`, now taken, or None where there is neither a free slot nor a free slab."""
        if not self._partial[cls]:
            if not self._free_slabs:
                return None
            slab = self._free_slabs.pop()
            start = slab * self.slab_bytes
            size, count = self.slot_bytes[cls], self.slots_per_slab[cls]
            self._class_of[slab] = cls
            self._free_in[slab] = [start + place * size for place in range(count - 1, -1, -1)]
            self._partial[cls][slab] = None
            self._free_count[cls] += count
        slab = next(iter(self._partial[cls]))
        free = self._free_in[slab]
        offset = free.pop()
        if not free:
            del self._partial[cls][slab]
        self._free_count[cls] -= 1
        return offset

    def give(self, offset: int) -> None:
        """Give back a slot that was taken."""
        slab = offset // self.slab_bytes
        cls = self._class_of.get(slab)
        if cls is None or (offset - slab * self.slab_bytes) % self.slot_bytes[cls] or offset in self._free_in[slab]:
            raise ValueError(f"offset {offset} is not a slot that was taken")
        free = self._free_in[slab]
        free.append(offset)
        self._free_count[cls] += 1
        if len(free) == self.slots_per_slab[cls]:
            self._partial[cls].pop(slab, None)
            self._free_count[cls] -= len(free)
            del self._free_in[slab], self._class_of[slab]
            self._free_slabs.append(slab)
        else:
            self._partial[cls][slab] = None

    def choose_victims(self, need: Mapping[int, int], victims: Iterator[tuple[int, int]]) -> list[int] | None:
        """Offsets out of `victims` that must be given back so that `need` can be taken; None where they don't suffice.

        Nothing is changed: the caller evicts the whole batch or nothing. Victims come in the order of eviction and are taken
        as they come, whatever their class, so that classes share the arena as their use shares the order; but after two slabs'
        worth of other classes only the wanted ones are. Where that is not enough, whole slabs of other classes go, those whose
        last record is the best victim: a class that holds nothing yet gets in, however scattered the order is.

        Args:
            need: slots wanted, by class.
            victims: class and offset of each record that may go, the best victim first.
        """
        chosen: list[int] = []
        freed: dict[int, int] = {}
        free_slabs = len(self._free_slabs)
        free = dict.fromkeys(need, 0)
        for cls in need:
            free[cls] = self._free_count[cls]

        def slabs_short() -> int:
            short = -free_slabs
            for cls, count in need.items():
                missing = count - free[cls]
                if missing > 0:
                    short += -(-missing // self.slots_per_slab[cls])
            return short

        other_bytes_left = 2 * self.slab_bytes
        passed_over: dict[int, list[int]] = {}
        while slabs_short() > 0:
            victim = next(victims, None)
            if victim is None:
                return self._add_whole_slabs(chosen, passed_over, freed, slabs_short())
            cls, offset = victim
            slab = offset // self.slab_bytes
            if cls not in need:
                if other_bytes_left <= 0:
                    # Slabs come to stand in the order of their last records.
                    offsets = passed_over.pop(slab, [])
                    offsets.append(offset)
                    passed_over[slab] = offsets
                    continue
                other_bytes_left -= self.slot_bytes[cls]
            chosen.append(offset)
            freed[slab] = freed.get(slab, 0) + 1
            free_here = freed[slab] + len(self._free_in[slab])
            if cls in free:
                free[cls] += 1
            if free_here == self.slots_per_slab[cls]:
                free_slabs += 1
                if cls in free:
                    free[cls] -= free_here
        return chosen

    def _add_whole_slabs(
        self, chosen: list[int], passed_over: Mapping[int, list[int]], freed: Mapping[int, int], count: int
    ) -> list[int] | None:
        """`chosen` and what was passed over in the first `count` slabs that this empties, or None where there are fewer."""
        for slab, offsets in passed_over.items():
            if (
                freed.get(slab, 0) + len(self._free_in[slab]) + len(offsets)
                == self.slots_per_slab[self._class_of[slab]]
            ):
                chosen = chosen + offsets
                count -= 1
                if count == 0:
                    return chosen
        return None
