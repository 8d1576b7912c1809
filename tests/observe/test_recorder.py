"""The recorder: what it keeps, when a run is valid, and its files."""

import gc
import io
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.observe import recorder as rec


class Clock:
    """Each look is one nanosecond later."""

    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


def a_run() -> rec.Recording:
    """encode -> store -> (evict) within one whole, then a moment."""
    recorder = rec.Recorder(clock_ns=Clock())
    with recorder.span("request", track="scheduler") as whole:
        encode = recorder.begin("encode", parent=whole.id, raw_bytes=4096, track="worker")
        encode.stored_bytes = 1200
        recorder.end(encode, codec="zstd")
        with recorder.span("store", parent=whole.id, after=[encode.id], moved_bytes=1200, track="worker") as store:
            recorder.event("evict", parent=store.id, stored_bytes=99, track="worker")
    recorder.event("done", after=[whole.id], track="scheduler")
    return recorder.finish()


def test_a_run_keeps_what_was_recorded() -> None:
    run = a_run()
    by_name = {event.name: event for event in run.events}
    encode, store, evict = by_name["encode"], by_name["store"], by_name["evict"]
    assert [event.name for event in run.events] == ["encode", "evict", "store", "request", "done"]
    assert (encode.raw_bytes, encode.stored_bytes, encode.attrs) == (4096, 1200, {"codec": "zstd"})
    assert store.after == (encode.id,)
    assert evict.parent == store.id
    assert evict.start_ns == evict.end_ns
    assert encode.end_ns < store.start_ns <= evict.start_ns <= store.end_ns
    assert rec.problems_of(run) == []
    assert (run.dropped, run.open_spans, run.finished) == (0, 0, True)


def test_the_track_is_the_thread_unless_said_otherwise() -> None:
    recorder = rec.Recorder()
    thread = threading.Thread(target=lambda: recorder.event("there"), name="ring-0")
    thread.start()
    thread.join()
    assert recorder.snapshot().events[0].track == "ring-0"


def test_a_span_notes_what_was_raised_in_it() -> None:
    recorder = rec.Recorder()
    with pytest.raises(KeyError), recorder.span("load"):
        raise KeyError
    assert recorder.finish().events[0].attrs == {"error": "KeyError"}


def break_by(change: Callable[[list[rec.Event]], None]) -> rec.Recording:
    run = a_run()
    events = list(run.events)
    change(events)
    return replace(run, events=tuple(events))


def setting(name: str, **changes: object) -> Callable[[list[rec.Event]], None]:
    def change(events: list[rec.Event]) -> None:
        at = next(number for number, event in enumerate(events) if event.name == name)
        events[at] = msgspec.structs.replace(events[at], **changes)

    return change


INVALID = {
    "not finished": (replace(a_run(), finished=False), "not end cleanly"),
    "open span": (replace(a_run(), open_spans=1), "never ended"),
    "dropped": (replace(a_run(), dropped=2), "2 events were dropped"),
    "id twice": (break_by(lambda events: events.append(events[0])), "used twice"),
    "ends before it begins": (break_by(setting("evict", end_ns=0)), "ended before it began"),
    "dependency missing": (break_by(setting("store", after=(99,))), "depends on 99"),
    "dependency later": (break_by(setting("encode", end_ns=1005)), "before what it depends on"),
    "parent missing": (break_by(setting("evict", parent=98)), "is a part of 98"),
    "outside its parent": (break_by(setting("evict", start_ns=0)), "within its parent"),
}


@pytest.mark.parametrize("name", INVALID)
def test_each_way_a_run_is_no_evidence_is_said(name: str) -> None:
    run, problem = INVALID[name]
    assert any(problem in line for line in rec.problems_of(run)), rec.problems_of(run)


def test_a_cycle_at_one_instant_is_seen() -> None:
    one = rec.Event(1, "one", 5, 5, "t", after=(2,))
    two = rec.Event(2, "two", 5, 5, "t", after=(1,))
    assert rec.problems_of(rec.Recording((one, two), 0, 0, True)) == ["parents and dependencies form a cycle"]
    assert rec.problems_of(rec.Recording((one, msgspec.structs.replace(two, after=())), 0, 0, True)) == []


def test_beyond_the_bound_events_are_dropped_and_counted() -> None:
    recorder = rec.Recorder(3)
    for number in range(10):
        recorder.event(f"event {number}")
    with recorder.span("late"):
        pass
    assert recorder.dropped == 8
    run = recorder.finish()
    assert [event.name for event in run.events] == ["event 0", "event 1", "event 2"]
    assert any("dropped" in line for line in rec.problems_of(run))


