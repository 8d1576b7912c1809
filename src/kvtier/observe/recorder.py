"""The event recorder: what happened, when, after what, and how many bytes it took.

A *span* is work with a beginning and an end; an *event* is a moment. Both carry monotonic time in nanoseconds, the thread or track
they ran on, their parent (the span they are a part of), what they depend on (what had to end before they could begin), and three counts of
bytes: raw (before encoding), stored (with the whole envelope), moved (over a medium or a bus). Absolute times mean something only within one run.

A run is evidence only if it is *valid* (`problems_of` finds none): it was finished, every span that began was ended, nothing was dropped,
ids are unique, and parents and dependencies exist and form a DAG in time order: what is depended on ended before its dependant began, a child
lies within its parent.

**Cost.** Code that records tests one attribute first, and does nothing more where recording is off:

    if recorder.on:
        span = recorder.begin("encode", raw_bytes=len(raw))

**Bound.** At most `events_max` are kept; later ones are counted as dropped, so that the beginning of a run stays whole and the count says that
the run is not.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvtier.errors import KVTierError

FORMAT_VERSION: Final = 1
EVENTS_MAX_DEFAULT: Final = 1 << 16

Scalar = str | int | float | bool


class RecordingError(KVTierError):
    """A recording was used wrongly or cannot be read."""


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A span that ended, or an event, whose `start_ns` and `end_ns` are equal.

    Attributes:
        id: its number, unique in the run.
        name: the stage: encode, store, retrieve, decode, ...
        start_ns: monotonic time at its beginning.
        end_ns: monotonic time at its end.
        track: what it ran on: a thread's name unless the caller said otherwise.
        parent: id of the span that it is a part of.
        after: ids of what had to end before it began.
        raw_bytes: bytes before encoding.
        stored_bytes: bytes kept, the whole envelope counted.
        moved_bytes: bytes that crossed a medium or a bus.
        attrs: whatever else its reader should know.
    """

    id: int
    name: str
    start_ns: int
    end_ns: int
    track: str
    parent: int | None = None
    after: tuple[int, ...] = ()
    raw_bytes: int = 0
    stored_bytes: int = 0
    moved_bytes: int = 0
    attrs: dict[str, Scalar] = {}


class Span(msgspec.Struct, eq=False):
    """A span under way. Its byte counts and `attrs` may be set until it is ended."""

    id: int
    name: str
    start_ns: int
    track: str
    parent: int | None
    after: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    moved_bytes: int
    attrs: dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Recording:
    """A run as it was recorded.

    Attributes:
        events: in the order in which they ended.
        dropped: how many more there were.
        open_spans: spans that began and never ended.
        finished: whether the run said that it was over.
    """

    events: tuple[Event, ...]
    dropped: int
    open_spans: int
    finished: bool


