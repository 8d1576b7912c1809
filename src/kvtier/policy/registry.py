"""Eviction policies by name. Adding one is one file and one line here."""

from kvtier.policy.base import EvictionPolicy
from kvtier.policy.lru import LRUPolicy

_POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRUPolicy,)}


def policy_names() -> tuple[str, ...]:
    """Names that `make_policy` knows, sorted."""
    return tuple(sorted(_POLICIES))


def make_policy(name: str, capacity_bytes: int) -> EvictionPolicy:
    """A new, empty policy. Names are not case-sensitive. Raises ValueError for an unknown one."""
    policy = _POLICIES.get(name.lower())
    if policy is None:
        raise ValueError(f"eviction policy {name!r} is not known: use one of {', '.join(policy_names())}")
    return policy(capacity_bytes)
