"""A part store told no fault is a part store like any other."""

from pathlib import Path

from kvtier.testing.media import FaultyPartStore
from kvtier.testing.part_store import PartStoreSuite
from kvtier.tier.disk.base import PartStore
from kvtier.tier.disk.segment_store import SegmentStore


class TestFaultyPartStoreWithoutFaults(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return FaultyPartStore(SegmentStore(path, namespace=b"n" * 16, capacity_bytes=capacity_bytes))
