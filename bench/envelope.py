"""What the envelope costs: writes and reads of 1 MiB with it and without it, in turn, in one run.

    python bench/envelope.py DIR [--rounds 400] [--json F]

`stream`: 64 of them one after the other through kvtier's own I/O engine with 16 in flight, sealed by the thread that submits and verified by the thread that takes what was read, as the storer
and the loader of the data plane do it: a sum is done while other parts are on their way. Times are of all 64.
`alone`: one at a time, nothing else in flight: copied from the engine's memory into a slot, sealed and written; read, opened and copied back; against the same without sealing and opening.
`memory`: put and get of a MEMORY store with a copy each way, bare against pack and unpack.

The files in DIR are opened with O_DIRECT, slots lie in an arena. `summed` computes the checksum and nothing else; `touched` reads a word of each cache line, the least that any check of all bytes can do.
What the envelope adds is given as a share of the bare time and of the summed one. Linux.
"""

import argparse
import functools
import json
import os
import queue
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.memory.arena import Arena
from kvtier.memory.bytestore import MemoryByteStore
from kvtier.record.envelope import Identity, head_for, open_slot, pack, seal_slot, slot_bytes, unpack, xxh3
from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import Job, Op, Step, address_of

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


def touch(slot: memoryview) -> Any:
    return np.frombuffer(slot[:PAYLOAD_BYTES], np.uint64)[::8].sum()


def nothing(slot: memoryview) -> Any:
    return None


# What is done to a slot before it is written, and after it was read.
BEFORE = {"bare": nothing, "touched": touch, "summed": checksum, "": seal}
AFTER = {"bare": nothing, "touched": touch, "summed": checksum, "": verify}


Move = Callable[[Callable[[memoryview], Any], int], None]
"""A write or a read: what to do to the slot, and how many of its bytes to move."""


def cases_of(write: Move, read: Move) -> dict[str, Callable[[], Any]]:
    """Every case by its name."""
    cases: dict[str, Callable[[], Any]] = {}
    for way, move, arms in (("write", write, BEFORE), ("read", read, AFTER)):
        for arm, work in arms.items():
            cases[f"{way} {arm}".strip()] = functools.partial(move, work, PAYLOAD_BYTES if arm else SLOT_BYTES)
    return cases


