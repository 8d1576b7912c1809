"""What is present on a shared filesystem: asked in batches beside the caller, and remembered for a while.

`lookup` answers from memory and never waits: True, False, or None for "asked, come again". A True is remembered for `present_s`, a False for `absent_s`, which is
shorter, because others store all the time; but each answer is given once at least. Both are kept in bounded memory, forgotten longest-unused first. A True may be wrong by the time of the read: then the read is
a miss, and whoever meets it calls `forget`.

A key is present when the parts of every rank are, or, with `markers`, when its commit marker is: an empty file that `commit` makes after every rank
reported its part as stored. One question is asked for each key then, not one for each rank.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvtier.tier.disk.base import Key, Lane
from kvtier.tier.disk.io import IOEngine, Job, Op, Step
from kvtier.tier.disk.shared_layout import SharedLayout, folder_of, temporary_path

Committed: TypeAlias = Callable[[dict[Key, bool]], None]


class _Answer:
    """What is known of a key, until when; and whether nobody has taken it yet."""

    __slots__ = ("fresh", "present", "until_s")

    def __init__(self, present: bool, until_s: float) -> None:
        self.present = present
        self.until_s = until_s
        self.fresh = True


class _Asked:
    """A key under question: how many ranks' answers are out, and whether any said no."""

    __slots__ = ("absent", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.absent = False


class SharedPresence:
    """Presence of whole records, all ranks together. Thread-safe.

    Args:
        layout: the names.
        ranks: how many ranks have a part of each record.
        io: the engine that asks, closed with this.
        clock: seconds, never backwards; `time.monotonic` in production.
        generation: whose parts count.
        markers: ask for commit markers instead of every rank's part.
        present_s, absent_s: how long an answer is believed.
        keys_max: most keys remembered.
    """

    def __init__(
        self,
        layout: SharedLayout,
        *,
        ranks: int,
        io: IOEngine,
        clock: Callable[[], float],
        generation: int = 0,
        markers: bool = False,
        present_s: float = 30.0,
        absent_s: float = 1.0,
        keys_max: int = 1_000_000,
    ) -> None:
        self._layout = layout
        self._ranks = ranks
        self._io = io
        self._clock = clock
        self._markers = markers
        self._present_s = present_s
        self._absent_s = absent_s
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, _Answer] = OrderedDict()
        self._asked: dict[Key, _Asked] = {}
        self._made: set[bytes] = set()
        self._model_directory = os.fsencode(layout.model_directory)
        self.questions = 0
        self.failed_questions = 0
        self._set_generation(generation)

    def _set_generation(self, generation: int) -> None:
        self._marker_directory = os.fsencode(self._layout.marker_directory(generation))
        ranks = (
            []
            if self._markers
            else [os.fsencode(self._layout.rank_directory(rank, generation)) for rank in range(self._ranks)]
        )
        self._directories = ranks or [self._marker_directory]

    def reset(self, generation: int) -> None:
        """Only parts of `generation` count from now on."""
        with self._lock:
            self._set_generation(generation)
            self._known.clear()
            self._asked.clear()

    def lookup(self, keys: Sequence[Key]) -> list[bool | None]:
        """What is known of each key. What is not is asked, all of it as one batch; never waits."""
        now_s = self._clock()
        answers: list[bool | None] = []
        jobs: list[Job] = []
        with self._lock:
            for key in keys:
                known = self._known.get(key)
                if known is not None and (known.fresh or now_s < known.until_s):
                    # Whoever asked takes the answer once, however long a step was.
                    known.fresh = False
                    self._known.move_to_end(key)
                    answers.append(known.present)
                    continue
                answers.append(None)
                if key not in self._asked:
                    question = self._asked[key] = _Asked(len(self._directories))
                    for directory in self._directories:
                        step = Step(Op.STAT, path=self._layout.path(directory, key), length=-1)
                        jobs.append(Job((step,), Lane.DEMAND, None, (key, question)))
            self.questions += len(jobs)
        if jobs:
            self._io.submit(jobs, self._answered)
        return answers

    def _answered(self, jobs: list[Job]) -> None:
        now_s = self._clock()
        with self._lock:
            for job in jobs:
                key: Key = job.tag[0]
                asked: _Asked = job.tag[1]
                asked.left -= 1
                if job.error:
                    asked.absent = True
                    self.failed_questions += job.error not in (errno.ENOENT, errno.ENOTDIR)
                if asked.left == 0 and self._asked.get(key) is asked:
                    del self._asked[key]
                    self._remember(key, not asked.absent, now_s)

    def _remember(self, key: Key, present: bool, now_s: float) -> None:
        self._known[key] = _Answer(present, now_s + (self._present_s if present else self._absent_s))
        self._known.move_to_end(key)
        while len(self._known) > self._keys_max:
            self._known.popitem(last=False)

    def note(self, key: Key, *, present: bool) -> None:
        """Somebody knows better: a store succeeded, a read found nothing. An answer that is under way does not count any more."""
        with self._lock:
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

    def publish(self, keys: Sequence[Key]) -> None:
        """Every rank has stored its parts of these records: from now on they are there, for other engines too."""
        for key in keys:
            self.note(key, present=True)
        if self._markers:
            self.commit(keys, lambda committed: None)

    def close(self, deadline_s: float) -> bool:
        """End the engine, questions and markers under way first. True if they all ended in time."""
        return self._io.close(deadline_s)

    def commit(self, keys: Sequence[Key], done: Committed) -> None:
        """Make the commit markers of records whose every rank was stored. `done` gets, for each key, whether its marker is there."""
        jobs = []
        with self._lock:
            for key in keys:
                final = self._layout.path(self._marker_directory, key)
                folder = folder_of(final)
                steps = []
                if folder not in self._made:
                    steps += [
                        Step(Op.MKDIR, path=path, tolerated=(errno.EEXIST,))
                        for path in _ancestors(folder, self._model_directory)
                    ]
                temporary = temporary_path(final)
                steps += [
                    Step(Op.OPEN, path=temporary, flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL),
                    Step(Op.CLOSE, always=True),
                    Step(Op.RENAME, path=temporary, path_to=final),
                ]
                jobs.append(Job(tuple(steps), Lane.WRITE, None, (key, folder)))
        results: dict[Key, bool] = {}

        def finished(some: list[Job]) -> None:
            for job in some:
                key, folder = job.tag
                results[key] = job.error == 0
                if job.error:
                    with self._lock:
                        self._made.discard(folder)
                else:
                    self._made.add(folder)
                    self.note(key, present=True)
            if len(results) == len(set(keys)):
                done(results)

        self._io.submit(jobs, finished)

    def uncommit(self, keys: Sequence[Key]) -> None:
        """Take markers away, before any rank's part is deleted."""
        jobs = []
        for key in keys:
            self.note(key, present=False)
            if not self._markers:
                continue
            step = Step(
                Op.UNLINK, path=self._layout.path(self._marker_directory, key), tolerated=(errno.ENOENT, errno.ENOTDIR)
            )
            jobs.append(Job((step,), Lane.DEMAND, None, key))
        if jobs:
            self._io.submit(jobs, lambda ended: None)


def _ancestors(directory: bytes, root: bytes) -> list[bytes]:
    """The directories below `root` that `directory` needs, outermost first, itself last."""
    chain: list[bytes] = []
    while directory != root and len(directory) > len(root):
        chain.append(directory)
        directory = folder_of(directory)
    return chain[::-1]
