"""A lost catalog, made again from what the segments say of themselves."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvtier.record.envelope import HEAD_BYTES_MAX, Identity, read_slot_head
from kvtier.record.errors import RecordError
from kvtier.tier.disk.base import Key
from kvtier.tier.disk.catalog import CatalogRow
from kvtier.tier.disk.io import PAGE_BYTES, aligned_buffer
from kvtier.tier.disk.segments import Segment, Segments

_READERS = 16
_SLOTS_A_TASK = 256


def signed_hash(head: memoryview) -> int:
    """xxh3-64 as the catalog keeps it: a signed 64-bit number."""
    value = xxhash.xxh3_64_intdigest(head)
    return value - (1 << 64) if value >= 1 << 63 else value


def _scan(segment: Segment, first: int, last: int) -> list[tuple[int, Identity, int]]:
    """Slot, identity and head hash of the sealed parts in slots `first` to `last` (exclusive)."""
    page = aligned_buffer(PAGE_BYTES)
    found = []
    for slot in range(first, last):
        end = (slot + 1) * segment.slot_bytes
        try:
            if os.preadv(segment.fd, [page], end - PAGE_BYTES) != PAGE_BYTES:
                continue
            head = page[PAGE_BYTES - HEAD_BYTES_MAX :]
            found.append((slot, read_slot_head(head).identity, signed_hash(head)))
        except (OSError, RecordError):
            continue
    return found


def scan_segments(
    segments: Segments, namespace: bytes, rank: int, generation: int, part_key: Callable[[Identity], Key]
) -> list[CatalogRow]:
    """Rows of all sealed parts of this namespace, rank and generation, each key once. Reads one page a slot, on 16 threads."""
    tasks = [
        (segment, first, min(first + _SLOTS_A_TASK, segment.slots))
        for segment in segments.by_number.values()
        for first in range(0, segment.slots, _SLOTS_A_TASK)
    ]
    rows: dict[Key, CatalogRow] = {}
    with ThreadPoolExecutor(_READERS, "kvtier-disk-rebuild") as pool:
        results = pool.map(lambda task: _scan(*task), tasks)
        for (segment, _, _), found in zip(tasks, results, strict=True):
            for slot, identity, head_hash in found:
                key = part_key(identity)
                if (identity.namespace, identity.rank, identity.generation) != (
                    namespace,
                    rank,
                    generation,
                ) or key in rows:
                    continue
                number = len(rows) + 1
                rows[key] = CatalogRow(number, key, segment.number, slot, segment.slot_bytes, head_hash, 0, 0.0, number)
    return list(rows.values())
