"""The scheduler's thread: one lookup of a request of 100,000 tokens, all of it present, beside a plain dict's lookups.

No engine. Writes bench/results/lookup.json.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.store.tiered import Part, StoreLimits, TieredStore

TOKENS = 100_000
BLOCK_TOKENS = 16
ROUNDS = 21


def median_ms(function: Callable[[], object]) -> float:
    """Median wall time of one call, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure and write."""
    count = TOKENS // BLOCK_TOKENS
    keys = [n.to_bytes(36, "big") for n in range(count)]
    result: dict[str, object] = {
        "tokens": TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "parts": count,
        "rounds": ROUNDS,
        "python": platform.python_version(),
    }
    plain = dict.fromkeys(keys, 0)
    result["plain_dict_ms"] = median_ms(lambda: sum(key in plain for key in keys))
    for tier in ("dram", "disk"):
        store = TieredStore(StoreLimits((4096,), arena_bytes=(count + 1) * 4096, disk_bytes=(count + 1) * 4096))
        if tier == "dram":
            store.begin_store([Part(key, 0) for key in keys], 0.0)
            store.end_store(keys, 0.0)
        else:
            store.fill_from_disk([(key, 0, 0) for key in keys], 0.0)
        assert store.leading_run(keys) == (count, False)
        result[f"lookup_{tier}_ms"] = median_ms(lambda store=store: store.leading_run(keys))  # type: ignore[misc]
    out = Path(__file__).parent / "results" / "lookup.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
