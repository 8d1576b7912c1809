"""TieredStore: which parts are where, who holds them, and what has to move. It touches no bytes.

The store is the control plane of one engine. It has one owner and one thread; it takes calls, outcomes and the time, and it
queues actions that every rank carries out. Arena offsets are the same on all ranks, so one decision serves them all; a part
counts as stored on disk only when every rank has said so.

A part in DRAM is a `_Slot` in one of three states: FILLING (a store or a load is writing its bytes), READY, and DOOMED (dropped
from the index while an operation still owns its bytes). A slot's lease count is the number of operations that own it: a store or
load that fills it, a load that reads it, a disk write that reads it. Only READY slots without leases can be evicted, and a slot
goes back to the allocator only at lease count zero. That is the one invariant that keeps bytes from being reused under an
operation; deadlines, resets and failures drop keys from the index, never leases.

A part on disk is a key in `_disk` with its group. While it is being written it is in `_writing` instead: its bytes count as
used, and lookups find it in DRAM, where the write's lease keeps it. A key that must go while a load still reads it (`_disk_leases`)
goes at once from the index; the rank's part store finishes the read before it frees the place.

Failure is a miss: a lost key leaves the index, its slot is given back, the rest of the load's slots that were being filled are
given back too, since nobody can say which of them are whole. A full disk shrinks the effective capacity to what fits, so that
eviction makes room, and lets it grow back later; any other fault of the disk stops writes for a while.

Every admission is all-or-nothing: room is looked for among unleased records first; only if there is enough are they evicted, as
one batch, and the new records entered.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from kvtier.policy.admission import Admission, AdmissionLimits
from kvtier.policy.advice import ReuseCurve
from kvtier.policy.base import EvictionPolicy, RecordInfo, RequestInfo
from kvtier.policy.ingestion import Ingestion, IngestionLimits, IngestionType
from kvtier.policy.registry import make_policy
from kvtier.store.moves import (
    NO_SLOT,
    Action,
    DeleteParts,
    FenceDone,
    Key,
    LoadFailed,
    LoadReleased,
    Outcome,
    PartPlace,
    ResetTier,
    Source,
    StoreFailed,
    WriteDone,
    WriteParts,
)
from kvtier.store.slots import SlotAllocator

NO_SPACE = "no_space"
OVER_BUDGET = "over_budget"
"""Kinds of write failure that say nothing against the disk: it is full, and room is made; it has been written enough for now.
After any other kind writes are suspended for a while."""


_INGEST_ALL = IngestionLimits(IngestionType.ALL)
_ADMIT_ALL = AdmissionLimits()
_REUSE_SAMPLES_MAX = 2048
_WRITES_AT_ONCE = 64
_WRITES_AHEAD = 8


class Presence(Enum):
    """Answer to a lookup of one part."""

    MISS = "miss"
    PENDING = "pending"
    HIT = "hit"


class Run(NamedTuple):
    """Answer to a lookup of a request: `length` parts from the first on are there; `pending` if some of them not yet."""

    length: int
    pending: bool


class Part(NamedTuple):
    """A part as its engine names it: the key holds the prefix, the group its layers.

    `depth_tokens` is the length of that prefix and `parent` the part of the same group before it, where they are known.
    """

    key: Key
    group: int
    depth_tokens: int = 0
    parent: Key | None = None


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a TieredStore works with. All sizes are those of one rank.

    Attributes:
        slot_bytes: bytes of one part in its slot, by group; the same number is charged on disk.
        arena_bytes: the DRAM tier.
        disk_bytes: the disk tier, 0 for none.
        rank_count: how many ranks answer each action.
        write_deadline_s: after this a disk write, a read given up, or a reset that a rank has not carried out no longer keeps
            the engine stepping; its slots stay its own until it ends.
        disk_retry_s: how long a full disk counts as that full, and a failing one gets no writes.
        dram_policy, disk_policy: names in `kvtier.policy.registry`.
        ingestion: which parts are written from DRAM to disk, when, and how many at a time.
        admission: which of those the disk tier takes.
        part_tokens: tokens of one part, by group, for quotas in tokens; empty where unknown.
    """

    slot_bytes: tuple[int, ...]
    arena_bytes: int
    disk_bytes: int = 0
    rank_count: int = 1
    write_deadline_s: float = 60.0
    disk_retry_s: float = 10.0
    dram_policy: str = "lru"
    disk_policy: str = "lru"
    ingestion: IngestionLimits = _INGEST_ALL
    admission: AdmissionLimits = _ADMIT_ALL
    part_tokens: tuple[int, ...] = ()


