"""The arena's memory, and the refusal of more than the machine has."""

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena, RankMemory, available_memory_bytes, require_memory, require_memory_of_ranks


def test_views_and_address_are_the_same_memory() -> None:
    arena = Arena(3 * 4096)
    assert arena.address % 4096 == 0
    arena.view(4096, 3)[:] = b"abc"
    assert bytes(arena.array[4096:4099]) == b"abc"
    assert len(arena.view(4096, 2 * 4096)) == 2 * 4096


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 8193), (8192, 1), (0, -1)])
def test_a_view_outside_is_refused(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="do not lie in an arena of 8192"):
        Arena(8192).view(offset, size)


@pytest.mark.parametrize("size", [0, -4096, 4097])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of 4096"):
        Arena(size)


def test_available_memory_is_what_kernel_and_container_leave(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert available_memory_bytes(tmp_path, tmp_path / "none") == 65536
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("20000\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 30000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 65536
    assert available_memory_bytes(tmp_path / "none", tmp_path) is None


def test_too_much_is_refused_with_setting_value_and_way_out() -> None:
    require_memory(10, "dram_bytes", 10)
    require_memory(10**18, "dram_bytes", None)
    with pytest.raises(ConfigError, match=r"dram_bytes is 1,000 bytes, and 999 bytes .* lower dram_bytes"):
        require_memory(1000, "dram_bytes", 999)


def test_ranks_on_one_machine_count_together() -> None:
    ranks = [RankMemory("a", 60, 100), RankMemory("a", 30, 95), RankMemory("b", 80, 100), RankMemory("b", 40, None)]
    require_memory_of_ranks(ranks[0], ranks, "dram_bytes")
    with pytest.raises(ConfigError, match=r"dram_bytes, of the 2 ranks .* is 120 bytes, and 100 .*lower dram_bytes"):
        require_memory_of_ranks(ranks[2], ranks, "dram_bytes")
    with pytest.raises(ConfigError, match="is 96 bytes, and 95"):
        require_memory_of_ranks(ranks[1], [ranks[0], RankMemory("a", 36, 95)], "dram_bytes")
    require_memory_of_ranks(RankMemory("c", 1 << 60, None), [RankMemory("c", 1 << 60, None)], "dram_bytes")
