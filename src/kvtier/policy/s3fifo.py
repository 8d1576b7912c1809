"""S3-FIFO: a small queue for the new, a main queue for what proved itself, ghosts of the small one.

The variant and defaults are document 001's. A new key enters the small queue; one that a ghost remembers
enters the main queue. The victim comes from the small queue while that holds more than its share or the main
queue is empty, else from the main queue. A key at the small queue's end moves to the main queue with its
uses set back to nothing, if it was used often enough; else it is the victim and leaves a ghost. A key at the
main queue's end with uses left pays one and goes back in; without, it is the victim and leaves nothing. Uses
count to three.

Ghosts are bounded: by the bytes of the main queue's share, in sizes they had, and in number.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo
from kvtier.policy.queue import Ghosts, Node, Queue

USES_MAX = 3


class S3FIFOPolicy(EvictionPolicy):
    """S3-FIFO with document 001's settings.

    Args:
        capacity_bytes: capacity of the tier.
        small_to_main_promo_threshold: uses in the small queue that earn a place in the main one, 1 to 3.
        small_fifo_capacity_ratio: the small queue's share of the capacity, above 0 and below 1.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(
        self, capacity_bytes: int, *, small_to_main_promo_threshold: int = 1, small_fifo_capacity_ratio: float = 0.3
    ) -> None:
        super().__init__(capacity_bytes)
        if not 1 <= small_to_main_promo_threshold <= USES_MAX:
            raise ValueError(
                f"small_to_main_promo_threshold is {small_to_main_promo_threshold}: use 1 to {USES_MAX}, as uses are counted"
            )
        if not 0 < small_fifo_capacity_ratio < 1:
            raise ValueError(
                f"small_fifo_capacity_ratio is {small_fifo_capacity_ratio}: use a share above 0 and below 1"
            )
        self.threshold = small_to_main_promo_threshold
        self.small_bytes_max = capacity_bytes * small_fifo_capacity_ratio
        self._small = Queue()
        self._main = Queue()
        self._nodes: dict[Key, Node] = {}
        self.ghosts = Ghosts(int(capacity_bytes * (1 - small_fifo_capacity_ratio)))

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        node = Node(key, info.size_bytes)
        self._nodes[key] = node
        (self._main if self.ghosts.forget(key) else self._small).push(node)

    def access(self, key: Key, now_s: float) -> None:
        node = self._nodes[key]
        node.mark = min(node.mark + 1, USES_MAX)

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        node = self._nodes.pop(key)
        queue = node.queue
        assert queue is not None
        queue.remove(node)
        if evicted and queue is self._small:
            self.ghosts.add(key, node.size_bytes)

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        small, main = self._small, self._main
        at_small, at_main = small.oldest, main.oldest
        # Bytes of the small queue without the victims named so far, which are gone if the caller takes them.
        small_bytes = small.size_bytes
        # Promoted keys and those that paid a use go to the main queue's end, where this walk meets them again.
        while at_small is not None or at_main is not None:
            if at_small is not None and (small_bytes > self.small_bytes_max or at_main is None):
                node, at_small = at_small, at_small.newer
                if is_leased(node.key):
                    continue
                small_bytes -= node.size_bytes
                if node.mark < self.threshold:
                    yield node.key
                    continue
                node.mark = 0
                small.remove(node)
                main.push(node)
                at_main = at_main or node
            else:
                assert at_main is not None
                node = at_main
                if is_leased(node.key):
                    at_main = node.newer
                elif node.mark == 0:
                    yield node.key
                    at_main = node.newer
                else:
                    node.mark -= 1
                    if node.newer is not None:
                        at_main = node.newer
                        main.refresh(node)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes
