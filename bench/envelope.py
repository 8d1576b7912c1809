"""What the envelope costs: writes and reads of 1 MiB with it and without it, in turn, in one run.

    python bench/envelope.py DIR [--rounds 400] [--json F]

`direct`: a file in DIR, O_DIRECT, as the disk tier moves a part: copied from the engine's memory into a slot, sealed and written; read, opened and copied back;
against the same without sealing and opening. `direct x16`: the same with 16 in flight on 4 threads, as a transfer list is moved: sums overlap with I/O, times are of all 16.
`cached`: one at a time through the page cache. `memory`: put and get of a MEMORY store with a copy each way, bare against pack and unpack.
`summed` computes the checksum and nothing else. What the envelope adds is given as a share of the bare time and of the summed one. Linux.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from kvtier.memory.bytestore import MemoryByteStore
from kvtier.record.envelope import Identity, head_for, open_slot, pack, seal_slot, slot_bytes, unpack, xxh3

PAYLOAD_BYTES = 1 << 20
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
SLOTS = 64
BATCH = 16
WHO = Identity(b"n" * 32, b"k" * 32, 1, 0, 0)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def seal(slot: memoryview) -> Any:
    return seal_slot(slot, WHO, PAYLOAD_BYTES)


def verify(slot: memoryview) -> Any:
    return open_slot(slot, WHO, PAYLOAD_BYTES)


def checksum(slot: memoryview) -> Any:
    return xxh3(slot[:PAYLOAD_BYTES])


def nothing(slot: memoryview) -> Any:
    return None


def file_cases(path: Path, flags: int) -> tuple[dict[str, Callable[[int], Any]], Callable[[], object]]:
    slot = memoryview(mmap.mmap(-1, SLOT_BYTES))
    engine = memoryview(bytearray(os.urandom(PAYLOAD_BYTES)))
    slot[:PAYLOAD_BYTES] = engine
    target = memoryview(mmap.mmap(-1, SLOT_BYTES))
    file = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    seal_slot(slot, WHO, PAYLOAD_BYTES)
    for number in range(SLOTS):
        os.pwrite(file, slot, number * SLOT_BYTES)

    def write(number: int, before: Callable[[memoryview], Any], length: int) -> None:
        slot[:PAYLOAD_BYTES] = engine
        before(slot)
        os.pwrite(file, slot[:length], number % SLOTS * SLOT_BYTES)

    def read(number: int, after: Callable[[memoryview], Any], length: int) -> None:
        os.preadv(file, [target[:length]], number % SLOTS * SLOT_BYTES)
        after(target)
        engine[:] = target[:PAYLOAD_BYTES]

    cases: dict[str, Callable[[int], Any]] = {
        # The same payload each time, so that the head which a bare write leaves behind still fits.
        "write bare": lambda number: write(number, nothing, PAYLOAD_BYTES),
        "write summed": lambda number: write(number, checksum, PAYLOAD_BYTES),
        "write": lambda number: write(number, seal, SLOT_BYTES),
        "read bare": lambda number: read(number, nothing, PAYLOAD_BYTES),
        "read summed": lambda number: read(number, checksum, PAYLOAD_BYTES),
        "read": lambda number: read(number, verify, SLOT_BYTES),
    }

    def done() -> None:
        os.close(file)
        path.unlink()

    return cases, done


def batch_cases(path: Path) -> tuple[dict[str, Callable[[int], Any]], Callable[[], object]]:
    slots = [memoryview(mmap.mmap(-1, SLOT_BYTES)) for _ in range(BATCH)]
    for slot in slots:
        slot[:PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
        seal_slot(slot, WHO, PAYLOAD_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    pool = ThreadPoolExecutor(4)
    for number in range(SLOTS):
        os.pwrite(file, slots[0], number * SLOT_BYTES)

    def place(number: int, index: int) -> int:
        return (number * BATCH + index) % SLOTS * SLOT_BYTES

    def write(number: int, before: Callable[[memoryview], Any], length: int) -> None:
        writes = []
        for index, slot in enumerate(slots):
            before(slot)
            writes.append(pool.submit(os.pwrite, file, slot[:length], place(number, index)))
        for done in writes:
            done.result()

    def read(number: int, after: Callable[[memoryview], Any], length: int) -> None:
        reads = {
            pool.submit(os.preadv, file, [slot[:length]], place(number, index)): slot
            for index, slot in enumerate(slots)
        }
        for done in as_completed(reads):
            done.result()
            after(reads[done])

    for number in range(SLOTS // BATCH):
        write(number, seal, SLOT_BYTES)
    # Reads look at slots that bare writes never touched.
    half = SLOTS // BATCH // 2
    cases: dict[str, Callable[[int], Any]] = {
        "write bare": lambda number: write(number % half, nothing, PAYLOAD_BYTES),
        "write summed": lambda number: write(number % half, checksum, PAYLOAD_BYTES),
        "write": lambda number: write(number % half, seal, SLOT_BYTES),
        "read bare": lambda number: read(half + number % half, nothing, PAYLOAD_BYTES),
        "read summed": lambda number: read(half + number % half, checksum, PAYLOAD_BYTES),
        "read": lambda number: read(half + number % half, verify, SLOT_BYTES),
    }

    def done() -> None:
        pool.shutdown()
        os.close(file)
        path.unlink()

    return cases, done


def memory_cases() -> tuple[dict[str, Callable[[int], Any]], Callable[[], object]]:
    store = MemoryByteStore(8 << 20)
    source, target = memoryview(bytearray(os.urandom(PAYLOAD_BYTES))), memoryview(bytearray(PAYLOAD_BYTES))
    key = iter(range(1 << 40))

    def bare_put(_: int) -> None:
        store.put(b"%d" % next(key), source)

    def put(_: int) -> None:
        store.put(b"%d" % next(key), pack(head_for(WHO, source), source))

    store.put(b"bare", bytes(source))
    store.put(b"summed", bytes(source))
    store.put(b"packed", pack(head_for(WHO, source), source))
    owner = store.owner("bench")
    owner.lease(b"bare")
    owner.lease(b"summed")
    owner.lease(b"packed")

    def bare_get(_: int) -> None:
        view = store.get(b"bare")
        assert view is not None
        target[:] = view

    def get(_: int) -> None:
        view = store.get(b"packed")
        assert view is not None
        target[:] = unpack(view, WHO)[1]

    def summed_put(_: int) -> None:
        xxh3(source)
        store.put(b"%d" % next(key), source)

    def summed_get(_: int) -> None:
        view = store.get(b"summed")
        assert view is not None
        xxh3(view)
        target[:] = view

    cases: dict[str, Callable[[int], Any]] = {
        "write bare": bare_put,
        "write summed": summed_put,
        "write": put,
        "read bare": bare_get,
        "read summed": summed_get,
        "read": get,
    }
    return cases, owner.close


def measure(cases: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 5):
        for name in random.Random(number).sample(list(cases), len(cases)):  # so that none always finds the caches warm
            work = cases[name]
            times[name].append(seconds(lambda work=work, number=number: work(number)))  # type: ignore[misc]
    found = {name: statistics.median(values[5:]) * 1e6 for name, values in times.items()}
    result = {name.replace(" ", "_") + "_us": round(value, 1) for name, value in found.items()}
    for way in ("write", "read"):
        result[f"{way}_added"] = round(found[way] / found[f"{way} bare"] - 1, 4)
        result[f"{way}_added_to_summed"] = round(found[way] / found[f"{way} summed"] - 1, 4)
    return result


def own_cost(rounds: int) -> dict[str, float]:
    """Microseconds of sealing and opening a slot in memory, of the checksum in them, and what is the envelope's own."""
    slot = memoryview(bytearray(SLOT_BYTES))
    slot[:PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
    times: dict[str, list[float]] = {"checksum": [], "seal": [], "open": []}
    for _ in range(rounds):
        times["checksum"].append(seconds(lambda: checksum(slot)))
        times["seal"].append(seconds(lambda: seal(slot)))
        times["open"].append(seconds(lambda: verify(slot)))
    found = {name + "_us": statistics.median(values) * 1e6 for name, values in times.items()}
    found |= {f"{name}_own_us": found[f"{name}_us"] - found["checksum_us"] for name in ("seal", "open")}
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "payload_bytes": PAYLOAD_BYTES,
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "in_memory": own_cost(args.rounds),
    }
    print("in memory", result["in_memory"])
    media = {
        "direct": lambda: file_cases(args.directory / "envelope.bench", os.O_DIRECT),
        "direct x16": lambda: batch_cases(args.directory / "envelope.bench"),
        "cached": lambda: file_cases(args.directory / "envelope.bench", 0),
        "memory": memory_cases,
    }
    for name, make in media.items():
        cases, done = make()
        result[name] = measure(cases, args.rounds // 4 if name == "direct x16" else args.rounds)
        done()
        print(name, result[name])
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