class Recorder:
    """Collects spans and events of one run. Thread-safe; a span may end on another thread than it began on.

    Args:
        events_max: how many are kept.
        clock_ns: nanoseconds that never run backwards.
    """

    def __init__(
        self, events_max: int = EVENTS_MAX_DEFAULT, clock_ns: Callable[[], int] = time.monotonic_ns, *, on: bool = True
    ) -> None:
        if events_max < 0:
            raise RecordingError(f"events_max is {events_max}: use 0 or more")
        self.on = on
        self._events_max = events_max
        self._clock_ns = clock_ns
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # a finalizer of this thread may end a span in the middle of another call
        self._events: list[Event] = []
        self._open: set[int] = set()
        self._dropped = 0
        self._finished = False

    def begin(
        self,
        name: str,
        *,
        parent: int | None = None,
        after: Sequence[int] = (),
        track: str | None = None,
        raw_bytes: int = 0,
        stored_bytes: int = 0,
        moved_bytes: int = 0,
        **attrs: Scalar,
    ) -> Span:
        """Begin a span now."""
        span_id = next(self._ids)
        with self._lock:
            self._check_running(name)
            self._open.add(span_id)
        if track is None:
            track = threading.current_thread().name
        return Span(
            span_id, name, self._clock_ns(), track, parent, tuple(after), raw_bytes, stored_bytes, moved_bytes, attrs
        )

    def end(self, span: Span, **attrs: Scalar) -> None:
        """End a span now. Raises RecordingError where it was ended before."""
        end_ns = self._clock_ns()
        if attrs:
            span.attrs.update(attrs)
        event = Event(
            span.id,
            span.name,
            span.start_ns,
            end_ns,
            span.track,
            span.parent,
            span.after,
            span.raw_bytes,
            span.stored_bytes,
            span.moved_bytes,
            span.attrs,
        )
        with self._lock:
            self._check_running(span.name)
            if span.id not in self._open:
                raise RecordingError(f"span {span.id} ({span.name!r}) was ended before, or belongs to another recorder")
            self._open.remove(span.id)
            self._keep(event)

    @contextmanager
    def span(self, name: str, **begin: Any) -> Iterator[Span]:
        """A span around a block; the arguments are those of `begin`. A raised exception is noted as its `error`."""
        span = self.begin(name, **begin)
        try:
            yield span
        except BaseException as error:
            span.attrs["error"] = type(error).__name__
            raise
        finally:
            self.end(span)

    def event(
        self,
        name: str,
        *,
        parent: int | None = None,
        after: Sequence[int] = (),
        track: str | None = None,
        raw_bytes: int = 0,
        stored_bytes: int = 0,
        moved_bytes: int = 0,
        **attrs: Scalar,
    ) -> int:
        """Note a moment; its id."""
        now_ns = self._clock_ns()
        if track is None:
            track = threading.current_thread().name
        event = Event(
            next(self._ids),
            name,
            now_ns,
            now_ns,
            track,
            parent,
            tuple(after),
            raw_bytes,
            stored_bytes,
            moved_bytes,
            attrs,
        )
        with self._lock:
            self._check_running(name)
            self._keep(event)
        return event.id

    def _check_running(self, name: str) -> None:
        if self._finished:
            raise RecordingError(f"{name!r} came after the run was finished: use a recorder for each run")

    def _keep(self, event: Event) -> None:
        if len(self._events) < self._events_max:
            self._events.append(event)
        else:
            self._dropped += 1

    @property
    def dropped(self) -> int:
        """How many spans and events were not kept."""
        return self._dropped

    def finish(self) -> Recording:
        """Say that the run is over; what was recorded."""
        with self._lock:
            self._finished = True
            self.on = False
            return self._snapshot()

    def snapshot(self) -> Recording:
        """What was recorded so far; not a valid run until it is finished."""
        with self._lock:
            return self._snapshot()

    def _snapshot(self) -> Recording:
        return Recording(tuple(self._events), self._dropped, len(self._open), self._finished)


OFF: Final = Recorder(0, on=False)
"""A recorder that is off: the default of code that can record."""


# -- validity ------------------------------------------------------------------------------------------------------------


def problems_of(run: Recording) -> list[str]:
    """Why a run is no evidence, one line each; empty for a valid one."""
    problems = []
    if not run.finished:
        problems.append("the run did not end cleanly: it was never finished")
    if run.open_spans:
        problems.append(f"{run.open_spans} spans began and never ended")
    if run.dropped:
        problems.append(f"{run.dropped} events were dropped: raise events_max")
    by_id = {event.id: event for event in run.events}
    if len(by_id) != len(run.events):
        problems.append(f"{len(run.events) - len(by_id)} ids were used twice")
    for event in run.events:
        problems += _order_problems(event, by_id)
    if not _is_acyclic(by_id):
        problems.append("parents and dependencies form a cycle")
    return problems


def _order_problems(event: Event, by_id: Mapping[int, Event]) -> Iterator[str]:
    what = f"{event.name!r} ({event.id})"
    if event.end_ns < event.start_ns:
        yield f"{what} ended before it began"
    for other_id in event.after:
        other = by_id.get(other_id)
        if other is None:
            yield f"{what} depends on {other_id}, which is not in the run"
        elif other.end_ns > event.start_ns:
            yield f"{what} began {other.end_ns - event.start_ns} ns before what it depends on, {other.name!r} ({other_id}), ended"
    if event.parent is not None:
        parent = by_id.get(event.parent)
        if parent is None:
            yield f"{what} is a part of {event.parent}, which is not in the run"
        elif event.start_ns < parent.start_ns or event.end_ns > parent.end_ns:
            yield f"{what} does not lie within its parent {parent.name!r} ({parent.id})"


