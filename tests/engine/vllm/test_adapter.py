"""The vLLM adapter without an engine: the manager's answers, the dealing of blocks to parts, metrics, and the checks at start.

Needs vLLM's Python, not an engine: a contract test of what we use of it.
"""

import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: make test has it")
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    ReqContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import Config, load_config
from kvtier.engine.opening import disk_counters
from kvtier.engine.vllm import metrics, startup
from kvtier.engine.vllm.manager import KVTierManager
from kvtier.engine.vllm.messages import KVTierHandshake, KVTierWorkerMetadata, PartsSpec
from kvtier.engine.vllm.worker import KVTierWorker, layouts_of, pieces_of
from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.plan.curves import RecomputeCurve
from kvtier.store.moves import DeleteParts, HurryReads, LoadFailed, PartPlace, ReadParts, Source, WriteDone, WriteParts
from kvtier.store.tiered import SHARED_DISK_BYTES
from kvtier.testing.part_store import pattern, wait_until, write_parts
from kvtier.tier.disk.segment_store import SegmentStore
from kvtier.tier.disk.shared_layout import SharedLayout
from kvtier.tier.disk.threads import ThreadIO

pytestmark = pytest.mark.engine
SLOT = 8192


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def handshake(**changes: Any) -> KVTierHandshake:
    values = {
        "slot_bytes": (SLOT, SLOT),
        "slots_bytes": 8 * SLOT,
        "disk_bytes": 64 * SLOT,
        "generation": 0,
        "entries": ([], []),
    }
    return KVTierHandshake(**(values | changes))


def make_manager(*ranks: KVTierHandshake, clock: Clock | None = None) -> KVTierManager:
    manager = KVTierManager(Config(), group_ids=[2, 5], clock=clock or Clock())
    manager.begin(ranks or [handshake()])
    return manager


def keys(count: int, group: int = 2) -> list[Any]:
    return [make_offload_key(bytes([n]) * 32, group) for n in range(count)]


def context(name: str = "r") -> ReqContext:
    return ReqContext(req_id=name)


def store(manager: KVTierManager, wanted: list[Any], ctx: ReqContext) -> None:
    output = manager.prepare_store(wanted, ctx)
    assert output is not None
    assert output.keys_to_store == wanted
    manager.complete_store(wanted, ctx)


def write_all(manager: KVTierManager) -> None:
    manager.apply(
        [WriteDone(action.move_id, {}) for action in manager.take_actions() if isinstance(action, WriteParts)]
    )


def test_a_part_is_pending_then_hit_and_its_source_is_named() -> None:
    manager, ctx = make_manager(), context()
    manager.on_new_request(ctx)
    (key,) = keys(1)
    assert manager.lookup(key, ctx) is LookupResult.MISS
    output = manager.prepare_store([key], ctx)
    assert output is not None and output.store_spec.parts[0].group == 0  # type: ignore[attr-defined]
    assert manager.lookup(key, ctx) is LookupResult.HIT_PENDING
    manager.complete_store([key], ctx)
    assert manager.lookup(key, ctx) is LookupResult.HIT
    assert manager.get_load_source(key, ctx) is CacheHitSource.HOST
    assert manager.has_pending_work()
    write_all(manager)
    assert not manager.has_pending_work()


