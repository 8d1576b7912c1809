"""Where parts lie on a shared filesystem: py-kvcache's layout, so that its files and ours are one another's.

    <root>/<model>/block_size_<b>_blocks_per_file_<n>/tp_<t>_pp_size_<p>_pcp_size_<c>/rank_<r>/<dtype>/<hhh>/<hh>/<hash>.bin

`hhh` are the first three hex digits of the hash, `hh` the next two. The payload starts at offset 0. What py-kvcache does not know lies where it does not look:
a later generation's parts in `rank_<r>/<dtype>/generation_<g>/<hhh>/…`, commit markers in `committed/…` beside the ranks, temporary files under names that do
not end in `.bin`.
"""

import os
import re
import socket
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvtier.errors import ConfigError

SUFFIX = b".bin"
TEMPORARY = b".bin.tmp-"
TEMPORARY_NAME = re.compile(r"[0-9a-f]+\.bin\.tmp-.+")
PART_NAME = re.compile(r"[0-9a-f]+\.bin")
COMMITTED = "committed"
_serial = count()


def _checked(name: str, what: str, *, nested: bool = False) -> str:
    """A path component that stays where it is put. `nested` allows slashes between components (`org/model`)."""
    pieces = name.split("/") if nested else [name]
    if any(piece in ("", ".", "..") or "\0" in piece or "/" in piece for piece in pieces):
        raise ConfigError(
            f"the {what} {name!r} cannot be a directory's name below the root: use one without '..', without empty parts, and not absolute"
        )
    return name


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """The names of one model's files.

    Attributes:
        root: the shared directory.
        model: the model's name; `org/model` makes two directories.
        block_size: tokens of an engine's block.
        blocks_per_file: blocks of one part.
        tp, pp, pcp: sizes of tensor, pipeline and prefill context parallelism.
        dtype: of the cache, as in `bfloat16`.

    Raises:
        ConfigError: a name would leave the root, or a number is not positive.
    """

    root: Path
    model: str
    block_size: int
    blocks_per_file: int
    dtype: str
    tp: int = 1
    pp: int = 1
    pcp: int = 1

    def __post_init__(self) -> None:
        _checked(self.model, "model name", nested=True)
        _checked(self.dtype, "dtype")
        for name in ("block_size", "blocks_per_file", "tp", "pp", "pcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: the layout needs 1 or more")

    @property
    def model_directory(self) -> Path:
        """Where all ranks of this model and sizes are."""
        return (
            Path(self.root)
            / self.model
            / f"block_size_{self.block_size}_blocks_per_file_{self.blocks_per_file}"
            / f"tp_{self.tp}_pp_size_{self.pp}_pcp_size_{self.pcp}"
        )

    def rank_directory(self, rank: int, generation: int = 0) -> Path:
        """Where one rank's parts of a generation are, generation 0 being py-kvcache's own place."""
        directory = self.model_directory / f"rank_{rank}" / self.dtype
        return directory / f"generation_{generation}" if generation else directory

    def marker_directory(self, generation: int = 0) -> Path:
        """Where the commit markers of a generation are."""
        directory = self.model_directory / COMMITTED / self.dtype
        return directory / f"generation_{generation}" if generation else directory


def fan_out(key: bytes) -> tuple[str, str, str]:
    """The two directories and the full hash of a key."""
    digits = key.hex()
    if len(digits) < 6:
        raise ValueError(f"key {digits!r} is too short: the layout takes five hex digits of it for directories")
    return digits[:3], digits[3:5], digits


def part_path(directory: bytes, key: bytes) -> bytes:
    """The file of `key` below a rank's or the markers' directory."""
    first, second, digits = fan_out(key)
    return b"/".join((directory, first.encode(), second.encode(), digits.encode() + SUFFIX))


def folder_of(path: bytes) -> bytes:
    """The directory that a file's name lies in."""
    return path.rpartition(b"/")[0]


def temporary_path(final: bytes) -> bytes:
    """A name beside `final` that no other writer on any node uses."""
    return final.removesuffix(SUFFIX) + TEMPORARY + f"{socket.gethostname()}-{os.getpid()}-{next(_serial)}".encode()
