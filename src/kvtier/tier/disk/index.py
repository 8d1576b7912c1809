"""Which part lies where, of a million parts: few objects until a part is used.

What the catalog gave at the start stays as it came, a row of packed numbers in one block of memory, and the dictionary holds the row's
number; an entry with its counts is made when somebody asks for the part. Insertion order is order of use, longest unused first.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from kvtier.tier.disk.base import Key
from kvtier.tier.disk.catalog import CatalogColumns

Entry = TypeVar("Entry")


class PartIndex(Generic[Entry]):
    """A dictionary of entries by key. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[Key, int | Entry] = {}
        self._columns = CatalogColumns.none()
        self._make: Callable[[int, Key, tuple[int, int, int, int, int, float], int], Entry] | None = None

    def fill(
        self,
        columns: CatalogColumns,
        make: Callable[[int, Key, tuple[int, int, int, int, int, float], int], Entry],
    ) -> None:
        """Hold these rows and nothing else; `make` turns one into its entry: id, key, fields of `PLACE`, used."""
        self._columns = columns
        self._make = make
        self._of = dict(zip(columns.keys, range(len(columns.keys)), strict=True))
        # The dictionary has them now.
        columns.keys = []

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def __setitem__(self, key: Key, entry: Entry) -> None:
        self._of[key] = entry

    def __getitem__(self, key: Key) -> Entry:
        entry = self.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def get(self, key: Key) -> Entry | None:
        """The entry, made now where it was a row."""
        found = self._of.get(key)
        if isinstance(found, int):
            found = self._of[key] = self._entry(key, found)
        return found

    def pop(self, key: Key) -> Entry | None:
        """The entry, taken out; None where there is none."""
        found = self._of.pop(key, None)
        return self._entry(key, found) if isinstance(found, int) else found

    def values(self) -> Iterator[Entry]:
        """Every entry, longest unused first; those that are made for this are not kept."""
        for key, found in self._of.items():
            yield self._entry(key, found) if isinstance(found, int) else found

    def clear(self) -> None:
        """Hold nothing."""
        self._of.clear()
        self._columns = CatalogColumns.none()

    def keys_and_depths(self, depth_of: Callable[[Entry], int]) -> tuple[list[Key], list[int]]:
        """Every key, and its depth in tokens, longest unused first."""
        depths: Sequence[int] = self._columns.places["depth_tokens"].tolist()
        keys, values = list(self._of), self._of.values()
        return keys, [depths[found] if isinstance(found, int) else depth_of(found) for found in values]

    def _entry(self, key: Key, row: int) -> Entry:
        assert self._make is not None
        columns = self._columns
        return self._make(int(columns.ids[row]), key, columns.places[row].item(), int(columns.used[row]))


def slots_taken_twice(columns: CatalogColumns) -> tuple[int, int] | None:
    """Segment and slot that two rows claim, None where there are none."""
    places = columns.places
    if not len(places):
        return None
    both = places["segment"].astype(np.uint64) << np.uint64(32) | places["slot"]
    both.sort()
    twice = np.flatnonzero(both[1:] == both[:-1])
    if not len(twice):
        return None
    return int(both[twice[0]] >> np.uint64(32)), int(both[twice[0]] & np.uint64(0xFFFFFFFF))
