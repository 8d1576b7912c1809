"""LoRA adapters by what they hold. vLLM's block hashes name an adapter by name and path alone.

A part that outlives the engine must not be served to an adapter that was retrained in place. So the keys of a LoRA request are mixed with a
fingerprint of its adapter's files, as long as that is surely what the engine computes with. It is where the files lie in a local directory and have
not changed since before the engine started: vLLM reads them at some moment after that, and keeps or reads again as it likes. By change
time, which no copy or move preserves. Everything else is neither stored nor loaded, unless the operator says that adapters never change in place.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

from kvtier.identity.namespace import file_fingerprint

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_Stamp = tuple[tuple[str, int, int, int], ...]


class UnkeyedError(Exception):
    """Requests of this adapter cannot be kept; the text says why and what to do."""


def _stamp(path: Path) -> tuple[_Stamp, int]:
    """What tells whether anything at `path` changed: name, inode, size and change time of all; and the latest of those times, in ns."""
    real = path.resolve(strict=True)
    found = [("", path.lstat()), ("", real.stat())]
    found += [(str(file.relative_to(real)), file.stat()) for file in sorted(real.rglob("*"))]
    stamp = tuple((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in found)
    return stamp, max(entry[3] for entry in stamp)


class Adapters:
    """Fingerprints of the adapters that this engine has seen.

    Args:
        started_s: wall time before which the engine cannot have read an adapter.
        trusted: the operator's word that an adapter never changes in place.
    """

    def __init__(self, started_s: float, *, trusted: bool = False) -> None:
        # Files carry the time of the kernel's last tick.
        self._started_ns = int((started_s - _TICK_S) * 1e9)
        self._trusted = trusted
        self._known: dict[tuple[str, str], tuple[_Stamp, bytes]] = {}
        self._refused: dict[tuple[str, str], str] = {}

    def salt(self, name: str, path: str) -> bytes:
        """What to mix into the keys of a request of this adapter, empty where vLLM's own will do.

        Raises UnkeyedError; once raised for an adapter it always is, since what the engine holds of it is not known any more.
        """
        if self._trusted:
            return b""
        adapter = name, path
        if adapter not in self._refused:
            try:
                return self._salt(adapter)
            except (OSError, RuntimeError, UnkeyedError) as error:
                self._refused[adapter] = str(error)
                logger.warning(
                    "kvtier: requests of the LoRA adapter %r are neither stored nor loaded: %s. If adapters never change in place, set "
                    "trust_lora_paths=true",
                    name,
                    error,
                )
        raise UnkeyedError(self._refused[adapter])

    def _salt(self, adapter: tuple[str, str]) -> bytes:
        path = Path(adapter[1]).expanduser()
        if not path.is_dir():
            raise UnkeyedError(f"its path {str(path)!r} is no local directory, so that what it holds is not known")
        stamp, changed_ns = _stamp(path)
        known = self._known.get(adapter)
        if known is not None:
            if known[0] != stamp:
                raise UnkeyedError(
                    f"{path} changed while the engine runs, and which version it computes with is not known"
                )
            return known[1]
        if changed_ns >= self._started_ns:
            raise UnkeyedError(
                f"{path} changed after the engine had started, and which version it computes with is not known; after a restart it will be"
            )
        digest = hashlib.sha256()
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(path)}\0{file_fingerprint(file)}\0".encode())
        if _stamp(path)[0] != stamp:
            raise UnkeyedError(f"{path} changed while it was read")
        self._known[adapter] = stamp, digest.digest()
        return digest.digest()


class SaltedRequest:
    """A request of vLLM as it is, except that its block hashes are mixed with a salt."""

    def __init__(self, request: Any, salt: bytes) -> None:
        self._request = request
        self._salt = salt
        self._hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def plain(self) -> Any:
        """The request as vLLM knows it."""
        return self._request

    @property
    def block_hashes(self) -> list[bytes]:
        """As many as vLLM has by now, each as long as vLLM's."""
        for plain in self._request.block_hashes[len(self._hashes) :]:
            self._hashes.append(hashlib.sha256(self._salt + plain).digest()[: len(plain)])
        return self._hashes
