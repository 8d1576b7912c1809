"""The durable index of a segment store: one SQLite database in WAL mode, one row a published part.

The catalog knows nothing of threads or of files' contents: the store's keeper thread owns the one writing connection and commits in
batches. A row's `id` grows for ever, so that a reader in another process can tell a part from a later one in the same place.
"""

import contextlib
import math
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import StoreUnavailableError

CATALOG_VERSION = 2
APPLICATION_ID = 0x4B565431  # "KVT1"
CATALOG_NAME = "catalog.sqlite"
NEW_CATALOG_NAME = "catalog.sqlite.new"
DAMAGED_NAME = "catalog.sqlite.damaged"
_Item = TypeVar("_Item")
_ROWS_MAX = 2048
# How a row says where its part lies: one packed field, since each column of a million rows costs a tenth of a second to read.
_place = struct.Struct("<IIQqQd")
PLACE = np.dtype(
    [
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("stored_bytes", "<u8"),
        ("head_hash", "<i8"),
        ("depth_tokens", "<u8"),
        ("value_s_per_byte", "<f8"),
    ]
)
_FETCH_ROWS = 1 << 12
_SYNCHRONOUS = {"none": "OFF", "flush": "NORMAL", "sync": "FULL"}


class CatalogRow(NamedTuple):
    """One published part: where it lies, and what it is worth.

    Attributes:
        id: grows with every publication, never used twice.
        key: the part's name.
        segment: number of the segment file.
        slot: index of the slot in it.
        stored_bytes: length of the run that was written.
        head_hash: xxh3-64, as a signed number, of the run's last 512 bytes.
        depth_tokens: as given at the write.
        value_s_per_byte: as given at the write.
        used: sequence number of the last use that was written down.
    """

    id: int
    key: bytes
    segment: int
    slot: int
    stored_bytes: int
    head_hash: int
    depth_tokens: int
    value_s_per_byte: float
    used: int


@dataclass(slots=True)
class CatalogColumns:
    """Many rows, by column, longest unused first.

    Attributes:
        ids, used: as in `CatalogRow`, int64.
        keys: as in `CatalogRow`.
        places: the rest, packed as in `PLACE`.
    """

    ids: npt.NDArray[np.int64]
    keys: list[bytes]
    places: npt.NDArray[Any]
    used: npt.NDArray[np.int64]

    @classmethod
    def none(cls) -> "CatalogColumns":
        """No rows."""
        return cls(np.empty(0, np.int64), [], np.empty(0, PLACE), np.empty(0, np.int64))

    def take(self, rows: npt.NDArray[Any]) -> "CatalogColumns":
        """Those rows (numbers, or a flag for each), in their order."""
        keys = np.empty(len(self.keys), dtype=object)
        keys[:] = self.keys
        return CatalogColumns(self.ids[rows], keys[rows].tolist(), self.places[rows], self.used[rows])


def _in_few(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Cut `items` into groups that one statement takes each.

    Every statement lets go of the GIL, and beside a busy Python thread it takes milliseconds to have it back: few large statements, even though most have to be prepared
    anew, are several times faster then than a row, or a power of two of rows, each.
    """
    for start in range(0, len(items), _ROWS_MAX):
        yield items[start : start + _ROWS_MAX]


def _statements(removed: Sequence[int], added: Sequence[CatalogRow]) -> Iterator[tuple[str, Sequence[Any]]]:
    for group in _in_few(removed):
        yield f"DELETE FROM parts WHERE id IN ({','.join('?' * len(group))})", group
    for rows in _in_few(added):
        values = ",".join(["(?,?,?,?)"] * len(rows))
        yield (
            f"INSERT INTO parts VALUES {values}",
            [cell for row in rows for cell in (row.id, row.key, _place.pack(*row[2:8]), row.used)],
        )


class CatalogCorruptError(Exception):
    """The database cannot be trusted: rebuild it."""


def is_damage(error: Exception) -> bool:
    """Whether SQLite says that the database is damaged, not that it cannot be used now."""
    return type(error) is sqlite3.DatabaseError or (isinstance(error, sqlite3.Error) and "malformed" in str(error))


@contextlib.contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """SQLite's errors as ours: CatalogCorruptError for what is damaged, StoreUnavailableError for what is sound and cannot be used now."""
    try:
        yield
    except sqlite3.DatabaseError as exception:
        if is_damage(exception):
            raise CatalogCorruptError(f"{path}: {exception}") from exception
        raise StoreUnavailableError(f"catalog {path} cannot be opened: {exception}") from exception


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    return sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5.0, cached_statements=16
    )


