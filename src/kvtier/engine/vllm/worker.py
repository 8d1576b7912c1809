"""The worker's side of offloading: vLLM's jobs, turned into jobs of the data plane."""

import logging
import time
from collections.abc import Sequence

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.engine.dataplane import DataPlane
from kvtier.engine.layout import GroupLayout, Piece, Region
from kvtier.engine.opening import disk_counters
from kvtier.engine.vllm.messages import PartsSpec
from kvtier.engine.vllm.metrics import stats_of
from kvtier.store.moves import Action, LoadFailed, Outcome, PartPlace, StoreFailed
from kvtier.tier.disk.base import PartStore

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 1.0


def layouts_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[GroupLayout]:
    """One layout for each group: its layers' blocks are the first `page_size_bytes` of each row of their tensors."""
    layouts = []
    for refs in kv_caches.group_data_refs:
        regions = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            stride_bytes = tensor.stride(0) * tensor.element_size()
            regions.append(Region(tensor.data_ptr(), stride_bytes, ref.page_size_bytes))
        layouts.append(GroupLayout(regions, blocks_per_chunk))
    return layouts


def pieces_of(spec: GPULoadStoreSpec, parts: Sequence[PartPlace], blocks_per_chunk: int) -> list[Piece]:
    """Deal the engine's blocks, which come group after group, to the parts, which do too.

    A group's first block may lie inside its first chunk: in a load, since what comes before is in the engine already; in a store, since a
    window has moved on.
    """
    pieces = []
    start = 0
    for group, size in enumerate(spec.group_sizes):
        if size:
            first = spec.block_indices[group] % blocks_per_chunk
            mine = tuple(place for place, part in enumerate(parts) if part.group == group)
            pieces.append(Piece(group, mine, np.asarray(spec.block_ids[start : start + size], dtype=np.int64), first))
        start += size
    return pieces


class KVTierWorker(OffloadingWorker):
    """Hands vLLM's jobs to a DataPlane, and keeps what failed for the connector to report."""

    def __init__(
        self,
        plane: DataPlane,
        blocks_per_chunk: int,
        disk: PartStore | None,
        *,
        wait_deadline_s: float,
        close_deadline_s: float,
    ) -> None:
        self._plane = plane
        self._disk = disk
        self._reported: dict[str, int] = {}
        self._report_at_s = 0.0
        self._blocks_per_chunk = blocks_per_chunk
        self._wait_deadline_s = wait_deadline_s
        self._close_deadline_s = close_deadline_s
        self._outcomes: list[Outcome] = []
        self._failed_loads: set[int] = set()
        self._ended_loads: set[int] = set()
        self._refused: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, PartsSpec)
        try:
            pieces = pieces_of(src_spec, dst_spec.parts, self._blocks_per_chunk)
            self._plane.submit_store(job_id, dst_spec.parts, pieces)
        except Exception as error:
            logger.warning("kvtier: a store could not be started, its parts are not kept", exc_info=True)
            self._refuse(job_id, StoreFailed([part.key for part in dst_spec.parts], f"not started: {error!r}"))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, PartsSpec)
        try:
            pieces = pieces_of(dst_spec, src_spec.parts, self._blocks_per_chunk)
            self._plane.submit_load(job_id, src_spec.load_id, src_spec.parts, pieces)
        except Exception as error:
            logger.warning("kvtier: a load could not be started, its request is recomputed", exc_info=True)
            self._refuse(job_id, LoadFailed(src_spec.load_id, {}, f"not started: {error!r}"))
            self._ended_loads.add(job_id)
            self._failed_loads.add(job_id)
        return True

    def _refuse(self, job_id: int, outcome: Outcome) -> None:
        """End a job that never began: an exception here would end the engine."""
        self._outcomes.append(outcome)
        self._refused.append(TransferResult(job_id, True, None, 0.0))

    def get_finished(self) -> list[TransferResult]:
        """Every job that ended, as a success: upstream knows no other end. What failed is in `take_failed_loads` and the outcomes."""
        results, outcomes = self._plane.poll()
        self._outcomes += outcomes
        for result in results:
            if result.is_load:
                self._ended_loads.add(result.job_id)
                if not result.ok:
                    self._failed_loads.add(result.job_id)
        refused, self._refused = self._refused, []
        return refused + [
            TransferResult(result.job_id, True, result.copied_bytes or None, result.seconds) for result in results
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._plane.wait(set(job_ids), self._wait_deadline_s)

    def shutdown(self) -> None:
        self._plane.close(self._close_deadline_s)

    # ---- for the connector

    def take_stats(self) -> OffloadingConnectorStats | None:
        """What has gone over this rank's disk since the last report, at most once a second; None for nothing new."""
        now_s = time.monotonic()
        if self._disk is None or now_s < self._report_at_s:
            return None
        self._report_at_s = now_s + _REPORT_EVERY_S
        stats = stats_of(disk_counters(self._disk), self._reported, {})
        return None if stats.is_empty() else stats

    def act(self, actions: Sequence[Action]) -> None:
        """Take the control plane's actions of one step."""
        self._plane.act(actions)

    def wait_for_news(self, deadline_s: float) -> None:
        """Sleep until something ended, at most `deadline_s` seconds."""
        if not (self._outcomes or self._refused):
            self._plane.wait_for_news(deadline_s)

    def take_outcomes(self) -> list[Outcome]:
        """Outcomes since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_ended_loads(self) -> tuple[set[int], set[int]]:
        """Job ids of loads that ended since the last call: all, and those that failed."""
        ended, self._ended_loads = self._ended_loads, set()
        failed, self._failed_loads = self._failed_loads, set()
        return ended, failed