def test_a_part_costs_its_groups_share_of_what_its_tokens_take(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = KVTierManager(Config(), group_ids=[2, 5], part_tokens=[16, 32], clock=Clock())
    manager.begin([handshake(slot_bytes=(3 * SLOT, 2 * SLOT), slots_bytes=12 * SLOT)])
    ctx, depths = context(), {2: (16, 1600), 5: (32, 1600)}
    wanted = []
    for group, ends in depths.items():
        for name, end in zip(keys(2, group), ends, strict=True):
            ctx.set_offload_key_position(name, end)
            wanted.append(name)
    assert [part.cost_s for part in manager._parts(wanted, ctx)] == [0.0] * 4, "nothing is known yet"
    monkeypatch.setattr(manager, "curve", RecomputeCurve())
    manager.curve.token_s, manager.curve.pair_s = 1e-4, 1e-7
    shallow, deep, wide, wide_deep = (part.cost_s for part in manager._parts(wanted, ctx))
    assert shallow == pytest.approx(3 / 4 * (16e-4 + 1e-7 * 128))
    assert wide == pytest.approx(1 / 4 * (32e-4 + 1e-7 * 512))
    assert deep == pytest.approx(3 / 4 * manager.curve.seconds(1584, 1600))
    assert deep > shallow and wide_deep > wide


def test_waiting_for_a_pending_part_has_a_deadline() -> None:
    clock = Clock()
    manager, ctx = make_manager(clock=clock), context()
    wanted = keys(3)
    store(manager, wanted[:1], ctx)
    manager.prepare_store(wanted[1:2], ctx)
    assert manager.leading_run(wanted, ctx) == (2, True)
    clock.now_s = Config().lookup_deadline_s + 1
    assert manager.leading_run(wanted, ctx) == (1, False)
    assert manager.lookup(wanted[1], ctx) is LookupResult.MISS
    assert manager.leading_run(wanted, context("another")) == (2, True)


def test_a_request_that_was_answered_in_time_may_wait_again() -> None:
    """After a preemption it is looked up anew, and parts may be under way again."""
    clock, deadline_s = Clock(), Config().lookup_deadline_s
    manager, ctx = make_manager(clock=clock), context()
    manager.on_new_request(ctx)
    wanted = keys(2)
    manager.prepare_store(wanted[:1], ctx)
    assert manager.leading_run(wanted, ctx) == (1, True)
    manager.complete_store(wanted[:1], ctx)
    assert manager.leading_run(wanted, ctx) == (1, False)
    manager.lookups_ended(ctx.req_id)
    manager.prepare_store(wanted[1:], ctx)
    clock.now_s = 10 * deadline_s
    assert manager.leading_run(wanted, ctx) == (2, True)
    # One that was not answered in time has had its wait: it is not kept from running twice.
    clock.now_s += deadline_s
    assert manager.leading_run(wanted, ctx) == (1, False)
    manager.lookups_ended(ctx.req_id)
    assert manager.leading_run(wanted, ctx) == (1, False)
    manager.on_request_finished(ctx)
    assert not manager._waiting_since_s


@pytest.mark.parametrize("again", ["load", "store"])
def test_no_part_comes_before_one_of_a_shorter_prefix(again: str) -> None:
    """A request begins anew after a preemption, a failed load or a reset: its first part does not follow its last one."""
    manager, ctx = make_manager(), context()
    wanted = keys(4)
    for place, key in enumerate(wanted, start=1):
        ctx.set_offload_key_position(key, 16 * place)
    assert [part.parent for part in manager._parts(wanted[:2], ctx)] == [None, wanted[0]]
    assert [part.parent for part in manager._parts(wanted[2:], ctx)] == wanted[1:3]
    manager.reset_cache()
    parts = manager._parts(wanted[:3] if again == "load" else wanted, ctx)
    assert [part.parent for part in parts] == [None, *wanted[: len(parts) - 1]]
    assert [part.parent for part in manager._parts(wanted[3:], ctx)] == ([wanted[2]] if again == "load" else [None])


@pytest.mark.parametrize(
    ("wish", "kept_s"),
    [
        (600, 600.0),
        (0.5, 0.5),
        pytest.param(10**400, float("inf"), id="huge"),
        (float("inf"), float("inf")),
        (float("nan"), None),
        (-1, None),
        (0, None),
        (True, None),
        ("600", None),
        ([600], None),
    ],
)
def test_a_senders_wish_is_a_time_or_none(wish: Any, kept_s: float | None) -> None:
    """Anyone may send anything: a time that is no number would stand for ever at the head of what is let go of by time."""
    manager = make_manager()
    assert manager.store is not None
    seen: list[Any] = []
    manager.store.request = lambda request, now_s, group: seen.append(request)  # type: ignore[method-assign,assignment]
    manager.request_seen(keys(1), 0, {"ttl_s": wish, "pinned": 1, "returns_soon": "yes"})
    assert (seen[0].ttl_s, seen[0].pinned, seen[0].returns_soon) == (kept_s, False, False)


def test_a_failed_load_is_not_offered_to_its_request_again() -> None:
    manager, ctx = make_manager(), context()
    manager.on_new_request(ctx)
    wanted = keys(2)
    store(manager, wanted, ctx)
    spec = manager.prepare_load(wanted, ctx)
    assert isinstance(spec, PartsSpec)
    manager.apply([LoadFailed(spec.load_id, {wanted[1]: "RecordChecksumError"}, "")])
    manager.complete_load(wanted, ctx)
    assert manager.leading_run(wanted, ctx) == (0, False)
    assert manager.leading_run(wanted, context("another")) == (1, False)
    manager.on_request_finished(ctx)
    assert manager.leading_run(wanted, ctx) == (1, False)


def test_nothing_is_kept_of_a_request_aborted_during_a_load_that_failed() -> None:
    manager, ctx = make_manager(), context()
    manager.on_new_request(ctx)
    wanted = keys(2)
    store(manager, wanted, ctx)
    assert manager.leading_run(wanted, ctx) == (2, False)
    manager.prepare_store(keys(1, group=5), ctx)
    assert manager.lookup(keys(1, group=5)[0], ctx) is LookupResult.HIT_PENDING
    spec = manager.prepare_load(wanted, ctx)
    assert isinstance(spec, PartsSpec)
    manager.on_request_finished(ctx)
    manager.apply([LoadFailed(spec.load_id, {}, "deadline")])
    manager.complete_load(wanted, ctx)
    assert manager.take_declined() == []
    kept = (manager._live, manager._declined, manager._waiting_since_s, manager._last_stored)
    assert not any(kept), kept


def test_only_what_every_rank_has_counts_at_start() -> None:
    a, b, c = keys(3)
    manager = make_manager(
        handshake(entries=([a, b], [128, 256])),
        handshake(entries=([b, c], [256, 384])),
        handshake(entries=([b], [256])),
    )
    assert [manager.lookup(key, context()) for key in (a, b, c)] == [
        LookupResult.MISS,
        LookupResult.HIT,
        LookupResult.MISS,
    ]
    assert manager.get_load_source(b, context()) is CacheHitSource.DISK
    (delete,) = manager.take_actions()
    assert isinstance(delete, DeleteParts) and sorted(delete.keys) == sorted([a, c]), "nobody else would ever drop them"


def test_a_reset_that_reached_some_ranks_starts_empty() -> None:
    manager = make_manager(handshake(entries=([keys(1)[0]], [128]), generation=3), handshake(generation=4))
    assert manager.lookup(keys(1)[0], context()) is LookupResult.MISS
    assert manager.store is not None and manager.store.generation == 5


def test_ranks_with_other_sizes_are_refused() -> None:
    with pytest.raises(StoreUnavailableError, match="equally large"):
        make_manager(handshake(), handshake(slot_bytes=(SLOT, 2 * SLOT)))


def test_without_a_handshake_nothing_is_cached_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    manager, ctx = KVTierManager(Config(), group_ids=[0]), context()
    with caplog.at_level(logging.ERROR):
        assert manager.lookup(keys(1, 0)[0], ctx) is LookupResult.MISS
        output = manager.prepare_store(keys(1, 0), ctx)
    assert output is not None and output.keys_to_store == []
    assert len(caplog.records) == 1
    assert not manager.has_pending_work() and manager.get_stats() is None


@pytest.mark.parametrize("entries", [([], []), ([b"a", b"", b"long key"], [1, 0, 2**40])])
def test_a_handshake_crosses_processes(entries: tuple[list[bytes], list[int]]) -> None:
    sent = handshake(entries=entries, generation=3)
    received = pickle.loads(pickle.dumps(sent))
    assert received == sent and received.entries == entries
    assert [type(part) for part in received.entries] == [list, list]


def test_an_excluded_request_neither_loads_nor_stores() -> None:
    manager, ctx = make_manager(), context()
    manager.on_new_request(ctx)
    store(manager, keys(2), ctx)
    assert manager.leading_run(keys(2), ctx).length == 2
    excluded = context("lora")
    manager.on_new_request(excluded)
    manager.exclude("lora")
    assert manager.leading_run(keys(2), excluded) == (0, False)
    assert manager.lookup(keys(2)[0], excluded) is LookupResult.MISS
    output = manager.prepare_store(keys(3), excluded)
    assert output is not None and output.keys_to_store == []
    manager.on_request_finished(excluded)
    manager.on_new_request(excluded)
    assert manager.leading_run(keys(2), excluded).length == 2, "the name may be another request's later"


def test_what_runs_at_a_reset_is_not_stored_until_it_begins_anew() -> None:
    manager, ctx = make_manager(), context()
    manager.on_new_request(ctx)
    manager.outdate(ctx.req_id)
    output = manager.prepare_store(keys(1), ctx)
    assert output is not None and output.keys_to_store == []
    store(manager, keys(1), context("another"))
    assert manager.lookup(keys(1)[0], ctx) is LookupResult.HIT
    manager.begins(ctx.req_id)
    store(manager, keys(2)[1:], ctx)
    manager.outdate(ctx.req_id)
    manager.on_request_finished(ctx)
    manager.outdate(ctx.req_id)
    assert not manager._outdated, "one that has ended leaves nothing"


def test_blocks_are_dealt_to_parts_group_after_group() -> None:
    parts = [PartPlace(b"a", 0, 0), PartPlace(b"b", 0, 0), PartPlace(b"c", 1, 0)]
    spec = GPULoadStoreSpec([7, 8, 9, 3], group_sizes=[3, 1], block_indices=[5, 4])
    pieces = pieces_of(spec, parts, 4)
    assert [(p.group, p.parts, p.block_ids.tolist(), p.first) for p in pieces] == [
        (0, (0, 1), [7, 8, 9], 1),
        (1, (2,), [3], 0),
    ]
    empty = GPULoadStoreSpec([4], group_sizes=[0, 1], block_indices=[0, 0])
    assert [p.group for p in pieces_of(empty, parts[2:], 1)] == [1]


def test_layouts_follow_strides_and_leave_padding_out() -> None:
    tensor = torch.zeros((10, 96), dtype=torch.int8)
    padded = tensor[:, :64]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(padded, 64)], [[CanonicalKVCacheRef(0, 40)], [CanonicalKVCacheRef(0, 64)]]
    )
    first, second = layouts_of(caches, 2)
    assert (first.payload_bytes, second.payload_bytes) == (80, 128)
    assert first.regions[0].stride_bytes == 96 and first.regions[0].base == tensor.data_ptr()


