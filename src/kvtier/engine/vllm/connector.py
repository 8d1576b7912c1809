"""KVTierConnector: upstream's offloading connector, whose failures are misses and whose control plane is kvtier's.

Configured by name alone, see the README. All scheduling of groups, windows and fences stays upstream's. Added here: lookups by
whole request, failures reported as recompute, and the actions and outcomes of the two planes, which ride on the connector's own
metadata. The way of one step: the scheduler's side builds metadata (jobs and actions); each worker takes the actions, submits the
jobs, and answers with jobs that ended and outcomes; the scheduler's side applies outcomes first, then ends the jobs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvtier.engine.vllm.manager import KVTierManager
from kvtier.engine.vllm.messages import KVTierHandshake, KVTierMetadata, KVTierWorkerMetadata
from kvtier.engine.vllm.scheduler import KVTierScheduler
from kvtier.engine.vllm.spec import KVTierSpec
from kvtier.engine.vllm.startup import (
    adjust_engine,
    check_engine,
    give_time_to_close,
    read_costs,
    read_settings,
    show_log,
)
from kvtier.engine.vllm.worker import KVTierWorker
from kvtier.errors import StoreUnavailableError

# How long an idle step waits for something to end.
IDLE_WAIT_S = 0.002


class KVTierConnector(OffloadingConnector):
    """See the module's text."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Upstream's constructor would build a spec by its own factory, which knows too little.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        show_log()
        settings = read_settings(vllm_config)
        check_engine(vllm_config, kv_cache_config, settings.config)
        adjust_engine(vllm_config, kv_cache_config)
        offloading = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = False
        self._spec = KVTierSpec(offloading, vllm_config, kv_cache_config, settings.config)
        self._load_requests: dict[int, str] = {}
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: OffloadingConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KVTierScheduler(self._spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = OffloadingConnectorWorker(self._spec, vllm_config, kv_cache_config)

    @property
    def manager(self) -> KVTierManager:
        """The scheduler's side's manager."""
        manager = self.scheduler.manager
        assert isinstance(manager, KVTierManager)
        return manager

    # ---- the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        handshakes = [rank for rank in ranks if isinstance(rank, KVTierHandshake)]
        expected = self._spec.config.parallel.world_size
        if len(handshakes) != expected:
            raise StoreUnavailableError(
                f"{len(handshakes)} of {expected} workers have reported their state: kvtier needs all"
            )
        self.manager.begin(handshakes)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if self.connector_scheduler is not None:
            self.connector_scheduler.gpu_block_pool = gpu_block_pool

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.manager.steps.scheduled(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        return KVTierMetadata(
            load_jobs=meta.load_jobs,
            store_jobs=meta.store_jobs,
            jobs_to_flush=meta.jobs_to_flush,
            actions=self.manager.take_actions(),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVTierWorkerMetadata):
            self.manager.apply(meta.outcomes)
        super().update_connector_output(connector_output)

    # ---- the workers' side

    @property
    def _worker(self) -> KVTierWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, KVTierWorker)
        return worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._spec.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._spec.handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._connector_metadata
        assert isinstance(meta, KVTierMetadata)
        actions, meta.actions = meta.actions, []
        self._worker.act(actions)
        self._load_requests.update((job_id, job.req_id) for job_id, job in meta.load_jobs.items())
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        meta = self._connector_metadata
        if isinstance(meta, KVTierMetadata) and meta.idle:
            # Between steps a worker of vLLM spins on sched_yield, taking the GIL back each time before a thread that waits for it has
            # got a busy core: step after idle step what is under way would never end. A real sleep lets it.
            self._worker.wait_for_news(IDLE_WAIT_S)
        results = super().get_transfer_results(finished_req_ids)
        ended, failed = self._worker.take_ended_loads()
        for job_id in ended:
            req_id = self._load_requests.pop(job_id, None)
            if req_id is not None and job_id in failed:
                results.failed_recving.add(req_id)
        return results

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_worker is not None:
            return self._worker.take_stats()
        self.manager.steps.answered()
        return super().get_kv_connector_stats()

    def build_connector_worker_meta(self) -> KVTierWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        outcomes = self._worker.take_outcomes() if self.connector_worker is not None else []
        if meta is None:
            return KVTierWorkerMetadata(outcomes=outcomes) if outcomes else None
        return KVTierWorkerMetadata(
            completed_jobs=meta.completed_jobs, transfer_stats=meta.transfer_stats, outcomes=outcomes
        )

    # ---- the front end

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # The first time that vLLM asks this class anything: a mistake in the settings ends the start here.
        read_costs(vllm_config, read_settings(vllm_config).config)
        return super().get_required_kvcache_layout(vllm_config)  # type: ignore[no-any-return]

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any) -> KVConnectorPromMetrics:
        settings = read_settings(vllm_config)
        # Upstream finds the definitions of metrics by the name of a spec.
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra.update(spec_name=KVTierSpec.__name__, spec_module_path=KVTierSpec.__module__)
        give_time_to_close(vllm_config, settings.config.close_deadline_s)
        return super().build_prom_metrics(vllm_config, *args)