class _State(IntEnum):
    FILLING = 0
    READY = 1
    DOOMED = 2


@dataclass(slots=True)
class _Slot:
    group: int
    offset: int
    info: RecordInfo
    state: _State = _State.FILLING
    leases: int = 1


class LoadPlan(NamedTuple):
    """What a load has to do; outcomes of ranks name it by `load_id`."""

    load_id: int
    parts: list[PartPlace]


@dataclass(slots=True)
class _Load:
    load_id: int
    parts: list[PartPlace]
    slots: list[_Slot | None]
    ranks_holding: int = 0
    lost: dict[Key, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True)
class _Write:
    parts: list[PartPlace]
    slots: list[_Slot]
    deadline_s: float
    ranks_left: int
    generation: int
    expired: bool = False
    failed: dict[Key, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Owed:
    """Slots that operations on some ranks own although nothing waits for them any more."""

    ranks_left: int
    slots: list[_Slot]
    deadline_s: float
    expired: bool = False


def _kind(reason: str) -> str:
    """What a reason begins with, before its detail: few enough to count."""
    return reason.partition(":")[0]


class TieredStore:
    """The index, the leases and the moves of one engine's parts over DRAM and disk."""

    def __init__(self, limits: StoreLimits, *, generation: int = 0) -> None:
        self.limits = limits
        self.generation = generation
        self.counters: Counter[str] = Counter()
        # Groups whose parts are equally large share a size class.
        sizes = sorted(set(limits.slot_bytes))
        self._class = [sizes.index(size) for size in limits.slot_bytes]
        self._slots = SlotAllocator(sizes, limits.arena_bytes)
        self._dram: dict[Key, _Slot] = {}
        self._dram_policy: EvictionPolicy = make_policy(limits.dram_policy, limits.arena_bytes)
        self._disk: dict[Key, int] = {}
        self._disk_leases: Counter[Key] = Counter()
        self._disk_policy: EvictionPolicy | None = None
        self._ingestion = Ingestion(limits.ingestion)
        self._curve = ReuseCurve(_REUSE_SAMPLES_MAX)
        self._admission: Admission | None = None
        if limits.disk_bytes > 0:
            self._disk_policy = make_policy(limits.disk_policy, limits.disk_bytes)
            self._admission = Admission(limits.admission, self._disk_policy)
        self._disk_used_bytes = 0
        self._disk_limit_bytes = limits.disk_bytes
        self._disk_retry_at_s = 0.0
        self._disk_suspended = False
        self._writing: dict[Key, int] = {}
        self._writes: dict[int, _Write] = {}
        self._loads: dict[str, _Load] = {}
        self._held: dict[int, _Owed] = {}
        self._filling: dict[Key, _Slot] = {}
        self._store_failed: dict[Key, str] = {}
        self._fences: dict[int, _Owed] = {}
        self._next_id = 0
        self._actions: list[Action] = []
        self._notices: list[str] = []
        self._noticed: set[str] = set()

    # ---- what is there

    def presence(self, key: Key) -> Presence:
        """Whether `key` can be loaded now, soon, or not."""
        slot = self._dram.get(key)
        if slot is not None and slot.state is _State.READY:
            return Presence.HIT
        if key in self._disk:
            return Presence.HIT
        return Presence.MISS if slot is None else Presence.PENDING

    def source(self, key: Key) -> Source:
        """The tier that a load of `key` would take it from."""
        slot = self._dram.get(key)
        if slot is not None and slot.state is _State.READY:
            return Source.DRAM
        return Source.DISK if key in self._disk else Source.MISSING

    def leading_run(self, keys: Sequence[Key]) -> Run:
        """How many of `keys`, from the first on, are there: a hit is a contiguous prefix."""
        dram, disk, pending, length = self._dram, self._disk, False, 0
        for key in keys:
            slot = dram.get(key)
            if (slot is None or slot.state is not _State.READY) and key not in disk:
                if slot is None:
                    break
                pending = True
            length += 1
        return Run(length, pending)

    def request(self, request: RequestInfo, now_s: float, group: int = 0) -> None:
        """A request was looked up for the first time, with its keys of one group: what learns from requests is told."""
        self._curve.request(request.keys, self.limits.slot_bytes[group])
        self._dram_policy.request(request, now_s)
        if self._disk_policy is not None and self._admission is not None:
            self._disk_policy.request(request, now_s)
            self._admission.asked(request.keys)

    def finished(self, keys: Sequence[Key], output_tokens: int, now_s: float) -> None:
        """The request with these prompt keys has been answered: policies that learn from answers' lengths are told."""
        self._dram_policy.finished(keys, output_tokens, now_s)
        if self._disk_policy is not None:
            self._disk_policy.finished(keys, output_tokens, now_s)

    # ---- loads: from a tier into the engine

    def begin_load(self, wanted: Sequence[Part], owner: str, now_s: float) -> LoadPlan:
        """Lease `wanted` for a load by `owner`, which has no other load, and say where each part is.

        Parts on disk get a slot where one can be had, so that they stay in DRAM afterwards; the others pass through the
        rank's staging (NO_SLOT). A key that is not there any more is MISSING: the rank then fails the load.
        """
        if owner in self._loads:
            raise ValueError(f"owner {owner!r} has a load already: end it first")
        if len({part.key for part in wanted}) != len(wanted):
            raise ValueError(f"owner {owner!r} wants a key twice in one load: ask for it once")
        parts: list[PartPlace] = []
        slots: list[_Slot | None] = []
        from_disk: list[int] = []
        for place, (key, group, _, _) in enumerate(wanted):
            slot = self._dram.get(key)
            if slot is not None and slot.state is _State.READY:
                slot.leases += 1
                self._dram_policy.access(key, now_s)
                self._ingestion.used(key)
                parts.append(PartPlace(key, group, slot.offset, Source.DRAM))
                slots.append(slot)
            elif key in self._disk:
                self._disk_leases[key] += 1
                parts.append(PartPlace(key, group, NO_SLOT, Source.DISK))
                slots.append(None)
                if slot is None:
                    from_disk.append(place)
            else:
                parts.append(PartPlace(key, group, NO_SLOT, Source.MISSING))
                slots.append(None)
            # A part in DRAM that is on disk too is used there as well, or disk would evict what DRAM serves.
            if self._disk_policy is not None and key in self._disk:
                self._disk_policy.access(key, now_s)
        for place in from_disk:
            part = wanted[place]
            new = self._admit([part], now_s)
            if new is None:
                self.counters["promote_refused_parts"] += 1
                continue
            slots[place] = new[0]
            parts[place] = PartPlace(part.key, part.group, new[0].offset, Source.DISK)
        load = _Load(self._new_id(), parts, slots)
        self._loads[owner] = load
        self.counters["load_dram_parts"] += sum(part.source is Source.DRAM for part in parts)
        self.counters["load_disk_parts"] += sum(part.source is Source.DISK for part in parts)
        return LoadPlan(load.load_id, parts)

    def end_load(self, owner: str, now_s: float) -> bool:
        """All ranks have finished `owner`'s load, well or not. True if it went well."""
        load = self._loads.pop(owner, None)
        if load is None:
            return False
        failed = bool(load.reason or load.lost)
        held: list[_Slot] = []
        for part, slot in zip(load.parts, load.slots, strict=True):
            if part.source is Source.DISK:
                self._disk_leases[part.key] -= 1
                if self._disk_leases[part.key] <= 0:
                    del self._disk_leases[part.key]
            if slot is None:
                continue
            filled = part.source is Source.DISK and slot.state is _State.FILLING
            if filled and not failed:
                slot.state = _State.READY
                self._stored(part.key, slot, below=True)
            elif filled or part.key in load.lost:
                # What was wrong in DRAM is gone from there alone: the disk has bytes of its own.
                self._forget_slot(part.key, slot, now_s)
            if filled and load.ranks_holding:
                held.append(slot)
            else:
                self._release(slot)
        if held:
            self._held[load.load_id] = _Owed(load.ranks_holding, held, now_s + self.limits.write_deadline_s)
        for part in load.parts:
            if part.key in load.lost and part.source is Source.DISK:
                self._forget_disk(part.key, now_s)
        if failed:
            self.counters["load_failed"] += 1
        return not failed

    # ---- stores: from the engine into DRAM, then to disk

    def begin_store(self, wanted: Sequence[Part], now_s: float) -> list[PartPlace] | None:
        """Slots for those of `wanted` that are not stored yet, leased until `end_store`; None if there is no room now.

        None means that it is worth asking again: what holds the room will let go. If all could never fit together, the
        leading ones that can are taken.
        """
        new: dict[Key, Part] = {}
        need: Counter[int] = Counter()
        for part in wanted:
            if part.key in self._dram or part.key in self._disk or part.key in new:
                continue
            need[self._class[part.group]] += 1
            if not self._slots.holds(need):
                need[self._class[part.group]] -= 1
                self.counters["store_refused_parts"] += 1
                continue
            new[part.key] = part
        if not new:
            return []
        slots = self._admit(list(new.values()), now_s)
        if slots is None:
            self.counters["store_deferred"] += 1
            return None
        self._filling.update(zip(new, slots, strict=True))
        self.counters["store_parts"] += len(slots)
        return [PartPlace(key, slot.group, slot.offset) for key, slot in zip(new, slots, strict=True)]

    def end_store(self, keys: Sequence[Key], now_s: float) -> None:
        """All ranks have copied `keys` out of the engine, or reported them as StoreFailed: the rest can be loaded now."""
        for key in keys:
            slot = self._filling.pop(key, None)
            if slot is None:
                continue
            reason = self._store_failed.pop(key, None)
            if slot.state is _State.FILLING:
                if reason is None:
                    slot.state = _State.READY
                    self._stored(key, slot)
                else:
                    self._forget_slot(key, slot, now_s)
            self._release(slot)
        self._ingest(now_s)

    # ---- outcomes, time, actions

    def apply(self, outcome: Outcome, now_s: float) -> None:
        """One rank's word on what it was asked to do. Words on what nobody waits for any more are ignored."""
        if isinstance(outcome, WriteDone):
            self._apply_write(outcome, now_s)
        elif isinstance(outcome, LoadFailed):
            load = self._load_by_id(outcome.load_id)
            if load is not None:
                load.lost.update(outcome.lost)
                load.reason = outcome.reason or load.reason
                load.ranks_holding += outcome.held
            for reason in sorted(set(outcome.lost.values())) or [outcome.reason]:
                self.counters[f"load_failed:{_kind(reason)}"] += 1
                self._notice(f"a load failed and its request is recomputed: {reason}")
        elif isinstance(outcome, StoreFailed):
            self._store_failed.update(dict.fromkeys((k for k in outcome.keys if k in self._filling), outcome.reason))
            self.counters["store_failed_parts"] += len(outcome.keys)
            self._notice(f"parts could not be copied out of the engine: {outcome.reason}")
        elif isinstance(outcome, FenceDone):
            self._one_rank_less(self._fences, outcome.fence_id)
        elif isinstance(outcome, LoadReleased):
            load = self._load_by_id(outcome.load_id)
            if load is not None:
                load.ranks_holding -= 1
            else:
                self._one_rank_less(self._held, outcome.load_id)

    def tick(self, now_s: float) -> None:
        """Let deadlines pass: what is late is not waited for any more; its slots stay its own until it ends."""
        for write in self._writes.values():
            if not write.expired and now_s >= write.deadline_s:
                write.expired = True
                self.counters["write_late"] += 1
                self._notice(f"a disk write took longer than {self.limits.write_deadline_s} s")
        self._ingest(now_s)
        for owed in (*self._fences.values(), *self._held.values()):
            if not owed.expired and now_s >= owed.deadline_s:
                owed.expired = True
                self._notice(f"a read or a reset has not ended {self.limits.write_deadline_s} s after it was given up")
        if now_s >= self._disk_retry_at_s:
            self._disk_limit_bytes = self.limits.disk_bytes
            self._disk_suspended = False

    def resetting(self) -> bool:
        """Whether a rank has not answered a reset yet: until then a crash could bring back what it had on disk."""
        return bool(self._fences)

    def has_pending(self) -> bool:
        """Whether an outcome is awaited that no request waits for: the engine then has to keep stepping."""
        awaited: list[_Write | _Owed] = [*self._writes.values(), *self._fences.values(), *self._held.values()]
        return bool(self._actions) or any(not move.expired for move in awaited)

    def settled(self) -> bool:
        """Whether nothing is under way, what is late included."""
        return not (self._actions or self._writes or self._fences or self._held)

    def take_actions(self) -> list[Action]:
        """What every rank has to do, in this order. Each is handed out once."""
        actions, self._actions = self._actions, []
        return actions

    def take_notices(self) -> list[str]:
        """Lines for the log, each kind once."""
        notices, self._notices = self._notices, []
        return notices

    def fill_from_disk(self, entries: Sequence[tuple[Key, int, int]], now_s: float, strays: Sequence[Key] = ()) -> None:
        """Enter parts (key, group, depth in tokens) that every rank's catalog has, oldest use first; see `fill_many_from_disk`."""
        keys, groups, depths = zip(*entries, strict=True) if entries else ((), (), ())
        self.fill_many_from_disk(keys, groups, depths, now_s, strays)

    def fill_many_from_disk(
        self,
        keys: Sequence[Key],
        groups: Sequence[int],
        depths_tokens: Sequence[int],
        now_s: float,
        strays: Sequence[Key] = (),
    ) -> None:
        """Enter parts that every rank's catalog has, oldest use first, by column: a million of them, nothing done one by one.

        What is over capacity is deleted, oldest first, and so are `strays`, which only some ranks have: they would take room
        that nobody counts, and stand in the way when their keys are written again.
        """
        if self._disk_policy is None:
            return
        if strays:
            self._actions.append(DeleteParts(list(strays)))
        self._disk.update(zip(keys, groups, strict=True))
        for group, count in Counter(groups).items():
            self._disk_used_bytes += count * self.limits.slot_bytes[group]
        infos: dict[tuple[int, int], RecordInfo] = {}

        def info_of(place: int) -> RecordInfo:
            like = groups[place], depths_tokens[place]
            info = infos.get(like)
            if info is None:
                info = infos[like] = RecordInfo(self.limits.slot_bytes[like[0]], depth_tokens=like[1])
            return info

        self._disk_policy.fill(keys, info_of, now_s)
        over = self._disk_used_bytes - self.limits.disk_bytes
        if over > 0:
            victims: list[Key] = []
            for key in self._disk_policy.candidates(now_s, lambda key: key in self._disk_leases):
                victims.append(key)
                over -= self.limits.slot_bytes[self._disk[key]]
                if over <= 0:
                    break
            self._evict_disk(victims, now_s)

    def reset(self, now_s: float) -> None:
        """Forget everything, on every tier, and begin a new generation: nothing of the old one is served again."""
        self.generation += 1
        owed = list(self._filling.values())
        self._filling.clear()
        self._store_failed.clear()
        for load in self._loads.values():
            owed += [slot for slot in load.slots if slot is not None]
            load.slots = [None] * len(load.slots)
        self._loads.clear()
        self._disk_leases.clear()
        for key, slot in list(self._dram.items()):
            self._forget_slot(key, slot, now_s)
        if self._disk_policy is not None:
            for key in self._disk:
                self._disk_policy.remove(key, now_s, evicted=False)
        self._disk.clear()
        self._writing.clear()
        self._ingestion.reset()
        self._disk_used_bytes = 0
        fence_id = self._new_id()
        self._fences[fence_id] = _Owed(self.limits.rank_count, owed, now_s + self.limits.write_deadline_s)
        self._actions.append(ResetTier(self.generation, fence_id))
        self.counters["resets"] += 1

    def gauges(self) -> dict[str, int]:
        """What is held now, in bytes and parts of one rank."""
        return {
            "dram_used_bytes": self._slots.used_bytes(),
            "dram_parts": len(self._dram),
            "disk_used_bytes": self._disk_used_bytes,
            "disk_limit_bytes": self._disk_limit_bytes,
            "disk_parts": len(self._disk),
            "writes_in_flight": len(self._writes),
            "loads_in_flight": len(self._loads),
        }

    def advice(self) -> dict[tuple[str, float], float]:
        """Estimated hit rate, by recency, of each tier at half, once, twice and four times its capacity."""
        tiers = {"dram": self.limits.arena_bytes, "disk": self.limits.disk_bytes}
        return {
            (tier, factor): rate
            for tier, capacity in tiers.items()
            if capacity
            for factor, rate in self._curve.advice(capacity).items()
        }

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. For tests: walks everything."""
        owners: Counter[int] = Counter()
        for slots in (
            [s for load in self._loads.values() for s in load.slots if s is not None],
            list(self._filling.values()),
            [s for write in self._writes.values() for s in write.slots],
            [s for owed in (*self._fences.values(), *self._held.values()) for s in owed.slots],
        ):
            owners.update(id(slot) for slot in slots)
        assert all(slot.leases == owners[id(slot)] for slot in self._dram.values()), "a lease without its owner"
        assert len({slot.offset for slot in self._dram.values()}) == len(self._dram), "two keys in one slot"
        assert len(self._dram_policy) == len(self._dram), "the DRAM policy lost count"
        in_flight = sum(self.limits.slot_bytes[group] for group in self._writing.values())
        on_disk = sum(self.limits.slot_bytes[group] for group in self._disk.values())
        assert self._disk_used_bytes == on_disk + in_flight, "disk accounting"
        assert self._disk_used_bytes <= self.limits.disk_bytes, "disk over capacity"
        assert not (self._disk.keys() & self._writing.keys()), "a key is written and on disk"
        if self._disk_policy is not None:
            assert len(self._disk_policy) == len(self._disk), "the disk policy lost count"
        doomed = {id(s): s for w in self._writes.values() for s in w.slots if s.state is _State.DOOMED}
        owed_slots = [s for owed in (*self._fences.values(), *self._held.values()) for s in owed.slots]
        doomed |= {id(s): s for s in owed_slots if s.state is _State.DOOMED}
        doomed |= {id(s): s for ld in self._loads.values() for s in ld.slots if s and s.state is _State.DOOMED}
        doomed |= {id(s): s for s in self._filling.values() if s.state is _State.DOOMED}
        held = sum(self.limits.slot_bytes[s.group] for s in (*self._dram.values(), *doomed.values()))
        assert held == self._slots.used_bytes(), "a slot leaked, or was given back twice"

    # ---- inside

    def _load_by_id(self, load_id: int) -> _Load | None:
        return next((load for load in self._loads.values() if load.load_id == load_id), None)

    def _one_rank_less(self, owed_by: dict[int, _Owed], number: int) -> None:
        owed = owed_by.get(number)
        if owed is not None:
            owed.ranks_left -= 1
            if owed.ranks_left == 0:
                del owed_by[number]
                for slot in owed.slots:
                    self._release(slot)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _notice(self, line: str) -> None:
        if line not in self._noticed and len(self._noticed) < 1000:
            self._noticed.add(line)
            self._notices.append(line)

    def _admit(self, new: Sequence[Part], now_s: float) -> list[_Slot] | None:
        """Slots in state FILLING with one lease for all of `new`, or None and nothing changed."""
        key_at: dict[int, Key] = {}

        def is_leased(key: Key) -> bool:
            slot = self._dram[key]
            return slot.leases > 0 or slot.state is not _State.READY

        writes: list[tuple[Key, _Slot]] = []

        def victims() -> Iterator[tuple[int, int]]:
            for key in self._dram_policy.candidates(now_s, is_leased, new[0].key):
                slot = self._dram[key]
                if self._ingestion.evicting(key) and self._begin_write(key, now_s):
                    # Ingestion EVICTED: its bytes have to stay until they are written. Enough of those, and the caller asks again.
                    writes.append((key, slot))
                    if len(writes) > 2 * len(new) + _WRITES_AHEAD:
                        return
                    continue
                key_at[slot.offset] = key
                yield self._class[slot.group], slot.offset

        chosen = self._slots.choose_victims(Counter(self._class[part.group] for part in new), victims())
        self._send_writes(writes, now_s)
        if chosen is None:
            return None
        for victim in chosen:
            key = key_at[victim]
            del self._dram[key]
            self._dram_policy.remove(key, now_s, evicted=True)
            self._ingestion.left(key)
            self._slots.give(victim)
        self.counters["dram_evicted_parts"] += len(chosen)
        slots = []
        for part in new:
            offset = self._slots.take(self._class[part.group])
            assert offset is not None, "choose_victims promised room"
            info = RecordInfo(self.limits.slot_bytes[part.group], part.parent, part.depth_tokens)
            slot = _Slot(part.group, offset, info)
            self._dram[part.key] = slot
            self._dram_policy.insert(part.key, info, now_s)
            slots.append(slot)
        return slots

    def _forget_slot(self, key: Key, slot: _Slot, now_s: float) -> None:
        """Take `key` out of DRAM's index; its bytes go when the last lease does."""
        if self._dram.get(key) is slot:
            del self._dram[key]
            self._dram_policy.remove(key, now_s, evicted=False)
            self._ingestion.left(key)
            slot.state = _State.DOOMED
            if slot.leases == 0:
                self._slots.give(slot.offset)

    def _release(self, slot: _Slot) -> None:
        slot.leases -= 1
        assert slot.leases >= 0, "a lease was released twice"
        if slot.leases == 0 and slot.state is _State.DOOMED:
            self._slots.give(slot.offset)

    def _forget_disk(self, key: Key, now_s: float) -> None:
        group = self._disk.pop(key, None)
        if group is not None and self._disk_policy is not None:
            self._disk_policy.remove(key, now_s, evicted=False)
            self._ingestion.lost(key)
            self._disk_used_bytes -= self.limits.slot_bytes[group]
            self._actions.append(DeleteParts([key]))
            self.counters["disk_lost_parts"] += 1

    def _evict_disk(self, victims: Sequence[Key], now_s: float) -> None:
        assert self._disk_policy is not None
        for key in victims:
            self._disk_used_bytes -= self.limits.slot_bytes[self._disk.pop(key)]
            self._disk_policy.remove(key, now_s, evicted=True)
            self._ingestion.lost(key)
        if victims:
            self._actions.append(DeleteParts(list(victims)))
            self.counters["disk_evicted_parts"] += len(victims)

    def _disk_victims(self, size_bytes: int, incoming: Key, now_s: float) -> list[Key] | None:
        """What has to leave the disk so that `size_bytes` fit; None where that much cannot leave."""
        assert self._disk_policy is not None
        over = self._disk_used_bytes + size_bytes - self._disk_limit_bytes
        victims: list[Key] = []
        if over > 0:
            for key in self._disk_policy.candidates(now_s, lambda key: key in self._disk_leases, incoming):
                victims.append(key)
                over -= self.limits.slot_bytes[self._disk[key]]
                if over <= 0:
                    break
        return victims if over <= 0 else None

    def _stored(self, key: Key, slot: _Slot, *, below: bool = False) -> None:
        """`key` is READY in DRAM now; `below`: it is on disk already."""
        if self._disk_policy is not None:
            tokens = self.limits.part_tokens[slot.group] if self.limits.part_tokens else 0
            self._ingestion.stored(key, self.limits.slot_bytes[slot.group], tokens, below=below)

    def _ingest(self, now_s: float) -> None:
        """Have written what is due, as far as the quotas of writes in flight go."""
        while keys := self._ingestion.take(_WRITES_AT_ONCE):
            writes = [(key, self._dram[key]) for key in keys if self._admit_to_disk(key, self._dram[key], now_s)]
            self._send_writes(writes, now_s)

    def _begin_write(self, key: Key, now_s: float) -> bool:
        return self._ingestion.begin(key) and self._admit_to_disk(key, self._dram[key], now_s)

    def _admit_to_disk(self, key: Key, slot: _Slot, now_s: float) -> bool:
        """Take the room and the lease for a write that ingestion has begun, or end it."""
        assert self._admission is not None
        size = self.limits.slot_bytes[slot.group]
        if key not in self._disk and key not in self._writing and not self._disk_suspended:
            victims = self._disk_victims(size, key, now_s)
            if victims is not None and self._admission.admits(key, size, now_s, victims):
                self._evict_disk(victims, now_s)
                slot.leases += 1
                self._disk_used_bytes += size
                self._writing[key] = slot.group
                return True
        self._ingestion.ended(key, written=False)
        self.counters["write_refused_parts"] += 1
        return False

    def _send_writes(self, writes: Sequence[tuple[Key, _Slot]], now_s: float) -> None:
        if not writes:
            return
        move_id = self._new_id()
        parts = [PartPlace(key, slot.group, slot.offset) for key, slot in writes]
        slots = [slot for _, slot in writes]
        deadline_s = now_s + self.limits.write_deadline_s
        self._writes[move_id] = _Write(parts, slots, deadline_s, self.limits.rank_count, self.generation)
        self._actions.append(WriteParts(move_id, parts, [slot.info.depth_tokens for slot in slots]))

    def _apply_write(self, outcome: WriteDone, now_s: float) -> None:
        write = self._writes.get(outcome.move_id)
        if write is None:
            return
        write.failed.update(outcome.failed)
        write.ranks_left -= 1
        if write.ranks_left > 0:
            return
        del self._writes[outcome.move_id]
        for slot in write.slots:
            self._release(slot)
        if write.generation != self.generation:
            return
        assert self._disk_policy is not None and self._admission is not None
        for part, slot in zip(write.parts, write.slots, strict=True):
            group = self._writing.pop(part.key)
            size = self.limits.slot_bytes[group]
            self._ingestion.ended(part.key, written=part.key not in write.failed)
            if part.key in write.failed:
                self._disk_used_bytes -= size
                self._admission.undo(size)
            else:
                self._disk[part.key] = group
                self._disk_policy.insert(part.key, slot.info, now_s)
                self.counters["written_parts"] += 1
        if write.failed:
            # Other ranks may have written what one could not: a part counts only where all have it.
            self._actions.append(DeleteParts(list(write.failed)))
            self.counters["write_failed_parts"] += len(write.failed)
            for reason in sorted(set(write.failed.values())):
                self.counters[f"write_failed:{_kind(reason)}"] += 1
                self._notice(f"parts could not be written to disk, and are served from DRAM only: {reason}")
            self._disk_retry_at_s = now_s + self.limits.disk_retry_s
            kinds = {_kind(reason) for reason in write.failed.values()}
            if NO_SPACE in kinds:
                slack_bytes = 2 * max(self.limits.slot_bytes)
                self._disk_limit_bytes = max(0, min(self._disk_limit_bytes, self._disk_used_bytes - slack_bytes))
            self._disk_suspended = not kinds <= {NO_SPACE, OVER_BUDGET}
        self._ingest(now_s)
