"""SIEVE (NSDI '24): one queue, one bit a key, and a hand that sweeps from the oldest to the newest.

A use sets the bit. The hand clears the bits it meets and evicts the first key without one; what is new
stays behind the hand until it comes round. The hand moves for good only when a victim really leaves, so a
search that evicts nothing loses no one's place (the bits it cleared stay cleared).
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo
from kvtier.policy.queue import Node, Queue


class SievePolicy(EvictionPolicy):
    """Evicts what the hand finds unused since it last came by."""

    name: ClassVar[str] = "sieve"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._queue = Queue()
        self._nodes: dict[Key, Node] = {}
        self._hand: Node | None = None  # None: start at the oldest

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        node = Node(key, info.size_bytes)
        self._nodes[key] = node
        self._queue.push(node)

    def access(self, key: Key, now_s: float) -> None:
        self._nodes[key].mark = 1

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        node = self._nodes.pop(key)
        if evicted or node is self._hand:
            self._hand = node.newer
        self._queue.remove(node)

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        start = self._hand or self._queue.oldest
        given: set[Key] = set()
        # One lap clears the bits, a second finds whom the first had spared.
        for _ in range(2):
            node = start
            for _ in range(len(self._queue)):
                assert node is not None
                following = node.newer or self._queue.oldest
                if node.key not in given and not is_leased(node.key):
                    if node.mark:
                        node.mark = 0
                    else:
                        given.add(node.key)
                        yield node.key
                node = following

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes
