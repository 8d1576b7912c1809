"""What the connector's two sides send each other through vLLM's own metadata."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        entries: key and depth in tokens of each part on its disk, oldest use first.
        shared: where its parts are on a filesystem that other engines share, which is asked instead of `entries`.
    """

    slot_bytes: tuple[int, ...]
    slots_bytes: int
    disk_bytes: int
    generation: int
    entries: list[tuple[bytes, int]]
    shared: SharedLayout | None = None
