"""TieredStore against a model that keeps the bytes: whatever the order of events, a load reads its own key's bytes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.policy.admission import AdmissionLimits
from kvtier.policy.base import RequestInfo
from kvtier.policy.ingestion import IngestionLimits, IngestionType
from kvtier.policy.registry import policy_names
from kvtier.store.moves import (
    NO_SLOT,
    Action,
    CommitParts,
    DeleteParts,
    FenceDone,
    HurryReads,
    LoadFailed,
    LoadReleased,
    PartPlace,
    ReadDone,
    ReadParts,
    ResetTier,
    Source,
    StoreFailed,
    WriteDone,
    WriteParts,
)
from kvtier.store.tiered import SHARED_DISK_BYTES, LoadPlan, Part, Presence, StoreLimits, TieredStore

SLOT = 8192
LIMITS = StoreLimits(slot_bytes=(SLOT,), arena_bytes=4 * SLOT, disk_bytes=8 * SLOT)


def key(number: int) -> bytes:
    return b"key%d" % number


def parts(*numbers: int, group: int = 0) -> list[Part]:
    return [Part(key(number), group, 16 * (number + 1)) for number in numbers]


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def store_parts(store: TieredStore, *numbers: int, now_s: float = 0.0) -> None:
    assert store.begin_store(parts(*numbers), now_s) is not None
    store.end_store(keys(*numbers), now_s)


def finish_writes(store: TieredStore, failed: dict[bytes, str] | None = None, now_s: float = 0.0) -> list[bytes]:
    """Carry out the queued actions as one rank would; returns the keys deleted."""
    deleted: list[bytes] = []
    for action in store.take_actions():
        if isinstance(action, WriteParts):
            mine = {part.key: failed[part.key] for part in action.parts if failed and part.key in failed}
            store.apply(WriteDone(action.move_id, mine), now_s)
        elif isinstance(action, DeleteParts):
            deleted += action.keys
        elif isinstance(action, ResetTier):
            store.apply(FenceDone(action.fence_id), now_s)
    return deleted


def test_a_part_is_pending_until_stored_then_in_dram_then_on_disk_too() -> None:
    store = TieredStore(LIMITS)
    places = store.begin_store(parts(0), 0.0)
    assert places is not None and places[0].offset == 0
    assert store.presence(key(0)) is Presence.PENDING
    store.end_store(keys(0), 0.0)
    assert (store.presence(key(0)), store.source(key(0))) == (Presence.HIT, Source.DRAM)
    assert store.has_pending()
    finish_writes(store)
    assert not store.has_pending()
    store_parts(store, 1, 2, 3)
    finish_writes(store)
    store_parts(store, 4)
    assert store.source(key(0)) is Source.DISK
    store.check()


def test_a_write_says_what_each_part_saves_for_a_byte() -> None:
    store = TieredStore(LIMITS)
    wanted = [Part(key(0), 0, 16, None, 0.5), Part(key(1), 0, 32)]
    assert store.begin_store(wanted, 0.0) is not None
    store.end_store(keys(0, 1), 0.0)
    (write,) = store.take_actions()
    assert isinstance(write, WriteParts)
    assert (write.depths_tokens, write.values_s_per_byte) == ([16, 32], [0.5 / SLOT, 0.0])


def test_a_hit_is_a_contiguous_prefix() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0, 1, 3)
    assert store.leading_run(keys(0, 1, 2, 3)) == (2, False)
    store.begin_store(parts(2), 0.0)
    assert store.leading_run(keys(0, 1, 2, 3)) == (4, True)
    assert store.leading_run(keys(9, 0)) == (0, False)


def test_parts_in_dram_and_on_disk_are_one_load_and_disk_parts_are_promoted() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0, 1, 2, 3)
    finish_writes(store)
    store_parts(store, 4, 5)
    finish_writes(store)
    places = store.begin_load(parts(0, 1, 2, 3), "r", 1.0).parts
    assert [place.source for place in places] == [Source.DISK, Source.DISK, Source.DRAM, Source.DRAM]
    assert all(place.offset != NO_SLOT for place in places), "the two others make room"
    assert store.end_load("r", 1.0)
    assert {store.source(k) for k in keys(0, 1, 2, 3)} == {Source.DRAM}
    store.check()


def test_a_load_larger_than_the_arena_passes_through_staging() -> None:
    store = TieredStore(LIMITS)
    for number in range(6):
        store_parts(store, number)
        finish_writes(store)
    places = store.begin_load(parts(*range(6)), "r", 1.0).parts
    assert len({place.offset for place in places} - {NO_SLOT}) == 4
    assert sum(place.offset == NO_SLOT for place in places) == 2
    store.check()
    assert store.end_load("r", 1.0)
    store.check()


def test_what_is_leased_is_not_evicted_and_a_store_without_room_changes_nothing() -> None:
    store = TieredStore(replace(LIMITS, disk_bytes=0))
    store_parts(store, 0, 1, 2, 3)
    store.begin_load(parts(0, 1, 2), "r", 0.0)
    assert store.begin_store(parts(4, 5), 0.0) is None
    assert store.leading_run(keys(0, 1, 2, 3)) == (4, False)
    assert store.begin_store(parts(4), 0.0) is not None
    assert store.presence(key(3)) is Presence.MISS
    store.end_load("r", 0.0)
    store.check()


def test_what_can_never_fit_is_stored_as_far_as_it_does() -> None:
    store = TieredStore(LIMITS)
    places = store.begin_store(parts(*range(10)), 0.0)
    assert places is not None and [place.key for place in places] == keys(0, 1, 2, 3)
    assert store.counters["store_refused_parts"] == 6


@given(
    sizes=st.lists(st.integers(1, 9).map(lambda pages: pages * 4096), min_size=1, max_size=3),
    pages=st.integers(9, 60),
    before=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=60),
    used=st.lists(st.integers(0, 40), max_size=20),
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=60),
)
def test_where_nothing_is_leased_a_store_never_waits(
    sizes: list[int], pages: int, before: list[tuple[int, int]], used: list[int], wanted: list[int]
) -> None:
    store = TieredStore(StoreLimits(slot_bytes=tuple(sizes), arena_bytes=pages * 4096))
    for number, group in before:
        part = Part(b"%d" % number, group % len(sizes))
        if store.begin_store([part], 0.0):
            store.end_store([part.key], 0.0)
    for number in used:
        if store.presence(b"%d" % number) is Presence.HIT:
            store.begin_load([Part(b"%d" % number, 0)], "r", 0.0)
            store.end_load("r", 0.0)
    new = [Part(b"new%d" % number, group % len(sizes)) for number, group in enumerate(wanted)]
    places = store.begin_store(new, 0.0)
    assert places, "it would be asked again at every step, and never be stored"
    store.check()


def test_the_same_key_is_stored_once() -> None:
    store = TieredStore(LIMITS)
    assert len(store.begin_store(parts(0, 0, 1), 0.0) or ()) == 2
    assert store.begin_store(parts(0, 1), 0.0) == []
    store.end_store(keys(0, 1), 0.0)
    assert store.begin_store(parts(0, 1), 0.0) == []
    assert sum(len(a.parts) for a in store.take_actions() if isinstance(a, WriteParts)) == 2


def test_a_part_lost_on_disk_leaves_every_rank_and_its_neighbours_stay() -> None:
    store = TieredStore(replace(LIMITS, rank_count=2))
    store.fill_from_disk([(key(n), 0, 16) for n in range(3)], 0.0)
    load = store.begin_load(parts(0, 1, 2), "r", 1.0)
    assert {place.source for place in load.parts} == {Source.DISK}
    store.apply(LoadFailed(load.load_id, {key(1): "checksum"}, ""), 1.0)
    assert not store.end_load("r", 1.0)
    assert store.leading_run(keys(0, 1, 2)) == (1, False)
    assert store.presence(key(2)) is Presence.HIT
    assert [a for a in store.take_actions() if isinstance(a, DeleteParts)] == [DeleteParts(keys(1))]
    assert store.counters["load_failed:checksum"] == 1
    assert len(store.take_notices()) == 1
    store.check()


def test_a_part_found_bad_in_dram_is_served_from_its_disk_copy() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0, 1)
    finish_writes(store)
    load = store.begin_load(parts(0, 1), "r", 1.0)
    assert {place.source for place in load.parts} == {Source.DRAM}
    store.apply(LoadFailed(load.load_id, {key(1): "checksum"}, ""), 1.0)
    assert not store.end_load("r", 1.0)
    assert store.leading_run(keys(0, 1)) == (2, False), "the disk's copy was not the bad one"
    assert [store.source(key(0)), store.source(key(1))] == [Source.DRAM, Source.DISK]
    assert store.counters["disk_lost_parts"] == 0
    assert finish_writes(store) == []
    store.begin_load(parts(0, 1), "again", 2.0)
    assert store.end_load("again", 2.0)
    assert store.source(key(1)) is Source.DRAM
    store.check()


def test_a_part_found_bad_in_dram_is_not_served_again() -> None:
    store = TieredStore(replace(LIMITS, disk_bytes=0))
    store_parts(store, 0, 1)
    load = store.begin_load(parts(0, 1), "r", 1.0)
    store.apply(LoadFailed(load.load_id, {key(1): "checksum"}, ""), 1.0)
    assert not store.end_load("r", 1.0)
    assert store.leading_run(keys(0, 1)) == (1, False)
    store.check()


def test_what_a_load_reads_from_disk_is_not_evicted_there() -> None:
    store = TieredStore(replace(LIMITS, arena_bytes=16 * SLOT))
    store.fill_from_disk([(key(n), 0, 16) for n in range(8)], 0.0)
    store.begin_load(parts(*range(8)), "r", 0.0)
    store_parts(store, 9)
    assert store.counters["write_refused_parts"] == 1 and finish_writes(store) == []
    assert store.end_load("r", 0.0)
    store_parts(store, 10)
    assert finish_writes(store) == keys(0)
    store.check()


def test_a_load_that_failed_without_a_lost_part_loses_none() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0, 1)
    finish_writes(store)
    load = store.begin_load(parts(0, 1), "r", 1.0)
    store.apply(LoadFailed(load.load_id, {}, "deadline"), 1.0)
    assert not store.end_load("r", 1.0)
    assert store.leading_run(keys(0, 1)) == (2, False)
    store.check()


def test_a_load_past_its_deadline_gives_slots_back_only_when_its_reads_have_ended() -> None:
    store = TieredStore(replace(LIMITS, rank_count=2))
    store.fill_from_disk([(key(n), 0, 16) for n in range(4)], 0.0)
    load = store.begin_load(parts(0, 1, 2, 3), "r", 0.0)
    store.apply(LoadFailed(load.load_id, {}, "deadline", held=True), 30.0)
    store.apply(LoadFailed(load.load_id, {}, "deadline", held=True), 30.0)
    store.apply(LoadReleased(load.load_id), 30.0)
    assert not store.end_load("r", 30.0)
    store.check()
    assert store.begin_store(parts(9), 30.0) is None, "a read on one rank still writes into the slots"
    assert store.has_pending()
    store.apply(LoadReleased(load.load_id), 31.0)
    assert store.begin_store(parts(9), 31.0) is not None
    store.check()


def test_a_part_counts_as_written_only_when_every_rank_has_it() -> None:
    store = TieredStore(replace(LIMITS, rank_count=2))
    store_parts(store, 0, 1)
    (write,) = store.take_actions()
    assert isinstance(write, WriteParts)
    store.apply(WriteDone(write.move_id, {}), 0.0)
    assert store.gauges()["disk_parts"] == 0
    store.apply(WriteDone(write.move_id, {key(1): "io: EIO"}), 0.0)
    assert store.gauges()["disk_parts"] == 1
    assert finish_writes(store) == keys(1), "the other rank has it and must drop it"
    store.check()


def test_a_full_disk_evicts_until_writes_fit_and_recovers() -> None:
    store = TieredStore(LIMITS)
    for number in range(4):
        store_parts(store, number)
        finish_writes(store)
    store_parts(store, 4)
    finish_writes(store, {key(4): "no_space: ENOSPC"})
    store_parts(store, 5, now_s=1.0)
    assert finish_writes(store, now_s=1.0), "room is made below what turned out to fit"
    assert store.gauges()["disk_limit_bytes"] < LIMITS.disk_bytes
    store.tick(60.0)
    assert store.gauges()["disk_limit_bytes"] == LIMITS.disk_bytes
    store.check()


def test_a_failing_disk_gets_no_writes_for_a_while_and_loses_nothing() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0)
    finish_writes(store)
    store_parts(store, 1)
    finish_writes(store, {key(1): "io: EIO"})
    store_parts(store, 2, now_s=1.0)
    assert not [a for a in store.take_actions() if isinstance(a, WriteParts)]
    assert store.presence(key(0)) is Presence.HIT
    store.tick(LIMITS.disk_retry_s + 1)
    store_parts(store, 3, now_s=20.0)
    assert [a for a in store.take_actions() if isinstance(a, WriteParts)]


def test_a_write_over_budget_neither_suspends_nor_shrinks() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0)
    finish_writes(store, {key(0): "over_budget: 1 GiB a day"})
    assert store.gauges()["disk_limit_bytes"] == LIMITS.disk_bytes
    store_parts(store, 1)
    finish_writes(store)
    assert store.gauges()["disk_parts"] == 1
    store.check()


def written_keys(store: TieredStore) -> list[bytes]:
    return [part.key for action in store.take_actions() if isinstance(action, WriteParts) for part in action.parts]


def test_ingestion_hot_writes_what_was_used() -> None:
    store = TieredStore(replace(LIMITS, ingestion=IngestionLimits(IngestionType.HOT)))
    store_parts(store, 0, 1)
    assert written_keys(store) == []
    store.begin_load(parts(0), "r", 1.0)
    assert written_keys(store) == [], "not on the read path"
    store.end_load("r", 1.0)
    store.tick(1.0)
    assert written_keys(store) == keys(0)
    store.check()


def test_ingestion_evicted_writes_before_the_slot_goes_and_loses_nothing() -> None:
    store = TieredStore(replace(LIMITS, ingestion=IngestionLimits(IngestionType.EVICTED)))
    store_parts(store, 0, 1, 2, 3)
    assert written_keys(store) == []
    assert store.begin_store(parts(4), 1.0) is None
    assert store.leading_run(keys(0, 1, 2, 3)) == (4, False)
    finish_writes(store)
    assert store.gauges()["disk_parts"] > 0
    store_parts(store, 4, now_s=2.0)
    assert store.leading_run(keys(0, 1, 2, 3, 4)) == (5, False)
    store.check()


def test_ingestion_evicted_does_not_hold_memory_for_a_disk_that_refuses() -> None:
    store = TieredStore(replace(LIMITS, ingestion=IngestionLimits(IngestionType.EVICTED)))
    store_parts(store, 0, 1, 2, 3)
    store.begin_store(parts(4), 1.0)
    finish_writes(store, dict.fromkeys(keys(0, 1, 2, 3), "io: EIO"), now_s=1.0)
    store_parts(store, 4, now_s=2.0)
    assert store.presence(key(4)) is Presence.HIT
    store.check()


def test_what_was_read_from_disk_is_not_written_back() -> None:
    store = TieredStore(LIMITS)
    for number in range(5):
        store_parts(store, number)
        finish_writes(store)
    assert store.source(key(0)) is Source.DISK
    store.begin_load(parts(0), "r", 1.0)
    store.end_load("r", 1.0)
    store.tick(1.0)
    assert written_keys(store) == []


def test_writes_in_flight_are_bounded_in_bytes_and_tokens() -> None:
    for limits in (
        IngestionLimits(IngestionType.ALL, inflight_bytes_max=2 * SLOT),
        IngestionLimits(IngestionType.ALL, inflight_tokens_max=32),
    ):
        store = TieredStore(replace(LIMITS, ingestion=limits, part_tokens=(16,)))
        store_parts(store, 0, 1, 2, 3)
        assert store.gauges()["writes_in_flight"] == 1
        (first,) = store.take_actions()
        assert isinstance(first, WriteParts) and len(first.parts) == 2
        store.apply(WriteDone(first.move_id, {}), 0.0)
        assert written_keys(store) == keys(2, 3)
        store.check()


def test_admission_takes_only_what_was_asked_for_twice() -> None:
    store = TieredStore(replace(LIMITS, admission=AdmissionLimits(seen_min=2)))
    for asked in (keys(0, 1), keys(0, 2)):
        store.request(RequestInfo(asked), 0.0)
    store_parts(store, 0, 1, 2)
    assert written_keys(store) == keys(0)
    assert store.counters["write_refused_parts"] == 2
    store.check()


@pytest.mark.parametrize("ingestion", list(IngestionType))
def test_a_load_larger_than_dram_does_not_search_it_for_every_part(ingestion: IngestionType) -> None:
    limits = replace(LIMITS, disk_bytes=100 * SLOT, ingestion=IngestionLimits(ingestion))
    store = TieredStore(limits)
    store.fill_from_disk([(part.key, 0, part.depth_tokens) for part in parts(*range(80))], 0.0)
    searches = []
    candidates = store._dram_policy.candidates

    def counted(*question: object) -> object:
        searches.append(question)
        return candidates(*question)  # type: ignore[arg-type]

    store._dram_policy.candidates = counted  # type: ignore[assignment, method-assign]
    plan = store.begin_load(parts(*range(80)), "r", 0.0)
    assert [part.offset for part in plan.parts].count(NO_SLOT) == 76
    assert store.counters["promote_refused_parts"] == 76
    assert len(searches) <= 6
    assert store.end_load("r", 1.0)
    store.check()


@pytest.mark.parametrize("cheap_first", [True, False])
def test_of_two_that_are_as_likely_to_come_back_the_one_that_costs_more_stays(cheap_first: bool) -> None:
    limits = replace(LIMITS, dram_policy="reuse", disk_policy="reuse", disk_bytes=4 * SLOT)
    store = TieredStore(limits)
    # Two prompts of two parts each, alike but for their depth: the deep one's parts take longer to compute again.
    shallow = [Part(key(0), 0, 16, None, 0.01), Part(key(1), 0, 32, key(0), 0.01)]
    deep = [Part(key(2), 0, 50_000, None, 0.04), Part(key(3), 0, 50_016, key(2), 0.04)]
    for prompt in (shallow, deep) if cheap_first else (deep, shallow):
        store.request(RequestInfo([part.key for part in prompt]), 0.0)
        assert store.begin_store(prompt, 0.0)
        store.end_store([part.key for part in prompt], 0.0)
        finish_writes(store)
    for now_s, number in ((10.0, 4), (11.0, 5)):
        store.request(RequestInfo(keys(number)), now_s)
        assert store.begin_store([Part(key(number), 0, 16, None, 0.02)], now_s)
        store.end_store(keys(number), now_s)
        finish_writes(store)
    assert store.leading_run(keys(2, 3)).length == 2
    assert [store.source(part.key) for part in shallow] == [Source.MISSING] * 2, "neither in DRAM nor on disk"
    store.check()


def test_advice_says_what_more_capacity_would_hit() -> None:
    store = TieredStore(LIMITS)
    for _ in range(20):
        store.request(RequestInfo(keys(*range(6))), 0.0)
    advice = store.advice()
    assert advice["dram", 0.5] == 0 and advice["dram", 1.0] == 0, "six parts do not fit into four"
    assert advice["dram", 2.0] > 0.9 and advice["disk", 1.0] > 0.9


def test_a_late_write_stops_keeping_the_engine_awake_but_keeps_its_slot() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0, 1, 2, 3)
    (write,) = store.take_actions()
    assert isinstance(write, WriteParts)
    store.tick(LIMITS.write_deadline_s + 1)
    assert not store.has_pending()
    assert store.begin_store(parts(4), 100.0) is None, "the write still owns the bytes"
    store.apply(WriteDone(write.move_id, {}), 200.0)
    assert store.begin_store(parts(4), 200.0) is not None
    store.check()


def test_a_read_that_never_ends_stops_keeping_the_engine_awake_but_keeps_its_slot() -> None:
    store = TieredStore(LIMITS)
    store.fill_from_disk([(key(n), 0, 16) for n in range(4)], 0.0)
    load = store.begin_load(parts(0, 1, 2, 3), "r", 0.0)
    store.apply(LoadFailed(load.load_id, {}, "deadline", held=True), 30.0)
    assert not store.end_load("r", 30.0)
    assert store.has_pending()
    store.tick(30.0 + LIMITS.write_deadline_s)
    assert not store.has_pending(), "an engine that waits for all to end before it sleeps would never sleep"
    assert not store.settled()
    assert store.begin_store(parts(9), 100.0) is None
    store.apply(LoadReleased(load.load_id), 200.0)
    assert store.begin_store(parts(9), 200.0) is not None
    assert store.settled()
    store.check()


def test_a_fence_that_is_never_passed_stops_keeping_the_engine_awake() -> None:
    store = TieredStore(LIMITS)
    store.begin_store(parts(0, 1, 2, 3), 0.0)
    store.reset(0.0)
    (reset,) = store.take_actions()
    assert isinstance(reset, ResetTier)
    assert store.has_pending()
    store.tick(LIMITS.write_deadline_s)
    assert not store.has_pending() and not store.settled()
    assert store.begin_store(parts(9), 100.0) is None, "old copies may still be under way"
    store.apply(FenceDone(reset.fence_id), 200.0)
    assert store.begin_store(parts(9), 200.0) is not None and store.settled()
    store.check()


def test_a_store_that_failed_leaves_a_miss() -> None:
    store = TieredStore(LIMITS)
    store.begin_store(parts(0, 1), 0.0)
    store.apply(StoreFailed(keys(1), "copy raised"), 0.0)
    store.end_store(keys(0, 1), 0.0)
    assert (store.presence(key(0)), store.presence(key(1))) == (Presence.HIT, Presence.MISS)
    store.check()


def test_reset_forgets_all_and_gives_slots_back_only_behind_the_fence() -> None:
    store = TieredStore(replace(LIMITS, rank_count=2), generation=7)
    store_parts(store, 0)
    write = next(a for a in store.take_actions() if isinstance(a, WriteParts))
    store.begin_store(parts(1), 0.0)
    store.begin_load(parts(0), "r", 0.0)
    store.reset(0.0)
    assert store.generation == 8
    assert [store.presence(k) for k in keys(0, 1)] == [Presence.MISS] * 2
    assert store.has_pending()
    (reset,) = store.take_actions()
    assert isinstance(reset, ResetTier) and reset.generation == 8
    assert store.begin_store(parts(2, 3, 4, 5), 0.0) is None, "two slots may still be written or read"
    store.apply(FenceDone(reset.fence_id), 0.0)
    store.apply(WriteDone(write.move_id, {}), 0.0)
    store.apply(FenceDone(reset.fence_id), 0.0)
    store.apply(WriteDone(write.move_id, {}), 0.0)
    assert store.gauges()["disk_parts"] == 0, "a write of the old generation is not published"
    assert store.begin_store(parts(2, 3, 4, 5), 0.0) is not None
    store.check()


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_load_under_way_at_a_reset_owns_its_slots_until_the_fence(from_disk: bool) -> None:
    store = TieredStore(replace(LIMITS, disk_bytes=8 * SLOT if from_disk else 0))
    if from_disk:
        store.fill_from_disk([(key(n), 0, 16) for n in range(4)], 0.0)
    else:
        store_parts(store, 0, 1, 2, 3)
    load = store.begin_load(parts(0, 1, 2, 3), "r", 0.0)
    store.reset(0.0)
    (reset,) = store.take_actions()
    assert isinstance(reset, ResetTier)
    store.apply(LoadFailed(load.load_id, {}, "deadline", held=True), 1.0)
    assert not store.end_load("r", 1.0)
    store.apply(LoadReleased(load.load_id), 1.0)
    assert store.begin_store(parts(9), 1.0) is None, "the load still reads or fills these slots"
    store.apply(FenceDone(reset.fence_id), 2.0)
    assert store.begin_store(parts(9), 2.0) is not None
    store.check()


def test_a_catalog_over_capacity_is_cut_oldest_first() -> None:
    store = TieredStore(LIMITS)
    store.fill_from_disk([(key(number), 0, 16) for number in range(10)], 0.0)
    assert finish_writes(store) == keys(0, 1)
    assert store.leading_run(keys(2, 3, 9)) == (3, False)
    store.check()


def test_groups_have_slots_of_their_own_size() -> None:
    limits = StoreLimits(slot_bytes=(4 * SLOT, SLOT), arena_bytes=16 * SLOT)
    store = TieredStore(limits)
    assert store.begin_store([Part(key(n), n % 2, 16) for n in range(6)], 0.0) is not None
    assert store.gauges()["dram_used_bytes"] == 3 * 4 * SLOT + 3 * SLOT
    store.check()


def test_changes_tell_what_came_to_a_tier_and_what_left_it() -> None:
    store = TieredStore(replace(LIMITS, arena_bytes=2 * SLOT, disk_bytes=2 * SLOT), tells_changes=True)
    store_parts(store, 0, 1)
    assert store.take_changes() == [(keys(0, 1), Source.DRAM, False)]
    finish_writes(store)
    assert store.take_changes() == [(keys(0, 1), Source.DISK, False)]
    store_parts(store, 2)
    finish_writes(store)
    assert store.take_changes() == [
        (keys(0), Source.DRAM, True),
        (keys(2), Source.DRAM, False),
        (keys(0), Source.DISK, True),
        (keys(2), Source.DISK, False),
    ]
    assert store.take_changes() == []
    silent = TieredStore(LIMITS)
    store_parts(silent, 0)
    assert silent.take_changes() == []


def test_of_a_shared_disk_only_what_was_written_here_is_told() -> None:
    store = TieredStore(replace(LIMITS, disk_bytes=SHARED_DISK_BYTES, disk_shared=True), tells_changes=True)
    store_parts(store, 0)
    finish_writes(store)
    store.believe(keys(5), 0, 0.0)
    store.disbelieve(keys(0, 5), 0.0)
    assert store.take_changes() == [(keys(0), Source.DRAM, False), (keys(0), Source.DISK, False)]


def test_a_second_load_of_one_owner_is_refused() -> None:
    store = TieredStore(LIMITS)
    store.begin_load([], "r", 0.0)
    with pytest.raises(ValueError, match="'r'"):
        store.begin_load([], "r", 0.0)


def test_a_key_twice_in_a_load_is_refused() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0)
    with pytest.raises(ValueError, match="twice"):
        store.begin_load(parts(0, 0), "r", 0.0)
    assert store.gauges()["loads_in_flight"] == 0
    store.check()


SHARED = replace(LIMITS, disk_bytes=SHARED_DISK_BYTES, disk_shared=True)
AHEAD = replace(LIMITS, preload_bytes_max=3 * SLOT)


def test_a_shared_disk_has_what_it_was_seen_to_have_and_is_never_emptied_by_us() -> None:
    store = TieredStore(SHARED)
    store.believe(keys(0, 1), 0, 0.0)
    assert store.leading_run(keys(0, 1, 2)) == (2, False)
    assert store.begin_store(parts(0, 1), 0.0) == [], "it is stored already"
    store.disbelieve(keys(1, 7), 0.0)
    assert store.leading_run(keys(0, 1)) == (1, False)
    for number in range(100, 140):
        store_parts(store, number)
        assert finish_writes(store) == []
    assert store.counters["written_parts"] >= 40 and store.gauges()["disk_limit_bytes"] == 0
    assert not any(isinstance(action, DeleteParts) for action in store.take_actions())
    store.check()


def test_what_every_rank_has_written_to_a_shared_disk_is_announced() -> None:
    store = TieredStore(replace(SHARED, rank_count=2))
    store_parts(store, 0, 1)
    (write,) = store.take_actions()
    assert isinstance(write, WriteParts)
    store.apply(WriteDone(write.move_id, {}), 0.0)
    assert store.take_actions() == []
    store.apply(WriteDone(write.move_id, {key(1): "exists_different: another"}), 0.0)
    assert store.take_actions() == [CommitParts(keys(0))]
    assert store.begin_store(parts(2), 0.0) is not None
    store.end_store(keys(2), 0.0)
    assert isinstance(store.take_actions()[0], WriteParts), (
        "what another engine has under a name is no fault of the disk"
    )
    store.check()


@pytest.mark.parametrize(
    ("reason", "removed"),
    [
        ("missing", False),
        ("io: EIO", False),
        ("RecordNamespaceError", False),
        ("RecordChecksumError", True),
        ("RecordKeyError", True),
        ("short: cut", True),
    ],
)
def test_a_bad_file_on_a_shared_disk_is_removed_and_a_good_one_of_another_is_not(reason: str, removed: bool) -> None:
    store = TieredStore(SHARED)
    store.believe(keys(0, 1), 0, 0.0)
    load = store.begin_load(parts(0, 1), "r", 0.0)
    store.apply(LoadFailed(load.load_id, {key(1): reason}, ""), 0.0)
    assert not store.end_load("r", 0.0)
    assert store.take_actions() == ([DeleteParts(keys(1))] if removed else [])
    assert store.leading_run(keys(0, 1)) == (1, False)
    store.check()


def test_a_full_shared_disk_gets_no_writes_for_a_while() -> None:
    store = TieredStore(SHARED)
    store_parts(store, 0)
    finish_writes(store, {key(0): "no_space: full"})
    store_parts(store, 1)
    assert written_keys(store) == []
    store.tick(LIMITS.disk_retry_s)
    store_parts(store, 2)
    assert written_keys(store) == keys(2)


def test_where_dram_is_no_cache_parts_leave_it_when_written_or_loaded() -> None:
    store = TieredStore(replace(LIMITS, dram_keeps=False))
    store_parts(store, 0, 1)
    assert store.source(key(0)) is Source.DRAM, "the slot serves reads until it is written"
    load = store.begin_load(parts(0), "early", 0.0)
    finish_writes(store)
    assert (store.source(key(0)), store.source(key(1))) == (Source.DRAM, Source.DISK)
    assert store.end_load("early", 0.0) and load.parts[0].source is Source.DRAM
    assert store.source(key(0)) is Source.DISK
    assert store.gauges()["dram_used_bytes"] == 0
    assert store.begin_load(parts(0, 1), "late", 0.0).parts[0].offset != NO_SLOT, "reads have slots of their own"
    assert store.end_load("late", 0.0)
    assert store.gauges()["dram_used_bytes"] == 0
    store.check()


def test_generations_only_grow_and_may_leap() -> None:
    store = TieredStore(LIMITS, generation=4)
    store.reset(0.0, 1 << 60)
    assert store.generation == 1 << 60
    with pytest.raises(ValueError, match="not newer"):
        store.reset(0.0, 7)


def on_disk(limits: StoreLimits, *numbers: int) -> TieredStore:
    store = TieredStore(limits)
    store.fill_from_disk([(key(n), 0, 16) for n in numbers], 0.0)
    return store


def finish_reads(store: TieredStore, failed: dict[bytes, str] | None = None) -> list[bytes]:
    """Carry out the reads ahead as one rank would; returns what was read."""
    read: list[bytes] = []
    for action in store.take_actions():
        if isinstance(action, ReadParts):
            mine = {part.key: failed[part.key] for part in action.parts if failed and part.key in failed}
            store.apply(ReadDone(action.move_id, mine), 0.0)
            read += [part.key for part in action.parts]
    return read


def test_a_preload_is_waited_for_and_then_served_from_dram() -> None:
    store = on_disk(AHEAD, 0, 1)
    assert store.preload(parts(0, 1), "r", 0.0)
    assert store.leading_run(keys(0, 1)) == (2, True) and store.presence(key(0)) is Presence.PENDING
    assert store.has_pending()
    store.hurry(keys(0, 1))
    store.hurry(keys(0, 1))
    read, hurry = store.take_actions()
    assert isinstance(read, ReadParts) and hurry == HurryReads(read.move_id)
    store.apply(ReadDone(read.move_id, {}), 0.0)
    assert store.leading_run(keys(0, 1)) == (2, False) and not store.has_pending()
    assert {part.source for part in store.begin_load(parts(0, 1), "r", 0.0).parts} == {Source.DRAM}
    assert store.end_load("r", 0.0)
    assert store.counters["preload_used_parts"] == 2 and store.gauges()["preload_used_bytes"] == 0
    store.check()


def test_preloads_take_only_what_demand_leaves() -> None:
    store = on_disk(AHEAD, *range(8))
    load = store.begin_load(parts(7), "now", 0.0)
    assert load.parts[0].source is Source.DISK
    assert not store.preload(parts(0), "r", 0.0), "a load is reading"
    assert store.end_load("now", 0.0)
    assert not store.preload(parts(0, 1, 2, 3), "r", 0.0), "three slots are the bound"
    assert finish_reads(store) == keys(0, 1, 2)
    assert not store.preload(parts(4), "s", 0.0)
    assert store.begin_load(parts(0, 1, 2), "r", 0.0).parts[0].source is Source.DRAM
    store.end_load("r", 0.0)
    assert store.preload(parts(4), "s", 0.0)
    store.check()


def test_foreground_takes_the_cache_first_and_then_what_was_read_ahead() -> None:
    store = on_disk(AHEAD, 0, 1)
    store.preload(parts(0, 1), "r", 0.0)
    finish_reads(store)
    store_parts(store, 10, 11)
    finish_writes(store)
    store_parts(store, 12, 13, now_s=1.0)
    finish_writes(store)
    assert [store.source(k) for k in keys(0, 1, 10, 11)] == [Source.DRAM, Source.DRAM, Source.DISK, Source.DISK]
    assert not store.preload(parts(10, 11, 0), "s", 2.0) or store.source(key(0)) is Source.DRAM
    finish_reads(store)
    assert [store.source(k) for k in keys(0, 1)] == [Source.DRAM] * 2, "a preload evicts no other"
    store.check()
    assert store.begin_store(parts(20, 21, 22, 23), 3.0) is not None
    assert store.gauges()["preload_used_bytes"] == 0
    store.check()


def test_requests_share_one_read_and_it_stays_for_the_last_of_them() -> None:
    store = on_disk(replace(AHEAD, dram_keeps=False), 0)
    assert store.preload(parts(0), "a", 0.0) and store.preload(parts(0), "b", 0.0)
    assert finish_reads(store) == keys(0)
    store.release_preload("a", 0.0)
    assert store.source(key(0)) is Source.DRAM
    store.release_preload("b", 0.0)
    assert store.source(key(0)) is Source.DISK and store.gauges()["dram_used_bytes"] == 0
    store.check()


def test_a_preload_that_fails_is_a_miss_and_one_given_up_leaves_nothing() -> None:
    store = on_disk(replace(AHEAD, dram_keeps=False), 0, 1)
    store.preload(parts(0, 1), "r", 0.0)
    store.release_preload("r", 0.0)
    assert finish_reads(store, {key(1): "io: EIO"}) == keys(0, 1)
    assert store.leading_run(keys(0)) == (1, False)
    assert store.presence(key(1)) is Presence.MISS
    assert store.gauges()["dram_used_bytes"] == 0
    store.check()


def test_a_preload_under_way_at_a_reset_owns_its_slots_until_it_ends() -> None:
    store = on_disk(replace(AHEAD, rank_count=2), 0, 1)
    store.preload(parts(0, 1), "r", 0.0)
    read = store.take_actions()[0]
    assert isinstance(read, ReadParts)
    store.reset(0.0)
    (reset,) = store.take_actions()
    assert isinstance(reset, ResetTier)
    for _ in range(2):
        store.apply(FenceDone(reset.fence_id), 0.0)
        store.apply(ReadDone(read.move_id, {}), 0.0)
        store.check()
    assert store.gauges()["dram_used_bytes"] == 0 and store.settled()


def test_a_late_preload_stops_keeping_the_engine_awake() -> None:
    store = on_disk(AHEAD, 0)
    store.preload(parts(0), "r", 0.0)
    (read,) = store.take_actions()
    store.tick(LIMITS.write_deadline_s)
    assert not store.has_pending() and not store.settled()
    assert isinstance(read, ReadParts)
    store.apply(ReadDone(read.move_id, {}), 99.0)
    assert store.settled()


class StoreMachine(RuleBasedStateMachine):
    """Random events on two ranks' worth of answers; a model holds what every slot and the disk really contain."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (SLOT, 3 * SLOT)
        self.begin(IngestionType.ALL, "lru", shared=False, keeps=True)
        self.now_s = 0.0
        self.slot_key: dict[int, bytes] = {}
        self.disk: set[bytes] = set()
        self.storing: list[list[PartPlace]] = []
        self.loading: dict[str, LoadPlan] = {}
        self.held: list[LoadPlan] = []
        self.commands: list[Action] = []
        self.owner = 0

    @initialize(
        ingestion=st.sampled_from(IngestionType),
        policy=st.sampled_from(policy_names()),
        shared=st.booleans(),
        keeps=st.booleans(),
    )
    def begin(self, ingestion: IngestionType, policy: str, *, shared: bool, keeps: bool) -> None:
        limits = StoreLimits(
            slot_bytes=self.sizes,
            arena_bytes=16 * SLOT,
            disk_bytes=SHARED_DISK_BYTES if shared else 20 * SLOT,
            disk_shared=shared,
            dram_keeps=keeps,
            preload_bytes_max=9 * SLOT,
            disk_retry_s=3.0,
            dram_policy=policy,
            disk_policy=policy,
            ingestion=IngestionLimits(ingestion, inflight_bytes_max=8 * SLOT),
        )
        self.store = TieredStore(limits, tells_changes=True)
        self.told: dict[Source, set[bytes]] = {Source.DRAM: set(), Source.DISK: set()}

    def tokens(self, numbers: list[int]) -> list[Part]:
        return [Part(key(n), n % 2, n) for n in numbers]

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    def begin_store(self, numbers: list[int]) -> None:
        places = self.store.begin_store(self.tokens(numbers), self.now_s)
        if places:
            self.storing.append(places)

    @precondition(lambda self: self.storing)
    @rule(index=st.integers(0, 9), fail=st.booleans())
    def end_store(self, index: int, fail: bool) -> None:
        places = self.storing.pop(index % len(self.storing))
        for place in places:
            self.slot_key[place.offset] = place.key
        if fail:
            self.store.apply(StoreFailed([places[0].key], "copy raised"), self.now_s)
            self.slot_key[places[0].offset] = b"rubbish"
        self.store.end_store([place.key for place in places], self.now_s)

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    def begin_load(self, numbers: list[int]) -> None:
        wanted = self.tokens(numbers)
        run = self.store.leading_run([part.key for part in wanted])
        if run.pending or not run.length:
            return
        self.owner += 1
        owner = str(self.owner)
        self.loading[owner] = self.store.begin_load(wanted[: run.length], owner, self.now_s)
        for place in self.loading[owner].parts:
            assert place.source is not Source.MISSING

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    def preload(self, numbers: list[int]) -> None:
        self.owner += 1
        self.store.preload(self.tokens(numbers), str(self.owner), self.now_s)

    @rule(back=st.integers(0, 5), numbers=st.lists(st.integers(0, 30), max_size=3))
    def give_up_a_preload_or_hurry_it(self, back: int, numbers: list[int]) -> None:
        self.store.release_preload(str(self.owner - back), self.now_s)
        self.store.hurry([key(n) for n in numbers])

    @precondition(lambda self: self.store.limits.disk_shared)
    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6), present=st.booleans(), told=st.booleans())
    def others_store_or_remove(self, numbers: list[int], present: bool, told: bool) -> None:
        changed = {key(n) for n in numbers}
        self.disk = self.disk | changed if present else self.disk - changed
        for n in numbers if told else []:
            if present:
                self.store.believe([key(n)], n % 2, self.now_s)
            else:
                self.store.disbelieve([key(n)], self.now_s)

    @precondition(lambda self: self.loading)
    @rule(index=st.integers(0, 9), outcome=st.sampled_from(["good", "good", "lost", "late", "held"]))
    def end_load(self, index: int, outcome: str) -> None:
        owner = sorted(self.loading)[index % len(self.loading)]
        load = self.loading.pop(owner)
        places = load.parts
        self.flush_commands_up_to_writes()
        missing = {place.key for place in places if place.source is Source.DISK and place.key not in self.disk}
        if missing and outcome == "good":
            assert self.store.limits.disk_shared, "the disk should have what it was asked for"
            outcome = "missing"
        for place in places:
            if place.source is Source.DRAM:
                assert self.slot_key[place.offset] == place.key, "bytes of another key would have been served"
            elif place.offset != NO_SLOT:
                self.slot_key[place.offset] = place.key if outcome == "good" else b"rubbish"
        lost = {places[0].key: "checksum"} if outcome == "lost" else {}
        if outcome == "missing":
            lost = dict.fromkeys(sorted(missing), "missing")
        if outcome != "good":
            held = outcome == "held"
            self.store.apply(LoadFailed(load.load_id, lost, "" if lost else "deadline", held), self.now_s)
            if held:
                self.held.append(load)
        assert self.store.end_load(owner, self.now_s) == (outcome == "good")

    @precondition(lambda self: self.held)
    @rule()
    def reads_end(self) -> None:
        load = self.held.pop()
        for place in load.parts:
            if place.source is Source.DISK and place.offset != NO_SLOT:
                assert self.slot_key.get(place.offset) == b"rubbish", "the slot of a read in flight was used again"
        self.store.apply(LoadReleased(load.load_id), self.now_s)

    def flush_commands_up_to_writes(self) -> None:
        self.commands += self.store.take_actions()
        while self.commands and not isinstance(self.commands[0], WriteParts):
            self.carry_out(self.commands.pop(0), "good")

    @rule(outcome=st.sampled_from(["good", "good", "no_space: full", "io: EIO"]))
    def run_one_command(self, outcome: str) -> None:
        self.commands += self.store.take_actions()
        if self.commands:
            self.carry_out(self.commands.pop(0), outcome)

    def carry_out(self, command: Action, outcome: str) -> None:
        if isinstance(command, DeleteParts):
            self.disk -= set(command.keys)
        elif isinstance(command, ResetTier):
            self.disk.clear()
            self.store.apply(FenceDone(command.fence_id), self.now_s)
        elif isinstance(command, ReadParts):
            bad = {place.key: "missing" for place in command.parts if place.key not in self.disk}
            if outcome != "good":
                bad[command.parts[-1].key] = outcome
            for place in command.parts:
                self.slot_key[place.offset] = b"rubbish" if place.key in bad else place.key
            self.store.apply(ReadDone(command.move_id, bad), self.now_s)
        elif isinstance(command, CommitParts):
            assert self.store.limits.disk_shared
        elif isinstance(command, WriteParts):
            for place in command.parts:
                assert self.slot_key[place.offset] == place.key, "a write would have taken another key's bytes"
            failed = {} if outcome == "good" else {command.parts[-1].key: outcome}
            self.disk |= {place.key for place in command.parts} - failed.keys()
            self.store.apply(WriteDone(command.move_id, failed), self.now_s)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.tick(self.now_s)

    @rule()
    def reset(self) -> None:
        self.store.reset(self.now_s)
        # A read ahead ends before the fence is answered, or after: its slots are its own until then.
        # The engine drops its jobs and the ranks finish them before they answer the fence.
        for places in self.storing:
            self.slot_key.update({place.offset: b"old" for place in places})
        self.storing.clear()
        self.loading.clear()
        assert self.store.take_changes() == [], "a reset clears everything, and says nothing of each part"
        self.told = {Source.DRAM: set(), Source.DISK: set()}

    @invariant()
    def who_follows_the_changes_knows_what_is_where(self) -> None:
        for change in self.store.take_changes():
            if change.gone:
                self.told[change.tier] -= set(change.keys)
            else:
                again = self.told[change.tier] & set(change.keys)
                assert not again or (self.store.limits.disk_shared and change.tier is Source.DISK), "told twice"
                self.told[change.tier] |= set(change.keys)
        where = {key(n): self.store.source(key(n)) for n in range(31)}
        assert self.told[Source.DRAM] == {k for k, source in where.items() if source is Source.DRAM}
        if not self.store.limits.disk_shared:
            assert {k for k, source in where.items() if source is Source.DISK} <= self.told[Source.DISK]
            assert len(self.told[Source.DISK]) == self.store.gauges()["disk_parts"]

    @invariant()
    def holds(self) -> None:
        self.store.check()
        used = sum(self.sizes[int(k.removeprefix(b"key")) % 2] for k in self.disk)
        assert used <= 20 * SLOT or self.store.limits.disk_shared, "more on disk than its capacity"


StoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_bytes_in_dram_and_away_from_it() -> None:
    store = TieredStore(replace(LIMITS, slot_bytes=(SLOT, 2 * SLOT), arena_bytes=6 * SLOT))
    assert store.resident_bytes([]) == (0, 0, 0)
    store_parts(store, 0)
    assert store.begin_store(parts(1, group=1), 0.0) is not None
    store.end_store(keys(1), 0.0)
    finish_writes(store)
    assert store.resident_bytes(keys(0, 1)) == (3 * SLOT, 0, 0)
    store_parts(store, 2, 3, 4, 5, 6)
    finish_writes(store)
    assert [store.source(k) for k in keys(0, 1, 6)] == [Source.DISK, Source.DISK, Source.DRAM]
    assert store.resident_bytes(keys(0, 1, 6)) == (4 * SLOT, 3 * SLOT, 3 * SLOT)
    assert store.begin_store(parts(7), 0.0) is not None
    assert store.resident_bytes(keys(7)) == (SLOT, SLOT, 0), "on its way"


def test_bytes_that_move_are_counted_while_they_do() -> None:
    store = TieredStore(LIMITS)
    store_parts(store, 0, 1, 2, 3)
    assert store.moving_bytes() == (0, 4 * SLOT)
    finish_writes(store)
    store_parts(store, 4)
    finish_writes(store)
    assert store.moving_bytes() == (0, 0)
    store.begin_load(parts(0, 1, 2), "r", 1.0)
    assert store.moving_bytes() == (SLOT, 0), "the two others are in DRAM"
    assert store.end_load("r", 1.0)
    assert store.moving_bytes() == (0, 0)
