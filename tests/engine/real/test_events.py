"""A router that follows vLLM's KV events knows what kvtier has, on which medium, and of which tokens."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import LLAMA, kvtier_settings, text
from tests.engine.real.conftest import Fork
from tests.engine.real.test_lora import LORA, write_adapter

from kvtier.store.moves import Source
from kvtier.testing.vllm.driver import Engine

pytestmark = pytest.mark.engine

BLOCK = LLAMA.block_tokens


def publishing(socket: Path) -> Any:
    """vLLM's configuration of a publisher on this socket, whose replay endpoint ends with `-replay`."""
    from vllm.config.kv_events import KVEventsConfig

    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{socket}",
        replay_endpoint=f"ipc://{socket}-replay",
    )


def published(replay: str) -> list[Any]:
    """Every event since the engine's start, asked of its replay endpoint."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    events: list[Any] = []
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(replay)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while socket.poll(10_000):
        *_, _, payload = socket.recv_multipart()
        if not payload:
            socket.close(0)
            return events
        events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    raise AssertionError("the replay did not end")


def planning(path: Path, model: Path) -> dict[str, Any]:
    """Settings of a planner to which loads are far cheaper than computing, and reads from disk worth a wait."""
    curves = {
        name: {"floor": 0.01, "knots": {"1000": s}} for name, s in (("f", 100.0), ("g_ssd", 0.5), ("g_mem", 0.02))
    }
    file = path / "break_even.json"
    about = {"model_name": str(model), "kv_dtype": "auto", "break_even_ssd_tokens": 0, "break_even_mem_tokens": 0}
    file.write_text(json.dumps(about | {"curves": curves}))
    return {
        "prefix_cache_break_even_path": str(file),
        "load_planner": "on",
        "load_planner_defer_tolerance": 1000,
        "load_planner_defer_deadline_max_s": 60,
    }


class Follower:
    """What is where, by the events alone: how often each block was announced, and the tokens of each.

    `clears`: heed what clears everything, which a reset of the engine's own cache alone says too.
    """

    def __init__(self, events: list[Any], *, clears: bool = False) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.tokens: dict[str, dict[int, tuple[int, ...]]] = {"GPU": {}, "CPU": {}, "STORAGE": {}}
        self.removed: dict[str, int] = dict.fromkeys(self.held, 0)
        for event in events:
            if isinstance(event, BlockStored):
                self.held[event.medium or ""] |= set(event.block_hashes)  # type: ignore[arg-type]
                for place, name in enumerate(event.block_hashes):
                    first = place * event.block_size
                    self.tokens[event.medium or ""][name] = tuple(event.token_ids[first : first + event.block_size])  # type: ignore[index]
            elif isinstance(event, BlockRemoved):
                self.held[event.medium or ""] -= set(event.block_hashes)  # type: ignore[arg-type]
                self.removed[event.medium or ""] += len(event.block_hashes)
            elif clears and isinstance(event, AllBlocksCleared):
                for held in self.held.values():
                    held.clear()


def in_store(engine: Engine) -> dict[Source, set[int]]:
    """What the store would take from DRAM, and what it has on disk, as events name it."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash

    store = engine.scheduler.connector.manager.store
    keys = {
        Source.DRAM: {key for key in store._dram if store.source(key) is Source.DRAM},
        Source.DISK: set(store._disk),
    }
    return {
        tier: {maybe_convert_block_hash(get_offload_block_hash(key)) for key in found} for tier, found in keys.items()
    }  # type: ignore[misc]


