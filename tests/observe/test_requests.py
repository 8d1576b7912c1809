"""The request trace: order, bounds, and what a file that cannot take it comes to."""

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.observe import requests
from kvtier.observe.requests import RequestTrace, block_id
from kvtier.simulate.trace import Trace, TraceRequest

BIG = 1 << 20


def keys(number: int, count: int = 2) -> list[bytes]:
    return [bytes([number, place]) * 16 for place in range(count)]


def open_trace(path: Path, bytes_max: int = BIG) -> RequestTrace:
    return RequestTrace(path, bytes_max, 16, 100.0)


def read(path: Path) -> list[TraceRequest]:
    return list(Trace(path))


def test_a_line_holds_arrival_hashes_and_lengths(tmp_path: Path) -> None:
    trace = open_trace(tmp_path / "t.jsonl")
    trace.arrived("a", keys(1), 40, 101.5)
    trace.answered("a", 7)
    assert trace.close(10)
    (request,) = read(tmp_path / "t.jsonl")
    assert (request.time_s, request.input_tokens, request.output_tokens) == (1.5, 40, 7)
    assert request.block_ids == [block_id(key) for key in keys(1)]
    assert Trace(tmp_path / "t.jsonl").tokens_per_block == 16
    assert trace.counters == {
        "trace_requests": 1,
        "trace_unanswered_requests": 0,
        "trace_dropped_requests": 0,
        "trace_failed_requests": 0,
    }


def test_lines_are_in_the_order_of_arrival(tmp_path: Path) -> None:
    trace = open_trace(tmp_path / "t.jsonl")
    for number in range(20):
        trace.arrived(str(number), keys(number), 40, 100.0 + number)
    for number in (*range(19, 4, -1), 0, 1, 2, 4):
        trace.answered(str(number), number)
    trace.answered("never seen", 3)
    assert trace.close(10)
    assert [request.output_tokens for request in read(tmp_path / "t.jsonl")] == [0, 1, 2, *range(4, 20)]


def test_requests_of_one_name_are_each_written(tmp_path: Path, monkeypatch: Any) -> None:
    """A client may name two requests alike, one after the other or at once: the writer goes on, and counts what it holds rightly."""
    monkeypatch.setattr(requests, "HELD_BYTES_MAX", 3000)
    trace = open_trace(tmp_path / "t.jsonl")
    trace.arrived("first", keys(0), 40, 100.0)
    for number in range(1, 21):
        trace.arrived("twice", keys(number), 40, 100.0 + number)
        if number % 3:
            trace.answered("twice", number)
    trace.answered("first", 99)
    trace.answered("twice", 7)
    trace.arrived("last", keys(30), 40, 130.0)
    trace.answered("last", 5)
    assert trace.close(10)
    lines = read(tmp_path / "t.jsonl")
    assert [line.time_s for line in lines] == [*map(float, range(21)), 30.0]
    assert [line.output_tokens for line in lines[1:21]] == [number if number % 3 else 0 for number in range(1, 21)]
    assert trace.counters["trace_requests"] == 22
    assert (trace._held_bytes, len(trace._held), len(trace._open)) == (0, 0, 0)


def test_what_waits_for_one_that_is_never_answered_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests, "HELD_BYTES_MAX", 10 * (requests._REQUEST_BYTES + 2 * requests.ID_BYTES))
    trace = open_trace(tmp_path / "t.jsonl")
    for number in range(30):
        trace.arrived(str(number), keys(number), 40, 100.0 + number)
        if number:
            trace.answered(str(number), number)
    trace.answered("0", 1)
    assert trace.close(10)
    assert [request.output_tokens for request in read(tmp_path / "t.jsonl")] == list(range(30))
    assert trace.counters["trace_unanswered_requests"] == 1


def test_what_finds_the_queue_full_is_dropped_and_counted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests.RequestTrace, "_run", lambda self: None)
    trace = open_trace(tmp_path / "t.jsonl")
    for number in range(requests.QUEUE_MAX + 5):
        trace.arrived(str(number), keys(1), 40, 100.0)
    trace.answered(str(requests.QUEUE_MAX + 1), 1)
    assert trace.counters["trace_dropped_requests"] == 5
    assert trace._queue.qsize() == requests.QUEUE_MAX, "an answer to what was dropped takes no room"


def test_the_file_is_rotated_at_half_of_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace = open_trace(path, 4096)
    for number in range(100):
        trace.arrived(str(number), keys(number), 40, 100.0 + number)
        trace.answered(str(number), number)
    assert trace.close(10)
    old, new = read(Path(f"{path}.1")), read(path)
    assert [request.output_tokens for request in (*old, *new)] == list(range(100 - len(old) - len(new), 100))
    assert path.stat().st_size <= 2048 and Path(f"{path}.1").stat().st_size <= 2048
    assert sorted(tmp_path.iterdir()) == [path, Path(f"{path}.1")]
    assert trace.counters["trace_requests"] == 100


def test_a_line_beyond_the_bound_is_left_out(tmp_path: Path) -> None:
    trace = open_trace(tmp_path / "t.jsonl", 4096)
    trace.arrived("a", [os.urandom(32) for _ in range(500)], 8000, 100.0)
    trace.answered("a", 1)
    trace.arrived("b", keys(1), 40, 101.0)
    trace.answered("b", 1)
    assert trace.close(10)
    assert len(read(tmp_path / "t.jsonl")) == 1
    assert trace.counters["trace_failed_requests"] == 1


def test_the_trace_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for output_tokens in (1, 2):
        trace = open_trace(path)
        trace.arrived("a", keys(1), 40, 100.0)
        trace.answered("a", output_tokens)
        assert trace.close(10)
    assert [request.output_tokens for request in (*read(Path(f"{path}.1")), *read(path))] == [1, 2]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace_path is .*No such file or directory.*directory that exists"):
        open_trace(tmp_path / "none" / "t.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        open_trace(tmp_path)


def test_two_engines_do_not_share_a_file(tmp_path: Path) -> None:
    first = open_trace(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="another engine writes to it"):
        open_trace(tmp_path / "t.jsonl")
    assert first.close(10)
    assert open_trace(tmp_path / "t.jsonl").close(10)


def test_a_full_disk_is_counted_and_said_once_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    real, fault = os.write, {"on": False}

    def write(file: int, data: bytes) -> int:
        if fault["on"]:
            real(file, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(requests.os, "write", write)
    trace = open_trace(tmp_path / "t.jsonl")

    def settle(name: str, count: int) -> None:
        end_s = time.monotonic() + 10
        while trace.counters[name] < count and time.monotonic() < end_s:
            os.sched_yield()
        assert trace.counters[name] == count

    with caplog.at_level(logging.WARNING, logger="kvtier"):
        for number in range(12):
            fault["on"] = 3 <= number < 8
            trace.arrived(str(number), keys(number), 40, 100.0 + number)
            trace.answered(str(number), number)
            settle("trace_failed_requests", min(max(number - 2, 0), 5))
            settle("trace_requests", number + 1 - trace.counters["trace_failed_requests"])
    assert trace.close(10)
    assert [request.output_tokens for request in read(tmp_path / "t.jsonl")] == [0, 1, 2, 8, 9, 10, 11]
    assert [record.message for record in caplog.records if "No space left" in record.message] != []
    assert len(caplog.records) == 1


def test_a_file_taken_away_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace = open_trace(path, 4096)
    path.unlink()
    for number in range(100):
        trace.arrived(str(number), keys(number), 40, 100.0 + number)
        trace.answered(str(number), number)
    assert trace.close(10)
    assert read(path)[-1].output_tokens == 99
