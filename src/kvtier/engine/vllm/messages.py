"""What the connector's two sides send each other through vLLM's own metadata."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvtier.store.moves import Action, Outcome, PartPlace
from kvtier.tier.disk.shared_layout import SharedLayout


class PartsSpec(LoadStoreSpec):
    """The tier's side of a job: its parts, in the order of the engine's blocks."""

    def __init__(self, parts: Sequence[PartPlace], load_id: int = 0) -> None:
        self.parts = list(parts)
        self.load_id = load_id


@dataclass
class KVTierMetadata(OffloadingConnectorMetadata):
    """Scheduler to workers: the step's jobs, and the control plane's actions, which come before them.

    `idle` says that the step computes nothing: the engine steps because something is under way.
    """

    actions: list[Action] = field(default_factory=list)
    idle: bool = False


@dataclass
class KVTierWorkerMetadata(OffloadingWorkerMetadata):
    """Workers to scheduler: jobs that ended, and outcomes of ranks."""

    outcomes: list[Outcome] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KVTierWorkerMetadata":
        assert isinstance(other, KVTierWorkerMetadata)
        merged = super().aggregate(other)
        return KVTierWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            outcomes=self.outcomes + other.outcomes,
        )


@dataclass
class KVTierHandshake(KVConnectorHandshakeMetadata):
    """One rank's state at start.

    Attributes:
        slot_bytes: bytes of a part in its slot, by group.
        slots_bytes: how much of the rank's arena slots may take.
        disk_bytes: what its disk store holds at most, 0 for none.
        generation: the epoch that its disk store serves.
        entries: keys, and depths in tokens, of the parts on its disk, oldest use first.
        shared: where its parts are on a filesystem that other engines share, which is asked instead of `entries`.
    """

    slot_bytes: tuple[int, ...]
    slots_bytes: int
    disk_bytes: int
    generation: int
    entries: tuple[list[bytes], list[int]]
    shared: SharedLayout | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A million small objects take seconds to pickle; three blocks of memory do not."""
        keys, depths = self.entries
        lengths = np.fromiter(map(len, keys), np.uint32, len(keys))
        return {**self.__dict__, "entries": (b"".join(keys), lengths, np.array(depths, np.int64))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        text, lengths, depths = state["entries"]
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        keys = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        self.__dict__.update(state, entries=(keys, depths.tolist()))
