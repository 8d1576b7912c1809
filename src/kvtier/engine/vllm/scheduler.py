"""Upstream's scheduling of offloading, with lookups by whole request, the break-even gate and the load planner."""

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvtier.engine.vllm.manager import KVTierManager
from kvtier.engine.vllm.planning import RequestPlanner
from kvtier.engine.vllm.startup import read_costs
from kvtier.plan.planner import Decision


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

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._seen: set[str] = set()
        self.planner = RequestPlanner(spec.settings, read_costs(vllm_config, spec.settings), self.manager)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.planner.arrived(request.request_id)

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
            for group, (config, state) in enumerate(zip(self.config.kv_group_configs, states, strict=True)):
                hit_count = min(hit_tokens // config.tokens_per_chunk, len(state.offload_keys))
                self.manager.request_seen(
                    state.offload_keys, hit_count, hints if isinstance(hints, dict) else {}, group
                )
        return answer if answer[0] is None else self._planned(request, num_computed_tokens, answer[0])

    def _planned(self, request: Any, num_computed_tokens: int, hit_tokens: int) -> tuple[int | None, bool]:
        req_status = self._req_status[request.request_id]
        decision = self.planner.answer(
            request,
            num_computed_tokens,
            hit_tokens,
            lambda: self._keys_of_load(req_status, num_computed_tokens, hit_tokens),
            req_status.req_context,
        )
        if decision is Decision.DEFER:
            return None, False
        if decision is Decision.DECLINE:
            # What the lookup has noted for a load that does not come.
            req_status.partial_tail_boundary = None
            req_status.update_num_hit_chunks(num_computed_tokens)
            hit_tokens = 0
        return hit_tokens, hit_tokens > 0

    def _keys_of_load(self, req_status: Any, num_computed_tokens: int, hit_tokens: int) -> list[OffloadKey]:
        """The parts that a load of this hit would take, as upstream chooses them."""
        end_tokens = num_computed_tokens + hit_tokens
        keys: list[OffloadKey] = []
        for config, state in zip(self.config.kv_group_configs, req_status.group_states, strict=True):
            chunks = end_tokens // config.tokens_per_chunk
            if req_status.partial_tail_boundary is not None:
                keys.append(
                    self._make_boundary_key(req_status.req, config.group_idx, end_tokens, req_status.req_context)
                )
            elif chunks * config.tokens_per_chunk < end_tokens:
                chunks += 1
            own = state.offload_keys[num_computed_tokens // config.tokens_per_chunk : chunks]
            window = config.load_window_size_in_chunks(end_tokens)
            keys += own if window is None else own[-window:]
        return keys

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.planner.scheduled(request.request_id)

    def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
        if self.planner.withholds(req_status.req):
            return 0
        return int(super()._calc_num_offloadable_tokens(req_status, num_computed_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.planner.end_step()
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for req_id in self.manager.take_declined():
            # Upstream counts what a load promised as stored; after a failed one it has to be looked at again.
            req_status = self._req_status.get(req_id)
            for group_state in req_status.group_states if req_status is not None else ():
                group_state.next_stored_chunk_idx = 0

    def request_finished(self, request: Any) -> Any:
        self.planner.ended(request)
        req_status = self._req_status.get(request.request_id)
        if request.request_id in self._seen and req_status is not None:
            self._seen.discard(request.request_id)
            for config, state in zip(self.config.kv_group_configs, req_status.group_states, strict=True):
                prompt = state.offload_keys[: request.num_prompt_tokens // config.tokens_per_chunk]
                self.manager.request_answered(prompt, request.num_output_tokens)
        return super().request_finished(request)
