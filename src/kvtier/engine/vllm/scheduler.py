"""Upstream's scheduling of offloading, with lookups by whole request."""

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvtier.engine.vllm.manager import KVTierManager


class _OnceAStep(logging.Filter):
    """Upstream warns at every step of every request whose store has to wait for room; kvtier counts those (`store_deferred`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "Request %s: cannot store chunks"


logging.getLogger("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler").addFilter(_OnceAStep())


class KVTierScheduler(OffloadingConnectorScheduler):
    """Keeps every decision on groups, windows and fences upstream's."""

    manager: KVTierManager

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: set[str] = set()

    def _maximal_prefix_lookup(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        keys = list(keys)
        run = self.manager.leading_run(keys, req_context)
        if req_context.req_id not in self._seen:
            self._seen.add(req_context.req_id)
            self.manager.request_seen(keys, run.length)
        return None if run.pending else run.length

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for req_id in self.manager.take_declined():
            # Upstream counts what a load promised as stored; after a failed one it has to be looked at again.
            req_status = self._req_status.get(req_id)
            for group_state in req_status.group_states if req_status is not None else ():
                group_state.next_stored_chunk_idx = 0

    def request_finished(self, request: Any) -> Any:
        self._seen.discard(request.request_id)
        return super().request_finished(request)
