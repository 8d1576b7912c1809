"""The `Connector` interface that every remote back end implements.

It is declared as AIBrix declares it, so that a back end written for one is a back end for the other, with one more optional
feature: `variable_payload`, values of any length as byte strings. A back end without it keeps the contract of blocks of one
fixed size, unchanged.

Answers are per key and in the order of the keys: the caller, not a back end, decides what a contiguous prefix is. Operations on
keys answer with a `Status` and do not raise for what a store may do (miss, refuse, time out); calling a feature that a back end does not
have is a fault of the caller and raises UnsupportedFeatureError.
"""

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvtier.errors import KVTierError
from kvtier.record.envelope import Buffer, byte_view

if TYPE_CHECKING:
    import torch

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class UnsupportedFeatureError(KVTierError, NotImplementedError):
    """A connector was asked for a feature that it does not have."""


class StatusCode(Enum):
    """How an operation ended."""

    OK = "ok"
    ERROR = "error"
    NOT_FOUND = "not_found"
    INVALID = "invalid"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    DENIED = "denied"
    CANCELLED = "cancelled"


class StatusError(KVTierError):
    """What `Status.unwrap` raises for a status that is not OK."""

    def __init__(self, status: "Status[Any]") -> None:
        super().__init__(str(status))
        self.status = status


@dataclass(frozen=True, slots=True)
class Status(Generic[T]):
    """How an operation ended, and what it gave where it succeeded.

    Attributes:
        code: how it ended.
        value: what it gave; None unless `code` is OK.
        detail: why it did not succeed, for people.
        error: the exception behind it, where there was one.
    """

    code: StatusCode = StatusCode.OK
    value: T | None = None
    detail: str = ""
    error: BaseException | None = field(default=None, compare=False)

    @classmethod
    def ok(cls, value: T | None = None) -> "Status[T]":
        """Success."""
        return cls(StatusCode.OK, value)

    @classmethod
    def failed(cls, code: StatusCode, detail: str = "", error: BaseException | None = None) -> "Status[T]":
        """Anything else. `detail` is the error's text where none is given."""
        return cls(code, None, detail or (str(error) if error else ""), error)

    def is_ok(self) -> bool:
        """Whether it succeeded."""
        return self.code is StatusCode.OK

    def is_not_found(self) -> bool:
        """Whether there was no such key."""
        return self.code is StatusCode.NOT_FOUND

    def unwrap(self) -> T:
        """The value. Raises StatusError unless the status is OK and has one."""
        if self.code is not StatusCode.OK or self.value is None:
            raise StatusError(self)
        return self.value

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}" if self.detail else self.code.value


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRegion:
    """A contiguous run of bytes that values are fetched into or put from.

    It belongs to its caller; during an operation, to the back end, until that operation's status was returned.

    Attributes:
        view: its bytes; writable where something is to be fetched into it.
        registration: what the back end gave for the slab it lies in (an RDMA key, say), None where there is nothing.
    """

    view: memoryview
    registration: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "view", byte_view(self.view))

    @classmethod
    def of(cls, buffer: Buffer, registration: Any = None) -> "MemoryRegion":
        """The region of a contiguous buffer of any shape. Raises RecordLengthError where it is not contiguous."""
        return cls(memoryview(buffer), registration)

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return len(self.view)


@dataclass
class ConnectorFeature:
    """The features of a connector.

    Attributes:
        mput_mget: it has `mput` and `mget`.
        prefetch: it has `prefetch`.
        rdma: it moves bytes by RDMA.
        gdr_put: it puts from GPU memory directly.
        gdr_get: it gets into GPU memory directly.
        variable_payload: it has `put_bytes` and `get_bytes`, for values of any length.
    """

    mput_mget: bool = False
    prefetch: bool = False
    rdma: bool = False
    gdr_put: bool = False
    gdr_get: bool = False
    variable_payload: bool = False


@dataclass
class ConnectorConfig:
    """How a connector is made.

    Attributes:
        backend_name: name of the back end in the registry.
        namespace: what separates stores of one deployment from those of others.
        partition_id: what separates the ranks of one engine.
        executor: runs what would block the event loop.
        block_spec_signature: what the blocks' shape and type come down to.
        key_builder_signature: how keys are made.
        layout_signature: how a block's bytes lie.
    """

    backend_name: str
    namespace: str
    partition_id: str
    executor: Executor
    block_spec_signature: str = ""
    key_builder_signature: str = ""
    layout_signature: str = ""


