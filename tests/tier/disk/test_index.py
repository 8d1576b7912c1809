"""The index against a dictionary, whether a part is still a row or an entry already."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.disk.catalog import PLACE, CatalogColumns
from kvtier.tier.disk.index import PartIndex, slots_taken_twice


@dataclass
class Entry:
    id: int
    key: bytes
    slot: int
    depth_tokens: int
    used: int


def columns_of(count: int) -> CatalogColumns:
    places = np.zeros(count, PLACE)
    places["slot"] = np.arange(count) * 3
    places["depth_tokens"] = np.arange(count) * 16
    keys = [b"%d" % number for number in range(count)]
    return CatalogColumns(np.arange(count) + 100, keys, places, np.arange(count) + 7)


def make(row_id: int, key: bytes, place: tuple[int, int, int, int, int, float], used: int) -> Entry:
    return Entry(row_id, key, place[1], place[4], used)


STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "use", "drop", "add", "list", "clear"]), st.integers(0, 12)), max_size=40
)


@given(STEPS)
def test_it_is_a_dictionary_of_entries(steps: list[tuple[str, int]]) -> None:
    index: PartIndex[Entry] = PartIndex()
    index.fill(columns_of(10), make)
    model = {b"%d" % n: Entry(n + 100, b"%d" % n, 3 * n, 16 * n, n + 7) for n in range(10)}
    for step, number in steps:
        key = b"%d" % number
        if step == "get":
            found = index.get(key)
            assert found == model.get(key) and found is index.get(key), "one object for one part"
            assert (key in index) == (key in model)
        elif step in ("use", "drop"):
            found = index.pop(key)
            assert found == model.pop(key, None)
            if found is not None and step == "use":
                index[key] = model[key] = found
        elif step == "add":
            index[key] = model[key] = Entry(number + 500, key, number, number, number)
        elif step == "clear" and number == 0:
            index.clear()
            model.clear()
        assert len(index) == len(model)
        assert list(index.values()) == list(model.values())
        listed = list(model), [entry.depth_tokens for entry in model.values()]
        assert index.keys_and_depths(lambda entry: entry.depth_tokens) == listed


def test_a_missing_key_is_an_error() -> None:
    index: PartIndex[Entry] = PartIndex()
    assert index.get(b"a") is None and index.pop(b"a") is None
    with pytest.raises(KeyError):
        index[b"a"]


def test_claims_of_one_slot_are_found() -> None:
    columns = columns_of(6)
    assert slots_taken_twice(columns) is None and slots_taken_twice(columns_of(0)) is None
    columns.places["segment"][2:] = 2**32 - 1
    columns.places["slot"][5] = columns.places["slot"][3]
    assert slots_taken_twice(columns) == (2**32 - 1, 9)
