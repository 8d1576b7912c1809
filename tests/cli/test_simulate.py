"""`kvtier simulate` from the outside."""

import json
from pathlib import Path

import pytest

from kvtier.cli.main import main

DATA = Path(__file__).parents[1] / "data"
TRACE = str(DATA / "synthetic_trace.jsonl.xz")


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main(
        f"simulate {TRACE} --requests 300 --policy lru,min,infinite --capacity-blocks 100,1000 --json {out}".split()
    )
    assert code == 0
    rows = json.loads(out.read_text())
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        ("lru", 100), ("lru", 1000), ("min", 100), ("min", 1000), ("infinite", 0),
    ]  # fmt: skip
    assert {"trace", "policy", "capacity_blocks", "hit_rate", "seconds"} <= set(rows[0])
    assert rows[0]["trace"] == "synthetic_trace"
    rates = {(row["policy"], row["capacity_blocks"]): row["hit_rate"] for row in rows}
    assert rates["lru", 100] <= rates["min", 100] <= rates["min", 1000] <= rates["infinite", 0]
    assert f"{rates['min', 1000]:.4f}" in capsys.readouterr().out


def test_tiers_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        f"simulate {TRACE} --requests 300 --policy lru,min --dram 20GB --disk 200GB --json {tmp_path}/o.json --report {tmp_path}/page".split()
    )
    assert code == 0
    (row,) = json.loads((tmp_path / "o.json").read_text())
    assert row["policy"] == "lru" and row["disk_bytes"] == 200_000_000_000 and row["hit_rate"] > 0
    assert "<svg" in (tmp_path / "page" / "index.html").read_text()
    assert "The next 100 GB of disk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--policy", "mru"], "policy 'mru' is not known: use arc, fifo"),
        (["--capacity-blocks", "0"], "a tier of 0 blocks can hold nothing"),
        (["--capacity-blocks", "many"], "'many' is not a number of blocks"),
        (["--dram", "lots"], "--dram is 'lots'"),
        (["--dram", "1MB"], "no room for one block"),
        (["--dram", "1GB", "--engines", "-1"], "--engines is -1"),
        (["--format", "csv"], "trace format 'csv' is not known"),
        (["--requests", "0"], "--requests is 0"),
        (
            ["--json", "/nowhere/at/all.json", "--requests", "5", "--policy", "lru"],
            "/nowhere/at/all.json: No such file",
        ),
    ],
)
def test_bad_arguments(arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", TRACE, *arguments]) == 2
    assert wrong in capsys.readouterr().err


def test_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    path.write_text(good + "nonsense\n" + good)
    base = ["simulate", str(path), "--policy", "lru", "--capacity-blocks", "5"]
    assert main(base) == 2
    assert "t.jsonl, line 2:" in capsys.readouterr().err
    assert main([*base, "--skip-bad"]) == 0
    assert "1 bad lines skipped" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["empty.jsonl", "nowhere.jsonl"])
def test_no_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert main(["simulate", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err