def test_metadata_of_ranks_adds_up() -> None:
    one = KVTierWorkerMetadata(completed_jobs={1: 1}, outcomes=[WriteDone(1, {})])
    two = KVTierWorkerMetadata(completed_jobs={1: 1, 2: 1}, outcomes=[WriteDone(2, {})])
    merged = one.aggregate(two)
    assert merged.completed_jobs == {1: 2, 2: 1} and [o.move_id for o in merged.outcomes] == [1, 2]  # type: ignore[union-attr]


def test_every_metric_reported_is_declared_and_only_changes_are() -> None:
    manager, ctx = make_manager(), context()
    wanted = keys(2)
    store(manager, wanted, ctx)
    spec = manager.prepare_load(wanted, ctx)
    assert isinstance(spec, PartsSpec)
    manager.apply([LoadFailed(spec.load_id, {wanted[0]: "io: [Errno 5] a detail"}, "")])
    manager.complete_load(wanted, ctx)
    declared = metrics.definitions()
    stats = manager.get_stats()
    assert stats is not None
    values = stats.data["data"]
    assert values.keys() <= declared.keys()
    for name, by_label in values.items():
        assert all(len(labels) == len(declared[name].labelnames) for labels in by_label)
    assert values["vllm:kvtier_load_failed_by_reason"] == {("io",): 1}
    advised = values["vllm:kvtier_estimated_hit_rate"]
    assert set(advised) == {(tier, factor) for tier in ("dram", "disk") for factor in ("0.5", "1", "2", "4")}
    again = manager.get_stats()
    assert again is not None
    assert not [n for n in again.data["data"] if isinstance(declared[n], OffloadingCounterMetadata)]