@pytest.mark.parametrize("described", [True, False])
def test_who_follows_the_events_knows_what_is_where(
    fork: Fork, checkpoint: Any, tmp_path: Path, described: bool
) -> None:
    model, disk = checkpoint(LLAMA.model), tmp_path / "disk"
    disk.mkdir()
    prompts = [text(seed, 6 * BLOCK + 3) for seed in range(6)]

    def serve(name: str, asked: list[list[int]]) -> tuple[Follower, dict[Source, set[int]], int]:
        replay = f"ipc://{tmp_path}/{name}-replay"
        settings = kvtier_settings(disk, dram_bytes="1MiB", self_describing_kv_events=described)
        with LLAMA.engine(model, kvtier=settings, kv_events_config=publishing(tmp_path / name)) as engine:
            for prompt in asked:
                engine.ask(prompt, max_tokens=2)
                engine.settle()
                engine.reset_prefix_cache()
            # One step more publishes what the last outcomes changed.
            engine.ask(text(99, BLOCK // 2), max_tokens=1)
            engine.settle()
            follower = Follower(published(replay))
            notes = engine.scheduler.connector.connector_scheduler._events_tracker._pending_event_metadata
            return follower, in_store(engine), len(notes)

    first, found, notes = fork(lambda: serve("first", prompts))
    assert first.held["CPU"] == found[Source.DRAM] != set()
    assert first.held["STORAGE"] == found[Source.DISK]
    assert len(found[Source.DISK]) == 6 * len(prompts)
    assert first.removed["CPU"] > 0, "DRAM is smaller than what was stored"
    chunks = {tuple(p[at : at + BLOCK]) for p in prompts for at in range(0, 6 * BLOCK, BLOCK)}
    assert set(first.tokens["CPU"].values()) == (chunks if described else {()})
    assert set(first.tokens["STORAGE"].values()) == (chunks if described else {()})
    if described:
        assert all(
            first.tokens["CPU"][name] == tokens
            for name, tokens in first.tokens["GPU"].items()
            if name in first.tokens["CPU"]
        )
        assert notes == len(found[Source.DISK]), "a note for each part that is somewhere, no more"

    # What a process finds on disk is told when it comes to DRAM.
    second, found, notes = fork(lambda: serve("second", prompts[:1]))
    assert second.held["CPU"] == found[Source.DRAM] and len(found[Source.DRAM]) == 6
    assert not second.held["STORAGE"]
    assert set(second.tokens["CPU"].values()) == (
        {tuple(prompts[0][at : at + BLOCK]) for at in range(0, 6 * BLOCK, BLOCK)} if described else {()}
    )


def test_parts_of_adapters_are_told_by_the_hashes_of_the_engines_own_events(
    fork: Fork, checkpoint: Any, tmp_path: Path
) -> None:
    """Their keys are mixed with what the adapter's files hold; a router knows the engine's hashes alone."""
    model, disk, adapter = checkpoint(LLAMA.model), tmp_path / "disk", tmp_path / "adapter"
    disk.mkdir()
    fork(lambda: write_adapter(model, adapter, 1))
    # Its change time has to lie before the start.
    time.sleep(0.2)
    prompts = [text(seed, 6 * BLOCK + 3) for seed in range(6)]

    def serve(name: str, asked: list[list[int]]) -> tuple[Follower, set[str | None], int]:
        from vllm.distributed.kv_events import BlockStored

        config = publishing(tmp_path / name)
        settings = kvtier_settings(disk, dram_bytes="1MiB", self_describing_kv_events=True)
        with LLAMA.engine(model, kvtier=settings, kv_events_config=config, **LORA) as engine:
            for prompt in asked:
                engine.ask(prompt, max_tokens=2, lora=("a", 1, adapter))
                engine.settle()
                engine.reset_prefix_cache()
            engine.ask(text(99, BLOCK // 2), max_tokens=1)
            engine.settle()
            events = published(f"ipc://{tmp_path}/{name}-replay")
            told = {event.lora_name for event in events if isinstance(event, BlockStored)}
            return Follower(events), told, int(engine.counters["vllm:kvtier_load_disk_parts"])

    first, adapters, _ = fork(lambda: serve("first", prompts))
    assert adapters == {"a"}
    assert first.tokens["GPU"] == first.tokens["CPU"] == first.tokens["STORAGE"]
    assert len(first.tokens["GPU"]) == len(first.held["STORAGE"]) == 6 * len(prompts)
    assert first.removed["CPU"] == 6 * len(prompts) - len(first.held["CPU"]) > 0

    second, adapters, loaded = fork(lambda: serve("second", prompts[:1]))
    assert loaded == 6 and adapters == {"a"}
    assert second.tokens["GPU"] == second.tokens["CPU"]


@pytest.mark.parametrize("planned", [False, True])
def test_what_is_read_ahead_is_told_with_its_tokens(fork: Fork, checkpoint: Any, tmp_path: Path, planned: bool) -> None:
    """Parts that a start found on disk come to DRAM before any request loads them."""
    model, disk = checkpoint(LLAMA.model), tmp_path / "disk"
    disk.mkdir()
    prompts = [text(seed, 6 * BLOCK + 3) for seed in range(4)]
    settings = kvtier_settings(disk, self_describing_kv_events=True)
    if planned:
        settings |= planning(tmp_path, model)
    else:
        settings |= {"enable_preload": True, "preload_lookahead_requests": 4}

    def fill() -> None:
        with LLAMA.engine(model, kvtier=kvtier_settings(disk)) as engine:
            engine.answer(prompts, max_tokens=2)
            engine.settle()

    def serve() -> tuple[Follower, dict[Source, set[int]], float, int]:
        config = publishing(tmp_path / "ahead")
        with LLAMA.engine(model, kvtier=settings, max_num_seqs=1, kv_events_config=config) as engine:
            first = engine.submit(text(9, 10 * BLOCK), max_tokens=40)
            engine.step_until(lambda: engine.computed_tokens(first) > 0, deadline_s=30, what="the first request runs")
            ids = [engine.submit(prompt, max_tokens=2) for prompt in prompts]
            engine.abort(ids.pop())
            for request_id in (first, *ids):
                engine.result(request_id)
            engine.settle()
            engine.ask(text(99, BLOCK // 2), max_tokens=1)
            engine.settle()
            ahead = engine.counters["vllm:kvtier_preload_parts"]
            notes = engine.scheduler.connector.connector_scheduler._events_tracker._pending_event_metadata
            follower = Follower(published(f"ipc://{tmp_path}/ahead-replay"))
            store = engine.scheduler.connector.manager.store
            return follower, in_store(engine), ahead, len(notes.keys() - store._dram.keys() - store._disk.keys())

    fork(fill)
    follower, found, ahead, strays = fork(serve)
    assert ahead > 0, "nothing was read ahead"
    assert follower.held["CPU"] == found[Source.DRAM] and strays == 0
    chunks = {tuple(p[at : at + BLOCK]) for p in prompts for at in range(0, 6 * BLOCK, BLOCK)}
    told = set(follower.tokens["CPU"].values())
    assert () not in told, "a part was told without its tokens"
    assert len(told & chunks) >= 18


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_is_told_whether_the_engine_could_reset_its_own_cache_or_not(
    fork: Fork, checkpoint: Any, tmp_path: Path, running: bool
) -> None:
    """With requests running vLLM's own cache stays as it is, and says nothing; kvtier forgets everything all the same."""
    model, disk = checkpoint(LLAMA.model), tmp_path / "disk"
    disk.mkdir()

    def scenario() -> tuple[Follower, dict[Source, set[int]], int]:
        from vllm.distributed.kv_events import AllBlocksCleared

        config = publishing(tmp_path / "reset")
        with LLAMA.engine(model, kvtier=kvtier_settings(disk), kv_events_config=config) as engine:
            engine.ask(text(1, 6 * BLOCK + 3), max_tokens=2)
            engine.settle()
            if running:
                request_id = engine.submit(text(2, BLOCK), max_tokens=8)
                engine.step_until(lambda: engine.computed_tokens(request_id) > BLOCK, deadline_s=30, what="decoding")
            assert engine.reset_now(connector=True) is not running
            engine.ask(text(3, 2 * BLOCK), max_tokens=2)
            engine.settle()
            engine.ask(text(99, BLOCK // 2), max_tokens=1)
            engine.settle()
            events = published(f"ipc://{tmp_path}/reset-replay")
            return Follower(events, clears=True), in_store(engine), sum(isinstance(e, AllBlocksCleared) for e in events)

    follower, found, cleared = fork(scenario)
    assert follower.held["CPU"] == found[Source.DRAM] != set()
    assert follower.held["STORAGE"] == found[Source.DISK] != set()
    assert cleared == 1
