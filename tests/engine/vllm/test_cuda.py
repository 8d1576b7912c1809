"""The CUDA copy engine on a make-believe GPU: whose bytes go where, in which order, behind which events.

What a machine without a GPU cannot show is the driver itself; the README says so.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: make test has it")
import torch

from kvtier.engine.layout import Ranges
from kvtier.engine.vllm import cuda
from kvtier.memory.arena import Arena

pytestmark = pytest.mark.engine


class Driver:
    """Stands in for torch.cuda and the driver: copies happen, and what was called is remembered."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.registered: dict[int, int] = {}
        self.register_limit = 10**12
        self.streams = 0
        driver = self

        class Event:
            def record(self, stream: Any) -> None:
                driver.log.append(("record", stream))

            def synchronize(self) -> None:
                driver.log.append("synchronize")

        class Stream:
            def __init__(self, device: Any) -> None:
                driver.streams += 1
                self.name = f"stream{driver.streams}"

            def wait_event(self, event: Any) -> None:
                driver.log.append(("wait", self.name, event))

            def __repr__(self) -> str:
                return self.name

        self.Event, self.Stream = Event, Stream

    @contextlib.contextmanager
    def scope(self, what: Any) -> Iterator[None]:
        yield

    def copy(self, source: Any, target: Any, sizes: Any, is_src_access_order_any: bool) -> None:
        assert source.dtype == target.dtype == sizes.dtype == torch.int64
        self.log.append(("copy", is_src_access_order_any))
        for s, t, n in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(t, s, n)

    def register(self, address: int, size: int) -> bool:
        if sum(self.registered.values()) + size > self.register_limit:
            return False
        self.registered[address] = size
        return True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "Event", made.Event)
    monkeypatch.setattr(torch.cuda, "Stream", made.Stream)
    monkeypatch.setattr(torch.cuda, "device", made.scope)
    monkeypatch.setattr(torch.cuda, "stream", made.scope)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    monkeypatch.setattr(cuda.ops, "swap_blocks_batch", made.copy)
    monkeypatch.setattr(cuda, "host_register", made.register)
    monkeypatch.setattr(cuda, "host_unregister", made.registered.pop)
    return made


def test_copies_wait_for_the_engine_and_return_when_done(driver: Driver) -> None:
    arena = Arena(8192)
    gpu = np.arange(200, dtype=np.uint8)
    engine = cuda.CudaCopyEngine(arena, torch.device("cpu"))
    ranges = Ranges(
        gpu.ctypes.data + np.array([10, 100], dtype=np.int64),
        arena.address + np.array([0, 4096], dtype=np.int64),
        np.array([5, 7], dtype=np.int64),
    )
    after = engine.mark()
    assert driver.log == [("record", "compute")]
    driver.log.clear()
    engine.to_arena(ranges, after)
    assert bytes(arena.view(0, 5)) == bytes(range(10, 15)) and bytes(arena.view(4096, 7)) == bytes(range(100, 107))
    assert driver.log[0] == ("wait", "stream1", after)
    assert driver.log[1] == ("copy", False), "the engine writes its cache meanwhile: source reads keep stream order"
    assert str(driver.log[2]) == "('record', stream1)" and driver.log[3] == "synchronize"
    driver.log.clear()
    gpu[:] = 0
    engine.to_engine(ranges, after)
    assert gpu[10:15].tolist() == list(range(10, 15)) and gpu.sum() == sum(range(10, 15)) + sum(range(100, 107))
    assert driver.log[0] == ("wait", "stream2", after), "a load waits for its blocks to be zeroed"
    assert driver.log[1] == ("copy", True) and driver.log[-1] == "synchronize"


def test_the_arena_is_pinned_in_pieces_and_let_go(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_REGISTER_BYTES_MAX", 8192)
    arena = Arena(5 * 4096)
    engine = cuda.CudaCopyEngine(arena, torch.device("cpu"))
    assert driver.registered == {arena.address: 8192, arena.address + 8192: 8192, arena.address + 16384: 4096}
    engine.close()
    assert driver.registered == {}


def test_memory_that_cannot_be_pinned_works_and_is_said(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_REGISTER_BYTES_MAX", 4096)
    driver.register_limit = 4096
    engine = cuda.CudaCopyEngine(Arena(8192), torch.device("cpu"))
    assert "could not be pinned" in caplog.text
    engine.close()
    assert driver.registered == {}