def _is_acyclic(by_id: Mapping[int, Event]) -> bool:
    """Whether parents and dependencies can be ordered. Equal times could hide a cycle from the checks of time."""
    waiting: dict[int, int] = dict.fromkeys(by_id, 0)
    followers: dict[int, list[int]] = {}
    for event in by_id.values():
        before = {other for other in (*event.after, event.parent) if other is not None and other in by_id}
        waiting[event.id] = len(before)
        for other in before:
            followers.setdefault(other, []).append(event.id)
    ready = [event_id for event_id, count in waiting.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for follower in followers.get(ready.pop(), ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return done == len(by_id)


@dataclass(frozen=True, slots=True)
class Stage:
    """All spans and events of one name. Times of stages that ran at once overlap: they do not add up to the run's."""

    count: int
    total_s: float
    p50_us: float
    p99_us: float
    raw_bytes: int
    stored_bytes: int
    moved_bytes: int


def stages_of(run: Recording) -> dict[str, Stage]:
    """What each stage took, in the order in which the stages first ended."""
    by_name: dict[str, list[Event]] = {}
    for event in run.events:
        by_name.setdefault(event.name, []).append(event)
    return {name: _stage(events) for name, events in by_name.items()}


def _stage(events: Sequence[Event]) -> Stage:
    times_ns = sorted(event.end_ns - event.start_ns for event in events)
    return Stage(
        len(events),
        sum(times_ns) / 1e9,
        times_ns[(len(times_ns) - 1) // 2] / 1e3,
        times_ns[-(-99 * len(times_ns) // 100) - 1] / 1e3,
        sum(event.raw_bytes for event in events),
        sum(event.stored_bytes for event in events),
        sum(event.moved_bytes for event in events),
    )


# -- files ---------------------------------------------------------------------------------------------------------------


def event_json(event: Event) -> dict[str, Any]:
    """An event as it stands in JSON: `attrs` beside the fields, times as they are."""
    line = msgspec.structs.asdict(event)
    attrs = line.pop("attrs")
    return line | {"attrs": attrs} if attrs else line


def write_jsonl(run: Recording, out: IO[str]) -> None:
    """One JSON object a line: a head, the events, and an end line that says whether the run is whole."""
    lines: Iterable[dict[str, Any]] = itertools.chain(
        [{"type": "run", "version": FORMAT_VERSION, "clock": "monotonic_ns"}],
        ({"type": "event"} | event_json(event) for event in run.events),
        [
            {
                "type": "end",
                "events": len(run.events),
                "dropped": run.dropped,
                "open_spans": run.open_spans,
                "finished": run.finished,
            }
        ],
    )
    for line in lines:
        out.write(json.dumps(line, separators=(",", ":")) + "\n")


class _End(msgspec.Struct, frozen=True):
    """The last line of a recording, all of which it must say."""

    events: int
    dropped: int
    open_spans: int
    finished: bool


def read_jsonl(lines: Iterable[str]) -> Recording:
    """The run that `write_jsonl` wrote. Without its end line it is read as one that was not finished.

    Raises RecordingError for lines that are no recording.
    """
    events: list[Event] = []
    end: _End | None = None
    started = False
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            kind = line.pop("type")
            if kind == "run":
                if line["version"] != FORMAT_VERSION:
                    raise RecordingError(
                        f"the recording is of version {line['version']}, this code reads {FORMAT_VERSION}"
                    )
                started = True
            elif kind == "event" and started and end is None:
                events.append(msgspec.convert(line, Event))
            elif kind == "end" and started and end is None:
                end = msgspec.convert(line, _End)
            else:
                raise RecordingError(f"line {number} of the recording is a {kind!r} where none belongs")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if text.endswith("\n"):
                raise RecordingError(f"line {number} of the recording is not readable: {error}") from error
            break  # a run that was killed leaves a torn last line
    if not started:
        raise RecordingError("the recording has no head line: it is empty or something else")
    if end is None:
        return Recording(tuple(events), 0, 0, finished=False)
    return Recording(tuple(events), end.dropped, end.open_spans, end.finished and end.events == len(events))


# A track whose number is its process's is shown as the main thread: none of ours is.
_PROCESS: Final = 1


def _lane_name(track: str, lane: int) -> str:
    return f"{track} ({lane + 1} at once)" if lane else track


def _fits(ends_ns: list[int], event: Event) -> bool:
    """Whether `event` lies within the innermost of a lane's open spans, once those that ended are forgotten."""
    while ends_ns and ends_ns[-1] <= event.start_ns:
        ends_ns.pop()
    return not ends_ns or event.end_ns <= ends_ns[-1]


def _lanes(events: Iterable[Event]) -> dict[int, int]:
    """A lane of its track for each event, so that spans of a lane lie within one another or apart: the format drops those that overlap otherwise."""
    open_ends_ns: dict[str, list[list[int]]] = {}
    lane_of: dict[int, int] = {}
    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        lanes = open_ends_ns.setdefault(event.track, [[]])
        lane = 0
        while lane < len(lanes) and not _fits(lanes[lane], event):
            lane += 1
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(event.end_ns)
        lane_of[event.id] = lane
    return lane_of


def chrome_trace(run: Recording, process: str = "kvtier") -> dict[str, Any]:
    """The run in the Trace Event format, which Perfetto and Chrome open: spans on their tracks, arrows for dependencies."""
    lane_of = _lanes(run.events)
    order = {track: number for number, track in enumerate(dict.fromkeys(event.track for event in run.events))}
    places = sorted({(order[event.track], event.track, lane_of[event.id]) for event in run.events})
    tracks = {(track, lane): number for number, (_, track, lane) in enumerate(places, _PROCESS + 1)}
    zero_ns = min((event.start_ns for event in run.events), default=0)
    out: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": process}}]
    out += [
        {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": number, "args": {"name": _lane_name(track, lane)}}
        for (track, lane), number in tracks.items()
    ]
    by_id = {event.id: event for event in run.events}
    arrow_ids = itertools.count(1)
    for event in run.events:
        tid = tracks[event.track, lane_of[event.id]]
        place = {"pid": _PROCESS, "tid": tid, "cat": "kvtier", "ts": (event.start_ns - zero_ns) / 1000}
        args = {
            key: value
            for key, value in event_json(event).items()
            if key in ("id", "parent", "after", "raw_bytes", "stored_bytes", "moved_bytes")
        }
        args |= event.attrs
        if event.end_ns > event.start_ns:
            out.append(
                {"ph": "X", "name": event.name, "dur": (event.end_ns - event.start_ns) / 1000, "args": args} | place
            )
        else:
            out.append({"ph": "i", "s": "t", "name": event.name, "args": args} | place)
        for other_id in event.after:
            if (other := by_id.get(other_id)) is not None:
                arrow = {"name": "after", "cat": "kvtier", "id": next(arrow_ids), "pid": _PROCESS}
                # The arrow leaves from inside the span: the format binds it to the slice that encloses its time.
                left_ns = max(other.start_ns, other.end_ns - 1)
                from_tid = tracks[other.track, lane_of[other_id]]
                out.append(arrow | {"ph": "s", "tid": from_tid, "ts": (left_ns - zero_ns) / 1000})
                out.append(arrow | {"ph": "f", "bp": "e", "tid": place["tid"], "ts": place["ts"]})
    return {
        "traceEvents": out,
        "displayTimeUnit": "ns",
        "otherData": {"dropped": run.dropped, "finished": run.finished, "open_spans": run.open_spans},
    }


def write_chrome_trace(run: Recording, path: Path, process: str = "kvtier") -> None:
    """Write `chrome_trace` to a file that https://ui.perfetto.dev and chrome://tracing open."""
    path.write_text(json.dumps(chrome_trace(run, process), separators=(",", ":")))
