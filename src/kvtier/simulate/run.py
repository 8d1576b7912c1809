"""The real control plane on a trace: `TieredStore` decides, simulated media and engines take the time.

Every request is looked up, loads what is there, prefills the rest, and stores it; disk writes, deletes and their outcomes go
through the store's own actions. Only bytes and time are simulated, so what this finds about the store and its policies holds
for the engine too, as far as the media are as said. Beside it, the same requests go to the same engines without any cache.

Memory does not grow with the trace: what is held are the tiers' records, the requests in flight and two histograms.
"""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvtier.errors import ConfigError
from kvtier.policy.advice import ReuseCurve
from kvtier.policy.base import RequestInfo
from kvtier.simulate.media import Engines, Medium, PrefillSpeed, Spread
from kvtier.simulate.replay import KEY_BYTES
from kvtier.simulate.trace import Trace, TraceRequest
from kvtier.store.moves import NO_SLOT, ResetTier, Source, WriteDone, WriteParts
from kvtier.store.tiered import Part, StoreLimits, TieredStore


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulated machine is. Bandwidths in bytes a second.

    Attributes:
        kv_bytes_per_token: bytes of KV of one token; 131,072 is an 8B model with 8 KV heads in 16 bits.
        dram_bytes, disk_bytes: capacities of the tiers, 0 for no disk.
        copy_bytes_per_s: between engine and DRAM, each way.
        disk_read_bytes_per_s, disk_write_bytes_per_s, disk_latency_s: the disk; reads and writes have a queue each.
        curve: the engine's prefill.
        engines: how many there are, 0 for as many as keep up without a cache at four fifths of their time.
        decode_tokens_s: how fast an answer is generated.
    """

    dram_bytes: int
    disk_bytes: int = 0
    kv_bytes_per_token: int = 131_072
    copy_bytes_per_s: float = 25e9
    disk_read_bytes_per_s: float = 6e9
    disk_write_bytes_per_s: float = 3e9
    disk_latency_s: float = 100e-6
    curve: PrefillSpeed = field(default_factory=PrefillSpeed)
    engines: int = 0
    decode_tokens_s: float = 50.0


class RunResult(msgspec.Struct, frozen=True):
    """What a run came to. Rates are blocks over blocks asked; times are TTFT."""

    trace: str
    policy: str
    dram_bytes: int
    disk_bytes: int
    block_bytes: int
    engines: int
    requests: int
    asked_blocks: int
    dram_hit_blocks: int
    disk_hit_blocks: int
    hit_rate: float
    written_bytes: int
    read_bytes: int
    prefill_saved_s: float
    prefill_s: float
    ttft_s: dict[str, float]
    ttft_without_s: dict[str, float]
    ttft_curve: list[tuple[float, float]]
    ttft_without_curve: list[tuple[float, float]]
    advice_disk: dict[str, float]
    counters: dict[str, int]
    skipped_lines: int


def engines_needed(trace: Iterable[TraceRequest], curve: PrefillSpeed) -> int:
    """Engines that spend four fifths of the trace's time on it without a cache."""
    work_s, last_s = 0.0, 0.0
    for request in trace:
        work_s += curve.prefill_s(0, request.input_tokens)
        last_s = request.time_s
    return max(1, round(work_s / max(last_s, 1.0) / 0.8))


