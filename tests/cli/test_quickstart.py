"""The quickstart: its files, its checks, and that each check can fail."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import quickstart_demo as demo
from kvtier.cli.main import main


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