def test_misuse_is_refused() -> None:
    recorder = rec.Recorder()
    span = recorder.begin("span")
    recorder.end(span)
    with pytest.raises(rec.RecordingError, match="ended before"):
        recorder.end(span)
    open_span = recorder.begin("open")
    run = recorder.finish()
    assert run.open_spans == 1
    assert not recorder.on
    for late in (lambda: recorder.event("late"), lambda: recorder.begin("late"), lambda: recorder.end(open_span)):
        with pytest.raises(rec.RecordingError, match="finished"):
            late()
    with pytest.raises(rec.RecordingError, match="events_max"):
        rec.Recorder(-1)


def test_off_is_one_attribute() -> None:
    assert rec.OFF.on is False
    assert rec.Recorder().on is True


def test_threads_lose_nothing() -> None:
    recorder = rec.Recorder()

    def work() -> None:
        for _ in range(500):
            with recorder.span("step") as span:
                recorder.event("inside", parent=span.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = recorder.finish()
    assert len(run.events) == 4000
    assert rec.problems_of(run) == []


def written(run: rec.Recording) -> list[str]:
    out = io.StringIO()
    rec.write_jsonl(run, out)
    return out.getvalue().splitlines(keepends=True)


def test_jsonl_round_trip() -> None:
    assert rec.read_jsonl(written(a_run())) == a_run()


def test_a_run_cut_short_is_read_and_is_not_valid() -> None:
    lines = written(a_run())
    for cut in (lines[:-1], [*lines[:3], lines[3][:20]], lines[:1]):
        run = rec.read_jsonl(cut)
        assert not run.finished
        assert rec.problems_of(run)
    missing = rec.read_jsonl([lines[0], *lines[2:]])
    assert not missing.finished, "the end line's count tells that a line is gone"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "no head line"),
        (["not json\n"], "line 1"),
        (['{"type":"event"}\n'], "none belongs"),
        (['{"type":"run","version":99}\n'], "version 99"),
        (['{"type":"run","version":1}\n', '{"type":"event","after":[],"colour":1}\n'], "line 2"),
        (['{"type":"run","version":1}\n', "[]\n"], "line 2"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[str], named: str) -> None:
    with pytest.raises(rec.RecordingError, match=named):
        rec.read_jsonl(lines)


def test_the_trace_has_spans_on_their_tracks_and_arrows_for_dependencies(tmp_path: Path) -> None:
    run = a_run()
    path = tmp_path / "trace.json"
    rec.write_chrome_trace(run, path, process="test")
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {("process_name", "test"), ("thread_name", "worker"), ("thread_name", "scheduler")}
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(spans) == {"request", "encode", "store"}
    assert spans["encode"]["args"] | {"id": 0} == {
        "id": 0, "parent": 1, "after": [], "raw_bytes": 4096, "stored_bytes": 1200, "moved_bytes": 0, "codec": "zstd",
    }  # fmt: skip
    assert spans["request"]["ts"] == 0
    assert spans["encode"]["dur"] == pytest.approx(0.001)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["evict", "done"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == 2
    assert all(type(arrow) is int for arrow in starts), (
        "Perfetto drops arrows whose ids are other text than hex numbers"
    )
    assert all(event["tid"] != event["pid"] for event in events if "tid" in event), (
        "a track would be shown as the main thread"
    )
    for arrow, start in starts.items():
        assert start["ts"] <= ends[arrow]["ts"]
    store = spans["store"]
    assert any(end["ts"] == store["ts"] and end["tid"] == store["tid"] for end in ends.values())


def test_an_empty_run_is_a_trace_too() -> None:
    assert rec.chrome_trace(rec.Recorder().finish())["otherData"]["finished"] is True


def test_stages_are_summed_up() -> None:
    events = [
        rec.Event(number, "store", 0, number * 1000, "t", raw_bytes=10, stored_bytes=5, moved_bytes=3)
        for number in range(1, 101)
    ]
    stages = rec.stages_of(rec.Recording((*events, rec.Event(101, "evict", 7, 7, "t")), 0, 0, True))
    assert list(stages) == ["store", "evict"]
    assert stages["store"] == rec.Stage(100, pytest.approx(5050e-6), 50, 99, 1000, 500, 300)
    assert stages["evict"] == rec.Stage(1, 0, 0, 0, 0, 0, 0)


def one_line(**changes: Any) -> list[str]:
    """A valid run of one event, as lines, with `changes` to the event."""
    run = rec.Recording((rec.Event(1, "encode", 1, 2, "t"),), 0, 0, True)
    head, event, end = written(run)
    return [head, json.dumps(json.loads(event) | changes) + "\n", end]


def test_the_line_to_be_changed_is_valid() -> None:
    assert rec.problems_of(rec.read_jsonl(one_line())) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "1"},
        {"id": [1]},
        {"id": 1.5},
        {"name": None},
        {"name": 5},
        {"start_ns": "1"},
        {"start_ns": None},
        {"start_ns": float("nan")},
        {"end_ns": float("inf")},
        {"track": ["t"]},
        {"parent": "1"},
        {"after": "1"},
        {"after": [[1]]},
        {"after": None},
        {"raw_bytes": None},
        {"stored_bytes": "5"},
        {"moved_bytes": True},
        {"attrs": 5},
        {"attrs": {"codec": [1]}},
        {"colour": 1},
    ],
    ids=str,
)
def test_an_event_of_other_types_is_no_recording(changes: dict[str, Any]) -> None:
    with pytest.raises(rec.RecordingError, match="line 2"):
        rec.read_jsonl(one_line(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"events": True},
        {"events": "1"},
        {"dropped": None},
        {"dropped": "0"},
        {"open_spans": None},
        {"finished": "no"},
        {"finished": 1},
    ],
    ids=str,
)
def test_an_end_line_of_other_types_is_no_recording(changes: dict[str, Any]) -> None:
    *lines, end = one_line()
    with pytest.raises(rec.RecordingError, match="line 3"):
        rec.read_jsonl([*lines, json.dumps(json.loads(end) | changes) + "\n"])


