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

HINTS = "kvtier"
"""Key of kvtier's own wishes in a request's kv_transfer_params."""


class KVTierScheduler(OffloadingConnectorScheduler):
    """Keeps every decision on groups, windows and fences upstream's."""

    manager: KVTierManager

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: set[str] = set()

    def _maximal_prefix_lookup(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        run = self.manager.leading_run(list(keys), req_context)
        return None if run.pending else run.length

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, **bounds: Any
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens, **bounds)
        if answer[0] is not None and request.request_id not in self._seen:
            self._seen.add(request.request_id)
            hints = (request.kv_transfer_params or {}).get(HINTS)
            hit_tokens = num_computed_tokens + answer[0]
            states = self._req_status[request.request_id].group_states
            if self.manager.traces:
                count = request.num_prompt_tokens // self.config.kv_group_configs[0].tokens_per_chunk
                prompt = states[0].offload_keys[:count]
                self.manager.request_arrived(request.request_id, prompt, request.num_prompt_tokens)
            for group, (config, state) in enumerate(zip(self.config.kv_group_configs, states, strict=True)):
                hit_count = min(hit_tokens // config.tokens_per_chunk, len(state.offload_keys))
                self.manager.request_seen(
                    state.offload_keys, hit_count, hints if isinstance(hints, dict) else {}, group
                )
        return answer

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for req_id in self.manager.take_declined():
            # Upstream counts what a load promised as stored; after a failed one it has to be looked at again.
            req_status = self._req_status.get(req_id)
            for group_state in req_status.group_states if req_status is not None else ():
                group_state.next_stored_chunk_idx = 0

    def request_finished(self, request: Any) -> Any:
        self.manager.request_ended(request.request_id, request.num_output_tokens)
        req_status = self._req_status.get(request.request_id)
        if request.request_id in self._seen and req_status is not None:
            self._seen.discard(request.request_id)
            for config, state in zip(self.config.kv_group_configs, req_status.group_states, strict=True):
                prompt = state.offload_keys[: request.num_prompt_tokens // config.tokens_per_chunk]
                self.manager.request_answered(prompt, request.num_output_tokens)
        return super().request_finished(request)
