"""What is present on a shared filesystem: asked in batches beside the caller, and remembered for a while.

`lookup` answers from memory and never waits: True, False, or None for "asked, come again". A True is remembered for `present_s`, a False for `absent_s`, which is
shorter, because others store all the time; but each answer is given once at least. Both are kept in bounded memory, those asked longest ago forgotten first. A True may be wrong
by the time of the read: then the read is a miss, and whoever meets it calls `note`.

A key is present when the parts of every rank are, or, with `markers`, when its commit marker is: an empty file that `publish` makes after every rank
reported its part as stored. One question is asked for each key then, not one for each rank.

Threads of our own do the asking, a run of keys at a time: a question is one system call, and a filesystem that hangs must keep neither the caller nor the end of the process.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kvtier.tier.disk.base import Key
from kvtier.tier.disk.shared_layout import SharedLayout, folder_of

Committed: TypeAlias = Callable[[dict[Key, bool]], None]

_RUN_KEYS = 32
_ASKED_MAX = 100_000


class _Answer:
    """What is known of a key, until when; and whether nobody has taken it yet."""

    __slots__ = ("fresh", "present", "until_s")

    def __init__(self, present: bool, until_s: float) -> None:
        self.present = present
        self.until_s = until_s
        self.fresh = True


def file_exists(path: bytes) -> bool:
    """Whether there is a file of this name. Raises OSError where that cannot be said."""
    try:
        os.stat(path)  # noqa: PTH116 - a path of bytes
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class SharedPresence:
    """Presence of whole records, all ranks together. Thread-safe.

    Args:
        layout: the names.
        ranks: how many ranks have a part of each record.
        clock: seconds, never backwards; `time.monotonic` in production.
        generation: whose parts count.
        markers: ask for commit markers instead of every rank's part.
        present_s, absent_s: how long an answer is believed.
        keys_max: most keys remembered.
        threads: how many questions may be out at a time.
        exists: what answers one question.
    """

    def __init__(
        self,
        layout: SharedLayout,
        *,
        ranks: int,
        clock: Callable[[], float],
        generation: int = 0,
        markers: bool = False,
        present_s: float = 30.0,
        absent_s: float = 1.0,
        keys_max: int = 1_000_000,
        threads: int = 16,
        exists: Callable[[bytes], bool] = file_exists,
    ) -> None:
        self._layout = layout
        self._ranks = ranks
        self._clock = clock
        self._markers = markers
        self._present_s = present_s
        self._absent_s = absent_s
        self._keys_max = keys_max
        self._exists = exists
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._known: dict[Key, _Answer] = {}
        self._asked: dict[Key, object] = {}
        self.questions = 0
        self.failed_questions = 0
        self._set_generation(generation)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-presence-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _set_generation(self, generation: int) -> None:
        self._marker_directory = os.fsencode(self._layout.marker_directory(generation))
        ranks = [os.fsencode(self._layout.rank_directory(rank, generation)) for rank in range(self._ranks)]
        self._directories = [self._marker_directory] if self._markers else ranks

    def reset(self, generation: int) -> None:
        """Only parts of `generation` count from now on."""
        with self._lock:
            self._set_generation(generation)
            self._known.clear()
            self._asked.clear()

    # -- questions

    def lookup(self, keys: Sequence[Key]) -> list[bool | None]:
        """What is known of each key. What is not is asked; never waits."""
        now_s = self._clock()
        answers: list[bool | None] = []
        new: list[Key] = []
        known, asked = self._known, self._asked
        with self._lock:
            for key in keys:
                answer = known.get(key)
                if answer is not None and (answer.fresh or now_s < answer.until_s):
                    # Whoever asked takes the answer once, however long a step was.
                    answer.fresh = False
                    answers.append(answer.present)
                    continue
                answers.append(None)
                if key not in asked and len(asked) < _ASKED_MAX:
                    asked[key] = None
                    new.append(key)
            self.questions += len(new)
            directories = self._directories
            for start in range(0, len(new), _RUN_KEYS):
                token = object()
                run = new[start : start + _RUN_KEYS]
                asked.update(dict.fromkeys(run, token))
                self._work.put(partial(self._ask, run, token, directories))
        return answers

    def wait(self, keys: Sequence[Key], deadline_s: float) -> bool:
        """Wait until none of `keys` is being asked, at most `deadline_s` seconds. True if none is. For callers that have nothing else to do."""
        with self._answered:
            return self._answered.wait_for(lambda: not any(key in self._asked for key in keys), deadline_s)

    def _ask(self, keys: Sequence[Key], token: object, directories: Sequence[bytes]) -> None:
        found: dict[Key, bool] = {}
        failed = 0
        for key in keys:
            try:
                found[key] = all(self._exists(self._layout.path(directory, key)) for directory in directories)
            except (OSError, ValueError):
                failed += 1
                found[key] = False
        now_s = self._clock()
        with self._lock:
            self.failed_questions += failed
            for key, present in found.items():
                if self._asked.get(key) is token:
                    del self._asked[key]
                    self._remember(key, present, now_s)
            self._answered.notify_all()

    def _remember(self, key: Key, present: bool, now_s: float) -> None:
        self._known.pop(key, None)
        self._known[key] = _Answer(present, now_s + (self._present_s if present else self._absent_s))
        while len(self._known) > self._keys_max:
            del self._known[next(iter(self._known))]

    def note(self, key: Key, *, present: bool) -> None:
        """Somebody knows better: a store succeeded, a read found nothing. An answer that is under way does not count any more."""
        with self._lock:
            self._learn(key, present)

    def _learn(self, key: Key, present: bool) -> None:
        self._asked.pop(key, None)
        self._remember(key, present, self._clock())

    def forget(self, keys: Sequence[Key]) -> None:
        """Ask again at the next lookup."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
                self._asked.pop(key, None)

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self._known)

    # -- markers

    def publish(self, keys: Sequence[Key]) -> None:
        """Every rank has stored its parts of these records: from now on they are there, for other engines too."""
        for key in keys:
            self.note(key, present=True)
        if self._markers:
            self.commit(keys, lambda committed: None)

    def commit(self, keys: Sequence[Key], done: Committed) -> None:
        """Make the commit markers of records whose every rank was stored. `done` gets, for each key, whether its marker is there."""
        directory = self._marker_directory

        def mark() -> None:
            results = {key: _make_marker(self._layout.path(directory, key)) for key in keys}
            with self._lock:
                # After a reset these are markers of a generation that does not count any more.
                for key in [key for key, made in results.items() if made and directory == self._marker_directory]:
                    self._learn(key, True)
            done(results)

        self._work.put(mark)

    def uncommit(self, keys: Sequence[Key]) -> None:
        """Take markers away, before any rank's part is deleted."""
        for key in keys:
            self.note(key, present=False)
        directory = self._marker_directory

        def unmark() -> None:
            for key in keys:
                Path(os.fsdecode(self._layout.path(directory, key))).unlink(missing_ok=True)

        if self._markers:
            self._work.put(unmark)

    # -- threads

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - a caller's `done`, or a name that is none: the next question is not to blame
                with self._lock:
                    self.failed_questions += 1

    def close(self, deadline_s: float) -> bool:
        """End the threads, what was asked of them before first. True if they all ended in time."""
        end_s = time.monotonic() + deadline_s
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _make_marker(path: bytes) -> bool:
    """An empty file is whole as soon as it has its name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            os.close(os.open(path, flags, 0o644))
        except FileNotFoundError:
            Path(os.fsdecode(folder_of(path))).mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, flags, 0o644))
    except OSError:
        return False
    return True
