"""The quickstart: its files, its checks, and that each check can fail."""

import asyncio
import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import quickstart_demo as demo
from kvtier.cli.main import main
from kvtier.record.envelope import Buffer, Identity
from kvtier.record.errors import RecordKeyError
from kvtier.tier.remote.channel import EncodedRecord, FetchedRecord, RecordChannel
from kvtier.tier.remote.connector import Status, StatusCode
from kvtier.tier.remote.memory import MemoryConnector


def run(output: Path, *arguments: str) -> int:
    return main(["quickstart", "--output", str(output), *arguments])


def test_it_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "demo"
    assert run(output) == 0
    assert sorted(path.name for path in output.iterdir()) == ["events.jsonl", "evidence.json", "summary.json"]
    summary = json.loads((output / "summary.json").read_text())
    assert set(summary) == {"arms"}
    assert set(summary["arms"]) == {"identity", "zstd"}
    for arm in summary["arms"].values():
        assert set(arm) == {"records"}
        assert {name: record["raw_bytes"] for name, record in arm["records"].items()} == {"state": 4096, "span": 8192}
        for record in arm["records"].values():
            assert set(record) == {
                "raw_bytes",
                "payload_bytes",
                "metadata_bytes",
                "framing_bytes",
                "stored_bytes",
                "raw_to_envelope_ratio",
            }
            assert (
                record["payload_bytes"] + record["metadata_bytes"] + record["framing_bytes"] == record["stored_bytes"]
            )
            assert record["raw_to_envelope_ratio"] == record["raw_bytes"] / record["stored_bytes"]
    assert summary["arms"]["identity"]["records"]["state"]["payload_bytes"] == 4096
    assert (
        summary["arms"]["identity"]["records"]["state"]["raw_to_envelope_ratio"]
        < 1
        < summary["arms"]["zstd"]["records"]["state"]["raw_to_envelope_ratio"]
    )
    assert "11 invariants held in 2 arms" in capsys.readouterr().out


def test_it_measures_eight_events_an_arm(tmp_path: Path) -> None:
    assert run(tmp_path / "demo") == 0
    lines = [json.loads(line) for line in (tmp_path / "demo" / "events.jsonl").read_text().splitlines()]
    for arm in ("identity", "zstd"):
        events = [line for line in lines if line["arm"] == arm]
        assert [(line["record"], line["stage"]) for line in events] == [
            (record, stage) for record in ("state", "span") for stage in ("encode", "store", "retrieve", "decode")
        ]
        ends = {line["id"]: line["end_ns"] for line in events}
        assert all(ends[other] <= line["start_ns"] for line in events for other in line["after"])
        assert [len(line["after"]) for line in events] == [0, 1, 1, 1] * 2
        assert all(line["stored_bytes"] > 0 for line in events)
    assert len(lines) == 16


def test_the_evidence_says_what_it_was_obtained_with(tmp_path: Path) -> None:
    assert run(tmp_path / "demo") == 0
    evidence = json.loads((tmp_path / "demo" / "evidence.json").read_text())
    assert evidence["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert set(evidence["dependencies"]) == {"msgspec", "numpy", "xxhash", "zstandard"}
    assert evidence["source"]["sha256"] == hashlib.sha256(Path(demo.__file__).read_bytes()).hexdigest()
    assert evidence["runs"] == {arm: {"events": 8, "dropped": 0, "valid": True} for arm in ("identity", "zstd")}
    assert evidence["failed"] is None


@pytest.mark.parametrize("name", demo.INVARIANTS)
def test_each_broken_invariant_is_named_and_is_exit_code_1(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "demo", "--break", name) == 1
    assert f"invariant failed: {name}:" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["evidence.json"]
    evidence = json.loads((tmp_path / "demo" / "evidence.json").read_text())
    assert evidence["failed"] == name
    assert evidence["invariants"]["identity"] == []


def test_every_check_has_its_sabotage_and_every_sabotage_its_check() -> None:
    source = Path(demo.__file__).read_text()
    for name in demo.INVARIANTS:
        assert source.count(f'"{name}"') >= 2, f"{name} is broken somewhere and checked nowhere"


def test_the_invariants_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "demo", "--break", "?") == 0
    assert capsys.readouterr().out.split() == list(demo.INVARIANTS)
    assert not (tmp_path / "demo").exists()
    assert run(tmp_path / "demo", "--break", "gravity") == 2
    assert "round_trip" in capsys.readouterr().err


