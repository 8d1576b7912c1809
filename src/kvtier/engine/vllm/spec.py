"""The offloading spec: it builds the manager on the scheduler's side, and arena, disk store and data plane in each worker."""

import logging
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.config import Config
from kvtier.engine.copying import CopyEngine, MemoryCopyEngine
from kvtier.engine.dataplane import DataPlane, staging_bytes_of
from kvtier.engine.opening import may_compile, open_disk, open_shared, open_trace, shared_root
from kvtier.engine.vllm.fingerprint import namespace_of
from kvtier.engine.vllm.manager import KVTierManager
from kvtier.engine.vllm.messages import KVTierHandshake
from kvtier.engine.vllm.metrics import definitions
from kvtier.engine.vllm.startup import let_vllm_scan_llvmlite
from kvtier.engine.vllm.worker import KVTierWorker, layouts_of
from kvtier.errors import ConfigError
from kvtier.identity.namespace import Namespace
from kvtier.memory.arena import PAGE_BYTES, Arena, RankMemory, available_memory_bytes, require_memory_of_ranks
from kvtier.record.envelope import slot_bytes
from kvtier.store.tiered import SHARED_DISK_BYTES
from kvtier.tier.disk.base import PartStore
from kvtier.tier.disk.shared_layout import SharedLayout, claim
from kvtier.tier.disk.shared_store import SharedStore

logger = logging.getLogger(__name__)


