"""kvtier keeps the KV cache of large language models outside the GPU and brings it back.

Start reading at `docs/design.md`; the rooms of this package are listed there in the order in which
they may import one another.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvtier.engine.embedded import Cache


def open(part_bytes: int, namespace: dict[str, object], **settings: Any) -> "Cache":  # noqa: A001
    """A cache in this process, without an engine: see `kvtier.engine.embedded.Cache`."""
    from kvtier.engine.embedded import Cache

    return Cache(part_bytes, namespace, **settings)
