"""From the configuration to what it asks for: the control plane's limits, and the disk tier of a rank."""

import logging
from collections.abc import Callable
from pathlib import Path

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.identity.namespace import Namespace, write_manifest
from kvtier.memory.arena import Arena
from kvtier.observe.requests import RequestTrace
from kvtier.policy.admission import AdmissionLimits
from kvtier.policy.ingestion import IngestionLimits, IngestionType
from kvtier.record.envelope import Identity
from kvtier.store.moves import Key
from kvtier.store.tiered import SHARED_DISK_BYTES, StoreLimits
from kvtier.tier.disk.base import PartStore
from kvtier.tier.disk.engines import COMPILER_ARENA_BYTES_MIN, make_io
from kvtier.tier.disk.presence import SharedPresence
from kvtier.tier.disk.segment_store import SegmentStore
from kvtier.tier.disk.shared_layout import SharedLayout
from kvtier.tier.disk.shared_store import SharedStore

logger = logging.getLogger(__name__)


def may_compile(config: Config, arena_bytes: int) -> bool:
    """Whether a rank with such an arena may have a compiler in memory: where the ring needs one anyway, or the arena is large."""
    return (config.has_disk and config.disk_io == "ring") or arena_bytes >= COMPILER_ARENA_BYTES_MIN


def open_disk(
    config: Config, root: Path, namespace: Namespace, arena: Arena, *, rank: int = 0, rank_count: int = 1
) -> SegmentStore:
    """The segment store of one rank below `root`, with the namespace's manifest beside it.

    Raises ConfigError, StoreUnavailableError: nothing is left open then.
    """
    io = make_io(config.disk_io, iodepth=config.io_depth, arena_bytes=arena.capacity_bytes)
    try:
        store = SegmentStore(
            root,
            namespace=namespace.id,
            rank=rank,
            capacity_bytes=config.disk_bytes // rank_count,
            durability=config.disk_durability,  # type: ignore[arg-type]
            free_bytes_min=config.disk_free_bytes_min,
            io=io,
            arena=arena.view(0, arena.capacity_bytes),
            bytes_a_day=config.disk_bytes_a_day // rank_count,
        )
    except BaseException:
        io.close(0.0)
        raise
    try:
        write_manifest(namespace, root)
    except BaseException:
        store.close(0.0)
        raise
    logger.info("kvtier: disk: I/O by %s, %s", store.io.name, store.io.chosen_because)
    for note in store.notes:
        logger.warning("kvtier: disk: %s", note)
    if store.arena_registered_reason:
        logger.info("kvtier: disk: the arena is not registered with the kernel: %s", store.arena_registered_reason)
    if not store.direct_io:
        logger.warning(
            "kvtier: disk_path %s is on a filesystem without direct I/O: reads and writes go through the page cache, which "
            "costs memory and speed; a local ext4 or XFS has it",
            root,
        )
    return store


def open_trace(
    config: Config, block_tokens: int, started_s: float, *, replica: int | None = None
) -> RequestTrace | None:
    """The trace of an engine's requests, where one is wanted; of one of several replicas in a file of its own. Raises ConfigError."""
    path = config.trace_path
    if path is None:
        return None
    if replica is not None:
        path = path.with_name(f"{path.stem}_{replica}{path.suffix}")
    return RequestTrace(path, config.trace_bytes_max, block_tokens, started_s)


def shared_root(config: Config) -> Path:
    """The directory that engines share. Raises ConfigError where it is none."""
    root = config.shared_storage_path
    assert root is not None
    if not root.is_dir():
        raise ConfigError(
            f"shared_storage_path is {str(root)!r}, which {'is not a directory' if root.exists() else 'does not exist'}: create it, or mount it"
        )
    return root