def test_what_goes_over_the_disk_is_reported_once_and_declared(tmp_path: Path) -> None:
    disk = SegmentStore(tmp_path, namespace=b"n" * 16, capacity_bytes=1 << 20, io=ThreadIO())
    worker = KVTierWorker(SimpleNamespace(), 1, disk, wait_deadline_s=1, close_deadline_s=1)  # type: ignore[arg-type]
    assert set(write_parts(disk, {b"k" * 32: pattern(1, SLOT)}).values()) == {None}
    stats = worker.take_stats()
    assert stats is not None
    assert stats.data["data"] == {"vllm:kvtier_disk_written_bytes": {(): SLOT}}
    assert worker.take_stats() is None, "at most once a second"
    assert {metrics.counter_name(name) for name in disk_counters(disk)} <= metrics.definitions().keys()
    disk.close(5.0)


def test_group_numbers_are_vllms() -> None:
    manager, ctx = make_manager(), context()
    output = manager.prepare_store(keys(1, 2) + keys(1, 5), ctx)
    assert output is not None
    assert [get_offload_group_idx(key) for key in output.keys_to_store] == [2, 5]
    assert [part.group for part in output.store_spec.parts] == [0, 1]  # type: ignore[attr-defined]


def vllm_config(**changes: Any) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config=changes.pop("extra", {}),
        kv_role=changes.pop("role", "kv_both"),
        kv_load_failure_policy="fail",
    )
    cache = SimpleNamespace(
        prefix_caching_hash_algo=changes.pop("algorithm", "sha256"),
        enable_prefix_caching=True,
        prefix_cache_retention_interval=0,
    )
    return SimpleNamespace(kv_transfer_config=transfer, cache_config=cache)