def sealed_slots(arena: Arena, count: int) -> list[memoryview]:
    slots = [arena.view(number * SLOT_BYTES, SLOT_BYTES) for number in range(count)]
    for slot in slots:
        slot[:PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
        seal(slot)
    return slots


class Alone:
    """One part at a time, through one system call each, in slots that are not in a cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arena = Arena(SLOTS * SLOT_BYTES)
        self.slots = sealed_slots(self.arena, SLOTS)
        self.engine = Arena(SLOTS * PAYLOAD_BYTES)
        self.engine.array[:] = 1
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        # Bare writes leave no head behind: what is read lies in another half of the file.
        for place in range(2 * SLOTS):
            os.pwrite(self.file, self.slots[place % SLOTS], place * SLOT_BYTES)
        self.turn = 0

    def next(self) -> tuple[int, memoryview, memoryview]:
        self.turn = (self.turn + 1) % SLOTS
        return self.turn, self.slots[self.turn], self.engine.view(self.turn * PAYLOAD_BYTES, PAYLOAD_BYTES)

    def write(self, work: Callable[[memoryview], Any], length: int) -> None:
        place, slot, engine = self.next()
        slot[:PAYLOAD_BYTES] = engine
        work(slot)
        os.pwrite(self.file, slot[:length], place * length)

    def read(self, work: Callable[[memoryview], Any], length: int) -> None:
        place, slot, engine = self.next()
        os.preadv(self.file, [slot[:length]], SLOTS * SLOT_BYTES + place * length)
        work(slot)
        engine[:] = slot[:PAYLOAD_BYTES]

    def done(self) -> None:
        os.close(self.file)
        self.path.unlink()


class Stream:
    """Parts one after the other through kvtier's own I/O engine, BATCH of them in flight."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self.arrived: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self.arena = Arena((BATCH + 4) * SLOT_BYTES)
        self.slots = sealed_slots(self.arena, BATCH + 4)
        for slot in self.slots:
            self.free.put(slot)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        for number in range(2 * SLOTS):
            os.pwrite(self.file, self.slots[0], number * SLOT_BYTES)
        self.io = make_io("auto", iodepth=BATCH)

    def submit(self, op: Op, length: int, place: int, before: Callable[[memoryview], Any], to: Any) -> None:
        slot = self.free.get()
        before(slot)
        step = Step(op, fd=self.file, offset=place, buffer=slot[:length], address=address_of(slot))

        def ended(jobs: list[Job]) -> None:
            for job in jobs:
                to.put(job.tag)

        lane = Lane.WRITE if op is Op.WRITE else Lane.DEMAND
        self.io.submit([Job((step,), lane, None, slot)], ended)

    def write(self, work: Callable[[memoryview], Any], length: int) -> None:
        for place in range(SLOTS):
            self.submit(Op.WRITE, length, place * length, work, self.free)
        for slot in [self.free.get() for _ in self.slots]:
            self.free.put(slot)

    def read(self, work: Callable[[memoryview], Any], length: int) -> None:
        asked = 0
        for ended in range(SLOTS):
            while asked < min(SLOTS, ended + BATCH):
                self.submit(Op.READ, length, SLOTS * SLOT_BYTES + asked * length, nothing, self.arrived)
                asked += 1
            slot = self.arrived.get()
            work(slot)
            self.free.put(slot)

    def done(self) -> None:
        self.io.close(10.0)
        os.close(self.file)
        self.path.unlink()


def memory_cases() -> tuple[dict[str, Callable[[], Any]], Callable[[], object]]:
    store = MemoryByteStore(8 << 20)
    source, target = memoryview(bytearray(os.urandom(PAYLOAD_BYTES))), memoryview(bytearray(PAYLOAD_BYTES))
    key = iter(range(1 << 40))

    def bare_put() -> None:
        store.put(b"%d" % next(key), source)

    def put() -> None:
        store.put(b"%d" % next(key), pack(head_for(WHO, source), source))

    store.put(b"bare", bytes(source))
    store.put(b"summed", bytes(source))
    store.put(b"packed", pack(head_for(WHO, source), source))
    owner = store.owner("bench")
    owner.lease(b"bare")
    owner.lease(b"summed")
    owner.lease(b"packed")

    def bare_get() -> None:
        view = store.get(b"bare")
        assert view is not None
        target[:] = view

    def get() -> None:
        view = store.get(b"packed")
        assert view is not None
        target[:] = unpack(view, WHO)[1]

    def summed_put() -> None:
        xxh3(source)
        store.put(b"%d" % next(key), source)

    def summed_get() -> None:
        view = store.get(b"summed")
        assert view is not None
        xxh3(view)
        target[:] = view

    cases: dict[str, Callable[[], Any]] = {
        "write bare": bare_put,
        "write summed": summed_put,
        "write": put,
        "read bare": bare_get,
        "read summed": summed_get,
        "read": get,
    }
    return cases, owner.close


def measure(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 5):
        for name in random.Random(number).sample(list(cases), len(cases)):  # so that none always finds the caches warm
            times[name].append(seconds(cases[name]))
    found = {name: statistics.median(values[5:]) * 1e6 for name, values in times.items()}
    result = {name.replace(" ", "_") + "_us": round(value, 1) for name, value in found.items()}
    for way in ("write", "read"):
        result[f"{way}_added"] = round(found[way] / found[f"{way} bare"] - 1, 4)
        if f"{way} touched" in found:
            result[f"{way}_added_by_touching"] = round(found[f"{way} touched"] / found[f"{way} bare"] - 1, 4)
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
    path = args.directory / "envelope.bench"
    media: dict[str, type[Stream] | type[Alone]] = {"stream": Stream, "alone": Alone}
    for name, kind in media.items():
        medium = kind(path)
        rounds = args.rounds // 4 if name == "stream" else args.rounds
        result[name] = measure(cases_of(medium.write, medium.read), rounds)
        medium.done()
        print(name, result[name])
    cases, done = memory_cases()
    result["memory"] = measure(cases, args.rounds)
    done()
    print("memory", result["memory"])
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