def test_an_output_that_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty") == 0
    assert run(tmp_path / "empty") == 2
    assert "not empty" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert run(tmp_path / "file") == 2
    assert run(tmp_path / "file" / "below") == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_it_needs_no_engine_no_torch_and_no_numba(tmp_path: Path) -> None:
    code = (
        "import sys; from kvtier.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'vllm', 'numba', 'transformers', 'pytest', 'hypothesis'} & set(sys.modules); "
        "print(heavy, file=sys.stderr); sys.exit(code or len(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "quickstart", "--output", str(tmp_path / "demo")],
        env={"PYTHONPATH": str(Path(demo.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class DamagesWhatItStores(MemoryConnector):
    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        return await super().put_bytes(key, bytes(value)[:-1] + b"?")


class StoresNothing(MemoryConnector):
    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        return Status.ok()


class LosesItsConnection(MemoryConnector):
    async def get_bytes(self, key: bytes) -> Status[memoryview]:
        if key in (b"state", b"span"):  # under these names only the checks of the store's promises ask
            return Status.failed(StatusCode.TIMEOUT, "no answer")
        return await super().get_bytes(key)


class CannotLease(MemoryConnector):
    def owner(self, name: str) -> Any:
        raise RuntimeError("no leases here")


class CannotEncode(RecordChannel):
    def encode(self, identity: Identity, raw: Buffer) -> EncodedRecord:
        raise ValueError("no encoder here")


class NamesTheWrongThing(RecordChannel):
    def decode(self, fetched: FetchedRecord, out: memoryview | None = None) -> memoryview:
        if fetched.identity.generation != demo.GENERATION:
            raise RecordKeyError("another key")
        return super().decode(fetched, out)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (demo.Parts(connector=DamagesWhatItStores), "round_trip"),
        (demo.Parts(connector=StoresNothing), "round_trip"),
        (demo.Parts(channel=CannotEncode), "round_trip"),
        (demo.Parts(connector=LosesItsConnection), "duplicate_is_no_op"),
        (demo.Parts(connector=CannotLease), "protected_admission"),
        (demo.Parts(channel=NamesTheWrongThing), "wrong_generation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_a_broken_part_raises_the_promise_is_named_and_is_exit_code_1(
    parts: demo.Parts,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(demo._SABOTAGE, "round_trip", parts)
    assert run(tmp_path / "demo", "--break", "round_trip") == 1
    assert f"invariant failed: {named}:" in capsys.readouterr().err
    assert json.loads((tmp_path / "demo" / "evidence.json").read_text())["failed"] == named


def test_files_that_cannot_be_written_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not 1: nothing was found out about any promise."""

    def full(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    assert run(tmp_path / "demo") == 2
    assert "No space left" in capsys.readouterr().err
    assert run(tmp_path / "other", "--break", "round_trip") == 1, "what was found out counts for more"
    assert "invariant failed: round_trip" in capsys.readouterr().err


def test_a_stored_checksum_that_was_changed_is_found(tmp_path: Path) -> None:
    """The demo changes the payload and the sum that the head keeps of it; this is that it does."""
    changed: list[str] = []

    class Sees(RecordChannel):
        def decode(self, fetched: FetchedRecord, out: memoryview | None = None) -> memoryview:
            arm = demo.Arm("identity", demo.Parts())
            name = fetched.identity.key.decode()
            sound = arm.packed(name)
            where = [at for at, (one, other) in enumerate(zip(sound, fetched.record, strict=True)) if one != other]
            changed.append("payload" if where[0] >= len(sound) - len(demo.RECORDS[name]) else "head")
            return super().decode(fetched, out)

    asyncio.run(demo.corrupt_checksum(demo.Arm("identity", demo.Parts(channel=Sees))))
    assert changed.count("head") == len(demo.RECORDS)
    assert changed.count("payload") == 2 * len(demo.RECORDS)
