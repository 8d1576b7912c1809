"""The demo behind `kvtier quickstart`.

Two synthetic records go through the real MEMORY connector, once as they are and once in zstd. Each arm encodes, stores, retrieves, decodes and compares
every byte under the event recorder, then puts the connector's promises to the test on stores of their own. Nothing here says anything about models or
speed.

Every check can fail: `run(broken)` swaps in a part that breaks one promise (`_SABOTAGE`), and the check of that name must see it.
"""

import asyncio
import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from kvtier import __version__
from kvtier.errors import KVTierError
from kvtier.memory.base import LeaseOwner
from kvtier.observe.recorder import OFF, Event, Recorder, event_json, problems_of
from kvtier.record.codecs import RecordCodec, make_codec
from kvtier.record.envelope import Buffer, Identity, RecordHead, RecordSizes, pack, sizes_of, unpack
from kvtier.record.errors import RecordChecksumError, RecordGenerationError
from kvtier.tier.remote.channel import FetchedRecord, RecordChannel
from kvtier.tier.remote.connector import Status, StatusCode
from kvtier.tier.remote.memory import MemoryConnector

NAMESPACE: Final = b"kvtier quickstart"
GENERATION: Final = 1
CAPACITY_BYTES: Final = 1 << 20
EVENTS_AN_ARM: Final = 8
DEPENDENCIES: Final = ("msgspec", "numpy", "xxhash", "zstandard")
RECORDS: Final = {
    "state": b"".join(b"state %06d | " % (number // 7) for number in range(400))[:4096],
    "span": b"".join(b"layer %02d token %04d | " % (number % 4, number // 16) for number in range(500))[:8192],
}
ARMS: Final[dict[str, dict[str, Any]]] = {"identity": {}, "zstd": {"level": 3}}


class InvariantError(KVTierError):
    """A promise does not hold."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(detail)
        self.invariant = invariant


def check(holds: bool, invariant: str, detail: str) -> None:
    """Raise InvariantError unless it holds."""
    if not holds:
        raise InvariantError(invariant, detail)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the demo is made of, so that each part can be swapped for one that breaks a promise."""

    connector: type[MemoryConnector] = MemoryConnector
    channel: type[RecordChannel] = RecordChannel
    release: Callable[[LeaseOwner, str], int] = lambda owner, scope: owner.release(scope)
    sizes: Callable[[RecordHead], RecordSizes] = sizes_of
    events_max: int = EVENTS_AN_ARM


@dataclass(slots=True)
class Arm:
    """One codec's run."""

    name: str
    parts: Parts
    records: dict[str, RecordSizes] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    dropped: int = 0
    held: list[str] = field(default_factory=list)

    @property
    def codec(self) -> RecordCodec:
        """The codec of the arm, bound to the demo's namespace."""
        return RecordCodec(NAMESPACE, make_codec(self.name, **ARMS[self.name]))

    def identity(self, name: str) -> Identity:
        """The identity of a record."""
        return self.codec.identity(name.encode(), GENERATION)

    def packed(self, name: str) -> bytes:
        """One of the two records, encoded."""
        head, payload = self.codec.encode(self.identity(name), RECORDS[name])
        return pack(head, payload)

    def connect(self, capacity_bytes: int = CAPACITY_BYTES) -> MemoryConnector:
        """A new open connector."""
        connector = self.parts.connector(
            f"quickstart-{self.name}", capacity_bytes=capacity_bytes, policy="lru", close_deadline_s=0.0
        )
        connector.open()
        return connector

    def channel(self, connector: MemoryConnector, recorder: Recorder = OFF) -> RecordChannel:
        """The arm's records over a connector."""
        return self.parts.channel(connector, self.codec, recorder, self.name)


# -- the measured run ----------------------------------------------------------------------------------------------------


async def measure(arm: Arm) -> None:
    """Encode, store, retrieve and decode both records under the recorder, and compare every byte."""
    recorder = Recorder(arm.parts.events_max)
    connector = arm.connect()
    channel = arm.channel(connector, recorder)
    for name, raw in RECORDS.items():
        encoded = channel.encode(arm.identity(name), raw)
        stored = await channel.put(encoded)
        found = await channel.fetch(encoded.identity, stored.value)
        check(stored.is_ok() and found.is_ok(), "round_trip", f"record {name!r}: store {stored}, retrieve {found}")
        fetched = found.unwrap()
        decoded = channel.decode(fetched)
        check(bytes(decoded) == raw, "round_trip", f"record {name!r} of {len(raw)} bytes came back as other bytes")
        sizes = arm.parts.sizes(encoded.head)
        check(
            sizes.payload_bytes + sizes.metadata_bytes + sizes.framing_bytes
            == sizes.stored_bytes
            == len(fetched.record),
            "sizes_add_up",
            f"record {name!r}: {sizes} for {len(fetched.record)} bytes stored",
        )
        arm.records[name] = sizes
    connector.close()
    run = recorder.finish()
    problems = problems_of(run)
    check(not problems, "events_valid", "; ".join(problems))
    check(
        len(run.events) == EVENTS_AN_ARM,
        "events_valid",
        f"{len(run.events)} events were recorded, {EVENTS_AN_ARM} were measured",
    )
    arm.events, arm.dropped = run.events, run.dropped


# -- the promises, each on a store of its own ----------------------------------------------------------------------------


async def filled(arm: Arm) -> MemoryConnector:
    """A connector with room for both records and no byte more, and both in it, `state` first."""
    connector = arm.connect(sum(len(arm.packed(name)) for name in RECORDS))
    for name in RECORDS:
        (await connector.put_bytes(name.encode(), arm.packed(name))).is_ok()
    return connector


async def content(connector: MemoryConnector) -> dict[str, bytes]:
    """What is stored of the two records and of what the checks add."""
    names = [*RECORDS, "other"]
    present = [name for name in names if (await connector.exists(name.encode())).is_ok()]
    return {name: bytes((await connector.get_bytes(name.encode())).unwrap()) for name in present}


async def duplicates(arm: Arm) -> None:
    """The same record again changes nothing; other bytes under its key are refused."""
    connector = await filled(arm)
    before = await content(connector)
    for name in RECORDS:
        again = await connector.put_bytes(name.encode(), arm.packed(name))
        check(again.is_ok(), "duplicate_is_no_op", f"record {name!r} again: {again}")
    check(await content(connector) == before, "duplicate_is_no_op", "a repeat changed what is stored")
    for name in RECORDS:
        other = await connector.put_bytes(name.encode(), arm.packed(name)[::-1])
        check(other.code is StatusCode.DENIED, "conflict_is_refused", f"other bytes as {name!r}: {other}")
    check(await content(connector) == before, "conflict_is_refused", "a refused put changed what is stored")


async def protected_admission(arm: Arm) -> None:
    """Room is made of what is not leased, even where the leased record was used longer ago."""
    connector = await filled(arm)
    with connector.owner("reader") as owner:
        owner.lease(b"state", "read")
        await connector.get_bytes(b"span")
        put = await connector.put_bytes(b"other", bytes(len(arm.packed("span"))))
        check(put.is_ok(), "protected_admission", f"there was room without the leased record: {put}")
        check("state" in await content(connector), "protected_admission", "a leased record was evicted")


async def safe_refusal(arm: Arm) -> None:
    """What cannot be admitted changes nothing, not even what could have been evicted."""
    connector = await filled(arm)
    before = await content(connector)
    with connector.owner("reader") as owner:
        owner.lease(b"state", "read")
        put = await connector.put_bytes(b"other", bytes(len(arm.packed("span")) + 1))
        check(put.code is StatusCode.OUT_OF_MEMORY, "safe_refusal", f"there is no room beside a leased record: {put}")
        check(await content(connector) == before, "safe_refusal", "a refused put changed what is stored")


async def eviction_after_lease(arm: Arm) -> None:
    """Once its lease ended, the record used longest ago goes."""
    connector = await filled(arm)
    with connector.owner("reader") as owner:
        owner.lease(b"state", "read")
        await connector.get_bytes(b"span")
        arm.parts.release(owner, "read")
        put = await connector.put_bytes(b"other", bytes(len(arm.packed("state"))))
        check(put.is_ok(), "eviction_after_lease", f"nothing is leased any more: {put}")
        now = await content(connector)
        check(
            "state" not in now and "span" in now,
            "eviction_after_lease",
            f"{sorted(now)} are stored where 'state' had to go",
        )


async def close_during_lease(arm: Arm) -> None:
    """Close meets its deadline, says who holds what, and leaves the leased bytes alone."""
    connector = await filled(arm)
    owner = connector.owner("reader")
    lease = owner.lease(b"state", "read")
    assert lease is not None
    closed = connector.close()
    check(closed.code is StatusCode.TIMEOUT, "close_during_lease", f"a record was leased, and close said {closed}")
    check(
        "'reader'" in closed.detail and b"state".hex() in closed.detail,
        "close_during_lease",
        f"close did not say who holds what: {closed}",
    )
    check(bytes(lease.view) == arm.packed("state"), "close_during_lease", "the leased bytes changed")
    check(
        (await connector.get_bytes(b"span")).code is StatusCode.ERROR,
        "close_during_lease",
        "a closing store still serves",
    )
    lease.release()
    check(connector.close().is_ok(), "close_during_lease", "close fails though nothing is leased any more")


async def fetched(arm: Arm, name: str) -> FetchedRecord:
    """One of the two records as it lies in a store."""
    channel = arm.channel(arm.connect())
    await channel.store(arm.identity(name), RECORDS[name])
    return (await channel.fetch(arm.identity(name))).unwrap()


async def wrong_generation(arm: Arm) -> None:
    """Each record is refused to a reader of another generation."""
    channel = arm.channel(arm.connect())
    for name in RECORDS:
        other = replace(arm.identity(name), generation=GENERATION + 1)
        try:
            channel.decode(replace(await fetched(arm, name), identity=other))
        except RecordGenerationError:
            continue
        raise InvariantError(
            "wrong_generation", f"record {name!r} of generation {GENERATION} was given to a reader of {GENERATION + 1}"
        )


async def corrupt_checksum(arm: Arm) -> None:
    """Each record is refused once a bit of its payload changed, the first or the last, or the sum that its head keeps of it."""
    channel = arm.channel(arm.connect())
    for name in RECORDS:
        sound = await fetched(arm, name)
        head, payload = unpack(sound.record, sound.identity)
        other_sum = pack(msgspec.structs.replace(head, payload_sum=head.payload_sum ^ 1), payload)
        damages = {"another sum in its head": other_sum}
        for at in (len(sound.record) - len(payload), len(sound.record) - 1):
            damages[f"bit 0 of byte {at} changed"] = (
                sound.record[:at].tobytes() + bytes((sound.record[at] ^ 1,)) + sound.record[at + 1 :].tobytes()
            )
        for damage, record in damages.items():
            try:
                channel.decode(replace(sound, record=memoryview(record)))
            except RecordChecksumError:
                continue
            raise InvariantError("corrupt_checksum", f"record {name!r} was served with {damage}")


# What runs, in this order, and the promise that is broken where a step ends in an error that it doesn't expect.
_STEPS: Final[dict[Callable[[Arm], Any], str]] = {
    measure: "round_trip",
    duplicates: "duplicate_is_no_op",
    protected_admission: "protected_admission",
    safe_refusal: "safe_refusal",
    eviction_after_lease: "eviction_after_lease",
    close_during_lease: "close_during_lease",
    wrong_generation: "wrong_generation",
    corrupt_checksum: "corrupt_checksum",
}


# -- how each promise is broken on purpose -------------------------------------------------------------------------------


class _DeniesRepeats(MemoryConnector):
    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        status = await super().put_bytes(key, value)
        return (
            Status.failed(StatusCode.DENIED, "sabotage: a repeat is refused")
            if self.store.stats().unchanged
            else status
        )


class _HidesConflicts(MemoryConnector):
    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        status = await super().put_bytes(key, value)
        return Status.ok() if status.code is StatusCode.DENIED else status


class _EvictsLeased(MemoryConnector):
    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        if key == b"other":
            kept = [(name.encode(), bytes(self.store.get(name.encode()) or b"")) for name in RECORDS]
            self._store = None  # and with it, who leases what
            self.open()
            for name, packed in kept:
                await super().put_bytes(name, packed)
        return await super().put_bytes(key, value)


class _EvictsBeforeItRefuses(MemoryConnector):
    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        status = await super().put_bytes(key, value)
        if status.code is StatusCode.OUT_OF_MEMORY:
            await self.delete(b"span")
        return status


class _ClosesOverLeases(MemoryConnector):
    def close(self) -> Status[None]:
        super().close()
        return Status.ok()


class _GivesOtherBytes(RecordChannel):
    def decode(self, fetched: FetchedRecord, out: memoryview | None = None) -> memoryview:
        return memoryview(bytes(super().decode(fetched, out)[:-1]) + b"?")


class _AcceptsAnyGeneration(RecordChannel):
    def unpack(self, fetched: FetchedRecord) -> tuple[RecordHead, memoryview]:
        head, payload = unpack(fetched.record, None)
        return msgspec.structs.replace(head, identity=fetched.identity), payload


class _AcceptsAnyPayload(RecordChannel):
    def decode(self, fetched: FetchedRecord, out: memoryview | None = None) -> memoryview:
        try:
            return super().decode(fetched, out)
        except RecordChecksumError:
            return fetched.record


_SABOTAGE: Final[dict[str, Parts]] = {
    "round_trip": Parts(channel=_GivesOtherBytes),
    "sizes_add_up": Parts(sizes=lambda head: replace(sizes_of(head), framing_bytes=0)),
    "events_valid": Parts(events_max=EVENTS_AN_ARM - 1),
    "duplicate_is_no_op": Parts(connector=_DeniesRepeats),
    "conflict_is_refused": Parts(connector=_HidesConflicts),
    "protected_admission": Parts(connector=_EvictsLeased),
    "safe_refusal": Parts(connector=_EvictsBeforeItRefuses),
    "eviction_after_lease": Parts(release=lambda owner, scope: 0),
    "close_during_lease": Parts(connector=_ClosesOverLeases),
    "wrong_generation": Parts(channel=_AcceptsAnyGeneration),
    "corrupt_checksum": Parts(channel=_AcceptsAnyPayload),
}
INVARIANTS: Final = tuple(_SABOTAGE)


# -- result --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """What the demo found."""

    arms: list[Arm]
    failure: InvariantError | None

    def summary(self) -> dict[str, Any]:
        """Sizes of each record in each arm; the ratio is of raw bytes to all bytes stored."""
        return {
            "arms": {
                arm.name: {
                    "records": {
                        name: asdict(sizes) | {"raw_to_envelope_ratio": sizes.raw_to_envelope_ratio}
                        for name, sizes in arm.records.items()
                    }
                }
                for arm in self.arms
            }
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """The measured events, each with its arm. Ids and times are of the arm's own run."""
        for arm in self.arms:
            for event in arm.events:
                line = event_json(event)
                record = bytes.fromhex(str(event.attrs["key"])).decode()
                yield {"arm": arm.name, "record": record, "stage": line.pop("name")} | line

    def evidence(self) -> dict[str, Any]:
        """What the result was obtained with, so that somebody else can obtain it."""
        source = Path(__file__)
        return {
            "kvtier": __version__,
            "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
            "dependencies": {name: version(name) for name in DEPENDENCIES},
            "platform": {
                "system": platform.system(),
                "release": platform.release(),
                "machine": platform.machine(),
                "byte_order": sys.byteorder,
            },
            "source": {"file": source.name, "sha256": hashlib.sha256(source.read_bytes()).hexdigest()},
            "runs": {
                arm.name: {"events": len(arm.events), "dropped": arm.dropped, "valid": "events_valid" in arm.held}
                for arm in self.arms
            },
            "invariants": {arm.name: arm.held for arm in self.arms},
            "failed": None if self.failure is None else self.failure.invariant,
        }


def run(broken: str | None = None) -> Result:
    """Run both arms, with one promise broken on purpose if `broken` names it, up to the first check that fails."""
    parts = Parts() if broken is None else _SABOTAGE[broken]
    arms: list[Arm] = []
    for name in ARMS:
        arm = Arm(name, parts)
        arms.append(arm)
        for step, invariant in _STEPS.items():
            try:
                asyncio.run(step(arm))
            except InvariantError as failure:
                return Result(arms, failure)
            except Exception as error:  # noqa: BLE001 - a part that raises has not kept its promise, whatever it raises
                return Result(arms, InvariantError(invariant, f"{type(error).__name__}: {error}"))
        arm.held = list(INVARIANTS)
    return Result(arms, None)
