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

A disk tier may be *shared* with engines elsewhere. Then what is on it is nobody's to count or evict here: `believe` and `disbelieve` say what others
were seen to have there, `_disk` holds a bounded number of such beliefs, no capacity is kept, and what every rank has written is announced (CommitParts). A
belief that turns out wrong is a lost key like any other.

A preload reads parts from disk into slots before a load asks for them (`_reads`, `_reading`, `Preloads`). Its slots are FILLING and leased until every rank
has answered; lookups then say PENDING, so that a load waits for the read that is under way instead of reading again.

Every admission is all-or-nothing: room is looked for among unleased records first; only if there is enough are they evicted, as
one batch, and the new records entered.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    CommitParts,
    DeleteParts,
    FenceDone,
    HurryReads,
    Key,
    LoadFailed,
    LoadReleased,
    Outcome,
    PartPlace,
    ReadDone,
    ReadParts,
    ResetTier,
    Source,
    StoreFailed,
    WriteDone,
    WriteParts,
)
from kvtier.store.preloads import Preloads
from kvtier.store.slots import SlotAllocator

NO_SPACE = "no_space"
OVER_BUDGET = "over_budget"
EXISTS_DIFFERENT = "exists_different"
"""Kinds of write failure that say nothing against the disk: it is full, and room is made (on a shared one nobody here can make any); it has been written
enough for now; another engine has stored something else under the name. After any other kind writes are suspended for a while."""


_INGEST_ALL = IngestionLimits(IngestionType.ALL)
_ADMIT_ALL = AdmissionLimits()
_REUSE_SAMPLES_MAX = 1024
_WRITES_AT_ONCE = 64
_WRITES_AHEAD = 8
_BELIEFS_MAX = 1 << 20

SHARED_DISK_BYTES = 1 << 60
"""`disk_bytes` of a disk tier whose bound is somebody else's."""

LEFT_ON_SHARED = ("missing", "io", "RecordNamespaceError")
"""Kinds of loss after which a shared disk's file is left as it is: nothing is there, it may be there, or it is another engine's."""


class Presence(Enum):
    """Answer to a lookup of one part."""

    MISS = "miss"
    PENDING = "pending"
    HIT = "hit"


class Run(NamedTuple):
    """Answer to a lookup of a request: `length` parts from the first on are there; `pending` if some of them not yet."""

    length: int
    pending: bool


class Resident(NamedTuple):
    """Bytes of some parts on one rank: of all of them, of those that are not in DRAM, and of those that nothing is bringing there."""

    total_bytes: int
    away_bytes: int
    unread_bytes: int


class Change(NamedTuple):
    """These parts can be loaded from `tier` (DRAM or DISK) from now on; or, where `gone`, no more."""

    keys: list[Key]
    tier: Source
    gone: bool


class Part(NamedTuple):
    """A part as its engine names it: the key holds the prefix, the group its layers.

    `depth_tokens` is the length of that prefix, `parent` the part of the same group before it, and `cost_s` the seconds of
    engine time that computing it again would take, where they are known.
    """

    key: Key
    group: int
    depth_tokens: int = 0
    parent: Key | None = None
    cost_s: float = 0.0


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
        disk_shared: the disk tier is shared with other engines, and bounded by a janitor; `disk_bytes` is SHARED_DISK_BYTES then.
        dram_keeps: DRAM is a cache; if not, a part leaves it once it is written, or the load that it was read for has ended.
        preload_bytes_max: how much of the arena may hold what was read ahead, 0 for no preloads.
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
    disk_shared: bool = False
    dram_keeps: bool = True
    preload_bytes_max: int = 0


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
    disk_bytes: int
    ranks_holding: int = 0
    lost: dict[Key, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True)
