"""A lost catalog, made again from what the segments say of themselves."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from kvtier.record.envelope import HEAD_BYTES_MAX, Identity, read_slot_head
from kvtier.record.errors import RecordError
from kvtier.tier.disk.base import Key
from kvtier.tier.disk.catalog import CATALOG_NAME, DAMAGED_NAME, NEW_CATALOG_NAME, Catalog, CatalogRow, damage_told
from kvtier.tier.disk.io import PAGE_BYTES, aligned_buffer
from kvtier.tier.disk.segments import Segment, Segments, sync_directory

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


def replace_damaged(directory: Path, generation: int, rows: Sequence[CatalogRow], durability: str) -> str:
    """Make a new catalog of `rows` in place of the one that is there. Returns the name under which that is kept, empty where there was none.

    The new one gets its name when it is whole: a start that is killed on the way is followed by one that does all of this again.
    """
    path, new = directory / CATALOG_NAME, directory / NEW_CATALOG_NAME
    for suffix in ("", "-wal", "-shm"):
        Path(f"{new}{suffix}").unlink(missing_ok=True)
    catalog = Catalog(directory, durability, name=new.name)
    try:
        with damage_told(new):
            catalog.reset(generation, durability)
            catalog.commit(added=rows, removed=(), forced=True)
            catalog.merge_log()
    finally:
        catalog.close()
    kept = ""
    if path.exists():
        # One is enough to look at, and nothing counts their bytes.
        for older in directory.glob(f"{DAMAGED_NAME}-*"):
            older.unlink()
        kept = f"{DAMAGED_NAME}-{time.time_ns():x}"
        path.rename(directory / kept)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    new.rename(path)
    sync_directory(directory)
    (directory / DAMAGED_NAME).unlink(missing_ok=True)
    return kept
