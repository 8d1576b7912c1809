"""Memory and time of `kvtier simulate` on a trace of 10,000,000 requests: neither may grow faster than the trace, memory not at all.

The trace is generated, from a seed, in Mooncake's format: conversations over shared templates that come back after log-normal gaps, 2 to 4
blocks a request. Each run is a process of its own; its peak resident set is what the kernel says at its end. Writes
bench/results/simulate_long.json and ends with exit code 1 where memory grew by more than a tenth over the tenfold trace.
"""

import argparse
import heapq
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEMPLATES = 512
RATE_PER_S = 20.0
GOES_ON = (0.3, 0.5, 0.7)
"""Chance that a conversation goes on after its first, second and third turn; each adds a block, and four is the most."""


def lines(count: int, seed: int) -> Iterator[str]:
    """`count` lines of a trace. What is held are the conversations that will go on."""
    numbers = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) for rank in range(TEMPLATES)))
    returns: list[tuple[float, int, list[int]]] = []
    next_id, now_s = TEMPLATES, 0.0
    for number in range(count):
        now_s += numbers.expovariate(RATE_PER_S)
        if returns and returns[0][0] <= now_s:
            blocks = heapq.heappop(returns)[2]
        else:
            blocks = numbers.choices(range(TEMPLATES), cum_weights=weights)
        blocks = [*blocks, next_id]
        next_id += 1
        turn = len(blocks) - 2
        if turn < len(GOES_ON) - 1 and numbers.random() < GOES_ON[turn]:
            heapq.heappush(returns, (now_s + 20 + numbers.lognormvariate(4.5, 1.0), number, blocks))
        output = 1 + int(numbers.expovariate(1 / 200))
        yield (
            f'{{"timestamp":{int(now_s * 1000)},"input_length":{512 * len(blocks) - 100},"output_length":{output},'
            f'"hash_ids":{json.dumps(blocks, separators=(",", ":"))}}}\n'
        )


def measure(trace: Path, policy: str, requests: int, capacity_blocks: int, scratch: Path) -> dict[str, Any]:
    """One run of `kvtier simulate`: its seconds, peak resident bytes and hit rate."""
    result = scratch / f"{policy}-{requests}.json"
    command = [sys.executable, "-m", "kvtier.cli.main", "simulate", str(trace), "--policy", policy, "--quiet"]
    command += ["--capacity-blocks", str(capacity_blocks), "--requests", str(requests), "--json", str(result)]
    started_s = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started_s
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    (row,) = json.loads(result.read_text())
    return {
        "policy": policy,
        "requests": requests,
        "blocks": row["asked_blocks"],
        "capacity_blocks": capacity_blocks,
        "hit_rate": row["hit_rate"],
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "blocks_a_minute": row["asked_blocks"] / seconds * 60,
        "peak_resident_bytes": usage.ru_maxrss * 1024,
    }


def main() -> int:
    """Generate, measure, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000_000, metavar="N")
    parser.add_argument("--policy", default="lru,reuse", metavar="A,B")
    parser.add_argument("--capacity-blocks", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "simulate_long.json", metavar="F")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-long-") as folder:
        trace = Path(folder) / "long.jsonl"
        with trace.open("w") as out:
            out.writelines(lines(args.requests, args.seed))
        for requests in (args.requests // 10, args.requests):
            for policy in args.policy.split(","):
                runs.append(measure(trace, policy, requests, args.capacity_blocks, Path(folder)))
                print(json.dumps(runs[-1]), flush=True)
        trace_bytes = trace.stat().st_size
    growth = {
        policy: max(r["peak_resident_bytes"] for r in runs if r["policy"] == policy)
        / min(r["peak_resident_bytes"] for r in runs if r["policy"] == policy)
        for policy in args.policy.split(",")
    }
    result = {
        "seed": args.seed,
        "trace_bytes": trace_bytes,
        "memory_growth_over_tenfold_trace": growth,
        "runs": runs,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if max(growth.values()) <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