def open_shared(
    config: Config,
    layout: SharedLayout,
    namespace: Namespace,
    arena: Arena,
    *,
    rank: int,
    group_of: Callable[[Key], int],
    payload_bytes: tuple[int, ...],
) -> SharedStore:
    """The part store of one rank on a shared filesystem, below names that are this namespace's (see `claim`).

    Args:
        group_of: the group of a key's part.
        payload_bytes: bytes of a part, by group.

    Raises ConfigError, StoreUnavailableError: nothing is left open then.
    """
    io = make_io(
        config.disk_io,
        iodepth=config.io_depth,
        open_lookahead=config.open_lookahead or None,
        arena_bytes=arena.capacity_bytes,
    )
    store: SharedStore

    def identity(key: Key) -> Identity:
        return Identity(namespace.id, key, store.generation, group_of(key), rank)

    try:
        store = SharedStore(
            layout,
            rank=rank,
            trailer=config.shared_trailer,  # type: ignore[arg-type]
            sync_on_store=config.sync_on_store,
            free_bytes_min=config.disk_free_bytes_min,
            io=io,
            payload_bytes=lambda key: payload_bytes[group_of(key)],
            identity=identity,
        )
    except BaseException:
        io.close(0.0)
        raise
    logger.info("kvtier: shared disk: %s, I/O by %s, %s", layout.model_directory, io.name, io.chosen_because)
    for note in store.stats.notes:
        logger.warning("kvtier: shared disk: %s", note)
    if not store.direct_io:
        logger.info("kvtier: shared disk: reads and writes go through the page cache: %s", store.direct_io_reason)
    return store


def open_presence(
    config: Config, layout: SharedLayout, *, ranks: int, generation: int, clock: Callable[[], float]
) -> SharedPresence:
    """What tells the scheduler's side which parts are on a shared filesystem."""
    return SharedPresence(
        layout,
        ranks=ranks,
        clock=clock,
        generation=generation,
        markers=ranks > 1 and config.shared_trailer == "on",
        present_s=config.shared_present_s,
        absent_s=config.shared_absent_s,
    )


def preload_bytes(config: Config, arena_bytes: int, slot_bytes: tuple[int, ...]) -> int:
    """How much of an arena preloads may take: all but what `io_depth` loads and stores need at a time."""
    if not (config.enable_preload and config.preload_lookahead_requests) and config.load_planner == "off":
        return 0
    return max(0, arena_bytes - config.io_depth * max(slot_bytes))


def store_limits(
    config: Config,
    *,
    slot_bytes: tuple[int, ...],
    arena_bytes: int,
    disk_bytes: int,
    rank_count: int = 1,
    part_tokens: tuple[int, ...] = (),
) -> StoreLimits:
    """Limits of a TieredStore, whose sizes are those of one rank."""
    return StoreLimits(
        slot_bytes=slot_bytes,
        arena_bytes=arena_bytes,
        disk_bytes=disk_bytes,
        rank_count=rank_count,
        write_deadline_s=config.write_deadline_s,
        dram_policy=config.dram_policy,
        disk_policy=config.disk_policy,
        ingestion=IngestionLimits(
            IngestionType.of(config.disk_ingestion),
            inflight_bytes_max=config.disk_inflight_bytes_max,
            inflight_tokens_max=config.disk_inflight_tokens_max,
        ),
        admission=AdmissionLimits(seen_min=config.disk_admission_seen_min, by_value=config.disk_admission_by_value),
        part_tokens=part_tokens,
        disk_shared=disk_bytes == SHARED_DISK_BYTES,
        dram_keeps=config.staging_cache != "off",
        preload_bytes_max=preload_bytes(config, arena_bytes, slot_bytes),
    )


def disk_counters(store: PartStore) -> dict[str, int]:
    """What has gone over the medium since the store was opened, for metrics."""
    if isinstance(store, SharedStore):
        shared = store.stats
        return {
            "disk_written_bytes": shared.written_bytes,
            "disk_read_bytes": shared.read_bytes,
            "disk_found_parts": shared.parts_found_written,
        }
    if not isinstance(store, SegmentStore):
        return {}
    stats, endurance = store.stats(), store.endurance()
    return {
        "disk_written_bytes": stats.written_bytes,
        "disk_read_bytes": stats.read_bytes,
        "disk_corrupt_parts": stats.parts_corrupt,
        "disk_over_budget_bytes": endurance.refused_bytes,
    }
