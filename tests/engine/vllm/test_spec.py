"""Which replica an engine is."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtier.engine.vllm.spec import KVTierSpec


@pytest.mark.parametrize(
    ("size", "index", "replica"),
    [(1, 0, None), (2, 0, 0), (2, 1, 1), (1, 1, 1), (1, 3, 3)],
)
def test_replicas_are_told_apart_also_where_vllm_makes_each_an_engine_of_size_one(
    size: int, index: int, replica: int | None
) -> None:
    """Models without experts: two replicas on one directory would be refused."""
    spec = KVTierSpec.__new__(KVTierSpec)
    spec.config = SimpleNamespace(parallel=SimpleNamespace(data_parallel_size=size, data_parallel_index=index))
    assert spec.replica == replica
