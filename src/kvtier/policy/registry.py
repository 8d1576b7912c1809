"""Eviction policies by name. Adding one is one file and one line here."""

from kvtier.policy.arc import ARCPolicy
from kvtier.policy.base import EvictionPolicy
from kvtier.policy.fifo import FIFOPolicy
from kvtier.policy.lfu import LFUPolicy
from kvtier.policy.lru import LRUPolicy
from kvtier.policy.reuse import ReusePolicy
from kvtier.policy.s3fifo import S3FIFOPolicy
from kvtier.policy.sieve import SievePolicy

_POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (ARCPolicy, FIFOPolicy, LFUPolicy, LRUPolicy, ReusePolicy, S3FIFOPolicy, SievePolicy)
}


def policy_names() -> tuple[str, ...]:
    """Names that `make_policy` knows, sorted."""
    return tuple(sorted(_POLICIES))


def make_policy(name: str, capacity_bytes: int) -> EvictionPolicy:
    """A new, empty policy. Names are not case-sensitive. Raises ValueError for an unknown one."""
    policy = _POLICIES.get(name.lower())
    if policy is None:
        raise ValueError(f"eviction policy {name!r} is not known: use one of {', '.join(policy_names())}")
    return policy(capacity_bytes)
