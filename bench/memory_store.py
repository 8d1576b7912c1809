"""What the MEMORY byte store costs.

    python bench/memory_store.py [--json F] [--policy lru]

`get_4kib_us`: a get of 4 KiB among 10,000 records. `put_evict_us`: a put that evicts one record, in stores of 10,000 and of 1,000,000 records, in turn.
`beside_payload_bytes`: resident memory for each record beside its payload. Times are of the thread's CPU, medians of rounds.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from kvtier.memory.bytestore import MemoryByteStore

ROUNDS = 15
STEP = 10_000


def filled(records: int, value: bytes, policy: str) -> MemoryByteStore:
    store = MemoryByteStore(records * len(value), policy=policy)
    for number in range(records):
        store.put(number.to_bytes(32, "little"), value)
    return store


def get_us(policy: str) -> float:
    store = filled(10_000, bytes(4096), policy)
    keys = [number.to_bytes(32, "little") for number in range(10_000)]
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for key in keys:
            store.get(key)
        times.append((time.thread_time() - start) / len(keys) * 1e6)
    return statistics.median(times)


def put_evict_us(policy: str) -> dict[int, float]:
    stores = {records: filled(records, bytes(64), policy) for records in (10_000, 1_000_000)}
    times: dict[int, list[float]] = {records: [] for records in stores}
    count = 1
    for _ in range(ROUNDS):
        for records, store in stores.items():
            keys = [(count + number).to_bytes(32, "big") for number in range(STEP)]
            count += STEP
            start = time.thread_time()
            for key in keys:
                store.put(key, bytes(64))
            times[records].append((time.thread_time() - start) / STEP * 1e6)
            assert len(store) == records
    return {records: statistics.median(values) for records, values in times.items()}


def put_evict_leased_us(policy: str) -> float:
    """Among 10,000 records of which the oldest half is leased."""
    store = filled(10_000, bytes(64), policy)
    times = []
    with store.owner("bench") as owner:
        leases = [owner.lease(number.to_bytes(32, "little")) for number in range(5_000)]
        for number in range(5_000, 10_000):
            store.get(number.to_bytes(32, "little"))
        for step in range(ROUNDS):
            keys = [(step * STEP + number + 1).to_bytes(32, "big") for number in range(STEP)]
            start = time.thread_time()
            for key in keys:
                store.put(key, bytes(64))
            times.append((time.thread_time() - start) / STEP * 1e6)
        assert len(leases) == 5_000
    return statistics.median(times)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def beside_payload_bytes(policy: str) -> float:
    before, records = resident_bytes(), 200_000
    store = MemoryByteStore(1 << 40, policy=policy)
    for number in range(records):
        store.put(number.to_bytes(32, "little"), bytes(bytearray(256)))
    return (resident_bytes() - before) / records - 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    beside = beside_payload_bytes(args.policy)
    puts = put_evict_us(args.policy)
    figures = {
        "policy": args.policy,
        "load_average": round(os.getloadavg()[0], 1),
        "get_4kib_us": round(get_us(args.policy), 2),
        "put_evict_us": {str(records): round(value, 2) for records, value in puts.items()},
        "put_evict_half_leased_us": round(put_evict_leased_us(args.policy), 2),
        "put_evict_ratio": round(puts[1_000_000] / puts[10_000], 2),
        "beside_payload_bytes": round(beside),
    }
    print(json.dumps(figures, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
