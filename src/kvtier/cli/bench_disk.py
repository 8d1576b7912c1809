"""`kvtier bench disk`: what the disk tier's stores make of a disk, beside fio on the same files' filesystem in the same minutes."""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.tier.disk.base import PartDone, PartStore

NAME = "disk"
HELP = "the disk stores' speed, CPU time and latency, with fio's between them"

BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
DEPTHS = (1, 4, 16, 32)
STORES = ("segment", "shared", "fio")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement, or the medians of several. Latencies are of single parts with `depth` of them always out."""

    store: str
    operation: str
    block_bytes: int
    depth: int
    gbs: float
    cpu_s_per_gb: float
    p50_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--path", type=Path, required=True, help="an existing directory on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the medians here, as a list of objects")
    parser.add_argument("--rounds", type=int, default=5, help="rounds whose medians are reported (default 5)")
    parser.add_argument("--bytes", default="512MiB", help="bytes moved for each measurement (default 512MiB)")
    parser.add_argument("--blocks", help="part sizes, comma-separated (default 64KiB,256KiB,1MiB,4MiB,8MiB)")
    parser.add_argument("--depths", help="depths, comma-separated (default 1,4,16,32)")
    parser.add_argument("--stores", default=",".join(STORES), help="which of segment,shared,fio (default all)")
    parser.add_argument("--engine", default="auto", help="auto, ring or threads (default auto)")
    parser.add_argument(
        "--durability", default="none", help="of the segment store; fio syncs nothing, so none compares (default)"
    )
    parser.add_argument(
        "--no-conditions", action="store_true", help="leave out the runs beside a busy Python thread and beside writes"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON."""
    from kvtier.config import parse_bytes
    from kvtier.errors import ConfigError

    try:
        blocks = [parse_bytes(text) for text in args.blocks.split(",")] if args.blocks else list(BLOCKS)
        depths = [int(text) for text in args.depths.split(",")] if args.depths else list(DEPTHS)
        total_bytes = parse_bytes(args.bytes)
    except ValueError as error:
        raise ConfigError(
            f"--blocks {args.blocks!r}, --depths {args.depths!r}, --bytes {args.bytes!r}: {error}"
        ) from None
    stores = args.stores.split(",")
    if not set(stores) <= set(STORES) or args.rounds < 1:
        raise ConfigError(
            f"--stores is {args.stores!r} and --rounds {args.rounds}: use some of {','.join(STORES)} and at least one round"
        )
    if any(block % 4096 for block in blocks):
        raise ConfigError(f"--blocks is {args.blocks!r}: parts are multiples of 4096 bytes")
    if not args.path.is_dir():
        raise ConfigError(f"--path is {str(args.path)!r}: name an existing directory on the disk to measure")
    if "fio" in stores and shutil.which("fio") is None:
        print("fio is not installed: its rows are left out (apt-get install fio)", file=sys.stderr)
        stores.remove("fio")
    bench = Bench(args.path, total_bytes, args.engine, args.durability)
    try:
        samples = bench.rounds(args.rounds, stores, blocks, depths, conditions=not args.no_conditions)
    finally:
        bench.clean_up()
    rows = medians(samples)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """One row for each thing measured, each figure the median of its rounds."""
    from statistics import median

    groups: dict[tuple[str, str, int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.store, sample.operation, sample.block_bytes, sample.depth), []).append(sample)
    figures = ("gbs", "cpu_s_per_gb", "p50_ms", "p99_ms")
    return [
        replace(group[0], **{name: round(median(getattr(one, name) for one in group), 4) for name in figures})
        for group in groups.values()
    ]


