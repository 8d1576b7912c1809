"""kvtier as a library: the whole of it, without an engine, against a dictionary."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier.engine.embedded import Cache
from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.simulate.trace import Trace
from kvtier.testing.media import FaultyPartStore
from kvtier.tier.disk.base import PartFailure
from kvtier.tier.disk.segment_store import SegmentStore

PART = 3000
SLOT = 4096


def payload(number: int) -> bytes:
    return bytes((number * 31 + place) % 251 for place in range(PART))


def keys(*numbers: int) -> list[bytes]:
    return [b"key%03d" % number for number in numbers]


def open_cache(path: Path | None, *, slots: int = 8, **changes: object) -> Cache:
    values: dict[str, object] = {"dram_bytes": (slots + 2) * SLOT, "disk_bytes": 64 * SLOT, "disk_free_bytes_min": 0}
    if path is not None:
        path.mkdir(exist_ok=True)
        values["disk_path"] = str(path)
    return kvtier.open(PART, {"test": 1}, **(values | changes))


def open_shared_cache(path: Path, *, slots: int = 8, **changes: object) -> Cache:
    path.mkdir(exist_ok=True)
    values = {"dram_bytes": (slots + 2) * SLOT, "shared_storage_path": str(path), "shared_absent_s": 0.0}
    return kvtier.open(PART, {"test": 1}, disk_free_bytes_min=0, **(values | changes))


def put(cache: Cache, *numbers: int) -> int:
    return cache.put(keys(*numbers), [payload(number) for number in numbers])


def get(cache: Cache, *numbers: int) -> int:
    """How many come back; each that does is right to the byte."""
    buffers = [bytearray(PART) for _ in numbers]
    count = cache.get(keys(*numbers), buffers)
    for number, buffer in zip(numbers[:count], buffers, strict=False):
        assert bytes(buffer) == payload(number)
    return count


@pytest.mark.parametrize(("disk_io", "name"), [("auto", "threads"), ("ring", "ring")])
def test_parts_come_back_from_dram_then_from_disk_then_in_another_process_life(
    tmp_path: Path, disk_io: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvtier")
    with open_cache(tmp_path / "d", slots=4, disk_io=disk_io) as cache:
        assert f"I/O by {name}" in caplog.text, "a small arena gets the ring only where it is asked for"
        assert put(cache, 0, 1, 2) == 3
        assert get(cache, 0, 1, 2) == 3
        for number in range(3, 20):
            assert put(cache, number) == 1
        assert cache.flush(20)
        assert get(cache, *range(20)) == 20, "more than DRAM holds"
    with open_cache(tmp_path / "d") as cache:
        assert cache.lookup(keys(*range(20))) == 20
        assert get(cache, *range(20)) == 20
        assert get(cache, 0, 1, 77, 2) == 2, "a hole ends the prefix"


def test_processes_that_share_a_filesystem_find_each_others_parts(tmp_path: Path) -> None:
    with open_shared_cache(tmp_path / "d") as ours, open_shared_cache(tmp_path / "d", slots=3) as theirs:
        assert [put(ours, number) for number in range(20)] == [1] * 20
        assert ours.flush(20)
        assert get(theirs, *range(20)) == 20, "more than its DRAM holds"
        assert put(theirs, 20, 21) == 2
        assert theirs.flush(20)
        assert ours.lookup(keys(*range(22), 99)) == 22
        assert ours.reset() is None
        assert get(ours, 0) == 0
    with open_shared_cache(tmp_path / "d") as later:
        assert later.lookup(keys(0)) == 0, "a reset is for good"
    with kvtier.open(PART, {"test": 2}, shared_storage_path=str(tmp_path / "d"), dram_bytes=10 * SLOT) as other:
        assert get(other, 0) == 0


def test_many_keys_are_asked_for_window_by_window(tmp_path: Path) -> None:
    with open_shared_cache(tmp_path / "d") as cache:
        wanted = keys(*range(700))
        layout, presence = cache._shared.presence._layout, cache._shared.presence  # type: ignore[union-attr]
        for key in wanted[:600]:
            path = Path(os.fsdecode(layout.path(os.fsencode(layout.rank_directory(0)), key)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        assert cache.lookup(wanted) == 600
        asked = presence.questions
        assert cache.lookup(keys(*range(900, 999))) == 0
        assert presence.questions - asked == 64, "a new prompt costs few questions"


def test_a_shared_filesystem_that_does_not_answer_is_a_miss_at_the_deadline(tmp_path: Path) -> None:
    with open_shared_cache(tmp_path / "d") as other:
        assert put(other, 0) == 1
    with open_shared_cache(tmp_path / "d", lookup_deadline_s=0.01) as cache:
        answer = threading.Event()
        presence = cache._shared.presence  # type: ignore[union-attr]
        real, presence._exists = presence._exists, lambda path: answer.wait(20)
        assert cache.lookup(keys(0)) == 0
        answer.set()
        presence._exists = real
        assert presence.wait(keys(0), 20)
        assert get(cache, 0) == 1


@pytest.mark.parametrize("key", [b"", b"ab", b"k" * 65])
def test_a_key_that_can_name_no_shared_file_is_refused(tmp_path: Path, key: bytes) -> None:
    with open_shared_cache(tmp_path / "d") as cache:
        with pytest.raises(ValueError, match="3 to 64 bytes"):
            cache.put([key], [payload(0)])
        assert put(cache, 1) == 1


def test_a_buffer_may_be_reused_as_soon_as_put_returns(tmp_path: Path) -> None:
    with open_cache(tmp_path / "d") as cache:
        buffer = bytearray(payload(1))
        cache.put(keys(1), [buffer])
        buffer[:] = bytes(PART)
        assert get(cache, 1) == 1


def test_dram_alone_evicts_the_least_recently_used() -> None:
    with open_cache(None, slots=2) as cache:
        for number in range(4):
            put(cache, number)
        get(cache, 0)
        put(cache, 4)
        assert [cache.lookup(keys(number)) for number in range(5)] == [1, 0, 1, 1, 1]


def test_reset_means_gone_over_restarts_too(tmp_path: Path) -> None:
    with open_cache(tmp_path / "d") as cache:
        put(cache, 0, 1)
        cache.flush(20)
        cache.reset()
        assert get(cache, 0) == 0
        assert cache.flush(20)
        put(cache, 2)
        assert get(cache, 2) == 1
    with open_cache(tmp_path / "d") as cache:
        assert [cache.lookup(keys(n)) for n in (0, 1, 2)] == [0, 0, 0], (
            "what came after a reset may be of other weights"
        )
        put(cache, 2)
    with open_cache(tmp_path / "d") as cache:
        assert [cache.lookup(keys(n)) for n in (0, 1, 2)] == [0, 0, 1]
        assert get(cache, 2) == 1


def test_a_reset_outlives_a_kill_right_after_it(tmp_path: Path) -> None:
    with open_cache(tmp_path / "d", disk_durability="none") as cache:
        put(cache, *range(6))
    child = os.fork()
    if child == 0:
        cache = open_cache(tmp_path / "d", disk_durability="none")
        if cache.lookup(keys(0)) == 1:
            cache.reset()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with open_cache(tmp_path / "d") as cache:
        assert [cache.lookup(keys(number)) for number in range(6)] == [0] * 6


def test_another_namespace_or_size_shares_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path / "d") as cache:
        put(cache, 0)
    with kvtier.open(
        PART, {"test": 2}, dram_bytes=20 * SLOT, disk_path=str(tmp_path / "d"), disk_bytes=64 * SLOT
    ) as other:
        assert other.lookup(keys(0)) == 0
    assert len(list((tmp_path / "d").glob("*/manifest.json"))) == 2


def test_a_second_cache_on_one_path_is_refused(tmp_path: Path) -> None:
    with open_cache(tmp_path / "d"), pytest.raises(StoreUnavailableError, match=str(os.getpid())):
        open_cache(tmp_path / "d")


def faulty(tmp_path: Path, **changes: Any) -> tuple[Cache, FaultyPartStore]:
    disk = FaultyPartStore(SegmentStore(tmp_path, namespace=b"n" * 16, capacity_bytes=64 * SLOT))
    values = {"dram_bytes": 4 * SLOT, "disk_bytes": 64 * SLOT, "load_deadline_s": 20.0} | changes
    cache = Cache(PART, {}, disk=disk, **values)
    for number in range(6):
        put(cache, number)
    assert cache.flush(20)
    return cache, disk


@pytest.mark.parametrize("failure", [PartFailure.MISSING, PartFailure.SHORT, PartFailure.IO])
def test_a_part_lost_on_disk_ends_the_prefix_and_what_is_before_it_comes(tmp_path: Path, failure: PartFailure) -> None:
    cache, disk = faulty(tmp_path)
    disk.fail[keys(2)[0]] = failure
    assert get(cache, *range(6)) == 2
    disk.fail.clear()
    assert get(cache, *range(6)) == 2, "what was lost stays lost"
    assert put(cache, 2) == 1
    assert get(cache, *range(6)) == 6
    cache.store.check()
    cache.close()


def test_flipped_bits_are_misses(tmp_path: Path) -> None:
    cache, disk = faulty(tmp_path)
    disk.flip.update(keys(0, 3))
    assert get(cache, *range(6)) == 0
    assert get(cache, 1, 2, 3, 4) == 2
    cache.store.check()
    cache.close()


def test_a_stalled_disk_is_a_miss_at_the_deadline_and_serves_again_when_it_wakes(tmp_path: Path) -> None:
    cache, disk = faulty(tmp_path, load_deadline_s=0.2)
    disk.stall()
    assert get(cache, 0, 1) == 0
    cache.store.check()
    disk.resume()
    assert cache.flush(20)
    end_s = time.monotonic() + 20
    while get(cache, 0, 1) < 2:
        assert time.monotonic() < end_s, "a machine that is busy may miss the short deadline again, but not for ever"
    cache.store.check()
    cache.close()


def test_a_write_that_hangs_is_not_reported_as_flushed(tmp_path: Path) -> None:
    cache, disk = faulty(tmp_path, write_deadline_s=0.0)
    held: list[Any] = []
    disk.submit_write = lambda *args, **kwargs: held.append((args, kwargs))  # type: ignore[method-assign, assignment, return-value]
    assert put(cache, 10) == 1
    assert not cache.flush(0.05)
    ((args, kwargs),) = held
    disk.inner.submit_write(*args, **kwargs)
    assert cache.flush(20)
    cache.store.check()
    cache.close()


def test_a_full_disk_leaves_dram_serving(tmp_path: Path) -> None:
    cache, disk = faulty(tmp_path)
    disk.write_failure = PartFailure.NO_SPACE
    assert put(cache, 10) == 1
    assert get(cache, 10) == 1
    assert cache.flush(20)
    assert cache.store.counters["write_failed:no_space"] == 1
    cache.store.check()
    cache.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dram_bytes": 100}, "dram_bytes is 100"),
        ({"dram_bytes": "100TiB"}, "dram_bytes is .* available"),
        ({"dram_byte": 1}, "kvtier.open: setting 'dram_byte'"),
        ({"disk_path": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, StoreUnavailableError), match=message):
        open_cache(tmp_path / "d", **changes)


@pytest.mark.parametrize("wrong", [keys(1, 2, 3), keys(1), ["text"] * 2, [None] * 2, [7, 8]])
def test_a_put_of_wrong_keys_changes_nothing(tmp_path: Path, wrong: list[Any]) -> None:
    cache = open_cache(tmp_path)
    for call in (cache.put, cache.get):
        with pytest.raises(ValueError, match="keys|bytes"):
            call(wrong, [bytearray(payload(1)), bytearray(payload(2))])
    assert cache.lookup(keys(1)) == 0
    assert put(cache, 1, 2) == 2
    assert get(cache, 1, 2) == 2
    assert cache.flush(20.0)
    assert cache.close()
    with open_cache(tmp_path) as cache:
        assert get(cache, 1, 2) == 2


@pytest.mark.parametrize("size", [0, PART - 1, PART + 1])
def test_a_buffer_of_another_size_is_refused(size: int) -> None:
    with open_cache(None) as cache:
        with pytest.raises(ValueError, match=f"{size} bytes"):
            cache.put(keys(0), [bytes(size)])
        with pytest.raises(ValueError, match="read-only"):
            cache.get(keys(0), [bytes(PART)])
        assert put(cache, 0, 1) == 2
        with pytest.raises(ValueError, match="2 keys and 1 buffers"):
            cache.get(keys(0, 1), [bytearray(PART)])


@pytest.mark.parametrize("where", ["dram", "disk"])
def test_a_key_wanted_twice_comes_twice(tmp_path: Path, where: str) -> None:
    with open_cache(tmp_path / "d") as cache:
        assert put(cache, 0, 1) == 2
        assert cache.flush(20)
        if where == "disk":
            cache.close()
            cache = open_cache(tmp_path / "d")
        assert get(cache, 0, 0, 1, 0) == 4
        cache.store.check()
        assert get(cache, 0, 1) == 2
        assert cache.close()


@pytest.mark.parametrize("call", ["get", "put"])
def test_an_interrupted_call_lets_go_of_the_callers_buffers_and_of_its_leases(tmp_path: Path, call: str) -> None:
    cache, disk = faulty(tmp_path)
    plane, wait_for_news = cache._plane, cache._plane.wait_for_news
    disk.stall()

    def interrupt(deadline_s: float) -> bool:
        raise KeyboardInterrupt

    plane.wait_for_news = interrupt  # type: ignore[method-assign]
    plane._store_copy.acquire()
    buffer = bytearray(PART)
    with pytest.raises(KeyboardInterrupt):
        # The storer stands at its lock, the loader at its disk: the calls wait for them, and are interrupted.
        threading.Timer(0.05, plane._store_copy.release).start()
        cache.get(keys(0), [buffer]) if call == "get" else cache.put(keys(10), [payload(10)])
    plane.wait_for_news = wait_for_news  # type: ignore[method-assign]
    disk.resume()
    assert plane.wait(set(range(100)), 20.0)
    assert cache.flush(20)
    assert bytes(buffer) == bytes(PART)
    assert cache.store.gauges()["loads_in_flight"] == 0
    assert get(cache, 10) == 0
    cache.store.check()
    assert put(cache, 10, 11) == 2
    assert get(cache, 0) == 1
    cache.close()


def test_a_closed_cache_says_so() -> None:
    cache = open_cache(None)
    assert cache.close() and cache.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        cache.lookup(keys(0))


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.integers(0, 25), min_size=1, max_size=4, unique=True)),
        st.tuples(st.just("get"), st.lists(st.integers(0, 25), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("flush"), st.just([])),
        st.tuples(st.just("reset"), st.just([])),
        st.tuples(st.just("reopen"), st.just([])),
    ),
    max_size=25,
)


@pytest.mark.parametrize("opened", [functools.partial(open_cache, disk_bytes=12 * SLOT), open_shared_cache])
@given(steps=_STEPS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_order_what_comes_back_is_right(
    tmp_path: Path, opened: Callable[..., Cache], steps: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path / f"d{time.monotonic_ns()}"
    cache = opened(path, slots=3)
    written: set[int] = set()
    for step, numbers in steps:
        if step == "put":
            put(cache, *numbers)
            written |= set(numbers)
        elif step == "get":
            assert set(numbers[: get(cache, *numbers)]) <= written
        elif step == "flush":
            assert cache.flush(20)
        elif step == "reset":
            cache.reset()
            written.clear()
        else:
            assert cache.close()
            cache = opened(path, slots=3)
        cache.store.check()
    assert cache.close()


_STORM = """
import sys
sys.path.insert(0, {src!r})
from tests.engine.test_embedded import open_cache, put
from pathlib import Path
cache = open_cache(Path({path!r}), disk_bytes=4096 * 400)
for number in range(300):
    put(cache, number)
    if number % 10 == 9:
        cache.flush(20)
        print(number, flush=True)
"""


@pytest.mark.slow
def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for round_, delay_s in enumerate((0.0, 0.01, 0.05, 0.1, 0.2)):
        path = tmp_path / str(round_)
        code = _STORM.format(src=str(root), path=str(path))
        environ = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
        assert child.stdout is not None
        acknowledged = int(child.stdout.readline())
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        acknowledged = int(rest[-1]) if rest else acknowledged
        with open_cache(path, disk_bytes=4096 * 400) as cache:
            numbers = list(range(acknowledged + 1))
            assert get(cache, *numbers) == len(numbers)


def test_calls_of_get_are_traced_without_the_keys_themselves(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with open_cache(None, trace_path=str(path)) as cache:
        put(cache, 1, 2)
        assert get(cache, 1, 2, 3) == 2
        assert get(cache, 1, 2) == 2
    first, second = Trace(path)
    assert (first.input_tokens, second.block_ids) == (3, first.block_ids[:2])
    assert int.from_bytes(keys(1)[0], "little") not in first.block_ids


def test_a_trace_that_cannot_be_written_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_path"):
        open_cache(tmp_path / "d", trace_path=str(tmp_path / "none" / "trace.jsonl"))
    with open_cache(tmp_path / "d") as cache:
        assert put(cache, 1) == 1
