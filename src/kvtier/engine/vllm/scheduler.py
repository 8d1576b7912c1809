"""Upstream's scheduling of offloading, with lookups by whole request, preloads for those that wait, the break-even gate and the load planner."""

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvtier.engine.vllm.lora import Adapters, SaltedRequest, UnkeyedError
from kvtier.engine.vllm.manager import KVTierManager
from kvtier.engine.vllm.planning import RequestPlanner
from kvtier.engine.vllm.startup import read_costs
from kvtier.plan.planner import Decision
from kvtier.store.tiered import Part


class _OnceAStep(logging.Filter):
    """Upstream warns at every step of every request whose store has to wait for room; kvtier counts those (`store_deferred`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "Request %s: cannot store chunks"


logging.getLogger("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler").addFilter(_OnceAStep())

HINTS = "kvtier"
"""Key of kvtier's own wishes in a request's kv_transfer_params."""


@dataclass(slots=True)
class _Waiting:
    """A request that waits, and the parts that it will load, once they are known."""

    request: Any
    wanted: list[Part] | None = None


class _EventsTracker(OffloadingEventsTracker):
    """Describes parts by vLLM's own hashes, those of its GPU events, where kvtier's keys are mixed."""

    def _build_event_metadata(self, req: Any, *place: Any) -> Any:
        return super()._build_event_metadata(_plain(req), *place)

    def _record_partial_tail(self, req: Any, *place: Any) -> None:
        super()._record_partial_tail(_plain(req), *place)


def _plain(request: Any) -> Any:
    return request.plain if isinstance(request, SaltedRequest) else request


class KVTierScheduler(OffloadingConnectorScheduler):
    """Keeps every decision on groups, windows and fences upstream's."""

    manager: KVTierManager

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._events_tracker = _EventsTracker(spec.kv_events_config)
        self._seen: set[str] = set()
        self._adapters = Adapters(time.time(), trusted=self.manager.config.trust_lora_paths)
        self.planner = RequestPlanner(spec.settings, read_costs(vllm_config, spec.settings), self.manager)
        # Requests that wait and have not all that they will load in DRAM yet, in order of arrival, which is vLLM's own unless priorities say otherwise.
        self._waiting: dict[str, _Waiting] = {}
        self.gpu_block_pool: Any = None
        self._reset_untold = False
        if self._events_tracker.self_describing_enabled:
            self.manager.preloaded = self._describe

    def _maximal_prefix_lookup(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        run = self.manager.leading_run(list(keys), req_context)
        return None if run.pending else run.length

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, **bounds: Any
    ) -> tuple[int | None, bool]:
        self.manager.begins(request.request_id)
        # Where the planner decides whether to wait for what is being read ahead, a lookup says nothing of it.
        with self.manager.through_reads() if self.planner.plans else contextlib.nullcontext():
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
        if answer[0] is not None:
            answer = self._planned(request, num_computed_tokens, answer[0], bounds)
        if answer[0] is not None:
            self.manager.lookups_ended(request.request_id)
        return answer

    def _planned(
        self, request: Any, num_computed_tokens: int, hit_tokens: int, bounds: dict[str, Any]
    ) -> tuple[int | None, bool]:
        req_status = self._req_status[request.request_id]
        decision = self.planner.answer(
            request,
            num_computed_tokens,
            hit_tokens,
            lambda: self._keys_of_load(
                req_status, num_computed_tokens, hit_tokens, partial_tail=req_status.partial_tail_boundary is not None
            ),
        )
        if decision is Decision.DEFER:
            return None, False
        if decision is Decision.DECLINE:
            # What the lookup has noted for a load that does not come.
            req_status.partial_tail_boundary = None
            req_status.update_num_hit_chunks(num_computed_tokens)
            return 0, False
        if hit_tokens and self.planner.plans and self.manager.is_reading_ahead:
            # Now it waits for what is being read ahead, and hurries it.
            answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens, **bounds)
            return answer
        return hit_tokens, hit_tokens > 0

    def _keys_of_load(
        self, req_status: Any, num_computed_tokens: int, hit_tokens: int, *, partial_tail: bool
    ) -> list[OffloadKey]:
        """The parts that a load of this hit would take, as upstream chooses them."""
        end_tokens = num_computed_tokens + hit_tokens
        keys: list[OffloadKey] = []
        for config, state in zip(self.config.kv_group_configs, req_status.group_states, strict=True):
            chunks = end_tokens // config.tokens_per_chunk
            if partial_tail:
                keys.append(
                    self._make_boundary_key(req_status.req, config.group_idx, end_tokens, req_status.req_context)
                )
            elif chunks * config.tokens_per_chunk < end_tokens:
                chunks += 1
            own = state.offload_keys[num_computed_tokens // config.tokens_per_chunk : chunks]
            window = config.load_window_size_in_chunks(end_tokens)
            keys += own if window is None else own[-window:]
        return keys

    def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
        if self.planner.withholds(req_status.req):
            return 0
        return int(super()._calc_num_offloadable_tokens(req_status, num_computed_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.planner.end_step()
        meta = super().build_connector_meta(scheduler_output)
        self._preload()
        return meta

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._key_by_adapter(request)
        self.planner.arrived(request.request_id)
        if self.manager.config.enable_preload and not request.skip_reading_prefix_cache:
            self._waiting[request.request_id] = _Waiting(request)

    def _key_by_adapter(self, request: Any) -> None:
        lora = request.lora_request
        if lora is None:
            return
        try:
            salt = self._adapters.salt(lora.lora_name, lora.lora_path)
        except UnkeyedError:
            self.manager.exclude(request.request_id)
            return
        if salt:
            self._req_status[request.request_id].req = SaltedRequest(request, salt)

    def _make_boundary_key(self, request: Any, *place: Any) -> OffloadKey:
        return super()._make_boundary_key(self._req_status[request.request_id].req, *place)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._waiting.pop(request.request_id, None)
        self.planner.scheduled(request.request_id)
        if not num_external_tokens:
            # It runs without what was read ahead for it: the engine has its prefix by now, or computes it.
            self.manager.release_preload(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and self._events_tracker.self_describing_enabled:
            ranges = self._req_status[request.request_id].load_key_ranges
            self._describe(request.request_id, [key for *_, key in ranges])

    def _describe(self, req_id: str, keys: Iterable[bytes]) -> None:
        """Let events say which tokens they are that come to DRAM from below: upstream notes that in lookups one by one, which are not made here."""
        configs = {config.group_idx: config for config in self.config.kv_group_configs}
        req_status = self._req_status[req_id]
        # What passes through staging never comes to a tier, and its note would stay for ever.
        for key in filter(self.manager.has_slot, map(OffloadKey, keys)):
            config = configs[get_offload_group_idx(key)]
            chunks, rest = divmod(req_status.req_context.get_offload_key_position(key) or 0, config.tokens_per_chunk)
            if chunks and not rest:  # a part of a chunk was noted in its lookup
                self._events_tracker.record_lookup(req_status.req, config, chunks - 1, key)

    def _preload(self) -> None:
        """Once a step: read ahead for the next requests that wait, as far as they are known to hit, the first of them first."""
        ahead_max = self.manager.config.preload_lookahead_requests
        for req_id, waiting in list(itertools.islice(self._waiting.items(), ahead_max)):
            if waiting.wanted is None:
                waiting.wanted = self._wanted(waiting.request)
            if waiting.wanted is None:
                continue
            if not self.manager.preload(waiting.wanted, req_id):
                return
            del self._waiting[req_id]

    def _wanted(self, request: Any) -> list[Part] | None:
        """What the request would load from below if it were up now; None if that is being asked."""
        req_status = self._req_status[request.request_id]
        req_status.update_offload_keys()
        local_tokens = self._tokens_in_engine(request)
        req_status.num_locally_computed_tokens = local_tokens
        with self.manager.looking_ahead():
            hit_tokens = self._lookup_complete_chunks(req_status)
        if hit_tokens is None:
            return None
        if not hit_tokens:
            return []
        keys = self._keys_of_load(req_status, local_tokens, hit_tokens, partial_tail=False)
        return [] if self.planner.gate_declines(hit_tokens, keys) else self.manager.parts(keys, req_status.req_context)

    def _tokens_in_engine(self, request: Any) -> int:
        """How much of the request's prefix the engine's own cache has, where that is simply told: one group of layers, hashed block by block."""
        config = self.config.kv_group_configs[0]
        if self.gpu_block_pool is None or len(self.config.kv_group_configs) > 1:
            return 0
        if config.tokens_per_block != self.config.tokens_per_hash:
            return 0
        blocks = 0
        for block_hash in request.block_hashes:
            if self.gpu_block_pool.get_cached_block(block_hash, [config.group_idx]) is None:
                break
            blocks += 1
        return blocks * int(config.tokens_per_block)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for req_id in self.manager.take_declined():
            # Upstream counts what a load promised as stored; after a failed one it has to be looked at again.
            req_status = self._req_status.get(req_id)
            for group_state in req_status.group_states if req_status is not None else ():
                group_state.next_stored_chunk_idx = 0

    def reset_cache(self) -> None:
        # Upstream takes no second reset before the step that flushes what was under way at the first: an engine that is paused makes none.
        to_flush = self._current_batch_jobs_to_flush.copy()
        self._current_batch_jobs_to_flush.clear()
        super().reset_cache()
        self._current_batch_jobs_to_flush.update(to_flush)
        # Upstream would store anew all of what goes on running: what was computed before the reset, and of windows, blocks that are others' by now.
        for req_id, req_status in self._req_status.items():
            if req_status.req.num_computed_tokens:
                self.manager.outdate(req_id)
        # While requests run vLLM leaves its own cache as it is, and says nothing to those who follow its events.
        told = self.gpu_block_pool.kv_event_queue if self.gpu_block_pool is not None else ()
        self._reset_untold |= not any(isinstance(event, AllBlocksCleared) for event in told)

    def take_events(self) -> Iterator[KVCacheEvent]:
        if self._reset_untold and self._events_tracker.config.enable_kv_cache_events:
            yield AllBlocksCleared()
        self._reset_untold = False
        yield from super().take_events()

    def request_finished(self, request: Any) -> Any:
        self.manager.request_ended(request.request_id, request.num_output_tokens)
        self.planner.ended(request)
        self._waiting.pop(request.request_id, None)
        req_status = self._req_status.get(request.request_id)
        if request.request_id in self._seen and req_status is not None:
            self._seen.discard(request.request_id)
            for config, state in zip(self.config.kv_group_configs, req_status.group_states, strict=True):
                prompt = state.offload_keys[: request.num_prompt_tokens // config.tokens_per_chunk]
                self.manager.request_answered(prompt, request.num_output_tokens)
        return super().request_finished(request)
