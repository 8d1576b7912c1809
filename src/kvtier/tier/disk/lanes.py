"""Which job starts next: demand reads first, with a share of the depth that waiting writes always get.

The limits count jobs in flight, out of a depth of `iodepth`:

- demand reads may fill the depth;
- preloads start only where no demand read waits, and leave a quarter of the depth free for the next one; a preload whose deadline is
  reached competes as a demand read;
- waiting writes are guaranteed `write_share` of what is started: each other start earns them credit, and with a whole credit a write goes before everything
  else. While demand reads are about, `write_jobs_min` of them fly at most; all but a quarter of the depth otherwise;
- maintenance starts only where nothing else waits, and takes at most a quarter.

Inside a lane the earliest deadline goes first, and equal deadlines go in the order of submission.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection

from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.io import Job

LANES = (Lane.DEMAND, Lane.PRELOAD, Lane.WRITE, Lane.MAINTENANCE)
# By identity: an enumeration member's own hash is computed in Python, for every job.
LANE_INDEX = {id(lane): index for index, lane in enumerate(LANES)}
DEMAND, PRELOAD, WRITE, MAINTENANCE = range(4)
CREDIT_MAX = 2.0


class _Line:
    """The jobs that wait in one lane: those with a deadline in a heap, ahead of those without."""

    def __init__(self) -> None:
        self.timed: list[tuple[float, int, Job]] = []
        self.untimed: deque[Job] = deque()
        self._sequence = 0

    def __len__(self) -> int:
        return len(self.timed) + len(self.untimed)

    def push(self, job: Job) -> None:
        if job.deadline_s is None:
            self.untimed.append(job)
        else:
            self._sequence += 1
            heapq.heappush(self.timed, (job.deadline_s, self._sequence, job))

    def pop(self) -> Job:
        return heapq.heappop(self.timed)[2] if self.timed else self.untimed.popleft()

    def due(self, now_s: float) -> bool:
        return bool(self.timed) and self.timed[0][0] <= now_s

    def take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove and return the jobs that are wanted."""
        out = [job for _, _, job in sorted(self.timed, key=lambda item: item[:2]) if wanted(job)] + [
            job for job in self.untimed if wanted(job)
        ]
        if out:
            gone = set(map(id, out))
            self.timed = [item for item in self.timed if id(item[2]) not in gone]
            heapq.heapify(self.timed)
            self.untimed = deque(job for job in self.untimed if id(job) not in gone)
        return out


class LaneQueue:
    """Waiting jobs by lane, and how many of each lane are in flight. Not thread-safe."""

    def __init__(self, iodepth: int, write_share: float) -> None:
        if iodepth < 1:
            raise ValueError(f"iodepth is {iodepth}: at least one operation must be allowed in flight")
        if not 0 < write_share < 1:
            raise ValueError(
                f"write_share is {write_share}: give a fraction of the depth between 0 and 1, for instance 0.125"
            )
        self.iodepth = iodepth
        self.write_jobs_min = max(1, int(iodepth * write_share))
        self.write_credit = 1.0
        self.credit_a_start = write_share / (1 - write_share)
        self.reserve = iodepth // 4
        self.in_flight = [0, 0, 0, 0]
        self._lines = [_Line(), _Line(), _Line(), _Line()]

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def push(self, job: Job) -> None:
        self._lines[LANE_INDEX[id(job.lane)]].push(job)

    def ended(self, job: Job) -> None:
        self.in_flight[LANE_INDEX[id(job.lane)]] -= 1

    def promote(self, jobs: Collection[Job], lane: Lane, deadline_s: float | None) -> None:
        """Those of `jobs` that wait go to another lane, with another deadline."""
        wanted = set(map(id, jobs))
        for line in self._lines:
            moved = line.take(lambda job: id(job) in wanted)
            for job in moved:
                job.lane, job.deadline_s = lane, deadline_s
                self.push(job)
                wanted.discard(id(job))

    def cancel_all(self) -> None:
        """Mark everything that waits as cancelled."""
        for line in self._lines:
            for job in (*(item[2] for item in line.timed), *line.untimed):
                job.cancelled = True

    def take_cancelled(self) -> list[Job]:
        """Remove and return the jobs that wait and were marked cancelled."""
        return [job for line in self._lines for job in line.take(lambda job: job.cancelled)]

    def pop(self, now_s: float) -> Job | None:
        """The job to start now, counted as in flight; None where none may start."""
        lane = self._choose(now_s)
        if lane < 0:
            return None
        self.in_flight[lane] += 1
        if lane == WRITE:
            self.write_credit = max(0.0, self.write_credit - 1)
        elif self._lines[WRITE]:
            self.write_credit = min(CREDIT_MAX, self.write_credit + self.credit_a_start)
        return self._lines[lane].pop()

    def _choose(self, now_s: float) -> int:
        demand, preload, write, maintenance = self._lines
        flying = sum(self.in_flight)
        if flying >= self.iodepth:
            return -1
        writes_flying = self.in_flight[WRITE]
        writes_few = writes_flying < self.write_jobs_min
        if write and writes_few and self.write_credit >= 1:
            return WRITE
        due = preload.due(now_s)
        if due and not (demand and demand.timed and demand.timed[0][0] <= preload.timed[0][0]):
            return PRELOAD
        if demand:
            return DEMAND
        spare = self.iodepth - self.reserve
        if write and (writes_few or (not self.in_flight[DEMAND] and writes_flying < spare)):
            return WRITE
        if preload and flying < spare:
            return PRELOAD
        if maintenance and not write and not preload and self.in_flight[MAINTENANCE] < max(1, self.reserve):
            return MAINTENANCE
        return -1
