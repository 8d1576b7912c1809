"""Which I/O engine runs here: the ring where it works, threads elsewhere, and the reason in words."""

from kvtier.errors import ConfigError
from kvtier.tier.disk.io import IOEngine
from kvtier.tier.disk.threads import ThreadIO

ENGINES = ("auto", "ring", "threads")
COMPILER_ARENA_BYTES_MIN = 1 << 30
"""The compiler behind the ring (numba) keeps about 120 MiB in memory: beside a smaller arena that is out of proportion."""


def make_io(
    kind: str = "auto",
    *,
    iodepth: int = 16,
    write_share: float = 0.125,
    open_lookahead: int | None = None,
    transfer_bytes_max: int = 1 << 30,
    arena_bytes: int | None = None,
) -> IOEngine:
    """An engine. `chosen_because` on it says why it is the one.

    Args:
        kind: `auto` for the ring with threads as the fall-back and beside small arenas, `ring` for the ring or an error, `threads`.
        iodepth: most jobs that move data at a time.
        write_share: part of the depth that waiting writes always get.
        open_lookahead: files opened ahead of their turn, `iodepth` by default; threads open a file when its turn comes.
        transfer_bytes_max: most bytes that one operation moves.
        arena_bytes: the memory that the engine serves, None where that does not matter.

    Raises:
        ConfigError: `kind` is unknown, or `ring` was asked for and does not work here.
    """
    if kind not in ENGINES:
        raise ConfigError(f"the I/O engine is {kind!r}: use one of {', '.join(ENGINES)}")
    if kind == "threads":
        return ThreadIO(iodepth=iodepth, write_share=write_share, transfer_bytes_max=transfer_bytes_max)
    if kind == "auto" and arena_bytes is not None and arena_bytes < COMPILER_ARENA_BYTES_MIN:
        because = (
            f"dram_bytes gives a rank {arena_bytes / 2**20:,.0f} MiB, and below {COMPILER_ARENA_BYTES_MIN >> 20:,} MiB the ring's compiler "
            "would add too much to that; disk_io=ring uses the ring all the same"
        )
        return ThreadIO(
            iodepth=iodepth, write_share=write_share, transfer_bytes_max=transfer_bytes_max, because=because
        )
    because = "asked for" if kind == "ring" else "io_uring works here"
    try:
        from kvtier.tier.disk.ring import RingIO, RingUnavailableError
    except ImportError as exception:
        why = f"numba is not installed ({exception}): pip install 'kvtier[ring]'"
    except RuntimeError as exception:
        why = f"numba cannot keep what it compiles ({exception}): set NUMBA_CACHE_DIR to a writable directory"
    else:
        try:
            return RingIO(
                iodepth=iodepth,
                write_share=write_share,
                open_lookahead=open_lookahead,
                transfer_bytes_max=transfer_bytes_max,
                because=because,
            )
        except RingUnavailableError as exception:
            why = str(exception)
    if kind == "ring":
        raise ConfigError(f"the ring engine cannot run here: {why}; use auto or threads")
    return ThreadIO(
        iodepth=iodepth, write_share=write_share, transfer_bytes_max=transfer_bytes_max, because=f"no ring: {why}"
    )