def test_settings_are_read_and_mistakes_refused() -> None:
    settings = startup.read_settings(vllm_config(extra={"dram_bytes": "8MiB", "blocks_per_chunk": 2}), {})
    assert settings.config.dram_bytes == 8 << 20
    assert not startup.read_settings(vllm_config(extra={"offload_prompt_only": True}), {}).config.store_decode_blocks
    for wrong, message in (
        ({"extra": {"dram_byte": 1}}, "dram_bytes"),
        ({"role": "kv_consumer"}, "kv_both"),
        ({"extra": {"canonical_layout": True}}, "canonical_layout"),
    ):
        with pytest.raises(ConfigError, match=message):
            startup.read_settings(vllm_config(**wrong), {})


@pytest.mark.parametrize(
    ("algorithm", "seed", "warned"), [("xxhash", None, True), ("xxhash", "0", False), ("sha256", None, False)]
)
def test_what_would_give_no_hits_is_said(
    algorithm: str, seed: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = vllm_config(algorithm=algorithm)
    with caplog.at_level(logging.WARNING):
        startup.adjust_engine(config, SimpleNamespace(kv_cache_groups=[]))
    assert bool([r for r in caplog.records if "nothing on disk will ever be found" in r.getMessage()]) == warned
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert config.cache_config.prefix_caching_hash_algo == ("sha256_cbor" if algorithm == "sha256" else algorithm)


def test_the_front_end_gives_the_engine_time_to_close_unless_told_how_much() -> None:
    for before, after in ((0, 13), (3, 3), (600, 600)):
        config = SimpleNamespace(shutdown_timeout=before)
        startup.give_time_to_close(config, 7.5)
        assert config.shutdown_timeout == after


def test_another_vllm_is_refused_unless_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.vllm, "__version__", "0.99.0")
    groups = SimpleNamespace(kv_cache_groups=[])
    with pytest.raises(ConfigError, match=r"vLLM is 0\.99\.0.*accept_unknown"):
        startup.check_engine(vllm_config(), groups, Config())
    startup.check_engine(vllm_config(), groups, Config(accept_unknown=True))


