"""Which I/O a rank gets follows one rule, on a disk of its own and on a shared one."""

from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.engine.opening import may_compile, open_disk, open_shared
from kvtier.identity.namespace import Namespace
from kvtier.memory.arena import Arena
from kvtier.tier.disk.base import PartStore
from kvtier.tier.disk.shared_layout import SharedLayout

ARENA_BYTES = 1 << 20


@pytest.mark.parametrize(("disk_io", "compiles"), [("auto", False), ("threads", False), ("ring", True)])
@pytest.mark.parametrize("shared", [False, True])
def test_a_small_arena_gets_no_compiler_unless_the_ring_is_asked_for(
    tmp_path: Path, shared: bool, disk_io: str, compiles: bool
) -> None:
    place = {"shared_storage_path" if shared else "disk_path": str(tmp_path), "disk_free_bytes_min": 0}
    config = load_config({**place, "disk_io": disk_io}, environ={}).config
    namespace, arena = Namespace({"test": 1}), Arena(ARENA_BYTES)
    store: PartStore
    if shared:
        layout = SharedLayout(tmp_path, model="m", block_size=16, blocks_per_file=1, dtype="auto")
        store = open_shared(config, layout, namespace, arena, rank=0, group_of=lambda key: 0, payload_bytes=(4096,))
    else:
        store = open_disk(config, tmp_path, namespace, arena)
    assert store.io.name == ("ring" if compiles else "threads")  # type: ignore[attr-defined]
    assert may_compile(config, ARENA_BYTES) == compiles
    assert store.close(10.0)
