"""How long it takes to compute tokens again: a curve that learns from the engine's own steps.

A step of an engine takes about `base + token * tokens + pair * pairs` seconds: something for being a step, something for each token, and
something for each pair of a token and one that it attends to. A token at depth d attends to d tokens, so that the tokens
from a to b have (b^2 - a^2) / 2 pairs, and cost more the deeper they are.

What makes this hard is not the model but the steps: most of a running engine's are alike, and some took long for reasons of their own (a
compile, a pause of the process, two outputs that came at once). So:

- Samples are kept by kind of step, an octave of tokens and two of pairs per token, the newest few of each. A kind not seen for long keeps
  its samples, else an hour of decoding would make the curve forget what prefill costs; a kind that is seen replaces them. That bounds the
  state, and is the forgetting.
- The fit minimises relative absolute errors (by reweighted least squares), which a minority of wrong samples hardly moves.
- Coefficients are not negative: where the best fit would have it so, the term is left out.

A sample costs an append; a fit some hundred microseconds, every `FIT_EVERY` samples. Pure: the caller measures.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

FIT_EVERY = 256
SAMPLES_MIN = 8
SAMPLES_A_KIND = 5
KINDS_MAX = 256
TOKENS_MAX, PAIRS_MAX = 10**9, 1e15
SECONDS_MIN, SECONDS_MAX = 1e-7, 86_400.0
_ROUNDS = 8
_RESIDUAL_MIN = 1e-3
_DIAGONAL = np.diag_indices(3)
_FEWER_TERMS = ([0, 1], [0, 2], [1, 2], [0], [1], [2])


class RecomputeCurve:
    """Seconds of engine time for computing tokens at a depth. 0 while too little is known.

    Attributes:
        base_s: seconds of a step that computes nothing.
        token_s: seconds a token, beside what it attends to.
        pair_s: seconds for each pair of a token and one before it.
    """

    def __init__(self) -> None:
        self.base_s = self.token_s = self.pair_s = 0.0
        self._kinds: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}
        self._samples = 0
        self._fit_at = SAMPLES_MIN

    @property
    def known(self) -> bool:
        """Whether `seconds` says anything yet."""
        return self.token_s > 0 or self.pair_s > 0

    def add(self, tokens: int, pairs: float, seconds: float) -> None:
        """A step computed `tokens` tokens that attended to `pairs` tokens in all, in `seconds` seconds.

        What cannot be (no token, no time, a step of a day) is ignored.
        """
        # Written so that NaN is left out too.
        if not (0 < tokens <= TOKENS_MAX and 0 <= pairs <= PAIRS_MAX and SECONDS_MIN <= seconds <= SECONDS_MAX):
            return
        kind = (tokens.bit_length(), int(pairs / tokens).bit_length() // 2)
        samples = self._kinds.pop(kind, None)
        if samples is None:
            samples = deque(maxlen=SAMPLES_A_KIND)
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = samples  # the kind seen last is last
        samples.append((tokens, pairs, seconds))
        self._samples += 1
        if self._samples >= self._fit_at:
            self._fit_at = self._samples + min(self._samples, FIT_EVERY)
            self._fit()

    def seconds(self, from_tokens: int, to_tokens: int) -> float:
        """Engine time for the tokens from depth `from_tokens` to `to_tokens` of one sequence, what a step costs by itself left out."""
        if to_tokens <= from_tokens:
            return 0.0
        return self.token_s * (to_tokens - from_tokens) + self.pair_s * pairs_of(from_tokens, to_tokens)

    def _fit(self) -> None:
        rows = np.array([sample for samples in self._kinds.values() for sample in samples])
        # Relative to what is usual for the kind: relative to itself, a step that seemed to take no time would count most.
        usual = np.array([_median(samples) for samples in self._kinds.values() for _ in samples])
        terms = np.column_stack((np.ones(len(rows)), rows[:, 0], rows[:, 1])) / usual[:, None]
        target = rows[:, 2] / usual
        scale = np.maximum(terms.max(axis=0), 1e-300)
        terms /= scale
        weights: _Floats = np.ones(len(rows))
        fitted: _Floats = np.zeros(3)
        for _ in range(_ROUNDS):
            fitted = _least_squares(terms, target, weights)
            weights = 1 / np.maximum(np.abs(terms @ fitted - target), _RESIDUAL_MIN)
        self.base_s, self.token_s, self.pair_s = (fitted / scale).tolist()


def _median(samples: Iterable[tuple[float, float, float]]) -> float:
    ordered = sorted(seconds for _, _, seconds in samples)
    return ordered[len(ordered) // 2]


def pairs_of(from_tokens: int, to_tokens: int) -> float:
    """Pairs of a token between two depths and one before it."""
    return (to_tokens * to_tokens - from_tokens * from_tokens) / 2


def _least_squares(terms: _Floats, target: _Floats, weights: _Floats) -> _Floats:
    """Non-negative coefficients by which the three `terms` come closest to `target`."""
    gram, aim = terms.T @ (terms * weights[:, None]), terms.T @ (target * weights)
    gram[_DIAGONAL] += 1e-9 * gram.trace() + 1e-300
    best: _Floats = np.linalg.solve(gram, aim).astype(np.float64)
    if best.min() >= 0:
        return best
    # The best fit within bounds is the best of those that use fewer terms and whose own best lies within.
    best, best_error = np.zeros(3), 0.0
    for chosen in _FEWER_TERMS:
        found = np.linalg.solve(gram[np.ix_(chosen, chosen)], aim[chosen])
        error = -float(aim[chosen] @ found)
        if found.min() >= 0 and error < best_error:
            best, best_error = np.zeros(3), error
            best[chosen] = found
    return best