@dataclass
class ConnectorRegisterDescriptor:
    """What a back end keeps of a registered slab; each back end has its own subclass."""


Regions = MemoryRegion | Sequence[MemoryRegion]


class Connector(Generic[K, V]):
    """One connection to a remote store. Its coroutines run on one event loop."""

    @classmethod
    @abstractmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> "Connector[K, V]":
        """A connector set up from environment variables.

        Args:
            conn_id: names the part of the store that this connector sees.
            executor: runs what would block the event loop.
            kwargs: what the back end lets a caller set beside the environment.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the back end."""
        raise NotImplementedError

    @property
    @abstractmethod
    def feature(self) -> ConnectorFeature:
        """What this connector can do beside the required operations."""
        raise NotImplementedError

    @abstractmethod
    def open(self) -> Status[None]:
        """Connect. Operations before it or after `close` end as ERROR."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> Status[None]:
        """Disconnect. Repeating it changes nothing."""
        raise NotImplementedError

    async def prefetch(self, keys: Sequence[K]) -> None:
        """Hint that `keys` will be asked for soon. Does nothing where the feature `prefetch` is off."""
        return

    @abstractmethod
    async def exists(self, key: K) -> Status[None]:
        """OK where `key` is stored, else NOT_FOUND. It may be gone a moment later."""
        raise NotImplementedError

    @abstractmethod
    async def get(self, key: K, mr: Regions) -> Status[int]:
        """Fetch a value into `mr`, exactly as long as the value; OK with the number of bytes.

        `mr` is a sequence only with the feature `gdr_get`. Unless the status is OK, what `mr` holds is undefined.
        """
        raise NotImplementedError

    @abstractmethod
    async def put(self, key: K, mr: Regions) -> Status[None]:
        """Store what `mr` holds. The same bytes again are OK; other bytes under a stored key are DENIED.

        `mr` is a sequence only with the feature `gdr_put`. Unless the status is OK, the store is unchanged or lacks the key.
        """
        raise NotImplementedError

    def register_slabs(self, slabs: "list[torch.Tensor]") -> Status[None]:
        """Register slabs that memory regions will lie in. Only back ends that need it implement it."""
        raise NotImplementedError

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[Regions], batch_size: int
    ) -> Sequence[Sequence[tuple[K, Regions]]]:
        """Cut `keys` and their `mrs` into batches of at most `batch_size`, for `mput` and `mget`."""
        raise NotImplementedError

    async def mget(self, keys: Sequence[K], mrs: Sequence[Regions]) -> Sequence[Status[int]]:
        """`get` for many: one status a key, in their order. Only with the feature `mput_mget`."""
        raise NotImplementedError

    async def mput(self, keys: Sequence[K], mrs: Sequence[Regions]) -> Sequence[Status[None]]:
        """`put` for many: one status a key, in their order. Only with the feature `mput_mget`."""
        raise NotImplementedError

    @abstractmethod
    async def delete(self, key: K) -> Status[None]:
        """Drop a key: OK, NOT_FOUND, or DENIED where it is leased."""
        raise NotImplementedError

    # -- variable_payload --------------------------------------------------------------------------------------------------

    async def get_bytes(self, key: K) -> Status[memoryview]:
        """The value of `key`, of any length, read-only. Only with the feature `variable_payload`.

        Raises UnsupportedFeatureError where the connector does not have it.
        """
        raise UnsupportedFeatureError(_no_variable_payload(self, "get_bytes", "get"))

    async def put_bytes(self, key: K, value: Buffer) -> Status[None]:
        """Store `value`, of any length. Statuses as for `put`. Only with the feature `variable_payload`.

        Raises UnsupportedFeatureError where the connector does not have it.
        """
        raise UnsupportedFeatureError(_no_variable_payload(self, "put_bytes", "put"))


def _no_variable_payload(connector: "Connector[Any, Any]", called: str, instead: str) -> str:
    return (
        f"connector {connector.name!r} has no variable_payload, which {called} needs: use {instead} with blocks of one size, or a back end "
        f"whose feature.variable_payload is true"
    )
