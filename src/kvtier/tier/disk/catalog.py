"""The durable index of a segment store: one SQLite database in WAL mode, one row a published part.

The catalog knows nothing of threads or of files' contents: the store's keeper thread owns the one writing connection and commits in
batches. A row's `id` grows for ever, so that a reader in another process can tell a part from a later one in the same place.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvtier.errors import StoreUnavailableError

CATALOG_VERSION = 1
APPLICATION_ID = 0x4B565431  # "KVT1"
CATALOG_NAME = "catalog.sqlite"
_Item = TypeVar("_Item")
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


def _in_powers_of_two(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Cut `items` into groups of 256, 128, … 1, so that few statements do the work and each of the nine is prepared once.

    Every statement lets go of the GIL: beside a busy Python thread a statement a row would cost milliseconds a row.
    """
    start = 0
    while start < len(items):
        size = min(256, 1 << (len(items) - start).bit_length() - 1)
        yield items[start : start + size]
        start += size


class CatalogCorruptError(Exception):
    """The database cannot be trusted: rebuild it."""


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    return sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5.0, cached_statements=64
    )


class Catalog:
    """An open catalog. Not thread-safe: one thread at a time.

    Raises:
        CatalogCorruptError: what is there is damaged.
        StoreUnavailableError: it is sound, but of another version.
    """

    def __init__(self, directory: Path, durability: str, *, read_only: bool = False) -> None:
        self.path = directory / CATALOG_NAME
        try:
            self._database = _connect(self.path, read_only=read_only)
        except sqlite3.OperationalError as exception:
            raise StoreUnavailableError(
                f"catalog {self.path} cannot be opened: {exception}; check its mode and its directory's"
            ) from exception
        try:
            self._open(durability, read_only=read_only)
        except sqlite3.DatabaseError as exception:
            self._database.close()
            if isinstance(exception, sqlite3.OperationalError) and "malformed" not in str(exception):
                raise StoreUnavailableError(f"catalog {self.path} cannot be opened: {exception}") from exception
            raise CatalogCorruptError(f"{self.path}: {exception}") from exception
        except BaseException:
            self._database.close()
            raise

    def _open(self, durability: str, *, read_only: bool) -> None:
        database = self._database
        application = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables == 0 and not read_only:
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
            "CREATE TABLE parts (id INTEGER PRIMARY KEY, key BLOB NOT NULL, segment INTEGER NOT NULL, slot INTEGER NOT NULL,"
            " stored_bytes INTEGER NOT NULL, head_hash INTEGER NOT NULL, depth_tokens INTEGER NOT NULL, value REAL NOT NULL,"
            " used INTEGER NOT NULL)"
        )
        database.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        database.execute(f"PRAGMA user_version={CATALOG_VERSION}")
        database.execute("COMMIT")

    def generation(self) -> int:
        """The generation whose parts the rows are, 0 where none was ever set."""
        row = self._database.execute("SELECT value FROM meta WHERE name='generation'").fetchone()
        return int(row[0]) if row else 0

    def rows(self, after_id: int = -1) -> Iterator[CatalogRow]:
        """Rows with an id above `after_id`, least recently used first."""
        return map(CatalogRow._make, self.raw_rows(after_id))

    def raw_rows(self, after_id: int = -1) -> Iterator[tuple[int, bytes, int, int, int, int, int, float, int]]:
        """The same rows as plain tuples, for who reads a million of them."""
        try:
            yield from self._database.execute(
                "SELECT id, key, segment, slot, stored_bytes, head_hash, depth_tokens, value, used FROM parts WHERE id > ? ORDER BY used",
                (after_id,),
            )
        except sqlite3.DatabaseError as exception:
            raise CatalogCorruptError(f"{self.path}: {exception}") from exception

    def place(self, row_id: int) -> tuple[int, int, bytes] | None:
        """Segment, slot and key of the row `row_id`, None once it is gone."""
        return self._database.execute("SELECT segment, slot, key FROM parts WHERE id=?", (row_id,)).fetchone()  # type: ignore[no-any-return]

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
        database.execute("BEGIN IMMEDIATE")
        try:
            for group in _in_powers_of_two(removed):
                database.execute(f"DELETE FROM parts WHERE id IN ({','.join('?' * len(group))})", group)
            for rows in _in_powers_of_two(added):
                values = ",".join(["(?,?,?,?,?,?,?,?,?)"] * len(rows))
                database.execute(f"INSERT INTO parts VALUES {values}", [value for row in rows for value in row])
            touched = list(used)
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
        return {name.removeprefix("state:"): float(value) for name, value in rows}

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
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the log is merged into the database if this was the last one."""
        self._database.close()


def set_aside(directory: Path) -> Path:
    """Rename a damaged catalog out of the way. Returns its new name."""
    path = directory / CATALOG_NAME
    target = directory / f"{CATALOG_NAME}.damaged-{time.time_ns():x}"
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    return target