class KVTierSpec(OffloadingSpec):
    """Built by `KVTierConnector`, which passes what upstream's factory does not: vLLM's and kvtier's own configuration."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def __init__(
        self,
        offloading: OffloadingConfig,
        vllm_config: VllmConfig | None = None,
        kv_cache_config: KVCacheConfig | None = None,
        config: Config | None = None,
    ) -> None:
        if vllm_config is None or kv_cache_config is None or config is None:
            raise ConfigError(
                'KVTierSpec does not work under another connector: set "kv_connector": "KVTierConnector" and '
                '"kv_connector_module_path": "kvtier.engine.vllm.connector", and leave spec_name away'
            )
        super().__init__(offloading)
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.settings = config
        self.offload_prompt_only = not config.store_decode_blocks
        self.kv_caches: Mapping[str, torch.Tensor] = {}
        self.handshake: KVTierHandshake | None = None
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None

    @property
    def replica(self) -> int | None:
        """This engine's number among data parallel replicas; None for an engine alone, and for the first replica of a model without experts.

        Those vLLM makes engines of size 1, of which only the index still tells them apart.
        """
        parallel = self.config.parallel
        several = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
        return parallel.data_parallel_index if several else None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            part_tokens = [tokens * self.blocks_per_chunk for tokens in self.tokens_per_block]
            self._manager = KVTierManager(
                self.settings,
                [group.group_id for group in self.config.groups],
                part_tokens,
                trace=open_trace(self.settings, part_tokens[0], time.monotonic(), replica=self.replica),
                publishes=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self._build_worker(kv_caches)
            let_vllm_scan_llvmlite()
        return self._worker

    def _build_worker(self, kv_caches: CanonicalKVCaches) -> KVTierWorker:
        settings, parallel = self.settings, self.config.parallel
        layouts = layouts_of(kv_caches, self.blocks_per_chunk)
        sizes = tuple(slot_bytes(layout.payload_bytes) for layout in layouts)
        namespace = namespace_of(
            self.vllm_config, self.kv_cache_config, self.config, self.kv_caches, settings.namespace_label
        )
        rank_bytes = settings.rank_dram_bytes(parallel.world_size) // PAGE_BYTES * PAGE_BYTES
        staging_bytes = staging_bytes_of(rank_bytes, sizes) if settings.has_disk else 0
        least_bytes = staging_bytes + 2 * sum(sizes)
        if rank_bytes < least_bytes:
            raise ConfigError(
                f"dram_bytes (or staging_mem) makes {rank_bytes:,} bytes for each of {parallel.world_size} ranks: this "
                f"model's parts take up to {max(sizes):,} bytes, set dram_bytes to at least "
                f"{least_bytes * parallel.world_size:,}, or make parts smaller with blocks_per_chunk or vLLM's block_size"
            )
        self._require_memory(rank_bytes)
        arena = Arena(rank_bytes)
        payload_bytes = tuple(layout.payload_bytes for layout in layouts)
        disk = self._open_disk(namespace, arena, payload_bytes)
        plane = DataPlane(
            arena,
            layouts,
            self._copy_engine(arena, kv_caches.tensors[0].tensor.device),
            disk,
            namespace=namespace.id,
            rank=parallel.rank,
            slots_bytes=rank_bytes - staging_bytes,
            verify=settings.verify_checksums,
            load_deadline_s=settings.load_deadline_s,
        )
        shared = disk.layout if isinstance(disk, SharedStore) else None
        entries: tuple[list[bytes], list[int]] = ([], [])
        disk_bytes = 0
        if shared is not None:
            disk_bytes = SHARED_DISK_BYTES
        elif disk is not None:
            entries = disk.keys_and_depths()
            disk_bytes = settings.disk_bytes // parallel.world_size
        self.handshake = KVTierHandshake(sizes, plane.slots_bytes, disk_bytes, plane.generation, entries, shared)
        logger.info(
            "kvtier: rank %d: parts of %s bytes, %.2f GiB of DRAM, disk %s",
            parallel.rank,
            ", ".join(f"{size:,}" for size in sizes),
            rank_bytes / 2**30,
            settings.disk_path or settings.shared_storage_path or "off",
        )
        return KVTierWorker(
            plane,
            self.blocks_per_chunk,
            disk,
            wait_deadline_s=settings.load_deadline_s,
            close_deadline_s=settings.close_deadline_s,
        )

    def _require_memory(self, rank_bytes: int) -> None:
        """Before any rank allocates: all of them have come here and say what they want, or none gets further."""
        own = RankMemory(platform.node(), rank_bytes, available_memory_bytes())
        ranks = [own]
        if self.config.parallel.world_size > 1:
            ranks = [own] * self.config.parallel.world_size
            # With data parallelism of its own, vLLM's world is that of all replicas.
            world = get_world_group()
            engine = world if world.world_size == len(ranks) else get_inner_dp_world_group()
            torch.distributed.all_gather_object(ranks, own, group=engine.cpu_group)
        require_memory_of_ranks(own, ranks, "dram_bytes")

    def _open_disk(self, namespace: Namespace, arena: Arena, payload_bytes: tuple[int, ...]) -> PartStore | None:
        root, parallel = self.settings.disk_path, self.config.parallel
        if self.settings.shared_storage_path is not None:
            places = {group.group_id: place for place, group in enumerate(self.config.groups)}
            return open_shared(
                self.settings,
                claim(self._shared_layout(shared_root(self.settings)), namespace),
                namespace,
                arena,
                rank=parallel.rank,
                group_of=lambda key: places[get_offload_group_idx(OffloadKey(key))],
                payload_bytes=payload_bytes,
            )
        if root is None:
            return None
        if self.replica is not None and root.is_dir():
            # Replicas are engines of their own: each owns a store.
            root = root / f"replica_{self.replica}"
            root.mkdir(exist_ok=True)
        return open_disk(self.settings, root, namespace, arena, rank=parallel.rank, rank_count=parallel.world_size)

    def _shared_layout(self, root: Path) -> SharedLayout:
        """py-kvcache's names for this engine's parts."""
        parallel, groups = self.config.parallel, self.config.groups
        model = self.settings.shared_model_name or self.vllm_config.model_config.model
        if not self.settings.shared_model_name and Path(model).is_absolute():
            model = Path(model).name
        return SharedLayout(
            root,
            model=model,
            block_size=groups[0].tokens_per_block,
            blocks_per_file=self.blocks_per_chunk,
            dtype=str(self.vllm_config.cache_config.cache_dtype).removeprefix("torch."),
            tp=parallel.tp_size,
            pp=parallel.pp_size,
            pcp=parallel.pcp_size,
            key_suffix=bytes(make_offload_key(b"", groups[0].group_id)) if len(groups) == 1 else b"",
        )

    def _copy_engine(self, arena: Arena, device: torch.device) -> CopyEngine:
        if device.type == "cpu":
            return MemoryCopyEngine(compiled=may_compile(self.settings, arena.capacity_bytes))
        if current_platform.is_cuda_alike():
            from kvtier.engine.vllm.cuda import CudaCopyEngine

            return CudaCopyEngine(arena, device)
        raise ConfigError(f"the engine's cache is on a {device.type} device: kvtier copies from CPUs and CUDA GPUs")
