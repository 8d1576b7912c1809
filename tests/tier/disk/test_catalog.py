"""The catalog alone: one transaction a commit, and damage told from another version."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from kvtier.errors import StoreUnavailableError
from kvtier.tier.disk import catalog as catalog_module
from kvtier.tier.disk.catalog import (
    CATALOG_NAME,
    Catalog,
    CatalogCorruptError,
    CatalogRow,
    is_damage,
)


def row(number: int, used: int = 0) -> CatalogRow:
    return CatalogRow(number, b"key-%d" % number, 1, number, 4096, -number, 16 * number, 0.25, used or number)


def test_rows_come_back_longest_unused_first(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, "flush")
    rows = [row(1, 30), row(2, 10), row(3, 20)]
    catalog.commit(added=rows, removed=())
    assert list(catalog.rows()) == [rows[1], rows[2], rows[0]]
    catalog.commit(added=[row(4)], removed=[2, 99], used=[(40, 3)])
    assert [one.id for one in catalog.rows()] == [4, 1, 3]
    assert [one.id for one in catalog.rows(after_id=3)] == [4]
    assert catalog.place(4) == (1, 4, b"key-4")
    assert catalog.place(2) is None
    catalog.close()
    again = Catalog(tmp_path, "sync")
    assert [one.id for one in again.rows()] == [4, 1, 3]
    again.close()


def test_columns_are_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "_FETCH_ROWS", 7)
    with contextlib.closing(Catalog(tmp_path, "none")) as catalog:
        assert len(catalog.columns().ids) == len(catalog.columns().keys) == 0
        rows = [row(number, 1000 - number * number % 53) for number in range(1, 40)]
        rows.append(CatalogRow(99, b"", 2**32 - 1, 2**32 - 1, 2**63 - 1, -(2**63), 2**63 - 1, float("inf"), 5))
        catalog.commit(added=rows, removed=())
        columns = catalog.columns()
        found = [
            CatalogRow(row_id, key, *place, used)
            for row_id, key, place, used in zip(
                columns.ids.tolist(), columns.keys, columns.places.tolist(), columns.used.tolist(), strict=True
            )
        ]
        assert found == list(catalog.rows()) == sorted(rows, key=lambda one: one.used)


def test_a_commit_is_all_or_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, "none")
    catalog.commit(added=[row(n) for n in range(1, 400)], removed=())
    with pytest.raises(sqlite3.IntegrityError):
        catalog.commit(added=[row(1000), row(5)], removed=[1, 2, 3])
    assert {one.id for one in catalog.rows()} == set(range(1, 400))
    catalog.commit(added=[row(1000)], removed=list(range(1, 350)))
    assert {one.id for one in catalog.rows()} == {*range(350, 400), 1000}
    catalog.close()


@pytest.mark.parametrize("count", [0, 1, 2048, 2049, 5000])
def test_commits_of_any_size_are_few_statements_and_one_transaction(tmp_path: Path, count: int) -> None:
    catalog = Catalog(tmp_path, "none")
    statements: list[str] = []
    catalog._database.set_trace_callback(statements.append)
    rows = [row(number + 1) for number in range(count)]
    catalog.commit(added=rows, removed=())
    assert len(statements) <= 2 + -(-count // 2048)
    assert list(catalog.rows()) == rows
    catalog.commit(added=(), removed=[one.id for one in rows])
    assert list(catalog.rows()) == []
    catalog._database.set_trace_callback(None)
    with pytest.raises(sqlite3.IntegrityError):
        catalog.commit(added=[*rows, row(7), row(7)], removed=())
    assert list(catalog.rows()) == [], "all of a commit or nothing"
    catalog.close()


def test_a_reset_is_durable_and_complete(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, "none")
    catalog.commit(added=[row(1)], removed=())
    catalog.reset(7, "none")
    catalog.close()
    again = Catalog(tmp_path, "none")
    assert (again.generation(), list(again.rows())) == (7, [])
    again.close()


def test_state_is_replaced_whole(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, "none")
    catalog.reset(3, "none")
    catalog.save_state({"a": 1.5, "b": 2.0})
    catalog.save_state({"b": 3.25})
    assert catalog.saved_state() == {"b": 3.25}
    assert catalog.generation() == 3
    catalog.close()


def test_damage_and_versions_are_told_apart(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, "none")
    catalog.commit(added=[row(n) for n in range(1, 2000)], removed=())
    catalog.close()
    path = tmp_path / CATALOG_NAME
    content = path.read_bytes()
    path.write_bytes(b"\0" * 100 + content[100:])
    with pytest.raises(CatalogCorruptError):
        Catalog(tmp_path, "none")
    # A page in the middle: it opens, and reading tells.
    path.write_bytes(content[: 5 * 4096] + os.urandom(4096) + content[6 * 4096 :])
    catalog = Catalog(tmp_path, "none")
    with pytest.raises(CatalogCorruptError):
        list(catalog.rows())
    catalog.close()
    path.write_bytes(content)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA application_id=1")
    with pytest.raises(CatalogCorruptError, match="not a kvtier catalog"):
        Catalog(tmp_path, "none")
    path.unlink()
    with pytest.raises(StoreUnavailableError):
        Catalog(tmp_path, "none", read_only=True)


def test_only_what_says_damage_is_damage() -> None:
    assert is_damage(sqlite3.DatabaseError("database disk image is malformed"))
    assert is_damage(sqlite3.DatabaseError("file is not a database"))
    assert is_damage(sqlite3.OperationalError("malformed database schema (parts)"))
    assert not is_damage(sqlite3.OperationalError("database or disk is full"))
    assert not is_damage(sqlite3.IntegrityError("NOT NULL constraint failed: parts.key"))
    assert not is_damage(OSError(5, "Input/output error"))
