"""Copies between a GPU's cache and the arena: one driver call for a list of ranges, on a stream for each direction."""

import logging

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from kvtier.engine.copying import CopyEngine
from kvtier.engine.layout import Ranges
from kvtier.memory.arena import Arena

logger = logging.getLogger(__name__)

# The driver pins at most so much in one call on some systems.
_REGISTER_BYTES_MAX = 1 << 30


class CudaCopyEngine(CopyEngine):
    """Ordered behind the engine by events: a store after the step that computed its blocks, a load after they were zeroed."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._registered: list[int] = []
        for start in range(0, arena.capacity_bytes, _REGISTER_BYTES_MAX):
            address = arena.address + start
            if not host_register(address, min(_REGISTER_BYTES_MAX, arena.capacity_bytes - start)):
                logger.warning("kvtier: the arena could not be pinned: copies run, but slower")
                break
            self._registered.append(address)

    def mark(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_arena(self, ranges: Ranges, after: object) -> None:
        # The engine goes on writing its cache: reads of it stay in stream order.
        self._copy(self._out, ranges.engine, ranges.arena, ranges, after, any_order=False)

    def to_engine(self, ranges: Ranges, after: object) -> None:
        self._copy(self._in, ranges.arena, ranges.engine, ranges, after, any_order=True)

    def _copy(self, stream, source, target, ranges: Ranges, after, *, any_order: bool) -> None:  # type: ignore[no-untyped-def]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(after)
            ops.swap_blocks_batch(
                torch.from_numpy(source),
                torch.from_numpy(target),
                torch.from_numpy(ranges.sizes),
                is_src_access_order_any=any_order,
            )
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()

    def close(self) -> None:
        for address in self._registered:
            host_unregister(address)
        self._registered.clear()
