"""When will a prefix be asked for again? A hazard model that learns while it is used.

Time since the last use is cut into age buckets. For each bucket the model has the chance that a prefix that has
reached the bucket's start comes back before its end: a logistic function of a baseline for the bucket, of what is
known of the prefix (`features`: one category from each of some fields), and of both together, with the age in a few
coarse classes. Every prefix teaches one example for each bucket that it lived through or came back in, so one
that has not come back yet teaches too, and nothing waits for an end that may never be seen.

Learning is online: AdaGrad over small batches, on a prior that says "the chance of return falls with age and is
small", under which ranking by index is ranking by recency. The sums of squares that slow AdaGrad down decay, so what
is long ago stops counting and the model follows a workload that changes.

From the hazards comes the index by which to keep: the highest rate of returns per second of holding that any
stopping time reaches, from the present age on (the Gittins index of a job that may finish at the end of each
bucket). A prefix in the gap before its usual return so has a higher index than one just used that never returns.
"""

import math
from collections.abc import Sequence

import numpy as np

Hazards = np.ndarray[tuple[int, int], np.dtype[np.floating]]

BATCH = 64
RATE = 0.1
RATE_BASE = 0.3
SHRINK = 0.01
SQUARES_START = 1.0
SQUARES_DECAY = 1.0 - 1.0 / 4096
PRIOR_STRENGTH = 0.15
PRIOR_FLAT_S = 60.0


def age_edges() -> tuple[float, ...]:
    """Starts of the age buckets in seconds: steps of a quarter up to an hour, then doubling up to a day."""
    edges, edge = [0.0], 2.0
    while edge < 3600:
        edges.append(edge)
        edge += max(2.0, edge / 4)
    while edge < 86_400:
        edges.append(edge)
        edge *= 2
    return tuple(edges)


EDGES_S = age_edges()
BUCKETS = len(EDGES_S)
_WIDTHS = np.diff((*EDGES_S, 2 * EDGES_S[-1]))
_BUCKET_NUMBERS = np.arange(BUCKETS)
_CLASS_STARTS = (16, 64, 256, 1024)
_CLASS = tuple(sum(edge >= start for start in _CLASS_STARTS) for edge in EDGES_S)
_CLASSES = len(_CLASS_STARTS) + 1


def gittins(hazards: Hazards, buckets: Sequence[int]) -> list[float]:
    """For each row, the index at the start of its bucket: the best ratio, over all ends, of the chance to return to the seconds held.

    Args:
        hazards: chance of return by row and age bucket.
        buckets: the bucket that each row has reached.
    """
    ahead = np.array(buckets)[:, None] <= _BUCKET_NUMBERS
    chances = np.where(ahead, hazards, 0.0)
    left = np.cumprod(1 - chances, axis=1)
    before = np.ones_like(left)
    before[:, 1:] = left[:, :-1]
    held_s = np.cumsum(np.where(ahead, before * _WIDTHS * (1 - chances / 2), 0.0), axis=1)
    ratios = (1 - left) / np.where(ahead, held_s, np.inf)
    best: list[float] = ratios.max(axis=1).tolist()
    return best


class ReturnModel:
    """Hazards of return by age and features.

    Args:
        sizes: how many categories each field has.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._offsets = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        count = int(sum(sizes))
        self._count = count
        ends = (*EDGES_S[1:], 2 * EDGES_S[-1])
        prior = [
            PRIOR_STRENGTH * math.log((end + PRIOR_FLAT_S) / (start + PRIOR_FLAT_S))
            for start, end in zip(EDGES_S, ends, strict=True)
        ]
        self._base = np.array([math.log(chance / (1 - chance)) for chance in prior])
        self._base_squares = np.full(BUCKETS, SQUARES_START)
        # One weight for each category at every age (class _CLASSES), and one for each with each class of ages.
        self._weights = np.zeros((_CLASSES + 1, count))
        self._squares = np.full((_CLASSES + 1, count), SQUARES_START)
        self._class_of = np.array(_CLASS)
        self._batch: list[tuple[tuple[int, ...], int, float, float]] = []
        self.examples = 0

    def hazards(self, features: Sequence[tuple[int, ...]]) -> Hazards:
        """For each, the chance of return in each bucket, given that it was reached."""
        by_class = self._weights[:, np.array(features) + self._offsets].sum(axis=2)
        logits = by_class.T[:, self._class_of] + self._base + by_class[_CLASSES][:, None]
        hazards: Hazards = 1 / (1 + np.exp(-logits))
        return hazards

    @property
    def learns_next(self) -> bool:
        """Whether the next example completes a batch: then the model changes, and only then."""
        return len(self._batch) == BATCH - 1

    def learn(self, features: tuple[int, ...], bucket: int, returned: bool, weight: float) -> None:
        """One example: it reached `bucket`, and came back in it or left it behind."""
        self._batch.append((features, bucket, float(returned), weight))
        if len(self._batch) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        features, buckets, outcomes, weights = zip(*self._batch, strict=True)
        self._batch.clear()
        self.examples += len(features)
        places = np.array(features) + self._offsets
        bucket = np.array(buckets)
        age_class = self._class_of[bucket]
        logits = (
            self._base[bucket]
            + self._weights[age_class[:, None], places].sum(axis=1)
            + self._weights[_CLASSES, places].sum(axis=1)
        )
        error = (1 / (1 + np.exp(-logits)) - np.array(outcomes)) * np.array(weights)

        self._base_squares *= SQUARES_DECAY
        self._base_squares += np.bincount(bucket, error * error, BUCKETS)
        self._base -= RATE_BASE * np.bincount(bucket, error, BUCKETS) / np.sqrt(self._base_squares)

        fields = places.shape[1]
        flat = np.concatenate((age_class[:, None] * self._count + places, _CLASSES * self._count + places)).ravel()
        errors = np.tile(np.repeat(error, fields), 2)
        total = self._weights.size
        slope = np.bincount(flat, errors, total) + SHRINK * self._weights.ravel() * np.bincount(flat, minlength=total)
        self._squares *= SQUARES_DECAY
        self._squares += np.bincount(flat, errors * errors, total).reshape(self._squares.shape)
        self._weights -= RATE * slope.reshape(self._weights.shape) / np.sqrt(self._squares)
