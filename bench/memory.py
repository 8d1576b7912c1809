"""Resident memory over 2,000 requests: the arena, at most 10% of it and 64 MiB more, and nothing that grows with requests.

Two engines one after the other on a tiny model, each in a fork of its own: without kvtier and with it, on the same prompts, whose KV fills
the arena once and the disk tier several times. Writes bench/results/memory.json and ends with exit code 1 where the limit does not hold.
"""

import json
import os
import platform
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvtier.testing import forks
from kvtier.testing.tiny_models import tiny_checkpoint
from kvtier.testing.vllm.driver import Engine, import_vllm

ROOT = Path(__file__).parents[1]
REQUESTS = 2000
BATCH = 20
PROMPT_TOKENS = 600
DRAM_BYTES = 1 << 30
DISK_BYTES = 256 << 20


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(model: Path, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Serve all requests; resident bytes after each 200, and what moved."""
    numbers = random.Random(1)
    samples, used = [], []
    with Engine(model, kvtier=settings, kv_cache_memory_bytes=16 << 20) as engine:
        store = engine.scheduler.connector.manager.store if settings else None
        for start in range(0, REQUESTS, BATCH):
            prompts = [[numbers.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH - 1)]
            prompts.append(prompts[0])
            engine.answer(prompts, max_tokens=2)
            if (start + BATCH) % 200 == 0:
                samples.append(resident_bytes())
                used.append(store.gauges()["dram_used_bytes"] if store else 0)
        engine.settle()
        moved = {name: count for name, count in store.counters.items() if count} if store else {}
    return {"resident_bytes": samples, "slots_used_bytes": used, "moved": moved}


def main() -> int:
    """Measure, write, judge."""
    import_vllm()
    with tempfile.TemporaryDirectory(prefix="kvtier-memory-") as scratch:
        log = Path(scratch) / "log"
        model = forks.run(lambda: tiny_checkpoint("llama", ROOT / "work" / "models" / "tiny"), log=log)
        disk = Path(scratch) / "disk"
        disk.mkdir()
        settings = {
            "dram_bytes": DRAM_BYTES,
            "disk_path": str(disk),
            "disk_bytes": DISK_BYTES,
            "disk_free_bytes_min": 0,
        }
        without = forks.run(lambda: serve(model, None), log=log, timeout_s=600)
        with_kvtier = forks.run(lambda: serve(model, settings), log=log, timeout_s=900)
    share = [a - b for a, b in zip(with_kvtier["resident_bytes"], without["resident_bytes"], strict=True)]
    # An arena that is pinned is resident from the start, another one as far as its slots have been used.
    pinned = share[0] > DRAM_BYTES * 9 // 10
    arena = [DRAM_BYTES if pinned else used for used in with_kvtier["slots_used_bytes"]]
    beyond = [a - b for a, b in zip(share, arena, strict=True)]
    limit = DRAM_BYTES // 10 + (64 << 20)
    growth = beyond[-1] - beyond[len(beyond) // 2 - 1]
    result = {
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "dram_bytes": DRAM_BYTES,
        "beyond_arena_limit_bytes": limit,
        "resident_with_less_without_bytes": share,
        "beyond_arena_bytes": beyond,
        "arena_pinned": pinned,
        "growth_over_second_half_bytes": growth,
        "with_kvtier": with_kvtier,
        "without": without,
        "python": platform.python_version(),
    }
    out = ROOT / "bench" / "results" / "memory.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    holds = max(beyond) <= limit and growth <= 4 << 20
    print(f"arena {DRAM_BYTES >> 20} MiB, beyond it at most {max(beyond) >> 20} MiB of {limit >> 20} MiB allowed")
    print(f"growth over the second thousand requests: {growth / 2**20:.1f} MiB")
    print("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
