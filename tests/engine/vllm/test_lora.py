"""Which requests of LoRA adapters may be kept, and under which keys."""

import hashlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtier.engine.vllm.lora import Adapters, SaltedRequest, UnkeyedError

HOUR_S = 3600.0


def adapter(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path


def later() -> Adapters:
    """Of an engine that starts after everything that was written until now."""
    return Adapters(time.time() + HOUR_S)


def test_the_salt_is_of_what_the_files_hold(tmp_path: Path) -> None:
    first = adapter(tmp_path / "a")
    salt = later().salt("x", str(first))
    assert len(salt) == 32
    assert later().salt("x", str(first)) == salt, "the same after a restart"
    assert later().salt("y", str(adapter(tmp_path / "copy"))) == salt, "name and path are in vLLM's hashes already"
    (first / "adapter_model.safetensors").write_bytes(b"weightz")
    assert later().salt("x", str(first)) != salt
    (first / "adapter_model.safetensors").write_bytes(b"weights")
    assert later().salt("x", str(first)) == salt
    (first / "adapter_config.json").write_text('{"lora_alpha": 2}')
    assert later().salt("x", str(first)) != salt


def test_what_changes_while_the_engine_runs_is_not_kept_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = adapter(tmp_path / "a")
    adapters = later()
    assert adapters.salt("x", str(path)) == adapters.salt("x", str(path))
    content = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(b"retrained")
    for _ in range(3):
        with pytest.raises(UnkeyedError, match="changed while the engine runs"):
            adapters.salt("x", str(path))
    (path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(UnkeyedError):
        adapters.salt("x", str(path))
    assert caplog.text.count("neither stored nor loaded") == 1 and "trust_lora_paths" in caplog.text
    assert adapters.salt("other", str(adapter(tmp_path / "b")))


def swap_a_link(path: Path, other: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(other)
    shutil.rmtree(path)
    link.rename(path)


def swap_a_directory(path: Path, other: Path) -> None:
    shutil.rmtree(path)
    other.rename(path)


def swap_a_file(path: Path, other: Path) -> None:
    (other / "adapter_model.safetensors").rename(path / "adapter_model.safetensors")


@pytest.mark.parametrize("swap", [swap_a_link, swap_a_directory, swap_a_file])
@pytest.mark.parametrize("seen_before", [True, False])
def test_a_swap_with_old_times_is_seen(tmp_path: Path, swap: object, seen_before: bool) -> None:
    """The new adapter was trained long ago, says its modification time; only the swap is new."""
    path, other = adapter(tmp_path / "a"), adapter(tmp_path / "b", b"other weights")
    for file in (*path.iterdir(), *other.iterdir(), path, other):
        os.utime(file, (1_000_000, 1_000_000))
    # Change times cannot be set: wait until the clock that they are taken from has moved on.
    probe = tmp_path / "probe"
    probe.touch()
    until = probe.stat().st_ctime + 0.25
    while probe.stat().st_ctime < until:
        probe.touch()
    adapters = Adapters(probe.stat().st_ctime)
    if seen_before:
        adapters.salt("x", str(path))
    swap(path, other)  # type: ignore[operator]
    with pytest.raises(UnkeyedError, match="changed"):
        adapters.salt("x", str(path))


def test_what_is_new_or_elsewhere_is_not_kept_unless_trusted(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    with pytest.raises(UnkeyedError, match="after the engine had started"):
        Adapters(time.time() - HOUR_S).salt("x", str(path))
    with pytest.raises(UnkeyedError, match="no local directory"):
        later().salt("x", "org/adapter")
    for where in (str(path), "org/adapter"):
        assert Adapters(time.time() - HOUR_S, trusted=True).salt("x", where) == b""


def test_a_path_below_a_home_is_where_the_engine_takes_it_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves the ~ of `--lora-modules sql=~/adapters/sql` as it is, and vLLM looks below the home."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    path = adapter(home / "adapters" / "sql")
    adapter(elsewhere / "~" / "adapters" / "sql", b"of another")
    monkeypatch.setenv("HOME", str(home))
    salt = later().salt("sql", str(path))
    assert later().salt("sql", "~/adapters/sql") == salt
    monkeypatch.chdir(elsewhere)
    assert later().salt("sql", "~/adapters/sql") == salt
    with pytest.raises(UnkeyedError, match="home"):
        later().salt("sql", "~nobody-of-that-name/sql")


def test_hashes_are_mixed_and_grow_with_the_request() -> None:
    request = SimpleNamespace(block_hashes=[b"a" * 32, b"b" * 32], num_tokens=7, is_finished=lambda: False)
    one, other = SaltedRequest(request, b"salt"), SaltedRequest(request, b"other")
    assert one.block_hashes == [hashlib.sha256(b"salt" + plain).digest() for plain in request.block_hashes]
    assert not set(one.block_hashes) & set(other.block_hashes)
    before = list(one.block_hashes)
    request.block_hashes.append(b"c" * 16)
    assert one.block_hashes[:2] == before and [len(found) for found in one.block_hashes] == [32, 32, 16]
    request.num_tokens = 8
    assert one.num_tokens == 8 and not one.is_finished()
