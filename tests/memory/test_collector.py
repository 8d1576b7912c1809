"""The collector rests inside, and is afterwards what it was before."""

import gc

import pytest

from kvtier.memory.collector import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_whatever_happens_inside(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
