"""Whether the constants of `reuse` are fitted to the traces they are shown on.

Searches them on the first half of `conversation` alone: coordinate descent over wide grids, beginning at the low end of each, for the mean over
capacities of the hit rate over that of the best other online policy. Then runs what is shipped and what was found on what the search has not
seen, the second half of `conversation` as a trace of its own (empty tier, untaught model) and all of `synthetic`, beside the other online
policies and MIN. Writes bench/results/reuse_constants.json.
"""

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from kvtier.policy import returns, reuse
from kvtier.policy.registry import make_policy, policy_names
from kvtier.simulate.replay import replay, replay_min
from kvtier.simulate.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[1]
SEARCH_CAPACITIES = (1_000, 3_000, 10_000)
CAPACITIES = (1_000, 3_000, 10_000, 30_000)
GRIDS: dict[str, tuple[float, ...]] = {
    "RATE": (0.01, 0.03, 0.1, 0.3, 1.0),
    "RATE_BASE": (0.03, 0.1, 0.3, 1.0, 3.0),
    "SHRINK": (0.0, 0.001, 0.01, 0.1),
    "PRIOR_STRENGTH": (0.03, 0.15, 0.6),
    "SQUARES_DECAY": (1 - 1 / 512, 1 - 1 / 4096, 1 - 1 / 32768),
    "TEMPLATE_BRANCHES": (2, 3, 6, 12),
}
PASSES_MAX = 3

Constants = tuple[float, ...]


def home_of(name: str) -> Any:
    """The module that a constant is in."""
    return returns if hasattr(returns, name) else reuse


SHIPPED: Constants = tuple(getattr(home_of(name), name) for name in GRIDS)


@cache
def part(name: str, folder: Path) -> list[TraceRequest]:
    """A trace by name, or its `/first` or `/second` half."""
    trace, _, half = name.partition("/")
    requests = list(Trace(folder / f"{trace}_trace.jsonl.xz"))
    middle = len(requests) // 2
    return {"": requests, "first": requests[:middle], "second": requests[middle:]}[half]


def rate(policy: str, name: str, capacity: int, constants: Constants, folder: Path) -> float:
    """Hit rate of one policy on one part of a trace, with these constants."""
    if policy == "min":
        return replay_min(part(name, folder), capacity).hit_rate
    before = tuple(getattr(home_of(constant), constant) for constant in GRIDS)
    try:
        for constant, value in zip(GRIDS, constants, strict=True):
            setattr(home_of(constant), constant, value)
        return replay(part(name, folder), make_policy(policy, capacity)).hit_rate
    finally:
        for constant, value in zip(GRIDS, before, strict=True):
            setattr(home_of(constant), constant, value)


class Bench:
    """Runs many at once, each only once."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self._running: dict[tuple[str, str, int, Constants], Any] = {}

    def start(self, policy: str, name: str, capacity: int, constants: Constants = SHIPPED) -> Any:
        """A future of the hit rate."""
        what = (policy, name, capacity, constants)
        if what not in self._running:
            self._running[what] = self.pool.submit(rate, *what, self.folder)
        return self._running[what]

    def best_other(self, name: str, capacity: int) -> tuple[str, float]:
        """The best online policy but `reuse`."""
        started = {other: self.start(other, name, capacity) for other in policy_names() if other != "reuse"}
        rates = {other: future.result() for other, future in started.items()}
        best = max(rates, key=lambda other: rates[other])
        return best, rates[best]

    def scores(self, candidates: Sequence[Constants]) -> list[float]:
        """How far above the best other policy each is on the first half of `conversation`, as a factor."""
        name = "conversation/first"
        for constants in candidates:
            for capacity in SEARCH_CAPACITIES:
                self.start("reuse", name, capacity, constants)
        others = [self.best_other(name, capacity)[1] for capacity in SEARCH_CAPACITIES]
        return [
            sum(
                self.start("reuse", name, capacity, constants).result() / other
                for capacity, other in zip(SEARCH_CAPACITIES, others, strict=True)
            )
            / len(SEARCH_CAPACITIES)
            for constants in candidates
        ]


def search(bench: Bench) -> tuple[Constants, list[dict[str, Any]]]:
    """The constants found, and every one tried with its score."""
    tried: dict[Constants, float] = {}
    at: Constants = tuple(grid[0] for grid in GRIDS.values())
    for turn in range(PASSES_MAX):
        before = at
        for place, (name, grid) in enumerate(GRIDS.items()):
            candidates = [(*at[:place], value, *at[place + 1 :]) for value in grid]
            scores = bench.scores(candidates)
            tried.update(zip(candidates, scores, strict=True))
            at = max(candidates, key=lambda constants: tried[constants])
            print(f"pass {turn + 1}: {name} = {at[place]:g}, score {tried[at]:.4f}", flush=True)
        if at == before:
            break
    return at, [{"constants": named(constants), "score": score} for constants, score in tried.items()]


def named(constants: Constants) -> Mapping[str, float]:
    """Constants by name."""
    return dict(zip(GRIDS, constants, strict=True))


def main() -> int:
    """Search, run on what was not seen, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--traces", type=Path, default=ROOT / "tests" / "data", metavar="DIR")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "reuse_constants.json", metavar="F")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs) as pool:
        bench = Bench(pool, args.traces)
        found, tried = search(bench)
        (shipped_score,) = bench.scores([SHIPPED])
        print(f"shipped: score {shipped_score:.4f}", flush=True)
        rows = []
        for name in ("conversation/second", "synthetic"):
            for capacity in CAPACITIES:
                runs = [bench.start("reuse", name, capacity, constants) for constants in (SHIPPED, found)]
                runs.append(bench.start("min", name, capacity))
                other, other_rate = bench.best_other(name, capacity)
                shipped_rate, found_rate, min_rate = (run.result() for run in runs)
                rows.append(
                    {
                        "trace": name,
                        "capacity_blocks": capacity,
                        "shipped": shipped_rate,
                        "found": found_rate,
                        "best_other": other,
                        "best_other_rate": other_rate,
                        "min": min_rate,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "searched_on": "conversation/first",
        "grids": GRIDS,
        "shipped": named(SHIPPED),
        "shipped_score": shipped_score,
        "found": named(found),
        "found_score": max(entry["score"] for entry in tried),
        "unseen": rows,
        "tried": tried,
        "python": platform.python_version(),
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
