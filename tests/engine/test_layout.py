"""Ranges against a plain loop over blocks and regions, and both copy engines' loops against slices."""

import builtins

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine import copying
from kvtier.engine.layout import GroupLayout, Piece, Ranges, Region, join


@st.composite
def _cases(draw: st.DrawFn) -> tuple[GroupLayout, Piece, list[int], list[bool]]:
    regions = draw(
        st.lists(
            st.builds(
                lambda base, page, pad: Region(base * 1_000_000, page + pad, page),
                st.integers(1, 9),
                st.integers(1, 64),
                st.integers(0, 8),
            ),
            min_size=1,
            max_size=4,
        )
    )
    per_chunk = draw(st.integers(1, 3))
    part_count = draw(st.integers(1, 4))
    first = draw(st.integers(0, per_chunk - 1))
    last_missing = draw(st.integers(0, per_chunk - 1)) if part_count > 1 else 0
    count = max(1, part_count * per_chunk - first - last_missing)
    block_ids = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True))
    piece = Piece(0, tuple(range(part_count)), np.array(block_ids, dtype=np.int64), first)
    slots = [10**9 + place * 100_000 for place in range(part_count)]
    wanted = draw(st.lists(st.booleans(), min_size=part_count, max_size=part_count))
    return GroupLayout(regions, per_chunk), piece, slots, wanted


@pytest.mark.parametrize("compiled", [True, False])
def test_a_large_load_is_split_and_whole(compiled: bool) -> None:
    count, size = 37, 200_000
    arena = np.random.default_rng(3).integers(0, 255, count * size, dtype=np.uint8)
    cache = np.zeros(count * size, dtype=np.uint8)
    starts = np.arange(count, dtype=np.int64) * size
    copier = copying.MemoryCopyEngine(compiled=compiled)
    copier.to_engine(
        Ranges(cache.ctypes.data + starts[::-1], arena.ctypes.data + starts, np.full(count, size, dtype=np.int64)), None
    )
    assert (cache.reshape(count, size) == arena.reshape(count, size)[::-1]).all()
    copier.close()


def test_the_kernel_copies_lists_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_CALL_BYTES_MAX", 5000)
    monkeypatch.setattr(copying, "_CALL_RANGES_MAX", 7)
    copy = copying.kernel_copy()
    assert copy is not None
    random = np.random.default_rng(5)
    for count in (0, 1, 6, 7, 8, 50):
        sizes = random.integers(0, 1500, count)
        sizes[: count // 10] = 6000  # longer than a call may be
        ends = np.cumsum(sizes)
        source = random.integers(0, 255, 100_000, dtype=np.uint8)
        target = np.zeros_like(source)
        places = np.concatenate(([0], ends[:-1]))[:count]
        copy(source.ctypes.data + 3 + places, target.ctypes.data + 9 + places, sizes)
        total = int(ends[-1]) if count else 0
        assert (target[9 : 9 + total] == source[3 : 3 + total]).all()
        assert not target[:9].any() and not target[9 + total :].any()
    nowhere, one = np.array([8], dtype=np.int64), np.array([8], dtype=np.int64)
    with pytest.raises(OSError, match="of 8 bytes were copied"):
        copy(nowhere, one * 0 + target.ctypes.data, one)


@given(_cases())
def test_ranges_are_those_of_a_plain_loop(case: tuple[GroupLayout, Piece, list[int], list[bool]]) -> None:
    layout, piece, slots, wanted = case
    expected = []
    for number, block in enumerate(piece.block_ids.tolist(), start=piece.first):
        part, place = divmod(number, layout.blocks_per_chunk)
        if not wanted[part]:
            continue
        start = slots[part]
        for region in layout.regions:
            inside = start + place * region.page_bytes
            expected.append((region.base + block * region.stride_bytes, inside, region.page_bytes))
            start += layout.blocks_per_chunk * region.page_bytes
    ranges = piece.select(layout, np.array(slots, dtype=np.int64), np.array(wanted))
    assert list(zip(ranges.engine.tolist(), ranges.arena.tolist(), ranges.sizes.tolist(), strict=True)) == expected
    assert ranges.total_bytes == sum(size for _, _, size in expected)


def test_a_window_that_moved_on_costs_its_first_part_alone() -> None:
    layout = GroupLayout([Region(0, 4096, 1000)], 3)

    def whole(
        parts: tuple[int, ...], blocks: list[int], first: int
    ) -> tuple[tuple[int, ...], list[int], int, tuple[int, ...]]:
        kept, broken = Piece(1, parts, np.array(blocks, dtype=np.int64), first).whole_parts(layout)
        assert kept.group == 1
        return kept.parts, kept.block_ids.tolist(), kept.first, broken

    assert whole((4, 5), [1, 2, 3, 4, 5, 6], 0) == ((4, 5), [1, 2, 3, 4, 5, 6], 0, ())
    assert whole((4, 5), [2, 3, 4, 5, 6], 1) == ((5,), [4, 5, 6], 0, (4,))
    assert whole((4, 5), [3, 4, 5, 6], 2) == ((5,), [4, 5, 6], 0, (4,))
    assert whole((4,), [3], 2) == ((), [], 0, (4,))
    # A hole that nothing explains: no part is sure to be whole.
    assert whole((4, 5), [1, 2, 4, 5, 6], 0) == ((), [], 0, (4, 5))
    assert whole((4, 5), [2, 3, 5, 6], 1) == ((), [], 0, (4, 5))


def test_a_part_holds_its_chunk_and_no_padding() -> None:
    layout = GroupLayout([Region(0, 4096, 1000), Region(10**6, 4096, 24)], 3)
    assert layout.payload_bytes == 3 * 1024


@pytest.mark.parametrize("way", ["compiled", "no numba", "kernel", "one by one"])
def test_copies_move_exactly_the_ranges(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "no numba":
        real_import = builtins.__import__

        def no_numba(name: str, *args: object, **kwargs: object) -> object:
            if name.startswith("numba"):
                raise ImportError(name)
            return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(builtins, "__import__", no_numba)
    if way == "one by one":
        monkeypatch.setattr(copying, "kernel_copy", lambda: None)
    engine_cache = np.arange(4000, dtype=np.uint8)
    arena = np.zeros(4000, dtype=np.uint8)
    before = engine_cache.copy()

    def at(engine: list[int], slot: list[int], sizes: list[int]) -> Ranges:
        return Ranges(
            engine_cache.ctypes.data + np.array(engine, dtype=np.int64),
            arena.ctypes.data + np.array(slot, dtype=np.int64),
            np.array(sizes, dtype=np.int64),
        )

    copier = copying.MemoryCopyEngine(compiled=way in ("compiled", "no numba"))
    ranges = join([at([0, 1000], [2000, 0], [10, 300]), at([3990], [3000], [10])])
    copier.to_arena(ranges, copier.mark())
    expected = np.zeros_like(arena)
    expected[2000:2010], expected[:300], expected[3000:3010] = before[:10], before[1000:1300], before[3990:]
    assert (arena == expected).all()
    engine_cache[:] = 0
    copier.to_engine(ranges, copier.mark())
    expected[:] = 0
    expected[:10], expected[1000:1300], expected[3990:] = before[:10], before[1000:1300], before[3990:]
    assert (engine_cache == expected).all()