class Simulation:
    """One run of one policy over one trace."""

    def __init__(self, machine: Machine, policy: str, tokens_per_block: int, engines: int) -> None:
        self.machine = machine
        self.block_bytes = machine.kv_bytes_per_token * tokens_per_block
        self.tokens_per_block = tokens_per_block
        self.store = TieredStore(
            StoreLimits(
                (self.block_bytes,),
                machine.dram_bytes,
                machine.disk_bytes,
                dram_policy=policy,
                disk_policy=policy,
                write_deadline_s=float("inf"),
            )
        )
        self.engines = Engines(engines, machine.curve)
        self.without = Engines(engines, machine.curve)
        self._copies = Medium(machine.copy_bytes_per_s)
        self._reads = Medium(machine.disk_read_bytes_per_s, machine.disk_latency_s)
        self._writes = Medium(machine.disk_write_bytes_per_s, machine.disk_latency_s)
        self.ttft, self.ttft_without = Spread(), Spread()
        self.curve = ReuseCurve()
        self.requests = self.asked = self.dram_hits = self.disk_hits = 0
        self.written_bytes = self.read_bytes = 0
        self.saved_s = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()

    def run(self, trace: Iterable[TraceRequest]) -> None:
        """All requests, then what is still in flight."""
        for request in trace:
            self._until(request.time_s)
            self._arrive(request)
        self._until(float("inf"))

    def _at(self, time_s: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), kind, what))

    def _until(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            time_s, _, kind, what = heapq.heappop(self._events)
            self.store.tick(time_s)
            if kind == "loaded":
                self.store.end_load(what, time_s)
            elif kind == "computed":
                self._keep(what, time_s)
            elif kind == "stored":
                self.store.end_store(what, time_s)
            elif kind == "written":
                self.store.apply(WriteDone(what, {}), time_s)
            elif kind == "answered":
                self.store.finished(what[0], what[1], time_s)
            self._act(time_s)

    def _arrive(self, request: TraceRequest) -> None:
        now_s, store = request.time_s, self.store
        keys = [block_id.to_bytes(KEY_BYTES, "little") for block_id in request.block_ids]
        tokens, prefill_s = self.tokens_per_block, self.machine.curve.prefill_s
        parts = [
            Part(key, 0, (at + 1) * tokens, keys[at - 1] if at else None, prefill_s(at * tokens, (at + 1) * tokens))
            for at, key in enumerate(keys)
        ]
        self.curve.request(keys, self.block_bytes)
        run = next((at for at, key in enumerate(keys) if store.source(key) is Source.MISSING), len(keys))
        store.request(RequestInfo(keys, run), now_s)
        owner = str(self.requests)
        self.requests += 1
        self.asked += len(keys)
        ready_s = now_s
        if run:
            places = store.begin_load(parts[:run], owner, now_s).parts
            disk = sum(place.source is Source.DISK for place in places)
            self.disk_hits += disk
            self.dram_hits += run - disk
            self.read_bytes += disk * self.block_bytes
            ready_s = max(
                self._reads.transfer(disk * self.block_bytes, now_s),
                self._copies.transfer(run * self.block_bytes, now_s),
            )
            self._at(ready_s, "loaded", owner)
        cached = min(run * self.tokens_per_block, request.input_tokens)
        end_s = self.engines.prefill(cached, request.input_tokens, ready_s)
        self.ttft.add(end_s - now_s)
        self.ttft_without.add(self.without.prefill(0, request.input_tokens, now_s) - now_s)
        curve = self.machine.curve
        self.saved_s += curve.prefill_s(0, request.input_tokens) - curve.prefill_s(cached, request.input_tokens)
        self._at(end_s, "computed", parts)
        answered_s = end_s + request.output_tokens / self.machine.decode_tokens_s
        self._at(answered_s, "answered", (keys, request.output_tokens))
        self._act(now_s)

    def _keep(self, parts: list[Part], now_s: float) -> None:
        """Store what the request computed. Where there is no room the engine does not wait: those are not kept."""
        places = self.store.begin_store(parts, now_s)
        if places:
            copied_s = self._copies.transfer(len(places) * self.block_bytes, now_s)
            self._at(copied_s, "stored", [place.key for place in places])

    def _act(self, now_s: float) -> None:
        for action in self.store.take_actions():
            if isinstance(action, WriteParts):
                assert all(part.offset != NO_SLOT for part in action.parts)
                size = len(action.parts) * self.block_bytes
                self.written_bytes += size
                self._at(self._writes.transfer(size, now_s), "written", action.move_id)
            else:
                assert not isinstance(action, ResetTier), "nothing resets a simulated store"

    def result(self, trace: Trace, policy: str, engines: int) -> RunResult:
        """What it came to."""
        machine = self.machine
        hits = self.dram_hits + self.disk_hits
        advice = self.curve.advice(machine.disk_bytes or machine.dram_bytes)
        return RunResult(
            trace=trace.name,
            policy=policy,
            dram_bytes=machine.dram_bytes,
            disk_bytes=machine.disk_bytes,
            block_bytes=self.block_bytes,
            engines=engines,
            requests=self.requests,
            asked_blocks=self.asked,
            dram_hit_blocks=self.dram_hits,
            disk_hit_blocks=self.disk_hits,
            hit_rate=hits / self.asked if self.asked else 0.0,
            written_bytes=self.written_bytes,
            read_bytes=self.read_bytes,
            prefill_saved_s=self.saved_s,
            prefill_s=self.engines.busy_s,
            ttft_s=_summary(self.ttft),
            ttft_without_s=_summary(self.ttft_without),
            ttft_curve=self.ttft.curve(),
            ttft_without_curve=self.ttft_without.curve(),
            advice_disk={f"{factor:g}": rate for factor, rate in advice.items()},
            counters=dict(sorted(self.store.counters.items())),
            skipped_lines=trace.skipped,
        )


def _summary(spread: Spread) -> dict[str, float]:
    return {
        "mean": spread.mean_s,
        "p50": spread.quantile(0.5),
        "p90": spread.quantile(0.9),
        "p99": spread.quantile(0.99),
    }


def simulate(trace: Trace, machine: Machine, policy: str) -> tuple[RunResult, ReuseCurve]:
    """One policy on one trace, and the curve of what more capacity would bring."""
    block_bytes = machine.kv_bytes_per_token * trace.tokens_per_block
    if machine.dram_bytes < block_bytes:
        raise ConfigError(f"a DRAM tier of {machine.dram_bytes} bytes has no room for one block of {block_bytes} bytes")
    engines = machine.engines or engines_needed(trace, machine.curve)
    simulation = Simulation(machine, policy, trace.tokens_per_block, engines)
    simulation.run(trace)
    simulation.store.check()
    return simulation.result(trace, policy, engines), simulation.curve
