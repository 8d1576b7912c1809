"""Namespaces are equal exactly where all their fields are; manifests protect directories."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import StoreUnavailableError
from kvtier.identity.namespace import Namespace, file_fingerprint, write_manifest

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
_FIELDS = st.dictionaries(st.text(max_size=3), _VALUES, max_size=4)


def test_the_id_is_fixed_for_ever() -> None:
    assert Namespace({"b": [1, None], "a": "x"}).id.hex() == "a8d71f64d3dc772b9eb4e657b383397a"


@given(_FIELDS, _FIELDS)
def test_ids_are_equal_exactly_where_fields_are(one: dict[str, object], two: dict[str, object]) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    assert (Namespace(one).id == Namespace(two).id) == same
    assert Namespace(dict(reversed(one.items()))).id == Namespace(one).id


def test_a_manifest_is_readable_and_is_kept(tmp_path: Path) -> None:
    namespace = Namespace({"model": "tiny", "rank": 0})
    directory = write_manifest(namespace, tmp_path)
    assert directory == tmp_path / namespace.id.hex()
    text = (directory / "manifest.json").read_text()
    assert json.loads(text)["fields"] == {"model": "tiny", "rank": 0}
    write_manifest(namespace, tmp_path)
    assert (directory / "manifest.json").read_text() == text
    assert [path.name for path in directory.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("content", ["{", '{"format": 99}', '{"format": 1, "fields": {"model": "other"}}', "[]"])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    namespace = Namespace({"model": "tiny"})
    directory = namespace.directory(tmp_path)
    directory.mkdir()
    (directory / "manifest.json").write_text(content)
    with pytest.raises(StoreUnavailableError, match="move .* away"):
        write_manifest(namespace, tmp_path)
    assert (directory / "manifest.json").read_text() == content


def test_a_manifest_is_on_the_medium_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        assert os.fstat(fd).st_size > 0
        assert not list(tmp_path.rglob("manifest.json"))

    monkeypatch.setattr(os, "fsync", sync)
    write_manifest(Namespace({"model": "tiny"}), tmp_path)
    assert synced


def test_an_empty_manifest_is_written_again(tmp_path: Path) -> None:
    namespace = Namespace({"model": "tiny"})
    directory = namespace.directory(tmp_path)
    directory.mkdir()
    (directory / "manifest.json").write_bytes(b"")
    write_manifest(namespace, tmp_path)
    assert json.loads((directory / "manifest.json").read_text())["id"] == namespace.id.hex()


def test_file_fingerprints_see_size_start_and_end(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    prints = set()
    for content in (b"a" * 100, b"a" * 101, b"b" + b"a" * 99, b"a" * 99 + b"b", b""):
        path.write_bytes(content)
        prints.add(file_fingerprint(path, sample_bytes=10))
    assert len(prints) == 5
    copy = tmp_path / "copy"
    copy.write_bytes(b"")
    assert file_fingerprint(copy) == file_fingerprint(path)


def test_file_fingerprints_see_changes_inside(tmp_path: Path) -> None:
    # As where an adapter was merged into some layers: head, tail and size stay.
    content = bytearray(os.urandom(300_000))
    path = tmp_path / "weights"
    path.write_bytes(content)
    before = file_fingerprint(path, sample_bytes=1000)
    for start in range(2000, 290_000, 50_000):
        changed = bytearray(content)
        changed[start : start + 8000] = bytes(8000)
        path.write_bytes(changed)
        assert file_fingerprint(path, sample_bytes=1000) != before