class _Move:
    """A write from slots to disk, or a read ahead from disk into slots, that every rank carries out."""

    parts: list[PartPlace]
    slots: list[_Slot]
    deadline_s: float
    ranks_left: int
    generation: int
    expired: bool = False
    hurried: bool = False
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
    """The index, the leases and the moves of one engine's parts over DRAM and disk.

    Args:
        limits: what it works with.
        generation: the one that the ranks are in.
        tells_changes: keep changes for `take_changes`.
    """

    def __init__(self, limits: StoreLimits, *, generation: int = 0, tells_changes: bool = False) -> None:
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
        self._writes: dict[int, _Move] = {}
        self._reading: dict[Key, int] = {}
        self._reads: dict[int, _Move] = {}
        self._preloads = Preloads(limits.preload_bytes_max)
        self._loads: dict[str, _Load] = {}
        self._held: dict[int, _Owed] = {}
        self._filling: dict[Key, _Slot] = {}
        self._store_failed: dict[Key, str] = {}
        self._fences: dict[int, _Owed] = {}
        self._next_id = 0
        self._actions: list[Action] = []
        self._notices: list[str] = []
        self._noticed: set[str] = set()
        self._changes: list[Change] | None = [] if tells_changes else None

    # ---- what is there

    def presence(self, key: Key, *, through_reads: bool = False) -> Presence:
        """Whether `key` can be loaded now, soon, or not; `through_reads`: as if nothing were being read ahead."""
        slot = self._dram.get(key)
        if slot is not None and slot.state is _State.READY:
            return Presence.HIT
        if key in self._disk and (through_reads or key not in self._reading):
            return Presence.HIT
        return Presence.MISS if slot is None else Presence.PENDING

    def source(self, key: Key) -> Source:
        """The tier that a load of `key` would take it from."""
        slot = self._dram.get(key)
        if slot is not None and slot.state is _State.READY:
            return Source.DRAM
        return Source.DISK if key in self._disk else Source.MISSING

    def has_slot(self, key: Key) -> bool:
        """Whether `key` lies in DRAM, or is being brought there."""
        return key in self._dram

    def not_in_dram(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` that a load would not take from DRAM."""
        dram, ready = self._dram, _State.READY
        return [key for key in keys if (slot := dram.get(key)) is None or slot.state is not ready]

    def leading_run(self, keys: Sequence[Key], *, through_reads: bool = False) -> Run:
        """How many of `keys`, from the first on, are there: a hit is a contiguous prefix. `through_reads` as in `presence`."""
        dram, disk, pending, length = self._dram, self._disk, False, 0
        reading: Mapping[Key, int] = {} if through_reads else self._reading
        for key in keys:
            slot = dram.get(key)
            if slot is None or slot.state is not _State.READY:
                if key not in disk:
                    if slot is None:
                        break
                    pending = True
                elif key in reading:
                    pending = True
            length += 1
        return Run(length, pending)

    def resident_bytes(self, keys: Sequence[Key]) -> Resident:
        """Where these parts are. One that is nowhere counts as one of group 0."""
        dram, disk, sizes, ready = self._dram, self._disk, self.limits.slot_bytes, _State.READY
        near = coming = unread = 0
        for key in keys:
            slot = dram.get(key)
            if slot is None:
                unread += sizes[disk.get(key, 0)]
            elif slot.state is ready:
                near += sizes[slot.group]
            else:
                coming += sizes[slot.group]
        return Resident(near + coming + unread, coming + unread, unread)

    @property
    def is_reading_ahead(self) -> bool:
        """Whether any part is being read ahead."""
        return bool(self._reading)

    def preload_room_bytes(self) -> int:
        """How much more may be read ahead."""
        return max(0, self._preloads.room_bytes())

    def moving_bytes(self) -> tuple[int, int]:
        """Bytes of one rank that loads are reading from disk, and bytes that are being written to it."""
        reading = sum(load.disk_bytes for load in self._loads.values())
        return reading, self._ingestion.inflight_bytes

    def believe(self, keys: Sequence[Key], group: int, now_s: float) -> None:
        """A shared disk was seen to have `keys`."""
        assert self._disk_policy is not None and self.limits.disk_shared
        size = self.limits.slot_bytes[group]
        for key in [key for key in keys if key not in self._disk and key not in self._writing]:
            self._enter_disk(key, group, RecordInfo(size), now_s)

    def disbelieve(self, keys: Sequence[Key], now_s: float) -> None:
        """A shared disk was seen not to have `keys`, or is not known to have them any more."""
        assert self._disk_policy is not None and self.limits.disk_shared
        self._evict_disk([key for key in keys if key in self._disk], now_s)

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

    # ---- preloads: from disk into DRAM, before a load asks

    def preload(self, wanted: Sequence[Part], owner: str, now_s: float) -> bool:
        """Read ahead what `owner` is expected to load; False if there is more to read, for which asking again later is worth it.

        Only what demand leaves: nothing while a load reads from disk, no more than `preload_bytes_max` at a time, no slot of what another request was
        promised. The leading parts that fit are taken. What is lost by now ends the prefix.
        """
        new: list[Part] = []
        room_bytes = self._preloads.room_bytes()
        if room_bytes < min(self.limits.slot_bytes) or any(load.disk_bytes for load in self._loads.values()):
            return False
        complete = True
        for part in wanted:
            if part.key in self._dram:
                self._preloads.share(part.key, owner)
                continue
            if part.key not in self._disk:
                break
            room_bytes -= self.limits.slot_bytes[part.group]
            if room_bytes < 0:
                complete = False
                break
            new.append(part)
        if not new:
            return complete
        slots = self._admit(new, now_s, ahead=True)
        if slots is None:
            self.counters["preload_refused_parts"] += len(new)
            return False
        move_id = self._new_id()
        places = [
            PartPlace(part.key, part.group, slot.offset, Source.DISK) for part, slot in zip(new, slots, strict=True)
        ]
        deadline_s = now_s + self.limits.write_deadline_s
        self._reads[move_id] = _Move(places, slots, deadline_s, self.limits.rank_count, self.generation)
        for part in new:
            self._reading[part.key] = move_id
            self._disk_leases[part.key] += 1
            self._preloads.stage(part.key, self.limits.slot_bytes[part.group], owner)
        self._actions.append(ReadParts(move_id, places))
        self.counters["preload_parts"] += len(new)
        return complete

    def hurry(self, keys: Sequence[Key]) -> None:
        """A request waits for `keys`: reads ahead of any of them are in a hurry now."""
        for move_id in {self._reading[key] for key in keys if key in self._reading}:
            read = self._reads[move_id]
            if not read.hurried:
                read.hurried = True
                self._actions.append(HurryReads(move_id))

    def release_preload(self, owner: str, now_s: float) -> None:
        """`owner` will not load what was read ahead for it, or has begun to."""
        for key in self._preloads.release(owner):
            slot = self._dram.get(key)
            if slot is not None:
                self._let_go(key, slot, now_s)

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
        for place, (key, group, *_) in enumerate(wanted):
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
        for place, slot in self._promote(wanted, from_disk, now_s):
            slots[place] = slot
            parts[place] = PartPlace(wanted[place].key, slot.group, slot.offset, Source.DISK)
        disk_bytes = sum(self.limits.slot_bytes[part.group] for part in parts if part.source is Source.DISK)
        load = _Load(self._new_id(), parts, slots, disk_bytes)
        self._loads[owner] = load
        self.counters["preload_used_parts"] += sum(
            part.source is Source.DRAM and part.key in self._preloads for part in parts
        )
        self.release_preload(owner, now_s)
        self.counters["load_dram_parts"] += sum(part.source is Source.DRAM for part in parts)
        self.counters["load_disk_parts"] += sum(part.source is Source.DISK for part in parts)
        return LoadPlan(load.load_id, parts)

    def _promote(self, wanted: Sequence[Part], places: list[int], now_s: float) -> Iterator[tuple[int, _Slot]]:
        """Slots for those of `wanted` at `places` that get one: all at once where they can, else as many as can, in their order."""
        # Where what is evicted has first to be written, room comes in small steps.
        if places and self._ingestion.limits.type is not IngestionType.EVICTED:
            slots = self._admit([wanted[place] for place in places], now_s)
            if slots is not None:
                yield from zip(places, slots, strict=True)
                return
        # A search that finds nothing walks over all that is leased, and finds no more for the next part of that size: nothing is let go of here.
        refused: set[int] = set()
        for place in places:
            part = wanted[place]
            size_class = self._class[part.group]
            new = self._admit([part], now_s) if size_class not in refused else None
            if new is None:
                refused.add(size_class)
                self.counters["promote_refused_parts"] += 1
            else:
                yield place, new[0]

    def end_load(self, owner: str, now_s: float) -> bool:
        """All ranks have finished `owner`'s load, well or not. True if it went well."""
        load = self._loads.pop(owner, None)
        if load is None:
            return False
        failed = bool(load.reason or load.lost)
        held: list[_Slot] = []
        for part, slot in zip(load.parts, load.slots, strict=True):
            if part.source is Source.DISK:
                self._release_disk(part.key)
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
                self._let_go(part.key, slot, now_s)
        if held:
            self._held[load.load_id] = _Owed(load.ranks_holding, held, now_s + self.limits.write_deadline_s)
        for part in load.parts:
            if part.key in load.lost and part.source is Source.DISK:
                self._forget_disk(part.key, load.lost[part.key], now_s)
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
        elif isinstance(outcome, ReadDone):
            self._apply_read(outcome, now_s)
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
        long = f"{self.limits.write_deadline_s} s"
        self.counters["write_late"] += self._expire(
            self._writes.values(), now_s, f"a disk write took longer than {long}"
        )
        self._expire(self._reads.values(), now_s, f"a read ahead took longer than {long}")
        self._ingest(now_s)
        owed = (*self._fences.values(), *self._held.values())
        self._expire(owed, now_s, f"a read or a reset has not ended {long} after it was given up")
        if now_s >= self._disk_retry_at_s:
            self._disk_limit_bytes = self.limits.disk_bytes
            self._disk_suspended = False

    def _expire(self, awaited: Iterable[_Move | _Owed], now_s: float, notice: str) -> int:
        """Mark what is past its deadline since the last call; how many those are."""
        late = [one for one in awaited if not one.expired and now_s >= one.deadline_s]
        for one in late:
            one.expired = True
            self._notice(notice)
        return len(late)

    def resetting(self) -> bool:
        """Whether a rank has not answered a reset yet: until then a crash could bring back what it had on disk."""
        return bool(self._fences)

    def has_pending(self) -> bool:
        """Whether an outcome is awaited that no request waits for: the engine then has to keep stepping."""
        awaited: list[_Move | _Owed]
        awaited = [*self._writes.values(), *self._reads.values(), *self._fences.values(), *self._held.values()]
        return bool(self._actions) or any(not move.expired for move in awaited)

    def settled(self) -> bool:
        """Whether nothing is under way, what is late included."""
        return not (self._actions or self._writes or self._reads or self._fences or self._held)

    def take_actions(self) -> list[Action]:
        """What every rank has to do, in this order. Each is handed out once."""
        actions, self._actions = self._actions, []
        return actions

    def take_notices(self) -> list[str]:
        """Lines for the log, each kind once."""
        notices, self._notices = self._notices, []
        return notices

    def take_changes(self) -> list[Change]:
        """Which parts came to a tier, and which left it, since the last call, in that order.

        Not told are parts that are found on disk at the start, a reset, which clears everything, and what others do on a shared disk. A part may
        be told gone that had not come yet: a store or a load that failed.
        """
        changes: list[Change] = self._changes or []
        if changes:
            self._changes = []
        return changes

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

    def reset(self, now_s: float, generation: int | None = None) -> None:
        """Forget everything, on every tier, and begin a new generation: nothing of the old one is served again.

        `generation` is the next by default; on a shared disk it has to be one that no other engine ever takes.
        """
        generation = self.generation + 1 if generation is None else generation
        if generation <= self.generation:
            raise ValueError(f"generation {generation} is not newer than {self.generation}: generations only grow")
        self.generation = generation
        owed = list(self._filling.values())
        self._filling.clear()
        self._store_failed.clear()
        for load in self._loads.values():
            owed += [slot for slot in load.slots if slot is not None]
            load.slots = [None] * len(load.slots)
        self._loads.clear()
        self._disk_leases.clear()
        self._reading.clear()
        self._preloads.clear()
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
        if self._changes is not None:
            self._changes = []
        self.counters["resets"] += 1

    def gauges(self) -> dict[str, int]:
        """What is held now, in bytes and parts of one rank."""
        return {
            "dram_used_bytes": self._slots.used_bytes(),
            "dram_parts": len(self._dram),
            "disk_used_bytes": self._disk_used_bytes,
            "disk_limit_bytes": 0 if self.limits.disk_shared else self._disk_limit_bytes,
            "disk_parts": len(self._disk),
            "writes_in_flight": len(self._writes),
            "loads_in_flight": len(self._loads),
            "preloads_in_flight": len(self._reads),
            "preload_used_bytes": self._preloads.used_bytes,
        }

    def advice(self) -> dict[tuple[str, float], float]:
        """Estimated hit rate, by recency, of each tier at half, once, twice and four times its capacity."""
        tiers = {"dram": self.limits.arena_bytes, "disk": 0 if self.limits.disk_shared else self.limits.disk_bytes}
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
            [s for read in self._reads.values() for s in read.slots],
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
        doomed |= {id(s): s for read in self._reads.values() for s in read.slots if s.state is _State.DOOMED}
        assert self._preloads.used_bytes <= max(0, self._preloads.bytes_max), "more was read ahead than may be"
        assert self._preloads.used_bytes >= 0, "the preloads lost count"
        assert all(move_id in self._reads for move_id in self._reading.values()), "a key is read by nobody"
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

    def _tell(self, keys: Sequence[Key], tier: Source, *, gone: bool = False) -> None:
        if self._changes is None or not keys:
            return
        if self._changes and self._changes[-1][1:] == (tier, gone):
            self._changes[-1].keys.extend(keys)
        else:
            self._changes.append(Change(list(keys), tier, gone))

    def _admit(self, new: Sequence[Part], now_s: float, *, ahead: bool = False) -> list[_Slot] | None:
        """Slots in state FILLING with one lease for all of `new`, or None and nothing changed.

        What was read ahead goes last, and not at all for another read `ahead`.
        """
        key_at: dict[int, Key] = {}

        def is_leased(key: Key) -> bool:
            slot = self._dram[key]
            return slot.leases > 0 or slot.state is not _State.READY

        writes: list[tuple[Key, _Slot]] = []

        def ordered() -> Iterator[Key]:
            staged = []
            for key in self._dram_policy.candidates(now_s, is_leased, new[0].key):
                if key in self._preloads:
                    staged.append(key)
                else:
                    yield key
            if not ahead:
                yield from staged

        def victims() -> Iterator[tuple[int, int]]:
            for key in ordered():
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
            self._preloads.drop([key])
            self._slots.give(victim)
        self._tell([key_at[victim] for victim in chosen], Source.DRAM, gone=True)
        self.counters["dram_evicted_parts"] += len(chosen)
        slots = []
        for part in new:
            offset = self._slots.take(self._class[part.group])
            assert offset is not None, "choose_victims promised room"
            info = RecordInfo(self.limits.slot_bytes[part.group], part.parent, part.depth_tokens, part.cost_s)
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
            self._preloads.drop([key])
            self._tell([key], Source.DRAM, gone=True)
            slot.state = _State.DOOMED
            if slot.leases == 0:
                self._slots.give(slot.offset)

    def _let_go(self, key: Key, slot: _Slot, now_s: float) -> None:
        """Where DRAM is no cache: nobody needs this part here any more, unless it waits to be written, or for a load."""
        if self.limits.dram_keeps or slot.leases or slot.state is not _State.READY or key in self._preloads:
            return
        if self._dram.get(key) is slot and not self._ingestion.due(key):
            self._forget_slot(key, slot, now_s)

    def _release(self, slot: _Slot) -> None:
        slot.leases -= 1
        assert slot.leases >= 0, "a lease was released twice"
        if slot.leases == 0 and slot.state is _State.DOOMED:
            self._slots.give(slot.offset)

    def _release_disk(self, key: Key) -> None:
        self._disk_leases[key] -= 1
        if self._disk_leases[key] <= 0:
            del self._disk_leases[key]

    def _enter_disk(self, key: Key, group: int, info: RecordInfo, now_s: float) -> None:
        assert self._disk_policy is not None
        self._disk[key] = group
        self._disk_used_bytes += self.limits.slot_bytes[group]
        self._disk_policy.insert(key, info, now_s)
        if self.limits.disk_shared and len(self._disk) > _BELIEFS_MAX:
            oldest = next(self._disk_policy.candidates(now_s, lambda key: key in self._disk_leases), None)
            if oldest is not None:
                self._evict_disk([oldest], now_s)

    def _forget_disk(self, key: Key, reason: str, now_s: float) -> None:
        group = self._disk.pop(key, None)
        if group is not None and self._disk_policy is not None:
            self._disk_policy.remove(key, now_s, evicted=False)
            self._ingestion.lost(key)
            self._disk_used_bytes -= self.limits.slot_bytes[group]
            if not self.limits.disk_shared:
                self._tell([key], Source.DISK, gone=True)
            if not (self.limits.disk_shared and _kind(reason) in LEFT_ON_SHARED):
                self._actions.append(DeleteParts([key]))
            self.counters["disk_lost_parts"] += 1

    def _evict_disk(self, victims: Sequence[Key], now_s: float) -> None:
        assert self._disk_policy is not None
        for key in victims:
            self._disk_used_bytes -= self.limits.slot_bytes[self._disk.pop(key)]
            self._disk_policy.remove(key, now_s, evicted=True)
            self._ingestion.lost(key)
        if victims and not self.limits.disk_shared:
            self._actions.append(DeleteParts(list(victims)))
            self._tell(victims, Source.DISK, gone=True)
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
        self._tell([key], Source.DRAM)
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
        self._writes[move_id] = _Move(parts, slots, deadline_s, self.limits.rank_count, self.generation)
        values = [slot.info.cost_s / slot.info.size_bytes for slot in slots]
        self._actions.append(WriteParts(move_id, parts, [slot.info.depth_tokens for slot in slots], values))

    @staticmethod
    def _ended_on_all(moves: dict[int, _Move], outcome: WriteDone | ReadDone) -> _Move | None:
        """Take one rank's word; the move, which is no more under way, if it was the last rank's."""
        move = moves.get(outcome.move_id)
        if move is None:
            return None
        move.failed.update(outcome.failed)
        move.ranks_left -= 1
        return moves.pop(outcome.move_id) if move.ranks_left == 0 else None

    def _apply_write(self, outcome: WriteDone, now_s: float) -> None:
        write = self._ended_on_all(self._writes, outcome)
        if write is None:
            return
        for slot in write.slots:
            self._release(slot)
        if write.generation != self.generation:
            return
        written: list[Key] = []
        assert self._disk_policy is not None and self._admission is not None
        for part, slot in zip(write.parts, write.slots, strict=True):
            group = self._writing.pop(part.key)
            size = self.limits.slot_bytes[group]
            self._ingestion.ended(part.key, written=part.key not in write.failed)
            self._disk_used_bytes -= size
            if part.key in write.failed:
                self._admission.undo(size)
            else:
                self._enter_disk(part.key, group, slot.info, now_s)
                written.append(part.key)
        # On disk before it leaves DRAM, for those who are told.
        self._tell(written, Source.DISK)
        for part, slot in zip(write.parts, write.slots, strict=True):
            self._let_go(part.key, slot, now_s)
        self.counters["written_parts"] += len(written)
        if written and self.limits.disk_shared:
            self._actions.append(CommitParts(written))
        if write.failed:
            # Other ranks may have written what one could not: a part counts only where all have it. On a shared disk another engine may have it whole.
            if not self.limits.disk_shared:
                self._actions.append(DeleteParts(list(write.failed)))
            self.counters["write_failed_parts"] += len(write.failed)
            for reason in sorted(set(write.failed.values())):
                self.counters[f"write_failed:{_kind(reason)}"] += 1
                self._notice(f"parts could not be written to disk, and are served from DRAM only: {reason}")
            self._disk_retry_at_s = now_s + self.limits.disk_retry_s
            kinds = {_kind(reason) for reason in write.failed.values()}
            if NO_SPACE in kinds and not self.limits.disk_shared:
                slack_bytes = 2 * max(self.limits.slot_bytes)
                self._disk_limit_bytes = max(0, min(self._disk_limit_bytes, self._disk_used_bytes - slack_bytes))
            harmless = {EXISTS_DIFFERENT, OVER_BUDGET} if self.limits.disk_shared else {NO_SPACE, OVER_BUDGET}
            self._disk_suspended = not kinds <= harmless
        self._ingest(now_s)

    def _apply_read(self, outcome: ReadDone, now_s: float) -> None:
        read = self._ended_on_all(self._reads, outcome)
        if read is None:
            return
        for part, slot in zip(read.parts, read.slots, strict=True):
            if read.generation == self.generation:
                del self._reading[part.key]
                self._release_disk(part.key)
                reason = read.failed.get(part.key)
                if reason is not None:
                    self._forget_slot(part.key, slot, now_s)
                    self._forget_disk(part.key, reason, now_s)
                elif slot.state is _State.FILLING:
                    slot.state = _State.READY
                    self._stored(part.key, slot, below=True)
            self._release(slot)
            self._let_go(part.key, slot, now_s)
        for reason in sorted(set(read.failed.values())):
            self.counters[f"load_failed:{_kind(reason)}"] += 1
            self._notice(f"a read ahead failed, what it was for is read again or recomputed: {reason}")
