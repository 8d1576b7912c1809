"""Where parts lie on a shared filesystem: py-kvcache's layout, so that its files and ours are one another's.

    <root>/<model>/block_size_<b>_blocks_per_file_<n>/tp_<t>_pp_size_<p>_pcp_size_<c>/rank_<r>/<dtype>/<hhh>/<hh>/<hash>.bin

`hhh` are the first three hex digits of the hash, `hh` the next two. The payload starts at offset 0. What py-kvcache does not know lies where it does not look:
a later generation's parts in `rank_<r>/<dtype>/generation_<g>/<hhh>/…`, commit markers in `committed/…` beside the ranks, temporary files under names that do
not end in `.bin`.
"""

import errno
import json
import os
import re
import shutil
import socket
import tempfile
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.identity.namespace import MANIFEST_NAME, Namespace, manifest_of, write_synced

SUFFIX = b".bin"
TEMPORARY = b".bin.tmp-"
TEMPORARY_NAME = re.compile(r"[0-9a-f]+\.bin\.tmp-.+")
PART_NAME = re.compile(r"[0-9a-f]+\.bin")
RANK_NAME = re.compile(r"rank_[0-9]+")
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
        key_suffix: what all keys end with and names leave out: the number of the only group of layers.

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
    key_suffix: bytes = b""

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

    @property
    def manifest_path(self) -> Path:
        """Where it says which namespace the parts are of."""
        return self.model_directory / f"kvtier-{self.dtype}" / MANIFEST_NAME

    def path(self, directory: bytes, key: bytes) -> bytes:
        """The file of `key` below a rank's or the markers' directory. Raises ValueError for a key that is not of this layout."""
        if not key.endswith(self.key_suffix):
            raise ValueError(
                f"key {key.hex()} does not end with {self.key_suffix.hex()}, as all keys of this layout do"
            )
        digits = key.removesuffix(self.key_suffix).hex()
        if len(digits) < 6:
            raise ValueError(f"key {digits!r} is too short: the layout takes five hex digits of it for directories")
        return f"/{digits[:3]}/{digits[3:5]}/{digits}".encode().join((directory, SUFFIX))

    def key_of(self, name: str) -> bytes:
        """The key whose file has this name."""
        return bytes.fromhex(name.removesuffix(SUFFIX.decode())) + self.key_suffix


def claim(layout: SharedLayout, namespace: Namespace) -> SharedLayout:
    """`layout`, if its parts are `namespace`'s or nobody's yet; else the same below a model name of its own, `<model>--<namespace>`.

    Names say little of what parts depend on: other weights under the same model name would be served as these. What all engines of a
    namespace come to is the same, whichever starts first. Raises StoreUnavailableError.
    """
    own = replace(layout, model=f"{layout.model}--{namespace.id.hex()[:12]}")
    for wanted in (layout, own):
        path = wanted.manifest_path
        try:
            _name_once(path, json.dumps(manifest_of(namespace), indent=1) + "\n")
            found = json.loads(path.read_text())
        except OSError as error:
            raise StoreUnavailableError(
                f"{path} cannot be written or read: {error.strerror}; change its mode or choose another shared_storage_path"
            ) from error
        except ValueError as error:
            raise StoreUnavailableError(
                f"{path} is not JSON ({error}): move {path.parent} away, or delete it"
            ) from None
        if isinstance(found, dict) and found.get("id") == namespace.id.hex():
            return wanted
    raise StoreUnavailableError(
        f"{path} says that its parts are of another namespace, {found!r}: move {path.parent} away, or delete it"
    )


def _name_once(path: Path, text: str) -> None:
    """Make `path` with this text in a directory of its own, unless it is there: a directory that has something in it is never renamed over."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    new = Path(tempfile.mkdtemp(prefix=f"{path.parent.name}.new-", dir=path.parent.parent))
    try:
        write_synced(new / path.name, text)
        new.chmod(0o755)
        new.rename(path.parent)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def is_part(folder: str, name: str) -> bool:
    """Whether a file of this name in this directory can be a part or a marker: its digits, the first of them naming the two directories above."""
    return PART_NAME.fullmatch(name) is not None and len(name) % 2 == 0 and folder.endswith(f"/{name[:3]}/{name[3:5]}")


def folder_of(path: bytes) -> bytes:
    """The directory that a file's name lies in."""
    return path.rpartition(b"/")[0]


def temporary_path(final: bytes) -> bytes:
    """A name beside `final` that no other writer on any node uses."""
    return final.removesuffix(SUFFIX) + TEMPORARY + f"{socket.gethostname()}-{os.getpid()}-{next(_serial)}".encode()