@pytest.mark.parametrize("missing", ["events", "dropped", "open_spans", "finished"])
def test_an_end_line_that_does_not_say_all_is_no_recording(missing: str) -> None:
    *lines, end = one_line()
    said = json.loads(end)
    del said[missing]
    with pytest.raises(rec.RecordingError, match="line 3"):
        rec.read_jsonl([*lines, json.dumps(said) + "\n"])


def test_lines_nested_without_end_are_no_recording() -> None:
    with pytest.raises(rec.RecordingError, match="line 1"):
        rec.read_jsonl(["[" * 100_000 + "\n"])


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from(["one", "two"])), max_size=25)


@given(spans)
def test_spans_that_overlap_on_a_track_get_lanes_in_which_they_nest(drawn: list[tuple[int, int, str]]) -> None:
    """Perfetto drops a complete event that overlaps another of its thread without lying within it; coroutines of one thread do that."""
    events = tuple(
        rec.Event(number, f"span {number}", 1000 * start, 1000 * (start + length), track)
        for number, (start, length, track) in enumerate(drawn, 1)
    )
    trace = rec.chrome_trace(rec.Recording(events, 0, 0, True))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    shown = [event for event in trace if event["ph"] == "X"]
    assert {event["args"]["id"] for event in shown} == {event.id for event in events if event.end_ns > event.start_ns}
    by_id = {event.id: event for event in events}
    for event in shown:
        assert names[event["tid"]].startswith(by_id[event["args"]["id"]].track)
    for one in shown:
        for other in shown:
            if one is not other and one["tid"] == other["tid"] and one["ts"] <= other["ts"] < one["ts"] + one["dur"]:
                inner = other["ts"] + other["dur"] <= one["ts"] + one["dur"]
                assert inner or (one["ts"] == other["ts"] and one["dur"] <= other["dur"])


def test_spans_that_nest_stay_on_one_track() -> None:
    recorder = rec.Recorder(clock_ns=Clock())
    with recorder.span("whole", track="t"), recorder.span("part", track="t"), recorder.span("part of it", track="t"):
        pass
    with recorder.span("next", track="t"):
        pass
    trace = rec.chrome_trace(recorder.finish())["traceEvents"]
    assert [event["args"]["name"] for event in trace if event["name"] == "thread_name"] == ["t"]


def test_a_finalizer_may_end_its_span_while_the_recorder_is_at_work() -> None:
    """The collector may run while the recorder makes its answer, and with it an abandoned generator that holds a span."""

    class CollectedMeanwhile(rec.Recorder):
        def _snapshot(self) -> rec.Recording:
            gc.collect()
            return super()._snapshot()

    recorder = CollectedMeanwhile()

    def step(cycle: list[object]) -> Iterator[None]:
        with recorder.span("step"):
            yield
        cycle.clear()

    def abandon() -> None:
        cycle: list[object] = []
        steps = step(cycle)
        cycle.append(steps)
        next(steps)

    runs: list[rec.Recording] = []

    def work() -> None:
        gc.disable()
        try:
            abandon()
            runs.append(recorder.snapshot())
        finally:
            gc.enable()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert [(len(run.events), run.open_spans) for run in runs] == [(1, 0)]