def print_table(rows: Sequence[Sample]) -> None:
    """Rows, fio's last for each setting, with what fraction of fio's speed each store reached."""
    fio = {(row.operation, row.block_bytes, row.depth): row for row in rows if row.store == "fio"}
    print(
        f"{'store':8} {'operation':10} {'block':>8} {'depth':>5} {'GB/s':>7} {'CPU s/GB':>9} {'p50 ms':>8} {'p99 ms':>8}  of fio"
    )
    for row in sorted(rows, key=lambda row: (row.block_bytes, row.depth, row.operation, STORES.index(row.store))):
        peer = fio.get((row.operation.split("_")[0], row.block_bytes, row.depth))
        share = f"{row.gbs / peer.gbs:6.2f}" if peer is not None and row.store != "fio" and peer.gbs else ""
        print(
            f"{row.store:8} {row.operation:10} {row.block_bytes >> 10:>6} K {row.depth:>5} {row.gbs:>7.2f} {row.cpu_s_per_gb:>9.4f} "
            f"{row.p50_ms:>8.3f} {row.p99_ms:>8.3f}  {share}"
        )


class Bench:
    """Measures on one directory, in a subdirectory of its own that `clean_up` removes."""

    def __init__(self, path: Path, total_bytes: int, engine: str, durability: str) -> None:
        from kvtier.tier.disk.io import aligned_buffer

        self.directory = path / "kvtier-bench-disk"
        self.directory.mkdir(exist_ok=True)
        self.total_bytes = total_bytes
        self.engine = engine
        self.durability = durability
        # Touched before anything is timed: the first touch of fresh memory costs a fault.
        self.arena = aligned_buffer(total_bytes)
        pattern = bytes(range(251)) * 4096
        for start in range(0, total_bytes, len(pattern)):
            self.arena[start : start + len(pattern)] = pattern[: total_bytes - start]
        self._fio_file = self.directory / "fio.dat"

    def clean_up(self) -> None:
        """Remove what the runs left."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def rounds(
        self, rounds: int, stores: Sequence[str], blocks: Sequence[int], depths: Sequence[int], *, conditions: bool
    ) -> list[Sample]:
        """All samples. Within a round each setting is measured with every store in turn, so that a disk whose speed drifts drifts for all."""
        samples: list[Sample] = []
        for number in range(rounds):
            for block in blocks:
                for depth in depths:
                    for store in stores:
                        samples += (
                            self.fio(block, depth)
                            if store == "fio"
                            else self.store(store, block, depth, conditions=conditions)
                        )
                    print(
                        f"round {number + 1} of {rounds}: {block >> 10} KiB, depth {depth}", file=sys.stderr, flush=True
                    )
        return samples

    def store(self, name: str, block: int, depth: int, *, conditions: bool) -> list[Sample]:
        """Writes into slots that were written before, reads of all, and on the segment store the two conditions."""
        store = self._open(name, block, depth)
        count = self.total_bytes // block
        keys = [b"%032d" % number for number in range(count)]
        samples = []
        try:
            if name == "segment":
                # Fresh extents of a file are slower to write than used ones, which is what a cache at its capacity meets.
                self._transfer(store, "write", keys, block)
            self._delete(store, keys)
            speed, cpu = self._transfer(store, "write", keys, block)
            p50, p99 = self._latency(store, "write", keys, block, depth)
            samples.append(Sample(name, "write", block, depth, speed, cpu, p50, p99))
            self._drop_page_cache()
            speed, cpu = self._transfer(store, "read", keys, block)
            p50, p99 = self._latency(store, "read", keys, block, depth)
            samples.append(Sample(name, "read", block, depth, speed, cpu, p50, p99))
            if conditions and name == "segment":
                samples += self._beside_python(store, keys, block, depth)
                p50, p99, speed, cpu = self._beside_writes(store, keys, block, depth)
                samples.append(Sample(name, "read_mixed", block, depth, speed, cpu, p50, p99))
            self._delete(store, keys)
        finally:
            store.close(60.0)
        return samples

    def _open(self, name: str, block: int, depth: int) -> "PartStore":
        from kvtier.tier.disk.engines import make_io
        from kvtier.tier.disk.segment_store import SegmentStore
        from kvtier.tier.disk.shared_layout import SharedLayout
        from kvtier.tier.disk.shared_store import SharedStore

        io = make_io(self.engine, iodepth=depth)
        if name == "shared":
            io.register_memory(self.arena)
            return SharedStore(SharedLayout(self.directory, f"bench-{block}", 16, 16, "bfloat16"), io=io)
        return SegmentStore(
            self.directory,
            namespace=b"bench%d" % block,
            capacity_bytes=self.total_bytes * 2,
            io=io,
            durability=self.durability,  # type: ignore[arg-type]
            arena=self.arena,
        )

    def _delete(self, store: "PartStore", keys: Sequence[bytes]) -> None:
        store.delete(keys)
        if not store.flush(60.0):
            raise TimeoutError("the disk did not finish deleting within 60 s")

    def _drop_page_cache(self) -> None:
        """Direct I/O has no use for it; where the filesystem has no direct I/O this makes reads come from the disk, if we may."""
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        except OSError:
            return

    def _part(self, index: int, block: int) -> memoryview:
        place = index * block % (self.total_bytes - block + 1) // 4096 * 4096
        return self.arena[place : place + block]

    def _submit(
        self,
        store: "PartStore",
        operation: str,
        numbers: Sequence[int],
        keys: Sequence[bytes],
        block: int,
        done: "Callable[[Sequence[PartDone]], None]",
    ) -> None:
        from kvtier.tier.disk.base import Lane, PartRead, PartWrite

        if operation == "write":
            # In the lane of demand: alone on the disk, no share of its depth is to be kept for others.
            store.submit_write(
                [PartWrite(keys[number], self._part(number, block)) for number in numbers], done, lane=Lane.DEMAND
            )
        else:
            store.submit_read([PartRead(keys[number], self._part(number, block)) for number in numbers], done)

    def _transfer(self, store: "PartStore", operation: str, keys: Sequence[bytes], block: int) -> tuple[float, float]:
        """GB/s and CPU seconds a GB of one transfer list with all of the parts."""
        ended = threading.Event()
        left = len(keys)
        failures: list[PartDone] = []

        def done(results: "Sequence[PartDone]") -> None:
            nonlocal left
            left -= len(results)
            failures.extend(one for one in results if one.failure is not None)
            if left == 0:
                ended.set()

        cpu_before, before = cpu_s(), time.perf_counter()
        self._submit(store, operation, range(len(keys)), keys, block, done)
        if not ended.wait(600.0):
            raise TimeoutError(f"the disk did not finish {len(keys)} {operation}s of {block} bytes within 600 s")
        elapsed, cpu = time.perf_counter() - before, cpu_s() - cpu_before
        if failures:
            raise RuntimeError(f"{len(failures)} of {len(keys)} {operation}s failed, for instance: {failures[0]}")
        moved_gb = len(keys) * block / 1e9
        return moved_gb / elapsed, cpu / moved_gb

    def _latency(
        self, store: "PartStore", operation: str, keys: Sequence[bytes], block: int, depth: int
    ) -> tuple[float, float]:
        """p50 and p99 in milliseconds of single parts, `depth` always out."""
        count = min(len(keys), max(200, 8 * depth))
        if operation == "write":
            self._delete(store, keys[:count])
        return percentiles(self._closed_loop(store, operation, keys, block, depth, count))

    def _closed_loop(
        self, store: "PartStore", operation: str, keys: Sequence[bytes], block: int, depth: int, count: int
    ) -> list[float]:
        ended = threading.Event()
        lock = threading.Lock()
        latencies: list[float] = []
        following = min(depth, count)

        def start(number: int) -> None:
            began = time.perf_counter()

            def done(results: "Sequence[PartDone]") -> None:
                nonlocal following
                with lock:
                    latencies.append(time.perf_counter() - began)
                    number = following
                    following += 1
                    if len(latencies) == count:
                        ended.set()
                if number < count:
                    start(number)

            self._submit(store, operation, [number % len(keys)], keys, block, done)

        for number in range(following):
            start(number)
        if not ended.wait(600.0):
            raise TimeoutError(f"the disk did not finish {count} single {operation}s within 600 s")
        return latencies

    def _beside_python(self, store: "PartStore", keys: Sequence[bytes], block: int, depth: int) -> list[Sample]:
        """Both ways with another thread of this process busy in pure Python. CPU time would be that thread's: it is left at 0."""
        stop = False

        def busy() -> None:
            turns = 0
            while not stop:
                turns += 1

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            reads, _ = self._transfer(store, "read", keys, block)
            self._delete(store, keys)
            writes, _ = self._transfer(store, "write", keys, block)
        finally:
            stop = True
            thread.join()
        return [
            Sample("segment", f"{what}_busy", block, depth, speed, 0.0, 0.0, 0.0)
            for what, speed in (("read", reads), ("write", writes))
        ]

    def _beside_writes(
        self, store: "PartStore", keys: Sequence[bytes], block: int, depth: int
    ) -> tuple[float, float, float, float]:
        """Demand reads with background writes never ceasing: p50 and p99, and the reads' speed."""
        from kvtier.tier.disk.base import Lane, PartWrite

        stop = threading.Event()
        extra = [b"w%031d" % number for number in range(min(len(keys) // 2, 4 * depth + 8))]

        def write() -> None:
            while not stop.is_set():
                ended = threading.Semaphore(0)
                release = ended.release
                writes = [PartWrite(key, self._part(number, block)) for number, key in enumerate(extra)]
                store.submit_write(writes, lambda results, release=release: release(len(results)), lane=Lane.WRITE)  # type: ignore[misc]
                for _ in extra:
                    ended.acquire(timeout=60.0)
                store.delete(extra)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            count = min(len(keys), max(200, 8 * depth))
            cpu_before, before = cpu_s(), time.perf_counter()
            latencies = self._closed_loop(store, "read", keys, block, depth, count)
            elapsed, cpu = time.perf_counter() - before, cpu_s() - cpu_before
        finally:
            stop.set()
            thread.join()
            store.flush(60.0)
        return (*percentiles(latencies), count * block / 1e9 / elapsed, cpu / (count * block / 1e9))

    def fio(self, block: int, depth: int) -> list[Sample]:
        """fio's io_uring engine with direct I/O on a file of the same size that was written before."""
        if not self._fio_file.exists():
            self._run_fio("write", min(4 << 20, self.total_bytes), 16)
        return [self._fio_sample(operation, block, depth) for operation in ("write", "read")]

    def _fio_sample(self, operation: str, block: int, depth: int) -> Sample:
        job = self._run_fio(operation, block, depth)
        side = job[operation]
        moved_gb = side["io_bytes"] / 1e9
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        marks = side["clat_ns"].get("percentile", {})
        return Sample(
            "fio",
            operation,
            block,
            depth,
            side["bw_bytes"] / 1e9,
            cpu / moved_gb,
            marks.get("50.000000", 0) / 1e6,
            marks.get("99.000000", 0) / 1e6,
        )

    def _run_fio(self, operation: str, block: int, depth: int) -> dict[str, Any]:
        command = [
            "fio", "--name=bench", f"--filename={self._fio_file}", f"--rw={operation}", f"--bs={block}", f"--size={self.total_bytes // block * block}",
            "--ioengine=io_uring", "--direct=1", f"--iodepth={depth}", "--overwrite=1", "--fallocate=none", "--output-format=json",
        ]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        return job


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads, the kernel's helpers for them too."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def percentiles(latencies_s: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(latencies_s)
    return tuple(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3 for share in (0.50, 0.99))  # type: ignore[return-value]
