"""Resident memory over 2,000 requests: the arena, at most 10% of it and 64 MiB more, and nothing that grows with requests (medians
of five samples each over the first and the second thousand), beyond 2 KiB of index for each part that is held more.

    python bench/memory.py [ARENA ...]      sizes such as 48MiB; by default 48MiB 640MiB 1GiB

Engines one after the other on a tiny model, each in a fork of its own with nothing of kvtier imported before: without kvtier, then with it
for each arena, on the same prompts, whose KV fills a small arena several times and the disk tier too. kvtier's part is the difference, and what
of it lies beside the arena is that less the pages of the arena's own mapping that are resident. The cache of compiled code is empty for
the first engine that compiles, as on a new machine. Writes bench/results/memory.json and ends with exit code 1 where a limit does not hold.
"""

import json
import os
import platform
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.config import parse_bytes
from kvtier.testing import forks
from kvtier.testing.vllm.driver import Engine, import_vllm

ROOT = Path(__file__).parents[1]
REQUESTS = 2000
BATCH = 20
PROMPT_TOKENS = 600
ARENAS = ("48MiB", "640MiB", "1GiB")
DISK_BYTES = 256 << 20
GROWTH_BYTES_MAX = 4 << 20
INDEX_BYTES_A_PART = 2 << 10


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mapping_bytes(address: int) -> int:
    """Resident bytes of the mapping of this process that begins at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:") and inside:
            return int(line.split()[1]) << 10
        if not line.partition(":")[0].isalpha():
            inside = line.startswith(f"{address:08x}-")
    raise LookupError(f"nothing is mapped at {address:x}")


def serve(model: Path, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Serve all requests; resident bytes after each 200, and what moved."""
    numbers = random.Random(1)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    samples, arenas, parts = [], [], []
    with Engine(model, kvtier=settings, kv_cache_memory_bytes=16 << 20) as engine:
        store = engine.scheduler.connector.manager.store if settings else None
        arena = get_kv_transfer_group()._worker._plane._arena if settings else None
        for start in range(0, REQUESTS, BATCH):
            prompts = [[numbers.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH - 1)]
            prompts.append(prompts[0])
            engine.answer(prompts, max_tokens=2)
            if (start + BATCH) % 200 == 0:
                held = store.gauges() if store else {}
                parts.append(held.get("dram_parts", 0) + held.get("disk_parts", 0))
                samples.append(resident_bytes())
                arenas.append(mapping_bytes(arena.address) if arena is not None else 0)
        engine.settle()
        moved = {name: count for name, count in store.counters.items() if count} if store else {}
    compiler = sorted({name.partition(".")[0] for name in sys.modules} & {"numba", "llvmlite"})
    return {
        "resident_bytes": samples,
        "arena_bytes": arenas,
        "parts_held": parts,
        "moved": moved,
        "compiler_modules": compiler,
    }


def judge(arena_bytes: int, with_kvtier: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """kvtier's part of memory beside the arena, and whether it keeps to its limit."""
    share = [a - b for a, b in zip(with_kvtier["resident_bytes"], without["resident_bytes"], strict=True)]
    beyond = [a - b for a, b in zip(share, with_kvtier["arena_bytes"], strict=True)]
    half = len(beyond) // 2
    growth, parts = (
        int(median(values[half:]) - median(values[:half])) for values in (beyond, with_kvtier["parts_held"])
    )
    limit = arena_bytes // 10 + (64 << 20)
    return {
        "dram_bytes": arena_bytes,
        "beyond_arena_allowed_bytes": limit,
        "beyond_arena_found_bytes": max(beyond),
        "beyond_arena_bytes": beyond,
        "growth_a_thousand_requests_bytes": growth,
        "growth_a_thousand_requests_parts": parts,
        "holds": max(beyond) <= limit and growth <= GROWTH_BYTES_MAX + INDEX_BYTES_A_PART * parts,
        "with_kvtier": with_kvtier,
    }


def main() -> int:
    """Measure, write, judge."""
    arenas = [parse_bytes(text) for text in sys.argv[1:] or ARENAS]
    with tempfile.TemporaryDirectory(prefix="kvtier-memory-") as directory:
        scratch = Path(directory)
        os.environ["NUMBA_CACHE_DIR"] = str(scratch / "compiled")
        import_vllm()
        log = scratch / "log"
        model = forks.run(lambda: _checkpoint(ROOT / "work" / "models" / "tiny"), log=log)
        without = forks.run(lambda: serve(model, None), log=log, timeout_s=600)
        results = []
        for number, arena_bytes in enumerate(arenas):
            disk = scratch / f"disk-{number}"
            disk.mkdir()
            settings = {
                "dram_bytes": arena_bytes,
                "disk_path": str(disk),
                "disk_bytes": DISK_BYTES,
                "disk_free_bytes_min": 0,
            }
            run = partial(serve, model, settings)
            with_kvtier = forks.run(run, log=log, timeout_s=900)
            result = judge(arena_bytes, with_kvtier, without)
            results.append(result)
            print(
                f"arena {arena_bytes / 2**20:6,.0f} MiB: beyond it {result['beyond_arena_found_bytes'] / 2**20:6.1f} MiB of "
                f"{result['beyond_arena_allowed_bytes'] / 2**20:6.1f} allowed, growth a thousand requests "
                f"{result['growth_a_thousand_requests_bytes'] / 2**20:5.1f} MiB with {result['growth_a_thousand_requests_parts']:5,d} more "
                f"parts held, compiler "
                f"{' '.join(with_kvtier['compiler_modules']) or 'not loaded'}: {'holds' if result['holds'] else 'DOES NOT HOLD'}",
                flush=True,
            )
    result = {
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "disk_bytes": DISK_BYTES,
        "arenas": results,
        "without": without,
        "python": platform.python_version(),
    }
    out = ROOT / "bench" / "results" / "memory.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(entry["holds"] for entry in results) else 1


def _checkpoint(directory: Path) -> Path:
    from kvtier.testing.tiny_models import tiny_checkpoint

    return tiny_checkpoint("llama", directory)


if __name__ == "__main__":
    sys.exit(main())