class Catalog:
    """An open catalog. Not thread-safe: one thread at a time.

    Args:
        directory: where it is.
        durability: see the module of the segment store.
        read_only: it is another process's.
        name: of its file.
        create: make the tables where there are none, which is damage otherwise.

    Raises:
        CatalogCorruptError: what is there is damaged.
        StoreUnavailableError: it is sound, but of another version.
    """

    def __init__(
        self,
        directory: Path,
        durability: str,
        *,
        read_only: bool = False,
        name: str = CATALOG_NAME,
        create: bool = True,
    ) -> None:
        self.path = directory / name
        try:
            self._database = _connect(self.path, read_only=read_only)
        except sqlite3.OperationalError as exception:
            raise StoreUnavailableError(
                f"catalog {self.path} cannot be opened: {exception}; check its mode and its directory's"
            ) from exception
        try:
            with damage_told(self.path):
                self._open(durability, read_only=read_only, create=create)
            status = self.path.stat()
            self._file = (status.st_dev, status.st_ino)
        except BaseException:
            self._database.close()
            raise

    def _open(self, durability: str, *, read_only: bool, create: bool) -> None:
        database = self._database
        application = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables == 0 and create and not read_only:
            self._create()
        elif application != APPLICATION_ID:
            raise CatalogCorruptError(f"{self.path} is not a kvtier catalog (application id {application:#x})")
        elif version != CATALOG_VERSION:
            raise StoreUnavailableError(
                f"catalog {self.path} has version {version}, this kvtier reads version {CATALOG_VERSION}: use the kvtier that wrote it, "
                "another path, or remove the directory to start empty"
            )
        if not read_only:
            database.execute(f"PRAGMA synchronous={_SYNCHRONOUS[durability]}")
            database.execute("PRAGMA wal_autocheckpoint=4000")
        database.execute("PRAGMA cache_size=-16384")

    def _create(self) -> None:
        database = self._database
        database.execute("PRAGMA page_size=4096")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("BEGIN")
        database.execute(
            "CREATE TABLE parts (id INTEGER PRIMARY KEY, key BLOB NOT NULL, place BLOB NOT NULL, used INTEGER NOT NULL)"
        )
        database.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        database.execute(f"PRAGMA user_version={CATALOG_VERSION}")
        database.execute("COMMIT")

    def generation(self) -> int:
        """The generation whose parts the rows are, 0 where none was ever set."""
        row = self._database.execute("SELECT value FROM meta WHERE name='generation'").fetchone()
        if row is not None and not isinstance(row[0], int):
            raise CatalogCorruptError(f"{self.path}: the generation is {row[0]!r}")
        return row[0] if row else 0

    def rows(self, after_id: int = -1) -> Iterator[CatalogRow]:
        """Rows with an id above `after_id`, least recently used first."""
        query = "SELECT id, key, place, used FROM parts WHERE id > ? ORDER BY used"
        try:
            for row_id, key, place, used in self._database.execute(query, (after_id,)):
                segment, slot, stored_bytes, head_hash, depth_tokens, value = _place.unpack(place)
                yield CatalogRow(row_id, key, segment, slot, stored_bytes, head_hash, depth_tokens, value, used)
        except (sqlite3.DatabaseError, struct.error, TypeError) as exception:
            raise CatalogCorruptError(f"{self.path}: {exception}") from exception

    def columns(self) -> CatalogColumns:
        """All rows at once, for who reads a million of them."""
        ids: list[npt.NDArray[np.int64]] = []
        keys: list[bytes] = []
        places: list[bytes] = []
        used: list[npt.NDArray[np.int64]] = []
        try:
            cursor = self._database.execute("SELECT id, key, place, used FROM parts")
            while rows := cursor.fetchmany(_FETCH_ROWS):
                some_ids, some_keys, some_places, some_used = zip(*rows, strict=True)
                if set(map(len, some_places)) != {PLACE.itemsize}:
                    raise CatalogCorruptError(f"{self.path}: a row's place is not {PLACE.itemsize} bytes long")
                ids.append(np.array(some_ids, np.int64))
                keys += some_keys
                places += some_places
                used.append(np.array(some_used, np.int64))
        except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as exception:
            raise CatalogCorruptError(f"{self.path}: {exception}") from exception
        if not keys:
            return CatalogColumns.none()
        found = CatalogColumns(np.concatenate(ids), keys, np.frombuffer(b"".join(places), PLACE), np.concatenate(used))
        return found.take(np.argsort(found.used, kind="stable"))

    def place(self, row_id: int) -> tuple[int, int, bytes] | None:
        """Segment, slot and key of the row `row_id`, None once it is gone."""
        row = self._database.execute("SELECT place, key FROM parts WHERE id=?", (row_id,)).fetchone()
        if row is None:
            return None
        segment, slot, *_ = _place.unpack(row[0])
        return segment, slot, row[1]

    def commit(
        self,
        *,
        added: Sequence[CatalogRow],
        removed: Sequence[int],
        used: Iterable[tuple[int, int]] = (),
        forced: bool = False,
    ) -> None:
        """One transaction: delete the ids in `removed`, insert `added`, write down `used` as (sequence number, id).

        With `forced` it is on stable storage at return, whatever the durability.
        """
        database = self._database
        if forced:
            database.execute("PRAGMA synchronous=FULL")
        touched = list(used)
        statements = _statements(removed, added)
        if not touched and not (removed and added) and len(removed) + len(added) <= _ROWS_MAX:
            # One statement is a transaction by itself.
            for statement in statements:
                database.execute(*statement)
            return
        database.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                database.execute(*statement)
            if touched:
                database.executemany("UPDATE parts SET used=? WHERE id=?", touched)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def reset(self, generation: int, durability: str) -> None:
        """Make `generation` durable and drop every row, in one transaction on stable storage."""
        database = self._database
        database.execute("PRAGMA synchronous=FULL")
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM parts")
            database.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (generation,))
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        finally:
            database.execute(f"PRAGMA synchronous={_SYNCHRONOUS[durability]}")

    def saved_state(self) -> dict[str, float]:
        """What `save_state` wrote last."""
        rows = self._database.execute("SELECT name, value FROM meta WHERE name LIKE 'state:%'").fetchall()
        return {
            name.removeprefix("state:"): float(value)
            for name, value in rows
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def save_state(self, state: dict[str, float]) -> None:
        """Replace the store's own numbers."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute("DELETE FROM meta WHERE name LIKE 'state:%'")
            database.executemany(
                "INSERT INTO meta VALUES (?,?)", [(f"state:{name}", value) for name, value in state.items()]
            )
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def replaced(self) -> bool:
        """Whether another file has the name now: its owner made the catalog again."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self._file

    def stored_on_disk_bytes(self) -> int:
        """Bytes of the database and its write-ahead log."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            file = Path(f"{self.path}{suffix}")
            if file.exists():
                total += file.stat().st_size
        return total

    def compact(self) -> None:
        """Give free pages of the database back."""
        self._database.execute("VACUUM")
        self.merge_log()

    def merge_log(self) -> None:
        """Have everything in the one file, on stable storage where commits are."""
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the log is merged into the database if this was the last one."""
        self._database.close()
