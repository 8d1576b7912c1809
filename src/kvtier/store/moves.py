"""What the two planes say to each other: actions go down to every rank, outcomes come back from each.

All are msgspec structs: they cross processes, and their encoding is part of no stored format.
"""

from enum import IntEnum

import msgspec

Key = bytes

NO_SLOT = -1
"""Arena offset of a part that passes through a rank's own staging instead of a slot."""


class Source(IntEnum):
    """Where a load takes a part from."""

    MISSING = 0
    DRAM = 1
    DISK = 2


class PartPlace(msgspec.Struct, frozen=True, array_like=True):
    """A part and its arena slot: `offset` in bytes, the same on every rank, or NO_SLOT."""

    key: Key
    group: int
    offset: int
    source: Source = Source.DRAM


class WriteParts(msgspec.Struct, frozen=True, tag=True):
    """Write these slots to disk and answer with one WriteDone.

    `values_s_per_byte` are the seconds of recompute that each part saves for a byte stored, 0 where unknown.
    """

    move_id: int
    parts: list[PartPlace]
    depths_tokens: list[int]
    values_s_per_byte: list[float]


class ReadParts(msgspec.Struct, frozen=True, tag=True):
    """Read these parts from disk into their slots ahead of a load, after all that loads wait for, and answer with one ReadDone."""

    move_id: int
    parts: list[PartPlace]


class HurryReads(msgspec.Struct, frozen=True, tag=True):
    """A load waits for what this ReadParts reads: no longer after the others. No answer."""

    move_id: int


class DeleteParts(msgspec.Struct, frozen=True, tag=True):
    """Drop these keys from disk. No answer: deletes take effect before any later write of the same rank."""

    keys: list[Key]


class CommitParts(msgspec.Struct, frozen=True, tag=True):
    """Every rank has these keys on a disk tier that others share: say so there. For the scheduler's own side, no answer."""

    keys: list[Key]


class ResetTier(msgspec.Struct, frozen=True, tag=True):
    """Make `generation` durable, drop all that is older, and answer FenceDone once no earlier copy is in flight."""

    generation: int
    fence_id: int


Action = WriteParts | ReadParts | HurryReads | DeleteParts | CommitParts | ResetTier


class WriteDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has finished a WriteParts: `failed` holds the reason for each key that is not on its disk."""

    move_id: int
    failed: dict[Key, str]


class ReadDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has finished a ReadParts: `failed` holds the reason for each key that is not in its slot."""

    move_id: int
    failed: dict[Key, str]


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """A load's parts did not all reach the engine on a rank.

    `lost` holds the reason for each key whose bytes are gone or wrong; it is empty where the parts may be fine (a
    deadline passed, the copy raised): `reason` says so then. `held` means that reads are still in flight, which own
    their slots until the rank's LoadReleased.
    """

    load_id: int
    lost: dict[Key, str]
    reason: str
    held: bool = False


class LoadReleased(msgspec.Struct, frozen=True, tag=True):
    """The last read in flight of a load that failed with `held` has ended on a rank."""

    load_id: int


class StoreFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not copy these keys out of the engine."""

    keys: list[Key]
    reason: str


class FenceDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has passed the fence."""

    fence_id: int


Outcome = WriteDone | ReadDone | LoadFailed | LoadReleased | StoreFailed | FenceDone
