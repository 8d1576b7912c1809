"""The scheduler's side of offloading: vLLM's manager interface over TieredStore."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import Config
from kvtier.engine.opening import open_presence, store_limits
from kvtier.engine.shared import SharedDisk
from kvtier.engine.vllm.messages import KVTierHandshake, PartsSpec
from kvtier.engine.vllm.metrics import RECOMPUTE_TOKENS, stats_of
from kvtier.engine.vllm.steps import StepTimer
from kvtier.errors import StoreUnavailableError
from kvtier.memory.collector import collector_paused
from kvtier.observe.requests import RequestTrace
from kvtier.plan.curves import RecomputeCurve
from kvtier.policy.base import RequestInfo
from kvtier.store.moves import Action, Key, Outcome, Source
from kvtier.store.tiered import Part, Presence, Resident, Run, TieredStore

logger = logging.getLogger(__name__)

_HIT_SOURCES = {Source.DRAM: CacheHitSource.HOST, Source.DISK: CacheHitSource.DISK}
_MEDIA = {Source.DRAM: Medium.CPU, Source.DISK: Medium.STORAGE}

_ADVISE_EVERY_S = 10.0


def _wished_s(wish: object) -> float | None:
    """A time that a sender named, where it is one: what arrives here may be anything."""
    if isinstance(wish, bool) or not isinstance(wish, (int, float)) or not wish > 0:
        return None
    return float(wish) if wish <= sys.float_info.max else math.inf


class KVTierManager(OffloadingManager):
    """Answers the scheduler out of a TieredStore, which begins with the workers' handshake.

    Args:
        config: the settings.
        group_ids: vLLM's number of each offloaded group, in order; the store counts them from 0.
        part_tokens: tokens of one part of each group.
        clock: monotonic seconds.
        trace: where requests are recorded; the manager closes it.
        publishes: whether vLLM publishes KV cache events, and so takes the manager's.

    Attributes:
        preloaded: told a request and the parts that were read ahead for it, as far as there was room; None for nobody.
    """

    def __init__(
        self,
        config: Config,
        group_ids: Sequence[int],
        part_tokens: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        trace: RequestTrace | None = None,
        publishes: bool = False,
    ) -> None:
        self.config = config
        self._publishes = publishes
        self.store: TieredStore | None = None
        self._group_of = {group_id: place for place, group_id in enumerate(group_ids)}
        self._part_tokens = tuple(part_tokens)
        self.curve = RecomputeCurve()
        self.steps = StepTimer(self.curve, clock)
        self._cost_shares: list[float] = []
        self._trace = trace
        self._clock = self.clock = clock
        self._reported: dict[str, int] = {}
        self._advise_at_s = 0.0
        self._last_stored: dict[str, dict[int, Part]] = {}
        self._live: set[str] = set()
        self._declined: set[str] = set()
        self._excluded: set[str] = set()
        self._outdated: set[str] = set()
        self._newly_declined: list[str] = []
        self._waiting_since_s: dict[str, float] = {}
        self._warned = False
        self.shared: SharedDisk | None = None
        self._looking_ahead = False
        self._through_reads = False
        self.preloaded: Callable[[str, Sequence[Key]], None] | None = None

    # ---- start

    def begin(self, ranks: Sequence[KVTierHandshake]) -> None:
        """Start the store on what every rank has.

        Raises StoreUnavailableError where the ranks cannot serve one index.
        """
        first = ranks[0]
        for number, rank in enumerate(ranks):
            if rank.slot_bytes != first.slot_bytes:
                raise StoreUnavailableError(
                    f"rank {number} has parts of {rank.slot_bytes} bytes and rank 0 of {first.slot_bytes}: kvtier needs ranks "
                    "whose parts are equally large; use a pipeline split with equal stages, or pipeline_parallel_size=1"
                )
        limits = store_limits(
            self.config,
            slot_bytes=first.slot_bytes,
            arena_bytes=min(rank.slots_bytes for rank in ranks),
            disk_bytes=min(rank.disk_bytes for rank in ranks),
            rank_count=len(ranks),
            part_tokens=self._part_tokens,
        )
        if self._part_tokens:
            # The layers of one group take their share of a token's bytes, and so of what computing it again costs.
            densities = [size / tokens for size, tokens in zip(first.slot_bytes, self._part_tokens, strict=True)]
            self._cost_shares = [density / sum(densities) for density in densities]
        generation = max(rank.generation for rank in ranks)
        if any(rank.shared != first.shared for rank in ranks):
            raise StoreUnavailableError(
                f"ranks store below {sorted({str(rank.shared and rank.shared.model_directory) for rank in ranks})}: all have to use one "
                "shared_storage_path, mounted at the same place"
            )
        self.store = TieredStore(limits, generation=generation, tells_changes=self._publishes)
        if first.shared is not None:
            presence = open_presence(
                self.config, first.shared, ranks=len(ranks), generation=generation, clock=self._clock
            )
            self.shared = SharedDisk(self.store, presence)
        if any(rank.generation != generation for rank in ranks):
            logger.warning("kvtier: a reset had not reached every rank's disk: starting empty")
            self.reset_cache()
            return
        if self.shared is not None:
            return
        with collector_paused():
            self._fill(self.store, ranks)
        if limits.disk_bytes:
            logger.info("kvtier: %d parts found on disk that every rank has", self.store.gauges()["disk_parts"])

    def _fill(self, store: TieredStore, ranks: Sequence[KVTierHandshake]) -> None:
        """Enter what every rank has; what only some have is to be deleted there."""
        (keys, depths), strays = ranks[0].entries, []
        if len(ranks) > 1:
            found = [set(rank.entries[0]) for rank in ranks]
            common = set.intersection(*found)
            depths = [depth for key, depth in zip(keys, depths, strict=True) if key in common]
            keys = [key for key in keys if key in common]
            strays = sorted(set.union(*found) - common)
        group_of = {group_id.to_bytes(4, "big"): place for group_id, place in self._group_of.items()}
        groups = [0] * len(keys) if len(group_of) == 1 else [group_of[key[-4:]] for key in keys]
        store.fill_many_from_disk(keys, groups, depths, self._clock(), strays)

    def _started(self) -> TieredStore | None:
        if self.store is None and not self._warned:
            self._warned = True
            logger.error("kvtier: the executor delivered no handshake of the workers: nothing is cached")
        return self.store

    # ---- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        store = self._started()
        if store is None or req_context.req_id in self._declined:
            return LookupResult.MISS
        group = self._group_of[get_offload_group_idx(key)]
        asked = self.shared is not None and not self.shared.ask([key], group, self._clock())
        presence = store.presence(key, through_reads=self._through_reads)
        if presence is Presence.HIT:
            return LookupResult.HIT
        if presence is Presence.PENDING:
            store.hurry([key] if not (self._looking_ahead or self._through_reads) else [])
            return LookupResult.HIT_PENDING if self._may_wait(req_context.req_id, store) else LookupResult.MISS
        if asked:
            return LookupResult.RETRY if self._may_wait(req_context.req_id, store) else LookupResult.MISS
        return LookupResult.MISS

    def leading_run(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Run:
        """How much of a request's prefix is there; past the lookup deadline only what is there now counts."""
        store = self._started()
        if store is None or req_context.req_id in self._declined:
            return Run(0, False)
        if self.shared is not None and keys:
            group = self._group_of[get_offload_group_idx(keys[0])]
            run = self.shared.leading_run(keys, group, self._clock(), through_reads=self._through_reads)
        else:
            run = store.leading_run(keys, through_reads=self._through_reads)
        if run.pending and not (self._looking_ahead or self._through_reads):
            store.hurry(keys[: run.length])
        if run.pending and not self._may_wait(req_context.req_id, store):
            ready = 0
            while ready < run.length and store.presence(keys[ready], through_reads=self._through_reads) is Presence.HIT:
                ready += 1
            return Run(ready, False)
        return run

    def _may_wait(self, req_id: str, store: TieredStore) -> bool:
        if self._looking_ahead:
            return True
        now_s = self._clock()
        since_s = self._waiting_since_s.setdefault(req_id, now_s)
        if now_s - since_s < self.config.lookup_deadline_s:
            return True
        store.counters["lookup_late"] += 1
        return False

    def lookups_ended(self, req_id: str) -> None:
        """A request was told what there is. If that was in time, its next lookups, after a preemption for instance, may wait as long again."""
        since_s = self._waiting_since_s.get(req_id)
        if since_s is not None and self._clock() - since_s < self.config.lookup_deadline_s:
            del self._waiting_since_s[req_id]

    def request_seen(
        self, keys: Sequence[OffloadKey], hit_count: int, hints: Mapping[str, object], group: int = 0
    ) -> None:
        """A request was looked up for the first time: one group's keys of its whole prompt, and what its sender wished.

        Hints are `ttl_s`, `pinned` and `returns_soon`, see `kvtier.policy.base.RequestInfo`; others are not ours.
        """
        if self.store is None:
            return
        request = RequestInfo(
            keys,
            hit_count,
            ttl_s=_wished_s(hints.get("ttl_s")),
            pinned=hints.get("pinned") is True,
            returns_soon=hints.get("returns_soon") is True,
        )
        self.store.request(request, self._clock(), group)

    def request_answered(self, keys: Sequence[OffloadKey], output_tokens: int) -> None:
        """A request that was seen has been answered, in so many tokens."""
        if self.store is not None:
            self.store.finished(keys, output_tokens, self._clock())

    @property
    def traces(self) -> bool:
        """Whether requests are recorded."""
        return self._trace is not None

    def request_arrived(self, req_id: str, keys: Sequence[OffloadKey], prompt_tokens: int) -> None:
        """A request was looked up for the first time: the keys of its prompt in the first group."""
        if self._trace is not None and keys:
            self._trace.arrived(req_id, keys, prompt_tokens, self._clock())

    def request_ended(self, req_id: str, output_tokens: int) -> None:
        """A request that had arrived has ended, well or not."""
        if self._trace is not None:
            self._trace.answered(req_id, output_tokens)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        if self.store is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return _HIT_SOURCES.get(self.store.source(key), CacheHitSource.EXTERNAL_UNSPECIFIED)

    # ---- what the planner asks

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token's parts on one rank; 0 before the handshake."""
        if self.store is None:
            return 0.0
        sizes = self.store.limits.slot_bytes
        return sum(size / tokens for size, tokens in zip(sizes, self._part_tokens, strict=True))

    @contextlib.contextmanager
    def through_reads(self) -> Iterator[None]:
        """Lookups inside take what is being read ahead for what lies on disk: they neither wait for it nor hurry it."""
        self._through_reads = True
        try:
            yield
        finally:
            self._through_reads = False

    @property
    def is_reading_ahead(self) -> bool:
        """Whether anything is being read ahead."""
        return self.store is not None and self.store.is_reading_ahead

    def preload_room_bytes(self) -> int:
        """How much more may be read ahead, on one rank."""
        return self.store.preload_room_bytes() if self.store is not None else 0

    def release_preload(self, req_id: str) -> None:
        """A request will not load what was read ahead for it."""
        if self.store is not None:
            self.store.release_preload(req_id, self._clock())

    def resident_bytes(self, keys: Sequence[OffloadKey]) -> Resident:
        """Where these parts are."""
        assert self.store is not None, "what is asked for was found, and hits follow the handshake"
        return self.store.resident_bytes(keys)

    def moving_bytes(self) -> tuple[int, int]:
        """Bytes of one rank that loads are reading from disk, and bytes that are being written to it."""
        return self.store.moving_bytes() if self.store is not None else (0, 0)

    def count(self, counter: str) -> None:
        """Add one to a counter of `kvtier.engine.vllm.metrics`."""
        if self.store is not None:
            self.store.counters[counter] += 1

    # ---- loads and stores

    def _parts(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[Part]:
        last = self._last_stored.setdefault(req_context.req_id, {})
        parts = []
        for part in self.parts(keys, req_context):
            before = last.get(part.group)
            # Looked at from its beginning again, after a preemption or a reset, a prefix does not follow its own end.
            if before is not None and before.depth_tokens < part.depth_tokens:
                part = part._replace(parent=before.key)
            parts.append(part)
            last[part.group] = part
        return parts

    def _cost_s(self, group: int, depth_tokens: int) -> float:
        """Seconds that computing a part again would take, 0 where that is not known."""
        if not self._cost_shares or not depth_tokens:
            return 0.0
        from_tokens = max(0, depth_tokens - self._part_tokens[group])
        return self._cost_shares[group] * self.curve.seconds(from_tokens, depth_tokens)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        assert self.store is not None, "a load follows a hit, and hits follow the handshake"
        plan = self.store.begin_load(self._parts(keys, req_context), req_context.req_id, self._clock())
        return PartsSpec(plan.parts, plan.load_id)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self.store is None or self.store.end_load(req_context.req_id, self._clock()):
            return
        # Once is enough: the request is recomputed, and is not offered what may fail again.
        if req_context.req_id in self._live:
            self._declined.add(req_context.req_id)
            self._newly_declined.append(req_context.req_id)

    def exclude(self, req_id: str) -> None:
        """Neither load nor store anything of this live request."""
        self._declined.add(req_id)
        self._excluded.add(req_id)

    def outdate(self, req_id: str) -> None:
        """Store nothing of this request, which goes on with what was computed before a reset, until it begins anew."""
        if req_id in self._live:
            self._outdated.add(req_id)

    def begins(self, req_id: str) -> None:
        """A request has nothing in the engine, and is looked up to begin, or to begin anew."""
        self._outdated.discard(req_id)

    def take_declined(self) -> list[str]:
        """Requests whose load failed since the last call: all that they compute is worth storing again."""
        declined, self._newly_declined = self._newly_declined, []
        return declined

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        store = self._started()
        if store is None or req_context.req_id in self._excluded or req_context.req_id in self._outdated:
            return PrepareStoreOutput([], PartsSpec([]), [])
        places = store.begin_store(self._parts(keys, req_context), self._clock())
        if places is None:
            return None
        return PrepareStoreOutput([OffloadKey(place.key) for place in places], PartsSpec(places), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        if self.store is not None:
            self.store.end_store(list(keys), self._clock())

    # ---- preloads

    @contextlib.contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Lookups inside are for a request that is not up yet: they may wait as long as they like, and hurry nothing."""
        self._looking_ahead = True
        try:
            yield
        finally:
            self._looking_ahead = False

    def parts(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> list[Part]:
        """What `preload` takes; with the request's context the store learns what each would cost to compute again."""
        parts = []
        for key in keys:
            group = self._group_of[get_offload_group_idx(key)]
            depth_tokens = (req_context.get_offload_key_position(key) or 0) if req_context is not None else 0
            parts.append(Part(key, group, depth_tokens, None, self._cost_s(group, depth_tokens)))
        return parts

    def preload(self, wanted: Sequence[Part], req_id: str) -> bool:
        """Read ahead what a waiting request will load. False if there is more to read, later."""
        if self.store is None or req_id in self._declined:
            return True
        done = self.store.preload(wanted, req_id, self._clock())
        if self.preloaded is not None:
            self.preloaded(req_id, [part.key for part in wanted])
        return done

    # ---- requests, steps, outcomes

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._live.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._live.discard(req_context.req_id)
        self._last_stored.pop(req_context.req_id, None)
        self._waiting_since_s.pop(req_context.req_id, None)
        self._declined.discard(req_context.req_id)
        self._excluded.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        if self.store is not None:
            self.store.release_preload(req_context.req_id, self._clock())

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self.store is not None:
            self.store.tick(self._clock())

    def apply(self, outcomes: Sequence[Outcome]) -> None:
        """Take the ranks' words of one step."""
        if self.store is not None:
            for outcome in outcomes:
                self.store.apply(outcome, self._clock())
                if self.shared is not None:
                    self.shared.hear(outcome)
            for line in self.store.take_notices():
                logger.warning("kvtier: %s", line)

    def take_actions(self) -> list[Action]:
        """What the ranks have to do in this step."""
        if self.store is None:
            return []
        actions = self.store.take_actions()
        return actions if self.shared is None else self.shared.carry_out(actions)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """What came to a tier and what left it since the last call, for those who route by it.

        A shared disk is remote to every engine, and who removes from it says so to nobody.
        """
        for keys, tier, gone in self.store.take_changes() if self.store is not None else ():
            remote = tier is Source.DISK and self.shared is not None
            yield OffloadingEvent(
                [OffloadKey(key) for key in keys],
                _MEDIA[tier],
                removed=gone,
                locality=Locality.REMOTE if remote else Locality.LOCAL,
                removal_expected=not remote,
            )

    def has_slot(self, key: OffloadKey) -> bool:
        """Whether the part lies in DRAM, or is being brought there."""
        return self.store is not None and self.store.has_slot(key)

    def has_pending_work(self) -> bool:
        return self.store is not None and self.store.has_pending()

    def reset_cache(self) -> None:
        if self.shared is not None:
            self.shared.reset(self._clock())
        elif self.store is not None:
            self.store.reset(self._clock())

    def shutdown(self) -> None:
        if self._trace is not None:
            self._trace.close(self.config.close_deadline_s)
        if self.shared is not None:
            self.shared.close(self.config.close_deadline_s)

    def get_stats(self) -> OffloadingConnectorStats | None:
        if self.store is None:
            return None
        advice = None
        if self._clock() >= self._advise_at_s:
            self._advise_at_s = self._clock() + _ADVISE_EVERY_S
            advice = self.store.advice()
        traced = self._trace.counters if self._trace is not None else {}
        gauges = {**self.store.gauges(), "recompute_seconds": self.curve.seconds(0, RECOMPUTE_TOKENS)}
        return stats_of({**self.store.counters, **traced}, self._reported, gauges, advice)