def test_a_model_with_an_unknown_cache_is_refused() -> None:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace())
    with pytest.raises(ConfigError, match="SimpleNamespace.*accept_unknown"):
        startup.check_engine(vllm_config(), SimpleNamespace(kv_cache_groups=[group]), Config())


def test_ids_are_numpy_arrays_of_one_kind() -> None:
    (piece,) = pieces_of(GPULoadStoreSpec([1], [1], [0]), [PartPlace(b"a", 0, 0)], 1)
    assert piece.block_ids.dtype == np.int64


# ---- a shared disk


class SharedRig:
    """A manager over a directory that "another engine" stores into, with one rank or more."""

    def __init__(self, root: Path, *, ranks: int = 1, publishes: bool = False, **settings: Any) -> None:
        self.clock = Clock()
        self.layout = SharedLayout(root, model="m", block_size=16, blocks_per_file=1, dtype="auto")
        self.config = load_config({"shared_storage_path": str(root), **settings}, environ={}).config
        self.manager = KVTierManager(self.config, group_ids=[2, 5], clock=self.clock, publishes=publishes)
        self.manager.begin([handshake(disk_bytes=SHARED_DISK_BYTES, shared=self.layout)] * ranks)
        assert self.manager.shared is not None
        self.presence = self.manager.shared.presence

    def others_store(self, wanted: list[Any], rank: int = 0) -> None:
        for key in wanted:
            path = Path(os.fsdecode(self.layout.path(os.fsencode(self.layout.rank_directory(rank)), key)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def run(self, wanted: list[Any], name: str = "r") -> tuple[int, bool]:
        """A request's lookups, step after step, until it is told how much there is."""
        for _ in range(50):
            found = self.manager.leading_run(wanted, context(name))
            if not found.pending:
                return found
            wait_until(lambda: not self.presence._asked)
        raise AssertionError("the lookup never came to an end")


@pytest.fixture
def shared_rig(tmp_path: Path) -> Iterator[Callable[..., SharedRig]]:
    rigs: list[SharedRig] = []

    def make(**settings: Any) -> SharedRig:
        rigs.append(SharedRig(tmp_path, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.manager.shutdown()


def many_keys(count: int, group: int = 2) -> list[Any]:
    return [make_offload_key(number.to_bytes(4, "big") * 8, group) for number in range(count)]


def test_what_others_stored_is_asked_for_off_this_thread_and_then_found(shared_rig: Callable[..., SharedRig]) -> None:
    rig = shared_rig()
    wanted = many_keys(600)
    rig.others_store(wanted[:500])
    assert rig.manager.leading_run(wanted, context()) == (0, True), "a lookup never waits"
    assert rig.run(wanted) == (500, False)
    spec = rig.manager.prepare_load(wanted[:3], context())
    assert isinstance(spec, PartsSpec) and {part.source for part in spec.parts} == {Source.DISK}
    rig.manager.store.check()  # type: ignore[union-attr]


def test_events_name_medium_and_locality_and_come_only_where_they_are_published(
    shared_rig: Callable[..., SharedRig],
) -> None:
    manager = KVTierManager(Config(), group_ids=[2, 5], clock=Clock(), publishes=True)
    assert list(manager.take_events()) == []
    manager.begin([handshake()])
    wanted = keys(2)
    store(manager, wanted, context())
    write_all(manager)
    local = {"locality": Locality.LOCAL, "removal_expected": True}
    assert list(manager.take_events()) == [
        OffloadingEvent(wanted, Medium.CPU, removed=False, **local),
        OffloadingEvent(wanted, Medium.STORAGE, removed=False, **local),
    ]
    manager.reset_cache()
    assert list(manager.take_events()) == []

    shared = shared_rig(publishes=True)
    shared.others_store(wanted[:1])
    assert shared.run(wanted)[0] == 1
    store(shared.manager, wanted[1:], context())
    write_all(shared.manager)
    assert list(shared.manager.take_events()) == [
        OffloadingEvent(wanted[1:], Medium.CPU, removed=False, **local),
        OffloadingEvent(wanted[1:], Medium.STORAGE, removed=False, locality=Locality.REMOTE, removal_expected=False),
        OffloadingEvent(wanted[1:], Medium.CPU, removed=True, **local),
    ]

    silent = make_manager()
    store(silent, wanted, context())
    assert list(silent.take_events()) == []


def test_a_new_prompt_costs_few_questions(shared_rig: Callable[..., SharedRig]) -> None:
    rig = shared_rig()
    assert rig.run(many_keys(6000)) == (0, False)
    assert rig.presence.questions <= 64


def test_an_answer_that_does_not_come_is_a_miss_at_the_deadline(shared_rig: Callable[..., SharedRig]) -> None:
    rig, answer = shared_rig(), threading.Event()
    rig.presence._exists = lambda path: answer.wait(20) and False
    wanted = many_keys(4)
    assert rig.manager.leading_run(wanted, context()) == (0, True)
    assert rig.manager.lookup(wanted[0], context()) is LookupResult.RETRY
    rig.clock.now_s = rig.config.lookup_deadline_s + 1
    assert rig.manager.leading_run(wanted, context()) == (0, False)
    assert rig.manager.lookup(wanted[0], context()) is LookupResult.MISS
    answer.set()


def test_windows_are_asked_key_by_key(shared_rig: Callable[..., SharedRig]) -> None:
    rig = shared_rig()
    wanted = many_keys(3, group=5)
    rig.others_store(wanted[:1])
    assert {rig.manager.lookup(key, context()) for key in wanted} == {LookupResult.RETRY}
    wait_until(lambda: not rig.presence._asked)
    answers = [rig.manager.lookup(key, context()) for key in wanted]
    assert answers == [LookupResult.HIT, LookupResult.MISS, LookupResult.MISS]


def test_what_vanished_is_found_out_and_stored_again(shared_rig: Callable[..., SharedRig], tmp_path: Path) -> None:
    rig = shared_rig()
    wanted = many_keys(4)
    rig.others_store(wanted)
    assert rig.run(wanted) == (4, False)
    for path in tmp_path.rglob("*.bin"):
        path.unlink()
    rig.clock.now_s += rig.config.shared_present_s + 1
    assert rig.run(wanted, "s") == (0, False)
    output = rig.manager.prepare_store(wanted, context("s"))
    assert output is not None and output.keys_to_store == wanted, "nothing of it is believed any more"


def test_a_read_that_found_nothing_is_believed_at_once(shared_rig: Callable[..., SharedRig], tmp_path: Path) -> None:
    rig = shared_rig()
    wanted, ctx = many_keys(4), context()
    rig.others_store(wanted)
    assert rig.run(wanted) == (4, False)
    Path(os.fsdecode(rig.layout.path(os.fsencode(rig.layout.rank_directory(0)), wanted[2]))).unlink()
    spec = rig.manager.prepare_load(wanted, ctx)
    assert isinstance(spec, PartsSpec)
    rig.manager.apply([LoadFailed(spec.load_id, {wanted[2]: "missing"}, "")])
    rig.manager.complete_load(wanted, ctx)
    assert rig.run(wanted, "s") == (2, False)
    assert rig.manager.take_actions() == []


def test_markers_follow_the_last_rank_and_go_before_a_bad_file(
    shared_rig: Callable[..., SharedRig], tmp_path: Path
) -> None:
    rig = shared_rig(ranks=2)
    wanted, ctx = many_keys(2), context()
    for rank in (0, 1):
        rig.others_store([], rank)
        rig.layout.rank_directory(rank).mkdir(parents=True, exist_ok=True)
    store(rig.manager, wanted, ctx)
    (write,) = rig.manager.take_actions()
    assert isinstance(write, WriteParts)
    markers = rig.layout.marker_directory()
    rig.manager.apply([WriteDone(write.move_id, {})])
    assert rig.manager.take_actions() == [] and not list(markers.rglob("*.bin"))
    rig.manager.apply([WriteDone(write.move_id, {})])
    assert rig.manager.take_actions() == [], "the ranks have nothing to do with it"
    wait_until(lambda: len(list(markers.rglob("*.bin"))) == 2)
    spec = rig.manager.prepare_load(wanted, ctx)
    assert isinstance(spec, PartsSpec) and {part.source for part in spec.parts} == {Source.DISK}, "DRAM only stages"
    rig.manager.apply([LoadFailed(spec.load_id, {wanted[1]: "RecordChecksumError"}, "")])
    rig.manager.complete_load(wanted, ctx)
    assert rig.manager.take_actions() == [DeleteParts([wanted[1]])]
    wait_until(lambda: len(list(markers.rglob("*.bin"))) == 1)


def test_a_reset_takes_a_generation_that_no_engine_has_had(shared_rig: Callable[..., SharedRig]) -> None:
    first, second = shared_rig(), shared_rig()
    wanted = many_keys(2)
    first.others_store(wanted)
    assert first.run(wanted) == (2, False)
    first.manager.reset_cache()
    second.manager.reset_cache()
    assert first.run(wanted, "s") == (0, False)
    generations = {rig.manager.store.generation for rig in (first, second)}  # type: ignore[union-attr]
    assert len(generations) == 2 and min(generations) > 1 << 60
    before = first.manager.store.generation  # type: ignore[union-attr]
    first.manager.reset_cache()
    assert first.manager.store.generation > before  # type: ignore[union-attr]


def test_ranks_with_other_places_are_refused(tmp_path: Path) -> None:
    here, there = (
        SharedLayout(tmp_path, model=name, block_size=16, blocks_per_file=1, dtype="auto") for name in ("a", "b")
    )
    with pytest.raises(StoreUnavailableError, match="mounted at the same place"):
        make_manager(handshake(shared=here), handshake(shared=there))


def test_lookups_for_a_request_that_waits_start_no_deadline_and_hurry_nothing(tmp_path: Path) -> None:
    clock = Clock()
    settings = {"disk_path": str(tmp_path), "enable_preload": True, "preload_lookahead_requests": 1, "io_depth": 1}
    manager = KVTierManager(load_config(settings, environ={}).config, group_ids=[2, 5], clock=clock)
    wanted = keys(2)
    manager.begin([handshake(entries=(wanted, [16] * len(wanted)))])
    assert manager.preload(manager.parts(wanted, context()), "r")
    with manager.looking_ahead():
        assert manager.leading_run(wanted, context()) == (2, True)
        assert manager.lookup(wanted[0], context()) is LookupResult.HIT_PENDING
    assert manager._waiting_since_s == {}
    assert [type(action) for action in manager.take_actions()] == [ReadParts]
    assert manager.leading_run(wanted, context()) == (2, True)
    assert [type(action) for action in manager.take_actions()] == [HurryReads]
