"""The namespace: all that must be equal for bytes to mean the same, and its readable manifest.

A namespace is a flat or nested dictionary of plain values. Its id is the first 16 bytes of the SHA-256 of their canonical JSON,
so that engines which agree on every value share their parts, and engines which differ in any share none. The manifest lies
beside the data and says in words why two engines do not share.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import StoreUnavailableError

NAMESPACE_BYTES = 16
MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Namespace:
    """`fields` name and value of everything that bytes depend on; values are what JSON can hold."""

    fields: Mapping[str, object]

    @property
    def id(self) -> bytes:
        """16 bytes, equal exactly where all fields are."""
        return hashlib.sha256(_canonical(self.fields)).digest()[:NAMESPACE_BYTES]

    def directory(self, root: Path) -> Path:
        """Where a store under `root` keeps this namespace."""
        return root / self.id.hex()


def _canonical(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def manifest_of(namespace: Namespace) -> dict[str, object]:
    """What a manifest says, as JSON has it."""
    return {"format": MANIFEST_FORMAT, "id": namespace.id.hex(), "fields": dict(namespace.fields)}


def write_manifest(namespace: Namespace, root: Path) -> Path:
    """Make the namespace's directory under `root` and put its manifest there. Returns the directory.

    Raises StoreUnavailableError where a manifest is there that says something else: then the directory was not made for it.
    """
    directory = namespace.directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / MANIFEST_NAME
    # An empty one says nothing: a power cut took what an earlier version wrote.
    if path.exists() and path.stat().st_size:
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise StoreUnavailableError(f"{path} is not JSON ({error}): move {directory} away, or delete it") from None
        if found != manifest_of(namespace):
            raise StoreUnavailableError(
                f"{path} belongs to another namespace or version of kvtier: move {directory} away, or delete it"
            )
        return directory
    text = json.dumps(manifest_of(namespace), indent=1)
    temporary = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    write_synced(temporary, text + "\n")
    temporary.replace(path)
    return directory


def write_synced(path: Path, text: str) -> None:
    """Write `text` to stable storage, so that a name given afterwards never shows an empty file after a power cut."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def file_fingerprint(path: Path, sample_bytes: int = 1 << 20) -> str:
    """Size and a hash of the first and the last `sample_bytes` of a file and of 256 pages between them.

    Two sets of weights differ in it, also where a merge left some layers as they were; copies do not.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(sample_bytes))
        inside = size - 2 * sample_bytes
        if inside > 0:
            for place in range(_SAMPLES):
                file.seek(sample_bytes + inside * place // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
        if size > sample_bytes:
            file.seek(max(sample_bytes, size - sample_bytes))
            digest.update(file.read())
    return digest.hexdigest()[:32]
