"""The slot allocator: no two slots overlap, memory moves between classes, and choices change nothing until they are made."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.store.slots import SLAB_WASTE_MAX, SlotAllocator, choose_slab_bytes

KIB = 1024


def test_one_class_wastes_nothing() -> None:
    allocator = SlotAllocator([300 * KIB], 3000 * KIB)
    offsets = [allocator.take(0) for _ in range(10)]
    assert sorted(offset for offset in offsets if offset is not None) == [place * 300 * KIB for place in range(10)]
    assert allocator.take(0) is None
    assert allocator.used_bytes() == 3000 * KIB


@pytest.mark.parametrize("sizes", [[4096, 3 * 1024 * 1024], [100 * KIB, 36 * KIB, 68 * KIB], [2_953_216, 8192]])
def test_slab_waste_is_bounded_where_the_arena_allows(sizes: list[int]) -> None:
    slab = choose_slab_bytes(sizes, 1 << 30)
    assert all(slab % size / slab <= SLAB_WASTE_MAX for size in sizes)


def test_an_arena_below_one_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for one slot of 8192"):
        SlotAllocator([8192], 4096)


@pytest.mark.parametrize("offset", [1, 8 * KIB, 1 << 40])
def test_giving_back_what_was_not_taken_is_refused(offset: int) -> None:
    allocator = SlotAllocator([4 * KIB], 64 * KIB)
    taken = allocator.take(0)
    assert taken is not None and taken != offset
    with pytest.raises(ValueError, match="not a slot"):
        allocator.give(offset)
    allocator.give(taken)
    with pytest.raises(ValueError, match="not a slot"):
        allocator.give(taken)


def take_all(allocator: SlotAllocator, cls: int) -> list[int]:
    offsets = []
    while (offset := allocator.take(cls)) is not None:
        offsets.append(offset)
    return offsets


def test_a_full_arena_moves_a_slab_to_another_class() -> None:
    allocator = SlotAllocator([4 * KIB, 16 * KIB], 128 * KIB)
    small = take_all(allocator, 0)
    assert len(small) == 32
    victims = allocator.choose_victims({1: 1}, iter([(0, offset) for offset in small]))
    assert victims is not None and len(victims) == 4
    assert allocator.used_bytes() == 128 * KIB, "choosing changes nothing"
    for offset in victims:
        allocator.give(offset)
    assert allocator.take(1) is not None


def test_scattered_victims_of_another_class_do_not_empty_the_arena() -> None:
    allocator = SlotAllocator([4 * KIB, 16 * KIB], 256 * KIB)
    big = allocator.take(1)
    assert big is not None
    small = take_all(allocator, 0)
    # Every fourth slot first: no slab gets free before many have gone. The wanted class comes last in the order.
    scattered = [(0, offset) for shift in range(4) for offset in small[shift::4]]
    victims = allocator.choose_victims({1: 1}, iter([*scattered, (1, big)]))
    assert victims is not None
    assert len(victims) <= 1 + 2 * allocator.slab_bytes // (4 * KIB)


def test_a_class_without_records_gets_a_slab_however_scattered_the_others_are() -> None:
    allocator = SlotAllocator([4 * KIB, 16 * KIB], 256 * KIB)
    small = take_all(allocator, 0)
    scattered = [(0, offset) for shift in range(4) for offset in small[shift::4]]
    victims = allocator.choose_victims({1: 1}, iter(scattered))
    assert victims is not None, "asked again, the answer would be the same: this class would never be stored"
    assert len(set(victims)) == len(victims) <= 3 * allocator.slab_bytes // (4 * KIB)
    for offset in victims:
        allocator.give(offset)
    assert allocator.take(1) is not None


def test_the_slab_taken_is_the_one_whose_last_record_goes_first() -> None:
    allocator = SlotAllocator([4 * KIB, 16 * KIB], 64 * KIB)
    small = take_all(allocator, 0)
    slabs = [small[start : start + 4] for start in range(0, 16, 4)]
    # One record of each slab in turn, and one of the third is leased: it is no victim at all.
    order = [slab[place] for place in range(4) for slab in slabs if slab[place] != slabs[2][3]]
    victims = allocator.choose_victims({1: 1}, iter([(0, offset) for offset in order]))
    assert victims is not None and set(slabs[0]) <= set(victims)


@st.composite
def _mixes(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[bool, int]]]:
    sizes = draw(st.lists(st.integers(1, 9).map(lambda n: n * 4096), min_size=1, max_size=3))
    arena = draw(st.integers(1, 30)) * 4096 + max(sizes)
    steps = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=80))
    return sizes, arena, steps


@given(_mixes())
def test_slots_never_overlap_and_victims_suffice(mix: tuple[list[int], int, list[tuple[bool, int]]]) -> None:
    sizes, arena, steps = mix
    allocator = SlotAllocator(sizes, arena)
    taken: dict[int, int] = {}
    for take, number in steps:
        cls = number % len(sizes)
        if take:
            offset = allocator.take(cls)
            if offset is None:
                order: Iterator[tuple[int, int]] = iter([(c, o) for o, c in taken.items()])
                victims = allocator.choose_victims({cls: 1}, order)
                if victims is None:
                    assert cls not in taken.values(), "one slot of the class itself would have been enough"
                    continue
                for victim in victims:
                    allocator.give(victim)
                    del taken[victim]
                offset = allocator.take(cls)
            assert offset is not None
            taken[offset] = cls
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            allocator.give(offset)
            del taken[offset]
        spans = sorted((o, o + sizes[c]) for o, c in taken.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= arena
        assert allocator.used_bytes() == sum(sizes[c] for c in taken.values())
