"""A process that stores, deletes and reads as fast as it can, to be killed at any moment; and the one that kills it and looks what is left.

python storm.py CHILD <directory> <engine> <durability> <seed>   writes one line to stdout for each acknowledged event
python storm.py <directory> <kills> <engine> <durability>        the whole experiment
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.record.envelope import Identity, open_slot, seal_slot
from kvtier.record.errors import RecordError
from kvtier.testing.part_store import Waiter, pattern
from kvtier.tier.disk.base import PartDone, PartRead, PartWrite
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import PAGE_BYTES, aligned_buffer
from kvtier.tier.disk.segment_store import SegmentStore

NAMESPACE = b"storm"
CAPACITY_BYTES = 600 * PAGE_BYTES
KEYS = 400


def key_of(number: int) -> bytes:
    return b"part-%08d" % number


def pages_of(number: int) -> int:
    return 1 + number % 5


def sealed(number: int) -> memoryview:
    """The one and only bytes of part `number`."""
    slot = pattern(number, pages_of(number) * PAGE_BYTES)
    seal_slot(slot, Identity(NAMESPACE, key_of(number)), slot.nbytes - 512)
    return slot


def open_store(directory: Path, engine: str, durability: str) -> SegmentStore:
    return SegmentStore(
        directory,
        namespace=NAMESPACE,
        capacity_bytes=CAPACITY_BYTES,
        durability=durability,  # type: ignore[arg-type]
        io=make_io(engine),
        grow_bytes=16 * PAGE_BYTES,
    )


def child(directory: Path, engine: str, durability: str, seed: int) -> None:
    """Announce `d N` before deleting part N, `w N` once its write was acknowledged."""
    store = open_store(directory, engine, durability)
    generator = random.Random(seed)
    out = sys.stdout.buffer.raw if hasattr(sys.stdout.buffer, "raw") else sys.stdout.buffer
    present = {int(entry.key[5:]) for entry in store.entries()}
    acknowledged = set(present)
    lock = threading.Lock()
    out.write(b"ready\n")

    def done(results: Sequence[PartDone]) -> None:
        numbers = [int(one.key[5:]) for one in results if one.failure is None]
        with lock:
            out.write(b"".join(b"w %d\n" % number for number in numbers))
            acknowledged.update(numbers)
            present.difference_update(int(one.key[5:]) for one in results if one.failure is not None)

    while True:
        # One write of a key at a time, and only what was acknowledged is deleted: then the order of the lines is the order of events.
        with lock:
            room = CAPACITY_BYTES // PAGE_BYTES - sum(map(pages_of, present))
            batch = [n for n in generator.sample(range(KEYS), generator.randrange(1, 24)) if n not in present]
            needed = sum(map(pages_of, batch))
            victims = []
            for victim in sorted(acknowledged, key=lambda _: generator.random()):
                if needed <= room:
                    break
                victims.append(victim)
                room += pages_of(victim)
            acknowledged.difference_update(victims)
            present.difference_update(victims)
            present.update(batch)
            out.write(b"".join(b"d %d\n" % victim for victim in victims))
        store.delete([key_of(victim) for victim in victims])
        store.submit_write([PartWrite(key_of(number), sealed(number)) for number in batch], done)
        if generator.random() < 0.3:
            store.flush(5.0)
        if generator.random() < 0.02:
            store.compact()


@dataclass
class Findings:
    """What a run of kills showed."""

    kills: int = 0
    acknowledged: int = 0
    verified: int = 0
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)


def kill_and_look(
    directory: Path, engine: str, durability: str, seed: int, findings: Findings, known: set[int]
) -> None:
    """One life of the child. `known` are the parts that must be there: acknowledged, and no deletion begun since."""
    process = subprocess.Popen(
        [sys.executable, __file__, "CHILD", str(directory), engine, durability, str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(random.Random(seed).uniform(0.0, 0.4))
    process.kill()
    lines = process.stdout.read().split(b"\n")
    process.wait()
    for line in lines[:-1]:
        number = int(line[2:])
        if line.startswith(b"w"):
            known.add(number)
            findings.acknowledged += 1
        else:
            known.discard(number)
    findings.kills += 1
    look(directory, engine, durability, findings, known)


def look(directory: Path, engine: str, durability: str, findings: Findings, known: set[int]) -> None:
    """Open what is left, read all of it, and verify every byte."""
    store = open_store(directory, engine, durability)
    entries = {int(entry.key[5:]): entry.stored_bytes for entry in store.entries()}
    findings.lost += [f"kill {findings.kills}: part {number}" for number in known - set(entries)]
    stats = store.stats()
    assert stats.used_bytes <= CAPACITY_BYTES
    assert stats.disk_bytes <= CAPACITY_BYTES
    buffers = {number: aligned_buffer(length) for number, length in entries.items()}
    waiter = Waiter(len(buffers))
    store.submit_read([PartRead(key_of(number), buffer) for number, buffer in buffers.items()], waiter)
    failures = waiter.failures()
    for number, buffer in buffers.items():
        if failures[key_of(number)] is not None:
            findings.torn.append(f"kill {findings.kills}: part {number}: {failures[key_of(number)]}")
            continue
        try:
            open_slot(buffer, Identity(NAMESPACE, key_of(number)), None)
        except RecordError as error:
            findings.torn.append(f"kill {findings.kills}: part {number}: {error}")
            continue
        if buffer != sealed(number):
            findings.torn.append(f"kill {findings.kills}: part {number} has other bytes")
        findings.verified += 1
    known.clear()
    known.update(entries)
    store.close(30.0)


def storm(directory: Path, kills: int, engine: str, durability: str, *, first_seed: int = 0) -> Findings:
    """Kill the child `kills` times on one directory."""
    findings = Findings()
    known: set[int] = set()
    for turn in range(kills):
        kill_and_look(directory, engine, durability, first_seed + turn, findings, known)
    return findings


if __name__ == "__main__":
    if sys.argv[1] == "CHILD":
        child(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        began = time.monotonic()
        seen = storm(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
        sys.stdout.write(
            f"{seen.kills} kills in {time.monotonic() - began:.0f} s: {seen.acknowledged} writes acknowledged, {seen.verified} parts verified, "
            f"{len(seen.lost)} lost, {len(seen.torn)} torn or another's\n"
        )
        sys.exit(bool(seen.lost or seen.torn))
