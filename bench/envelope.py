"""What the envelope costs: writes and reads of 1 MiB with it and without it, in turn, in one run.

    python bench/envelope.py DIR [--rounds 400] [--json F]

`direct`: a file in DIR, O_DIRECT, as the disk tier moves a part: copied from the engine's memory into a slot, sealed and written; read, opened and copied back;
against the same without sealing and opening. `direct x16`: the same with 16 in flight on 4 threads, as a transfer list is moved: sums overlap with I/O, times are of all 16.
`stream`: 64 of them one after the other through kvtier's own I/O engine with 16 in flight, sealed by the thread that submits and verified by the thread that takes what was read, as the storer
and the loader of the data plane do it: a sum is done while other parts are on their way. Times are of all 64.
`cached`: one at a time through the page cache. `memory`: put and get of a MEMORY store with a copy each way, bare against pack and unpack.
`summed` computes the checksum and nothing else. What the envelope adds is given as a share of the bare time and of the summed one. Linux.
"""

import argparse
import json
import mmap
import os
import queue
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from kvtier.memory.bytestore import MemoryByteStore
from kvtier.record.envelope import Identity, head_for, open_slot, pack, seal_slot, slot_bytes, unpack, xxh3
from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import Job, Op, Step, address_of, aligned_buffer

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


class Stream:
    """Parts one after the other through kvtier's own I/O engine, BATCH of them in flight."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self.arrived: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self.slots = [aligned_buffer(SLOT_BYTES) for _ in range(BATCH + 4)]
        for slot in self.slots:
            slot[:PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
            seal_slot(slot, WHO, PAYLOAD_BYTES)
            self.free.put(slot)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        for number in range(2 * SLOTS):
            os.pwrite(self.file, self.slots[0], number * SLOT_BYTES)
        self.io = make_io("auto", iodepth=BATCH)

    def submit(self, op: Op, length: int, place: int, before: Callable[[memoryview], Any], to: Any) -> None:
        slot = self.free.get()
        before(slot)
        step = Step(op, fd=self.file, offset=place * SLOT_BYTES, buffer=slot[:length], address=address_of(slot))

        def ended(jobs: list[Job]) -> None:
            for job in jobs:
                to.put(job.tag)

        lane = Lane.WRITE if op is Op.WRITE else Lane.DEMAND
        self.io.submit([Job((step,), lane, None, slot)], ended)

    def write(self, before: Callable[[memoryview], Any], length: int) -> None:
        for place in range(SLOTS):
            self.submit(Op.WRITE, length, place, before, self.free)
        for slot in [self.free.get() for _ in self.slots]:
            self.free.put(slot)

    def read(self, after: Callable[[memoryview], Any], length: int) -> None:
        asked = 0
        for ended in range(SLOTS):
            while asked < min(SLOTS, ended + BATCH):
                # Slots that bare writes never touched.
                self.submit(Op.READ, length, SLOTS + asked, nothing, self.arrived)
                asked += 1
            slot = self.arrived.get()
            after(slot)
            self.free.put(slot)

    def done(self) -> None:
        self.io.close(10.0)
        os.close(self.file)
        self.path.unlink()

    def cases(self) -> tuple[dict[str, Callable[[int], Any]], Callable[[], object]]:
        cases: dict[str, Callable[[int], Any]] = {
            "write bare": lambda number: self.write(nothing, PAYLOAD_BYTES),
            "write summed": lambda number: self.write(checksum, PAYLOAD_BYTES),
            "write": lambda number: self.write(seal, SLOT_BYTES),
            "read bare": lambda number: self.read(nothing, PAYLOAD_BYTES),
            "read summed": lambda number: self.read(checksum, PAYLOAD_BYTES),
            "read": lambda number: self.read(verify, SLOT_BYTES),
        }
        return cases, self.done


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
        "stream": lambda: Stream(args.directory / "envelope.bench").cases(),
        "cached": lambda: file_cases(args.directory / "envelope.bench", 0),
        "memory": memory_cases,
    }
    for name, make in media.items():
        cases, done = make()
        result[name] = measure(cases, args.rounds // {"direct x16": 4, "stream": 12}.get(name, 1))
        done()
        print(name, result[name])
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
